"""Where a rank's tensors go: memory of this process, new or there already."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mx_cli.flows.pull_memory import Shape, compare_tables
from mx_cli.flows.ranks import Memory, Place, own_memory
from mx_cli.flows.targets import ALIGN, byte_block, check_names, torn
from mx_cli.model.share import Share
from mx_cli.sinks.torch_tensors import Described, copy_all, reach, tensor_of

Choose = Callable[[Mapping[str, Shape]], Sequence[str]]
"""The names to bring, of a table of the rank's own tensors. Raises Incompatible, UsageError."""
Make = Callable[[Mapping[str, Shape], Mapping[str, Share], Mapping[str, str]], Memory]
"""Memory for (whole shapes, the rank's shares, twins). Raises NoSpace, Incompatible before anything is written."""


def own(names: Sequence[str] | None, device: int) -> tuple[Choose, Make]:
    """Tensors of this process's own: `names`, None for all."""

    def choose(local: Mapping[str, Shape]) -> Sequence[str]:
        check_names(names, local.keys())
        return sorted(local if names is None else names)

    def make(shapes: Mapping[str, Shape], shares: Mapping[str, Share], twins: Mapping[str, str]) -> Memory:
        return own_memory(shapes, shares, twins, device)

    return choose, make


def into(described: Sequence[Described], *, allow_missing: bool, allow_extra: bool) -> tuple[Choose, Make]:
    """Tensors that are there: those that lie in one run get their bytes directly, others by a copy."""

    def choose(local: Mapping[str, Shape]) -> Sequence[str]:
        present = {one.memory for one in described if one.name in local}
        wanted: dict[str, Shape] = {
            one.name: (one.dtype, one.shape) for one in described if one.name in local or one.memory not in present
        }
        return compare_tables(local, wanted, allow_missing=allow_missing, allow_extra=allow_extra)

    def make(shapes: Mapping[str, Shape], shares: Mapping[str, Share], twins: Mapping[str, str]) -> Memory:
        return _target(_distinct([one for one in described if one.name in shares], twins))

    return choose, make


def _distinct(described: Sequence[Described], twins: Mapping[str, str]) -> list[Described]:
    """One tensor for each run of memory. Raises Incompatible where the source has other bytes for it, or two overlap."""
    kept: dict[object, Described] = {}
    for one in described:
        first = kept.setdefault(one.memory if one.size else one.name, one)
        if first is not one and twins.get(one.name, one.name) != twins.get(first.name, first.name):
            raise torn(first.name, one.name)
    found = sorted(kept.values(), key=lambda one: (one.device, one.tensor.data_ptr()))
    for before, after in itertools.pairwise(one for one in found if one.size):
        if before.device == after.device and after.tensor.data_ptr() < before.tensor.data_ptr() + reach(before.tensor):
            raise torn(before.name, after.name)
    return found


def _target(described: Sequence[Described]) -> Memory:
    places = {one.name: Place(one.address, one.device) for one in described if not one.scattered}
    regions = [(one.address, one.size, one.device) for one in described if not one.scattered and one.size]
    copies: list[tuple[Described, Any]] = []
    for device in sorted({one.device for one in described if one.scattered}):
        scattered = [one for one in described if one.scattered and one.device == device]
        ends = list(itertools.accumulate((-(-one.size // ALIGN) * ALIGN for one in scattered), initial=0))
        block = byte_block(device, ends[-1])
        regions.append((block.data_ptr(), ends[-1], device))
        for one, at in zip(scattered, ends, strict=False):
            places[one.name] = Place(block.data_ptr() + at, device)
            copies.append((one, tensor_of(block, at, one.dtype, one.shape)))

    def finish() -> dict[str, Any]:
        copy_all(copies)
        return {}

    return Memory(places, regions, finish, described)
