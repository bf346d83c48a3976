"""Route `stream` to a directory: the files of a checkpoint from its origin straight to where they are wanted, past the cache."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mx_cli.engine.ports import Source
from mx_cli.engine.run import Limits, cores
from mx_cli.engine.threads import Lifted
from mx_cli.engine.verify import DigestMismatch
from mx_cli.flows.bounds import connections
from mx_cli.flows.context import Context, is_immutable
from mx_cli.flows.identify import identities
from mx_cli.flows.inspect import inspect_file
from mx_cli.flows.new_directory import NewDirectory
from mx_cli.flows.progress import watching
from mx_cli.flows.request import Wanted
from mx_cli.flows.resolve import listing_anew
from mx_cli.flows.select import amount, usual_of
from mx_cli.flows.whole_files import WholeFiles
from mx_cli.model import identity
from mx_cli.model.digest import TensorDigest
from mx_cli.model.manifest import Listing
from mx_cli.sources.registry import OpenOrigin

TRIES = 2
START_WIDTH = 2

Accept = Callable[[Mapping[str, str]], None]
"""Raises Incompatible for identities (kind -> id) that are not those that are wanted."""


@dataclass(frozen=True)
class Streamed:
    """What came: `identity` by kind, `bytes` of all files, of which `moved` were fetched now."""

    uri: str
    identity: Mapping[str, str]
    bytes: int
    moved: int
    seconds: float
    files: int


def stream_files(uri: str, revision: str | None, target: Path, accept: Accept, context: Context) -> Streamed:
    """The one usable set of files of `uri` into `target`, which appears in one step. Blocks. Nothing is cached.

    Files are verified as by a prefetch; `accept` is asked about the origin's identity before a byte moves, and about the
    content's before the directory appears. Idempotent: a target that holds these very files is left as it is, which costs
    no transfer where the origin has digests of all of them. Raises what a prefetch raises, and UsageError for a target
    that holds other files.
    """
    origin = context.origin(uri)
    try:
        wanted = revision or origin.revision or None

        def once() -> Streamed:
            return _Stream(origin, origin.listing(wanted, context.stop), target, accept, context).run()

        return listing_anew(once, lambda: is_immutable(origin.uri, wanted or ""), context.warn)
    finally:
        origin.close()


class _Stream:
    """One listing's files."""

    def __init__(self, origin: OpenOrigin, listing: Listing, target: Path, accept: Accept, context: Context) -> None:
        self._origin, self._listing, self._context = origin, listing, context
        self._directory, self._accept = NewDirectory(target), accept
        self._wanted: Wanted = usual_of(listing, origin)
        self._entries = [entry for entry in listing.files if entry.path in self._wanted.files]

    def run(self) -> Streamed:
        context, listing = self._context, self._listing
        if listing.revision:
            self._accept({"origin": identity.of_origin(listing.uri, listing.revision).id})
        if self._wanted.skipped:
            context.notice(self._wanted.skipped)
        context.notice(f"revision {listing.revision or 'unknown'}: {amount(listing, self._wanted)}")
        start = time.monotonic()
        if self._directory.has({entry.path: entry.size for entry in self._entries}):
            rows = self._look_at_what_is_there()
            if rows is not None:
                known = self._identities(rows, self._directory.path)
                self._accept(known)
                context.notice(f"{self._directory.path} holds these files already")
                return self._streamed(known, 0, start)
        with self._directory.making() as work:
            files = WholeFiles(self._entries, self._wanted.weights, work, context)
            with watching(context, files):
                files.fetch(self._open_source, self._limits, TRIES)
            files.make_durable()
            known = self._identities(files.rows, work)
            self._accept(known)
        return self._streamed(known, files.meter.fetched, start)

    def _open_source(self) -> Source:
        return Lifted(self._origin, self._context.settings.max_bandwidth)

    def _limits(self, source: Source) -> Limits:
        settings, most = self._context.settings, connections(self._context)
        return Limits(settings.retry_for, settings.stall_timeout, min(most, START_WIDTH * cores()), most)

    def _look_at_what_is_there(self) -> dict[str, list[TensorDigest]] | None:
        """The tensor tables of the files that are there, when the origin's digests say that they are the same.

        None when it has no digest of one of them: only their bytes tell then. Raises UsageError when they differ.
        """
        if not all(entry.digests and entry.size is not None for entry in self._entries):
            return None
        rows = {}
        for entry in self._entries:
            path = self._directory.path / entry.path
            is_weight = entry.path in self._wanted.weights
            try:
                found = inspect_file(path, entry, is_weight=is_weight, stop=self._context.stop)
            except DigestMismatch:
                raise self._directory.other_files() from None
            if not found.digests:
                return None
            if found.rows is not None:
                rows[entry.path] = list(found.rows)
        return rows

    def _identities(self, rows: Mapping[str, Sequence[TensorDigest]], directory: Path) -> dict[str, str]:
        config = directory / "config.json"
        data = config.read_bytes() if "config.json" in self._wanted.files else None
        return identities(self._listing.uri, self._listing.revision, rows, self._wanted, data)[0]

    def _streamed(self, known: Mapping[str, str], moved: int, start: float) -> Streamed:
        total = sum((self._directory.path / entry.path).stat().st_size for entry in self._entries)
        return Streamed(self._listing.uri, known, total, moved, time.monotonic() - start, len(self._entries))
