"""`mx prefetch`: the checkpoint into the shared cache; one process downloads, the others follow."""

from __future__ import annotations

import dataclasses
import time
from typing import TYPE_CHECKING

from mx_cli.base import units
from mx_cli.base.errors import (
    AccessDenied,
    FilesystemRefused,
    MxError,
    TransportFailed,
    Unreachable,
    UsageError,
    WaitExpired,
)
from mx_cli.base.events import Progress
from mx_cli.cache.beat import Deposed
from mx_cli.cache.files import names
from mx_cli.cache.follow import Watch
from mx_cli.cache.layout import Cache, Model, revision_name
from mx_cli.cache.lease import Lease
from mx_cli.cache.parts import sweep
from mx_cli.cache.reserve import check_names, probe_rename
from mx_cli.cache.snapshots import Snapshots
from mx_cli.flows import deliver
from mx_cli.flows.context import Context
from mx_cli.flows.fill_directory import Filling
from mx_cli.flows.lead import Landing, Leader, Unwatched
from mx_cli.flows.progress import watching
from mx_cli.flows.request import Clock, Led, Outcome, Preview, Request, Wanted
from mx_cli.flows.resolve import CHANGES, Resolver, listing_anew
from mx_cli.flows.select import amount
from mx_cli.flows.supply import FromOrigin, Supply
from mx_cli.flows.verify import verify_snapshot
from mx_cli.model.manifest import Listing, Manifest, selection_digest

if TYPE_CHECKING:
    from mx_cli.flows.peering import Peering

# What a follower may hope to do better than its leader: other credentials, another network, another mount.
OWN_TRY = (AccessDenied, Unreachable, TransportFailed, FilesystemRefused)
# A leader spent minutes on these before it failed: a second one is proof enough.
SLOW = (Unreachable, TransportFailed)


def prefetch(request: Request, context: Context, landing: Landing | None = None) -> Outcome:
    """Blocks until the selection is complete in the cache. Idempotent: what is there is not fetched again.

    `landing` hears of the bytes that this process fetches; of what was there, or what others fetch, nothing.

    Raises the MxErrors of the exit-code table; whatever was fetched before a failure is kept for the next run.
    """
    peering = _peering(request, context)
    try:
        return Prefetch(request, context, _supply(request, context, peering), landing).run()
    finally:
        if peering:
            peering.close()


def preview(request: Request, context: Context) -> Preview:
    """What a prefetch would do. Asks the origin, writes nothing."""
    return Prefetch(request, context, _supply(request, context, None)).preview()


def _peering(request: Request, context: Context) -> Peering | None:
    """A search for peers, where they are to be asked: by `--from`, or since discovery is set."""
    named = request.sources or (("peer", "origin") if context.settings.discovery else ("origin",))
    if unknown := [name for name in named if name not in ("peer", "origin")]:
        raise UsageError(f"not a source (--from {','.join(unknown)}: expected peer, origin or both)")
    if "peer" not in named:
        return None
    # Who asks no peer does not pay for the modules that do.
    from mx_cli.flows.data_path import Wish
    from mx_cli.flows.peering import Peering

    return Peering(context, [], Wish())


def _supply(request: Request, context: Context, peering: Peering | None) -> Supply:
    origin = FromOrigin(context.origin(request.uri, request.version_id), context.settings)
    if peering is None:
        return origin
    from mx_cli.flows.peer_supply import FromPeers

    only_peers = "origin" not in (request.sources or ("peer", "origin"))
    # Where the origin stands by, nobody waits for a peer to appear.
    wait = (context.settings.wait or 0.0) if only_peers else 0.0
    return FromPeers(context, origin.uri, origin.revision, peering, None if only_peers else origin, wait)


