"""Object stores: a bucket's objects by their keys, one of them or all below a prefix."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import ClassVar

from mx_cli.base.cancel import Stop
from mx_cli.base.errors import AccessDenied, MxError, NotFound
from mx_cli.engine.retry import patiently
from mx_cli.model.manifest import Entry, Listing, revision_of
from mx_cli.sources.origin import Context, WebOrigin, at_revision
from mx_cli.sources.uri import Uri


def markers(sizes: Mapping[str, int]) -> set[str]:
    """Which keys stand for folders that somebody made by hand: by a slash at the end, or by being empty and a folder's name."""
    folders = {key[:at] for key in sizes for at in range(len(key)) if key[at] == "/"}
    empty = {key for key, size in sizes.items() if size == 0}
    return {key for key in sizes if key.endswith("/")} | {
        key for key in empty if key in folders or key.endswith("_$folder$")
    }


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
        self._relist()
        self._retried(self._authenticate)
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
        if not found or (found[0].size == 0 and not self._version):
            # An empty object may stand for a folder of its name.
            found = self._below(stop) or found
        if not found:
            raise refused or self._nothing()
        return at_revision(Listing(self.uri, revision_of(found), found), revision, uri.shown, self._version)

    def _retried(self, call: Callable[[], None]) -> None:
        context, shown = self._context, self._uri.shown
        # Who gives credentials is another host than the store.
        gate = context.gates["credentials"]
        patiently(shown, call, gate, context.stop, context.settings.retry_for, context.on_retry)

    def _nothing(self) -> NotFound:
        key, where = self._uri.path, f"in bucket {self._uri.place} at {self._server()}"
        if not key:
            return NotFound(f"{self._uri.shown}: the bucket is empty (looked {where})")
        looked = f"looked for the {self.KEY} {key} and for {self.KEY}s below {key}/ {where}"
        return NotFound(f"{self._uri.shown}: no objects ({looked})")
