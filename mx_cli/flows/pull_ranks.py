"""`pull` and `pull_into` with a rank: its part of every tensor, from peers of any parallel size, or from a disk."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

from mx_cli.base.cancel import Stop
from mx_cli.base.errors import Incompatible, IntegrityError, MxError, StillLanding, TransportFailed
from mx_cli.engine import route
from mx_cli.engine.buffers import Pool
from mx_cli.engine.many import Bell
from mx_cli.engine.route import Taken
from mx_cli.engine.verify import WholeDigest
from mx_cli.flows.catalog import Catalog, beside, files_beside, found_config
from mx_cli.flows.context import Context
from mx_cli.flows.cuts import cut_of
from mx_cli.flows.fill_memory import fill_shares
from mx_cli.flows.group import Peer
from mx_cli.flows.pull import Pull, PullRequest
from mx_cli.flows.pull_memory import Moved, Shape, move, place_of, table
from mx_cli.flows.pull_routes import Received, TensorPull, received
from mx_cli.flows.rank_targets import Choose, Make
from mx_cli.flows.ranks import Memory, Place, bring, rows_between, twins_of
from mx_cli.flows.share_peers import Offered, SharePeering, offered, twins_among
from mx_cli.flows.targets import check_begun
from mx_cli.model import identity
from mx_cli.model.holding import HOST, Extent
from mx_cli.model.share import Share
from mx_cli.plan.cover import Uncovered, cover
from mx_cli.plan.ranges import merge_regions
from mx_cli.plan.rows import Rows
from mx_cli.sources.registry import OpenOrigin

POLL = 0.5

Keep = Callable[[str, bytes], None]
"""Takes a small file that is not of the weights: (path, its bytes)."""


class RankPull(TensorPull):
    """One pull of a rank's part. `keep` gets the small files of the checkpoint, where the source has them.

    After it `tensors` are those that `make` made, and `peers` those that gave bytes, if any did.
    """

    usual = route.OF_A_PART

    def __init__(
        self,
        request: PullRequest,
        context: Context,
        rank: str,
        rules: Any,
        choose: Choose,
        make: Make,
        keep: Keep | None = None,
    ) -> None:
        # A directory that is to be made is the caller's, and gets a part only.
        super().__init__(dataclasses.replace(request, to=None), context)
        self._rank, self._rules, self._choose, self._make, self._keep = rank, rules, choose, make, keep
        self.tensors: dict[str, Any] = {}
        self.peers: Sequence[Peer] = ()

    def _shares(self, shapes: Mapping[str, Shape], config: Callable[[], Any]) -> dict[str, Share]:
        shares = cut_of(self._rank, self._rules, config).shares(shapes)
        local = {name: (shapes[name][0], share.local_shape) for name, share in shares.items()}
        chosen = {name: shares[name] for name in self._choose(local)}
        check_begun(self._begun, chosen)
        return chosen

    def _memory(self, shapes: Mapping[str, Shape], shares: Mapping[str, Share], twins: Mapping[str, str]) -> Memory:
        """From here on a route may touch the target."""
        memory = self._make(shapes, shares, twins)
        if not memory.own:
            self._begun |= shares.keys()
        return memory

    def _fill(self, name: str, found: Catalog, origin: OpenOrigin) -> Received:
        holding = found.holding
        shapes = table(holding)
        shares = self._shares(shapes, lambda: found_config(found, origin))
        memory = self._memory(shapes, shares, twins_of(holding, shapes, shares))
        moved = fill_shares(memory, shapes, shares, found, origin, self._context)
        if self._keep:
            for path, read in files_beside(found, origin).items():
                self._keep(path, read())
        self.tensors = memory.tensors()
        return received(name, shares, holding.kinds, [moved], holding.version)

    # -- peers ---------------------------------------------------------------------------------------------------

    def _from_peers(self) -> Taken[Received]:
        wanted = shares_wanted(self._puller)
        peering = SharePeering(self._context, wanted, self._request.wish)
        try:
            found, shares = peering.find_set(self._context.settings.wait or 0.0, self._agreed)
            memory = self._memory(found.shapes, shares, twins_among(found, shares))
            moved = _Set(found, shares, memory, peering, self._context).move()
            if self._keep:
                self._keep_from(found, peering)
            peering.check_versions()
            self.tensors, self.identity = memory.tensors(), wanted[0]
            kinds = {name: kind for group in found.groups for name, kind in group.holding.kinds.items()}
            version = min(group.holding.version for group in found.groups)
            self.peers = [peer for group in found.groups for peer in group.peers if peer.path]
            paths = ", ".join(f"{peer.address} by {peer.path}" for peer in self.peers)
            return Taken(received("peer", shares, kinds, moved, version), paths)
        finally:
            peering.close()

    def _keep_from(self, found: Offered, peering: SharePeering) -> None:
        """The small files of a checkpoint, where a peer has them: those that hold tensors only have none."""
        assert self._keep is not None
        for group in found.groups:
            manifest = group.holding.manifest
            records = [record for path in beside(manifest) if (record := manifest.record(path))]
            if not records:
                continue
            pool = Pool(sum(record.size for record in records))
            starts = itertools.accumulate((record.size for record in records), initial=pool.address)
            places = [Extent(one.path, 0, one.size, at) for one, at in zip(records, starts, strict=False)]
            bell = Bell()
            members = peering.members(bell, [(pool.address, pool.size, HOST)], group)
            move(group.holding, [one for one in places if one.length], members, bell, self._context, pool)
            for record, place in zip(records, places, strict=True):
                at = place.address - pool.address
                data = bytes(pool.view[at : at + place.length])
                if WholeDigest.of(data) != record.xxh3:
                    raise IntegrityError(f"{record.path}: not what the peers' manifest says")
                self._keep(record.path, data)
            return

    def _agreed(self, groups: Sequence[Any]) -> tuple[Offered, dict[str, Share]]:
        """Raises Incompatible unless the groups together have all that is wanted."""
        found = offered(groups)
        shares = self._shares(found.shapes, found.config)
        parts_of(found, shares, list(shares), range(len(groups)))
        return found, shares


def shares_wanted(puller: Pull) -> list[str]:
    """Identities of the weights whole, and of sets of peers that have them in parts."""
    if puller.by_identity:
        return puller.wanted()
    known = puller.identities()
    return [one.id for one in known] + [identity.of_shares(one).id for one in known if one.kind == "origin"]


def parts_of(
    found: Offered, shares: Mapping[str, Share], names: Sequence[str], alive: Sequence[int]
) -> dict[str, list[Any]]:
    """From which groups each tensor's pieces come. Raises Incompatible naming a tensor and what nobody has of it."""
    load: dict[int, int] = {}
    plan = {}
    for name in names:
        parts = cover(shares[name], {i: s for i, s in found.parts[name].items() if i in alive}, load)
        if isinstance(parts, Uncovered):
            ranks = sorted(found.groups[index].holding.rank or "all" for index in alive)
            raise Incompatible(
                f"no peer has {parts} of {name} {list(shares[name].shape)} (ranks found: {', '.join(ranks)})",
                hint="mx peers shows which ranks are there; --wait waits for the others",
            )
        plan[name] = parts
    return plan


