"""`mx_cli.pull` and `mx_cli.pull_into`: tensors by the best route, into memory of this process."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mx_cli.base.errors import UsageError
from mx_cli.engine import route
from mx_cli.engine.many import Bell, Member
from mx_cli.engine.route import Attempt, Taken
from mx_cli.flows.catalog import Catalog, member, with_catalog
from mx_cli.flows.context import Context
from mx_cli.flows.data_path import Wish
from mx_cli.flows.from_python import device_number, model_text, process_context
from mx_cli.flows.holdings import local_holding
from mx_cli.flows.parts import named_as_in, named_by_part
from mx_cli.flows.peering import Peering
from mx_cli.flows.pull import Pull, PullRequest
from mx_cli.flows.pull_memory import Moved, Put, Shape, compare, disk_member, move, only_gpu, table
from mx_cli.flows.targets import (
    Layout,
    byte_block,
    check_begun,
    check_names,
    filled_by_twins,
    in_one_block,
    layout_of,
    pieces_of,
)
from mx_cli.model.holding import Extent, Holding, joined
from mx_cli.model.manifest import Entry
from mx_cli.plan.ranges import merge_regions
from mx_cli.sinks.torch_tensors import describe, refuse_read_only, require_torch, tensor_of
from mx_cli.sources.registry import OpenOrigin
from mx_cli.transport.on_gpu import copy_to


@dataclass(frozen=True)
class Received:
    """What came into memory: how many tensors of each kind, bytes, from whom, and by which route with what reasons.

    `extra` of the bytes were read along between those of a rank.
    """

    tensors: int
    parameters: int
    buffers: int
    bytes: int
    seconds: float
    route: str
    attempts: tuple[Attempt, ...]
    sources: Mapping[str, int]
    version: int
    extra: int = 0


MakeLayout = Callable[[Holding], Layout]
"""Compares, and finds or makes the memory. Raises Incompatible before anything is written."""


class IntoMemory:
    """One pull into memory: routes in order, each starting the target afresh."""

    def __init__(self, request: PullRequest, context: Context, make: MakeLayout, put: Put | None) -> None:
        self._request, self._context, self._make, self._put = request, context, make, put
        self._puller = Pull(request, context)
        self._begun: set[str] = set()

    def run(self) -> Received:
        takers: dict[str, Callable[[], Taken[Received]]] = {
            "peer": self._from_peer,
            "cache": lambda: self._from_disk("cache"),
            "origin": lambda: self._from_disk("origin"),
            route.STREAM: self._from_stream,
        }
        names = self._puller.routes(route.NAMES)
        received, attempts = route.first([(name, takers[name]) for name in names], self._puller.say)
        return dataclasses.replace(received, attempts=tuple(attempts))

    def _from_peer(self) -> Taken[Received]:
        wait = self._context.settings.wait or 0.0
        peering = Peering(self._context, self._puller.wanted(), self._request.wish)
        try:
            group = peering.find(wait)
            layout = self._layout(named_by_part(group.holding))
            bell = Bell()
            regions = merge_regions([(row.address, row.length, row.device) for row in layout.targets])
            members = peering.members(bell, regions)
            moved = self._move(group.holding, layout, members, bell)
            peering.check_versions()
            layout.finish()
            paths = ", ".join(f"{peer.address} by {peer.path}" for peer in group.peers if peer.path)
            return Taken(self._received("peer", group.holding, layout, moved), paths)
        finally:
            peering.close()

    def _from_disk(self, name: str) -> Taken[Received]:
        """From a snapshot: one that is there, or one that is fetched first."""
        taken = self._puller.from_cache() if name == "cache" else self._puller.from_origin()
        directory = taken.result.directory
        holding = local_holding(directory, self._context)
        layout = self._layout(named_by_part(holding))
        bell = Bell()
        members = [disk_member(directory, holding, bell, self._context, device=_gpu(layout))]
        moved = self._move(holding, layout, members, bell)
        layout.finish()
        return Taken(self._received(name, holding, layout, moved), taken.reason)

    def _from_stream(self) -> Taken[Received]:
        """From the origin past the cache, or from a directory as it is. Only a snapshot's digests are known."""
        self._puller.check_stream()
        return with_catalog(self._puller.straight_from, self._request.revision, self._context, self._streamed)

    def _streamed(self, found: Catalog, origin: OpenOrigin) -> Taken[Received]:
        self._puller.accept_unread(found.holding)
        layout = self._layout(found.holding)
        bell = Bell()
        members = [member(found, origin, bell, self._context, _gpu(layout))]
        moved = self._move(found.holding, layout, members, bell, found.entries)
        layout.finish()
        reason = f"{origin.uri}, past the cache"
        return Taken(self._received(route.STREAM, found.holding, layout, moved), reason)

    def _layout(self, holding: Holding) -> Layout:
        layout = self._make(holding)
        check_begun(self._begun, layout.names)
        return layout

    def _move(
        self,
        holding: Holding,
        layout: Layout,
        members: Sequence[Member],
        bell: Bell,
        entries: Mapping[str, Entry] | None = None,
    ) -> Moved:
        if not layout.own:
            self._begun |= set(layout.names)
        return move(holding, layout.targets, members, bell, self._context, self._put, layout, entries)

    def _received(self, name: str, holding: Holding, layout: Layout, moved: Moved) -> Received:
        kinds = layout.kinds or holding.kinds
        buffers = sum(1 for one in layout.names if kinds.get(one) == "buffer")
        count = len(layout.names)
        return Received(
            count, count - buffers, buffers, moved.bytes, moved.seconds, name, (), moved.by_source, holding.version
        )


