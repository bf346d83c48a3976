"""What all origins share: what they are given, how small files are read, and what a wanted revision means."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from mx_cli.base.cancel import Stop
from mx_cli.base.config import Settings
from mx_cli.base.errors import IntegrityError, NotFound, Unreachable, UsageError
from mx_cli.base.events import Requested
from mx_cli.engine.ports import OnRetry, Reader, ReadItem, SourceCaps, Stream
from mx_cli.engine.retry import Gate, Gates, patiently
from mx_cli.engine.verify import OriginDigest
from mx_cli.model.manifest import Entry, Listing, store_ref
from mx_cli.sources.answers import Target, Unmatched
from mx_cli.sources.uri import Uri
from mx_cli.sources.web import Web

SMALL_WORKERS = 16
_CHUNK = 256 << 10


@dataclass(frozen=True)
class Context:
    """What every origin is given. `environ` is the process's environment, for proxies and credential chains."""

    settings: Settings
    environ: Mapping[str, str]
    stop: Stop
    on_retry: OnRetry
    notice: Callable[[str], None]
    gates: Gates = field(default_factory=Gates)
    version_id: str = ""
    on_request: Callable[[Requested], None] | None = None


class Named:
    """What every origin knows before any connection, from its URI."""

    def __init__(self, uri: Uri, context: Context) -> None:
        self._uri = uri
        self._context = context

    @property
    def uri(self) -> str:
        """Canonical, without secrets."""
        return self._uri.text

    @property
    def revision(self) -> str:
        """The revision that the URI itself asked for, or an empty string."""
        return self._uri.revision


class WebOrigin(Named):
    """The common half of the origins that speak HTTP. Subclasses say how a file is asked for (`_target`)."""

    def __init__(self, uri: Uri, context: Context) -> None:
        super().__init__(uri, context)
        self._web = Web(
            context.settings, context.environ, context.stop, context.on_retry, context.gates, context.on_request
        )
        self._unmatched: set[tuple[str, str]] = set()
        self._without_condition: set[tuple[str, str]] = set()

    @property
    def caps(self) -> SourceCaps:
        settings = self._context.settings
        return SourceCaps(settings.max_connections, settings.range_size, urlsplit(self._server()).hostname or "")

    def _server(self) -> str:
        """The URL that files are asked for at: its host's limits count."""
        raise NotImplementedError

    def _target(self, entry: Entry) -> Target:
        raise NotImplementedError

    def open(self, item: ReadItem) -> Stream:
        """See `Reader.open`."""
        return self._read(self._target(item.entry), item)

    def _read(self, target: Target, item: ReadItem) -> Stream:
        try:
            return self._web.open(target, item)
        except Unmatched:
            self._unmatched.add((item.entry.key, item.entry.validator))
            raise

    def _relist(self) -> None:
        """Before each listing: what was refused as changed, and is listed as it was, comes from a server that always refuses."""
        self._without_condition |= self._unmatched

    def _if_match(self, entry: Entry) -> dict[str, str]:
        """The header that makes a server refuse another version. What comes is compared all the same."""
        if (entry.key, entry.validator) in self._without_condition:
            return {}
        return {"If-Match": f'"{entry.validator}"'}

    def read(self, entry: Entry, limit: int) -> bytes:
        """A small file, whole, through the same checks and the retry policy. IntegrityError above `limit` bytes."""
        return read_small(self, entry, limit, self._context)

    def close(self) -> None:
        """Close idle connections. Idempotent."""
        self._web.close()


def read_small(reader: Reader, entry: Entry, limit: int, context: Context) -> bytes:
    """All bytes of `entry`; blocks. Raises what `open` raises, and IntegrityError when there are more than `limit`."""
    too_large = f"{entry.path}: larger than {limit} bytes, which is too much for a file of this kind"
    if entry.size is not None and entry.size > limit:
        raise IntegrityError(f"{too_large} (observed {entry.size})")

    def once() -> bytes:
        found = bytearray()
        view = memoryview(bytearray(_CHUNK))
        stream = reader.open(ReadItem(entry, 0, entry.size, whole=True))
        try:
            with context.stop.calling(stream.close):
                while count := stream.read_into(view):
                    found += view[:count]
                    if len(found) > limit:
                        raise IntegrityError(too_large)
        finally:
            stream.close()
        context.stop.check()
        if entry.size is not None and len(found) > entry.size:
            raise IntegrityError(
                f"{entry.path}: wrong size (expected {entry.size} bytes from the listing, observed {len(found)})"
            )
        if entry.size is not None and len(found) < entry.size:
            raise Unreachable(f"{entry.path}: the answer ended after {len(found)} of {entry.size} bytes")
        digest = OriginDigest(entry.path, entry.digests, entry.size)
        digest.update(memoryview(found))
        digest.finish()
        return bytes(found)

    if entry.size == 0:
        return b""
    gate: Gate = context.gates[reader.caps.host]
    stop, settings = context.stop, context.settings
    return patiently(entry.path, once, gate, stop, settings.retry_for, context.on_retry)


def at_revision(listing: Listing, wanted: str | None, shown: str, version_id: str = "") -> Listing:
    """`listing`, if it is what was wanted: an origin without history has one revision, the present one.

    A version id picks an old object, so what it gives is not the latest, but has a name of its own.
    """
    if not wanted:
        return dataclasses.replace(listing, ref=store_ref(version_id))
    if listing.revision != wanted:
        raise NotFound(
            f"{shown}: revision not found (expected {wanted}, the origin now holds {listing.revision or 'an unknown one'})",
            hint="leave --revision out to take what the origin holds now",
        )
    return listing


def one_revision(written: str, wanted: str | None, shown: str) -> str:
    """The revision asked for by the URI's suffix or by option; UsageError when both say different things."""
    if written and wanted and written != wanted:
        raise UsageError(f"{shown}: two revisions are asked for, {written} and {wanted}")
    return wanted or written


def no_versions(context: Context, shown: str) -> None:
    """UsageError when a version id was given for an origin that has none."""
    if context.version_id:
        raise UsageError(f"{shown}: --version-id is for single objects in s3:// and gs://")
