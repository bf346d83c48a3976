"""An HTTP server inside the test, which says exactly what the test wants: for answers that faultd does not give."""

from __future__ import annotations

import contextlib
import hashlib
import ssl
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from tests.rig.servers import Tls

Headers = dict[str, str]


@dataclass
class Asked:
    """One request, and what to answer it with."""

    method: str
    path: str
    headers: Any
    handler: BaseHTTPRequestHandler
    number: int
    body: bytes = b""

    def span(self, size: int) -> tuple[int, int] | None:
        """(first, end) of `Range: bytes=a-b`, None without one."""
        text = self.headers.get("Range")
        if not text:
            return None
        first, _, last = text.removeprefix("bytes=").partition("-")
        return int(first), min(size, int(last) + 1) if last else size

    def say(self, status: int, body: bytes = b"", headers: Headers | None = None) -> None:
        """An answer with a length; no body to HEAD."""
        self.handler.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.handler.send_header(name, value)
        self.handler.end_headers()
        if self.method != "HEAD":
            self.handler.wfile.write(body)

    def serve(self, body: bytes, headers: Headers | None = None) -> None:
        """The file as a good server gives it: HEAD, ranges, a strong ETag."""
        out = {"ETag": f'"{hashlib.md5(body).hexdigest()}"', "Content-Type": "application/octet-stream"}
        out |= headers or {}
        span = self.span(len(body))
        if self.method == "GET" and span and body:
            out["Content-Range"] = f"bytes {span[0]}-{span[1] - 1}/{len(body)}"
            self.say(206, body[slice(*span)], out)
        else:
            self.say(200, body, out | {"Content-Length": str(len(body))})

    def hang_up(self) -> None:
        """End the connection after this answer without having said so."""
        self.handler.close_connection = True


@dataclass
class Scripted:
    """`url` of the server, and the requests so far as "METHOD path" with their headers."""

    url: str
    asked: list[Asked] = field(default_factory=list)

    def lines(self, method: str = "") -> list[str]:
        return [f"{entry.method} {entry.path}" for entry in self.asked if entry.method.startswith(method)]


@contextlib.contextmanager
def scripted(answer: Callable[[Asked], None], tls: Tls | None = None) -> Iterator[Scripted]:
    """Runs `answer(asked)` for each request until the block ends; over TLS with a certificate."""
    lock = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        timeout = 60

        def log_message(self, *args: object) -> None:
            pass

        def do_GET(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            with lock:
                asked = Asked(self.command, self.path, self.headers, self, len(server.asked) + 1, body)
                server.asked.append(asked)
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                answer(asked)

        do_HEAD = do_POST = do_GET

    httpd = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    httpd.daemon_threads = True
    if tls:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(tls.cert, tls.key)
        httpd.socket = context.wrap_socket(httpd.socket, server_side=True, do_handshake_on_connect=False)
    server = Scripted(f"{'https' if tls else 'http'}://127.0.0.1:{httpd.server_address[1]}")
    thread = threading.Thread(target=httpd.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        httpd.shutdown()
        httpd.server_close()
        thread.join()


def published(cache: Path) -> dict[str, str]:
    """{path inside its snapshot: SHA-256} of every file that has its final name, in all models of a cache."""
    found = {}
    for snapshot in cache.glob("models/*/snapshots/*"):
        for path in snapshot.rglob("*"):
            if path.is_file():
                found[str(path.relative_to(snapshot))] = hashlib.sha256(path.read_bytes()).hexdigest()
    return found


def manifests(cache: Path) -> list[Path]:
    """What vouches for a complete selection."""
    return sorted(cache.glob("models/*/manifests/*/*.json"))
