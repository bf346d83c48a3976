"""Byte ranges: which pieces of which files have to be read."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")

Span = tuple[int, int]
"""(start, end), end excluded."""


def merge(spans: Iterable[Span]) -> list[Span]:
    """Sorted, disjoint spans that cover the same bytes; touching ones become one."""
    merged: list[Span] = []
    for start, end in sorted(spans):
        if start >= end:
            continue
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def merge_regions(regions: Iterable[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """Runs of memory (address, length, device), by device and address; those that touch or overlap become one."""
    of_device: dict[int, list[Span]] = {}
    for address, length, device in regions:
        of_device.setdefault(device, []).append((address, address + length))
    return [(start, end - start, device) for device in sorted(of_device) for start, end in merge(of_device[device])]


def gaps(size: int, have: Iterable[Span]) -> list[Span]:
    """What of [0, size) is not in `have`."""
    missing: list[Span] = []
    edge = 0
    for start, end in merge(have):
        if start > edge:
            missing.append((edge, min(start, size)))
        edge = max(edge, end)
    if edge < size:
        missing.append((edge, size))
    return [span for span in missing if span[0] < span[1]]


def split(span: Span, piece: int) -> Iterator[Span]:
    """The span in pieces that end on multiples of `piece`, so that all leaders cut files alike."""
    start, end = span
    while start < end:
        cut = min(end, (start // piece + 1) * piece)
        yield start, cut
        start = cut


def pieces(size: int, have: Iterable[Span], piece: int) -> list[Span]:
    """The missing bytes of a file in pieces of at most `piece` bytes, in order; their union with `have` is exactly [0, size)."""
    return [part for gap in gaps(size, have) for part in split(gap, piece)]


def interleave(rows: Iterable[Iterable[T]], width: int) -> Iterator[T]:
    """One of each row in turn, at most `width` rows at a time; the next row enters when one has ended.

    Two writers of one file wait for each other (the kernel locks a file for each write); writers of different files don't.
    """
    waiting = iter(rows)
    active: deque[Iterator[T]] = deque()
    while True:
        while len(active) < width and (row := next(waiting, None)) is not None:
            active.append(iter(row))
        if not active:
            return
        current = active.popleft()
        for value in current:
            yield value
            active.append(current)
            break


def total(spans: Iterable[Span]) -> int:
    """Bytes in disjoint spans."""
    return sum(end - start for start, end in spans)
