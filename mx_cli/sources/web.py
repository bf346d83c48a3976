"""Requests to HTTP servers: connections, redirects, what an answer means, and pieces of files as streams."""

from __future__ import annotations

import email.utils
import socket
import ssl
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urljoin, urlsplit
from urllib.request import proxy_bypass_environment  # type: ignore[attr-defined]

from mx_cli.base import redact
from mx_cli.base.cancel import Stop
from mx_cli.base.config import Settings
from mx_cli.base.errors import (
    AccessDenied,
    IntegrityError,
    MxError,
    NotFound,
    OriginChanged,
    Unreachable,
    UsageError,
)
from mx_cli.base.version import VERSION
from mx_cli.engine.ports import NoRanges, OnRetry, ReadItem
from mx_cli.engine.retry import Gates, patiently
from mx_cli.sources.wire import Body, Head, Wire

if TYPE_CHECKING:
    from urllib3.connection import HTTPConnection

REDIRECTS = 8
BODY_LIMIT = 256 << 20
CERTIFICATE_HINT = (
    "trust the CA with --ca-bundle FILE, MX_CA_BUNDLE, SSL_CERT_FILE, REQUESTS_CA_BUNDLE or AWS_CA_BUNDLE"
)
USER_AGENT = f"mx/{VERSION}"
AGAIN_STATUS = frozenset({408, 425, 429, 500, 502, 503, 504, 509, 520, 521, 522, 523, 524, 529})

Sign = Callable[[str, str, dict[str, str]], dict[str, str]]
"""(method, url, headers) -> all headers to send; called for each request, so that credentials stay fresh."""


def unsigned(method: str, url: str, headers: dict[str, str]) -> dict[str, str]:
    return headers


@dataclass(frozen=True, slots=True)
class Reply:
    """A small answer, read whole; `url` is where it came from in the end."""

    status: int
    head: Head
    body: bytes
    url: str

    def get(self, name: str) -> str:
        return self.head.get(name)


Explain = Callable[[str, Head, bytes], MxError | None]
"""(what was asked for, head, up to 64 KiB of the body) -> the error that a refusal means, None for the usual one."""


@dataclass(frozen=True, slots=True)
class Target:
    """How to fetch one file: its URL, how to sign for it, and the answer headers that must equal what was pinned."""

    url: str
    what: str
    sign: Sign = unsigned
    headers: Mapping[str, str] = field(default_factory=dict)
    pinned: Mapping[str, str] = field(default_factory=dict)
    explain: Explain = lambda what, head, body: None


def refusal(what: str, head: Head, body: bytes = b"") -> MxError:
    """What a status outside 2xx and 3xx means."""
    status = head.status
    seen = f"{what}: HTTP {status}"
    if status in (401, 407):
        return AccessDenied(f"{seen}, credentials are missing or refused")
    if status == 403:
        return AccessDenied(f"{seen}, access denied")
    if status in (404, 410):
        return NotFound(f"{seen}, not found")
    if status == 412:
        return OriginChanged(f"{seen}, the object is not the one that was listed")
    if status in AGAIN_STATUS:
        return Unreachable(seen, retry_after=_retry_after(head))
    return Unreachable(seen, permanent=True)


def _retry_after(head: Head) -> float | None:
    text = head.get("retry-after")
    if not text:
        return None
    if text.isdigit():
        return float(text)
    moment = email.utils.parsedate_tz(text)
    return max(0.0, email.utils.mktime_tz(moment) - time.time()) if moment else None


