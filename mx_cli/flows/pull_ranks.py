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
from mx_cli.flows.catalog import Catalog, beside, files_beside, found_config, local_config, member, with_catalog
from mx_cli.flows.context import Context
from mx_cli.flows.cuts import cut_of
from mx_cli.flows.group import Peer
from mx_cli.flows.holdings import local_holding
from mx_cli.flows.pull import Pull, PullRequest
from mx_cli.flows.pull_memory import Moved, Put, Shape, disk_member, only_gpu, place_of, table
from mx_cli.flows.pull_tensors import Received
from mx_cli.flows.rank_targets import Choose, Make
from mx_cli.flows.ranks import Memory, bring, rows_between, rows_of, twins_of
from mx_cli.flows.share_peers import Offered, SharePeering, offered, twins_among
from mx_cli.flows.targets import check_begun
from mx_cli.model import identity
from mx_cli.model.holding import HOST
from mx_cli.model.share import Share
from mx_cli.plan.cover import Uncovered, cover
from mx_cli.plan.ranges import merge_regions
from mx_cli.plan.rows import Rows
from mx_cli.sources.registry import OpenOrigin

POLL = 0.5

Keep = Callable[[str, bytes], None]
"""Takes a small file that is not of the weights: (path, its bytes)."""


class RankPull:
    """One pull of a rank's part: routes in order, each starting afresh."""

    def __init__(
        self,
        request: PullRequest,
        context: Context,
        rank: str,
        rules: Any,
        choose: Choose,
        make: Make,
        put: Put | None,
        keep: Keep | None = None,
    ) -> None:
        self._request, self._context, self._put, self._keep = request, context, put, keep
        self._rank, self._rules, self._choose, self._make = rank, rules, choose, make
        # A directory that is to be made is the caller's, and gets a part only.
        self.puller = Pull(dataclasses.replace(request, to=None), context)
        # The identity of the weights that the part is of.
        self.identity = ""
        # The peers that gave bytes; none by another route.
        self.peers: Sequence[Peer] = ()
        self._begun: set[str] = set()
        self._tensors: dict[str, Any] = {}

    def run(self) -> tuple[Received, dict[str, Any]]:
        """What came, and the tensors that `make` made."""
        takers: dict[str, Callable[[], Taken[Received]]] = {
            "peer": self._from_peers,
            "cache": lambda: self._from_disk("cache"),
            "origin": lambda: self._from_disk("origin"),
            route.STREAM: self._from_stream,
        }
        names = self.puller.routes(route.OF_A_PART)
        received, attempts = route.first([(name, takers[name]) for name in names], self.puller.say)
        return dataclasses.replace(received, attempts=tuple(attempts)), self._tensors

    def _shares(self, shapes: Mapping[str, Shape], config: Callable[[], Any]) -> dict[str, Share]:
        cut = cut_of(self._rank, self._rules, config)
        shares = cut.shares(shapes)
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

    # -- disk ----------------------------------------------------------------------------------------------------

    def _from_disk(self, name: str) -> Taken[Received]:
        taken = self.puller.from_cache() if name == "cache" else self.puller.from_origin()
        directory = taken.result.directory
        holding = local_holding(directory, self._context)
        shapes = table(holding)
        shares = self._shares(shapes, lambda: local_config(directory))
        memory = self._memory(shapes, shares, twins_of(holding, shapes, shares))
        bell = Bell()
        members = [disk_member(directory, holding, bell, self._context, device=_gpu(memory))]
        rows = rows_of(holding, shapes, shares, memory.places)
        moved = bring(holding, rows, members, bell, self._context, self._put, memory)
        if self._keep:
            for path in beside(holding.manifest):
                self._keep(path, (directory / path).read_bytes())
        self._tensors, self.identity = memory.tensors(), taken.result.identity
        return Taken(self._received(name, shares, holding.kinds, [moved], holding.version), taken.reason)

    # -- stream --------------------------------------------------------------------------------------------------

    def _from_stream(self) -> Taken[Received]:
        """From the origin past the cache, or from a directory as it is. Only a snapshot's digests are known."""
        self.puller.check_stream(of_a_part=True)
        return with_catalog(self.puller.straight_from, self._request.revision, self._context, self._streamed)

    def _streamed(self, found: Catalog, origin: OpenOrigin) -> Taken[Received]:
        holding = found.holding
        self.puller.accept_unread(holding)
        shapes = table(holding)
        shares = self._shares(shapes, lambda: found_config(found, origin))
        memory = self._memory(shapes, shares, twins_of(holding, shapes, shares))
        rows = rows_of(holding, shapes, shares, memory.places)
        bell = Bell()
        members = [member(found, origin, bell, self._context, _gpu(memory))]
        moved = bring(holding, rows, members, bell, self._context, self._put, memory, found.entries)
        if self._keep:
            for path, read in files_beside(found, origin).items():
                self._keep(path, read())
        self._tensors = memory.tensors()
        self.identity = next((one.id for one in holding.identities), "")
        reason = f"{origin.uri}, past the cache"
        return Taken(self._received(route.STREAM, shares, holding.kinds, [moved], holding.version), reason)

    # -- peers ---------------------------------------------------------------------------------------------------

    def _from_peers(self) -> Taken[Received]:
        wanted = shares_wanted(self.puller)
        peering = SharePeering(self._context, wanted, self._request.wish)
        try:
            found, shares = peering.find_set(self._context.settings.wait or 0.0, self._agreed)
            memory = self._memory(found.shapes, shares, twins_among(found, shares))
            moved = _Set(found, shares, memory, peering, self._context, self._put).move()
            if self._keep:
                self._keep_from(found, peering)
            peering.check_versions()
            self._tensors, self.identity = memory.tensors(), wanted[0]
            kinds = {name: kind for group in found.groups for name, kind in group.holding.kinds.items()}
            version = min(group.holding.version for group in found.groups)
            self.peers = [peer for group in found.groups for peer in group.peers if peer.path]
            paths = ", ".join(f"{peer.address} by {peer.path}" for peer in self.peers)
            return Taken(self._received("peer", shares, kinds, moved, version), paths)
        finally:
            peering.close()

    def _keep_from(self, found: Offered, peering: SharePeering) -> None:
        """The small files of a checkpoint, where a peer has them: those that hold tensors only have none."""
        assert self._keep is not None
        for group in found.groups:
            records = [group.holding.manifest.record(path) for path in beside(group.holding.manifest)]
            sizes = {record.path: record.size for record in records if record}
            if not sizes:
                continue
            pool = Pool(sum(sizes.values()))
            starts = dict(zip(sizes, itertools.accumulate(sizes.values(), initial=0), strict=False))
            rows = [
                Rows(path, 0, size, 1, max(1, size), pool.address + starts[path], size, HOST)
                for path, size in sizes.items()
            ]
            memory = Memory({}, [(pool.address, pool.size, HOST)], dict, pool)
            bell = Bell()
            members = peering.members(bell, memory.regions, group)
            bring(group.holding, rows, members, bell, self._context, None, memory)
            for record in records:
                assert record is not None
                data = bytes(pool.view[starts[record.path] : starts[record.path] + record.size])
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

    def _received(
        self, name: str, shares: Mapping[str, Share], kinds: Mapping[str, str], moved: Sequence[Moved], version: int
    ) -> Received:
        buffers = sum(1 for one in shares if kinds.get(one) == "buffer")
        by_source: dict[str, int] = {}
        for one in moved:
            for source, count in one.by_source.items():
                by_source[source] = by_source.get(source, 0) + count
        return Received(
            len(shares),
            len(shares) - buffers,
            buffers,
            sum(one.bytes for one in moved),
            max((one.seconds for one in moved), default=0.0),
            name,
            (),
            by_source,
            version,
            sum(one.extra for one in moved),
        )


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


