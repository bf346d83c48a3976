"""A reader's connection, as the door of a peer has it, and what it may cost."""

from __future__ import annotations

import contextlib
import socket
import time
from dataclasses import dataclass, field

from mx_cli.transport.http1 import Request, Response

RECORD = 16 << 10
_SEND = 1 << 20


@dataclass(frozen=True, slots=True)
class Limits:
    """Seconds, bytes and counts. A stranger is a connection over which nobody has proved to know a secret."""

    stranger_patience: float = 5.0
    stranger_body: int = 64 << 10
    strangers_memory: int = 16 << 20
    strangers_of_an_address: int = 64
    idle: float = 120.0
    body: int = 4 << 20
    unsent: float = 60.0
    connections: int = 2000
    control_threads: int = 8
    data_threads: int = 64


@dataclass(slots=True, eq=False)
class Connection:
    """`in_lobby`: no thread answers a request of it now. `sending_since`: since when it has been taking a piece of an answer."""

    sock: socket.socket
    client: str
    deadline: float
    trusted: bool = False
    shaken: bool = False
    data: bytearray = field(default_factory=bytearray)
    counted: int = 0
    request: Request | None = None
    in_lobby: bool = True
    sending_since: float | None = None

    def fileno(self) -> int:
        return self.sock.fileno()

    def answer(self, request: Request, response: Response) -> None:
        """Send it. Blocks while the other side takes it, when that is trusted; raises Gone when it does not any more."""
        # A stranger's answer is small and fits in the kernel's buffer, or the stranger does not read.
        self.sock.setblocking(response.trusted)
        head = response.head(request.keep)
        if request.method == "HEAD":
            self._send(head)
        elif response.stream is None:
            self._send(head + response.body)
        else:
            self._send(head)
            for view in response.stream:
                for at in range(0, len(view), _SEND):
                    self._send(view[at : at + _SEND])

    def _send(self, data: bytes | memoryview) -> None:
        self.sending_since = time.monotonic()
        try:
            self.sock.sendall(data)
        except (OSError, ValueError) as error:
            raise Gone from error

    def break_off(self) -> None:
        """End it under a thread that uses it. SSLSocket's own shutdown would make it a plain one."""
        with contextlib.suppress(OSError):
            socket.socket.shutdown(self.sock, socket.SHUT_RDWR)


class Gone(Exception):
    """The other side does not take the answer any more."""
