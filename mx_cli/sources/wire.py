"""HTTP/1.1 on a socket: one request, one answer, the body straight into the caller's buffer.

The bytes pass no other Python layer. Only what mx needs:
GET and HEAD, identity encoding, Content-Length, chunked and close-delimited bodies (RFC 9112).
"""

from __future__ import annotations

import contextlib
import errno
import re
import socket
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass

from mx_cli.base.errors import Unreachable, UsageError
from mx_cli.base.oserrors import reason
from mx_cli.base.tls_stream import TlsStream

HEAD_LIMIT = 64 << 10
_CHUNK_LINE_LIMIT = 4096
_CHUNK_SIZE = re.compile(rb"[0-9A-Fa-f]{1,16}")
# Old servers leave the carriage return out, and RFC 9112 (2.2) has their answers read.
_HEAD_END = re.compile(rb"\r?\n\r?\n")
_CARRIED = re.compile(r"[\t\x20-\x7e\x80-\xff]*")
_TICK = 2.0


def number(text: str) -> int | None:
    """A whole number as a server writes it; None for anything else, and for one without end."""
    return int(text) if text.isascii() and text.isdigit() and len(text) < 40 else None


@dataclass(slots=True)
class Head:
    """Status and headers of an answer; names in lower case, repeated ones joined by a comma."""

    status: int
    headers: dict[str, str]
    keep: bool
    rest: bytes = b""

    def get(self, name: str) -> str:
        return self.headers.get(name, "")

    @property
    def length(self) -> int | None:
        """Bytes of the body as the server says, None when it does not."""
        # The same length twice is one length (RFC 9112, 6.3).
        text = self.get("content-length").partition(",")[0]
        return None if "chunked" in self.get("transfer-encoding").lower() else number(text)


