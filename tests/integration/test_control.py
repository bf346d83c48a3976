"""The control channel of a peer, over real TLS on loopback: who is let in, who waits, and what attackers cannot do."""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import json
import os
import resource
import signal
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from mx_cli.base.errors import (
    AccessDenied,
    Incompatible,
    MxError,
    NotFound,
    TransportFailed,
    Unreachable,
    UsageError,
)
from mx_cli.model.manifest import Manifest
from mx_cli.transport import secret, session
from mx_cli.transport.connection import Limits
from mx_cli.transport.listen import listen
from mx_cli.transport.protocol import GRANTS
from mx_cli.transport.session import Grant, Queued, Session, dial
from tests.rig.peer import BLOB, DATA, FILE, SECRET, TENSOR, URI, Peer, PeerProcess, holding
from tests.support import capability

OTHER = b"another-secret-of-some-peers"
NAMES = (TENSOR, FILE, "safetensors", BLOB, URI, "name-of-the-model")
READER = {"host": "reader-host", "pid": 4711}
ROUTES = [
    ("GET", "/v1/source"),
    ("GET", "/v1/manifest"),
    ("POST", "/v1/grants"),
    ("POST", "/v1/grants/x"),
    ("DELETE", "/v1/grants/x"),
    ("GET", "/v1/files/weights/%C3%A4%20model.safetensors?offset=0&length=10"),
    ("GET", "/v1/nothing"),
]


@pytest.fixture
def start() -> Iterator[Callable[..., Peer]]:
    peers: list[Peer] = []

    def start_peer(**options: Any) -> Peer:
        peers.append(Peer.start(**options))
        return peers[-1]

    yield start_peer
    for peer in peers:
        peer.close()


@pytest.fixture
def peer(start: Callable[..., Peer]) -> Peer:
    return start()


def read_all(opened: session.FileStream, step: int = 300_000) -> bytes:
    found, view = bytearray(), memoryview(bytearray(step))
    while count := opened.read_into(view):
        found += view[:count]
    opened.close()
    return bytes(found)


def granted(answer: Grant | Queued) -> Grant:
    assert isinstance(answer, Grant)
    return answer


def failure_of(grant: Grant) -> str:
    assert isinstance(grant.failure, TransportFailed)
    return grant.failure.what


def queued(answer: Grant | Queued) -> Queued:
    assert isinstance(answer, Queued)
    return answer


def until(true: Callable[[], object]) -> None:
    """Waits for what comes by itself."""
    end = time.monotonic() + 60
    while not true():
        assert time.monotonic() < end, "it did not come"
        time.sleep(0.01)


def place_of(server: socket.socket) -> str:
    host, port = server.getsockname()[:2]
    return f"{host}:{port}"


def plain_context() -> ssl.SSLContext:
    return secret.client_context()


def raw(address: str) -> http.client.HTTPSConnection:
    host, _, port = address.rpartition(":")
    return http.client.HTTPSConnection(host, int(port), timeout=30, context=plain_context())


def ask(
    connection: http.client.HTTPConnection, method: str, target: str, body: Any = None, **headers: str
) -> tuple[int, bytes]:
    data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
    connection.request(method, target, data, headers)
    answer = connection.getresponse()
    return answer.status, answer.read()


class Handshake:
    """A handshake by hand, so that each part of it can be wrong."""

    def __init__(self, peer: Peer, offered: bytes = SECRET) -> None:
        self.connection = raw(peer.address)
        self.nonce = os.urandom(32)
        status, said = ask(self.connection, "POST", "/v1/hello", {"proto": [1, 1], "nonce": self.nonce.hex()})
        assert status == 200
        hello = json.loads(said)
        self.server_nonce = bytes.fromhex(hello["nonce"])
        self.generation = hello["generation"]
        self.certificate = hashlib.sha256(self.connection.sock.getpeercert(binary_form=True)).digest()
        self.offered = offered

    def proof(self, role: bytes = secret.CLIENT, certificate: bytes = b"") -> bytes:
        seen = certificate or self.certificate
        return secret.proof(self.offered, role, seen, self.nonce, self.server_nonce, self.generation)

    def finish(self, **other: str) -> tuple[int, bytes]:
        body = {"proto": 1, "nonce": self.nonce.hex(), "server_nonce": self.server_nonce.hex()}
        return ask(self.connection, "POST", "/v1/session", {**body, "proof": self.proof().hex(), **other})


# --- what is served


def test_a_reader_gets_what_the_peer_holds(peer: Peer) -> None:
    reader = peer.dial()
    source = reader.source()
    assert (source["generation"], source["state"], source["slots"]) == (peer.holder.generation, "serving", 2)
    assert reader.generation == peer.holder.generation
    assert reader.holding() == holding()
    grant = granted(reader.grant(READER))
    assert grant.access["nixl"]["blob"] == BLOB
    for offset, length in ((0, len(DATA)), (1, 1), (12345, (3 << 20) + 7), (len(DATA) - 5, 5), (7, 0)):
        assert read_all(reader.open(FILE, offset, length, grant)) == DATA[offset : offset + length]
    grant.release()
    grant.release()
    reader.close()


def test_streams_at_once_have_connections_of_their_own_which_are_used_again(peer: Peer) -> None:
    reader = peer.dial()
    grant = granted(reader.grant(READER))
    for _ in range(3):
        streams = [reader.open(FILE, at << 20, 1 << 20, grant) for at in range(4)]
        assert [read_all(stream) for stream in streams] == [DATA[at << 20 : (at + 1) << 20] for at in range(4)]
    assert peer.door.connections <= 5
    grant.release()


