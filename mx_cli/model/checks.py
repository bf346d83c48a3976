"""Which bytes of a file have which digest: by tensor, and for many small neighbours together."""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

SMALL = 64 << 10
"""Bytes of a tensor that shares a pack with its neighbours: below it the work for each digest shows."""


class Check(NamedTuple):
    """`length` bytes at `offset` of a file have the digest `expected` (hex xxh3-128).

    They are the `block`-th of a tensor; or a pack, where `tensor` is empty: neighbouring small tensors that have a digest
    together, besides their own. It only saves the work for each.
    """

    offset: int
    length: int
    expected: str
    tensor: str = ""
    block: int = 0

    @property
    def end(self) -> int:
        return self.offset + self.length


class Checks:
    """The checks of one file, by place."""

    def __init__(self, rows: Iterable[Check]) -> None:
        """In the order of their bytes."""
        self.rows = tuple(rows)
        self._offsets = [row[0] for row in self.rows]

    def spans(self) -> list[tuple[int, int]]:
        return [(row[0], row[0] + row[1]) for row in self.rows]

    def within(self, start: int, end: int) -> Sequence[Check]:
        """Those that lie whole in [start, end)."""
        first = bisect.bisect_left(self._offsets, start)
        last = bisect.bisect_left(self._offsets, end, first)
        while last > first and self.rows[last - 1].end > end:
            last -= 1
        return self.rows[first:last]


def packed(checks: Checks, packs: Sequence[Check]) -> Checks:
    """One check for each pack instead of its tensors'. Packs are in the order of their bytes, and cut no check."""
    found: list[Check] = []
    at = 0
    for pack in packs:
        found += (*checks.within(at, pack.offset), pack)
        at = pack.end
    return Checks((*found, *(row for row in checks.rows if row.offset >= at))) if packs else checks


def plan_packs(sizes: Iterable[tuple[int, int]], most: int) -> Iterator[tuple[int, int]]:
    """[start, end) of each pack for tensors (start, bytes) of one file, in order: two or more, of `most` bytes at most."""
    begin = end = count = 0
    for start, size in sizes:
        if not size:
            continue
        fits = size <= SMALL and start == end and start + size - begin <= most
        if not fits:
            if count > 1:
                yield begin, end
            begin, count = start, 0
        if size <= SMALL:
            count += 1
        end = start + size
    if count > 1:
        yield begin, end
