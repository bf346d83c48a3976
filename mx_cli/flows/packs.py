"""Digests of many small tensors together, for the readers of a peer."""

from __future__ import annotations

import dataclasses

import xxhash

from mx_cli.model.checks import Check, plan_packs
from mx_cli.model.holding import Holding
from mx_cli.model.manifest import BLOCK
from mx_cli.transport.held import Held


def with_packs(holding: Holding, held: Held | None) -> Holding:
    """The same holding with packs, of weights in memory: their small tensors are read once more. Blocks for a moment.

    What is not as its own digests say is in no pack: a reader of it has to find out.
    """
    if held is None or held.device == "file":
        return holding
    tensors: dict[str, list[tuple[int, int]]] = {}
    for tensor in holding.tensors:
        tensors.setdefault(tensor.file, []).append((tensor.start, tensor.size))
    packs = {
        file: tuple(pack for span in plan_packs(rows, BLOCK) if (pack := _pack(holding, held, file, *span)))
        for file, rows in tensors.items()
    }
    return dataclasses.replace(holding, packs={file: found for file, found in packs.items() if found})


def _pack(holding: Holding, held: Held, file: str, start: int, end: int) -> Check | None:
    data = memoryview(b"".join(held.read(file, start, end - start)))
    for check in holding.checks_within(file, start, end):
        if xxhash.xxh3_128_hexdigest(data[check.offset - start : check.end - start]) != check.expected:
            return None
    return Check(start, end - start, xxhash.xxh3_128_hexdigest(data))