def test_a_stream_that_is_given_up_wakes_its_reader(peer: Peer) -> None:
    reader = peer.dial()
    grant = granted(reader.grant(READER))
    reads, go_on = threading.Event(), threading.Event()
    peer.holder.before_piece = lambda: (reads.set(), go_on.wait(60))
    stream = reader.open(FILE, 0, len(DATA), grant)
    outcome: list[object] = []

    def read() -> None:
        try:
            outcome.append(stream.read_into(memoryview(bytearray(100))))
        except MxError as error:
            outcome.append(error)

    thread = threading.Thread(target=read)
    thread.start()
    assert reads.wait(30)
    stream.close()
    thread.join(30)
    go_on.set()
    assert isinstance(outcome[0], Unreachable)
    assert reader.source()["readers"] == 1
    grant.release()


def test_an_interrupted_session_says_goodbye(peer: Peer) -> None:
    reader = peer.dial()
    grant = granted(reader.grant(READER))
    reads, go_on = threading.Event(), threading.Event()
    peer.holder.before_piece = lambda: (reads.set(), go_on.wait(60))
    stream = reader.open(FILE, 0, len(DATA), grant)
    interrupter = threading.Thread(target=lambda: reads.wait(60) and reader.interrupt())
    interrupter.start()
    with pytest.raises(Unreachable):
        stream.read_into(memoryview(bytearray(100)))
    interrupter.join(60)
    stream.close()
    grant.release()
    until(lambda: peer.control.grants.readers == 0)
    go_on.set()


@pytest.mark.parametrize(
    ("file", "offset", "length", "error"),
    [(FILE, 0, len(DATA) + 1, TransportFailed), ("other", 0, 1, NotFound), ("../" + FILE, 0, 1, NotFound)],
)
def test_what_is_not_there_is_not_served(peer: Peer, file: str, offset: int, length: int, error: type[MxError]) -> None:
    reader = peer.dial()
    grant = granted(reader.grant(READER))
    with pytest.raises(error):
        reader.open(file, offset, length, grant)
    grant.release()


def test_a_manifest_is_packed_only_for_who_unpacks(peer: Peer) -> None:
    shake = Handshake(peer)
    token = json.loads(shake.finish()[1])["token"]
    status, said = ask(shake.connection, "GET", "/v1/manifest", Authorization=f"Bearer {token}")
    assert (status, json.loads(said)["version"]) == (200, 0)


def test_a_prepared_holding_is_what_is_served(peer: Peer) -> None:
    renewed = holding(version=7)
    peer.control.prepare(renewed)
    assert peer.dial().holding() == holding()
    peer.control.prepare(renewed)
    peer.holder.holding = renewed
    assert peer.dial().holding() == renewed


def test_a_manifest_that_never_ends_is_refused(peer: Peer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "_HOLDING_LIMIT", 500)
    with pytest.raises(TransportFailed, match="more than 500"):
        peer.dial().holding()


def test_health_needs_no_secret_and_tells_no_names(peer: Peer) -> None:
    connection = raw(peer.address)
    assert ask(connection, "GET", "/livez") == (200, b"ok\n")
    assert ask(connection, "HEAD", "/livez") == (200, b"")
    assert ask(connection, "GET", "/readyz") == (200, b"ok\n")
    peer.holder.holding = None
    assert ask(connection, "GET", "/livez")[0] == 200
    assert ask(connection, "GET", "/readyz") == (503, b"loading\n")
    with pytest.raises(Unreachable, match="loading"):
        peer.dial().source()


def test_ready_is_what_discovery_knows(start: Callable[..., Peer]) -> None:
    published = threading.Event()
    peer = start(published=published.is_set)
    connection = raw(peer.address)
    assert ask(connection, "GET", "/readyz")[0] == 503
    published.set()
    assert ask(connection, "GET", "/readyz")[0] == 200


def test_metrics_count_and_tell_no_names(peer: Peer) -> None:
    reader = peer.dial()
    grant = granted(reader.grant(READER))
    read_all(reader.open(FILE, 0, 1000, grant))
    with pytest.raises(AccessDenied):
        peer.dial(OTHER)
    status, said = ask(raw(peer.address), "GET", "/metrics")
    text = said.decode()
    assert status == 200
    for row in (
        "mxcli_readers 1",
        "mxcli_slots 2",
        "mxcli_grants_total 1",
        "mxcli_bytes_served_total 1000",
        "mxcli_handshakes_total 1",
        "mxcli_handshakes_refused_total 1",
        'mxcli_state{state="serving"} 1',
    ):
        assert f"\n{row}\n" in f"\n{text}"
    names = (*NAMES, SECRET.decode(), grant.id, "reader-host", "4711", peer.holder.generation)
    assert [name for name in names if name in text] == []
    grant.release()


# --- who is let in


@pytest.mark.parametrize(("method", "target"), ROUTES)
@pytest.mark.parametrize("token", ["", "Bearer ", "Bearer " + "0" * 64, "Basic eDp5", "Bearer é"])
def test_without_a_session_nothing_is_told(peer: Peer, method: str, target: str, token: str) -> None:
    headers = {"Authorization": token} if token else {}
    connection = raw(peer.address)
    body = b"{}" if method != "GET" else None
    connection.request(method, target, body, {**headers, "X-Mx-Grant": "x"})
    answer = connection.getresponse()
    said = answer.read().decode() + str(answer.headers)
    assert answer.status == 401
    assert [name for name in NAMES if name in said] == []


