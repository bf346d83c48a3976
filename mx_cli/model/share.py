"""A part of a tensor: what one rank of a tensor-parallel group has of it, in coordinates of the whole tensor."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from mx_cli.base.errors import UsageError

MOST_SPANS = 64
MOST_DIMENSIONS = 64


@dataclass(frozen=True, slots=True)
class Share:
    """Of a tensor of this `shape` the `spans` (start, end) of dimension `dim`, in order; all of it without a `dim`."""

    shape: tuple[int, ...]
    dim: int | None = None
    spans: tuple[tuple[int, int], ...] = ()

    @property
    def local_shape(self) -> tuple[int, ...]:
        """The shape of the rank's own tensor."""
        if self.dim is None:
            return self.shape
        return (*self.shape[: self.dim], self.length, *self.shape[self.dim + 1 :])

    @property
    def length(self) -> int:
        """Indices of dimension `dim` that the rank has."""
        return sum(end - start for start, end in self.spans)

    @property
    def whole(self) -> bool:
        """Whether it is the tensor itself."""
        return self.dim is None or self.spans == ((0, self.shape[self.dim]),)

    def along(self, dim: int) -> tuple[tuple[int, int], ...]:
        """The spans of dimension `dim`, whether it is the one that was split or not."""
        return self.spans if dim == self.dim else ((0, self.shape[dim]),)

    def runs(self, bits: int) -> Iterator[tuple[int, int]]:
        """(first byte in the whole tensor, bytes) of each contiguous run, in the order of the rank's own tensor.

        `bits` of an element. Raises UsageError when a split falls into the middle of a byte.
        """
        if self.dim is None:
            yield 0, in_bytes(math.prod(self.shape) * bits)
            return
        inner = math.prod(self.shape[self.dim + 1 :]) * bits
        pitch = self.shape[self.dim] * inner
        for outer in range(math.prod(self.shape[: self.dim])):
            for start, end in self.spans:
                yield in_bytes(outer * pitch + start * inner), in_bytes((end - start) * inner)

    def to_json(self) -> list[Any]:
        return [list(self.shape), self.dim, [list(span) for span in self.spans]]

    @classmethod
    def from_json(cls, row: Any) -> Share:
        """Raises ValueError or TypeError for what is no part of a tensor."""
        shape, dim, spans = row
        share = cls(tuple(map(_index, shape)), dim, tuple((_index(start), _index(end)) for start, end in spans))
        if len(share.shape) > MOST_DIMENSIONS or len(share.spans) > MOST_SPANS:
            raise ValueError("a share of too many parts")
        if dim is None:
            if share.spans:
                raise ValueError("spans of no dimension")
            return share
        if not 0 <= _index(dim) < len(share.shape):
            raise ValueError(f"no dimension {dim} in {list(share.shape)}")
        edges = [0, *itertools.chain.from_iterable(share.spans), share.shape[dim]]
        if edges != sorted(edges):
            raise ValueError(f"spans {list(share.spans)} of {share.shape[dim]}")
        return share


def in_bytes(bits: int) -> int:
    """Raises UsageError when there is no whole number of them."""
    if bits % 8:
        raise UsageError("a split falls into the middle of a byte")
    return bits // 8


def _index(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 1 << 48:
        raise ValueError(f"not an index: {value!r}")
    return value
