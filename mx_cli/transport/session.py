"""A reader's session with a peer: the handshake, what the peer holds, a grant that is kept alive, and bytes over TLS."""

from __future__ import annotations

import contextlib
import json
import secrets as random
import ssl
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

from mx_cli.base.errors import (
    AccessDenied,
    Incompatible,
    MxError,
    NotFound,
    TransportFailed,
    Unreachable,
    UsageError,
)
from mx_cli.base.threads import begin
from mx_cli.model.holding import Holding
from mx_cli.transport import secret
from mx_cli.transport.answers import (
    SECRET_HINT,
    bytes_of,
    count_of,
    explain,
    parse_json,
    read_answer,
    seconds_of,
    text_of,
    texts_of,
    unzip,
)
from mx_cli.transport.channel import Channel, NotThere, Silent
from mx_cli.transport.protocol import FILES, GRANT_HEADER, GRANTS, HELLO, MANIFEST, NONCE, POLL, PROTO, SESSION, SOURCE

_STRANGER_LIMIT = 64 << 10
_LONGEST_GENERATION = 200
_ANSWER_LIMIT = 64 << 20
_HOLDING_LIMIT = 256 << 20
_FAREWELL = 5.0
_BEATS = 6
QUEUED = 202


@dataclass(frozen=True, slots=True)
class Queued:
    """No slot is free: ask again after `retry_after` seconds, or one of the `better` peers (HOST:PORT)."""

    position: int
    better: tuple[str, ...]
    retry_after: float


def dial(
    place: str,
    known: list[bytes],
    connect_timeout: float = 10.0,
    stall_timeout: float = 15.0,
    ca: Path | None = None,
) -> Session:
    """Connect to a peer at HOST:PORT and prove to each other that both know the first of the `known` secrets.

    Raises AccessDenied (another secret, a relay, a certificate that `ca` does not vouch for), Incompatible (no common
    wire version), Unreachable (nobody there, too busy) and TransportFailed (not a peer). Blocks for at most
    `connect_timeout` seconds a step.
    """
    context = secret.client_context(ca)
    channel = Channel.dial(place, context, connect_timeout)
    try:
        with channel.within(2 * connect_timeout):
            generation, token = _shake_hands(channel, place, known[0])
    except NotFound:
        channel.free()
        raise TransportFailed(f"{place}: not a peer (something else answers there)") from None
    except BaseException:
        channel.free()
        raise
    return Session(place, context, channel, generation, token, connect_timeout, stall_timeout)


def _shake_hands(channel: Channel, place: str, offered: bytes) -> tuple[str, str]:
    nonce = random.token_bytes(NONCE)
    hello = _call(channel, "POST", HELLO, {"proto": list(PROTO), "nonce": nonce.hex()})
    generation, server_nonce = text_of(hello, "generation", place), bytes_of(hello, "nonce", place)
    if not generation.isprintable() or len(generation) > _LONGEST_GENERATION:
        raise TransportFailed(f"{place}: not a peer (its generation is no name)")
    fields = (channel.certificate, nonce, server_nonce, generation)
    own = secret.proof(offered, secret.CLIENT, *fields)
    body = {"proto": PROTO[1], "nonce": nonce.hex(), "server_nonce": server_nonce.hex(), "proof": own.hex()}
    session = _call(channel, "POST", SESSION, body)
    if not secret.equal(bytes_of(session, "proof", place), secret.proof(offered, secret.SERVER, *fields)):
        raise AccessDenied(
            f"{place} does not prove that it knows the secret (is it relayed, with another certificate?)",
            hint=SECRET_HINT,
        )
    return generation, text_of(session, "token", place)


def _call(channel: Channel, method: str, target: str, body: Mapping[str, Any]) -> dict[str, Any]:
    status = channel.ask(method, target, {}, json.dumps(body).encode())
    return read_answer(channel, status, _STRANGER_LIMIT)


