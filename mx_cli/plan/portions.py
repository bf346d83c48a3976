"""Divides a row of pieces into contiguous portions of about as many bytes, one for each rank. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Sequence


def portions(sizes: Sequence[int], count: int) -> list[tuple[int, int]]:
    """`count` ranges (first, last) of the pieces, in order: each ends at the piece that ends nearest to its share."""
    ends = list(itertools.accumulate(sizes))
    total = ends[-1] if ends else 0
    cuts = [0]
    for index in range(1, count):
        goal = total * index // count
        at = cuts[-1]
        while at < len(sizes) and abs(ends[at] - goal) <= abs((ends[at - 1] if at else 0) - goal):
            at += 1
        cuts.append(at)
    cuts.append(len(sizes))
    return list(itertools.pairwise(cuts))
