"""TLS read in large pieces: all bytes in order, as much as fits, and every way in which a stream ends."""

from __future__ import annotations

import contextlib
import os
import socket
import ssl
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from mx_cli.base.tls_stream import TAKE, TlsStream
from tests.rig.servers import Tls, make_tls

Pair = tuple[TlsStream, ssl.SSLSocket]


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> Tls:
    return make_tls(tmp_path_factory.mktemp("tls"))


def connect(tls: Tls, ca: Path | None, host: str = "localhost") -> Pair:
    """Both ends of a connection; the near one trusts `ca`."""
    serving = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    serving.load_cert_chain(tls.cert, tls.key)
    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor(1) as pool:
        near = socket.create_connection(server.getsockname(), 20)
        far, _ = server.accept()
        far.settimeout(20)
        shaken = pool.submit(serving.wrap_socket, far, server_side=True)
        try:
            return TlsStream(near, ssl.create_default_context(cafile=ca), host), shaken.result()
        except BaseException:
            shaken.exception()
            far.close()
            raise


@pytest.fixture
def pair(tls: Tls) -> Iterator[Pair]:
    near, far = connect(tls, tls.ca)
    yield near, far
    near.close()
    far.close()


def test_both_directions(pair: Pair) -> None:
    near, far = pair
    near.sendall(b"question")
    assert far.recv(100) == b"question"
    far.sendall(b"answer")
    view = memoryview(bytearray(100))
    assert bytes(view[: near.recv_into(view)]) == b"answer"


def test_fill_goes_on_to_the_last_byte_of_the_view(pair: Pair) -> None:
    near, far = pair
    data = os.urandom(3 * TAKE + 5)
    sender = threading.Thread(target=far.sendall, args=(data + b"next",))
    sender.start()
    view = memoryview(bytearray(len(data)))
    assert near.fill(view) == len(data)
    assert view == data
    sender.join()
    assert near.recv_into(view) == 4


def test_fill_gives_what_came_before_a_wait_timed_out(pair: Pair) -> None:
    near, far = pair
    far.sendall(b"some")
    view = memoryview(bytearray(100))
    near.sock.settimeout(0.1)
    assert near.fill(view) == 4
    with pytest.raises(TimeoutError):
        near.fill(view)
    far.sendall(b"more")
    assert near.recv_into(view) == 4


def test_an_end_that_the_peer_tells_of(pair: Pair) -> None:
    near, far = pair
    far.sendall(b"last")

    def say_goodbye() -> None:
        with contextlib.suppress(OSError):  # nobody answers it
            far.unwrap()

    closer = threading.Thread(target=say_goodbye)
    closer.start()
    view = memoryview(bytearray(100))
    assert near.fill(view) == 4
    assert near.recv_into(view) == 0
    near.close()
    closer.join()


def test_a_cut_stream_is_an_error(pair: Pair) -> None:
    near, far = pair
    far.sendall(b"last")
    socket.socket.shutdown(far, socket.SHUT_RDWR)
    view = memoryview(bytearray(100))
    assert near.fill(view) == 4
    for _ in range(2):
        with pytest.raises(OSError, match="EOF"):
            near.fill(view)


def test_shutdown_wakes_the_reader(pair: Pair) -> None:
    near, _ = pair
    near.sock.settimeout(None)
    found: list[BaseException] = []

    def read() -> None:
        try:
            near.fill(memoryview(bytearray(100)))
        except OSError as error:
            found.append(error)

    reader = threading.Thread(target=read)
    reader.start()
    near.shutdown()
    reader.join(20)
    assert not reader.is_alive()
    assert found


def test_a_certificate_that_nobody_vouches_for(tls: Tls) -> None:
    with pytest.raises(ssl.SSLCertVerificationError):
        connect(tls, None)


def test_a_certificate_of_another_host(tls: Tls) -> None:
    with pytest.raises(ssl.SSLCertVerificationError, match="elsewhere"):
        connect(tls, tls.ca, "elsewhere.example")


def test_the_certificate(tls: Tls, pair: Pair) -> None:
    assert pair[0].certificate == ssl.PEM_cert_to_DER_cert(tls.cert.read_text())