class Session:
    """Trust between this process and one life of a peer. Thread-safe. Connections are kept and reused."""

    def __init__(
        self,
        place: str,
        context: ssl.SSLContext,
        channel: Channel,
        generation: str,
        token: str,
        connect_timeout: float,
        stall_timeout: float,
    ) -> None:
        self.address = place
        self.generation = generation
        self._context = context
        self._certificate = channel.certificate
        self._token = token
        self._connect_timeout = connect_timeout
        self._stall_timeout = stall_timeout
        self._lock = threading.Lock()
        self._idle = [channel]
        self._busy: set[Channel] = set()
        self._ticket = ""
        self._closed = False

    def source(self) -> dict[str, Any]:
        """What the peer says of itself now. Blocks; raises MxError."""
        facts = self.call("GET", SOURCE)
        texts_of(facts, "identities", self.address)
        for name in ("readers", "slots", "queue", "version"):
            count_of(facts, name, 0, self.address)
        return facts

    def holding(self) -> Holding:
        """What the peer holds. Blocks. Raises IntegrityError when it makes no sense, Incompatible when it is of a newer mx,
        TransportFailed when it is too large."""
        channel, status = self._ask("GET", MANIFEST, {"Accept-Encoding": "gzip"})
        try:
            data = channel.body(_HOLDING_LIMIT)
        finally:
            self.give_back(channel)
        if status >= 300:
            raise explain(status, data, self.address)
        try:
            return Holding.from_json(parse_json(unzip(data, self.address, _HOLDING_LIMIT), self.address), self.address)
        except UsageError as error:
            # Of a newer mx, for instance: the peer's doing, and no fault of the command.
            raise Incompatible(f"{self.address}: {error.what}") from None

    def grant(self, reader: Mapping[str, Any]) -> Grant | Queued:
        """Ask for a slot, telling about this `reader` (host, pid, boot id, address if it serves). Blocks, but not for a slot.

        Ask again after `Queued.retry_after`: the place in the queue is kept for some seconds. Raises Unreachable when
        the peer gives no grants now.
        """
        answer = self.call("POST", GRANTS, {"proto": PROTO[1], "reader": dict(reader), "ticket": self._ticket})
        if answer["status"] == QUEUED:
            self._ticket = text_of(answer, "ticket", self.address)
            position, better = count_of(answer, "position", 0, self.address), texts_of(answer, "better", self.address)
            return Queued(position, better, seconds_of(answer, "retry_after", POLL, self.address))
        self._ticket = ""
        return Grant(self, answer)

    def open(self, file: str, offset: int, length: int, grant: Grant) -> FileStream:
        """Bytes of a file over a connection of their own (path socket). Blocks until the peer answers; raises MxError."""
        target = FILES + quote(file, errors="surrogateescape") + "?" + urlencode({"offset": offset, "length": length})
        channel, status = self._ask("GET", target, {GRANT_HEADER: grant.id})
        if status == 200 and channel.left == length:
            return FileStream(self, channel)
        try:
            said = channel.body(_STRANGER_LIMIT) if status != 200 else b""
        finally:
            self.give_back(channel)
        raise explain(status, said, self.address)

    def call(
        self, method: str, target: str, body: Mapping[str, Any] | None = None, patience: float | None = None
    ) -> dict[str, Any]:
        """One request of the control channel; the answer's object, and its `status`. Blocks; raises MxError.

        `patience`: seconds without a byte that are too many, if not the session's own.
        """
        data = None if body is None else json.dumps(body).encode()
        channel, status = self._ask(method, target, {}, data, patience)
        try:
            return read_answer(channel, status, _ANSWER_LIMIT)
        finally:
            self.give_back(channel)

    def _ask(
        self,
        method: str,
        target: str,
        headers: Mapping[str, str],
        body: bytes | None = None,
        patience: float | None = None,
    ) -> tuple[Channel, int]:
        """Send a request over an idle connection or a new one; the connection and the status."""
        while True:
            channel = self._take()
            was_idle = channel.asked
            channel.set_patience(patience or self._stall_timeout)
            try:
                return channel, channel.ask(method, target, {**headers, "Authorization": f"Bearer {self._token}"}, body)
            except Unreachable as error:
                interrupted = channel.closed
                self.give_back(channel)
                # The peer may have closed what was idle for long; who is silent would be so again.
                if not was_idle or interrupted or isinstance(error, Silent):
                    raise
            except BaseException:
                self.give_back(channel)
                raise

    def _take(self) -> Channel:
        with self._lock:
            if self._closed:
                raise TransportFailed(f"{self.address}: the session is closed")
            if self._idle:
                channel = self._idle.pop()
                self._busy.add(channel)
                return channel
        channel = Channel.dial(self.address, self._context, self._connect_timeout)
        # Before the token is shown: who took over the address is not who proved to know the secret.
        if channel.certificate != self._certificate:
            channel.free()
            raise TransportFailed(f"{self.address}: another process answers there now (the peer was restarted)")
        self._busy.add(channel)
        return channel

    def give_back(self, channel: Channel) -> None:
        """Keep the connection for another request if its answer was read to the end, else close it."""
        with self._lock:
            self._busy.discard(channel)
            if channel.reusable and not self._closed:
                self._idle.append(channel)
                return
        channel.free()

    def interrupt(self) -> None:
        """Break off the requests and streams under way: they raise Unreachable. Later ones work.

        From any thread or a signal handler; does not block. Idempotent.
        """
        for channel in list(self._busy):
            channel.close()

    def leave_queue(self) -> None:
        """Wait for a slot no longer, so that the next one moves up. Idempotent; blocks for some seconds at most."""
        with self._lock:
            ticket, self._ticket = self._ticket, ""
        if ticket:
            with contextlib.suppress(MxError):
                self.call("DELETE", f"{GRANTS}/{ticket}", {"proto": PROTO[1]}, _FAREWELL)

    def close(self) -> None:
        """Leave the queue and close idle connections. Idempotent; blocks for some seconds at most."""
        self.leave_queue()
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for channel in idle:
            channel.free()