def test_a_wrong_secret_gets_nothing(peer: Peer) -> None:
    with pytest.raises(AccessDenied, match="refuses the secret") as refused:
        peer.dial(OTHER)
    assert OTHER.decode() not in str(refused.value.to_json())
    assert peer.control.grants.given == 0


def test_a_session_alone_reads_no_bytes(peer: Peer) -> None:
    shake = Handshake(peer)
    token = json.loads(shake.finish()[1])["token"]
    for grant in ("", "x", "0" * 32):
        status, said = ask(
            shake.connection,
            "GET",
            "/v1/files/weights/%C3%A4%20model.safetensors?offset=0&length=64",
            **{"Authorization": f"Bearer {token}", "X-Mx-Grant": grant},
        )
        assert status == 410
        assert DATA[:16] not in said


def test_a_handshake_that_is_replayed_fails(peer: Peer) -> None:
    shake = Handshake(peer)
    assert shake.finish()[0] == 200
    assert shake.finish()[0] == 403
    again = Handshake(peer)
    again.nonce, again.server_nonce = shake.nonce, shake.server_nonce
    assert again.finish()[0] == 403
    # The proof of another handshake.
    fresh = Handshake(peer)
    assert fresh.finish(proof=shake.proof().hex())[0] == 403
    # A nonce that was made for another reader.
    stolen = Handshake(peer)
    other = Handshake(peer)
    stolen.server_nonce = other.server_nonce
    assert stolen.finish()[0] == 403
    # It is used up by who proves, not by who tries.
    assert fresh.finish()[0] == 200


def test_a_nonce_lives_ten_seconds(start: Callable[..., Peer]) -> None:
    now = [1000.0]
    peer = start(clock=lambda: now[0])
    timely, late = Handshake(peer), Handshake(peer)
    now[0] += 9.9
    assert timely.finish()[0] == 200
    now[0] += 0.2
    assert late.finish()[0] == 403


def test_a_session_that_nobody_uses_ends(start: Callable[..., Peer]) -> None:
    now = [1000.0]
    peer = start(clock=lambda: now[0])
    reader = peer.dial()
    for _ in range(3):
        now[0] += 599.0
        reader.source()
    now[0] += 601.0
    with pytest.raises(TransportFailed, match="session has ended"):
        reader.source()


def test_truncated_handshakes_fail(peer: Peer) -> None:
    shake = Handshake(peer)
    for wrong in (
        {"proof": ""},
        {"proof": shake.proof().hex()[:-2]},
        {"proof": shake.proof().hex() + "00"},
        {"proof": shake.proof(secret.SERVER).hex()},
        {"proof": "zz"},
        {"server_nonce": ""},
        {"server_nonce": shake.server_nonce.hex()[:-2]},
        {"server_nonce": (b"\0" * 56).hex()},
        {"nonce": shake.nonce.hex()[:-2]},
        {"nonce": ""},
    ):
        status, said = shake.finish(**wrong)
        assert status in (400, 403), wrong
        assert b"token" not in said
    for body in (b"", b"{", b"[]", b"null", b"[" * 60_000, b"\xff\xfe", b'{"proto": 1}', b'{"proto": [1], "nonce": 5}'):
        assert ask(shake.connection, "POST", "/v1/hello", body)[0] == 400
    shake.connection.sock.shutdown(socket.SHUT_WR)
    assert peer.dial().source()["readers"] == 0


class Relay:
    """Ends TLS with a certificate of its own, and passes on what is said inside (`forge` may change an answer)."""

    def __init__(self, address: str, forge: Callable[[bytes], bytes] = lambda data: data) -> None:
        self._address, self._forge = address, forge
        self._context = secret.make_certificate().context
        self._server = socket.create_server(("127.0.0.1", 0))
        self.address = place_of(self._server)
        self.heard = bytearray()
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                plain, _ = self._server.accept()
                threading.Thread(target=self._pass_on, args=(plain,), daemon=True).start()

    def _pass_on(self, plain: socket.socket) -> None:
        with contextlib.suppress(OSError), self._context.wrap_socket(plain, server_side=True) as near:
            host, _, port = self._address.rpartition(":")
            with plain_context().wrap_socket(socket.create_connection((host, int(port)))) as far:
                while data := near.recv(1 << 16):
                    self.heard += data
                    far.sendall(data)
                    near.sendall(self._forge(far.recv(1 << 16)))

    def close(self) -> None:
        self._server.close()


def test_a_relay_with_another_certificate_is_refused(peer: Peer) -> None:
    relay = Relay(peer.address)
    with pytest.raises(AccessDenied, match="something between ends TLS"):
        dial(relay.address, [SECRET])
    assert b"/v1/session" in relay.heard
    assert b"mxcli_handshakes_total 0" in ask(raw(peer.address), "GET", "/metrics")[1]
    relay.close()


def test_a_false_peer_that_accepts_everybody_is_refused(peer: Peer) -> None:
    answer = json.dumps({"proto": 1, "proof": "00" * 32, "token": "00" * 32}).encode()
    accepted = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(answer), answer)
    relay = Relay(peer.address, lambda data: accepted if b" 403 " in data[:20] else data)
    with pytest.raises(AccessDenied, match="another certificate"):
        dial(relay.address, [SECRET])
    relay.close()


