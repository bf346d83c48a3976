"""One file at a URL."""

from __future__ import annotations

import base64
from urllib.parse import unquote_to_bytes, urlsplit, urlunsplit

from mx_cli.base import canonical
from mx_cli.base.cancel import Stop
from mx_cli.model.manifest import Entry, Listing
from mx_cli.sources.answers import Target, bare_tag, refuse_html, size_of
from mx_cli.sources.origin import Context, WebOrigin, at_revision, no_versions
from mx_cli.sources.uri import Uri, last_component
from mx_cli.sources.web import Reply
from mx_cli.sources.wire import Head

# What servers say to HEAD when they only do GET; a link signed for GET answers 403.
_NO_HEAD = (400, 403, 405, 501)


class Http(WebOrigin):
    """An origin with a single file. Its revision is derived from the server's validators, and may be empty."""

    def __init__(self, uri: Uri, context: Context) -> None:
        no_versions(context, uri.shown)
        parts = urlsplit(uri.url)
        super().__init__(uri, context)
        user, _, host = parts.netloc.rpartition("@")
        self._url = urlunsplit((parts.scheme, host, parts.path, parts.query, ""))
        self._authorization = _basic(user) if user else ""
        self._weak: dict[str, str] = {}

    def listing(self, revision: str | None, stop: Stop) -> Listing:
        """See `Origin.listing`."""
        reply = self._ask()
        entry = self._entry(reply.head)
        return at_revision(Listing(self.uri, _revision(entry), (entry,)), revision, self._uri.shown)

    def _ask(self) -> Reply:
        """HEAD, or the head of a GET for the first byte. Where HEAD says "empty", a GET decides: not all servers mean it."""
        shown = self._uri.shown
        reply = self._web.request("HEAD", self._url, shown, sign=self._sign, allow=_NO_HEAD)
        if reply.status in _NO_HEAD:
            first = {"Range": "bytes=0-0"}
            # 416: an empty file has no first byte.
            reply = self._web.request(
                "GET", self._url, shown, sign=self._sign, headers=first, allow=(416,), head_only=True
            )
        elif size_of(reply.head) == 0:
            reply = self._web.request("GET", self._url, shown, sign=self._sign, head_only=True)
        return reply

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
            headers["If-Match"] = f'"{entry.validator}"'
            pinned["etag"] = entry.validator
        else:
            pinned.update(self._weak)
        return Target(self._url, self._uri.shown, self._sign, headers, pinned)

    def _sign(self, method: str, url: str, headers: dict[str, str]) -> dict[str, str]:
        return {**headers, "Authorization": self._authorization} if self._authorization else headers


def _basic(user: str) -> str:
    return "Basic " + base64.b64encode(unquote_to_bytes(user)).decode()


def _revision(entry: Entry) -> str:
    """A safe file name; `weak-` marks one that the origin does not vouch for."""
    if not entry.validator:
        return ""
    digest = canonical.sha256([entry.size, entry.validator])
    return digest if entry.strong else f"weak-{digest}"