class Web:
    """All requests of one command. Thread-safe; keeps idle connections for reuse."""

    def __init__(
        self, settings: Settings, environ: Mapping[str, str], stop: Stop, on_retry: OnRetry, gates: Gates | None = None
    ) -> None:
        self.settings = settings
        self.stop = stop
        self.gates = gates or Gates()
        self.on_retry = on_retry
        self._proxies = {
            name[:-6].lower(): value for name, value in environ.items() if name.lower().endswith("_proxy") and value
        }
        if "REQUEST_METHOD" in environ:
            self._proxies.pop("http", None)
        self._lock = threading.Lock()
        self._idle: dict[tuple[str, str, int], list[Wire]] = {}
        self._names: dict[str, int] = {}
        self._context: ssl.SSLContext | None = None
        self._closed = False

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
        follow: bool = True,
    ) -> Reply:
        """The whole answer, redirects followed, retried by the policy. Blocks.

        Raises what `explain` or `refusal` makes of a status >= 300 that is not in `allow`.
        """

        def once() -> Reply:
            wire, head, place = self._ask(method, url, what, sign, dict(headers or {}), follow)
            with self.stop.calling(wire.shutdown):
                body = b"" if method == "HEAD" else self._drain(wire, head, what)
            self._give_back(
                wire, head, method == "HEAD" or head.length is not None or "chunked" in head.get("transfer-encoding")
            )
            if head.status >= 300 and head.status not in allow:
                raise (explain and explain(what, head, body)) or refusal(what, head, body)
            return Reply(head.status, head, body, place)

        host = urlsplit(url).hostname or ""
        return patiently(what, once, self.gates[host], self.stop, self.settings.retry_for, self.on_retry)

    def _drain(self, wire: Wire, head: Head, what: str) -> bytes:
        body = _body(wire, head)
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
        wire, head, _ = self._ask("GET", target.url, target.what, target.sign, headers, follow=True)
        try:
            if head.status >= 300:
                body = self._excerpt(wire, head)
                raise target.explain(target.what, head, body) or refusal(target.what, head, body)
            check_answer(target, item, head, ranged)
        except BaseException:
            wire.close()
            raise
        return Piece(self, wire, head)

    def _excerpt(self, wire: Wire, head: Head) -> bytes:
        view = memoryview(bytearray(64 << 10))
        try:
            return bytes(view[: _body(wire, head).read_into(view)])
        except Unreachable:
            return b""

    # -- connections ---------------------------------------------------------------------------------------------

    def _ask(
        self, method: str, url: str, what: str, sign: Sign, headers: dict[str, str], follow: bool
    ) -> tuple[Wire, Head, str]:
        home = _host(url)
        for _ in range(REDIRECTS):
            wire, head = self._ask_once(method, url, what, sign, headers)
            if head.status not in (301, 302, 303, 307, 308) or not head.get("location") or not follow:
                return wire, head, url
            self._dismiss(wire, head, method)
            moved = urljoin(url, head.get("location"))
            if urlsplit(moved).scheme not in ("http", "https"):
                raise IntegrityError(f"{what}: redirected to {redact.url(moved)}, which is not http")
            if _host(moved) != home:
                # Credentials are for the host that they were given for, and for no other.
                sign = unsigned
                headers = {k: v for k, v in headers.items() if k.lower() not in ("authorization", "cookie")}
            url = moved
        raise Unreachable(f"{what}: more than {REDIRECTS} redirects, the last to {redact.url(url)}", permanent=True)

    def _dismiss(self, wire: Wire, head: Head, method: str) -> None:
        if method == "HEAD" or head.length == 0:
            self._give_back(wire, head, True)
        else:
            wire.close()

    def _ask_once(self, method: str, url: str, what: str, sign: Sign, headers: dict[str, str]) -> tuple[Wire, Head]:
        parts = urlsplit(url)
        port = parts.port or (443 if parts.scheme == "https" else 80)
        address = (parts.scheme, parts.hostname or "", port)
        path = quote(parts.path or "/", safe="/%!$&'()*+,;=:@~-._") + (f"?{parts.query}" if parts.query else "")
        proxy = self._proxy(*address) if parts.scheme == "http" else None
        asked = path if proxy is None else f"http://{parts.netloc.rpartition('@')[2]}{path}"
        extra = {} if proxy is None else _proxy_authorization(proxy)
        while True:
            wire = self._connection(address)
            full = {
                "Host": parts.netloc.rpartition("@")[2],
                "User-Agent": USER_AGENT,
                "Accept": "*/*",
                "Accept-Encoding": "identity",
                **extra,
                **sign(method, url, headers),
            }
            reused = wire.used
            try:
                with self.stop.calling(wire.shutdown):
                    return wire, wire.ask(method, asked, full)
            except Unreachable as error:
                wire.close()
                self.stop.check()
                if not reused:
                    raise Unreachable(f"{what}: {error.what}") from None
                # An idle connection that the server had closed meanwhile says nothing about the server.

    def _connection(self, address: tuple[str, str, int]) -> Wire:
        with self._lock:
            idle = self._idle.get(address)
            if idle:
                return idle.pop()
        return self._connect(*address)

    def _connect(self, scheme: str, host: str, port: int) -> Wire:
        place = f"{host}:{port}"
        try:
            connection = self._opened(scheme, host, port)
        except (OSError, ValueError) as error:
            raise self._connect_error(place, error) from None
        except Exception as error:
            # urllib3 wraps what the socket said in classes of its own.
            from urllib3.exceptions import HTTPError

            if not isinstance(error, HTTPError):
                raise
            cause = error.__cause__ or error.__context__ or error
            raise self._connect_error(place, cause if isinstance(cause, OSError) else error) from None
        sock = connection.sock
        connection.sock = None
        return Wire(sock, place, self.settings.stall_timeout)

    def _opened(self, scheme: str, host: str, port: int) -> HTTPConnection:
        from urllib3.connection import HTTPConnection, HTTPSConnection

        timeout = self.settings.connect_timeout
        proxy = self._proxy(scheme, host, port)
        far = urlsplit(proxy) if proxy else None
        to_host, to_port = (far.hostname or "", far.port or 3128) if far else (host, port)
        connection: HTTPConnection
        if scheme == "https":
            connection = HTTPSConnection(
                to_host,
                to_port,
                timeout=timeout,
                ssl_context=self._ssl(),
                server_hostname=host,
                assert_hostname=self._verify(host),
            )
            if proxy:
                connection.set_tunnel(host, port, headers=_proxy_authorization(proxy))
        else:
            connection = HTTPConnection(to_host, to_port, timeout=timeout)
        connection.connect()
        return connection

    def _verify(self, host: str) -> Any:
        return False if self.settings.insecure else host

    def _connect_error(self, place: str, error: Exception) -> MxError:
        if "CERTIFICATE_VERIFY_FAILED" in str(error) or isinstance(error, ssl.SSLCertVerificationError):
            reason = getattr(error, "verify_message", "") or "self-signed or unknown CA"
            return AccessDenied(f"{place}: certificate verify failed: {reason}", hint=CERTIFICATE_HINT)
        if isinstance(error, socket.gaierror) or "NameResolution" in type(error).__name__:
            with self._lock:
                self._names[place] = self._names.get(place, 0) + 1
                again = self._names[place] < 4
            return Unreachable(f"{place}: the host name does not resolve", permanent=not again)
        if isinstance(error, ssl.SSLError):
            return Unreachable(f"{place}: TLS failed: {error.reason or error}", permanent=True)
        said = error.strerror if isinstance(error, OSError) and error.strerror else str(error) or type(error).__name__
        return Unreachable(f"{place}: cannot connect: {redact.text(said)}")

    def _ssl(self) -> ssl.SSLContext:
        with self._lock:
            if self._context is None:
                self._context = tls_context(self.settings)
            return self._context

    def _proxy(self, scheme: str, host: str, port: int) -> str | None:
        if not self._proxies or proxy_bypass_environment(f"{host}:{port}", self._proxies):
            return None
        return self._proxies.get(scheme) or self._proxies.get("all")

    def _give_back(self, wire: Wire, head: Head, clean: bool) -> None:
        address = (("https" if wire.tls else "http"), *_split(wire.name))
        with self._lock:
            if clean and head.keep and not self._closed:
                self._idle.setdefault(address, []).append(wire)
                return
        wire.close()

    def close(self) -> None:
        """Close idle connections. Idempotent."""
        with self._lock:
            self._closed = True
            idle = [wire for wires in self._idle.values() for wire in wires]
            self._idle.clear()
        for wire in idle:
            wire.close()


