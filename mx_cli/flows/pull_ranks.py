"""`pull` and `pull_into` with a rank: its part of every tensor, from peers of any parallel size, or from a disk."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

from mx_cli.base.cancel import Stop
from mx_cli.base.errors import Incompatible, MxError, StillLanding, TransportFailed, UsageError
from mx_cli.engine import route
from mx_cli.engine.many import Bell
from mx_cli.engine.route import Taken
from mx_cli.flows.context import Context
from mx_cli.flows.cuts import config_of, cut_of
from mx_cli.flows.holdings import local_holding
from mx_cli.flows.in_process import merged
from mx_cli.flows.pull import Pull, PullRequest
from mx_cli.flows.pull_memory import Moved, Put, Shape, compare_tables, disk_member, place_of, table
from mx_cli.flows.pull_tensors import Received
from mx_cli.flows.ranks import Memory, Place, bring, own_memory, rows_between, rows_of, twins_of
from mx_cli.flows.share_peers import Offered, SharePeering, offered, twins_among
from mx_cli.flows.targets import ALIGN, byte_block
from mx_cli.model import identity
from mx_cli.model.identity import kind_of
from mx_cli.model.share import Share
from mx_cli.plan.cover import Uncovered, cover
from mx_cli.plan.rows import Rows
from mx_cli.sinks.torch_tensors import Described

POLL = 0.5
CONFIG = "config.json"

Choose = Callable[[Mapping[str, Shape]], Sequence[str]]
"""The names to bring, of a table of the rank's own tensors. Raises Incompatible, UsageError."""
Make = Callable[[Mapping[str, Shape], Mapping[str, Share], Mapping[str, str]], Memory]
"""Memory for (whole shapes, the rank's shares, twins). Raises NoSpace, Incompatible before anything is written."""


class RankPull:
    """One pull of a rank's part: routes in order, each starting afresh."""

    def __init__(
        self, request: PullRequest, context: Context, rank: str, rules: Any, choose: Choose, make: Make, put: Put
    ) -> None:
        self._request, self._context, self._put = request, context, put
        self._rank, self._rules, self._choose, self._make = rank, rules, choose, make
        self._puller = Pull(request, context)
        self._tensors: dict[str, Any] = {}

    def run(self) -> tuple[Received, dict[str, Any]]:
        """What came, and the tensors that `make` made."""
        takers: dict[str, Callable[[], Taken[Received]]] = {
            "peer": self._from_peers,
            "cache": lambda: self._from_disk("cache"),
            "origin": lambda: self._from_disk("origin"),
        }
        names = [name for name in self._request.routes if name != "origin" or self._puller.origin_uri]
        received, attempts = route.first([(name, takers[name]) for name in names], self._say)
        return dataclasses.replace(received, attempts=tuple(attempts)), self._tensors

    def _say(self, attempt: route.Attempt) -> None:
        verb = "taken" if attempt.taken else "not taken"
        self._context.notice(f"route {attempt.route} {verb}: {attempt.reason}")

    def _shares(self, shapes: Mapping[str, Shape], config: Callable[[], Any]) -> dict[str, Share]:
        cut = cut_of(self._rank, self._rules, config)
        shares = cut.shares(shapes)
        local = {name: (shapes[name][0], share.local_shape) for name, share in shares.items()}
        return {name: shares[name] for name in self._choose(local)}

    # -- disk ----------------------------------------------------------------------------------------------------

    def _from_disk(self, name: str) -> Taken[Received]:
        taken = self._puller.from_cache() if name == "cache" else self._puller.from_origin()
        directory = taken.result.directory
        holding = local_holding(directory, self._context)
        shapes = table(holding)
        file = directory / CONFIG
        shares = self._shares(shapes, lambda: config_of(file.read_bytes() if file.is_file() else None))
        memory = self._make(shapes, shares, twins_of(holding, shapes, shares))
        bell = Bell()
        members = [disk_member(directory, holding, bell, self._context)]
        rows = rows_of(holding, shapes, shares, memory.places)
        moved = bring(holding, rows, members, bell, self._context, self._put, memory)
        self._tensors = memory.tensors()
        return Taken(self._received(name, shares, holding.kinds, [moved], holding.version), taken.reason)

    # -- peers ---------------------------------------------------------------------------------------------------

    def _wanted(self) -> list[str]:
        """The weights whole, and sets of peers that have them in parts."""
        if kind_of(self._request.model):
            return [self._request.model]
        known = self._puller.identities()
        return [one.id for one in known] + [identity.of_shares(one).id for one in known if one.kind == "origin"]

    def _from_peers(self) -> Taken[Received]:
        peering = SharePeering(self._context, self._wanted(), self._request.wish)
        try:
            found, shares = peering.find_set(self._context.settings.wait or 0.0, self._agreed)
            memory = self._make(found.shapes, shares, twins_among(found, shares))
            moved = _Set(found, shares, memory, peering, self._context, self._put).move()
            peering.check_all()
            self._tensors = memory.tensors()
            kinds = {name: kind for group in found.groups for name, kind in group.holding.kinds.items()}
            version = min(group.holding.version for group in found.groups)
            peers = [peer for group in found.groups for peer in group.peers if peer.path]
            paths = ", ".join(f"{peer.address} by {peer.path}" for peer in peers)
            return Taken(self._received("peer", shares, kinds, moved, version), paths)
        finally:
            peering.close()

    def _agreed(self, groups: Sequence[Any]) -> tuple[Offered, dict[str, Share]]:
        """Raises Incompatible unless the groups together have all that is wanted."""
        found = offered(groups)
        shares = self._shares(found.shapes, found.config)
        _parts(found, shares, list(shares), range(len(groups)))
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


