"""`mx_cli.pull` and `mx_cli.pull_into`: tensors by the best route, into memory of this process."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from mx_cli.base.errors import UsageError
from mx_cli.engine.many import Bell
from mx_cli.engine.route import Taken
from mx_cli.flows.catalog import Catalog
from mx_cli.flows.context import Context
from mx_cli.flows.data_path import Wish
from mx_cli.flows.fill_memory import fill
from mx_cli.flows.from_python import device_number, model_text, process_context, wanted_names
from mx_cli.flows.parts import named_as_in, named_by_part
from mx_cli.flows.peering import Peering
from mx_cli.flows.pull import PullRequest
from mx_cli.flows.pull_memory import Moved, Shape, compare, move, table
from mx_cli.flows.pull_routes import Received, TensorPull, received
from mx_cli.flows.targets import Layout, check_begun, filled_by_twins, layout_of, own_tensors
from mx_cli.model.holding import Holding
from mx_cli.plan.ranges import merge_regions
from mx_cli.sinks.torch_tensors import Described, describe, refuse_read_only, require_torch
from mx_cli.sources.registry import OpenOrigin

MakeLayout = Callable[[Holding], Layout]
"""Compares, and finds or makes the memory. Raises Incompatible before anything is written."""


class IntoMemory(TensorPull):
    """One pull of whole tensors."""

    def __init__(self, request: PullRequest, context: Context, make: MakeLayout) -> None:
        super().__init__(request, context)
        self._make = make

    def _from_peers(self) -> Taken[Received]:
        peering = Peering(self._context, self._puller.wanted(), self._request.wish)
        try:
            group = peering.find(self._context.settings.wait or 0.0)
            layout = self._layout(named_by_part(group.holding))
            bell = Bell()
            members = peering.members(bell, merge_regions([(t.address, t.length, t.device) for t in layout.targets]))
            self._begin(layout)
            moved = move(group.holding, layout.targets, members, bell, self._context, layout)
            peering.check_versions()
            layout.finish()
            self.identity = group.peers[0].matched
            paths = ", ".join(f"{peer.address} by {peer.path}" for peer in group.peers if peer.path)
            return Taken(_received("peer", group.holding, layout, moved), paths)
        finally:
            peering.close()

    def _fill(self, name: str, found: Catalog, origin: OpenOrigin) -> Received:
        layout = self._layout(found.holding)
        self._begin(layout)
        return _received(name, found.holding, layout, fill(layout, found, origin, self._context))

    def _layout(self, holding: Holding) -> Layout:
        layout = self._make(holding)
        check_begun(self._begun, layout.names)
        return layout

    def _begin(self, layout: Layout) -> None:
        if not layout.own:
            self._begun |= set(layout.names)


def _received(name: str, holding: Holding, layout: Layout, moved: Moved) -> Received:
    return received(name, layout.names, layout.kinds or holding.kinds, [moved], holding.version)


def request_of(
    model: str,
    revision: str | None,
    origin: str | None,
    peers: Sequence[str],
    path: str,
    require: Sequence[str],
    routes: Sequence[str],
) -> PullRequest:
    """The same wishes as the options of `mx pull`. One word is as good as a list of one."""
    wish = Wish(_listed(peers), path, frozenset(_listed(require)))
    return PullRequest(model_text(model), wish, revision, origin, None, _listed(routes))


def _listed(words: Sequence[str]) -> tuple[str, ...]:
    return (words,) if isinstance(words, str) else tuple(words)


def pull_into(
    target: Any,
    model: str,
    *,
    revision: str | None = None,
    origin: str | None = None,
    peers: Sequence[str] = (),
    path: str = "auto",
    require: Sequence[str] = (),
    routes: Sequence[str] = (),
    allow_missing: bool = False,
    allow_extra: bool = False,
    all_buffers: bool = False,
    rank: str | None = None,
    rules: Any = None,
    **settings: Any,
) -> Received:
    """Fill the tensors of a module, or of a mapping, with the weights of `model` (a URI, an identity, a directory).

    Names, dtypes and shapes are compared before a byte moves, and every 4 MiB are verified. `allow_missing`: what the source
    lacks stays as it is; `allow_extra`: what it has more is left there. Buffers that a state dict leaves out are untouched
    unless `all_buffers`. Bytes go straight to where the tensors are, without a second copy. Only tensors that are scattered
    over memory get one for the time being, and those that are tied at the source and not here. Tied tensors stay tied.

    `routes` are tried in this order, by default the one here: `peer` (those that discovery finds, or only `peers`, HOST:PORT
    each), `cache`, `origin` (the URI, or `origin` for an identity, fetched into the cache, where it is for all), `stream`
    (the same past the cache: by default only where the cache cannot take the weights; of a rank instead of `origin`). Its
    bytes are what the store gave; digests are known only of the other routes. `path`: auto, nixl-read or socket. `require`: rdma, encrypted.
    `settings`: as in `mx config`, such as `wait`, `discovery`, `cache_dir`, `peer_token_file`.

    `rank` (r/n, from 0): the target holds that rank's part of each tensor, by `rules` as in `load`. Besides peers that have
    the weights whole, those that `serve` them in parts are read then, whatever their parallel size; that they have it all
    between them is found out first. Only what the rank needs is read, and gaps of up to 256 KiB where each request costs
    (`extra` of the answer). Blocks of 4 MiB of which only a part is read are not verified; all others are.

    Blocks. Raises UsageError for a target that cannot be filled, Incompatible for one that does not fit (then nothing was
    written), NoPeer, IntegrityError, TransportFailed and what a prefetch raises. After any other error than the first two
    the target must not be used.
    """
    require_torch()
    described = describe(target, all_buffers=all_buffers, copy=False)
    refuse_read_only(described)
    context = process_context(settings)
    request = request_of(model, revision, origin, peers, path, require, routes)
    if rank is not None:
        from mx_cli.flows.pull_ranks import RankPull
        from mx_cli.flows.rank_targets import into

        choose, memory = into(described, allow_missing=allow_missing, allow_extra=allow_extra)
        return RankPull(request, context, rank, rules, choose, memory).run()
    if rules is not None:
        raise UsageError("rules without a rank")

    def make(holding: Holding) -> Layout:
        return _into(described, holding, allow_missing=allow_missing, allow_extra=allow_extra)

    return IntoMemory(request, context, make).run()


def _into(described: Sequence[Described], holding: Holding, *, allow_missing: bool, allow_extra: bool) -> Layout:
    holding = named_as_in(holding, [one.name for one in described])
    twins = filled_by_twins(described, table(holding))
    wanted: dict[str, Shape] = {one.name: (one.dtype, one.shape) for one in described if one.name not in twins}
    names = set(compare(holding, wanted, allow_missing=allow_missing, allow_extra=allow_extra))
    layout = layout_of(holding, [one for one in described if one.name in names])
    kinds = {one.name: one.kind for one in described}
    return dataclasses.replace(layout, names=[*layout.names, *sorted(twins)], kinds=kinds, keep=described)


def pull(
    model: str,
    *,
    device: str = "cpu",
    names: Sequence[str] | None = None,
    revision: str | None = None,
    origin: str | None = None,
    peers: Sequence[str] = (),
    path: str = "auto",
    require: Sequence[str] = (),
    routes: Sequence[str] = (),
    rank: str | None = None,
    rules: Any = None,
    **settings: Any,
) -> dict[str, Any]:
    """The weights of `model` as tensors of this process's own, by name; tied ones share memory. `names`: only these.

    `device`: cpu, cuda or cuda:N. Host memory is one pool of huge pages, which lives as long as any of the tensors. The
    other arguments are those of `pull_into`. Blocks; raises as `pull_into` does, UsageError for unknown names, and NoSpace.
    """
    require_torch()

    context = process_context(settings)
    index = device_number(device)
    names = wanted_names(names)
    request = request_of(model, revision, origin, peers, path, require, routes)
    if rank is not None:
        from mx_cli.flows.pull_ranks import RankPull
        from mx_cli.flows.rank_targets import own

        shares = RankPull(request, context, rank, rules, *own(names, index))
        shares.run()
        return shares.tensors
    if rules is not None:
        raise UsageError("rules without a rank")
    tensors: dict[str, Any] = {}

    def make(holding: Holding) -> Layout:
        return own_tensors(holding, names, index, tensors)

    IntoMemory(request, context, make).run()
    return tensors