class Piece:
    """An open answer as the engine's Stream; gives its connection back when it was read to the end."""

    def __init__(self, web: Web, wire: Wire, head: Head) -> None:
        self._web, self._wire, self._head = web, wire, head
        self._body = _body(wire, head)
        self._done = False

    def read_into(self, view: memoryview) -> int:
        count = self._body.read_into(view)
        if self._body.clean and not self._done:
            self._done = True
            self._web._give_back(self._wire, self._head, True)
        return count

    def close(self) -> None:
        if not self._done:
            self._wire.shutdown()


def _body(wire: Wire, head: Head) -> Body:
    chunked = "chunked" in head.get("transfer-encoding").lower()
    left = 0 if head.status in (204, 304) else head.length
    return Body(wire, left, chunked, head.rest, clean=left == 0)


def check_answer(target: Target, item: ReadItem, head: Head, ranged: bool) -> None:
    """Raise unless the answer is the piece asked for of the object that was pinned. See `Reader.open`."""
    what, entry = target.what, item.entry
    encoding = head.get("content-encoding").lower()
    if encoding not in ("", "identity"):
        raise IntegrityError(f"{what}: the origin sent Content-Encoding {encoding}, though identity was asked for")
    kind = head.get("content-type").split(";")[0].strip().lower()
    if kind == "text/html" and not entry.path.lower().endswith((".html", ".htm")):
        raise IntegrityError(f"{what}: got text/html, {head.get('content-length') or 'unknown'} bytes, not the file")
    for name, value in target.pinned.items():
        seen = head.get(name)
        if seen and seen != value:
            raise OriginChanged(f"{what}: the object changed ({name}: expected {value}, observed {seen})")
    if not ranged:
        _check_total(what, entry.size, head.length, "Content-Length")
        return
    span = head.get("content-range")
    if not span:
        if (
            head.status == 200
            and item.offset == 0
            and item.length is not None
            and head.length == item.length == entry.size
        ):
            return
        raise NoRanges(f"{what}: the origin does not serve ranges (HTTP {head.status} without Content-Range)")
    first, last, total = parse_content_range(span)
    if entry.size is not None and total is not None:
        _check_total(what, entry.size, total, "Content-Range")
    if first != item.offset or (item.end is not None and last != item.end - 1):
        raise NoRanges(f"{what}: asked for {item.offset}-{(item.end or 0) - 1}, the origin answered {span!r}")
    if head.length is not None and item.length is not None and head.length != item.length:
        raise NoRanges(f"{what}: asked for {item.length} bytes, the origin sends {head.length}")


