"""Leading one term: take over what is there, fetch what is missing, verify, publish."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from mx_cli.base.cancel import Stop
from mx_cli.base.errors import IntegrityError, MxError, OriginChanged
from mx_cli.base.oserrors import explain
from mx_cli.base.version import VERSION
from mx_cli.cache.beat import WAIT_LIMIT, Beat, Deposed
from mx_cli.cache.layout import Model, make_dirs, names, sync_directory
from mx_cli.cache.lease import Lease
from mx_cli.cache.parts import Parts, sweep
from mx_cli.cache.reserve import check_space, sync_filesystem
from mx_cli.cache.reuse import Reuse
from mx_cli.cache.snapshots import Snapshots
from mx_cli.engine.meter import Meter
from mx_cli.engine.ports import Block, ReadItem
from mx_cli.engine.run import Limits, Transfer, cores
from mx_cli.engine.threads import Lifted, Throttle
from mx_cli.engine.verify import Consumer
from mx_cli.flows.context import Context
from mx_cli.flows.identify import identities
from mx_cli.flows.inspect import Inspection
from mx_cli.flows.request import Clock, Led, Wanted
from mx_cli.model.digest import FILE_DTYPE, TensorDigest
from mx_cli.model.manifest import Entry, FileRecord, Listing, Manifest, selection_digest
from mx_cli.model.selection import RULES_VERSION
from mx_cli.plan.ranges import Span, interleave, pieces, total
from mx_cli.sinks.files import OPEN_LIMIT, FileSink, Opened
from mx_cli.sources.registry import OpenOrigin

LARGE = 1 << 20
OVERLAP = 1 << 30
"""Bytes still to come that make it worth while to wait for the disk beside the transfer."""
INTEGRITY_TRIES = 2
START_WIDTH = 2
TERM_CHECK_EVERY = 0.1
UNVERSIONED = "none"


class Leader:
    """One term of one revision. `run` blocks until the selection is published, or raises; then the lease says why."""

    def __init__(
        self, context: Context, model: Model, origin: OpenOrigin, listing: Listing, wanted: Wanted, cache_root: Path
    ) -> None:
        self._context, self._model, self._origin = context, model, origin
        self._listing, self._wanted, self._root = listing, wanted, cache_root
        self.meter = Meter()
        self._records: dict[str, FileRecord] = {}
        self._rows: dict[str, Sequence[TensorDigest]] = {}
        self._lock = threading.Lock()
        self._unsynced: set[Path] = set()
        self._directories: set[Path] = set()
        self._term = 0
        self._work = Stop()
        self._term_checked = 0.0
        self._suspect: list[Entry] = []

    def run(self, lease: Lease, term: int, revision: str, clock: Clock, chosen: bool) -> Led:
        """Raises Deposed when another leads now, OriginChanged when the listing is out of date, or the failure."""
        self._lease, self._term, self._revision, self._clock = lease, term, revision, clock
        stop = self._context.stop
        try:
            with (
                stop.calling(lambda: self._work.request(stop.reason or MxError("stopped"))),
                Beat(lease, term, self.meter, self._context.settings.beat, self._deposed),
            ):
                led = self._lead(chosen)
        except (Deposed, OriginChanged):
            lease.leave(term)
            raise
        except MxError as error:
            if stop.requested:
                lease.leave(term)
            elif self._superseded():
                # What fails for want of what a successor took is not worth telling.
                lease.leave(term)
                raise Deposed("another process leads now") from error
            else:
                lease.fail(term, error, selection_digest(self._wanted.files))
            raise
        except BaseException:
            lease.leave(term)
            raise
        lease.leave(term)
        lease.sweep(term)
        return led

    def _deposed(self) -> None:
        self._work.request(Deposed("another process leads now"))

    def _superseded(self) -> bool:
        with contextlib.suppress(MxError):
            return self._lease.look().term > self._term
        return False

    def _check_term(self) -> None:
        self._work.check()
        if self._lease.look().term > self._term:
            raise Deposed("another process leads now")

    def _check_term_now_and_then(self) -> None:
        """For each of many small files a look would cost more than the file; the renamed parts are the fence."""
        now = time.monotonic()
        if now - self._term_checked > TERM_CHECK_EVERY:
            self._check_term()
            self._term_checked = now
        self._work.check()

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
            left = self._adopt(entries, snapshots, directory, parts)
            self._check_term()
            self._sweep_unversioned()
            parts.fence(left, {e.path: self._target / e.path for e in left})
            parts.borrow(left)
            self._clock.verify += time.monotonic() - start
            self._fetch(left, parts, chosen)
            start = time.monotonic()
            manifest = self._manifest(entries, directory)
            self._make_durable()
            self._check_term()
            snapshots.publish(manifest)
            # A successor that has not seen the manifest may be at work on the files: wait for its end.
            self._check_term()
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
            kind, _, term = name.rpartition("-")
            if kind == UNVERSIONED and not self._listing.revision and term.isdigit() and int(term) < self._term:
                sweep(self._model.staging(name), int(term), journals=False)

    def _adopt(self, entries: list[Entry], snapshots: Snapshots, directory: str, parts: Parts) -> list[Entry]:
        """Take what manifests vouch for: files that are in place, and equal ones of other snapshots. Returns the rest."""
        reuse = Reuse(self._model, snapshots)
        left = []
        for entry in entries:
            found = reuse.in_place(entry, self._revision, directory) or reuse.elsewhere(
                entry, self._target / entry.path, parts.copy_name(entry), self.meter.tick
            )
            if found is None:
                left.append(entry)
                continue
            record, manifest, made = found
            if made:
                self._published(entry.path, synced=record.size >= LARGE)
            self._records[entry.path] = record
            rows = rows_of(manifest, record.path, entry.path)
            if rows is not None:
                self._rows[entry.path] = rows
            self.meter.have(record.size)
            self.meter.file_done()
        return left

    def _fetch(self, entries: list[Entry], parts: Parts, chosen: bool) -> None:
        for attempt in range(1, INTEGRITY_TRIES + 1):
            todo = [entry for entry in entries if entry.path not in self._records]
            try:
                return self._transfer(todo, parts, chosen)
            except OriginChanged:
                raise
            except IntegrityError as error:
                for entry in self._suspect:
                    parts.void(entry)
                if attempt == INTEGRITY_TRIES or not self._suspect:
                    raise
                self._context.on_retry(self._suspect[0].path, error, 0.0, attempt)
                parts.again()
                self.meter.lose(self.meter.done - sum(record.size for record in self._records.values()))
        return None

    def _transfer(self, entries: list[Entry], parts: Parts, chosen: bool) -> None:
        settings, meter = self._context.settings, self.meter
        sink = FileSink(
            lambda entry: self._open(entry, parts),
            self._consumers,
            lambda entry, block: self._commit(entry, block, parts),
            lambda entry, size, fd, consumers: self._complete(entry, size, fd, consumers, parts),
            meter,
            max(2, cores()),
        )
        self._suspect = sink.suspects
        source = Lifted(self._origin, Throttle(settings.max_bandwidth) if settings.max_bandwidth else None)
        transfer: Transfer | None = None
        start = time.monotonic()
        try:
            meter.phase = "check"
            items = self._plan(entries, parts, chosen)
            self._clock.verify += time.monotonic() - start
            start, meter.phase = time.monotonic(), "transfer"
            limits = Limits(settings.retry_for, settings.stall_timeout, START_WIDTH * cores(), settings.max_connections)
            gate = self._context.gates[self._origin.caps.host]
            transfer = Transfer(source, sink, limits, gate, meter, self._work, self._context.on_retry)
            transfer.run(items)
            self._clock.transfer += time.monotonic() - start
            start, meter.phase = time.monotonic(), "verify"
            sink.wait(self._work)
            self._clock.verify += time.monotonic() - start
        finally:
            source.close()
            sink.close(transfer.in_flight if transfer else ())

    def _plan(self, entries: list[Entry], parts: Parts, chosen: bool) -> list[ReadItem]:
        """Look at what earlier terms left, check the room for the rest, and cut it into items: small files first."""
        have = {entry.path: parts.have(entry) for entry in entries if parts.started(entry)}
        need = sum(max(0, (e.size or 0) - parts.allocated(e)) for e in entries)
        check_space(self._root, need, len(entries) - len(have), chosen=chosen)
        size = min(self._context.settings.range_size, self._origin.caps.item_size)
        self.meter.have(sum(map(total, have.values())))
        in_order = sorted(entries, key=lambda e: ((e.size or 0) > size, e.path))
        # Files that were begun wait for their turn among others: all of them have to fit into the sink.
        width = min(START_WIDTH * cores(), OPEN_LIMIT // 2)
        return list(interleave((items_of(e, have.get(e.path, []), size) for e in in_order), width))

    def _open(self, entry: Entry, parts: Parts) -> Opened:
        part = parts.open(entry)
        return Opened(part.fd, part.have)

    def _consumers(self, entry: Entry) -> Sequence[Consumer]:
        return [Inspection(entry, is_weight=entry.path in self._wanted.weights)]

    def _commit(self, entry: Entry, block: Block, parts: Parts) -> None:
        # Small files too: who is killed among many of them must not begin again.
        if entry.resumable:
            parts.claim(entry, block.offset, block.length, block.digest)

    # -- publishing ----------------------------------------------------------------------------------------------

    def _complete(self, entry: Entry, size: int, fd: int, consumers: Sequence[Consumer], parts: Parts) -> None:
        """All bytes are there and were consumed: check, make durable, give the file its name. In a verifying thread."""
        (inspection,) = consumers
        assert isinstance(inspection, Inspection)
        result = inspection.verdict(fd, size)
        if result.warning:
            self._context.warn(result.warning)
        if entry.size is None:
            proof = "" if result.digests else " and no digest"
            self._context.warn(f"{entry.path}: the origin gave no length{proof}; {size} bytes were taken as they came")
        try:
            if os.fstat(fd).st_size != size:
                os.ftruncate(fd, size)
            synced = size >= LARGE and self.meter.total - self.meter.done >= OVERLAP
            if synced:
                self._sync(entry, fd, parts)
            self._check_term_now_and_then()
            self._give_name(entry, fd, parts)
        except OSError as error:
            raise explain(error, f"publishing {entry.path}") from None
        record = FileRecord(entry.path, size, result.xxh3, entry.validator if entry.strong else "", result.digests)
        self._published(entry.path, synced=synced)
        with self._lock:
            self._records[entry.path] = record
            if result.rows is not None:
                self._rows[entry.path] = result.rows
        self.meter.file_done()

    def _sync(self, entry: Entry, fd: int, parts: Parts) -> None:
        start = time.monotonic()
        try:
            with self.meter.bounded(WAIT_LIMIT):
                os.fsync(fd)
            with self._lock:
                self._clock.fsync += time.monotonic() - start
        except OSError:
            # The page cache goes on showing what never reached the disk: the next run must not believe it.
            parts.void(entry)
            raise

    def _give_name(self, entry: Entry, fd: int, parts: Parts) -> None:
        final, part = self._target / entry.path, parts.path(entry)
        if final.parent not in self._directories:
            make_dirs(final.parent)
        try:
            os.rename(part, final)
            if os.fstat(fd).st_nlink > 1:
                # rename(2) of two names of one file does nothing and keeps both.
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(part)
        except FileNotFoundError:
            # A successor took the part. The name is as good if it is the file that was verified here.
            with contextlib.suppress(FileNotFoundError):
                if os.stat(final).st_ino == os.fstat(fd).st_ino:
                    return
            raise Deposed("another process leads now") from None

    def _published(self, path: str, *, synced: bool) -> None:
        final = self._target / path
        with self._lock:
            if not synced:
                self._unsynced.add(final)
            if final.parent not in self._directories:
                self._directories.update(final.parents[: len(Path(path).parts)])
                self._directories.add(self._target.parent)

    def _make_durable(self) -> None:
        """Every file that is not durable yet, then every directory.

        One syncfs lets the kernel write all of them at its best; an fsync of each then costs little, and tells of errors.
        Many small ones are not asked one by one: syncfs tells of errors too.
        """
        self.meter.phase = "publish"
        start = time.monotonic()
        try:
            done = self._sync_all()
            for path in self._unsynced:
                if not done or os.stat(path).st_size >= LARGE:
                    self._sync_file(path)
            self._clock.fsync += time.monotonic() - start
            for directory in self._directories:
                if directory.is_dir():
                    with self.meter.bounded(WAIT_LIMIT):
                        sync_directory(directory)
        except OSError as error:
            self._disown()
            raise explain(error, f"syncing {self._target}") from None

    def _disown(self) -> None:
        """The page cache goes on showing what never reached the disk: the next run must not believe it."""
        for path in self._unsynced if not self._superseded() else ():
            with contextlib.suppress(OSError):
                os.unlink(path)

    def _sync_file(self, path: Path) -> None:
        with open(path, "rb") as file, self.meter.bounded(WAIT_LIMIT):
            os.fsync(file.fileno())

    def _sync_all(self) -> bool:
        with self.meter.bounded(WAIT_LIMIT):
            return sync_filesystem(self._root)

    def _manifest(self, entries: list[Entry], directory: str) -> Manifest:
        rows = [(path, *row) for path in sorted(self._rows) for row in self._rows[path]]
        records = tuple(self._records[entry.path] for entry in entries)
        config = self._target / "config.json"
        data = config.read_bytes() if "config.json" in self._wanted.files else None
        identity, lacking = identities(self._model.uri, self._listing.revision, self._rows, self._wanted, data)
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


def items_of(entry: Entry, have: Sequence[Span], size: int) -> list[ReadItem]:
    """What has to be read of a file, in items of at most `size` bytes: all that `have` lacks.

    In one piece from its beginning where nothing could prove that two pieces are of one version. A file with nothing left
    to read has to be verified in its turn: an item of no bytes.
    """
    if entry.size is None or not entry.validator:
        return [ReadItem(entry, 0, entry.size, whole=True)]
    todo = pieces(entry.size, have, size) or [(entry.size, entry.size)]
    return [ReadItem(entry, start, end - start) for start, end in todo]


def rows_of(manifest: Manifest, path: str, name: str) -> list[TensorDigest] | None:
    """The tensor table of a manifest's file, for a file called `name` with the same bytes; None where it has none."""
    rows = [TensorDigest(*row[1:]) for row in manifest.tensors if row[0] == path]
    if not rows and "content" not in manifest.identity:
        return None
    return [row._replace(name=name) if row.dtype == FILE_DTYPE else row for row in rows]
