"""Memory that is filled from one catalog: with the bytes of this machine's disk, or of the origin."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from mx_cli.engine.many import Bell
from mx_cli.flows.catalog import Catalog, member
from mx_cli.flows.context import Context
from mx_cli.flows.pull_memory import Moved, Shape, move
from mx_cli.flows.ranks import Memory, bring, rows_of
from mx_cli.flows.targets import Layout
from mx_cli.model.holding import HOST
from mx_cli.model.share import Share
from mx_cli.sources.registry import OpenOrigin


def fill(layout: Layout, found: Catalog, origin: OpenOrigin, context: Context) -> Moved:
    """Bring whole tensors to where they go, and finish the layout. Blocks; raises as `move` does."""
    bell = Bell()
    members = [member(found, origin, bell, context, _only_gpu(row.device for row in layout.targets))]
    moved = move(found.holding, layout.targets, members, bell, context, layout, found.entries)
    layout.finish()
    return moved


def fill_shares(
    memory: Memory,
    shapes: Mapping[str, Shape],
    shares: Mapping[str, Share],
    found: Catalog,
    origin: OpenOrigin,
    context: Context,
) -> Moved:
    """Bring these shares of tensors (name -> whole shape) to where they go. Blocks; raises as `move` does."""
    bell = Bell()
    members = [member(found, origin, bell, context, _only_gpu(device for _, _, device in memory.regions))]
    rows = rows_of(found.holding, shapes, shares, memory.places)
    return bring(found.holding, rows, members, bell, context, memory, found.entries)


def _only_gpu(devices: Iterable[int]) -> int:
    """The GPU among them; HOST for none, and for several."""
    found = set(devices) - {HOST}
    return found.pop() if len(found) == 1 else HOST
