"""Sources and a sink in memory, with faults on command: the engine's other adapters, for fast tests."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, field

import xxhash

from mx_cli.base.errors import MxError, TransportFailed
from mx_cli.engine.buffers import scatter
from mx_cli.engine.ports import Block, Dest, Host, Memory, NoRanges, ReadItem, SourceCaps
from mx_cli.engine.threads import Flight
from mx_cli.model.manifest import Entry
from mx_cli.transport.peer import ITEM, Landed, not_told

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
class MemoryPath:
    """How the bytes of `files` come from a peer that is none: the Path of a real PeerSource.

    `before(item, count)` is called for each read, the count-th of this path from 1; it may block, and raise. `spoil` are
    the counts of reads whose first byte is wrong, `stuck` of those that wait until they are given up. `brought` lists the items that came whole; after `close` nothing lands.
    """

    files: Mapping[str, bytes]
    window: int = 2
    before: Callable[[ReadItem, int], object] = lambda item, count: None
    spoil: Container[int] = ()
    stuck: Container[int] = ()
    name: str = "memory"
    ahead: int = 0
    least_part: int = 0
    asked: list[ReadItem] = field(default_factory=list)
    brought: list[ReadItem] = field(default_factory=list)
    closed: threading.Event = field(default_factory=threading.Event)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _buffers: list[bytearray] = field(default_factory=list)

    def bring(self, item: ReadItem, dest: Memory, flight: Flight, landed: Landed = not_told) -> None:
        with self._lock:
            self.asked.append(item)
            count = len(self.asked)
        self.before(item, count)
        while count in self.stuck and not flight.aborted and not self.closed.wait(0.01):
            pass
        assert item.length is not None
        data = bytearray(self.files[item.entry.path][item.offset : item.offset + item.length])
        if count in self.spoil:
            data[0] ^= 1
        with self._lock:
            if self.closed.is_set() or flight.aborted:
                raise TransportFailed("given up")
            scatter(dest, 0, memoryview(data))
            self.brought.append(item)

    def hang(self, item: ReadItem, count: int) -> None:
        """A `before` for a peer that is frozen: nothing comes until the path is closed."""
        self.closed.wait(60)

    def buffer(self) -> int:
        data = bytearray(ITEM)
        self._buffers.append(data)
        return ctypes.addressof(ctypes.c_char.from_buffer(data))

    def give_back(self, address: int) -> None:
        return

    def close(self) -> None:
        with self._lock:
            self.closed.set()


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