class Grant:
    """The right to read a peer, kept alive by a thread of its own until `release`. Thread-safe.

    `access` is what the peer gave: `paths`, and `nixl` where that is one of them. `failure` says why the grant is gone
    (the peer died, fell silent or ended it), None while it holds. `queue`: how many waited for a slot when it was given.
    """

    def __init__(self, session: Session, answer: Mapping[str, Any]) -> None:
        self.id = text_of(answer, "grant", session.address)
        self.queue = count_of(answer, "queue", 0, session.address)
        self.access = answer
        self.version = 0
        self.state = ""
        self.better: tuple[str, ...] = ()
        self._session = session
        self._ttl = seconds_of(answer, "ttl", 30.0, session.address)
        self.failure: MxError | None = None
        self._ended = threading.Event()
        self._learn(answer)
        begin(threading.Thread(target=self._beat, name="mx-grant", daemon=True))

    def release(self, serving: str = "", verified: int = 0) -> None:
        """Give the slot back. Idempotent; blocks for some seconds at most, and raises nothing: an unheard one expires."""
        if self._ended.is_set():
            return
        self._ended.set()
        told = {"serving": serving, "verified": verified} if serving else {}
        with contextlib.suppress(MxError):
            self._session.call("DELETE", f"{GRANTS}/{self.id}", {"proto": PROTO[1], **told}, _FAREWELL)

    def _beat(self) -> None:
        heard = time.monotonic()
        target = f"{GRANTS}/{self.id}"
        while not self._ended.wait(self._ttl / _BEATS):
            try:
                self._learn(self._session.call("POST", target, {"proto": PROTO[1]}, self._ttl / 2))
                heard = time.monotonic()
            except MxError as error:
                if self._ended.is_set():
                    return
                patient = isinstance(error, Unreachable) and not isinstance(error, NotThere)
                if patient and time.monotonic() - heard < self._ttl / 2:
                    continue
                self.failure = TransportFailed(f"the grant is gone: {error.what}")
                return

    def _learn(self, answer: Mapping[str, Any]) -> None:
        self.version = count_of(answer, "version", self.version, self._session.address)
        self.state = str(answer.get("state", self.state))
        self.better = texts_of(answer, "better", self._session.address)


class FileStream:
    """A Stream (engine.ports) of one piece of a file."""

    def __init__(self, session: Session, channel: Channel) -> None:
        self._session = session
        self._channel = channel
        self._lock = threading.Lock()
        self._reading = False
        self._closed = False

    def read_into(self, view: memoryview) -> int:
        """Fill the view, or as much as is left, and return how much. Blocks; raises Unreachable when it breaks off."""
        with self._lock:
            if self._closed:
                raise Unreachable(f"{self._session.address}: given up")
            self._reading = True
        try:
            return self._channel.read_into(view)
        finally:
            with self._lock:
                self._reading = False
                closed = self._closed
            if closed:
                self._session.give_back(self._channel)

    def close(self) -> None:
        """Any thread may call it, more than once; wakes a thread that reads."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            reading = self._reading
        if reading:
            self._channel.close()
        else:
            self._session.give_back(self._channel)
