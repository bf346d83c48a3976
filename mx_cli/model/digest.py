"""Digests of tensors: xxh3-128 of each 4 MiB block, counted from the tensor's own start.

Blocks that start with the tensor make the digests independent of the file that a tensor lies in, so re-sharded copies
agree. They catch damage, not malice: xxh3 is not collision-resistant.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import xxhash

from mx_cli.base.errors import IntegrityError
from mx_cli.model import header
from mx_cli.model.manifest import BLOCK

FILE_DTYPE = "file"


class TensorDigest(NamedTuple):
    """One row of a tensor table. `blocks`: 32 hex digits for each 4 MiB, none for an empty tensor.

    Weights that are not safetensors make one row for each file: its path in the checkpoint, dtype `file`, shape
    (size,), and the blocks of the whole file.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    blocks: tuple[str, ...]

    def to_json(self) -> list[Any]:
        return [self.name, self.dtype, list(self.shape), list(self.blocks)]

    @classmethod
    def from_json(cls, row: Any) -> TensorDigest:
        name, dtype, shape, blocks = row
        return cls(str(name), str(dtype), tuple(map(int, shape)), tuple(map(str, blocks)))


class Digester(Protocol):
    """Takes a file's bytes from its start to its end, in any pieces; then gives its rows, and where each starts in the file."""

    def update(self, data: memoryview) -> None: ...
    def finish(self) -> tuple[TensorDigest, ...]: ...
    @property
    def starts(self) -> Sequence[int]: ...


def digester(path: str, size: int) -> Digester:
    """The digester for a weight file: by tensor for safetensors, by file for all others."""
    return TensorDigester(path, size) if path.endswith(".safetensors") else FileDigester(path, size)


class TensorDigester:
    """Rows of a safetensors file. Raises the header's IntegrityError as soon as the header is complete, or can't be.

    Holds the header and the rows, never data: views are hashed where they are and not kept.
    """

    def __init__(self, name: str, size: int) -> None:
        self.name, self.size = name, size
        self.header: header.Header | None = None
        self._position = 0
        self._head = bytearray()
        self._wanted = min(header.SNIFF_BYTES, size)
        self._rows: list[TensorDigest] = []
        self._at = 0
        self._blocks = _Blocks()

    def update(self, data: memoryview) -> None:
        self._position += len(data)
        if self._position > self.size:
            raise _wrong_size(self.name, self._position, self.size)
        if self.header is None:
            self._take_header(data)
        else:
            self._take_tensors(self.header.tensors, data)

    def finish(self) -> tuple[TensorDigest, ...]:
        self.update(memoryview(b""))
        if self._position != self.size:
            raise _wrong_size(self.name, self._position, self.size)
        return tuple(self._rows)

    @property
    def starts(self) -> Sequence[int]:
        return [tensor.start for tensor in self.header.tensors] if self.header else []

    def _take_header(self, data: memoryview) -> None:
        """Gather the header, then go on with what follows it."""
        while self.header is None:
            missing = self._wanted - len(self._head)
            self._head += data[:missing]
            data = data[missing:]
            if len(self._head) < self._wanted:
                return
            head = bytes(self._head)
            self._wanted = max(self._wanted, header.header_length(head, self.size, self.name))
            if len(head) == self._wanted:
                self.header = header.parse_header(head, self.size, self.name)
                self._take_tensors(self.header.tensors, memoryview(head)[self.header.data_start :])
                self._take_tensors(self.header.tensors, data)
        self._head = bytearray()

    def _take_tensors(self, tensors: tuple[header.Tensor, ...], data: memoryview) -> None:
        start, end = 0, len(data)
        at, rows, blocks = self._at, self._rows, self._blocks
        while at < len(tensors):
            name, dtype, shape, first, stop = tensors[at]
            missing = stop - first - blocks.taken
            if missing > end - start:
                blocks.update(data[start:])
                break
            if blocks.taken or missing > BLOCK:
                blocks.update(data[start : start + missing])
                digests = blocks.finish()
            else:
                digests = (xxhash.xxh3_128_hexdigest(data[start : start + missing]),) if missing else ()
            rows.append(TensorDigest(name, dtype, shape, digests))
            start += missing
            at += 1
        self._at = at


class FileDigester:
    """The one row of a weight file in another format than safetensors."""

    starts = (0,)

    def __init__(self, path: str, size: int) -> None:
        self.path, self.size = path, size
        self._position = 0
        self._head = b""
        self._blocks = _Blocks()

    def update(self, data: memoryview) -> None:
        wanted = min(header.SNIFF_BYTES, self.size)
        if len(self._head) < wanted:
            self._head += bytes(data[: wanted - len(self._head)])
            if len(self._head) == wanted:
                header.check_payload(self.path, self._head, self.size)
        self._position += len(data)
        if self._position > self.size:
            raise _wrong_size(self.path, self._position, self.size)
        self._blocks.update(data)

    def finish(self) -> tuple[TensorDigest, ...]:
        if self._position != self.size:
            raise _wrong_size(self.path, self._position, self.size)
        if not self.size:
            header.check_payload(self.path, b"", 0)
        return (TensorDigest(self.path, FILE_DTYPE, (self.size,), self._blocks.finish()),)


class _Blocks:
    """Digests of 4 MiB blocks of one run of bytes."""

    def __init__(self) -> None:
        self.taken = 0
        self._digests: list[str] = []
        self._state = xxhash.xxh3_128()

    def update(self, data: memoryview) -> None:
        start, end = 0, len(data)
        while start < end:
            inside = self.taken % BLOCK
            piece = data[start : start + BLOCK - inside]
            size = len(piece)
            if size == BLOCK:
                self._digests.append(xxhash.xxh3_128_hexdigest(piece))
            else:
                self._state.update(piece)
                if inside + size == BLOCK:
                    self._digests.append(self._state.hexdigest())
                    self._state.reset()
            self.taken += size
            start += size

    def finish(self) -> tuple[str, ...]:
        if self.taken % BLOCK:
            self._digests.append(self._state.hexdigest())
            self._state.reset()
        digests = tuple(self._digests)
        self.taken = 0
        self._digests = []
        return digests


def _wrong_size(name: str, seen: int, size: int) -> IntegrityError:
    return IntegrityError(f"wrong size ({name}: {seen} bytes seen, expected {size})")
