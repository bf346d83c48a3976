"""A connection from a reader to a peer: one request at a time, and the body of its answer into the caller's memory."""

from __future__ import annotations

import contextlib
import hashlib
import socket
import ssl
import threading
from collections.abc import Callable, Iterator, Mapping

from mx_cli.base.address import split_address
from mx_cli.base.errors import AccessDenied, TransportFailed, Unreachable
from mx_cli.base.oserrors import reason
from mx_cli.base.threads import begin
from mx_cli.base.tls_stream import TlsStream
from mx_cli.transport import http1

_SMALL = 64 << 10


class Channel:
    """TLS to one peer. `close` may come from another thread, and wakes whoever reads. All else is for one thread."""

    def __init__(self, stream: TlsStream, place: str) -> None:
        self.place = place
        self.asked = False
        self._stream = stream
        self._rest = b""
        self._left = 0
        self._keep = True
        self.closed = False
        self.certificate = hashlib.sha256(stream.certificate).digest()

    @classmethod
    def dial(cls, place: str, context: ssl.SSLContext, connect_timeout: float) -> Channel:
        """Connect to HOST:PORT. Blocks for at most `connect_timeout` seconds a step.

        Raises Unreachable (NotThere), and AccessDenied for a certificate that the context does not trust.
        """
        host, port = split_address(place)
        try:
            plain = socket.create_connection((host, port), connect_timeout)
        except OSError as error:
            if isinstance(error, ConnectionRefusedError):
                raise NotThere(f"{place}: {reason(error)}") from None
            raise Unreachable(f"{place}: cannot connect: {reason(error)}") from None
        try:
            plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with _within(plain, connect_timeout, place):
                stream = TlsStream(plain, context, host)
        except Silent:
            plain.close()
            raise
        except ssl.SSLCertVerificationError as error:
            plain.close()
            raise AccessDenied(f"{place}: certificate verify failed: {error.verify_message}") from None
        except (ssl.SSLEOFError, ConnectionError):
            plain.close()
            raise Unreachable(f"{place}: it hung up during the TLS handshake") from None
        except (OSError, ValueError) as error:
            plain.close()
            raise Unreachable(f"{place}: TLS failed: {reason(error)}") from None
        return cls(stream, place)

    def within(self, seconds: float) -> contextlib.AbstractContextManager[None]:
        """A block with a time limit: after so many seconds the connection is shut down, and what is read raises Silent."""
        return _within(self._stream.sock, seconds, self.place)

    def set_patience(self, seconds: float) -> None:
        """How long to wait for a byte, from now on."""
        self._stream.sock.settimeout(seconds)

    @property
    def reusable(self) -> bool:
        """Whether another request may follow: the last answer was read to its end."""
        return self._keep and self._left == 0 and not self.closed

    @property
    def left(self) -> int:
        """Bytes of the answer's body that were not read yet."""
        return self._left

    def ask(self, method: str, target: str, headers: Mapping[str, str], body: bytes | None = None) -> int:
        """Send a request; the status of its answer. Raises Unreachable (Silent)."""
        lines = [f"{method} {target} HTTP/1.1", f"Host: {self.place}"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        if body is not None:
            lines += ["Content-Type: application/json", f"Content-Length: {len(body)}"]
        self._keep = False
        self.asked = True
        try:
            self._stream.sendall(("\r\n".join(lines) + "\r\n\r\n").encode("latin-1") + (body or b""))
            status, answered = self._read_head()
        except (OSError, ValueError) as error:
            raise self._explain(error) from None
        self._keep = answered.get("connection", "").lower() != "close"
        return status

    def _read_head(self) -> tuple[int, dict[str, str]]:
        buffer = memoryview(bytearray(_SMALL))
        while (end := self._rest.find(http1.END)) < 0:
            if len(self._rest) > http1.HEAD_LIMIT:
                raise ValueError("the answer's head does not end")
            count = _cut_is_end(self._stream.recv_into, buffer)
            if not count:
                raise ConnectionResetError("closed before an answer")
            self._rest += buffer[:count]
        first, *lines = self._rest[:end].decode("latin-1").split("\r\n")
        self._rest = self._rest[end + len(http1.END) :]
        version, _, rest = first.partition(" ")
        if version != "HTTP/1.1" or not rest[:3].isdecimal():
            raise ValueError("the answer is not HTTP/1.1")
        pairs = (line.partition(":") for line in lines)
        headers = {name.lower(): value.strip() for name, _, value in pairs}
        length = headers.get("content-length", "")
        if not (length.isascii() and length.isdecimal() and len(length) < 20):
            raise ValueError("the answer has no length")
        self._left = int(length)
        return int(rest[:3]), headers

    def read_into(self, view: memoryview) -> int:
        """Fill the view, or as much as is left of the body; 0 = its end. Raises Unreachable when it breaks off."""
        view = view[: min(len(view), self._left)]
        if not view:
            return 0
        if self._rest:
            count = min(len(self._rest), len(view))
            view[:count] = self._rest[:count]
            self._rest = self._rest[count:]
        else:
            count = self._receive(view)
        self._left -= count
        return count

    def _receive(self, view: memoryview) -> int:
        done = 0
        try:
            while done < len(view):
                count = _cut_is_end(self._stream.fill, view[done:])
                if count == 0 or self.closed:
                    raise ConnectionResetError(f"the answer broke off, {self._left - done} bytes are missing")
                done += count
        except (OSError, ValueError) as error:
            raise self._explain(error) from None
        return done

    def _explain(self, error: Exception) -> Unreachable:
        kind = Silent if isinstance(error, TimeoutError) else Unreachable
        return kind(f"{self.place}: {reason(error)}")

    def body(self, limit: int) -> bytes:
        """The whole body. Raises TransportFailed when it is larger than `limit` bytes, Unreachable when it breaks off."""
        if self._left > limit:
            raise TransportFailed(f"{self.place}: an answer of {self._left} bytes, expected at most {limit}")
        data = bytearray()
        while self._left:
            part = memoryview(bytearray(min(self._left, 1 << 20)))
            data += part[: self.read_into(part)]
        return bytes(data)

    def close(self) -> None:
        """Idempotent."""
        self.closed = True
        with contextlib.suppress(OSError):
            self._stream.shutdown()

    def free(self) -> None:
        """Close and give the descriptor back; only when no other thread reads. Idempotent."""
        self.close()
        self._stream.close()


@contextlib.contextmanager
def _within(sock: socket.socket, seconds: float, place: str) -> Iterator[None]:
    late = threading.Event()

    def cut() -> None:
        late.set()
        with contextlib.suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)

    # Each byte that drips in would begin a time-out of the socket anew.
    timer = threading.Timer(seconds, cut)
    timer.daemon = True
    begin(timer)
    try:
        yield
    except (OSError, ValueError, Unreachable):
        if late.is_set():
            raise Silent(f"{place}: no answer within {seconds:g} s") from None
        raise
    finally:
        timer.cancel()


def _cut_is_end(receive: Callable[[memoryview], int], view: memoryview) -> int:
    """Every answer has a length, which shows that it was cut: the end needs no goodbye."""
    try:
        return receive(view)
    except ssl.SSLEOFError:
        return 0


class NotThere(Unreachable):
    """Nobody listens there."""


class Silent(Unreachable):
    """No byte came within the time that was set."""