def rows_by_group(
    found: Offered, shares: Mapping[str, Share], plan: Mapping[str, Sequence[Any]], places: Mapping[str, Place]
) -> dict[int, list[Rows]]:
    """What is to be read from each group (its index -> rows) for a `plan` of `parts_of`."""
    rows: dict[int, list[Rows]] = {}
    for name, parts in plan.items():
        dtype = found.shapes[name][0]
        for part in parts:
            file, start, _ = place_of(found.groups[part.source].holding, name)
            rows.setdefault(part.source, []).extend(
                rows_between(name, dtype, part.share, shares[name], file, start, places[name], part.only)
            )
    return rows


class _Set:
    """The transfer from several groups at once; what a failing group should have given comes from others, if they can."""

    def __init__(
        self,
        found: Offered,
        shares: Mapping[str, Share],
        memory: Memory,
        peering: SharePeering,
        context: Context,
    ) -> None:
        self._found, self._shares, self._memory = found, shares, memory
        self._peering, self._context = peering, context

    def move(self) -> list[Moved]:
        """Blocks. Raises what a group that cannot be replaced failed with."""
        alive = list(range(len(self._found.groups)))
        todo = list(self._memory.places)
        moved: list[Moved] = []
        failure: MxError | None = None
        while todo:
            try:
                plan = parts_of(self._found, self._shares, todo, alive)
            except Incompatible as error:
                raise failure or error from None
            done, failed = self._round(plan)
            moved += done
            # What failed groups gave of their part comes once more.
            meter = self._memory.meter
            meter.lose(max(0, meter.done - meter.total))
            for index, cause in failed.items():
                failure = cause
                alive.remove(index)
                self._context.warn(f"peers of rank {self._found.groups[index].holding.rank} are left: {cause.what}")
            todo = [name for name in todo if any(part.source in failed for part in plan[name])]
        return moved

    def _round(self, plan: Mapping[str, Sequence[Any]]) -> tuple[list[Moved], dict[int, MxError]]:
        rows = rows_by_group(self._found, self._shares, plan, self._memory.places)
        failed: dict[int, MxError] = {}
        work = Stop()
        context = dataclasses.replace(self._context, stop=work)
        futures: dict[int, Future[Moved]] = {}
        with ThreadPoolExecutor(max(1, len(rows))) as pool:
            try:
                with work.following(self._context.stop):
                    # One after the other: all readers queue at the peers in the same order.
                    for index in sorted(rows):
                        try:
                            futures[index] = self._begin(pool, index, rows[index], context)
                        except MxError as error:
                            failed[index] = error
                    while not all(future.done() for future in futures.values()):
                        wait(futures.values(), timeout=POLL)
            except BaseException:
                work.request(TransportFailed("given up"))
                raise
        self._context.stop.check()
        moved = []
        for index, future in futures.items():
            try:
                moved.append(future.result())
            except StillLanding:
                # Another group's bytes would be written where this one's may land.
                raise
            except MxError as error:
                failed[index] = error
        return moved, failed

    def _begin(self, pool: ThreadPoolExecutor, index: int, rows: list[Rows], context: Context) -> Future[Moved]:
        group = self._found.groups[index]
        bell = Bell()
        members = self._peering.members(bell, merge_regions(self._memory.regions), group)
        many_runs = all(peer.path == "nixl-read" for peer in group.peers if peer.member)
        return pool.submit(bring, group.holding, rows, members, bell, context, self._memory, many_runs=many_runs)
