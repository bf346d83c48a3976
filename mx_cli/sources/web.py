"""Requests to HTTP servers: connections, redirects, what an answer means, and pieces of files as streams."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from urllib.parse import urljoin, urlsplit

from mx_cli.base import redact
from mx_cli.base.cancel import Stop
from mx_cli.base.config import Settings
from mx_cli.base.errors import AccessDenied, IntegrityError, MxError, Unreachable
from mx_cli.base.events import Requested
from mx_cli.base.version import VERSION
from mx_cli.engine.ports import OnRetry, ReadItem
from mx_cli.engine.retry import Gates, patiently
from mx_cli.sources.answers import (
    GOOD_STATUS,
    HEADLESS_STATUS,
    MOVED_STATUS,
    RANGELESS_STATUS,
    Explain,
    Follow,
    Place,
    Sign,
    Target,
    anywhere,
    check_answer,
    check_codings,
    nowhere,
    packed_as,
    refusal,
    refused_range,
    size_of,
    unsigned,
)
from mx_cli.sources.connect import Connections
from mx_cli.sources.uri import encode_path, encode_query
from mx_cli.sources.wire import Body, Head, Wire

REDIRECTS = 8
BODY_LIMIT = 256 << 20
USER_AGENT = f"mx/{VERSION}"
STALE_STATUS = frozenset({400, 401, 403, 404, 410})
"""What a link answers that was good once: signed links expire."""


@dataclass(frozen=True, slots=True)
class Reply:
    """A small answer, read whole; `url` is where it came from in the end."""

    status: int
    head: Head
    body: bytes
    url: str

    def get(self, name: str) -> str:
        return self.head.get(name)


class Web:
    """All requests of one command. Thread-safe; keeps idle connections for reuse."""

    def __init__(
        self,
        settings: Settings,
        environ: Mapping[str, str],
        stop: Stop,
        on_retry: OnRetry,
        gates: Gates | None = None,
        on_request: Callable[[Requested], None] | None = None,
    ) -> None:
        self.settings = settings
        self.stop = stop
        self.gates = gates or Gates()
        self.on_retry = on_retry
        self._on_request = on_request
        self.connections = Connections(settings, environ)
        self._lock = threading.Lock()
        self._moved: dict[str, Place] = {}

    # -- small requests ------------------------------------------------------------------------------------------

    def request(
        self,
        method: str,
        url: str,
        what: str,
        *,
        sign: Sign = unsigned,
        headers: Mapping[str, str] | None = None,
        explain: Explain | None = None,
        allow: tuple[int, ...] = (),
        follow: Follow = anywhere,
        head_only: bool = False,
        check: Callable[[Reply], None] | None = None,
    ) -> Reply:
        """The whole answer, redirects followed, retried by the policy. Blocks.

        With `head_only` the body of a success is not read. `check` raises for a success that is none. Raises what `explain` or `refusal` makes of a status that is
        neither good nor in `allow`.
        """

        def once() -> Reply:
            wire, head, place = self._ask(method, Place(url, True), what, sign, dict(headers or {}), follow)
            good = head.status in GOOD_STATUS
            if head_only and good and method != "HEAD":
                wire.close()
                return Reply(head.status, head, b"", place.url)
            if good and method != "HEAD":
                check_codings(what, head)
            with self.stop.calling(wire.shutdown):
                body = b"" if method == "HEAD" else self._drain(wire, head, what)
            self.connections.give_back(
                wire, head, method == "HEAD" or head.length is not None or "chunked" in head.get("transfer-encoding")
            )
            if not good and head.status not in allow:
                where = _via(what, url, place.url)
                raise (explain and place.trusted and explain(where, head, body)) or _refused(place, where, head, body)
            reply = Reply(head.status, head, body, place.url)
            if check:
                check(reply)
            return reply

        host = urlsplit(url).hostname or ""
        return patiently(what, once, self.gates[host], self.stop, self.settings.retry_for, self.on_retry)

    def describe(
        self, url: str, what: str, *, sign: Sign = unsigned, explain: Explain | None = None, doubted: bool = False
    ) -> Reply:
        """What HEAD says of a file, or where that says nothing (or is `doubted`) the head of a GET: of a byte, or of all."""

        def ask(method: str, allow: Iterable[int] = (), headers: Mapping[str, str] | None = None) -> Reply:
            return self.request(
                method, url, what, sign=sign, headers=headers, explain=explain, allow=tuple(allow), head_only=True
            )

        if not doubted:
            reply = ask("HEAD", HEADLESS_STATUS)
            if reply.status in GOOD_STATUS and not packed_as(reply.head):
                # Not all that say "empty" to HEAD mean it.
                return reply if size_of(reply.head) != 0 else ask("GET")
        reply = ask("GET", RANGELESS_STATUS, {"Range": "bytes=0-0"})
        empty = reply.status == 416 and size_of(reply.head) == 0
        return reply if reply.status in GOOD_STATUS or empty else ask("GET")

    def _drain(self, wire: Wire, head: Head, what: str) -> bytes:
        body = body_of(wire, head)
        parts = bytearray()
        view = memoryview(bytearray(64 << 10))
        while count := body.read_into(view):
            parts += view[:count]
            if len(parts) > BODY_LIMIT:
                wire.close()
                raise IntegrityError(f"{what}: the answer is larger than {BODY_LIMIT} bytes")
        return bytes(parts)

    # -- pieces of files -----------------------------------------------------------------------------------------

    def open(self, target: Target, item: ReadItem) -> Piece:
        """A stream of the item's bytes, after the answer has proved to be that piece. See `Reader.open`."""
        headers = {**target.headers}
        ranged = not item.whole and item.length != 0
        if ranged:
            last = "" if item.end is None else str(item.end - 1)
            headers["Range"] = f"bytes={item.offset}-{last}"
        wire, head, place = self._ask_again(target, headers)
        try:
            if head.status not in GOOD_STATUS:
                body = self._excerpt(wire, head)
                where = _via(target.what, target.url, place.url)
                meant = target.explain(where, head, body) if place.trusted else None
                if ranged and meant is None and head.status in RANGELESS_STATUS:
                    raise refused_range(target, item, head)
                raise meant or _refused(place, where, head, body)
            check_answer(target, item, head, ranged)
        except BaseException:
            wire.close()
            raise
        return Piece(self, wire, head)

    def _ask_again(self, target: Target, headers: dict[str, str]) -> tuple[Wire, Head, Place]:
        """GET, straight from where the target was found to be the last time; from its own URL when that fails."""
        with self._lock:
            known = self._moved.get(target.url)
        if known:
            try:
                wire, head, place = self._ask("GET", known, target.what, target.sign, headers, target.follow)
            except Unreachable:
                self._forget(target.url)
                raise
            if head.status >= 400:
                self._forget(target.url)
            if head.status not in STALE_STATUS:
                return wire, head, place
            wire.close()
        first = Place(target.url, True)
        wire, head, place = self._ask("GET", first, target.what, target.sign, headers, target.follow)
        if place.url != target.url and head.status < 300:
            with self._lock:
                self._moved[target.url] = place
        return wire, head, place

    def _forget(self, url: str) -> None:
        with self._lock:
            self._moved.pop(url, None)

    def _excerpt(self, wire: Wire, head: Head) -> bytes:
        view = memoryview(bytearray(64 << 10))
        try:
            return bytes(view[: body_of(wire, head).read_into(view)])
        except Unreachable:
            return b""

    # -- one question --------------------------------------------------------------------------------------------

    def _ask(
        self, method: str, place: Place, what: str, sign: Sign, headers: dict[str, str], follow: Follow
    ) -> tuple[Wire, Head, Place]:
        home = place.url
        for _ in range(REDIRECTS):
            if not place.trusted:
                sign, headers = unsigned, _without_credentials(headers)
            wire, head = self._ask_once(method, place.url, what, sign, headers)
            if head.status not in MOVED_STATUS or not head.get("location") or follow is nowhere:
                return wire, head, place
            try:
                following = follow(head, home, _moved(what, place.url, head.get("location")))
            except MxError:
                wire.close()
                raise
            if following is None:
                return wire, head, place
            self._dismiss(wire, head, method)
            # Who was not trusted leads nowhere that is.
            place = Place(following.url, following.trusted and place.trusted)
        last = redact.url(place.url)
        raise Unreachable(f"{what}: more than {REDIRECTS} redirects, the last to {last}", permanent=True)

    def _dismiss(self, wire: Wire, head: Head, method: str) -> None:
        if method == "HEAD" or head.length == 0:
            self.connections.give_back(wire, head, True)
        else:
            wire.close()

    def _ask_once(self, method: str, url: str, what: str, sign: Sign, headers: dict[str, str]) -> tuple[Wire, Head]:
        parts = urlsplit(url)
        port = parts.port or (443 if parts.scheme == "https" else 80)
        address = (parts.scheme, parts.hostname or "", port)
        path = encode_path(parts.path)
        if parts.query:
            path += "?" + encode_query(parts.query)
        host = parts.netloc.rpartition("@")[2]
        extra = self.connections.plain_proxy(address)
        asked = path if extra is None else f"http://{host}{path}"
        while True:
            try:
                wire = self.connections.take(address)
            except Unreachable as error:
                raise Unreachable(f"{what}: {error.what}", hint=error.hint, permanent=error.permanent) from None
            full = {
                "Host": host,
                "User-Agent": USER_AGENT,
                "Accept": "*/*",
                "Accept-Encoding": "identity",
                **(extra or {}),
                **sign(method, url, headers),
            }
            reused, start = wire.used, time.monotonic()
            try:
                with self.stop.calling(wire.shutdown):
                    head = wire.ask(method, asked, full)
                if self._on_request:
                    took = round(time.monotonic() - start, 6)
                    self._on_request(Requested(method, redact.url(url), full.get("Range", ""), head.status, took))
                return wire, head
            except Unreachable as error:
                wire.close()
                self.stop.check()
                if not reused:
                    raise Unreachable(f"{what}: {error.what}") from None
                # An idle connection that the server had closed meanwhile says nothing about the server.

    def close(self) -> None:
        """Close idle connections. Idempotent."""
        self.connections.close()