class Wire:
    """A connection to one server. One request at a time; `close` may come from another thread.

    `address` is the server's (scheme, host, port), `name` what it is called in sentences.
    """

    def __init__(
        self,
        sock: socket.socket | TlsStream,
        name: str,
        idle_limit: float,
        address: tuple[str, str, int] = ("", "", 0),
    ) -> None:
        self.sock = sock
        self.address = address
        self.name = name
        self.used = False
        self.idle_limit = idle_limit
        self._closed = False
        # Bytes that come one by one are seen to come before anybody takes them for none.
        tick = min(_TICK, idle_limit / 4)
        plain = sock.sock if isinstance(sock, TlsStream) else sock
        plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # A blocking socket with a kernel time-out: no poll(2) before each recv(2), and MSG_WAITALL works.
        plain.settimeout(None)
        plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", int(tick), int(tick % 1 * 1e6)))
        plain.setsockopt(
            socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", int(idle_limit), int(idle_limit % 1 * 1e6))
        )

    def receive(self, receive: Callable[[], int]) -> int:
        """One `receive()`, again while nothing comes, until `idle_limit` has passed. Raises OSError."""
        since = time.monotonic()
        while True:
            try:
                return receive()
            except (BlockingIOError, TimeoutError) as error:
                if self._closed:
                    raise ConnectionAbortedError("given up") from None
                if error.errno == errno.ETIMEDOUT:
                    raise
                if time.monotonic() - since >= self.idle_limit:
                    raise TimeoutError(f"stalled: no byte for {self.idle_limit:g} s") from None

    def ask(self, method: str, target: str, headers: dict[str, str]) -> Head:
        """Send a request without a body and read the answer's head. Raises Unreachable; blocks as the socket does.

        UsageError for a header that would not arrive as the one that it is.
        """
        for name, value in headers.items():
            if not _CARRIED.fullmatch(value):
                raise UsageError(f"{self.name}: the header {name} would hold characters that no header can carry")
        lines = [f"{method} {target} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items())]
        try:
            self.sock.sendall(("\r\n".join(lines) + "\r\n\r\n").encode("latin-1"))
            # A head that comes byte by byte is never silent, and would never be whole.
            until = time.monotonic() + 2 * self.idle_limit
            head = self._read_head(until)
            while head.status in (100, 102, 103):
                head = self._read_head(until, head.rest)
        except (OSError, ValueError) as error:
            raise Unreachable(f"{self.name}: {reason(error)}") from None
        self.used = True
        return head

    def _read_head(self, until: float, data: bytes = b"") -> Head:
        while not (end := _HEAD_END.search(data)):
            if len(data) > HEAD_LIMIT:
                raise ValueError("the answer's head does not end")
            if time.monotonic() > until:
                raise TimeoutError(f"stalled: no whole head of an answer in {2 * self.idle_limit:g} s")
            more = self.some()
            if not more:
                raise ConnectionResetError("closed before an answer" if not data else "closed inside the answer's head")
            data += more
        lines = data[: end.start()].decode("latin-1").replace("\r\n", "\n").split("\n")
        version, _, rest = lines[0].partition(" ")
        if not version.startswith("HTTP/1.") or not rest[:3].isdigit():
            raise ValueError("the answer is not HTTP")
        headers: dict[str, str] = {}
        for line in lines[1:]:
            name, _, value = line.partition(":")
            name = name.lower()
            value = value.strip()
            headers[name] = f"{headers[name]}, {value}" if name in headers else value
        lengths = {number(length.strip()) for length in headers.get("content-length", "0").split(",")}
        if len(lengths) > 1 or None in lengths:
            raise ValueError("the answer's length makes no sense")
        connection = headers.get("connection", "").lower()
        keep = "close" not in connection and (version != "HTTP/1.0" or "keep-alive" in connection)
        return Head(int(rest[:3]), headers, keep, data[end.end() :])

    def some(self) -> bytes:
        """At least one byte, or none at the end. Raises OSError."""
        buffer = memoryview(bytearray(HEAD_LIMIT))
        return bytes(buffer[: self.receive(lambda: self.sock.recv_into(buffer))])

    @property
    def given_up(self) -> bool:
        """Whether this side ended the connection: then an end of the body means nothing."""
        return self._closed

    def shutdown(self) -> None:
        """Wake whoever is blocked on the socket. Any thread, more than once."""
        self._closed = True
        with contextlib.suppress(OSError):
            if isinstance(self.sock, TlsStream):
                self.sock.shutdown()
            else:
                self.sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.shutdown()
        with contextlib.suppress(OSError):
            self.sock.close()


@dataclass(slots=True)
class Body:
    """The body of one answer as a stream. `left` is None while its length is not known."""

    wire: Wire
    left: int | None
    chunked: bool = False
    rest: bytes = b""
    clean: bool = False
    _chunk: int = 0

    def read_into(self, view: memoryview) -> int:
        """Fill `view` as far as one wait allows; 0 = the end. Raises Unreachable when the body breaks off."""
        try:
            if self.chunked:
                return self._read_chunked(view)
            if self.left is None:
                count = self._take(view)
                if count == 0 and self.wire.given_up:
                    raise ConnectionAbortedError("given up")
                return count
            if self.left == 0:
                self.clean = True
                return 0
            count = self._take(view[: min(len(view), self.left)])
            if count == 0:
                raise ConnectionResetError(f"the body broke off, {self.left} bytes are missing")
            self.left -= count
            self.clean = self.left == 0
            return count
        except (OSError, ValueError) as error:
            raise Unreachable(f"{self.wire.name}: {reason(error)}") from None

    def _take(self, view: memoryview) -> int:
        if self.rest:
            count = min(len(self.rest), len(view))
            view[:count] = self.rest[:count]
            self.rest = self.rest[count:]
            return count
        sock = self.wire.sock
        if isinstance(sock, TlsStream):
            return self.wire.receive(lambda: sock.fill(view))
        return self.wire.receive(lambda: sock.recv_into(view, len(view), socket.MSG_WAITALL))

    def _read_chunked(self, view: memoryview) -> int:
        if self.clean:
            return 0
        if self._chunk == 0:
            size = self._line().partition(b";")[0].strip()
            if not _CHUNK_SIZE.fullmatch(size):
                raise ValueError("a chunk has no size")
            self._chunk = int(size, 16)
            if self._chunk == 0:
                while self._line():
                    pass
                self.clean = True
                return 0
        count = self._take_some(view[: min(len(view), self._chunk)])
        self._chunk -= count
        if self._chunk == 0 and self._line():
            raise ValueError("a chunk is longer than it said")
        return count

    def _take_some(self, view: memoryview) -> int:
        count = self._take(view) if self.rest else self.wire.receive(lambda: self.wire.sock.recv_into(view))
        if count == 0:
            raise ConnectionResetError("the body broke off inside a chunk")
        return count

    def _line(self) -> bytes:
        while (end := self.rest.find(b"\r\n")) < 0:
            if len(self.rest) > _CHUNK_LINE_LIMIT:
                raise ValueError("a chunk's size line does not end")
            more = self.wire.some()
            if not more:
                raise ConnectionResetError("the body broke off between chunks")
            self.rest += more
        line, self.rest = self.rest[:end], self.rest[end + 2 :]
        return line
