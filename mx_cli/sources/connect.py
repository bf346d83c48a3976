"""Connections: opened through urllib3 where a proxy is in play, kept idle for reuse, and what it means when one does not open."""

from __future__ import annotations

import contextlib
import ipaddress
import re
import socket
import ssl
import threading
import time
from collections.abc import Mapping
from urllib.parse import unquote, urlsplit
from urllib.request import proxy_bypass_environment  # type: ignore[attr-defined]

from mx_cli.base import redact
from mx_cli.base.address import join_address
from mx_cli.base.config import Settings
from mx_cli.base.errors import AccessDenied, MxError, Unreachable, UsageError
from mx_cli.base.tls_stream import TlsStream
from mx_cli.sources.answers import AGAIN_STATUS
from mx_cli.sources.wire import Head, Wire

CERTIFICATE_HINT = (
    "trust the CA with --ca-bundle FILE, MX_CA_BUNDLE, SSL_CERT_FILE, REQUESTS_CA_BUNDLE or AWS_CA_BUNDLE"
)
_SILENCE = 1.0
"""Seconds after which an address does not seem to answer: others of its name are no worse."""
_NO_TLS = frozenset({"WRONG_VERSION_NUMBER", "HTTP_REQUEST", "PACKET_LENGTH_TOO_LONG", "RECORD_LAYER_FAILURE"})
_TUNNEL_REFUSED = re.compile(r"Tunnel connection failed: (\d{3})")


