"""One file at a URL."""

from __future__ import annotations

from urllib.parse import urlsplit, urlunsplit

from mx_cli.base import canonical
from mx_cli.base.cancel import Stop
from mx_cli.base.errors import AccessDenied, MxError
from mx_cli.engine.ports import ReadItem, Stream
from mx_cli.model.manifest import Entry, Listing
from mx_cli.sources.answers import OtherTag, Target, bare_tag, basic, refuse_html, size_of
from mx_cli.sources.origin import Context, WebOrigin, at_revision, no_versions
from mx_cli.sources.uri import Uri, is_signed, last_component
from mx_cli.sources.wire import Head


class Http(WebOrigin):
    """An origin with a single file. Its revision is derived from the server's validators, and may be empty."""

    def __init__(self, uri: Uri, context: Context) -> None:
        no_versions(context, uri.shown)
        parts = urlsplit(uri.url)
        super().__init__(uri, context)
        user, _, host = parts.netloc.rpartition("@")
        self._url = urlunsplit((parts.scheme, host, parts.path, parts.query, ""))
        self._authorization = basic(user) if user else ""
        self._weak: dict[str, str] = {}
        self._doubted = False

    def listing(self, revision: str | None, stop: Stop) -> Listing:
        """See `Origin.listing`."""
        self._relist()
        reply = self._web.describe(
            self._url, self._uri.shown, sign=self._sign, explain=self._explain, doubted=self._doubted
        )
        entry = self._entry(reply.head)
        return at_revision(Listing(self.uri, _revision(entry), (entry,)), revision, self._uri.shown)

    def open(self, item: ReadItem) -> Stream:
        """See `Reader.open`."""
        try:
            return super().open(item)
        except OtherTag:
            # Some say another thing to HEAD than to GET.
            self._doubted = True
            raise

    def _entry(self, head: Head) -> Entry:
        name = last_component(self._uri.path)
        refuse_html(self._uri.shown, name, head)
        size = size_of(head)
        tag = head.get("etag")
        if tag and not tag.startswith("W/"):
            return Entry(name, size, bare_tag(tag), key=self._url)
        self._weak = {name: head.get(name) for name in ("etag", "last-modified") if head.get(name)}
        marks = [bare_tag(mark) for mark in self._weak.values()]
        validator = "weak:" + " ".join(marks) if marks and size is not None else ""
        return Entry(name, size, validator, strong=False, key=self._url)

    def _server(self) -> str:
        return self._url

    def _target(self, entry: Entry) -> Target:
        headers: dict[str, str] = {}
        pinned: dict[str, str] = {}
        if entry.strong:
            headers |= self._if_match(entry)
            pinned["etag"] = entry.validator
        else:
            pinned.update(self._weak)
        return Target(self._url, self._uri.shown, self._sign, headers, pinned, self._explain)

    def _explain(self, what: str, head: Head, body: bytes) -> MxError | None:
        """A link that is signed is good for a while only."""
        if head.status not in (401, 403) or not is_signed(urlsplit(self._url).query):
            return None
        return AccessDenied(
            f"{what}: HTTP {head.status}, access denied; the link is signed, and may have expired",
            hint="make a new one and run the command again: what was fetched is kept",
        )

    def _sign(self, method: str, url: str, headers: dict[str, str]) -> dict[str, str]:
        return {**headers, "Authorization": self._authorization} if self._authorization else headers


def _revision(entry: Entry) -> str:
    """A safe file name; `weak-` marks one that the origin does not vouch for."""
    if not entry.validator:
        return ""
    digest = canonical.sha256([entry.size, entry.validator])
    return digest if entry.strong else f"weak-{digest}"
