"""Pieces of files that begin and end where digests do, so that each piece can be verified by itself."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from mx_cli.plan.ranges import Span, merge


def aligned(wanted: Iterable[Span], blocks: Sequence[Span], piece: int) -> list[Span]:
    """Cut the wanted bytes of a file into pieces of at most `piece` bytes that split no block, where that can be.

    `blocks`: the spans that have a digest, sorted and disjoint. Small neighbours go into one piece; a block that
    is larger than `piece`, and bytes without a digest, are cut wherever it suits. The pieces' union is exactly `wanted`.
    """
    found: list[Span] = []
    at = 0
    for start, end in merge(wanted):
        while at < len(blocks) and blocks[at][1] <= start:
            at += 1
        first = at
        while at < len(blocks) and blocks[at][0] < end:
            at += 1
        found += _cut(start, end, _seams(start, end, blocks[first:at]), piece)
        # A block may reach into the next wanted span.
        at = max(first, at - 1)
    return found


def _seams(start: int, end: int, blocks: Sequence[Span]) -> Iterator[int]:
    """Where [start, end) may be cut without splitting a block."""
    for first, last in blocks:
        if start < first:
            yield first
        if last < end:
            yield last
    yield end


def _cut(start: int, end: int, seams: Iterable[int], piece: int) -> Iterator[Span]:
    begin = edge = start
    for seam in seams:
        if seam - begin > piece and edge > begin:
            yield begin, edge
            begin = edge
        while seam - begin > piece:
            yield begin, begin + piece
            begin += piece
        edge = seam
    if begin < end:
        yield begin, end
