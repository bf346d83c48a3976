"""Runs of bytes at equal distances, and which ranges to read for them. Pure.

A gap between runs is read along where its bytes cost less than another request would. That is the whole rule: a tensor
whose rows are split over ranks is read whole and its columns picked, or run by run, whichever costs less.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from mx_cli.plan.boxes import Box
from mx_cli.plan.ranges import Span

READ_ALONG = 256 << 10
"""Bytes of a gap, from a source that pays for each request: a store, a disk, a connection."""
COPY_ALONG = 8 << 10
"""Bytes of a gap, from a source that takes many runs in one request (NIXL): about 2 microseconds a run at 4 GB/s."""


class Rows(NamedTuple):
    """`runs` pieces of `length` bytes, `pitch` apart in a file from `offset`; they belong `step` apart from `address`.

    `device` as in `Extent`.
    """

    file: str
    offset: int
    length: int
    runs: int
    pitch: int
    address: int
    step: int
    device: int

    @property
    def end(self) -> int:
        return self.offset + (self.runs - 1) * self.pitch + self.length

    @property
    def gap(self) -> int:
        """Bytes between two runs."""
        return self.pitch - self.length

    @property
    def size(self) -> int:
        """Bytes that are wanted."""
        return self.runs * self.length

    @classmethod
    def of(cls, box: Box, file: str, start: int, address: int, device: int) -> Rows:
        """A box of a tensor that begins at `start` of the file, and whose own bytes begin at `address`."""
        return cls(file, start + box.at, box.length, box.runs, box.pitch, address + box.to, box.step, device)

    def within(self, start: int, end: int) -> tuple[int, int]:
        """The runs [first, last) that have bytes in [start, end) of the file."""
        first = max(0, (start - self.offset - self.length) // self.pitch + 1)
        last = min(self.runs, -((self.offset - end) // self.pitch))
        return first, max(first, last)

    def inside(self, start: int, end: int) -> Iterator[tuple[int, int, int]]:
        """(place in the file, bytes, address) of what of each run lies in [start, end) of the file."""
        for index in range(*self.within(start, end)):
            at = self.offset + index * self.pitch
            low, high = max(at, start), min(at + self.length, end)
            if low < high:
                yield low, high - low, self.address + index * self.step + low - at


def spans_to_read(rows: Iterable[Rows], blocks: Sequence[Span] = ()) -> list[Span]:
    """The ranges of one file that hold the rows; gaps of READ_ALONG and less are in them.

    `blocks`: the spans that have a digest, sorted and disjoint. Where gaps are read along, what a block lacks at the ends
    is too, if it is no more than a gap: then it can be verified.
    """
    spans: list[Span] = []
    for one in rows:
        if one.runs > 1 and one.gap <= READ_ALONG:
            spans.append(_to_edges(one, blocks))
        elif one.runs == 1:
            spans.append((one.offset, one.end))
        else:
            begins = range(one.offset, one.end, one.pitch)
            spans += [(at, at + one.length) for at in begins]
    return near(spans, READ_ALONG)


def _to_edges(rows: Rows, blocks: Sequence[Span]) -> Span:
    first = bisect.bisect_right(blocks, rows.offset, key=lambda block: block[1])
    last = bisect.bisect_left(blocks, rows.end, key=lambda block: block[0]) - 1
    if first > last:
        return rows.offset, rows.end
    low, high = min(rows.offset, blocks[first][0]), max(rows.end, blocks[last][1])
    return (
        low if rows.offset - low <= rows.gap else rows.offset,
        high if high - rows.end <= rows.gap else rows.end,
    )


def near(spans: Iterable[Span], gap: int) -> list[Span]:
    """Sorted, disjoint spans that cover the same bytes and the gaps of at most `gap` between them."""
    found: list[Span] = []
    for start, end in sorted(spans):
        if found and start - found[-1][1] <= gap:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        elif start < end:
            found.append((start, end))
    return found


def wanted_within(rows: Sequence[Rows], start: int, end: int) -> int:
    """Bytes of [start, end) that the rows want, counted once for each of them."""
    count = 0
    for one in rows:
        first, last = one.within(start, end)
        if first < last:
            count += (last - first) * one.length
            count -= max(0, start - (one.offset + first * one.pitch))
            count -= max(0, one.offset + (last - 1) * one.pitch + one.length - end)
    return count