def test_the_token_is_not_shown_to_who_took_over_the_address(start: Callable[..., Peer]) -> None:
    first = start()
    reader = first.dial()
    grant = granted(reader.grant(READER))
    place = first.address
    first.door.close()
    seen = bytearray()
    context = secret.make_certificate().context
    server = listen(place)
    server.setblocking(True)

    def take_over() -> None:
        with contextlib.suppress(OSError):
            while True:
                plain, _ = server.accept()
                with contextlib.suppress(OSError), context.wrap_socket(plain, server_side=True) as sock:
                    seen.extend(sock.recv(1 << 16))

    threading.Thread(target=take_over, daemon=True).start()
    with pytest.raises(TransportFailed, match="restarted"):
        reader.source()
    with pytest.raises(TransportFailed, match="restarted"):
        reader.open(FILE, 0, 10, grant)
    server.close()
    assert bytes(seen) == b""


def test_secrets_are_rotated_without_a_restart(start: Callable[..., Peer], tmp_path: Path) -> None:
    file = tmp_path / "secrets"
    file.write_bytes(SECRET + b"\n")
    peer = start(secrets=lambda: secret.read_secrets(file))
    session_before = peer.dial(SECRET)
    file.write_bytes(OTHER + b"\r\n" + SECRET + b"\n")
    assert peer.dial(SECRET).generation == peer.dial(OTHER).generation
    file.write_bytes(OTHER + b"\n")
    with pytest.raises(AccessDenied):
        peer.dial(SECRET)
    assert peer.dial(OTHER).source()
    assert session_before.source()
    file.unlink()
    with pytest.raises(Unreachable, match="cannot read its secrets"):
        peer.dial(OTHER)


def test_a_certificate_authority_is_asked_when_there_is_one(peer: Peer, tls: Any) -> None:
    with pytest.raises(AccessDenied, match="certificate verify failed"):
        dial(peer.address, [SECRET], ca=Path(tls.ca))


def test_other_wire_versions_are_told_apart(peer: Peer, monkeypatch: pytest.MonkeyPatch) -> None:
    status, said = ask(raw(peer.address), "POST", "/v1/hello", {"proto": [2, 7], "nonce": "00" * 32})
    assert (status, json.loads(said)["speaks"]) == (426, [1, 1])
    monkeypatch.setattr(session, "PROTO", (2, 7))
    with pytest.raises(Incompatible, match="1 to 1, the reader 2 to 7"):
        peer.dial()


@pytest.mark.parametrize("answers", [b"", b"SSH-2.0-OpenSSH_9\r\n", b"HTTP/1.1 400 Bad Request\r\n\r\n"])
def test_something_else_that_listens_there(answers: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            sock, _ = server.accept()
            sock.sendall(answers)
            sock.close()

        threading.Thread(target=serve, daemon=True).start()
        with pytest.raises(Unreachable, match=r"127\.0\.0\.1"):
            dial(place_of(server), [SECRET])


class Impostor:
    """Takes one connection: speaks TLS if it is to, and then what `talk` makes it say."""

    def __init__(self, talk: Callable[[socket.socket], None], *, tls: bool = True) -> None:
        self.server = listen("127.0.0.1:0")
        self.server.setblocking(True)
        self.over = threading.Event()
        self._talk, self._tls = talk, tls
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            sock, _ = self.server.accept()
            if self._tls:
                sock = secret.make_certificate().context.wrap_socket(sock, server_side=True)
            self._talk(sock)
            self.over.wait(100)

    def close(self) -> None:
        self.over.set()
        self.server.close()


@pytest.mark.parametrize("tls", [False, True], ids=["TLS", "the answer"])
def test_who_drips_holds_nobody_up(tls: bool) -> None:
    def talk(sock: socket.socket) -> None:
        sock.sendall(b"HTTP/1.1 200 OK\r\nX: " if tls else b"\x16\x03\x03\x40\x00")
        while not impostor.over.wait(0.1):
            sock.sendall(b"x")

    impostor = Impostor(talk, tls=tls)
    try:
        with pytest.raises(Unreachable, match="no answer within"):
            dial(place_of(impostor.server), [SECRET], 1.0)
    finally:
        impostor.close()


@pytest.mark.parametrize("tls", [False, True], ids=["TLS", "the answer"])
def test_who_is_frozen_is_called_silent(tls: bool) -> None:
    impostor = Impostor(lambda sock: None, tls=tls)
    try:
        with pytest.raises(Unreachable, match=r"no answer within|timed out"):
            dial(place_of(impostor.server), [SECRET], 1.0)
    finally:
        impostor.close()


@pytest.mark.parametrize("generation", ["\ud800", "mx\x1b[2J", "m" * 5000])
def test_a_generation_that_is_no_name_is_refused(generation: str) -> None:
    said = json.dumps({"proto": 1, "nonce": "00" * 56, "generation": generation}).encode()

    def talk(sock: socket.socket) -> None:
        sock.recv(1 << 16)
        sock.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(said), said))

    impostor = Impostor(talk)
    try:
        with pytest.raises(TransportFailed, match="not a peer"):
            dial(place_of(impostor.server), [SECRET], 10.0)
    finally:
        impostor.close()


