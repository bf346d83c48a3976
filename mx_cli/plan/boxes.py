"""What two shares of a tensor have in common: which bytes of the one are which bytes of the other. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from mx_cli.model.share import Share, in_bytes
from mx_cli.plan.ranges import Span


class Box(NamedTuple):
    """`runs` pieces of `length` bytes: from byte `at` of the source, `pitch` apart, to byte `to` of the target, `step` apart."""

    at: int
    length: int
    runs: int
    pitch: int
    to: int
    step: int


def overlap(source: Share, target: Share, bits: int, only: Span | None = None) -> Iterator[Box]:
    """The boxes that source and target, shares of one tensor of elements of `bits`, have in common.

    `only`: of the source's dimension just these indices of the whole tensor. Raises UsageError when a split falls into the
    middle of a byte.
    """
    shape = source.shape
    dims = sorted({dim for dim in (source.dim, target.dim) if dim is not None})
    if not dims:
        size = in_bytes(math.prod(shape) * bits)
        yield Box(0, size, 1, size, 0, size)
        return
    first, last = dims[0], dims[-1]
    outer = math.prod(shape[:first])
    # Two elements of four bits are one byte: all is counted in bits, and only what is read has to be whole bytes.
    inner = math.prod(shape[last + 1 :]) * bits
    limits = {dim: only if only and dim == source.dim else (0, shape[dim]) for dim in dims}
    across = _common(source.along(last), target.along(last), limits[last])
    pitch, step = _length(source, last) * inner, _length(target, last) * inner
    if first == last:
        for theirs, own, count in across:
            yield _box(theirs * inner, count * inner, outer, pitch, own * inner, step)
        return
    # Split along different dimensions: rows of the one, columns of the other.
    middle = math.prod(shape[first + 1 : last])
    for at in range(outer):
        for theirs, own, count in _common(source.along(first), target.along(first), limits[first]):
            their_row = (at * _length(source, first) + theirs) * middle
            own_row = (at * _length(target, first) + own) * middle
            for their_column, own_column, columns in across:
                yield _box(
                    their_row * pitch + their_column * inner,
                    columns * inner,
                    count * middle,
                    pitch,
                    own_row * step + own_column * inner,
                    step,
                )


def _box(at: int, length: int, runs: int, pitch: int, to: int, step: int) -> Box:
    """The box of these numbers of bits."""
    if runs > 1 and pitch == step == length:
        length, runs = length * runs, 1
    if runs == 1:
        pitch = step = length
    return Box(in_bytes(at), in_bytes(length), runs, in_bytes(pitch), in_bytes(to), in_bytes(step))


def _length(share: Share, dim: int) -> int:
    return share.length if dim == share.dim else share.shape[dim]


def _common(theirs: Sequence[Span], own: Sequence[Span], limit: Span) -> list[tuple[int, int, int]]:
    """(index within theirs, index within own, how many) of what both have."""
    found = []
    before = 0
    for low, high in theirs:
        to = 0
        for start, end in own:
            first, last = max(low, start, limit[0]), min(high, end, limit[1])
            if first < last:
                found.append((before + first - low, to + first - start, last - first))
            to += end - start
        before += high - low
    return found