def parse_content_range(text: str) -> tuple[int, int, int | None]:
    """(first, last, total) of `bytes 0-99/1234`; (-1, -1, None) for anything else."""
    unit, _, rest = text.partition(" ")
    span, _, total = rest.partition("/")
    first, _, last = span.partition("-")
    if unit.lower() != "bytes" or not first.isdigit() or not last.isdigit():
        return -1, -1, None
    return int(first), int(last), int(total) if total.isdigit() else None


def _check_total(what: str, expected: int | None, observed: int | None, source: str) -> None:
    if expected is not None and observed is not None and expected != observed:
        raise IntegrityError(
            f"{what}: wrong size (expected {expected} bytes from the listing, observed {observed} in {source})"
        )


def tls_context(settings: Settings) -> ssl.SSLContext:
    """The system's trust plus `ca_bundle`; HTTP/1.1 only. Raises UsageError for an unreadable bundle."""
    try:
        context = ssl.create_default_context()
        if settings.ca_bundle:
            where = settings.ca_bundle
            context.load_verify_locations(
                cafile=None if where.is_dir() else where, capath=where if where.is_dir() else None
            )
    except (OSError, ssl.SSLError) as error:
        raise UsageError(f"cannot read the CA bundle {settings.ca_bundle}: {error}") from None
    context.set_alpn_protocols(["http/1.1"])
    if settings.insecure:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context


def _proxy_authorization(proxy: str) -> dict[str, str]:
    from urllib3.util import make_headers

    parts = urlsplit(proxy)
    if parts.username is None:
        return {}
    made = make_headers(proxy_basic_auth=f"{parts.username}:{parts.password or ''}")
    return {"Proxy-Authorization": made["proxy-authorization"]}


def _host(url: str) -> tuple[str, str | None, int | None]:
    parts = urlsplit(url)
    return parts.scheme, parts.hostname, parts.port


def _split(place: str) -> tuple[str, int]:
    host, _, port = place.rpartition(":")
    return host, int(port)


__all__ = ["Piece", "Reply", "Target", "Web", "check_answer", "refusal", "unsigned"]