@pytest.mark.parametrize("fact", [{"readers": "many"}, {"queue": -1}, {"version": 2**63}, {"identities": None}])
def test_facts_that_cannot_be_are_the_peers_fault(peer: Peer, fact: dict[str, Any]) -> None:
    peer.holder.facts = lambda: fact  # type: ignore[method-assign]
    with pytest.raises(TransportFailed, match=f"not what a peer says .{next(iter(fact))}"):
        peer.dial().source()


@pytest.mark.parametrize("field", [{"ttl": 0}, {"ttl": float("nan")}, {"ttl": "long"}, {"queue": 1.5}, {"better": 7}])
def test_a_grant_that_cannot_be_is_the_peers_fault(peer: Peer, field: dict[str, Any]) -> None:
    peer.holder.access = lambda reader: field  # type: ignore[method-assign]
    with pytest.raises(TransportFailed, match=f"not what a peer says .{next(iter(field))}"):
        peer.dial().grant(READER)


def test_a_manifest_of_a_newer_mx_is_incompatible(peer: Peer, monkeypatch: pytest.MonkeyPatch) -> None:
    newer = {**peer.holder.holding.manifest.to_json(), "format": 99} if peer.holder.holding else {}
    monkeypatch.setattr(Manifest, "to_json", lambda self: newer)
    with pytest.raises(Incompatible, match="newer mx"):
        peer.dial().holding()


def test_wire_versions_that_are_no_numbers(peer: Peer) -> None:
    endless = b'{"proto": [Infinity, Infinity], "nonce": "%s"}' % (b"00" * 32)
    assert ask(raw(peer.address), "POST", "/v1/hello", endless)[0] == 400


def test_what_one_reader_says_spoils_no_answer_to_others(peer: Peer) -> None:
    reader = peer.dial()
    grant = granted(reader.grant(READER))
    grant.release("[::1%\ud800]:80", 1)
    assert "[::1%\ud800]:80" in peer.dial().source()["better"]


def test_nobody_listens_there() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        place = place_of(server)
    with pytest.raises(Unreachable, match="refused"):
        dial(place, [SECRET])


# --- grants


def test_an_expired_grant_frees_its_slot(start: Callable[..., Peer]) -> None:
    peer = start(slots=2, ttl=1.0)
    silent, living, waiting = peer.dial(), peer.dial(), peer.dial()
    lost = silent.call("POST", GRANTS, {"proto": 1, "reader": READER})["grant"]
    kept = granted(living.grant(READER))
    queued(waiting.grant(READER))
    until(lambda: peer.control.grants.readers == 1)
    until(lambda: isinstance(waiting.grant(READER), Grant))
    assert kept.failure is None
    with pytest.raises(NotFound, match="no such grant"):
        silent.call("POST", f"{GRANTS}/{lost}", {"proto": 1})
    assert b"mxcli_grants_expired_total 1" in ask(raw(peer.address), "GET", "/metrics")[1]
    kept.release()
    until(lambda: peer.control.grants.readers == 1)


def test_the_queue_is_first_in_first_out(start: Callable[..., Peer]) -> None:
    peer = start(slots=1)
    has, one, two = (peer.dial() for _ in range(3))
    grant = granted(has.grant(READER))
    assert [queued(waits.grant(READER)).position for waits in (one, two, one, two)] == [0, 1, 0, 1]
    grant.release()
    assert queued(two.grant(READER)).position == 1
    assert queued(peer.dial().grant(READER)).position == 2
    first = granted(one.grant(READER))
    assert queued(two.grant(READER)).position == 0
    first.release()
    second = granted(two.grant(READER))
    second.release()
    assert len({grant.id, first.id, second.id}) == 3


def test_who_leaves_the_queue_lets_the_next_one_in(start: Callable[..., Peer]) -> None:
    peer = start(slots=1)
    grant = granted(peer.dial().grant(READER))
    one, two = peer.dial(), peer.dial()
    queued(one.grant(READER))
    assert queued(two.grant(READER)).position == 1
    one.close()
    assert queued(two.grant(READER)).position == 0
    grant.release()
    granted(two.grant(READER)).release()


def test_a_grant_says_how_many_wait_and_a_place_can_be_given_up(start: Callable[..., Peer]) -> None:
    peer = start(slots=1)
    has, one, two = (peer.dial() for _ in range(3))
    first = granted(has.grant(READER))
    assert first.queue == 0
    queued(one.grant(READER))
    assert queued(two.grant(READER)).position == 1
    first.release()
    second = granted(one.grant(READER))
    assert second.queue == 1
    two.leave_queue()
    second.release()
    third = granted(one.grant(READER))
    assert third.queue == 0
    third.release()
    granted(two.grant(READER)).release()


def test_verified_readers_that_serve_are_better_peers(start: Callable[..., Peer]) -> None:
    peer = start(slots=1)
    first = granted(peer.dial().grant(READER))
    waiting = peer.dial()
    assert queued(waiting.grant(READER)).better == ()
    first.release("127.0.0.1:1", verified=0)
    second = granted(waiting.grant(READER))
    late = peer.dial()
    assert queued(late.grant(READER)).better == ()
    second.release("127.0.0.1:2", verified=100)
    third = granted(late.grant({**READER, "address": "127.0.0.1:3"}))
    other, another, itself = peer.dial(), peer.dial(), peer.dial()
    assert queued(other.grant(READER)).better == ("127.0.0.1:2",)
    third.release("[::1]:3", verified=5)
    granted(other.grant(READER))
    seen = {queued(another.grant(READER)).better, queued(itself.grant({**READER, "address": "127.0.0.1:2"})).better}
    assert {frozenset(better) for better in seen} == {frozenset({"127.0.0.1:2", "[::1]:3"}), frozenset({"[::1]:3"})}


