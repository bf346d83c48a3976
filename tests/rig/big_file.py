"""An HTTP server of one large safetensors file that is nowhere: its tensors are U8 of `size` bytes, all of one value each.

It counts what it has sent, also of answers that have not ended.
"""

from __future__ import annotations

import contextlib
import json
import re
import struct
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

CHUNK = 256 << 10


class BigFile(ThreadingHTTPServer):
    """`sent` bytes; `ahead` is the most that was ever sent beyond `consumed`, which a test sets."""

    daemon_threads = True

    def __init__(self, count: int, size: int) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.count, self.size = count, size
        table = {
            name_of(i): {"dtype": "U8", "shape": [size], "data_offsets": [i * size, (i + 1) * size]}
            for i in range(count)
        }
        header = json.dumps(table).encode()
        self.head = struct.pack("<Q", len(header)) + header
        self.length = len(self.head) + count * size
        self.sent = self.consumed = self.ahead = self.open = 0
        self.lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/model.safetensors"

    def bytes(self, start: int, end: int) -> bytes:
        found = self.head[start:end]
        at = start + len(found)
        while at < end:
            index = (at - len(self.head)) // self.size
            stop = min(end, len(self.head) + (index + 1) * self.size)
            found += bytes([index % 256]) * (stop - at)
            at = stop
        return found

    def handle_error(self, request: object, client_address: object) -> None:
        """A reader that goes away is no news."""


def name_of(index: int) -> str:
    return f"layer.{index:04}"


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: BigFile

    def log_message(self, format: str, *args: object) -> None:
        """Nothing."""

    def setup(self) -> None:
        super().setup()
        with self.server.lock:
            self.server.open += 1

    def finish(self) -> None:
        with self.server.lock:
            self.server.open -= 1
        with contextlib.suppress(OSError):
            super().finish()

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        server = self.server
        wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        start, end = (
            (int(wanted[1]), min(int(wanted[2] or server.length), server.length - 1) + 1)
            if wanted
            else (0, server.length)
        )
        self.send_response(206 if wanted else 200)
        self.send_header("Content-Length", str(end - start))
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("ETag", '"big"')
        if wanted:
            self.send_header("Content-Range", f"bytes {start}-{end - 1}/{server.length}")
        self.end_headers()
        while start < end and self.command == "GET":
            stop = min(end, start + CHUNK)
            self.wfile.write(server.bytes(start, stop))
            with server.lock:
                server.sent += stop - start
                server.ahead = max(server.ahead, server.sent - server.consumed)
            start = stop


@contextlib.contextmanager
def big_file(count: int, size: int) -> Iterator[BigFile]:
    server = BigFile(count, size)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)
