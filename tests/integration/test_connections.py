"""Connections to origins: used again, and to names with several addresses."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from mx_cli.base.cancel import Stop
from tests.rig import servers
from tests.rig.origins import opened
from tests.rig.scripted import Asked, scripted
from tests.support import MIB, Mx, capability


@pytest.mark.parametrize("host", ["127.0.0.1", pytest.param("::1", marks=capability("ipv6"))])
@pytest.mark.parametrize("secure", [False, True])
def test_a_connection_is_used_again(
    mx: Mx, start_faultd: Callable[..., servers.Faultd], tls: servers.Tls, host: str, secure: bool
) -> None:
    server = start_faultd(host=host, tls=tls if secure else None)
    url = server.file("ok", 3 * MIB, "x")
    mx("prefetch", url, "--max-connections", "1", env={"MX_CA_BUNDLE": tls.ca, "MX_RANGE_SIZE": "1MiB"}).ok()
    log = server.log()
    assert len(log) == 4
    assert len({entry["conn"] for entry in log}) == 1


@contextlib.contextmanager
def silent(port: int) -> Iterator[str]:
    """An address at which connections are neither taken nor refused: nobody accepts, and the queue is full."""
    with contextlib.ExitStack() as held:
        listener = held.enter_context(socket.socket())
        listener.bind(("127.0.0.2", port))
        listener.listen(0)
        for _ in range(2):
            waiting = held.enter_context(socket.socket())
            waiting.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                waiting.connect(("127.0.0.2", port))
        yield "127.0.0.2"


def test_an_address_that_swallows_packets_is_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name of IPv6 and IPv4 where only the second one leads anywhere is as fast as one of the second from then on."""
    looked_up: list[str] = []
    real = socket.getaddrinfo

    def answer(asked: Asked) -> None:
        asked.serve(b"x" * 1000)
        asked.hang_up()

    with scripted(answer) as server, silent(port := int(server.url.rpartition(":")[2])) as dead:

        def addresses(host: str, *rest: Any, **more: Any) -> Any:
            if host != "two.test":
                return real(host, *rest, **more)
            looked_up.append(host)
            return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (ip, port)) for ip in (dead, "127.0.0.1")]

        monkeypatch.setattr(socket, "getaddrinfo", addresses)
        origin = opened(f"http://two.test:{port}/x.bin", {})
        listing = origin.listing(None, Stop())
        for _ in range(3):
            assert len(origin.read(listing.files[0], 2000)) == 1000
        origin.close()
    assert len(looked_up) == 1