def test_a_beat_tells_of_a_reader_that_serves_and_of_new_weights(start: Callable[..., Peer]) -> None:
    peer = start(slots=2, ttl=1.0)
    grant, other = granted(peer.dial().grant(READER)), granted(peer.dial().grant(READER))
    assert (grant.version, grant.state) == (0, "serving")
    other.release("127.0.0.1:5", verified=10)
    peer.control.pause()
    peer.holder.holding = holding(version=1)
    until(lambda: grant.version == 1 and grant.state == "updating")
    until(lambda: grant.better == ("127.0.0.1:5",))
    with pytest.raises(Unreachable, match="updating"):
        peer.dial().grant(READER)
    peer.control.resume()
    last = granted(peer.dial().grant(READER))
    assert queued(peer.dial().grant(READER)).better == ("127.0.0.1:5",)
    assert peer.dial().holding().version == 1
    last.release()
    grant.release()


def test_revoked_grants_read_nothing_more(start: Callable[..., Peer]) -> None:
    peer = start(ttl=1.0)
    reader = peer.dial()
    grant = granted(reader.grant(READER))
    reached, go_on = threading.Event(), threading.Event()
    peer.holder.before_piece = lambda: (reached.set(), go_on.wait(60))
    stream = reader.open(FILE, 0, len(DATA), grant)
    assert reached.wait(60)
    peer.control.revoke()
    go_on.set()
    with pytest.raises(Unreachable, match="broke off"):
        read_all(stream)
    until(lambda: grant.failure is not None)
    assert "the grant is gone" in failure_of(grant)
    with pytest.raises(TransportFailed, match="no such grant"):
        reader.open(FILE, 0, 10, grant)
    until(lambda: peer.control.grants.readers == 0)
    grant.release()


def test_v08_draining_waits_for_readers_and_lets_nobody_in(start: Callable[..., Peer]) -> None:
    peer = start()
    reader = peer.dial()
    grant = granted(reader.grant(READER))
    late: list[list[str]] = []
    drain = threading.Thread(target=lambda: late.append(peer.control.drain(60)))
    drain.start()
    until(lambda: peer.control.state == "draining")
    connection = raw(peer.address)
    assert ask(connection, "GET", "/readyz") == (503, b"draining\n")
    assert ask(connection, "GET", "/livez")[0] == 200
    with pytest.raises(Unreachable, match="draining") as told:
        peer.dial().grant(READER)
    assert told.value.retry_after
    assert read_all(reader.open(FILE, 0, len(DATA), grant)) == DATA
    assert late == []
    grant.release()
    drain.join(60)
    assert late == [[]]
    with pytest.raises(TransportFailed, match="session has ended"):
        reader.source()


def test_v08_a_reader_that_does_not_finish_is_named(peer: Peer) -> None:
    granted(peer.dial().grant(READER))
    assert peer.control.drain(0.1) == ["reader-host pid 4711"]
    until(lambda: peer.control.grants.readers == 0)


def test_a_bug_in_an_answer_ends_its_connection_alone(start: Callable[..., Peer]) -> None:
    """As many of them as there are threads, and as are waiting for one."""
    peer = start(limits=Limits(data_threads=1, control_threads=1))
    reader = peer.dial()
    facts = peer.holder.facts
    peer.holder.facts = lambda: {}["a bug"]  # type: ignore[method-assign]
    for _ in range(3):
        with pytest.raises(Unreachable):
            reader.source()
    assert {type(bug) for bug in peer.bugs} == {KeyError}
    peer.holder.facts = facts  # type: ignore[method-assign]
    assert reader.source()["device"] == "cpu"


def test_a_door_that_breaks_is_missed(start: Callable[..., Peer], monkeypatch: pytest.MonkeyPatch) -> None:
    peer = start()
    reader = peer.dial()
    monkeypatch.setattr(peer.door, "_advance", lambda connection: {}["a bug"])
    with pytest.raises(Unreachable):
        reader.source()
    until(lambda: [type(bug) for bug in peer.bugs] == [KeyError])
    assert peer.door.connections == 0


def test_bulk_data_does_not_starve_beats(start: Callable[..., Peer]) -> None:
    peer = start(limits=Limits(data_threads=1, control_threads=1), ttl=1.0)
    reader = peer.dial()
    grant = granted(reader.grant(READER))
    reached, go_on = threading.Event(), threading.Event()
    peer.holder.before_piece = lambda: (reached.set(), go_on.wait(60))
    stream = reader.open(FILE, 0, 10, grant)
    assert reached.wait(60)
    answers: list[bytes] = []
    second = threading.Thread(target=lambda: answers.append(read_all(reader.open(FILE, 0, 10, grant))))
    second.start()
    assert reader.source()["readers"] == 1
    peer.holder.holding = holding(version=3)
    until(lambda: grant.version == 3)
    go_on.set()
    second.join(60)
    assert [read_all(stream), *answers] == [DATA[:10]] * 2
    grant.release()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_l01_a_peer_that_dies_or_freezes_ends_the_grant(tmp_path: Path, how: signal.Signals) -> None:
    (tmp_path / "secrets").write_bytes(SECRET)
    source = PeerProcess(tmp_path / "secrets", ttl=2.0)
    try:
        grant = granted(dial(source.address, [SECRET]).grant(READER))
        source.process.send_signal(how)
        until(lambda: grant.failure is not None)
        assert "the grant is gone" in failure_of(grant)
    finally:
        source.close()
    grant.release()