class Connections:
    """The connections of one command. Thread-safe."""

    def __init__(self, settings: Settings, environ: Mapping[str, str]) -> None:
        self._settings = settings
        self._proxies = {
            name[:-6].lower(): value for name, value in environ.items() if name.lower().endswith("_proxy") and value
        }
        if "REQUEST_METHOD" in environ:
            self._proxies.pop("http", None)
        self._lock = threading.Lock()
        self._idle: dict[tuple[str, str, int], list[Wire]] = {}
        self._names: dict[str, int] = {}
        self._answers: dict[tuple[str, int], tuple[str, int]] = {}
        self._context: ssl.SSLContext | None = None
        self._closed = False

    def take(self, address: tuple[str, str, int]) -> Wire:
        """A connection to (scheme, host, port), an idle one if there is one. Blocks; raises Unreachable, AccessDenied."""
        with self._lock:
            idle = self._idle.get(address)
            if idle:
                return idle.pop()
        return self._connect(*address)

    def _connect(self, scheme: str, host: str, port: int) -> Wire:
        place = join_address(host, port)
        proxy = self._proxy(scheme, host, port)
        shown = f"{place} (through the proxy {urlsplit(proxy).netloc.rpartition('@')[2]})" if proxy else place
        try:
            sock = self._opened(scheme, host, port, proxy)
        except (OSError, ValueError) as error:
            raise self._explain(shown, error) from None
        except Exception as error:
            # urllib3 wraps what the socket said in classes of its own.
            from urllib3.exceptions import HTTPError

            if not isinstance(error, HTTPError):
                raise
            cause = error.__cause__ or error.__context__ or error
            raise self._explain(shown, cause if isinstance(cause, OSError) else error) from None
        return Wire(sock, place, self._settings.stall_timeout, (scheme, host, port))

    def _opened(self, scheme: str, host: str, port: int, proxy: str | None) -> socket.socket | TlsStream:
        sock = self._to_proxy(scheme, host, port, proxy) if proxy else self._reach(host, port)
        return TlsStream(sock, self._ssl(), host.rstrip(".")) if scheme == "https" else sock

    def _reach(self, host: str, port: int) -> socket.socket:
        """A connection to one of a name's addresses. Where the first of them does not answer, who does is remembered."""
        limit = self._settings.connect_timeout
        answers = self._answers.get((host, port))
        if answers:
            with contextlib.suppress(OSError):
                return socket.create_connection(answers, limit)
        start = time.monotonic()
        sock = socket.create_connection((host, port), limit)
        if time.monotonic() - start > _SILENCE:
            self._answers[host, port] = sock.getpeername()[:2]
        return sock

    def _to_proxy(self, scheme: str, host: str, port: int, proxy: str) -> socket.socket:
        from urllib3.connection import HTTPConnection

        far = urlsplit(proxy)
        connection = HTTPConnection(far.hostname or "", far.port or 3128, timeout=self._settings.connect_timeout)
        if scheme == "https":
            connection.set_tunnel(host, port, headers=_proxy_authorization(proxy))
        connection.connect()
        sock: socket.socket = connection.sock
        connection.sock = None
        return sock

    def _explain(self, place: str, error: Exception) -> MxError:
        if "CERTIFICATE_VERIFY_FAILED" in str(error) or isinstance(error, ssl.SSLCertVerificationError):
            reason = getattr(error, "verify_message", "") or "self-signed or unknown CA"
            return AccessDenied(f"{place}: certificate verify failed: {reason}", hint=_certificate_hint(reason))
        if isinstance(error, socket.gaierror) or "NameResolution" in type(error).__name__:
            with self._lock:
                self._names[place] = self._names.get(place, 0) + 1
                again = self._names[place] < 4
            return Unreachable(f"{place}: the host name does not resolve", permanent=not again)
        if isinstance(error, ssl.SSLError):
            # A server that hangs up in the middle is busy or restarting; one that speaks something else stays that way.
            hung_up = isinstance(error, (ssl.SSLEOFError, ssl.SSLZeroReturnError, ssl.SSLSyscallError))
            hint = "what listens there may speak no TLS: try http://" if error.reason in _NO_TLS else ""
            return Unreachable(f"{place}: TLS failed: {error.reason or error}", hint=hint, permanent=not hung_up)
        said = error.strerror if isinstance(error, OSError) and error.strerror else str(error) or type(error).__name__
        if refused := _TUNNEL_REFUSED.search(said):
            status = int(refused[1])
            what = f"{place}: the proxy refuses (HTTP {status})"
            if status in (401, 403, 407):
                return AccessDenied(
                    what, hint="name and password belong into the proxy's URL; no_proxy names exceptions"
                )
            return Unreachable(what, permanent=status not in AGAIN_STATUS)
        return Unreachable(f"{place}: cannot connect: {redact.text(said)}")

    def _ssl(self) -> ssl.SSLContext:
        with self._lock:
            if self._context is None:
                self._context = tls_context(self._settings)
            return self._context

    def _proxy(self, scheme: str, host: str, port: int) -> str | None:
        if not self._proxies or _goes_straight(host, port, self._proxies):
            return None
        proxy = (self._proxies.get(scheme) or self._proxies.get("all") or "").strip() or None
        if proxy and "://" not in proxy:
            proxy = f"http://{proxy}"
        if proxy and not _is_url(proxy):
            raise UsageError(
                f"the proxy for {scheme} is no address: {redact.url(proxy)}",
                hint=f"set {scheme}_proxy=http://host:port",
            )
        if proxy and not proxy.lower().startswith("http://"):
            raise UsageError(
                f"the proxy for {scheme} is {proxy.partition(':')[0]}://, but only http:// proxies are supported",
                hint=f"set {scheme}_proxy=http://host:port, or no_proxy={host}",
            )
        return proxy

    def plain_proxy(self, address: tuple[str, str, int]) -> dict[str, str] | None:
        """The headers for the proxy that unencrypted requests to `address` go through; None when they go straight."""
        proxy = self._proxy(*address) if address[0] == "http" else None
        return None if proxy is None else _proxy_authorization(proxy)

    def give_back(self, wire: Wire, head: Head, clean: bool) -> None:
        """Keep the connection for the next request if its answer was read to the end (`clean`), else close it."""
        with self._lock:
            if clean and head.keep and not self._closed:
                self._idle.setdefault(wire.address, []).append(wire)
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


def _goes_straight(host: str, port: int, proxies: Mapping[str, str]) -> bool:
    """Whether no_proxy names the host: by name or suffix, with or without a port, or by a network that its address is in."""
    shown = f"[{host}]" if ":" in host else host
    if proxy_bypass_environment(f"{host}:{port}", dict(proxies)) or proxy_bypass_environment(shown, dict(proxies)):
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    for word in proxies.get("no", "").split(","):
        # Pods and services are named by their networks.
        with contextlib.suppress(ValueError):
            if address in ipaddress.ip_network(word.strip().strip("[]"), strict=False):
                return True
    return False


def _is_url(text: str) -> bool:
    try:
        parts = urlsplit(text)
        return bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False


def _certificate_hint(reason: str) -> str:
    if "mismatch" in reason:
        return "ask for it by a name that its certificate holds"
    if "expired" in reason or "not yet valid" in reason:
        return "renew the server's certificate, or set this machine's clock"
    return CERTIFICATE_HINT


def _proxy_authorization(proxy: str) -> dict[str, str]:
    from urllib3.util import make_headers

    parts = urlsplit(proxy)
    if parts.username is None:
        return {}
    made = make_headers(proxy_basic_auth=f"{unquote(parts.username)}:{unquote(parts.password or '')}")
    return {"Proxy-Authorization": made["proxy-authorization"]}
