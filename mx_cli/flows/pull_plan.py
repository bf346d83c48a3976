"""`mx pull --dry-run`: which routes there are, in the order in which they would be tried, and what each would cost."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mx_cli.base import units
from mx_cli.base.errors import MxError, NoPeer, NotFound
from mx_cli.engine import route
from mx_cli.engine.route import Attempt
from mx_cli.flows.bounds import CONNECTION, connections, width
from mx_cli.flows.catalog import catalog, found_config
from mx_cli.flows.context import Context
from mx_cli.flows.cuts import cut_of
from mx_cli.flows.data_path import reads, sockets
from mx_cli.flows.group import Group
from mx_cli.flows.peering import Peering
from mx_cli.flows.prefetch import preview
from mx_cli.flows.pull import Pull, PullRequest, check_named
from mx_cli.flows.pull_memory import table
from mx_cli.flows.pull_ranks import parts_of, rows_by_group, shares_wanted
from mx_cli.flows.ranks import Place, items_to_read, rows_of
from mx_cli.flows.refusals import said
from mx_cli.flows.request import Request
from mx_cli.flows.share_peers import Offered, SharePeering, offered
from mx_cli.model.holding import Holding
from mx_cli.model.manifest import Entry
from mx_cli.plan.rows import Rows
from mx_cli.transport.disk import LOCAL_READS
from mx_cli.transport.peer import ITEM


@dataclass(frozen=True)
class Choice:
    """A route: whether it can be taken now, and why or why not.

    `bytes` would be moved, of a rank what is read for it, with so much `memory` (bytes) beside the weights' own.
    """

    route: str
    usable: bool
    reason: str
    bytes: int = 0
    memory: int = 0

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


@dataclass(frozen=True)
class Plan:
    """All routes of a pull, the first to be tried first; at least one is usable."""

    choices: tuple[Choice, ...]

    @property
    def taken(self) -> Choice:
        return next(choice for choice in self.choices if choice.usable)

    def to_json(self) -> dict[str, Any]:
        return {
            "schema": 1,
            "route": self.taken.route,
            "bytes": self.taken.bytes,
            "memory": self.taken.memory,
            "routes": [choice.to_json() for choice in self.choices],
        }


def plan(request: PullRequest, context: Context, rank: str | None = None, rules: str | None = None) -> Plan:
    """What a pull would do now. Blocks: asks discovery, peers and the origin, and a peer's path is tried with a MiB or two.

    Of a rank (see `pull_share`) the headers are read, to tell how much is its. Writes nothing. Raises what the pull would
    raise where no route is usable.
    """
    look = _Look(request, context) if rank is None else _LookForRank(request, context, rank, rules)
    choices: list[Choice] = []
    errors: list[MxError] = []
    for name in look.routes():
        try:
            choices.append(look.at(name))
        except route.FALLS_THROUGH as error:
            choices.append(Choice(name, False, error.what))
            errors.append(error)
    if not any(choice.usable for choice in choices):
        raise route.summed([Attempt(choice.route, False, choice.reason) for choice in choices], errors)
    return Plan(tuple(choices))


class _Look:
    """A look at each route of whole weights."""

    def __init__(self, request: PullRequest, context: Context) -> None:
        self._request, self._context = request, context
        self._puller = Pull(request, context)

    def routes(self) -> list[str]:
        return self._puller.routes_of_files()

    def at(self, name: str) -> Choice:
        """Raises one of FALLS_THROUGH for a route that cannot be taken."""
        looks = {"peer": self._peer, "cache": self._cache, "origin": self._origin, route.STREAM: self._stream}
        return looks[name]()

    def _peer(self) -> Choice:
        context = self._context
        peering = Peering(context, self._puller.wanted(), self._request.wish)
        try:
            group = peering.find(context.settings.wait or 0.0)
            peering.try_paths()
            sources = [peer for peer in group.peers if peer.path]
            reasons = "; ".join(said(peer.address, f"{peer.path or 'none'}: {peer.reason}") for peer in group.peers)
            if not sources:
                raise NoPeer(f"no peer could be read now ({reasons})", hint="--wait DURATION waits for a slot")
            size = self._to_move(group)
            in_flight = sum(reads() if peer.path == "nixl-read" else sockets() for peer in sources)
            reason = f"{units.count(len(sources), 'source')} ({reasons})"
            if not size:
                return Choice("peer", True, f"{reason}; the cache has all of it")
            return Choice("peer", True, reason, size, width(context, in_flight, ITEM) * ITEM)
        finally:
            peering.close()

    def _to_move(self, group: Group) -> int:
        """Bytes that peers would give. Raises NoPeer where they have no place."""
        manifest = group.holding.manifest
        size = sum(record.size for record in manifest.files)
        if self._request.to:
            return size
        check_named(manifest, group.peers[0].matched)
        try:
            request = Request(manifest.uri, revision=manifest.revision)
            return preview(request, self._context.with_settings(offline=True)).missing
        except NotFound:
            return size

    def _cache(self) -> Choice:
        uri, directory = self._snapshot()
        return Choice("cache", True, f"complete snapshot of {uri} ({_ways(directory)})")

    def _snapshot(self) -> tuple[str, Path]:
        """(URI, directory) of the snapshot that would be taken. Raises NotFound."""
        puller = self._puller
        if not puller.uri:
            found = puller.snapshot()
            return found.uri, self._context.cache().model(found.uri).snapshot(found.directory)
        there = preview(Request(puller.uri, revision=self._request.revision), self._context.with_settings(offline=True))
        if there.missing or not there.directory.is_dir():
            raise NotFound(f"incomplete: {units.size(there.missing)} are missing")
        return there.uri, there.directory

    def _origin(self) -> Choice:
        found = preview(Request(self._puller.origin_uri, revision=self._request.revision), self._context)
        size = sum(count or 0 for _, count, _ in found.files)
        reason = f"{found.uri}: {units.size(found.missing)} to fetch of {units.size(size)}"
        return Choice("origin", True, reason, found.missing, connections(self._context) * CONNECTION)

    def _stream(self) -> Choice:
        self._puller.check_stream()
        context = self._context
        found = preview(Request(self._puller.straight_from, revision=self._request.revision), context)
        size = sum(count or 0 for _, count, _ in found.files)
        return Choice(route.STREAM, True, f"{found.uri}, past the cache", size, connections(context) * CONNECTION)


def _ways(directory: Path) -> str:
    """Whether the files can go straight into a GPU's memory: by way of the host's they always can."""
    from mx_cli.transport.gds import verdict

    weights = sorted(directory.rglob("*.safetensors"))
    lacking = verdict(file=weights[0] if weights else None)
    return f"gds: {lacking}" if lacking else "gds: works"


class _LookForRank(_Look):
    """A look at each route of one rank's part."""

    def __init__(self, request: PullRequest, context: Context, rank: str, rules: str | None) -> None:
        super().__init__(request, context)
        self._rank, self._rules = rank, rules

    def routes(self) -> list[str]:
        return self._puller.routes(route.OF_A_PART)

    def _peer(self) -> Choice:
        context = self._context
        peering = SharePeering(context, shares_wanted(self._puller), self._request.wish)
        try:
            found, size = peering.find_set(context.settings.wait or 0.0, self._from_groups)
            peers = [peer for group in found.groups for peer in group.peers]
            reason = f"{units.count(len(peers), 'source')} of {units.count(len(found.groups), 'part')}"
            return Choice("peer", True, reason, size, width(context, len(found.groups) * reads(), ITEM) * ITEM)
        finally:
            peering.close()

    def _from_groups(self, groups: Sequence[Group]) -> tuple[Offered, int]:
        found = offered(groups)
        shares = cut_of(self._rank, self._rules, found.config).shares(found.shapes)
        plan = parts_of(found, shares, list(shares), range(len(groups)))
        rows = rows_by_group(found, shares, plan, dict.fromkeys(shares, Place(0, 0)))
        return found, sum(_size_of_items(groups[index].holding, mine, {}) for index, mine in rows.items())

    def _cache(self) -> Choice:
        uri, directory = self._snapshot()
        size = self._bytes(str(directory), None)
        reason = f"complete snapshot of {uri} ({_ways(directory)})"
        return Choice("cache", True, reason, size, width(self._context, LOCAL_READS, ITEM) * ITEM)

    def _stream(self) -> Choice:
        self._puller.check_stream(of_a_part=True)
        uri = self._puller.straight_from
        size = self._bytes(uri, self._request.revision)
        return Choice(route.STREAM, True, f"{uri}, past the cache", size, connections(self._context) * CONNECTION)

    def _bytes(self, model: str, revision: str | None) -> int:
        """What the rank's part costs to read, with the gaps that are read along."""
        found, origin = catalog(model, revision, self._context)
        try:
            self._puller.accept_unread(found.holding)
            shapes = table(found.holding)
            shares = cut_of(self._rank, self._rules, lambda: found_config(found, origin)).shares(shapes)
            rows = rows_of(found.holding, shapes, shares, dict.fromkeys(shares, Place(0, 0)))
            return _size_of_items(found.holding, rows, found.entries)
        finally:
            origin.close()


def _size_of_items(holding: Holding, rows: Sequence[Rows], entries: Mapping[str, Entry]) -> int:
    return sum(item.length or 0 for item in items_to_read(holding, rows, entries))