def test_readers_that_vanish_at_any_moment_leave_the_peer_serving(start: Callable[..., Peer]) -> None:
    peer = start(slots=1)
    reader = peer.dial()
    grant = granted(reader.grant(READER))
    for read in range(20):
        sock = speak_tls(
            peer,
            b"GET /v1/files/weights/%%C3%%A4%%20model.safetensors HTTP/1.1\r\n"
            b"Authorization: Bearer %s\r\nX-Mx-Grant: %s\r\n\r\n" % (reader._token.encode(), grant.id.encode()),
        )
        for _ in range(read):
            sock.recv(5000)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        sock.close()
    assert read_all(reader.open(FILE, 0, len(DATA), grant)) == DATA
    grant.release()


# --- attackers


def connect(peer: Peer) -> socket.socket:
    return socket.create_connection(peer.door.address, timeout=60)


def speak_tls(peer: Peer, data: bytes) -> ssl.SSLSocket:
    sock = plain_context().wrap_socket(connect(peer))
    sock.sendall(data)
    return sock


def client_hello() -> bytes:
    out = ssl.MemoryBIO()
    with contextlib.suppress(ssl.SSLWantReadError):
        plain_context().wrap_bio(ssl.MemoryBIO(), out, server_hostname="x").do_handshake()
    return out.read()


def is_open(sock: socket.socket) -> bool:
    sock.setblocking(False)
    try:
        return bool(sock.recv(1 << 16))
    except (BlockingIOError, ssl.SSLWantReadError):
        return True
    except OSError:
        return False


def ends(sock: socket.socket) -> bytes:
    """What is said until the other side closes."""
    said = bytearray()
    with contextlib.suppress(ConnectionResetError, BrokenPipeError, ssl.SSLError):
        while data := sock.recv(1 << 16):
            said += data
    sock.close()
    return bytes(said)


@pytest.fixture
def many_files() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def drip(sock: socket.socket) -> None:
    """A byte now and then, until the other side has enough."""
    while True:
        sock.sendall(b"b")
        with contextlib.suppress(ssl.SSLWantReadError):
            if not sock.recv(1):
                raise EOFError
        time.sleep(0.05)


LYING = b"POST /v1/hello HTTP/1.1\r\nHost: x\r\nContent-Length: 60000\r\n\r\n{"


@pytest.mark.usefixtures("many_files")
def test_500_half_open_connections_do_not_disturb_a_reader(start: Callable[..., Peer]) -> None:
    peer = start(limits=Limits(stranger_patience=120.0, connections=2000))
    hello = client_hello()
    held: list[socket.socket] = [connect(peer) for _ in range(350)]
    for at in range(100):
        held.append(connect(peer))
        held[-1].sendall(hello[: 1 + at])
    held += [speak_tls(peer, LYING if at % 2 else b"GET /livez HTTP/1.1\r\nA: ") for at in range(50)]
    reader = peer.dial()
    grant = granted(reader.grant(READER))
    assert reader.holding() == holding()
    assert read_all(reader.open(FILE, 0, len(DATA), grant)) == DATA
    grant.release()
    assert peer.door.connections >= 500
    assert all(map(is_open, held))
    for sock in held:
        sock.close()


@pytest.mark.parametrize(
    ("said", "status"),
    [
        (b"POST /v1/hello HTTP/1.1\r\nContent-Length: 2147483648\r\n\r\n{", b"413"),
        (b"POST /v1/hello HTTP/1.1\r\nContent-Length: 65537\r\n\r\n{", b"413"),
        (b"POST /v1/hello HTTP/1.1\r\nContent-Length: -1\r\n\r\n{", b"400"),
        (b"POST /v1/hello HTTP/1.1\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n{", b"400"),
        (b"POST /v1/hello HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", b"411"),
        (b"GET /livez HTTP/1.1\r\nA: " + b"b" * (65 << 10), b"431"),
        (b"GET /livez HTTP/1.1\r\n" + b"A: b\r\n" * 11_000 + b"\r\n", b"431"),
        (b"GET /livez HTTP/2\r\n\r\n", b"505"),
        (b"GET livez HTTP/1.1\r\n\r\n", b"400"),
        (b"\x00\xff\xfe garbage \r\n\r\n", b"400"),
        (b"GET /livez HTTP/1.1\r\n folded: x\r\n\r\n", b"400"),
        (b"GET /livez?" + b"a&" * 1000 + b" HTTP/1.1\r\n\r\n", b"400"),
    ],
)
def test_what_is_no_request_is_refused_and_the_connection_ended(peer: Peer, said: bytes, status: bytes) -> None:
    sock = speak_tls(peer, b"")
    with contextlib.suppress(OSError):
        sock.sendall(said)
    answer = ends(sock)
    # What is still on its way when a connection is closed may take the answer along.
    assert answer[:12] == b"HTTP/1.1 " + status or (not answer and len(said) > 60_000)
    assert peer.dial().source()


@pytest.mark.parametrize(
    "said", [b"GET /livez HTTP/1.1\r\n\r\n", b"\x00" * 1000, b"\x16" * 1000, b"\xff", os.urandom(500)]
)
def test_what_is_not_tls_is_closed_quietly(peer: Peer, said: bytes) -> None:
    sock = connect(peer)
    sock.sendall(said)
    assert b"HTTP" not in ends(sock)
    assert peer.dial().source()


