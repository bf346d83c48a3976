"""Where a prefetch gets its listing, its small files and its bytes from."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

from mx_cli.base.cancel import Stop
from mx_cli.base.config import Settings
from mx_cli.base.errors import OriginChanged
from mx_cli.engine.ports import Reader, ReadItem, Source, SourceCaps, Stream
from mx_cli.engine.threads import Lifted
from mx_cli.model.manifest import Entry, Listing
from mx_cli.sources.registry import OpenOrigin


class Supply(Protocol):
    """All that a prefetch asks of the other side. One that knows several places chooses among them by itself."""

    @property
    def uri(self) -> str:
        """Canonical, without secrets; known before any connection."""

    @property
    def revision(self) -> str:
        """The revision that the URI itself asks for, or an empty string."""

    def listing(self, revision: str | None, stop: Stop) -> Listing:
        """See `Origin.listing`."""

    def read(self, entry: Entry, limit: int) -> bytes:
        """A small file of the last listing, whole. Blocks; raises what reading raises, IntegrityError above `limit` bytes."""

    def open_source(self) -> Source:
        """A source of the files of the last listing, for its caller to close. Opens no connection."""

    def close(self) -> None:
        """Close idle connections. Idempotent."""


class FromOrigin:
    """The supply that asks the origin for everything."""

    def __init__(self, origin: OpenOrigin, settings: Settings) -> None:
        self._origin, self._settings = origin, settings
        self.uri, self.revision = origin.uri, origin.revision

    def listing(self, revision: str | None, stop: Stop) -> Listing:
        return self._origin.listing(revision, stop)

    def read(self, entry: Entry, limit: int) -> bytes:
        return self._origin.read(entry, limit)

    def open_source(self) -> Source:
        return self.lift(self._origin)

    def lift(self, reader: Reader, ring: Callable[[], None] = lambda: None) -> Lifted:
        """A source of this origin's bytes, as `reader` opens them; `ring` is called when it has news."""
        return Lifted(reader, self._settings.max_bandwidth, ring)

    def by_path(self, revision: str, stop: Stop) -> Reader:
        """The origin's reader for files of somebody else's listing: it lists them itself when the first is wanted."""
        return _ByPath(self._origin, revision, stop)

    def close(self) -> None:
        self._origin.close()


class _ByPath:
    def __init__(self, origin: OpenOrigin, revision: str, stop: Stop) -> None:
        self._origin, self._revision, self._stop = origin, revision, stop
        self._lock = threading.Lock()
        self._entries: dict[str, Entry] | None = None

    @property
    def caps(self) -> SourceCaps:
        return self._origin.caps

    def open(self, item: ReadItem) -> Stream:
        entry = self._find(item.entry)
        return self._origin.open(replace(item, entry=entry))

    def _find(self, wanted: Entry) -> Entry:
        with self._lock:
            if self._entries is None:
                listing = self._origin.listing(self._revision or None, self._stop)
                self._entries = {entry.path: entry for entry in listing.files}
        found = self._entries.get(wanted.path)
        if found is None or found.size != wanted.size:
            raise OriginChanged(f"{wanted.path}: the origin does not hold it as the peers do")
        return found

    def close(self) -> None:
        """The origin is its owner's to close."""
