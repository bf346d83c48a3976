"""An S3 of files, for measuring readers: `python -m scripts.benchmarks.plain_s3 ROOT LATENCY_MS` prints its port.

GET with and without Range by sendfile(2), HEAD, ListObjectsV2; buckets are directories of ROOT. Checks no signature.
LATENCY_MS passes before the first byte of each object's answer, as in an object store.
"""

from __future__ import annotations

import contextlib
import os
import re
import socketserver
import subprocess
import sys
import time
import urllib.parse
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from xml.sax.saxutils import escape

ROOT = Path(__file__).parents[2]


@contextlib.contextmanager
def plain_s3(root: Path, latency: float = 0.0) -> Iterator[str]:
    """The endpoint, until the block ends. `latency` in seconds."""
    command = [sys.executable, "-m", "scripts.benchmarks.plain_s3", str(root), str(latency * 1000)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield f"http://127.0.0.1:{int(process.stdout.readline())}"
        finally:
            process.terminate()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    root = Path()
    latency = 0.0

    def log_message(self, format: str, *args: object) -> None:
        """Nothing."""

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        parts = urllib.parse.urlsplit(self.path)
        bucket, _, key = urllib.parse.unquote(parts.path).lstrip("/").partition("/")
        path = self.root / bucket / key
        if not key:
            self._list(bucket, dict(urllib.parse.parse_qsl(parts.query)).get("prefix", ""))
        elif not path.is_file():
            self._answer(404, b"<Error><Code>NoSuchKey</Code></Error>")
        else:
            self._send(path)

    def _list(self, bucket: str, prefix: str) -> None:
        base = self.root / bucket
        rows = [
            (str(path.relative_to(base)), path.stat().st_size) for path in sorted(base.rglob("*")) if path.is_file()
        ]
        found = "".join(
            f"<Contents><Key>{escape(key)}</Key><LastModified>2026-01-01T00:00:00.000Z</LastModified>"
            f"<ETag>&quot;{size:x}&quot;</ETag><Size>{size}</Size></Contents>"
            for key, size in rows
            if key.startswith(prefix)
        )
        head = f"<Name>{bucket}</Name><Prefix>{escape(prefix)}</Prefix><IsTruncated>false</IsTruncated>"
        self._answer(200, f"<ListBucketResult>{head}{found}</ListBucketResult>".encode())

    def _answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/xml")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _send(self, path: Path) -> None:
        size = path.stat().st_size
        wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        start, end = (int(wanted[1]), min(int(wanted[2] or size), size - 1) + 1) if wanted else (0, size)
        time.sleep(self.latency)
        self.send_response(206 if wanted else 200)
        self.send_header("Content-Length", str(end - start))
        self.send_header("ETag", f'"{size:x}"')
        self.send_header("Last-Modified", "Thu, 01 Jan 2026 00:00:00 GMT")
        if wanted:
            self.send_header("Content-Range", f"bytes {start}-{end - 1}/{size}")
        self.end_headers()
        self.wfile.flush()
        if self.command == "HEAD":
            return
        with open(path, "rb") as file:
            while start < end:
                start += os.sendfile(self.connection.fileno(), file.fileno(), start, end - start)


class Server(socketserver.ThreadingMixIn, socketserver.TCPServer):
    daemon_threads = True
    request_queue_size = 256

    def handle_error(self, request: object, client_address: object) -> None:
        """A reader that goes away is no news."""


if __name__ == "__main__":
    Handler.root, Handler.latency = Path(sys.argv[1]), float(sys.argv[2]) / 1000
    with Server(("127.0.0.1", 0), Handler) as server:
        print(server.server_address[1], flush=True)
        server.serve_forever()
