"""`mx_cli.load`: tensors straight from an object store or a disk, without a copy on disk in between."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mx_cli.engine.many import Bell, Member
from mx_cli.engine.threads import Lifted, Throttle
from mx_cli.flows.catalog import Catalog, catalog
from mx_cli.flows.context import Context
from mx_cli.flows.in_process import process_context, require_torch
from mx_cli.flows.pull_memory import disk_member, move
from mx_cli.flows.pull_tensors import device_number, own_tensors, put_on_gpu
from mx_cli.sources.registry import OpenOrigin


def load(
    model: str,
    *,
    device: str = "cpu",
    names: Sequence[str] | None = None,
    revision: str | None = None,
    **settings: Any,
) -> dict[str, Any]:
    """The tensors of a checkpoint, by name: `model` is a directory, a weight file or a URI. `names`: only these.

    Headers are read first (two small reads a file), then only the wanted bytes, in pieces that cross tensors, straight to
    where the tensors are. All memory is the caller's own. `settings`: as in `mx config`.

    Blocks. Raises what listing and reading the origin raise, IntegrityError for files that are not what they say,
    UsageError for weights that are not safetensors, NoSpace.
    """
    require_torch()
    context = process_context(settings)
    index = device_number(device)
    tensors: dict[str, Any] = {}
    found, origin = catalog(model, revision, context)
    try:
        layout = own_tensors(found.holding, names, index, tensors)
        bell = Bell()
        move(
            found.holding,
            layout.targets,
            [member(found, origin, bell, context)],
            bell,
            context,
            put_on_gpu(),
            found.entries,
        )
        layout.finish()
    finally:
        origin.close()
    return tensors


def member(found: Catalog, origin: OpenOrigin, bell: Bell, context: Context) -> Member:
    """The source of a catalog's bytes: this machine's disk, or the origin."""
    if found.directory is not None:
        return disk_member(found.directory, found.holding, bell, context, found.entries or None)
    rate = context.settings.max_bandwidth
    return Member("origin", Lifted(origin, Throttle(rate) if rate else None, bell.ring), reserve=True)
