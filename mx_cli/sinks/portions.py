"""Sinks for what one rank of a group reads for all: one thread fills them, another passes on what is there."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from mx_cli.base.errors import IntegrityError
from mx_cli.engine.buffers import Pool
from mx_cli.engine.ports import Block, Memory, ReadItem
from mx_cli.model.holding import Extent, Extents
from mx_cli.model.manifest import Entry
from mx_cli.plan.ranges import Span, merge, total
from mx_cli.sinks.host import MemorySink


class PortionSink(MemorySink):
    """Memory that knows when a run of it is filled. Bytes are placed by one thread, and waited for by another.

    `tell` is called when some have been placed.
    """

    def __init__(self, extents: Sequence[Extent], put: Any) -> None:
        super().__init__(extents, put)
        self.tell: Callable[[], None] = lambda: None
        self._places = Extents(extents)
        self._lock = threading.Lock()
        self._placed: list[Span] = []
        self._expected: list[Span] = []
        self._all = merge((row.address, row.address + row.length) for row in extents)

    def commit(self, item: ReadItem, block: Block) -> None:
        end = block.offset + block.length
        runs = self._places.within(item.entry.path, block.offset, end)
        with self._lock:
            self._placed = merge([*self._placed, *((run.address, run.address + run.length) for run in runs)])
        self.tell()

    def expect(self, low: int, high: int) -> None:
        """From now on `filled` is of the bytes from address `low` to `high`: of those that are anybody's."""
        with self._lock:
            self._expected = _within(self._all, low, high)

    def filled(self) -> bool:
        """Whether all that is expected has been placed."""
        with self._lock:
            have = [span for low, high in self._expected for span in _within(self._placed, low, high)]
            return total(have) == total(self._expected)


class RingOfPieces:
    """Pieces in order through a few buffers: there is room for one when an older one was given back."""

    def __init__(self, items: Sequence[ReadItem], memory: int) -> None:
        """About `memory` bytes of buffers, two pieces at least. Raises NoSpace."""
        self.tell: Callable[[], None] = lambda: None
        self._size = max((item.length or 0 for item in items), default=1)
        self._slots = max(2, memory // max(1, self._size))
        self._pool = Pool(min(self._slots, max(1, len(items))) * self._size)
        self._lock = threading.Lock()
        # What is left of a piece is read as a piece of its own: it ends where the whole one does.
        self._index = {(item.entry.path, item.end): index for index, item in enumerate(items)}
        self._items = list(items)
        self._missing = [item.length or 0 for item in items]
        self._given_back = 0

    def has_room(self, item: ReadItem) -> bool:
        return self._index[item.entry.path, item.end] < self._given_back + self._slots

    def acquire(self, item: ReadItem) -> Memory:
        index = self._index[item.entry.path, item.end]
        assert item.length is not None
        address = self._pool.address + self._place(index) + item.offset - self._items[index].offset
        return Memory(((0, item.length, address),))

    def commit(self, item: ReadItem, block: Block) -> None:
        with self._lock:
            self._missing[self._index[item.entry.path, item.end]] -= block.length
        self.tell()

    def reset(self, entry: Entry) -> None:
        raise IntegrityError(f"{entry.path}: the origin serves no ranges, so ranks cannot share its bytes")

    def end(self, entry: Entry, size: int) -> None:
        """Nothing."""

    def raise_failure(self) -> None:
        """Nothing happens behind the scenes."""

    def filled(self, index: int) -> bool:
        """Whether the piece is there; a piece that is none is."""
        with self._lock:
            return index >= len(self._missing) or not self._missing[index]

    def view(self, index: int) -> memoryview:
        at = self._place(index)
        return self._pool.view[at : at + (self._items[index].length or 0)]

    def give_back(self, index: int) -> None:
        self._given_back = index + 1

    def _place(self, index: int) -> int:
        return index % self._slots * self._size


def _within(spans: Sequence[Span], low: int, high: int) -> list[Span]:
    return [(max(low, start), min(high, end)) for start, end in spans if start < high and low < end]