class Piece:
    """An open answer as the engine's Stream; gives its connection back when it was read to the end."""

    def __init__(self, web: Web, wire: Wire, head: Head) -> None:
        self._web, self._wire, self._head = web, wire, head
        self._body = body_of(wire, head)
        self._done = False

    def read_into(self, view: memoryview) -> int:
        count = self._body.read_into(view)
        if self._body.clean and not self._done:
            self._done = True
            self._web.connections.give_back(self._wire, self._head, True)
        return count

    def close(self) -> None:
        if not self._done:
            self._wire.shutdown()


def body_of(wire: Wire, head: Head) -> Body:
    """The body that follows the head of an answer to GET."""
    chunked = "chunked" in head.get("transfer-encoding").lower()
    left = 0 if head.status in (204, 304) else head.length
    return Body(wire, left, chunked, head.rest, clean=left == 0)


def _moved(what: str, url: str, location: str) -> str:
    """Where a redirect leads; IntegrityError when that is no http URL."""
    with contextlib.suppress(UnicodeDecodeError):
        # Names that somebody forgot to encode.
        location = location.encode("latin-1").decode()
    try:
        moved = urljoin(url, location)
        parts = urlsplit(moved)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        moved, usable = location, False
    if not usable:
        raise IntegrityError(f"{what}: redirected to {redact.url(moved)}, which is not http")
    return moved


def _without_credentials(headers: Mapping[str, str]) -> dict[str, str]:
    kept = {name: value for name, value in headers.items() if name.lower() not in ("authorization", "cookie")}
    return {name: value for name, value in kept.items() if not name.lower().startswith("x-amz-")}


def _refused(place: Place, what: str, head: Head, body: bytes) -> MxError:
    error = refusal(what, head, body)
    if isinstance(error, AccessDenied) and not place.trusted:
        return AccessDenied(error.what, hint="a redirect led to another host, which is sent no credentials")
    return error


def _via(what: str, asked: str, answered: str) -> str:
    """`what`, with the hop that answered when it is on another host."""
    return what if urlsplit(asked).netloc == urlsplit(answered).netloc else f"{what} (at {redact.url(answered)})"
