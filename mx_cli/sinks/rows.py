"""The sink of shares: of what is read, the rows that a rank wants land in its own tensors."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Iterable, Sequence

from mx_cli.engine.buffers import at_address
from mx_cli.engine.ports import Block, Memory, ReadItem, Through
from mx_cli.model.holding import HOST
from mx_cli.model.manifest import Entry
from mx_cli.plan.rows import Rows

Put = Callable[[int, int, memoryview], None]


class RowsSink:
    """Places bytes by a table of rows. Many short runs come by way of a buffer, where their columns are picked at once.

    Runs `copy_along` bytes and less apart are short. An item holds memory of one device only.
    `put(device, address, view)` copies host bytes to a GPU's memory.
    """

    def __init__(self, rows: Iterable[Rows], copy_along: int, put: Put | None = None) -> None:
        self._copy_along, self.put = copy_along, put
        self._of: dict[str, list[Rows]] = {}
        for one in rows:
            if one.size:
                self._of.setdefault(one.file, []).append(one)
        # Fused tensors are several rows each, which lie in one another: the furthest end so far finds the first.
        self._ends: dict[str, list[int]] = {}
        for file, found in self._of.items():
            found.sort(key=lambda one: one.offset)
            self._ends[file] = list(itertools.accumulate((one.end for one in found), max))

    def within(self, file: str, start: int, end: int) -> list[Rows]:
        """The rows that have bytes in [start, end) of a file."""
        rows = self._of.get(file, [])
        first = bisect.bisect_right(self._ends.get(file, []), start)
        last = bisect.bisect_left(rows, end, key=lambda one: one.offset)
        return [one for one in rows[first:last] if one.end > start]

    def has_room(self, item: ReadItem) -> bool:
        return True

    def acquire(self, item: ReadItem) -> Memory | Through:
        assert item.end is not None, "files whose tensors are known have a size"
        start, end = item.offset, item.end
        rows = self.within(item.entry.path, start, end)
        parts = [] if self._short(rows, start, end) else _parts(rows, start, end)
        # Tensors that share bytes: each gets its copy.
        if not parts or any(one[0] + one[1] > other[0] for one, other in itertools.pairwise(parts)):
            return Through(lambda at, view: self._pick(rows, start + at, view))
        device = rows[0].device
        put = self.put
        if device == HOST or put is None:
            return Memory(tuple(parts), device)
        return Memory(tuple(parts), device, lambda address, view: put(device, address, view))

    def _short(self, rows: Sequence[Rows], start: int, end: int) -> bool:
        for one in rows:
            first, last = one.within(start, end)
            if last - first > 1 and one.gap <= self._copy_along:
                return True
        return False

    def _pick(self, rows: Iterable[Rows], at: int, view: memoryview) -> None:
        for one in rows:
            pick(one, at, view, self.put)

    def commit(self, item: ReadItem, block: Block) -> None:
        """Nothing: what is in place is in place."""

    def reset(self, entry: Entry) -> None:
        """Nothing: it is read over what is there."""

    def end(self, entry: Entry, size: int) -> None:
        """Nothing."""

    def raise_failure(self) -> None:
        """Nothing happens behind the scenes."""


def _parts(rows: Iterable[Rows], start: int, end: int) -> list[tuple[int, int, int]]:
    """(byte of the item, length, address) of the runs in [start, end) of the file."""
    return sorted((at - start, length, address) for one in rows for at, length, address in one.inside(start, end))


def pick(rows: Rows, at: int, view: memoryview, put: Put | None = None) -> None:
    """Copy what of a file's bytes from `at` belongs to the rows to where it belongs."""
    end = at + len(view)
    first, last = rows.within(at, end)
    # Runs that the ends of the view cut go by themselves.
    while first < last and rows.offset + first * rows.pitch < at:
        _copy_run(rows, first, at, view, put)
        first += 1
    while first < last and rows.offset + (last - 1) * rows.pitch + rows.length > end:
        last -= 1
        _copy_run(rows, last, at, view, put)
    if last - first == 1:
        _copy_run(rows, first, at, view, put)
    elif first < last:
        _copy_runs(rows, first, last, view[rows.offset + first * rows.pitch - at :], put)


def _copy_run(rows: Rows, index: int, at: int, view: memoryview, put: Put | None) -> None:
    start = rows.offset + index * rows.pitch
    low, high = max(start, at), min(start + rows.length, at + len(view))
    _land(rows, rows.address + index * rows.step + low - start, view[low - at : high - at], put)


def _copy_runs(rows: Rows, first: int, last: int, view: memoryview, put: Put | None) -> None:
    """The whole runs [first, last), the first of which begins with the view."""
    import numpy as np
    from numpy.lib.stride_tricks import as_strided

    count = last - first
    source = as_strided(np.frombuffer(view, np.uint8), (count, rows.length), (rows.pitch, 1), writeable=False)
    address = rows.address + first * rows.step
    if rows.device != HOST and put is not None:
        together = memoryview(source.tobytes())
        if rows.step == rows.length:
            put(rows.device, address, together)
            return
        for index in range(count):
            put(rows.device, address + index * rows.step, together[index * rows.length : (index + 1) * rows.length])
        return
    whole = at_address(address, (count - 1) * rows.step + rows.length)
    as_strided(np.frombuffer(whole, np.uint8), (count, rows.length), (rows.step, 1))[...] = source


def _land(rows: Rows, address: int, view: memoryview, put: Put | None) -> None:
    if rows.device != HOST and put is not None:
        put(rows.device, address, view)
    else:
        at_address(address, len(view))[:] = view