def _gpu(layout: Layout) -> int:
    return only_gpu(row.device for row in layout.targets)


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
        return RankPull(request, context, rank, rules, choose, memory, copy_to).run()[0]
    if rules is not None:
        raise UsageError("rules without a rank")

    def make(holding: Holding) -> Layout:
        holding = named_as_in(holding, [one.name for one in described])
        twins = filled_by_twins(described, table(holding))
        wanted: dict[str, Shape] = {one.name: (one.dtype, one.shape) for one in described if one.name not in twins}
        names = set(compare(holding, wanted, allow_missing=allow_missing, allow_extra=allow_extra))
        layout = layout_of(holding, [one for one in described if one.name in names])
        kinds = {one.name: one.kind for one in described}
        return dataclasses.replace(layout, names=[*layout.names, *sorted(twins)], kinds=kinds, keep=described)

    return IntoMemory(request, context, make, copy_to).run()


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
    request = request_of(model, revision, origin, peers, path, require, routes)
    if rank is not None:
        from mx_cli.flows.pull_ranks import RankPull
        from mx_cli.flows.rank_targets import own

        return RankPull(request, context, rank, rules, *own(names, index), copy_to).run()[1]
    if rules is not None:
        raise UsageError("rules without a rank")
    tensors: dict[str, Any] = {}

    def make(holding: Holding) -> Layout:
        return own_tensors(holding, names, index, tensors)

    IntoMemory(request, context, make, copy_to).run()
    return tensors


def own_tensors(
    holding: Holding, names: Sequence[str] | None, device: int, tensors: dict[str, Any], *, fresh: bool = False
) -> Layout:
    """Memory for the tensors `names` (None: all), which `finish` puts into `tensors`. Raises UsageError, NoSpace.

    `fresh`: see Pool.
    """
    every = table(holding)
    check_names(names, every.keys())
    chosen = sorted(every if names is None else names)
    wanted = pieces_of(holding, {name: every[name][0] for name in chosen})
    starts, size = in_one_block(wanted)
    block = byte_block(device, size, fresh=fresh)
    base = block.data_ptr()
    targets = [
        Extent(one.file, one.start, one.length, base + at, device) for one, at in zip(wanted, starts, strict=True)
    ]
    offsets = {
        name: at + inside for one, at in zip(wanted, starts, strict=True) for name, inside in one.offsets.items()
    }

    def finish() -> None:
        for name in chosen:
            tensors[name] = tensor_of(block, offsets.get(name, 0), *every[name])

    return Layout(joined(targets), chosen, finish, block=block, own=True)
