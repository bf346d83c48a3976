"""Path `gds`: files of this machine from the disk into a GPU's memory, past the host's (GPUDirect Storage).

It is tried, not believed: NIXL's backend must start, and one block of each file must come through it as it stands in the
file. What does not (a file, from its opening or from a failing read on) comes by path `disk`; so do pieces that are in
the page cache already, small ones, and a file's end, which is no whole block.

Blocks land in a few buffers that are registered once, and are copied from there to where they belong: weights may lie
anywhere in their file's blocks, a GPU has room for few registered bytes, and cuFile is slow anywhere but at the
beginning of what was registered.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib.util
import itertools
import mmap
import os
import queue
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from mx_cli.base import filesystem
from mx_cli.base.errors import MissingCapability, MxError, StillLanding, TransportFailed
from mx_cli.engine.buffers import never_free
from mx_cli.engine.ports import Memory, ReadItem
from mx_cli.engine.threads import Flight
from mx_cli.transport import cuda, nixl_env
from mx_cli.transport.disk import BLOCK, LEAST_DIRECT, LEAVE, MOSTLY, Disk, OpenFile
from mx_cli.transport.inside import Inside
from mx_cli.transport.nixl_files import GDS, FileAgent
from mx_cli.transport.peer import ITEM, Landed, not_told

BUFFER = ITEM + 2 * BLOCK
"""Bytes: an item, and the rest of the blocks that it begins and ends in."""
CUFILE = "libcufile.so.0"
POLL = 0.2

_names = itertools.count(1)


class Landing(Protocol):
    """The buffers that blocks land in, of one kind of memory. `addresses` of BUFFER bytes each, at multiples of BLOCK."""

    @property
    def addresses(self) -> Sequence[int]: ...

    def copy(self, source: int, target: int, length: int) -> None:
        """From a buffer to any memory of the same kind. Blocks until it is there."""

    def peek(self, address: int, length: int) -> bytes:
        """What stands in a buffer."""


class OnGpu:
    """Buffers of a GPU's memory. Raises MissingCapability, NoSpace."""

    def __init__(self, count: int, device: int) -> None:
        from mx_cli.transport import on_gpu

        self._device = device
        self._block = on_gpu.allocate(device, count * BUFFER + BLOCK)
        first = -(-int(self._block.data_ptr()) // BLOCK) * BLOCK
        self.addresses = [first + index * BUFFER for index in range(count)]

    def copy(self, source: int, target: int, length: int) -> None:
        from mx_cli.transport import on_gpu

        on_gpu.copy_within(self._device, source, target, length)

    def peek(self, address: int, length: int) -> bytes:
        from mx_cli.transport import on_gpu

        return on_gpu.bytes_at(self._device, address, length)


class Gds:
    """A path over another one: what can go past the host's memory does, and the rest goes by `disk`. See `Path`.

    `agent` reads into memory like that of `landing`, on `device`. `notice` is told why a file does not.
    """

    name = "gds"

    def __init__(
        self, disk: Disk, agent: FileAgent, landing: Landing, device: int, notice: Callable[[str], None]
    ) -> None:
        """Raises TransportFailed when the buffers cannot be registered."""
        self.window, self.ahead, self.least_part = disk.window, disk.ahead, disk.least_part
        self._disk, self._agent, self._landing, self._device = disk, agent, landing, device
        self._notice = notice
        self._inside = Inside()
        self._free: queue.SimpleQueue[int] = queue.SimpleQueue()
        for address in landing.addresses:
            agent.register(address, BUFFER)
            self._free.put(address)
        self._opening = {path: threading.Lock() for path in disk.files}
        self._opened: dict[str, int | None] = {}

    def bring(self, item: ReadItem, dest: Memory, flight: Flight, landed: Landed = not_told) -> None:
        file = self._disk.files[item.entry.path]
        with self._inside.entered(item.entry.path):
            blocks, rest = _whole_blocks(item, dest, file.size)
            if not (
                blocks and self._suits(file, item, blocks, dest.device) and self._by_blocks(file, item, blocks, flight)
            ):
                rest = dest.parts
        if rest:
            self._disk.bring(item, Memory(rest, dest.device, dest.put), flight)

    def _suits(self, file: OpenFile, item: ReadItem, parts: Sequence[tuple[int, int, int]], device: int) -> bool:
        """Whether these parts are of the right memory, worth it, and not in the page cache."""
        begin, end = _reach(item, parts)
        wanted = sum(length for _, length, _ in parts)
        if device != self._device or not LEAST_DIRECT <= end - begin <= BUFFER or 2 * wanted < end - begin:
            return False
        return filesystem.cached(file.fd, begin, end - begin) < MOSTLY * (end - begin)

    def _by_blocks(self, file: OpenFile, item: ReadItem, parts: Sequence[tuple[int, int, int]], flight: Flight) -> bool:
        """Whether the parts came. Raises OriginChanged, and TransportFailed when it is given up."""
        given_up = False

        def asked() -> bool:
            nonlocal given_up
            given_up = flight.aborted or self._inside.closed
            return given_up

        buffer = self._buffer(file, asked)
        try:
            with file.used():
                fd = self._open(item.entry.path, file, buffer, asked)
                if fd is None:
                    return False
                begin, end = _reach(item, parts)
                self._agent.read(fd, begin, buffer, end - begin, asked)
                for offset, length, address in parts:
                    self._landing.copy(buffer + item.offset + offset - begin, address, length)
                file.check()
        except TransportFailed as error:
            if given_up:
                raise TransportFailed(f"{file.path}: given up") from None
            self._refuse(item.entry.path, file, error.what)
            return False
        finally:
            # Bytes of a read that was given up may land in its buffer until the agent has ended.
            if not given_up:
                self._free.put(buffer)
        return True

    def _buffer(self, file: OpenFile, given_up: Callable[[], bool]) -> int:
        """One that is free: there are fewer of them after reads that were given up."""
        while not given_up():
            with contextlib.suppress(queue.Empty):
                return self._free.get(timeout=POLL)
        raise TransportFailed(f"{file.path}: given up")

    # -- files ---------------------------------------------------------------------------------------------------

    def _open(self, path: str, file: OpenFile, buffer: int, given_up: Callable[[], bool]) -> int | None:
        """The descriptor to read by; None for a file that was refused. Raises TransportFailed for one that is now."""
        with self._opening[path]:
            if path not in self._opened:
                self._opened[path] = _proved(self._agent, self._landing, buffer, file, given_up)
            return self._opened[path]

    def _refuse(self, path: str, file: OpenFile, why: str) -> None:
        with self._opening[path]:
            if self._opened.get(path, 0) is not None:
                self._notice(f"{file.path}: through host memory (gds: {why})")
            self._opened[path] = None

    # -- as the other path ---------------------------------------------------------------------------------------

    def buffer(self) -> int:
        return self._disk.buffer()

    def give_back(self, address: int) -> None:
        self._disk.give_back(address)

    def close(self) -> None:
        self._inside.close(LEAVE)
        try:
            self._agent.close(LEAVE)
        except StillLanding:
            never_free(self)
            raise
        finally:
            self._disk.close()


def _whole_blocks(
    item: ReadItem, dest: Memory, size: int
) -> tuple[list[tuple[int, int, int]], tuple[tuple[int, int, int], ...]]:
    """The parts cut in two: what lies in whole blocks of the file, and its end."""
    end = size // BLOCK * BLOCK - item.offset
    before = [(offset, min(length, end - offset), address) for offset, length, address in dest.parts if offset < end]
    after = tuple(
        (max(offset, end), offset + length - max(offset, end), address + max(0, end - offset))
        for offset, length, address in dest.parts
        if offset + length > end
    )
    return before, after


def _reach(item: ReadItem, parts: Sequence[tuple[int, int, int]]) -> tuple[int, int]:
    """The blocks of the file that hold the parts, as bytes of it."""
    first, last = item.offset + parts[0][0], item.offset + parts[-1][0] + parts[-1][1]
    return first // BLOCK * BLOCK, -(-last // BLOCK) * BLOCK


# --- whether it can be used -------------------------------------------------------------------------------------------


def lacking() -> list[str]:
    """What there is not of what it takes, in words; nothing is started. Loads cuFile's library where it is."""
    found = []
    if cuda.device_count() == 0:
        found.append("no CUDA device")
    if not _load_cufile():
        found.append("libcufile missing")
    if reason := nixl_env.missing():
        found.append(reason)
    return found


@functools.cache
def _load_cufile() -> bool:
    """Loads it for all, since NIXL's backend looks for it by name and does not know Python's packages."""
    places = [CUFILE]
    spec = importlib.util.find_spec("nvidia")
    for parent in (spec.submodule_search_locations or ()) if spec else ():
        places += map(str, sorted(Path(parent).glob(f"*/lib/{CUFILE}")))
    for place in places:
        try:
            ctypes.CDLL(place, mode=ctypes.RTLD_GLOBAL)
        except OSError:
            continue
        return True
    return False


def open_gds(disk: Disk, device: int, notice: Callable[[str], None]) -> Gds:
    """The path over `disk` into GPU `device`. Raises MissingCapability, TransportFailed, which say what is lacking."""
    if reasons := lacking():
        raise MissingCapability(", ".join(reasons))
    cuda.make_context(device)
    agent = FileAgent(_name(), GDS, device)
    try:
        return Gds(disk, agent, OnGpu(disk.window, device), device, notice)
    except BaseException:
        agent.close(LEAVE)
        raise


def over(disk: Disk, device: int, notice: Callable[[str], None]) -> Disk | Gds:
    """The best path for files into GPU `device`: by way of the host's memory where there is no other. Tells why."""
    try:
        return open_gds(disk, device, notice)
    except MxError as error:
        notice(f"files go through host memory (gds: {error.what})")
        return disk


def verdict(device: int = 0, file: Path | None = None) -> str:
    """Why files cannot go straight into GPU `device` ("no CUDA device, libcufile missing"); "" when they can.

    `file`: one that is tried, by reading a block of it. Blocks for a second where there is a GPU. Raises nothing.
    """
    try:
        if reasons := lacking():
            return ", ".join(reasons)
        cuda.make_context(device)
        agent = FileAgent(_name(), GDS, device)
        try:
            if file:
                _try(agent, OnGpu(1, device), file)
            return ""
        finally:
            agent.close(LEAVE)
    except MxError as error:
        return error.what


def _try(agent: FileAgent, landing: Landing, file: Path) -> None:
    """Raises TransportFailed unless a block of the file comes; the smallest files have none."""
    opened = OpenFile(file)
    try:
        if opened.size >= BLOCK:
            agent.register(landing.addresses[0], BUFFER)
            _proved(agent, landing, landing.addresses[0], opened, lambda: False)
    finally:
        opened.close()


def _proved(agent: FileAgent, landing: Landing, buffer: int, file: OpenFile, given_up: Callable[[], bool]) -> int:
    """The descriptor to read the file by: its first block has come through it as it stands there. Raises TransportFailed."""
    block = memoryview(mmap.mmap(-1, BLOCK))
    try:
        fd = file.direct(block)
    except OSError as error:
        raise TransportFailed(f"O_DIRECT does not work here ({file.kind}: {error.strerror})") from None
    agent.open(fd, file.size)
    agent.read(fd, 0, buffer, BLOCK, given_up)
    if landing.peek(buffer, BLOCK) != bytes(block):
        raise TransportFailed("a block came with other bytes than the file has")
    return fd


def _name() -> str:
    return f"mx-files-{os.getpid()}-{next(_names)}"
