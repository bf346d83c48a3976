"""Where a prefetch gets its listing, its small files and its bytes from."""

from __future__ import annotations

from typing import Protocol

from mx_cli.base.cancel import Stop
from mx_cli.base.config import Settings
from mx_cli.engine.ports import Source
from mx_cli.engine.threads import Lifted, Throttle
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
        rate = self._settings.max_bandwidth
        return Lifted(self._origin, Throttle(rate) if rate else None)

    def close(self) -> None:
        self._origin.close()
