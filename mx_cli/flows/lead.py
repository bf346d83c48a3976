"""Leading one term: take over what is there, fetch what is missing, verify, publish."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from mx_cli.base.errors import IntegrityError, OriginChanged
from mx_cli.base.oserrors import explain
from mx_cli.base.version import VERSION
from mx_cli.cache.files import names
from mx_cli.cache.layout import Model, term_of
from mx_cli.cache.lease import Lease
from mx_cli.cache.parts import Parts, sweep
from mx_cli.cache.reserve import check_space
from mx_cli.cache.reuse import Reuse
from mx_cli.cache.snapshots import Snapshots
from mx_cli.engine.meter import Meter
from mx_cli.engine.ports import Block, ReadItem, Source, SourceCaps
from mx_cli.engine.run import Limits, Transfer, cores
from mx_cli.engine.verify import Consumer
from mx_cli.flows.bounds import connections
from mx_cli.flows.context import Context
from mx_cli.flows.identify import identities
from mx_cli.flows.inspect import Inspection
from mx_cli.flows.publish import Publisher
from mx_cli.flows.request import Clock, Led, Wanted
from mx_cli.flows.term import leading
from mx_cli.model.manifest import Entry, Listing, Manifest, selection_digest
from mx_cli.model.selection import RULES_VERSION
from mx_cli.plan.blocks import aligned
from mx_cli.plan.ranges import Span, gaps, interleave, pieces, total
from mx_cli.sinks.files import OPEN_LIMIT, FileSink, Opened

INTEGRITY_TRIES = 2
FILES_IN_TURN = 2
"""For each core."""


class Landing(Protocol):
    """Is told which bytes of files are in place as they come. Called from several threads; must not block or raise."""

    def begins(self, listing: Listing) -> None:
        """Files of this listing are fetched."""

    def opened(self, entry: Entry, path: Path, fd: int, have: Sequence[Span]) -> None:
        """A file is filled, and has these spans; `fd` is good during the call."""

    def placed(self, entry: Entry, offset: int, length: int) -> None:
        """Bytes of a file are in place, if it was opened; they are not verified yet."""

    def complete(self, path: str, place: Path, size: int) -> None:
        """The file is whole and verified, and stands in its place."""

    def again(self, entry: Entry) -> None:
        """The bytes of this file that were in place are wrong: they are fetched again."""


class Unwatched:
    """Nobody listens."""

    def begins(self, listing: Listing) -> None: ...
    def opened(self, entry: Entry, path: Path, fd: int, have: Sequence[Span]) -> None: ...
    def placed(self, entry: Entry, offset: int, length: int) -> None: ...
    def complete(self, path: str, place: Path, size: int) -> None: ...
    def again(self, entry: Entry) -> None: ...


class Leader:
    """One term of one revision. `run` blocks until the selection is published, or raises; then the lease says why.

    `open_source` gives the source that the bytes come from, afresh for each try; the leader closes it. `landing` hears of
    the bytes.
    """

    def __init__(
        self,
        context: Context,
        model: Model,
        open_source: Callable[[], Source],
        listing: Listing,
        wanted: Wanted,
        cache_root: Path,
        landing: Landing,
    ) -> None:
        self._context, self._model, self._open_source = context, model, open_source
        self._listing, self._wanted, self._root = listing, wanted, cache_root
        self._landing = landing
        self.meter = Meter()
        self._suspect: list[Entry] = []

    def run(self, lease: Lease, term: int, revision: str, clock: Clock, chosen: bool) -> Led:
        """Raises Deposed when another leads now, OriginChanged when the listing is out of date, or the failure."""
        self._term, self._revision, self._clock = term, revision, clock
        with leading(self._context, lease, term, self.meter, selection_digest(self._wanted.files)) as self._fence:
            led = self._lead(chosen)
        lease.sweep(term)
        return led

    # -- the steps -----------------------------------------------------------------------------------------------

    def _lead(self, chosen: bool) -> Led:
        entries = sorted((e for e in self._listing.files if e.path in self._wanted.files), key=lambda e: e.path)
        snapshots = self._context.snapshots(self._model)
        directory = snapshots.directory_for(self._revision, self._wanted.weights)
        self._target = self._model.snapshot(directory)
        self.meter.total = sum(e.size or 0 for e in entries)
        self.meter.files_total = len(entries)
        start = time.monotonic()
        parts = Parts(self._model, self._revision, self._term, self.meter)
        try:
            parts.announce(entries)
            self._publisher = Publisher(self._context, self._model, self._target, parts, self._fence, self._clock)
            self._landing.begins(self._listing)
            left = self._adopt(entries, snapshots, directory, parts)
            self._fence.check()
            self._sweep_unversioned()
            parts.fence(left, {e.path: self._target / e.path for e in left})
            parts.borrow(left)
            self._clock.verify += time.monotonic() - start
            self._fetch(left, parts, chosen)
            start = time.monotonic()
            manifest = self._manifest(entries, directory)
            self._publisher.make_durable()
            self._fence.check()
            snapshots.publish(manifest)
            # A successor that has not seen the manifest may be at work on the files: wait for its end.
            self._fence.check()
            parts.clear()
            self._clock.publish += time.monotonic() - start
        except OSError as error:
            raise explain(error, f"filling {self._model.path}") from None
        finally:
            parts.drop(entries)
            parts.journal.close()
        return Led(manifest, self.meter.fetched)

    def _sweep_unversioned(self) -> None:
        """An origin without versions has a staging directory for each term; nothing in those of the dead can be resumed."""
        for name in names(self._model.path / "staging"):
            term = term_of(name)
            if term is not None and not self._listing.revision and term < self._term:
                sweep(self._model.staging(name), term, journals=False)

    def _adopt(self, entries: list[Entry], snapshots: Snapshots, directory: str, parts: Parts) -> list[Entry]:
        """Take what manifests vouch for: files that are in place, and equal ones of other snapshots. Returns the rest."""
        reuse = Reuse(self._model, snapshots)
        left = []
        for entry in entries:
            found = reuse.in_place(entry, self._revision, directory) or reuse.elsewhere(
                entry, self._target / entry.path, parts.copy_name(entry), lambda _: self.meter.tick()
            )
            if found is None:
                left.append(entry)
                continue
            self._publisher.adopt(entry.path, found)
            self._landing.complete(entry.path, self._target / entry.path, found[0].size)
        return left

    def _fetch(self, entries: list[Entry], parts: Parts, chosen: bool) -> None:
        for attempt in range(1, INTEGRITY_TRIES + 1):
            todo = [entry for entry in entries if entry.path not in self._publisher.records]
            try:
                return self._transfer(todo, parts, chosen)
            except OriginChanged:
                raise
            except IntegrityError as error:
                for entry in self._suspect:
                    self._landing.again(entry)
                    parts.void(entry)
                if attempt == INTEGRITY_TRIES or not self._suspect:
                    raise
                self._context.on_retry(self._suspect[0].path, error, 0.0, attempt)
                parts.again()
                self.meter.lose(self.meter.done - self._publisher.size)
        return None

    def _transfer(self, entries: list[Entry], parts: Parts, chosen: bool) -> None:
        settings, meter = self._context.settings, self.meter
        sink = FileSink(
            lambda entry: self._open(entry, parts),
            self._consumers,
            lambda entry, block: self._commit(entry, block, parts),
            self._complete,
            meter,
            max(2, cores()),
        )
        self._suspect = sink.suspects
        source = self._open_source()
        transfer: Transfer | None = None
        start = time.monotonic()
        try:
            meter.phase = "check"
            items = self._plan(entries, parts, source.caps, chosen)
            self._clock.verify += time.monotonic() - start
            start, meter.phase = time.monotonic(), "transfer"
            most = connections(self._context)
            limits = Limits(settings.retry_for, settings.stall_timeout, min(most, cores() + 1), most)
            gate = self._context.gates[source.caps.host]
            transfer = Transfer(source, sink, limits, gate, meter, self._fence.work, self._context.on_retry)
            transfer.run(items)
            self._clock.transfer += time.monotonic() - start
            start, meter.phase = time.monotonic(), "verify"
            sink.wait(self._fence.work)
            self._clock.verify += time.monotonic() - start
        finally:
            source.close()
            sink.close(transfer.in_flight if transfer else ())

    def _plan(self, entries: list[Entry], parts: Parts, caps: SourceCaps, chosen: bool) -> list[ReadItem]:
        """Look at what earlier terms left, check the room for the rest, and cut it into items: small files first."""
        have = {entry.path: parts.have(entry) for entry in entries if parts.started(entry)}
        need = sum(max(0, (e.size or 0) - parts.allocated(e)) for e in entries)
        check_space(self._root, need, len(entries) - len(have), chosen=chosen)
        size = min(self._context.settings.range_size, caps.item_size)
        self.meter.have(sum(map(total, have.values())))
        in_order = sorted(entries, key=lambda e: ((e.size or 0) > size, e.path))
        # Files that were begun wait for their turn among others: all of them have to fit into the sink.
        width = min(FILES_IN_TURN * cores(), OPEN_LIMIT // 2)
        return list(interleave((items_of(e, have.get(e.path, []), size, caps) for e in in_order), width))

    def _open(self, entry: Entry, parts: Parts) -> Opened:
        part = parts.open(entry)
        self._landing.opened(entry, part.path, part.fd, part.have)
        return Opened(part.fd, part.have)

    def _consumers(self, entry: Entry) -> Sequence[Consumer]:
        return [Inspection(entry, is_weight=entry.path in self._wanted.weights)]

    def _commit(self, entry: Entry, block: Block, parts: Parts) -> None:
        # Small files too: who is killed among many of them must not begin again.
        if entry.resumable:
            parts.claim(entry, block.offset, block.length, block.digest)
        self._landing.placed(entry, block.offset, block.length)

    def _complete(self, entry: Entry, size: int, fd: int, consumers: Sequence[Consumer]) -> None:
        self._publisher.complete(entry, size, fd, consumers)
        self._landing.complete(entry.path, self._target / entry.path, size)

    def _manifest(self, entries: list[Entry], directory: str) -> Manifest:
        found = self._publisher.rows
        rows = [(path, *row) for path in sorted(found) for row in found[path]]
        records = tuple(self._publisher.records[entry.path] for entry in entries)
        config = self._target / "config.json"
        data = config.read_bytes() if "config.json" in self._wanted.files else None
        identity, lacking = identities(self._model.uri, self._listing.revision, found, self._wanted, data)
        if self._wanted.prefixes and lacking:
            self._context.warn(f"no content identity: {lacking}")
        return Manifest(
            uri=self._model.uri,
            revision=self._revision,
            selection=selection_digest(self._wanted.files),
            rules=RULES_VERSION,
            directory=directory,
            files=records,
            weights=tuple(sorted(self._wanted.weights)),
            tensors=tuple(rows),
            identity=identity,
            listing=tuple((e.path, e.size) for e in self._listing.files),
            version=VERSION,
            created=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        )


def items_of(entry: Entry, have: Sequence[Span], size: int, caps: SourceCaps | None = None) -> list[ReadItem]:
    """What has to be read of a file, in items of at most `size` bytes: all that `have` lacks.

    In one piece from its beginning where nothing could prove that two pieces are of one version. A file with nothing left
    to read has to be verified in its turn: an item of no bytes.
    """
    if entry.size is None or not entry.validator:
        return [ReadItem(entry, 0, entry.size, whole=True)]
    if caps and caps.blocks:
        todo = aligned(gaps(entry.size, have), caps.blocks(entry.path), size)
    else:
        todo = pieces(entry.size, have, size)
    todo = todo or [(entry.size, entry.size)]
    return [ReadItem(entry, start, end - start) for start, end in todo]