class Prefetch:
    """One run: find out what is wanted, and get it. `supply` is closed with it."""

    def __init__(self, request: Request, context: Context, supply: Supply, landing: Landing | None = None) -> None:
        self._request, self._context, self._supply = request, context, supply
        self._landing = landing or Unwatched()
        self._clock = Clock()
        self._cache: Cache = context.cache()
        self._model: Model = self._cache.model(supply.uri)
        self._snapshots: Snapshots = context.snapshots(self._model)
        self._resolver = Resolver(context, request, supply, self._model, self._snapshots)
        self._led: list[tuple[str, int]] = []

    def run(self) -> Outcome:
        deliver.check(self._request, self._supply.uri, self._cache.root)
        try:
            return listing_anew(self._once, lambda: self._resolver.pinned, self._context.warn)
        finally:
            self._supply.close()

    def preview(self) -> Preview:
        try:
            listing = self._resolver.listing()
            wanted = self._wanted(listing)
        finally:
            self._supply.close()
        there = self._resolver.there(listing)
        rows = tuple((e.path, e.size, e.path in there) for e in listing.files if e.path in wanted.files)
        directory = self._snapshots.directory_for(listing.revision, wanted.weights)
        return Preview(self._supply.uri, listing.revision, self._model.snapshot(directory), rows, wanted.skipped)

    def _once(self) -> Outcome:
        start = time.monotonic()
        # Where nothing can be a hit, find out now, not after the listing, whether the cache can be written.
        listing = self._resolver.listing(before_asking=self._prepare)
        wanted = self._wanted(listing)
        self._clock.resolve += time.monotonic() - start
        deliver.check_names_in_place(self._request, wanted.files)
        self._context.notice(f"revision {listing.revision or 'unknown'}: {amount(listing, wanted)}")
        hit = listing.revision and self._snapshots.complete(listing.revision, wanted.files, wanted.weights)
        if hit and self._kept(hit):
            return self._hit(hit, listing, wanted)
        return self._obtain(self._resolver.from_origin(listing, wanted), wanted)

    def _wanted(self, listing: Listing) -> Wanted:
        """The selection; what it leaves out is said."""
        wanted = self._resolver.wanted(listing)
        if wanted.skipped:
            self._context.notice(wanted.skipped)
        return wanted

    # -- getting it ----------------------------------------------------------------------------------------------

    def _prepare(self) -> None:
        self._cache.prepare()
        probe_rename(self._cache.models)

    def _obtain(self, listing: Listing, wanted: Wanted) -> Outcome:
        """Follow whoever leads, or lead. Who may not write here follows only."""
        refusal = self._prepare_for(listing, wanted)
        lease = self._context.lease(self._model, listing.revision)
        watch = Watch(lease, self._context.settings.ttl)
        quick = Snapshots(self._model)
        began = time.monotonic()
        following, first = 0, 0
        while True:
            self._context.stop.check()
            view = watch.look()
            vacant = watch.vacant()
            revision = revision_name(listing.revision, following)
            # Before leading: what look-ups may hide yet is waited for, not fetched again.
            snapshots = self._snapshots if vacant else quick
            found = snapshots.complete(revision, wanted.files, wanted.weights)
            if found and (listing.revision or following):
                self._clock.wait = time.monotonic() - began - self._spent()
                self._tidy()
                return self._finish(found, listing, wanted, "follower", 0)
            if view.failed and first:
                self._heed(lease, view.term, sum(term >= first for term in view.failures), wanted)
            if vacant and refusal:
                raise refusal
            if vacant:
                term = view.term + 1
                claimed = lease.claim(term)
                self._context.detail(f"{watch.ended}; term {term} {'is mine' if claimed else 'is claimed by another'}")
                if claimed:
                    self._clock.wait = time.monotonic() - began - self._spent()
                    try:
                        return self._lead(lease, term, listing, wanted)
                    except Deposed as error:
                        self._deposed(lease, term, revision_name(listing.revision, term), error)
                following = 0
                # A listing that is older than a lost claim must not make it be tried at full speed.
                self._context.stop.wait(watch.pause())
                continue
            if following != view.term:
                self._context.detail(f"term {view.term} is led by {lease.leader(view.term)}")
            following = view.term
            first = first or following
            self._tell(watch, lease, listing, wanted)
            self._check_wait(began)
            self._context.stop.wait(watch.pause())

    def _heed(self, lease: Lease, term: int, failures: int, wanted: Wanted) -> None:
        """The leader that was followed failed: raise its error, unless this process may fare better."""
        failure = lease.failure(term)
        if lease.failed_selection(term) in ("", selection_digest(wanted.files)):
            if not isinstance(failure, OWN_TRY) or (failures > 1 and isinstance(failure, SLOW)):
                raise failure
            self._context.warn(f"the leader failed ({failure.what}); trying once myself")

    def _deposed(self, lease: Lease, term: int, revision: str, error: Deposed) -> None:
        """Another process leads. Without any other, files vanish for another reason, and trying for ever is no use."""
        self._led.append((revision, term))
        if lease.look().term == term and len(self._led) >= CHANGES:
            raise FilesystemRefused(f"{self._model.path}: files vanish while they are written") from error
        self._context.warn("another process took over; following it")

    def _tidy(self) -> None:
        """Remove what this process made after its successor had swept."""
        for revision, term in self._led:
            sweep(self._model.staging(revision), term)

    def _spent(self) -> float:
        return self._clock.transfer + self._clock.verify + self._clock.publish

    def _prepare_for(self, listing: Listing, wanted: Wanted) -> FilesystemRefused | None:
        """Make what a leader needs. Returns why it cannot be made."""
        try:
            self._prepare()
            self._model.prepare()
            check_names(self._model.path, wanted.files)
        except FilesystemRefused as error:
            return FilesystemRefused(f"{error.what}; {self._resolver.lacking(listing, wanted)}", hint=error.hint)
        return None

    def _lead(self, lease: Lease, term: int, listing: Listing, wanted: Wanted) -> Outcome:
        if not lease.lock_works:
            self._context.notice(
                "flock does not work here; the election does not need it, but a dead leader is noticed only after the TTL"
            )
        self._context.notice(f"leading term {term}")
        revision = revision_name(listing.revision, term)
        leader = Leader(
            self._context, self._model, self._supply.open_source, listing, wanted, self._cache.root, self._landing
        )
        with watching(self._context, leader):
            led: Led = leader.run(lease, term, revision, self._clock, self._cache.chosen)
        return self._finish(led.manifest, listing, wanted, "leader", led.fetched)

    def _tell(self, watch: Watch, lease: Lease, listing: Listing, wanted: Wanted) -> None:
        view = watch.view
        total = sum(e.size or 0 for e in listing.files if e.path in wanted.files)
        self._context.emit(
            Progress(
                "follow", view.bytes_done, total, watch.rate, leader=lease.leader(view.term), alive=watch.silent_for
            )
        )

    def _check_wait(self, began: float) -> None:
        limit = self._context.settings.wait
        if limit is not None and time.monotonic() - began > limit:
            raise WaitExpired(
                f"another process has been downloading for longer than --wait ({limit:g} s)", hint="mx status shows it"
            )

    # -- the answer ----------------------------------------------------------------------------------------------

    def _kept(self, manifest: Manifest) -> bool:
        """Leave a mark of use, then look again: gc takes a manifest away first, and looks for marks then."""
        self._model.mark_used(manifest.revision)
        return f"{manifest.selection}.json" in names(self._model.manifests(manifest.revision))

    def _hit(self, manifest: Manifest, listing: Listing, wanted: Wanted) -> Outcome:
        self._context.notice("revalidated, not transferred")
        return self._finish(manifest, listing, wanted, "hit", 0)

    def _finish(self, manifest: Manifest, listing: Listing, wanted: Wanted, role: str, fetched: int) -> Outcome:
        total = sum(record.size for record in manifest.files if record.path in wanted.files)
        self._model.mark_used(manifest.revision)
        if self._request.verify and fetched < total:
            records = tuple(record for record in manifest.files if record.path in wanted.files)
            self._verify(dataclasses.replace(manifest, files=records), listing)
        self._remember(listing, manifest.revision)
        self._deliver(manifest, listing, wanted)
        return Outcome(
            uri=self._supply.uri,
            revision=manifest.revision,
            identity={kind: manifest.identity.get(kind) for kind in ("content", "origin")},
            directory=self._model.snapshot(manifest.directory),
            role=role,
            bytes_total=total,
            bytes_fetched=fetched,
            bytes_reused=max(0, total - fetched),
            files=len(wanted.files),
            clock=self._clock,
            retries=self._context.retries,
        )

    def _verify(self, manifest: Manifest, listing: Listing) -> None:
        """What this process did not fetch, it has not seen: hash it."""
        start = time.monotonic()
        used = verify_snapshot(self._model, manifest, listing, self._context)
        self._clock.verify += time.monotonic() - start
        self._context.notice(f"verified against {used}")

    def _remember(self, listing: Listing, revision: str) -> None:
        """What the moving name means is worth knowing only once it is here: `--offline` leads to it."""
        if listing.ref and not self._resolver.offline:
            try:
                self._model.write_ref(listing.ref, revision)
            except MxError as error:
                self._context.notice(f"what {listing.ref} means was not written down: {error.what}")

    def _deliver(self, manifest: Manifest, listing: Listing, wanted: Wanted) -> None:
        request, source = self._request, self._model.snapshot(manifest.directory)
        records = [record for record in manifest.files if record.path in wanted.files]
        if request.pin:
            deliver.pin(self._model, request.pin, manifest.revision, manifest.directory)
        if request.hf_cache is not None:
            hub = deliver.hub_cache(request.hf_cache, self._context.settings)
            ref = "" if self._resolver.pinned else self._resolver.ref
            shown = deliver.hf_view(self._cache, manifest, ref, source, records, hub)
            count = units.count(len(records), "file")
            self._context.notice(f"filled {shown}: {count} as hard links into the cache")
        if request.to:
            Filling(self._context, source, records, request.to).run()
        if request.link:
            deliver.link(source, request.link, self._cache.root)
