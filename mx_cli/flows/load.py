"""`mx_cli.load`: tensors straight from an object store or a disk, without a copy on disk in between."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mx_cli.base.errors import UsageError
from mx_cli.flows.catalog import Catalog, found_config, member, with_catalog
from mx_cli.flows.context import Context
from mx_cli.flows.cuts import cut_of
from mx_cli.flows.fill_memory import fill, fill_shares
from mx_cli.flows.from_python import device_number, model_text, process_context, wanted_names
from mx_cli.flows.mapped import mapped_tensors
from mx_cli.flows.ranks import chosen, own_memory, twins_of
from mx_cli.flows.targets import check_names, own_tensors
from mx_cli.model.holding import HOST, Tensor
from mx_cli.sinks.torch_tensors import require_torch
from mx_cli.sources.registry import OpenOrigin


def load(
    model: str,
    *,
    device: str = "cpu",
    names: Sequence[str] | None = None,
    mapped: bool | None = None,
    revision: str | None = None,
    rank: str | None = None,
    rules: Any = None,
    group: Any = None,
    fill_cache: bool = False,
    **settings: Any,
) -> dict[str, Any]:
    """The tensors of a checkpoint, by name: `model` is a directory, a weight file or a URI. `names`: only these.

    Headers are read first (two small reads a file), then only the wanted bytes, in pieces that cross tensors, straight to
    where the tensors are. `settings`: as in `mx config`.

    `mapped`: host tensors of files that are in the page cache are those pages, and nothing is copied; what is written to
    them stays in this process. By default that is so for snapshots of the cache, which nobody writes to. True: for every
    local file, as safetensors does it; then who changes the file in place changes tensors, and who shortens it ends the
    process. False: all memory is the caller's own, as it is for everything else.

    `rank` (r/n, from 0): only that rank's part of each tensor, by `rules`: llama, qwen, mistral, mixtral or deepseek, a
    rule file, what one holds, or None for the family that config.json names. Only what the rank needs is read; gaps of up
    to 256 KiB are read along, and a notice says how much that was. Where a snapshot's digests are known, blocks of 4 MiB
    of which all bytes were read are verified; those of which the rank needs only some are not.

    `group` (of torch.distributed): all of its ranks call this with the same arguments, but for a `rank`, of which each of
    them has its own, and then keeps only its part. Each reads its portion of the bytes, the first also the headers, and
    they exchange them, 64 MiB at once: the origin gives every byte once. Without a `rank` the bytes go straight from and
    to where the tensors are. A rank that fails or is lost ends the others with TransportFailed, which names it, within
    `stall_timeout`; the group must not be used after that. NCCL ends the process instead, by its own timeout. The group
    stays the caller's: before its process ends it calls `destroy_process_group`, also after an error, or torch may abort
    the process at its exit.

    `fill_cache`: what a URI gives is also kept, as `prefetch` keeps it, by the same election and with nothing fetched twice;
    the tensors are read from the cache's files as those come. All of the checkpoint is fetched then, also for a few
    `names` or a `rank`, and it is verified when this returns.

    Blocks. Raises what listing and reading the origin raise, IntegrityError for files that are not what they say,
    UsageError for weights that are not safetensors, NoSpace.
    """
    require_torch()
    model = model_text(model)
    context = process_context(settings)
    index = device_number(device)
    names = wanted_names(names)
    if rules is not None and rank is None:
        raise UsageError("rules without a rank")
    if group is not None:
        if fill_cache:
            raise UsageError("a group, and fill_cache: each rank would fill it", hint="leave one of them out")
        if mapped:
            raise UsageError("a group, and mapped: pages of a file are not exchanged", hint="leave one of them out")
        from mx_cli.flows.shared_load import SharedLoad

        shared = SharedLoad(group, index, context, member)
        if rank is None:
            return shared.run(model, revision, names)
        return shared.run_share(model, revision, names, lambda *at: cut_of(rank, rules, lambda: found_config(*at)))
    wish = _Wish(names, mapped, rank, rules, index)
    if fill_cache:
        from mx_cli.flows.fill_cache import Fill

        with Fill(model, revision, context) as fill:
            tensors = _load(*fill.catalog(), wish, fill.patient())
            directory = fill.finish()
        if not fill.torn:
            return tensors
        del tensors
        model, revision = str(directory), None
    return with_catalog(model, revision, context, lambda found, origin: _load(found, origin, wish, context))


@dataclass(frozen=True)
class _Wish:
    """What of a checkpoint is wanted, and where: see `load`."""

    names: Sequence[str] | None
    mapped: bool | None
    rank: str | None
    rules: Any
    device: int


def _load(found: Catalog, origin: OpenOrigin, wish: _Wish, context: Context) -> dict[str, Any]:
    if wish.rank is not None:
        return _load_share(found, origin, wish.rank, wish, context)
    wanted = chosen_tensors(found, wish.names)
    tensors: dict[str, Any] = {}
    # What lists no entries was read from a snapshot's manifest.
    if wish.device == HOST and found.directory and (wish.mapped or (wish.mapped is None and not found.entries)):
        tensors = mapped_tensors(found, wanted, context.stop)
    rest = [tensor.name for tensor in wanted if tensor.name not in tensors]
    if rest:
        fill(own_tensors(found.holding, rest, wish.device, tensors, fresh=True), found, origin, context)
    return {name: tensors[name] for name in sorted(tensors)}


def chosen_tensors(found: Catalog, names: Sequence[str] | None) -> list[Tensor]:
    """In the order of the files. Raises UsageError for names that nothing has."""
    tensors = list(found.holding.tensors)
    if names is None:
        return tensors
    wanted = set(names)
    check_names(wanted, {tensor.name for tensor in tensors})
    return [tensor for tensor in tensors if tensor.name in wanted]


def _load_share(found: Catalog, origin: OpenOrigin, rank: str, wish: _Wish, context: Context) -> dict[str, Any]:
    shapes = chosen(found.holding, wish.names)
    shares = cut_of(rank, wish.rules, lambda: found_config(found, origin)).shares(shapes)
    memory = own_memory(shapes, shares, twins_of(found.holding, shapes, shares), wish.device)
    fill_shares(memory, shapes, shares, found, origin, context)
    return memory.tensors()
