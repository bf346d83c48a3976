"""The HTTPS listener of a peer, and what it lets in.

One thread, the lobby, does everything that a stranger can make slow: it takes connections, does the TLS handshake and
reads until a request is whole, without ever waiting for one of them. Whole requests go to threads that answer them, and
the connection comes back to the lobby. What a stranger can hold is bounded: seconds, bytes and connections.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import selectors
import socket
import ssl
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable

from mx_cli.base.errors import MxError, NoSpace
from mx_cli.base.threads import begin
from mx_cli.transport import http1
from mx_cli.transport.connection import RECORD, Connection, Gone, Limits
from mx_cli.transport.http1 import Refused, Request, Response
from mx_cli.transport.workers import Workers

Handle = Callable[[Request], Response]

_TLS_HANDSHAKE = 0x16
_EXHAUSTED = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})


_doors: weakref.WeakSet[Door] = weakref.WeakSet()


def _after_fork() -> None:
    for door in list(_doors):
        door.let_go()


os.register_at_fork(after_in_child=_after_fork)


class Door:
    """Serves `handle` on a listening socket. `handle` runs in many threads and may block; an MxError from it is a bug.

    `is_data(request)` says which requests carry bulk data: they have threads of their own, so that they starve no
    others. The certificate's private key is in `context`. `report` is told of bugs in single answers, which end no more
    than their connections; `broken` of one that ends the door itself: nobody is let in any more.
    """

    def __init__(
        self,
        listener: socket.socket,
        context: ssl.SSLContext,
        handle: Handle,
        is_data: Callable[[Request], bool],
        report: Callable[[Exception], None],
        broken: Callable[[BaseException], None],
        limits: Limits | None = None,
    ) -> None:
        self._report, self._broken = report, broken
        self._listener = listener
        self._context = context
        self._handle = handle
        self._is_data = is_data
        self._limits = limits or Limits()
        open_files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        self._most = max(16, min(self._limits.connections, open_files // 2))
        self._control = Workers("mx-control", self._limits.control_threads)
        self._data = Workers("mx-data", self._limits.data_threads)
        self._selector = selectors.DefaultSelector()
        self._woken, self._waker = socket.socketpair()
        self._back: deque[Connection] = deque()
        self._connections: set[Connection] = set()
        self._strangers: dict[Connection, None] = {}
        self._held = 0
        self._accepting = True
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="mx-lobby", daemon=True)
        _doors.add(self)

    @property
    def address(self) -> tuple[str, int]:
        """(host, port) as bound."""
        host, port = self._listener.getsockname()[:2]
        return host, port

    @property
    def connections(self) -> int:
        return len(self._connections)

    def start(self) -> None:
        """Begin to serve. Does not block."""
        self._woken.setblocking(False)
        self._waker.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        self._selector.register(self._woken, selectors.EVENT_READ, self._take_back)
        begin(self._thread)

    def close(self) -> None:
        """Stop listening and break off every connection. Idempotent; waits for the lobby, not for answers under way."""
        self._closing = True
        self._wake()
        if self._thread.ident is not None:
            self._thread.join()
        self._selector.close()
        self._woken.close()
        self._waker.close()
        self._control.close()
        self._data.close()
        self._listener.close()

    def let_go(self) -> None:
        """For a child of this process, which has none of its threads: it must not hold open what nobody answers there."""
        self._closing = True
        self._selector.close()
        for sock in (self._listener, self._woken, self._waker, *(one.sock for one in self._connections)):
            sock.close()

    # --- the lobby's thread

    def _run(self) -> None:
        try:
            self._serve()
        except BaseException as bug:  # noqa: BLE001 - a door that lets nobody in must be missed
            self._broken(bug)
        finally:
            self._closing = True
            self._take_back()
            for connection in list(self._connections):
                self._drop(connection)

    def _serve(self) -> None:
        swept = time.monotonic()
        while not self._closing:
            waits = None if self._accepting and not self._connections else 1.0
            for key, _ in self._selector.select(waits):
                if isinstance(key.fileobj, Connection):
                    self._advance(key.fileobj)
                else:
                    key.data()
            if time.monotonic() - swept >= 1.0:
                swept = time.monotonic()
                self._sweep(swept)

    def _wake(self) -> None:
        # Full means that the lobby is being woken already; closed means that it has ended.
        with contextlib.suppress(OSError):
            self._waker.send(b"\0")

    def _accept(self) -> None:
        for _ in range(64):
            try:
                sock, place = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in _EXHAUSTED and not self._evict():
                    self._selector.unregister(self._listener)
                    self._accepting = False
                    return
                continue
            self._make_room(place[0])
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection = Connection(sock, place[0], time.monotonic() + self._limits.stranger_patience)
            self._connections.add(connection)
            self._strangers[connection] = None
            self._selector.register(connection, selectors.EVENT_READ)

    def _make_room(self, client: str) -> None:
        """The newest gets in: who comes with a request is through in no time, who only waits is let go."""
        if len(self._connections) * 2 >= self._most:
            own = [stranger for stranger in self._strangers if stranger.client == client]
            for stranger in own[: max(0, len(own) - self._limits.strangers_of_an_address + 1)]:
                self._drop(stranger)
        if len(self._connections) >= self._most:
            self._evict()

    def _evict(self) -> bool:
        oldest = next(iter(self._strangers), None)
        if oldest is not None:
            self._drop(oldest)
        return oldest is not None

    def _advance(self, connection: Connection) -> None:
        """Go on with a connection that has something to say, as far as that goes without waiting."""
        if connection not in self._connections:
            return
        try:
            if not isinstance(connection.sock, ssl.SSLSocket):
                self._begin_tls(connection)
            elif not connection.shaken:
                connection.sock.do_handshake()
                connection.shaken = True
                self._selector.modify(connection, selectors.EVENT_READ)
            else:
                self._read(connection)
        except ssl.SSLWantReadError:
            self._selector.modify(connection, selectors.EVENT_READ)
        except ssl.SSLWantWriteError:
            self._selector.modify(connection, selectors.EVENT_WRITE)
        except Refused as refused:
            self._refuse(connection, refused.status)
        except (OSError, ValueError):
            self._drop(connection)

    def _begin_tls(self, connection: Connection) -> None:
        # What costs memory begins when somebody speaks TLS.
        first = connection.sock.recv(1, socket.MSG_PEEK)
        if not first or first[0] != _TLS_HANDSHAKE:
            self._drop(connection)
            return
        # Wrapping may fail and close the socket: what is closed must not be registered.
        self._selector.unregister(connection)
        connection.sock = self._context.wrap_socket(connection.sock, server_side=True, do_handshake_on_connect=False)
        self._selector.register(connection, selectors.EVENT_READ)
        self._advance(connection)

    def _read(self, connection: Connection) -> None:
        data = connection.sock.recv(RECORD)
        if not data:
            self._drop(connection)
            return
        connection.data += data
        self._look(connection)
        while self._held > self._limits.strangers_memory and self._evict():
            pass

    def _look(self, connection: Connection) -> None:
        """Hand a request over if it is whole. Raises Refused."""
        try:
            request = self._whole_request(connection)
        finally:
            self._count(connection, 0 if connection.trusted else len(connection.data))
        if request is None:
            return
        self._selector.unregister(connection)
        self._strangers.pop(connection, None)
        connection.in_lobby = False
        workers = self._data if self._is_data(request) else self._control
        try:
            workers.do(lambda: self._answer(connection, request))
        except NoSpace:
            connection.in_lobby = True
            raise Refused(503) from None

    def _whole_request(self, connection: Connection) -> Request | None:
        data = connection.data
        if connection.request is None:
            end = data.find(http1.END)
            if (end if end >= 0 else len(data)) > http1.HEAD_LIMIT:
                raise Refused(431)
            if end < 0:
                return None
            connection.request = http1.parse_head(bytes(data[:end]))
            del data[: end + len(http1.END)]
        request = connection.request
        if request.length > (self._limits.body if connection.trusted else self._limits.stranger_body):
            raise Refused(413)
        if len(data) < request.length:
            return None
        request.body = bytes(data[: request.length])
        request.client = connection.client
        del data[: request.length]
        connection.request = None
        return request

    def _count(self, connection: Connection, held: int) -> None:
        self._held += held - connection.counted
        connection.counted = held

    def _take_back(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._woken.recv(4096)
        while self._back:
            connection = self._back.popleft()
            connection.in_lobby = True
            if connection.sock.fileno() < 0:
                self._drop(connection)
                continue
            connection.sock.setblocking(False)
            patience = self._limits.idle if connection.trusted else self._limits.stranger_patience
            connection.deadline = time.monotonic() + patience
            if not connection.trusted:
                self._strangers[connection] = None
            self._selector.register(connection, selectors.EVENT_READ)
            try:
                self._look(connection)
            except Refused as refused:
                self._refuse(connection, refused.status)

    def _refuse(self, connection: Connection, status: int) -> None:
        with contextlib.suppress(OSError, ValueError):
            connection.sock.send(Response(status).head(keep=False))
        self._drop(connection)

    def _drop(self, connection: Connection) -> None:
        """Close a connection; one that is being answered is only broken off, and comes back."""
        if not connection.in_lobby:
            connection.break_off()
            return
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(connection)
        self._strangers.pop(connection, None)
        self._connections.discard(connection)
        self._count(connection, 0)
        connection.sock.close()

    def _sweep(self, now: float) -> None:
        for connection in list(self._connections):
            since = connection.sending_since
            if connection.in_lobby and now > connection.deadline:
                self._drop(connection)
            elif since is not None and now - since > self._limits.unsent:
                connection.break_off()
        if not self._accepting:
            self._accepting = True
            self._selector.register(self._listener, selectors.EVENT_READ, self._accept)

    # --- the threads that answer

    def _answer(self, connection: Connection, request: Request) -> None:
        stays = False
        try:
            response = self._handle(request)
            connection.answer(request, response)
            connection.trusted |= response.trusted
            stays = request.keep
        except (Gone, MxError):
            # An answer that broke off is told from a whole one by its length.
            pass
        except Exception as bug:  # noqa: BLE001 - what is wrong with one answer must not end the thread that gives others
            self._report(bug)
        finally:
            connection.sending_since = None
            if not stays or self._closing:
                connection.sock.close()
            self._back.append(connection)
            self._wake()
