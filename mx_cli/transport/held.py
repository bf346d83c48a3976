"""Weights that this process offers: where they lie, and how their bytes leave by the path `socket`."""

from __future__ import annotations

import base64
import hashlib
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from mx_cli.base.errors import NotFound
from mx_cli.base.oserrors import explain
from mx_cli.engine.buffers import at_address
from mx_cli.model.holding import HOST, Extent, Extents, Holding

if TYPE_CHECKING:
    from mx_cli.transport.nixl import Agent

STEP = 1 << 20

CopyOut = Callable[[Extent, memoryview], None]
"""Copies an extent of a GPU's memory into host memory of the same length. Blocks until it is there."""


class Held(Protocol):
    """What is offered, and how to get at it. Thread-safe."""

    device: str

    def access(self) -> dict[str, Any]:
        """What a grant tells its reader: the paths and, for `nixl-read`, the capability. To be kept secret."""

    def read(self, file: str, offset: int, length: int) -> Iterator[memoryview]:
        """The bytes of a piece of a file; each view is good until the next is asked for. Raises NotFound.

        A read that has begun goes on to its end, also past `close`.
        """

    def close(self) -> None:
        """Give the memory back: no grant is open any more. Idempotent."""


class OnDisk:
    """Files of a directory. They are open for as long as they are offered: who removes them does not disturb readers."""

    device = "file"

    def __init__(self, directory: Path, holding: Holding) -> None:
        """Raises NotFound and FilesystemRefused when a file cannot be opened."""
        self._lock = threading.Lock()
        self._fds: dict[str, int] = {}
        self._sizes = {record.path: record.size for record in holding.manifest.files}
        for path in self._sizes:
            try:
                self._fds[path] = os.open(directory / path, os.O_RDONLY | os.O_CLOEXEC)
            except OSError as error:
                self.close()
                raise explain(error, f"opening {directory / path}") from None

    def access(self) -> dict[str, Any]:
        return {"paths": ["socket"], "nixl": None}

    def read(self, file: str, offset: int, length: int) -> Iterator[memoryview]:
        if not 0 <= offset <= offset + length <= self._sizes.get(file, -1):
            raise NotFound(f"no such bytes: {file}, {length} from {offset}")
        fd = self._own(file)
        try:
            size = os.fstat(fd).st_size
        finally:
            os.close(fd)
        if size != self._sizes[file]:
            raise NotFound(f"{file} has changed since it is offered ({size} bytes, it had {self._sizes[file]})")
        return self._pieces(file, offset, length)

    def _pieces(self, file: str, offset: int, length: int) -> Iterator[memoryview]:
        fd = self._own(file)
        try:
            buffer = memoryview(bytearray(min(STEP, length)))
            while length > 0:
                count = os.preadv(fd, [buffer[:length]], offset)
                if count == 0:
                    raise NotFound(f"{file}: shorter than it was ({offset} bytes)")
                yield buffer[:count]
                offset, length = offset + count, length - count
        finally:
            os.close(fd)

    def _own(self, file: str) -> int:
        """A descriptor of the reader's own: the number of one that is closed may be another file's."""
        with self._lock:
            if file not in self._fds:
                raise NotFound(f"{file} is not offered any more")
            return os.dup(self._fds[file])

    def close(self) -> None:
        with self._lock:
            while self._fds:
                os.close(self._fds.popitem()[1])


class InMemory:
    """Weights in this process's memory, registered with an agent where there is one.

    `keep` holds the references that keep the memory alive and mapped. `lent`: others can take it away all the same (a
    storage is resized, a mapped file is shortened), so it is read in a way that can fail.
    """

    def __init__(
        self,
        device: str,
        extents: Sequence[Extent],
        keep: object,
        agent: Agent | None,
        copy_out: CopyOut | None = None,
        *,
        lent: bool = False,
    ) -> None:
        self.device = device
        self._lent = lent
        self._rows = extents
        self._extents = Extents(extents)
        self._keep = keep
        self._agent = agent
        self._copy_out = copy_out

    def access(self) -> dict[str, Any]:
        if self._agent is None:
            return {"paths": ["socket"], "nixl": None}
        from mx_cli.transport.nixl import ucx_version

        blob = self._agent.blob()
        capability = {
            "name": self._agent.name,
            "blob": base64.b64encode(blob).decode(),
            "digest": hashlib.sha256(blob).hexdigest(),
            "ucx": ucx_version(),
            "extents": [list(extent) for extent in self._rows],
        }
        return {"paths": ["nixl-read", "socket"], "nixl": capability}

    def read(self, file: str, offset: int, length: int) -> Iterator[memoryview]:
        return self._pieces(self._keep, file, offset, length)

    def _pieces(self, keep: object, file: str, offset: int, length: int) -> Iterator[memoryview]:
        """`keep` is held until the last piece has gone: addresses alone keep nothing."""
        if keep is None:
            raise NotFound(f"{file} is not offered any more")
        for extent in self._extents.cut(file, offset, offset + length):
            if extent.device == HOST:
                yield from _read_carefully(extent) if self._lent else _views(extent)
            else:
                yield from self._copied(extent)

    def _copied(self, extent: Extent) -> Iterator[memoryview]:
        assert self._copy_out is not None, "GPU memory is offered with a way to copy it"
        buffer = memoryview(bytearray(min(STEP, extent.length)))
        for at in range(0, extent.length, STEP):
            length = min(STEP, extent.length - at)
            piece = extent._replace(offset=extent.offset + at, length=length, address=extent.address + at)
            self._copy_out(piece, buffer[:length])
            yield buffer[:length]

    def close(self) -> None:
        if self._agent:
            self._agent.destroy()
            self._agent = None
        self._keep = None


def _views(extent: Extent) -> Iterator[memoryview]:
    view = at_address(extent.address, extent.length)
    return (view[at : at + STEP] for at in range(0, extent.length, STEP))


def _read_carefully(extent: Extent) -> Iterator[memoryview]:
    """Copies of host memory. Raises NotFound where there is none any more: reading that directly would end the process."""
    try:
        fd = os.open("/proc/self/mem", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        # Closed in some sandboxes, and to a process that may not be dumped.
        yield from _views(extent)
        return
    try:
        buffer = memoryview(bytearray(min(STEP, extent.length)))
        for at in range(0, extent.length, STEP):
            piece = buffer[: min(STEP, extent.length - at)]
            try:
                count = os.preadv(fd, [piece], extent.address + at)
            except OSError:
                count = 0
            if count < len(piece):
                raise NotFound(f"{extent.file}: its memory was taken away since it is offered")
            yield piece
    finally:
        os.close(fd)