def _parts(
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
        put: Put,
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
                plan = _parts(self._found, self._shares, todo, alive)
            except Incompatible as error:
                raise failure or error from None
            done, failed = self._round(plan)
            moved += done
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
                with self._context.stop.calling(lambda: _stop(work, self._context.stop)):
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
        members = self._peering.members_of(group, bell, merged(self._memory.regions))
        many_runs = all(peer.path == "nixl-read" for peer in group.peers if peer.member)
        return pool.submit(
            bring, group.holding, rows, members, bell, context, self._put, self._memory, many_runs=many_runs
        )


def _stop(work: Stop, outer: Stop) -> None:
    if outer.reason:
        work.request(outer.reason)


# --- where the tensors are --------------------------------------------------------------------------------------------


def own(names: Sequence[str] | None, device: int) -> tuple[Choose, Make]:
    """Tensors of this process's own: `names`, None for all."""

    def choose(local: Mapping[str, Shape]) -> Sequence[str]:
        if names is not None and (lacking := sorted(set(names) - local.keys())):
            raise UsageError(f"no such tensors: {', '.join(lacking[:5])}")
        return sorted(local if names is None else names)

    def make(shapes: Mapping[str, Shape], shares: Mapping[str, Share], twins: Mapping[str, str]) -> Memory:
        return own_memory(shapes, shares, twins, device)

    return choose, make


def into(described: Sequence[Described], *, allow_missing: bool, allow_extra: bool) -> tuple[Choose, Make]:
    """Tensors that are there: those that lie in one run get their bytes directly, others by a copy."""

    def choose(local: Mapping[str, Shape]) -> Sequence[str]:
        present = {_memory(one) for one in described if one.name in local}
        wanted: dict[str, Shape] = {
            one.name: (one.dtype, one.shape) for one in described if one.name in local or _memory(one) not in present
        }
        return compare_tables(local, wanted, allow_missing=allow_missing, allow_extra=allow_extra)

    def make(shapes: Mapping[str, Shape], shares: Mapping[str, Share], twins: Mapping[str, str]) -> Memory:
        return _target(_distinct([one for one in described if one.name in shares], twins))

    return choose, make


def _memory(one: Described) -> object:
    return one.tensor.data_ptr(), one.tensor.stride(), one.shape, one.dtype, one.device


def _distinct(described: Sequence[Described], twins: Mapping[str, str]) -> list[Described]:
    """One of each memory. Raises Incompatible where the source has different bytes for it, or where some overlaps."""
    kept: dict[object, Described] = {}
    for one in described:
        first = kept.setdefault(_memory(one) if one.size else one.name, one)
        if first is not one and twins.get(one.name, one.name) != twins.get(first.name, first.name):
            raise _torn(first.name, one.name)
    found = sorted(kept.values(), key=lambda one: (one.device, one.tensor.data_ptr()))
    for before, after in itertools.pairwise(one for one in found if one.size):
        if before.device == after.device and after.tensor.data_ptr() < _reach(before):
            raise _torn(before.name, after.name)
    return found


def _reach(one: Described) -> int:
    steps = zip(one.tensor.shape, one.tensor.stride(), strict=True)
    return int(one.tensor.data_ptr() + (1 + sum((size - 1) * step for size, step in steps)) * one.tensor.element_size())


def _torn(name: str, other: str) -> Incompatible:
    return Incompatible(
        f"tensors do not agree: {name} and {other} share memory here, and differ at the source",
        hint="untie them, or mx_cli.pull() gives new tensors",
    )


def _target(described: Sequence[Described]) -> Memory:
    from mx_cli.sinks.torch_tensors import tensor_of

    places = {one.name: Place(one.address, one.device) for one in described if not one.packed}
    regions = [(one.address, one.size, one.device) for one in described if not one.packed and one.size]
    copies: list[tuple[Described, Any]] = []
    for device in sorted({one.device for one in described if one.packed}):
        scattered = [one for one in described if one.packed and one.device == device]
        ends = list(itertools.accumulate((-(-one.size // ALIGN) * ALIGN for one in scattered), initial=0))
        block = byte_block(device, ends[-1])
        regions.append((block.data_ptr(), ends[-1], device))
        for one, at in zip(scattered, ends, strict=False):
            places[one.name] = Place(block.data_ptr() + at, device)
            copies.append((one, tensor_of(block, at, one.dtype, one.shape)))

    def finish() -> dict[str, Any]:
        import torch

        # Tensors made in inference mode accept changes only there.
        with torch.inference_mode():
            for one, bytes_there in copies:
                one.tensor.copy_(bytes_there)
        return {}

    return Memory(places, regions, finish, described)
