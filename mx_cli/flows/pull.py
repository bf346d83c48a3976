"""`mx pull`: the weights by the best route: from a peer, from the cache, from the origin into it, or past it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mx_cli.base import units
from mx_cli.base.errors import Incompatible, NoPeer, NotFound, UsageError
from mx_cli.engine import route
from mx_cli.engine.route import Attempt, Taken
from mx_cli.flows import deliver
from mx_cli.flows.context import Context, is_immutable
from mx_cli.flows.data_path import Wish
from mx_cli.flows.fill_directory import Filling
from mx_cli.flows.group import Sourced, sources_of
from mx_cli.flows.hash import is_local
from mx_cli.flows.hash_anything import hash_anything
from mx_cli.flows.new_directory import NewDirectory
from mx_cli.flows.peer_supply import FromPeers
from mx_cli.flows.peering import Peering
from mx_cli.flows.prefetch import Prefetch
from mx_cli.flows.pull_files import Pulled, pull_files
from mx_cli.flows.request import Outcome, Request
from mx_cli.flows.supply import FromOrigin
from mx_cli.model import identity
from mx_cli.model.holding import Holding
from mx_cli.model.identity import Identity, kind_of
from mx_cli.model.manifest import Manifest
from mx_cli.sources.uri import parse


@dataclass(frozen=True)
class PullRequest:
    """`model`: a URI, an identity, or a local model whose twin is wanted. `routes`: of route.NAMES, in order; none: the usual.

    `origin`: the URI to fall back to for an identity. `to`: a directory to make instead of a snapshot in the cache.
    """

    model: str
    wish: Wish = Wish()
    revision: str | None = None
    origin: str | None = None
    to: Path | None = None
    routes: tuple[str, ...] = ()


@dataclass(frozen=True)
class PullOutcome:
    """The answer of `mx pull`. `rank` (r/n): of whose part it is, empty for all."""

    directory: Path
    route: str
    identity: str
    attempts: tuple[Attempt, ...]
    sources: tuple[Sourced, ...]
    bytes_total: int
    bytes_moved: int
    seconds: float
    files: int
    rank: str = ""

    def to_json(self) -> dict[str, Any]:
        part = {"rank": self.rank} if self.rank else {}
        return {
            "schema": 1,
            "dir": str(self.directory),
            "route": self.route,
            "identity": self.identity,
            "routes": [attempt.to_json() for attempt in self.attempts],
            "sources": [source.to_json() for source in self.sources],
            "bytes_total": self.bytes_total,
            "bytes_moved": self.bytes_moved,
            "files": self.files,
            "seconds": round(self.seconds, 3),
            **part,
        }

    def summary(self) -> str:
        """One line: where from, how much, how fast."""
        rate = f" at {units.rate(self.bytes_moved / self.seconds)}" if self.bytes_moved and self.seconds else ""
        ways = ", ".join(f"{source.address} by {source.path} {units.size(source.bytes)}" for source in self.sources)
        moved = f"{units.size(self.bytes_moved)} moved{rate}"
        return f"route {self.route}: {units.count(self.files, 'file')}, {moved}" + (f" ({ways})" if ways else "")


def pull(request: PullRequest, context: Context) -> PullOutcome:
    """Blocks until the weights are there, whole and verified. Idempotent for the cache; `to` must not hold other files.

    Raises NoPeer, Incompatible and whatever the last route raised; a target that was not completed is left as it was.
    """
    run = Pull(request, context)
    try:
        return run.run()
    finally:
        run.leave()


class Pull:
    """One run; see `pull`. After it `leave` gives the grants back. `holding` is what peers gave, None by another route.
    `snapshot_taken` is where the cache has the weights, None for those that went past it.

    `own`: the generation of this process's own peer, which is no source for it.
    """

    def __init__(self, request: PullRequest, context: Context, own: str = "") -> None:
        self._request, self._context, self._own = request, context, own
        self._wait = context.settings.wait or 0.0
        self._peering: Peering | None = None
        self.holding: Holding | None = None
        self.snapshot_taken: Path | None = None
        request.wish.check()
        self._cache_lacks = False
        if unknown := [name for name in request.routes if name not in route.NAMES]:
            raise UsageError(f"not a route (--route {','.join(unknown)}: expected {', '.join(route.NAMES)})")
        identity.refuse_part(request.model)
        # What was asked for, if that is a URI.
        self.uri = "" if kind_of(request.model) or is_local(request.model) else request.model
        if self.uri:
            # What is no URI is refused here, and not by each route in turn.
            parse(self.uri)
        if kind_of(request.model) == "config":
            raise UsageError(f"{request.model} identifies a configuration, no weights", hint="mx hash MODEL")
        if request.revision is not None and not self.uri:
            raise UsageError("--revision is for a URI")
        if request.origin and self.uri:
            raise UsageError("--origin is for an identity: the URI is the origin")
        if request.to:
            deliver.check(Request(request.model, to=request.to), request.model, context.cache().root)

    def run(self) -> PullOutcome:
        takers: Mapping[str, Callable[[], Taken[PullOutcome]]] = {
            "peer": self._from_peer,
            "cache": self.from_cache,
            "origin": self.from_origin,
            route.STREAM: self._from_stream,
        }
        outcome, attempts = route.first([(name, takers[name]) for name in self.routes_of_files()], self.say)
        return dataclasses.replace(outcome, attempts=tuple(attempts))

    def routes_of_files(self) -> list[str]:
        """Those of whole files. Raises UsageError for a stream without a place."""
        if self._request.to is None and route.STREAM in self._request.routes:
            raise UsageError("--route stream: past the cache, the files need a place", hint="--to DIR")
        return self.routes(route.NAMES if self._request.to else route.BY_CACHE)

    def routes(self, usual: Sequence[str]) -> list[str]:
        """What was asked for, or the usual, without those that need an origin where there is none."""
        lacking = set() if self.origin_uri else set(route.NAMES) - route.WITHOUT_ORIGIN
        if self._stream_is_named and self.straight_from:
            lacking.discard(route.STREAM)
        return [one for one in self._request.routes or usual if one not in lacking]

    @property
    def _stream_is_named(self) -> bool:
        return route.STREAM in self._request.routes and self._request.routes != route.NAMES

    @property
    def straight_from(self) -> str:
        """What a stream reads: the origin's URI, or a directory of this machine that was named; empty for neither."""
        return self.origin_uri or (self._request.model if is_local(self._request.model) else "")

    def say(self, attempt: Attempt) -> None:
        """Tell which route was taken or not, and why. Raises the reason of a stop, which is no fault of the route."""
        if not attempt.taken:
            self._context.stop.check()
        self._context.notice(attempt.text())

    @property
    def origin_uri(self) -> str:
        """The URI to fetch from when all else fails; empty when there is none."""
        return self.uri or self._request.origin or ""

    # -- peer ----------------------------------------------------------------------------------------------------

    def _from_peer(self) -> Taken[PullOutcome]:
        peering = self._peering = Peering(self._context, self.wanted(), self._request.wish, self._own)
        try:
            group = peering.find(self._wait)
            matched = group.peers[0].matched
            kind = kind_of(matched)
            reason = f"{units.count(len(group.peers), 'peer')} with the same {kind} identity {matched}"
            if self._request.to:
                pulled = pull_files(peering, self._request.to, self._context)
                self.holding = group.holding
                return Taken(self._outcome(pulled, matched), reason)
            manifest = group.holding.manifest
            check_named(manifest, matched)
            outcome = self._into_cache(peering, manifest, matched)
            return Taken(outcome, reason if outcome.route == "peer" else f"{reason}; the cache has all of it")
        except BaseException:
            self.leave()
            raise

    def leave(self, serving: str = "", verified: int = 0) -> None:
        """Give grants back. `serving`: where this process offers the `verified` bytes itself from now on. Idempotent."""
        if self._peering:
            self._peering.close(serving, verified)
            self._peering = None

    @property
    def by_identity(self) -> bool:
        """Whether the model was given by an identity, not by a URI or a directory."""
        return kind_of(self._request.model) is not None

    def wanted(self) -> list[str]:
        """The identities that a source may match. Asks the origin where the revision is a moving name."""
        if self.by_identity:
            return [self._request.model]
        return [one.id for one in self.identities()]

    def identities(self) -> list[Identity]:
        """Like `wanted`, as records, for a model not given by identity. Raises NoPeer without an immutable revision."""
        request, context = self._request, self._context
        if not self.uri:
            found = hash_anything(request.model, context).identities
            return [one for one in found if one.kind != "config"]
        origin = context.origin(self.uri)
        try:
            revision = request.revision or origin.revision
            if not is_immutable(origin.uri, revision):
                if context.settings.offline:
                    raise NoPeer("the revision is not known without the origin", hint="give URI@revision")
                revision = origin.listing(revision or None, context.stop).revision
            if not revision:
                raise NoPeer(f"{origin.uri} has no immutable revision that a peer could match")
            return [identity.of_origin(origin.uri, revision)]
        finally:
            origin.close()

    def _into_cache(self, peering: Peering, manifest: Manifest, matched: str) -> PullOutcome:
        request = Request(manifest.uri, revision=manifest.revision)
        supply = FromPeers(self._context, manifest.uri, manifest.revision, peering, None, self._wait)
        outcome = Prefetch(request, self._context, supply).run()
        moved = supply.by_peer()
        sources = sources_of(peering.group.peers if peering.group else (), moved)
        return self._cached(outcome, "peer" if any(moved.values()) else "cache", matched, sources)

    def _outcome(self, pulled: Pulled, matched: str) -> PullOutcome:
        return PullOutcome(
            directory=pulled.directory,
            route="peer",
            identity=matched,
            attempts=(),
            sources=pulled.sources,
            bytes_total=pulled.bytes,
            bytes_moved=pulled.moved,
            seconds=pulled.seconds,
            files=pulled.files,
        )

    # -- cache and origin ----------------------------------------------------------------------------------------

    def from_cache(self) -> Taken[PullOutcome]:
        """A complete snapshot, the origin unasked. Raises NotFound."""
        if self.uri:
            outcome = self._prefetch(self.uri, self._request.revision, offline=True)
            return Taken(self._cached(outcome, "cache", _strongest(outcome.identity)), "a complete snapshot is there")
        found = self.snapshot()
        outcome = self._prefetch(found.uri, found.revision, offline=True)
        return Taken(self._cached(outcome, "cache", _strongest(outcome.identity)), "a snapshot has the identity")

    def snapshot(self) -> Manifest:
        """A whole snapshot of the cache with one of the identities. Raises NotFound."""
        wanted = set(self.wanted())
        for model in self._context.cache().all_models():
            snapshots = self._context.snapshots(model)
            for manifest in snapshots.everything():
                if wanted & set(manifest.identity.values()) and not snapshots.missing(manifest):
                    return manifest
        raise NotFound(f"no snapshot in the cache has the identity {' or '.join(sorted(wanted))}", hint="mx cache ls")

    def from_origin(self) -> Taken[PullOutcome]:
        """The snapshot, fetched where it is not there. Raises what a prefetch raises, Incompatible for other weights."""
        try:
            outcome = self._prefetch(self.origin_uri, self._request.revision, offline=False)
        except route.OF_THE_CACHE:
            self._cache_lacks = True
            raise
        if not self.uri and not set(self.wanted()) & set(outcome.identity.values()):
            raise self._other_weights(_strongest(outcome.identity))
        # What another process fetched meanwhile, or what was there, came out of the cache in the end.
        how = "fetched" if outcome.role == "leader" else f"as {outcome.role}"
        return Taken(self._cached(outcome, "origin", _strongest(outcome.identity)), f"{self.origin_uri}, {how}")

    # -- stream --------------------------------------------------------------------------------------------------

    def check_stream(self, *, of_a_part: bool = False) -> None:
        """Raises NotFound where the route stream is not for this pull: the cache takes the weights, for all to use.

        It is for a part of the weights, where it was named, and after the cache could not take them.
        """
        if not (of_a_part or self._stream_is_named or self._cache_lacks):
            raise NotFound("only where the cache cannot take the weights, or where it is named (--route)")
        if self._context.settings.offline and self.origin_uri:
            raise NotFound(f"{self.origin_uri}: offline", hint="run without --offline")

    def accept(self, known: Mapping[str, str]) -> None:
        """Raises Incompatible where the identities of what comes from the origin (kind -> id) are not the one wanted."""
        wanted = kind_of(self._request.model)
        if wanted and known.get(wanted, self._request.model) != self._request.model:
            raise self._other_weights(known[wanted])

    def accept_unread(self, holding: Holding) -> None:
        """Like `accept`, before the weights are read: a content identity cannot be checked then. Raises Incompatible."""
        known = {one.kind: one.id for one in holding.identities}
        if kind_of(self._request.model) == "content" and "content" not in known:
            raise Incompatible(
                f"whether {self.straight_from} is {self._request.model} is known only when all of it was read",
                hint="--route origin reads it into the cache first",
            )
        self.accept(known)

    def _other_weights(self, found: str) -> Incompatible:
        return Incompatible(
            f"{self.origin_uri} holds other weights ({found}, expected {self._request.model})",
            hint="mx hash MODEL --diff OTHER names what differs",
        )

    def _from_stream(self) -> Taken[PullOutcome]:
        self.check_stream()
        assert self._request.to is not None, "checked before"
        from mx_cli.flows.stream_files import stream_files

        found = stream_files(self.straight_from, self._request.revision, self._request.to, self.accept, self._context)
        outcome = PullOutcome(
            directory=self._request.to,
            route=route.STREAM,
            identity=_strongest(found.identity),
            attempts=(),
            sources=(),
            bytes_total=found.bytes,
            bytes_moved=found.moved,
            seconds=found.seconds,
            files=found.files,
        )
        return Taken(outcome, f"{found.uri}, past the cache")

    def _prefetch(self, uri: str, revision: str | None, *, offline: bool) -> Outcome:
        context = self._context.with_settings(offline=True) if offline else self._context
        request = Request(uri, revision=revision)
        outcome = Prefetch(request, context, FromOrigin(context.origin(uri), context.settings)).run()
        if self._request.to:
            self._fill(outcome)
        return outcome

    def _fill(self, outcome: Outcome) -> None:
        model = self._context.cache().model(outcome.uri)
        snapshots = self._context.snapshots(model)
        assert self._request.to is not None
        for manifest in snapshots.of(outcome.revision):
            if model.snapshot(manifest.directory) == outcome.directory:
                filling = Filling(self._context, outcome.directory, list(manifest.files), self._request.to)
                if filling.others():
                    raise NewDirectory(self._request.to).other_files()
                filling.run()
                return

    def _cached(self, outcome: Outcome, name: str, matched: str, sources: tuple[Sourced, ...] = ()) -> PullOutcome:
        self.snapshot_taken = outcome.directory
        return PullOutcome(
            directory=self._request.to or outcome.directory,
            route=name,
            identity=matched,
            attempts=(),
            sources=sources,
            bytes_total=outcome.bytes_total,
            bytes_moved=outcome.bytes_fetched,
            seconds=sum(outcome.clock.phases().values()),
            files=outcome.files,
        )


def check_named(manifest: Manifest, matched: str) -> None:
    """Raises NoPeer where what a peer holds of the identity `matched` has no name in the cache."""
    if not manifest.uri or not manifest.revision:
        raise NoPeer(f"{matched} has no origin that the cache could keep it under", hint="--to DIR")


def _strongest(known: Mapping[str, str | None]) -> str:
    """The content identity, else that of the origin; empty when neither is known (kind -> id)."""
    return known.get("content") or known.get("origin") or ""
