"""Digests of many small tensors together, for the readers of a peer."""

from __future__ import annotations

import dataclasses

import xxhash

from mx_cli.model.checks import Pack, plan_packs
from mx_cli.model.holding import Holding
from mx_cli.model.manifest import BLOCK
from mx_cli.transport.held import Held


def with_packs(holding: Holding, held: Held | None) -> Holding:
    """The same holding with packs, of weights in memory: their small tensors are read once more. Blocks for a moment."""
    if held is None or held.device == "file":
        return holding
    tensors: dict[str, list[tuple[int, int]]] = {}
    for tensor in holding.tensors:
        tensors.setdefault(tensor.file, []).append((tensor.start, tensor.size))
    found = {
        file: tuple(Pack(start, end - start, _digest(held, file, start, end)) for start, end in plan_packs(rows, BLOCK))
        for file, rows in tensors.items()
    }
    return dataclasses.replace(holding, packs={file: packs for file, packs in found.items() if packs})


def _digest(held: Held, file: str, start: int, end: int) -> str:
    digest = xxhash.xxh3_128()
    for view in held.read(file, start, end - start):
        digest.update(view)
    return digest.hexdigest()
