"""The files that one rank's tensors are written into: safetensors, in parts of a bounded size. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from mx_cli.model.holding import size_of
from mx_cli.model.synthetic import header_of

PART = 5 << 30
"""Bytes of a file, unless a single tensor has more."""


@dataclass(frozen=True)
class PartFile:
    """`header` are the file's first bytes; each tensor's begin at `starts`, the file ends at `size`."""

    name: str
    header: bytes
    starts: Mapping[str, int]
    size: int


def part_files(
    tensors: Mapping[str, tuple[str, tuple[int, ...]]], rank: int, metadata: Mapping[str, str], most: int = PART
) -> list[PartFile]:
    """Files for tensors (name -> dtype and the rank's own shape), in this order: `model-rank-R-part-P.safetensors`.

    They are named as engines name what they load rank by rank (vLLM's sharded_state).
    """
    return [
        _part_file(f"model-rank-{rank}-part-{number}.safetensors", {name: tensors[name] for name in names}, metadata)
        for number, names in enumerate(_grouped({name: size_of(*one) for name, one in tensors.items()}, most))
    ]


def _grouped(sizes: Mapping[str, int], most: int) -> Iterator[list[str]]:
    group: list[str] = []
    total = 0
    for name, size in sizes.items():
        if group and total + size > most:
            yield group
            group, total = [], 0
        group.append(name)
        total += size
    if group:
        yield group


def _part_file(name: str, tensors: Mapping[str, tuple[str, tuple[int, ...]]], metadata: Mapping[str, str]) -> PartFile:
    sizes = {one: size_of(*found) for one, found in tensors.items()}
    header = header_of(((one, *found, sizes[one]) for one, found in tensors.items()), metadata)
    starts, at = {}, len(header)
    for one, size in sizes.items():
        starts[one] = at
        at += size
    return PartFile(name, header, starts, at)
