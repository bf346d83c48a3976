"""What is wanted: from a URI to a revision, its listing and a selection, asking the origin or the cache."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import TypeVar

from mx_cli.base import units
from mx_cli.base.errors import NotFound, OriginChanged, Unreachable
from mx_cli.cache.files import read_file
from mx_cli.cache.layout import Model
from mx_cli.cache.snapshots import Snapshots
from mx_cli.engine.verify import WholeDigest
from mx_cli.flows.context import Context, is_immutable, moving_name
from mx_cli.flows.request import Request, Wanted
from mx_cli.flows.select import READ_LIMIT, wanted_of
from mx_cli.flows.supply import Supply
from mx_cli.model.manifest import Entry, Listing

CHANGES = 3
"""Times that an origin is listed, and its files are fetched, while it changes under way."""
_RESTLESS_HINT = (
    "run it again when nobody writes there, or leave the file out with --exclude; servers that disagree look the same"
)

NOT_ASKED = "the origin is not asked"
"""With --offline, and where a route looks into the cache alone."""

T = TypeVar("T")


def listing_anew(once: Callable[[], T], pinned: Callable[[], bool], warn: Callable[[str], None]) -> T:
    """What `once` returns, which lists the origin and fetches; again when the origin changed meanwhile. Blocks.

    Raises OriginChanged when it goes on to change, or when the revision is `pinned`: then listing again helps nobody.
    """
    for _ in range(CHANGES - 1):
        try:
            return once()
        except OriginChanged as error:
            if pinned():
                raise
            warn(f"{error.what}; listing the origin again")
    try:
        return once()
    except OriginChanged as error:
        raise OriginChanged(error.what, hint=error.hint or _RESTLESS_HINT, via=error.via) from None


class Resolver:
    """Resolves one request. Reads the cache, and writes nothing."""

    def __init__(self, context: Context, request: Request, supply: Supply, model: Model, snapshots: Snapshots) -> None:
        self._context, self._request, self._supply = context, request, supply
        self._model, self._snapshots = model, snapshots
        self._revision = request.revision or supply.revision
        self._unreachable: Unreachable | None = None

    @property
    def offline(self) -> bool:
        return self._context.settings.offline

    @property
    def pinned(self) -> bool:
        """Whether the revision asked for is an immutable one."""
        return is_immutable(self._supply.uri, self._revision)

    @property
    def ref(self) -> str:
        return moving_name(self._supply.uri, self._revision, self._request.version_id or "")

    def listing(self, before_asking: Callable[[], None] = lambda: None) -> Listing:
        """What the origin holds: from the cache when the revision is pinned and known, or offline; else from the origin.

        `before_asking` is called when nothing of the model is in the cache, and may raise. Raises what `Origin.listing`
        raises, and NotFound when it is not to be asked and the cache does not know.
        """
        known = self._known(self._revision) if self.pinned else None
        if known and self._all_there(known):
            return known
        if self.offline:
            return self._cached_listing(NOT_ASKED)
        if not self._model.exists:
            before_asking()
        try:
            return self._supply.listing(self._revision or None, self._context.stop)
        except Unreachable as error:
            if self._context.settings.if_unreachable == "cached":
                self._unreachable = error
                return self._cached_listing(error.what)
            raise self._or_offline(error) from None

    def _or_offline(self, error: Unreachable) -> Unreachable:
        """The error, whose hint tells what the cache can do without the origin, if it can."""
        revision = self._revision if self.pinned else (self._model.read_ref(self.ref) or ("",))[0]
        known = self._known(revision) if revision else None
        if error.hint or known is None or not self._all_there(known):
            return error
        return Unreachable(
            error.what,
            hint=f"the cache has {known.revision}: --offline uses it, or --if-unreachable cached",
            via=error.via,
            retry_after=error.retry_after,
            permanent=error.permanent,
        )

    def wanted(self, listing: Listing) -> Wanted:
        """What of the listing was asked for. Raises as `wanted_of` does, and what reading a shard index raises."""
        return wanted_of(listing, self._request, self._read_small)

    def _known(self, revision: str) -> Listing | None:
        """The listing that a manifest remembers of a revision: paths and sizes, and no keys."""
        for manifest in self._snapshots.of(revision):
            entries = tuple(Entry(path, size) for path, size in manifest.listing)
            return Listing(manifest.uri, manifest.revision, entries)
        return None

    def _all_there(self, listing: Listing) -> bool:
        try:
            wanted = wanted_of(listing, self._request, self._read_cached)
        except NotFound:
            return False
        return self._snapshots.complete(listing.revision, wanted.files, wanted.weights) is not None

    def _cached_listing(self, why: str) -> Listing:
        if self.pinned:
            revision, age = self._revision, ""
        else:
            found = self._model.read_ref(self.ref)
            if found is None:
                raise NotFound(
                    f"{self._supply.uri}: {why}, and {self.ref!r} was never resolved in this cache",
                    hint="run once without --offline, or name a cached revision with --revision (mx cache ls)",
                )
            revision, resolved = found
            age = f", resolved {units.duration(max(0.0, time.time() - resolved))} ago"
        known = self._known(revision)
        if known is None:
            raise NotFound(
                f"{self._supply.uri}: {why}, and revision {revision} is not in the cache",
                hint="mx cache ls shows what is",
            )
        self._context.notice(f"{why}: using the cached revision {revision}{age}")
        return known

    def _read_small(self, path: str, listing: Listing) -> bytes:
        try:
            return self._read_cached(path, listing)
        except NotFound:
            entry = next(entry for entry in listing.files if entry.path == path)
            if self.offline or not entry.key:
                raise
        return self._supply.read(entry, READ_LIMIT)

    def _read_cached(self, path: str, listing: Listing) -> bytes:
        """A small file that decides what is wanted. One that is damaged does not decide."""
        for manifest in self._snapshots.of(listing.revision) if listing.revision else ():
            record = manifest.record(path)
            if record:
                with contextlib.suppress(OSError):
                    data = read_file(self._model.snapshot(manifest.directory) / path)
                    if WholeDigest.of(data) == record.xxh3:
                        return data
        raise NotFound(
            f"{self._supply.uri}: not in the cache, or damaged there: {path}",
            hint="run once without --offline; mx cache verify finds damage",
        )

    def there(self, listing: Listing) -> set[str]:
        """The files of a revision that manifests vouch for and that are on the disk."""
        return {
            record.path
            for manifest in (self._snapshots.of(listing.revision) if listing.revision else ())
            for record in manifest.files
            if not self._snapshots.missing(manifest, [record.path])
        }

    def from_origin(self, listing: Listing, wanted: Wanted) -> Listing:
        """The listing to fetch by. One that was remembered has no keys of files: the origin is asked for it again."""
        if self.offline:
            lacking = f"{self._supply.uri}: {NOT_ASKED}, and {self.lacking(listing, wanted)}"
            raise NotFound(lacking, hint="run once without --offline")
        if self._unreachable:
            raise Unreachable(f"{self._unreachable.what}; {self.lacking(listing, wanted)}")
        if all(entry.key for entry in listing.files if entry.path in wanted.files):
            return listing
        return self._supply.listing(listing.revision, self._context.stop)

    def lacking(self, listing: Listing, wanted: Wanted) -> str:
        lacking = sorted(wanted.files - self.there(listing)) or sorted(wanted.files)
        return f"not in the cache: {', '.join(lacking[:5])}" + (f" and {len(lacking) - 5} more" if lacking[5:] else "")
