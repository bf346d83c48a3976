"""HTTP/1.1 over a pair of sockets: what comes is what was sent, and what breaks off says so."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator

import pytest

from mx_cli.base.errors import Unreachable
from mx_cli.sources.web import body_of
from mx_cli.sources.wire import HEAD_LIMIT, Body, Head, Wire

Pair = tuple[Wire, socket.socket]


@pytest.fixture
def pair() -> Iterator[Pair]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        near = socket.create_connection(server.getsockname())
        far, _ = server.accept()
    wire = Wire(near, "test", 0.3)
    yield wire, far
    wire.close()
    far.close()


def answered(pair: Pair, text: bytes, *, end: bool = False) -> tuple[Head, Body]:
    wire, far = pair
    far.sendall(text)
    if end:
        far.shutdown(socket.SHUT_WR)
    head = wire.ask("GET", "/x", {"Host": "h"})
    return head, body_of(wire, head)


def read_all(body: Body, step: int = 7) -> bytes:
    found, view = bytearray(), memoryview(bytearray(step))
    while count := body.read_into(view):
        found += view[:count]
    return bytes(found)


def test_the_question(pair: Pair) -> None:
    answered(pair, b"HTTP/1.1 204 No Content\r\n\r\n")
    assert pair[1].recv(1000) == b"GET /x HTTP/1.1\r\nHost: h\r\n\r\n"


def test_a_length(pair: Pair) -> None:
    head, body = answered(pair, b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\nX-A: 1\r\nx-a:  2 \r\n\r\n0123456789NEXT")
    assert (head.status, head.length, head.get("x-a"), head.keep) == (200, 10, "1, 2", True)
    assert read_all(body) == b"0123456789"
    assert body.clean


def test_chunks(pair: Pair) -> None:
    text = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3;x=y\r\nabc\r\nB\r\n0123456789a\r\n0\r\nTrailer: 1\r\n\r\n"
    head, body = answered(pair, text)
    assert head.length is None
    assert read_all(body) == b"abc0123456789a"
    assert body.clean


def test_until_the_end_of_the_connection(pair: Pair) -> None:
    head, body = answered(pair, b"HTTP/1.0 200 OK\r\n\r\nabc", end=True)
    assert not head.keep
    assert read_all(body) == b"abc"


def test_interim_answers_are_passed_over(pair: Pair) -> None:
    head, body = answered(pair, b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
    assert (head.status, read_all(body)) == (200, b"ok")


@pytest.mark.parametrize(
    "text",
    [
        b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nabc",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nabc",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabcdef\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n-3\r\nabc\r\n0\r\n\r\n",
    ],
)
def test_p07_a_body_that_breaks_off_is_no_end(pair: Pair, text: bytes) -> None:
    _, body = answered(pair, text, end=True)
    with pytest.raises(Unreachable):
        read_all(body)


HUGE = b"HTTP/1.1 200 OK\r\nContent-Length: " + b"9" * 5000 + b"\r\n\r\n"


@pytest.mark.parametrize("text", [b"", b"HTTP/1.1 200", b"SSH-2.0-x\r\n\r\n", b"HTTP/1.1 abc\r\n\r\n", HUGE])
def test_what_is_not_an_answer(pair: Pair, text: bytes) -> None:
    with pytest.raises(Unreachable, match="test:"):
        answered(pair, text, end=True)


def test_a_head_has_a_limit(pair: Pair) -> None:
    wire, far = pair
    flood = threading.Thread(
        target=lambda: _try(lambda: far.sendall(b"HTTP/1.1 200 OK\r\n" + b"a: b\r\n" * HEAD_LIMIT))
    )
    flood.start()
    with pytest.raises(Unreachable, match="does not end"):
        wire.ask("GET", "/", {})
    wire.close()
    flood.join(5)


def _try(call: Callable[[], object]) -> None:
    try:
        call()
    except OSError:
        return


def test_p16_a_stall_is_noticed(pair: Pair) -> None:
    _, body = answered(pair, b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nabc")
    view = memoryview(bytearray(10))
    assert body.read_into(view) == 3
    with pytest.raises(Unreachable, match="no byte for"):
        body.read_into(view)


@pytest.mark.parametrize(
    "framing", [b"Content-Length: 10\r\n", b"Transfer-Encoding: chunked\r\n", b""], ids=["length", "chunked", "end"]
)
def test_shutting_down_from_another_thread_wakes_the_reader(pair: Pair, framing: bytes) -> None:
    wire, _ = pair
    wire.idle_limit = 60
    _, body = answered(pair, b"HTTP/1.1 200 OK\r\n" + framing + b"\r\n")
    outcome: list[object] = []
    begun = threading.Event()

    def read() -> None:
        begun.set()
        try:
            outcome.append(body.read_into(memoryview(bytearray(10))))
        except Unreachable as error:
            outcome.append(error)

    reader = threading.Thread(target=read)
    reader.start()
    begun.wait(5)
    wire.shutdown()
    reader.join(5)
    assert not reader.is_alive()
    assert isinstance(outcome[0], Unreachable)
