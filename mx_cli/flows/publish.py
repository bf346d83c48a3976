"""How verified files come into the snapshot: under their names, one by one, and durable before the manifest."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from mx_cli.base.oserrors import explain
from mx_cli.cache.beat import WAIT_LIMIT, Deposed
from mx_cli.cache.fence import Fence
from mx_cli.cache.files import make_dirs, make_way, sync_directory
from mx_cli.cache.layout import Model
from mx_cli.cache.parts import Parts
from mx_cli.cache.reserve import sync_filesystem
from mx_cli.cache.reuse import Found
from mx_cli.engine.verify import Consumer
from mx_cli.flows.context import Context
from mx_cli.flows.inspect import Inspection
from mx_cli.flows.request import Clock
from mx_cli.model.digest import TensorDigest
from mx_cli.model.manifest import Entry, FileRecord
from mx_cli.model.tables import rows_in

LARGE = 1 << 20
OVERLAP = 1 << 30
"""Bytes still to come that make it worth while to wait for the disk beside the transfer."""


class Publisher:
    """One term's files of one snapshot directory. `records` and `rows` hold, by path, what the manifest will say of them."""

    def __init__(self, context: Context, model: Model, target: Path, parts: Parts, fence: Fence, clock: Clock) -> None:
        self._context, self._model, self._target, self._parts = context, model, target, parts
        self._fence, self._meter, self._clock = fence, parts.meter, clock
        self.records: dict[str, FileRecord] = {}
        self.rows: dict[str, Sequence[TensorDigest]] = {}
        self._lock = threading.Lock()
        self._unsynced: set[Path] = set()
        self._directories: set[Path] = set()

    @property
    def size(self) -> int:
        """Bytes of the files that are published."""
        return sum(record.size for record in self.records.values())

    def adopt(self, path: str, found: Found) -> None:
        """A file that a manifest vouches for stands under its name already."""
        record, manifest, made = found
        if made:
            self._published(path, synced=record.size >= LARGE)
        self.records[path] = record
        rows = rows_in(manifest, record.path, path)
        if rows is not None:
            self.rows[path] = rows
        self._meter.have(record.size)
        self._meter.file_done()

    def complete(self, entry: Entry, size: int, fd: int, consumers: Sequence[Consumer]) -> None:
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
            synced = size >= LARGE and self._meter.total - self._meter.done >= OVERLAP
            if synced:
                self._sync(entry, fd)
            self._fence.check_now_and_then()
            self._give_name(entry, fd)
        except OSError as error:
            raise explain(error, f"publishing {entry.path}") from None
        record = FileRecord(entry.path, size, result.xxh3, entry.validator if entry.strong else "", result.digests)
        self._published(entry.path, synced=synced)
        with self._lock:
            self.records[entry.path] = record
            if result.rows is not None:
                self.rows[entry.path] = result.rows
        self._meter.file_done()

    def _sync(self, entry: Entry, fd: int) -> None:
        start = time.monotonic()
        try:
            with self._meter.bounded(WAIT_LIMIT):
                os.fsync(fd)
            with self._lock:
                self._clock.fsync += time.monotonic() - start
        except OSError:
            # The page cache goes on showing what never reached the disk: the next run must not believe it.
            self._parts.void(entry)
            raise

    def _give_name(self, entry: Entry, fd: int) -> None:
        final, part = self._target / entry.path, self._parts.path(entry)
        if final.parent not in self._directories:
            make_dirs(final.parent)
        try:
            try:
                os.rename(part, final)
            except IsADirectoryError:
                make_way(final)
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

    def make_durable(self) -> None:
        """Every file that is not durable yet, then every directory.

        One syncfs lets the kernel write all of them at its best; an fsync of each then costs little, and tells of errors.
        Many small ones are not asked one by one: syncfs tells of errors too.
        """
        self._meter.phase = "publish"
        start = time.monotonic()
        try:
            done = self._sync_all()
            for path in self._unsynced:
                if not done or os.stat(path).st_size >= LARGE:
                    self._sync_file(path)
            self._clock.fsync += time.monotonic() - start
            for directory in self._directories:
                if directory.is_dir():
                    with self._meter.bounded(WAIT_LIMIT):
                        sync_directory(directory)
        except OSError as error:
            self._disown()
            raise explain(error, f"syncing {self._target}") from None

    def _disown(self) -> None:
        """The page cache goes on showing what never reached the disk: the next run must not believe it."""
        for path in self._unsynced if not self._fence.superseded() else ():
            with contextlib.suppress(OSError):
                os.unlink(path)

    def _sync_file(self, path: Path) -> None:
        with open(path, "rb") as file, self._meter.bounded(WAIT_LIMIT):
            os.fsync(file.fileno())

    def _sync_all(self) -> bool:
        with self._meter.bounded(WAIT_LIMIT):
            return sync_filesystem(self._model.path)
