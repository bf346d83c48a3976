"""Which of several shares of a tensor a wanted share is taken from, so that all of it is covered, exactly once. Pure."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Hashable, Iterable, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from mx_cli.model.share import Share
from mx_cli.plan.ranges import Span, gaps, merge

S = TypeVar("S", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Part(Generic[S]):
    """Of the `share` that `source` has, the indices `only` of the whole tensor's dimension `share.dim`; None for all."""

    source: S
    share: Share
    only: Span | None


@dataclass(frozen=True, slots=True)
class Uncovered:
    """No source has the indices `spans` of dimension `dim`; without one no source has any of the tensor."""

    dim: int | None
    spans: tuple[Span, ...]

    def __str__(self) -> str:
        where = ", ".join(f"{start} to {end - 1}" for start, end in self.spans)
        return f"rows {where} of dimension {self.dim}" if self.spans else "all of it"


def cover(target: Share, sources: Mapping[S, Share], load: MutableMapping[S, int]) -> list[Part[S]] | Uncovered:
    """Parts of the sources that hold all of the target, each piece from the least loaded that has it.

    `load` counts what each source gives, and is added to. The shares are of tensors of one shape.
    """
    shape = target.shape
    if not math.prod(target.local_shape):
        return []
    whole = {source: share for source, share in sources.items() if share.whole}
    dims = sorted({share.dim for share in sources.values() if share.dim is not None and not share.whole})
    if not dims:
        if not whole:
            return Uncovered(None, ())
        least = min(whole, key=lambda source: load.get(source, 0))
        load[least] = load.get(least, 0) + math.prod(target.local_shape)
        return [Part(least, Share(shape), None)]
    faults: list[Uncovered] = []
    for dim in dims:
        usable = {
            source: Share(shape, dim, share.along(dim))
            for source, share in sources.items()
            if share.whole or share.dim == dim
        }
        missing = [gap for start, end in target.along(dim) for gap in _missing(start, end, usable.values(), dim)]
        if not missing:
            return _spread(target, dim, usable, load)
        faults.append(Uncovered(dim, tuple(merge(missing))))
    return min(faults, key=lambda fault: sum(end - start for start, end in fault.spans))


def _missing(start: int, end: int, shares: Iterable[Share], dim: int) -> list[Span]:
    have = [span for share in shares for span in share.along(dim)]
    inside = [(max(low, start) - start, min(high, end) - start) for low, high in have if low < end and start < high]
    return [(low + start, high + start) for low, high in gaps(end - start, inside)]


def _spread(target: Share, dim: int, usable: Mapping[S, Share], load: MutableMapping[S, int]) -> list[Part[S]]:
    """Piece by piece between the edges of all shares."""
    edges = sorted({edge for share in (*usable.values(), target) for span in share.along(dim) for edge in span})
    weight = max(1, math.prod(target.local_shape) // max(1, sum(end - start for start, end in target.along(dim))))
    found: list[Part[S]] = []
    for low, high in itertools.pairwise(edges):
        if not any(start <= low and high <= end for start, end in target.along(dim)):
            continue
        having = [
            source
            for source, share in usable.items()
            if any(start <= low and high <= end for start, end in share.along(dim))
        ]
        least = min(having, key=lambda source: load.get(source, 0))
        load[least] = load.get(least, 0) + (high - low) * weight
        last = found[-1] if found else None
        if last and last.source == least and last.only and last.only[1] == low:
            found[-1] = dataclasses.replace(last, only=(last.only[0], high))
        else:
            found.append(Part(least, usable[least], (low, high)))
    return found
