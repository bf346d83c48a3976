"""`mx pull --dry-run`: which routes there are, in the order in which they would be tried, and what each would cost."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mx_cli.base import units
from mx_cli.base.errors import MxError, NoPeer
from mx_cli.engine import route
from mx_cli.engine.buffers import STEP
from mx_cli.engine.route import Attempt
from mx_cli.flows.context import Context
from mx_cli.flows.data_path import READS, sockets
from mx_cli.flows.peering import Peering
from mx_cli.flows.prefetch import preview
from mx_cli.flows.pull import Pull, PullRequest, offline_context
from mx_cli.flows.refusals import said
from mx_cli.flows.request import Request
from mx_cli.transport.peer import ITEM


@dataclass(frozen=True)
class Choice:
    """A route: whether it can be taken now, and why or why not. `bytes` would be moved, with so much `memory` (bytes)."""

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


def plan(request: PullRequest, context: Context) -> Plan:
    """What a pull would do now. Blocks: asks discovery, peers and the origin, and a peer's path is tried with a MiB or two.

    Writes nothing. Raises what the pull would raise where no route is usable.
    """
    puller = Pull(request, context)
    looks: dict[str, Callable[[], Choice]] = {
        "peer": lambda: _peer(request, context, puller),
        "cache": lambda: _cache(request, context, puller),
        "origin": lambda: _origin(request, context, puller),
    }
    choices: list[Choice] = []
    errors: list[MxError] = []
    for name in puller.routes(route.BY_CACHE):
        try:
            choices.append(looks[name]())
        except route.FALLS_THROUGH as error:
            choices.append(Choice(name, False, error.what))
            errors.append(error)
    if not any(choice.usable for choice in choices):
        raise route.summed([Attempt(choice.route, False, choice.reason) for choice in choices], errors)
    return Plan(tuple(choices))


def _peer(request: PullRequest, context: Context, puller: Pull) -> Choice:
    peering = Peering(context, puller.wanted(), request.wish)
    try:
        group = peering.find(context.settings.wait or 0.0)
        peering.try_paths()
        sources = [peer for peer in group.peers if peer.path]
        reasons = "; ".join(said(peer.address, f"{peer.path or 'none'}: {peer.reason}") for peer in group.peers)
        if not sources:
            raise NoPeer(f"no peer could be read now ({reasons})", hint="--wait DURATION waits for a slot")
        size = sum(record.size for record in group.holding.manifest.files)
        reads = sum(READS if peer.path == "nixl-read" else sockets() for peer in sources)
        reason = f"{units.count(len(sources), 'source')} ({reasons})"
        return Choice("peer", True, reason, size, reads * ITEM)
    finally:
        peering.close()


def _cache(request: PullRequest, context: Context, puller: Pull) -> Choice:
    if not puller.uri:
        found = puller.snapshot()
        return Choice("cache", True, f"complete snapshot of {found.uri}")
    there = preview(Request(puller.uri, revision=request.revision), offline_context(context))
    if there.missing or not there.directory.is_dir():
        return Choice("cache", False, f"incomplete: {units.size(there.missing)} are missing")
    return Choice("cache", True, f"complete snapshot of {there.uri}")


def _origin(request: PullRequest, context: Context, puller: Pull) -> Choice:
    found = preview(Request(puller.origin_uri, revision=request.revision), context)
    size = sum(count or 0 for _, count, _ in found.files)
    reason = f"{found.uri}: {units.size(found.missing)} to fetch of {units.size(size)}"
    return Choice("origin", True, reason, found.missing, context.settings.max_connections * STEP)