class _Set:
    """The transfer from several groups at once; what a failing group should have given comes from others, if they can."""

    def __init__(
        self,
        found: Offered,
        shares: Mapping[str, Share],
        memory: Memory,
        peering: SharePeering,
        context: Context,
        put: Put | None,
    ) -> None:
        self._found, self._shares, self._memory = found, shares, memory
        self._peering, self._context, self._put = peering, context, put

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
        rows: dict[int, list[Rows]] = {}
        for name, parts in plan.items():
            for part in parts:
                rows.setdefault(part.source, []).extend(self._rows(name, part))
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

    def _rows(self, name: str, part: Any) -> list[Rows]:
        holding = self._found.groups[part.source].holding
        file, start, _ = place_of(holding, name)
        dtype = self._found.shapes[name][0]
        place = self._memory.places[name]
        return rows_between(name, dtype, part.share, self._shares[name], file, start, place, part.only)

    def _begin(self, pool: ThreadPoolExecutor, index: int, rows: list[Rows], context: Context) -> Future[Moved]:
        group = self._found.groups[index]
        bell = Bell()
        members = self._peering.members(bell, merge_regions(self._memory.regions), group)
        many_runs = all(peer.path == "nixl-read" for peer in group.peers if peer.member)
        return pool.submit(
            bring, group.holding, rows, members, bell, context, self._put, self._memory, many_runs=many_runs
        )


def _gpu(memory: Memory) -> int:
    return only_gpu(device for _, _, device in memory.regions)