def test_who_is_slow_is_let_go(start: Callable[..., Peer]) -> None:
    peer = start(limits=Limits(stranger_patience=0.5))
    for sock in (connect(peer), speak_tls(peer, b"GET /li"), speak_tls(peer, LYING)):
        assert ends(sock) == b""
    half = connect(peer)
    half.sendall(client_hello()[:50])
    assert ends(half) == b""
    dripping = speak_tls(peer, b"GET /livez HTTP/1.1\r\nA: ")
    dripping.setblocking(False)
    with pytest.raises((ConnectionError, ssl.SSLError, EOFError)):
        drip(dripping)
    until(lambda: peer.door.connections == 0)


def test_a_reader_that_is_known_may_be_idle(start: Callable[..., Peer]) -> None:
    peer = start(limits=Limits(stranger_patience=0.5))
    reader = peer.dial()
    reader.source()
    stranger = connect(peer)
    assert ends(stranger) == b""
    assert peer.door.connections == 1
    assert reader.source()


def test_what_strangers_say_is_held_up_to_a_limit(start: Callable[..., Peer]) -> None:
    peer = start(limits=Limits(stranger_patience=120.0, strangers_memory=256 << 10))
    held: list[socket.socket] = []
    for _ in range(20):
        sock = speak_tls(peer, b"")
        with contextlib.suppress(OSError):
            sock.sendall(b"GET /livez HTTP/1.1\r\nA: " + b"b" * 60_000)
        held.append(sock)
    until(lambda: sum(map(is_open, held)) <= 5)
    assert peer.dial().source()
    for sock in held:
        sock.close()


def test_the_newest_gets_in_when_all_places_are_taken(start: Callable[..., Peer]) -> None:
    peer = start(limits=Limits(stranger_patience=120.0, connections=20))
    reader = peer.dial()
    grant = granted(reader.grant(READER))
    held = [connect(peer) for _ in range(60)]
    until(lambda: sum(map(is_open, held)) < 20)
    assert peer.door.connections <= 20
    assert peer.dial().source()
    assert read_all(reader.open(FILE, 0, 100, grant)) == DATA[:100]
    grant.release()
    for sock in held:
        sock.close()


def test_one_address_does_not_take_more_than_its_share(start: Callable[..., Peer]) -> None:
    peer = start(limits=Limits(stranger_patience=120.0, connections=40, strangers_of_an_address=5))
    held = [connect(peer) for _ in range(60)]
    until(lambda: sum(map(is_open, held)) <= 20)
    for sock in held:
        sock.close()


def test_strangers_that_do_not_read_hold_no_thread(start: Callable[..., Peer]) -> None:
    peer = start(limits=Limits(control_threads=1))
    held = []
    for _ in range(3):
        sock = speak_tls(peer, b"")
        sock.settimeout(5)
        with contextlib.suppress(OSError):
            while True:
                sock.sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n" * 400)
        held.append(sock)
    assert peer.dial().source()
    for sock in held:
        sock.close()


def test_requests_that_come_together_are_answered_in_turn(peer: Peer) -> None:
    sock = speak_tls(peer, b"GET /livez HTTP/1.1\r\n\r\n" * 3 + b"GET /readyz HTTP/1.0\r\n\r\n")
    said = ends(sock)
    assert said.count(b"HTTP/1.1 200 OK") == 4
    assert said.endswith(b"Connection: close\r\n\r\nok\n")


# --- the listener


def test_v01_a_port_that_is_taken_is_told_with_its_holder() -> None:
    with listen("127.0.0.1:0") as first:
        place, port = place_of(first), first.getsockname()[1]
        with pytest.raises(UsageError, match=rf"port {port} is taken by process {os.getpid()} \("):
            listen(place)
    with listen(place) as again:
        assert place_of(again) == place


@pytest.mark.parametrize("place", ["127.0.0.1", "203.0.113.7:0", "no.such.host.invalid:0", "127.0.0.1:99999"])
def test_where_nobody_can_listen(place: str) -> None:
    with pytest.raises(UsageError):
        listen(place)


@capability("ipv6")
def test_ipv6(start: Callable[..., Peer]) -> None:
    peer = start(place="[::1]:0")
    assert peer.address.startswith("[::1]:")
    reader = peer.dial()
    grant = granted(reader.grant(READER))
    assert read_all(reader.open(FILE, 0, 100, grant)) == DATA[:100]
    grant.release()


def test_p37_secrets_appear_nowhere(
    start: Callable[..., Peer], capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    peer = start()
    reader: Session = peer.dial()
    grant = granted(reader.grant(READER))
    errors: list[MxError] = []
    for failing in (
        lambda: peer.dial(OTHER),
        lambda: reader.open("no such file", 0, 1, grant),
        lambda: reader.call("GET", "/v1/nothing"),
        lambda: reader.call("POST", f"{GRANTS}/nothing", {}),
        lambda: peer.control.drain(0.01) and reader.source(),
    ):
        with pytest.raises(MxError) as caught:
            failing()
        errors.append(caught.value)
    out, err = capfd.readouterr()
    shown = out + err + caplog.text + "".join(repr(error) + str(error.to_json()) for error in errors)
    hidden = [SECRET.decode(), OTHER.decode(), reader._token, BLOB, grant.id]
    assert [one for one in hidden if one in shown] == []
    assert len(errors) == 5
