"""Requests through proxies, plain and tunnelled."""

from __future__ import annotations

import base64
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from mx_cli.base.cancel import Stop
from mx_cli.base.errors import AccessDenied, MxError, Unreachable, UsageError
from tests.rig import servers
from tests.rig.faultd import body
from tests.rig.origins import opened


@dataclass
class Tunnel:
    """A proxy that only knows CONNECT."""

    server: socket.socket
    heads: list[str] = field(default_factory=list)

    @property
    def place(self) -> str:
        return f"127.0.0.1:{self.server.getsockname()[1]}"

    def run(self) -> None:
        while True:
            try:
                near, _ = self.server.accept()
            except OSError:
                return
            threading.Thread(target=self.serve, args=(near,), daemon=True).start()

    def serve(self, near: socket.socket) -> None:
        head = b""
        while b"\r\n\r\n" not in head:
            head += near.recv(4096)
        self.heads.append(head.decode())
        host, _, port = head.split()[1].decode().rpartition(":")
        far = socket.create_connection((host, int(port)))
        near.sendall(b"HTTP/1.1 200 Connection established\r\n\r\n")
        for source, sink in ((near, far), (far, near)):
            threading.Thread(target=_copy, args=(source, sink), daemon=True).start()


class Refusing(Tunnel):
    """A proxy that opens no tunnel."""

    def __init__(self, status: int) -> None:
        super().__init__(socket.create_server(("127.0.0.1", 0)))
        self.status = status

    def __enter__(self) -> Refusing:
        threading.Thread(target=self.run, daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self.server.close()

    def serve(self, near: socket.socket) -> None:
        with near:
            self.heads.append(near.recv(65536).decode())
            near.sendall(f"HTTP/1.1 {self.status} No\r\nContent-Length: 0\r\n\r\n".encode())


def _copy(source: socket.socket, sink: socket.socket) -> None:
    try:
        while data := source.recv(65536):
            sink.sendall(data)
        sink.shutdown(socket.SHUT_WR)
    except OSError:
        return


@pytest.fixture
def tunnel() -> Iterator[Tunnel]:
    made = Tunnel(socket.create_server(("127.0.0.1", 0)))
    threading.Thread(target=made.run, daemon=True).start()
    yield made
    made.server.close()


def fetch(url: str, env: dict[str, str], **options: Any) -> bytes:
    origin = opened(url, env, **options)
    return origin.read(origin.listing(None, Stop()).files[0], 1 << 20)


def test_https_goes_through_a_tunnel(
    tunnel: Tunnel, start_faultd: Callable[..., servers.Faultd], tls: servers.Tls
) -> None:
    secure = start_faultd(tls=tls)
    url = secure.file("ok", 1000, "x")
    env = {"HTTPS_PROXY": f"http://user:SECRET@{tunnel.place}"}
    assert fetch(url, env, ca_bundle=tls.ca) == body("x", 1000)
    assert tunnel.heads
    assert base64.b64encode(b"user:SECRET").decode() in tunnel.heads[0]
    assert not any(entry["auth"] for entry in secure.log())
    before = len(tunnel.heads)
    assert fetch(url, {**env, "NO_PROXY": "127.0.0.1"}, ca_bundle=tls.ca) == body("x", 1000)
    assert len(tunnel.heads) == before


def test_http_asks_the_proxy_for_the_whole_url(faultd: servers.Faultd) -> None:
    # faultd looks at the path only, so it can play a proxy for any host.
    assert fetch("http://origin.invalid/f/ok/1000/x", {"http_proxy": faultd.url}) == body("x", 1000)
    assert {entry["path"] for entry in faultd.log()} == {"http://origin.invalid/f/ok/1000/x"}
    assert {entry["host"] for entry in faultd.log()} == {"origin.invalid"}


def test_forms_of_proxies(faultd: servers.Faultd) -> None:
    place = faultd.url.removeprefix("http://")
    assert fetch("http://origin.invalid/f/ok/1000/x", {"HTTP_PROXY": place}) == body("x", 1000)
    with pytest.raises(UsageError, match="socks5") as caught:
        fetch("https://origin.invalid/x", {"https_proxy": "socks5://user:SECRET@127.0.0.1:1"})
    assert "SECRET" not in f"{caught.value} {caught.value.hint}"


def test_p37_a_proxy_that_is_not_there_is_named_without_its_password() -> None:
    port = servers.free_port()
    for url in ("https://origin.invalid/x", "http://origin.invalid/x"):
        with pytest.raises(Unreachable) as caught:
            fetch(url, {"all_proxy": f"http://user:SECRET@127.0.0.1:{port}"}, retry_for="200ms")
        assert f"proxy 127.0.0.1:{port}" in caught.value.what
        assert "SECRET" not in caught.value.what


@pytest.mark.parametrize(
    ("status", "refused"), [(407, AccessDenied), (403, AccessDenied), (404, Unreachable), (503, Unreachable)]
)
def test_a_proxy_that_refuses_a_tunnel(status: int, refused: type[MxError]) -> None:
    """Another try helps where the proxy says that it may; the password is wrong each time."""
    with Refusing(status) as proxy, pytest.raises(refused) as caught:
        fetch("https://origin.invalid/x", {"https_proxy": f"http://us%40er:SE%2FCRET@{proxy.place}"}, retry_for="3s")
    assert f"HTTP {status}" in caught.value.what
    assert "SE/CRET" not in caught.value.what + caught.value.hint
    assert (len(proxy.heads) > 1) == (status == 503)
    assert base64.b64encode(b"us@er:SE/CRET").decode() in proxy.heads[0]


@pytest.mark.parametrize(
    ("no_proxy", "straight"),
    [
        ("127.0.0.0/8", True),
        ("10.0.0.0/8, 127.0.0.1/32", True),
        ("127.0.0.0/33,127.0.0.1", True),
        ("10.0.0.0/8", False),
        ("::/0", False),
        ("*", True),
    ],
)
def test_networks_in_no_proxy(no_proxy: str, straight: bool, faultd: servers.Faultd) -> None:
    """In a cluster the networks of pods and services stand there."""
    env = {"http_proxy": f"http://127.0.0.1:{servers.free_port()}", "no_proxy": no_proxy}
    if straight:
        assert fetch(faultd.file("ok", 1000, "x"), env) == body("x", 1000)
    else:
        with pytest.raises(Unreachable, match="through the proxy"):
            fetch(faultd.file("ok", 1000, "x"), env, retry_for="200ms")
