"""A source and a sink in memory, with faults on command: the engine's other adapters, for fast tests."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import xxhash

from mx_cli.base.errors import MxError
from mx_cli.engine.ports import Block, Dest, Host, NoRanges, ReadItem, SourceCaps
from mx_cli.model.manifest import Entry

Fault = Callable[[ReadItem, int], Exception | None]
"""(item, which open of this path it is, from 1) -> what opening it raises, or None."""


@dataclass
class MemoryReader:
    """A Reader over `files`. `piece`: bytes of one read; `cut`: path -> bytes after which the first stream breaks off."""

    files: Mapping[str, bytes]
    fault: Fault = lambda item, count: None
    piece: int = 1 << 16
    cut: dict[str, int] = field(default_factory=dict)
    ranges: bool = True
    in_flight: int = 64
    hold: threading.Event | None = None
    opened: list[ReadItem] = field(default_factory=list)
    most: int = 0
    _open: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def caps(self) -> SourceCaps:
        return SourceCaps(self.in_flight, 1 << 20, "memory")

    def open(self, item: ReadItem) -> MemoryStream:
        with self._lock:
            self.opened.append(item)
            count = sum(other.entry.path == item.entry.path for other in self.opened)
        error = self.fault(item, count)
        if error is not None:
            raise error
        if not self.ranges and not item.whole:
            raise NoRanges(f"{item.entry.path}: no ranges here")
        data = self.files[item.entry.path]
        end = len(data) if item.end is None else item.end
        with self._lock:
            self._open += 1
            self.most = max(self.most, self._open)
        return MemoryStream(self, data[item.offset : end], self.cut.pop(item.entry.path, None))

    def ended(self) -> None:
        with self._lock:
            self._open -= 1

    def close(self) -> None:
        return


class MemoryStream:
    """One piece; with the reader's `hold` set aside it blocks until that is set or the stream is closed."""

    def __init__(self, reader: MemoryReader, data: bytes, cut: int | None) -> None:
        self._reader, self._data, self._cut = reader, memoryview(data), cut
        self._at = 0
        self._closed = threading.Event()

    def read_into(self, view: memoryview) -> int:
        from mx_cli.base.errors import Unreachable

        hold = self._reader.hold
        while hold is not None and not hold.is_set():
            if self._closed.wait(0.01):
                raise Unreachable("closed")
        if self._cut is not None and self._at >= self._cut:
            raise Unreachable("cut off")
        count = min(len(view), self._reader.piece, len(self._data) - self._at)
        if self._cut is not None:
            count = min(count, self._cut - self._at)
        view[:count] = self._data[self._at : self._at + count]
        self._at += count
        return count

    def close(self) -> None:
        if not self._closed.is_set():
            self._closed.set()
            self._reader.ended()


@dataclass
class MemorySink:
    """Keeps what arrives, and checks what the engine promises: blocks are committed before the end, each byte is right."""

    buffers: dict[str, bytearray] = field(default_factory=dict)
    ended: dict[str, int] = field(default_factory=dict)
    committed: dict[str, list[Block]] = field(default_factory=dict)
    resets: list[str] = field(default_factory=list)
    failure: MxError | None = None

    def has_room(self, item: ReadItem) -> bool:
        return True

    def acquire(self, item: ReadItem) -> Dest:
        buffer = self.buffers.setdefault(item.entry.path, bytearray(item.entry.size or 1 << 22))
        end = len(buffer) if item.end is None else item.end
        return Host(memoryview(buffer)[item.offset : end])

    def commit(self, item: ReadItem, block: Block) -> None:
        data = self.buffers[item.entry.path][block.offset : block.offset + block.length]
        assert xxhash.xxh3_128(data).digest() == block.digest
        assert item.offset <= block.offset
        assert item.end is None or block.offset + block.length <= item.end
        self.committed.setdefault(item.entry.path, []).append(block)

    def reset(self, entry: Entry) -> None:
        self.resets.append(entry.path)
        self.committed.pop(entry.path, None)

    def end(self, entry: Entry, size: int) -> None:
        assert entry.path not in self.ended
        covered = sum(block.length for block in self.committed.get(entry.path, []))
        assert covered >= size
        self.ended[entry.path] = size

    def raise_failure(self) -> None:
        if self.failure:
            raise self.failure

    def content(self, path: str) -> bytes:
        return bytes(self.buffers[path][: self.ended[path]]) if path in self.buffers else b""
