"""Tensors that share bytes of a file: what to fetch once, and where each of them lies in it."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from mx_cli.plan.ranges import Span


class Wanted(NamedTuple):
    """A tensor: `size` bytes of `file` from `start`. Its address must be a multiple of `alignment`."""

    name: str
    file: str
    start: int
    size: int
    alignment: int


@dataclass(frozen=True)
class Piece:
    """Bytes [start, end) of a file, which hold every tensor of `offsets` (name -> its first byte in the piece).

    Memory for the piece begins `shift` bytes after a multiple of `alignment`. `covered`: the tensors are all there is
    in it; otherwise the rest is there since it belongs to the same digests.
    """

    file: str
    start: int
    end: int
    offsets: Mapping[str, int]
    alignment: int
    shift: int
    covered: bool

    @property
    def length(self) -> int:
        return self.end - self.start


def pieces(tensors: Iterable[Wanted], blocks: Callable[[str], Sequence[Span]]) -> list[Piece]:
    """Disjoint pieces for the tensors that have bytes, in the order of the files; those that share a byte share a piece.

    A piece splits no block of `blocks(file)` (sorted, disjoint), so that all of it can be verified.
    """
    found: list[Piece] = []
    group: list[Wanted] = []
    start = end = 0
    spans: dict[str, _Blocks] = {}
    for one in sorted(tensors, key=lambda one: (one.file, one.start, -one.size)):
        if not one.size:
            continue
        if one.file not in spans:
            spans[one.file] = _Blocks(blocks(one.file))
        low, high = spans[one.file].whole(one.start, one.start + one.size)
        if group and one.file == group[0].file and low < end:
            group.append(one)
            start, end = min(start, low), max(end, high)
            continue
        if group:
            found.append(_piece(group, start, end))
        group, start, end = [one], low, high
    if group:
        found.append(_piece(group, start, end))
    return found


class _Blocks:
    def __init__(self, spans: Sequence[Span]) -> None:
        self._starts = [start for start, _ in spans]
        self._ends = [end for _, end in spans]

    def whole(self, start: int, end: int) -> Span:
        """The bytes and the rest of the blocks that they are of."""
        first = bisect.bisect_right(self._ends, start)
        last = bisect.bisect_left(self._starts, end) - 1
        if first > last:
            return start, end
        return min(start, self._starts[first]), max(end, self._ends[last])


def _piece(group: Sequence[Wanted], start: int, end: int) -> Piece:
    if len(group) == 1:
        one = group[0]
        inside = one.start - start
        covered = (start, end) == (one.start, one.start + one.size)
        return Piece(one.file, start, end, {one.name: inside}, one.alignment, -inside % one.alignment, covered)
    offsets = {one.name: one.start - start for one in group}
    steps = {one.name: one.alignment for one in group}
    largest = max(steps.values())
    # In the memory that they were taken from all were aligned, so there is one.
    shift = next((s for s in range(largest) if all((s + offsets[n]) % steps[n] == 0 for n in offsets)), 0)
    edge = start
    for one in group:
        if one.start > edge:
            break
        edge = max(edge, one.start + one.size)
    return Piece(group[0].file, start, end, offsets, largest, shift, edge == end)
