"""Object stores: a bucket's objects by their keys, one of them or all below a prefix."""

from __future__ import annotations

from typing import ClassVar

from mx_cli.base.cancel import Stop
from mx_cli.base.errors import AccessDenied, MxError, NotFound
from mx_cli.model.manifest import Entry, Listing, revision_of
from mx_cli.sources.origin import Context, WebOrigin, at_revision
from mx_cli.sources.uri import Uri


class Store(WebOrigin):
    """The common half of S3 and Google Cloud Storage. Every listing is asked for afresh.

    Subclasses ask (`_object`, `_below`), and name things as their store does.
    """

    KEY: ClassVar[str]
    VERSION: ClassVar[str]

    def __init__(self, uri: Uri, context: Context) -> None:
        super().__init__(uri, context)
        self._version = context.version_id

    def _authenticate(self) -> None:
        """Find credentials. Having none is no refusal of the store's, and raises AccessDenied of its own."""
        raise NotImplementedError

    def _object(self) -> tuple[Entry, ...]:
        """The object with exactly the URI's key, or nothing. Raises AccessDenied."""
        raise NotImplementedError

    def _below(self, stop: Stop) -> tuple[Entry, ...]:
        """Everything below the URI's key as a folder, sorted."""
        raise NotImplementedError

    def listing(self, revision: str | None, stop: Stop) -> Listing:
        """See `Origin.listing`. An object with exactly this key wins; else everything below it as a folder."""
        uri = self._uri
        self._authenticate()
        found: tuple[Entry, ...] = ()
        refused: MxError | None = None
        if uri.path and not uri.folder:
            try:
                found = self._object()
            except AccessDenied as error:
                # Without the right to list, a store says 403 for what doesn't exist.
                refused = error
        if self._version and not found:
            raise refused or NotFound(f"{uri.shown}: no object with {self.VERSION} {self._version}")
        found = found or self._below(stop)
        if not found:
            raise refused or self._nothing()
        return at_revision(Listing(self.uri, revision_of(found), found), revision, uri.shown, self._version)

    def _nothing(self) -> NotFound:
        key, where = self._uri.path, f"in bucket {self._uri.place} at {self._server()}"
        if not key:
            return NotFound(f"{self._uri.shown}: the bucket is empty (looked {where})")
        looked = f"looked for the {self.KEY} {key} and for {self.KEY}s below {key}/ {where}"
        return NotFound(f"{self._uri.shown}: no objects ({looked})")
