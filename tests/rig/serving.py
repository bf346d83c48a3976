"""Peers as operators run them: `mx serve` and `mx pull` as processes, on hosts that share discovery and a secret."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.rig import servers
from tests.support import Mx, Result, Running

METRIC = re.compile(r"^mxcli_(\w+) (\d+)$", re.MULTILINE)


@dataclass
class Served:
    """A peer that is ready: a running `mx serve`, or `mx pull --then-serve` once it serves."""

    running: Running
    address: str
    ready: Mapping[str, Any]

    @property
    def content(self) -> str:
        """Its content identity."""
        return str(self.ready["identity"]["content"])

    @property
    def generation(self) -> str:
        return str(self.ready["generation"])

    def get(self, path: str) -> tuple[int, str]:
        """(status, text) of what anybody may ask."""
        status, _, body = servers.request("GET", f"https://{self.address}{path}")
        return status, body.decode()

    def metrics(self) -> dict[str, int]:
        """Names without `mxcli_`, and only those without labels."""
        return {name: int(value) for name, value in METRIC.findall(self.get("/metrics")[1])}

    def stop(self) -> Result:
        self.running.send(signal.SIGTERM)
        return self.running.wait()


class Hosts:
    """Commands on several hosts: each host has a cache, all share one discovery directory and the user's secret."""

    def __init__(self, mx: Mx, place: Path) -> None:
        self.mx, self.place = mx, place
        self.directory = place / "peers"
        self.runtime = place / "run"
        self.runtime.mkdir(mode=0o700)

    def cache(self, host: str) -> Path:
        return self.place / f"cache-{host}"

    def env(self, host: str, more: Mapping[str, str | Path] | None = None) -> dict[str, str | Path]:
        return {
            "MX_CACHE_DIR": self.cache(host),
            "XDG_RUNTIME_DIR": self.runtime,
            "MX_DISCOVERY": f"dir:{self.directory}",
            "MX_NODE_NAME": host,
            # Readers that a test holds up are not to give up before it lets them go on.
            "MX_PEER_STALL_TIMEOUT": "60s",
            **(more or {}),
        }

    def start(
        self,
        *args: str | Path,
        host: str = "a",
        env: Mapping[str, str | Path] | None = None,
        prefix: tuple[str, ...] = (),
    ) -> Running:
        return self.mx.start(*args, env=self.env(host, env), prefix=prefix)

    def __call__(
        self,
        *args: str | Path,
        host: str = "a",
        env: Mapping[str, str | Path] | None = None,
        prefix: tuple[str, ...] = (),
        timeout: float = 60,
    ) -> Result:
        return self.start(*args, host=host, env=env, prefix=prefix).wait(timeout)

    def serve(
        self,
        model: str | Path,
        *args: str | Path,
        host: str = "a",
        env: Mapping[str, str | Path] | None = None,
        prefix: tuple[str, ...] = (),
    ) -> Served:
        """Starts `mx serve MODEL ARGS…` and waits until it is ready."""
        running = self.start("serve", model, *args, host=host, env=env, prefix=prefix)
        ready = json.loads(running.wait_out(r"^\{.*\}$", 60).group())
        return Served(running, ready["address"], ready)

    def then_served(self, running: Running) -> Served:
        """Waits until a `pull --then-serve --json` serves."""
        result = json.loads(running.wait_out(r"^\{.*\}$", 60).group())
        address = running.wait_err(r"^serving at (\S+) until stopped").group(1)
        return Served(running, address, {"identity": {"content": result["identity"]}, **result})

    def records(self) -> list[dict[str, Any]]:
        """What the discovery directory holds now."""
        found = []
        for path in self.directory.glob("*.json"):
            with contextlib.suppress(FileNotFoundError):
                found.append(json.loads(path.read_bytes()))
        return found


class Slow:
    """A relay to a peer that lets `budget` bytes through and then holds its breath until `go()`: no clock is asked.

    The bytes are TLS: a relay sees and changes nothing. Answers of the control channel are small, and always pass, so
    grants stay alive.
    """

    SMALL = 8 << 10

    def __init__(self, target: str, budget: int, port: int = 0) -> None:
        host, _, target_port = target.rpartition(":")
        self._target = host, int(target_port)
        self._budget = budget
        self._changed = threading.Condition()
        self._closed = False
        self.passed = 0
        self._listener = socket.create_server(("127.0.0.1", port))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._sockets = [self._listener]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                try:
                    far = socket.create_connection(self._target)
                except OSError:
                    near.close()
                    continue
                self._sockets += [near, far]
                threading.Thread(target=self._copy, args=(near, far, False), daemon=True).start()
                threading.Thread(target=self._copy, args=(far, near, True), daemon=True).start()

    def _copy(self, one: socket.socket, other: socket.socket, counted: bool) -> None:
        with contextlib.suppress(OSError):
            while data := one.recv(64 << 10):
                if counted:
                    self._count(len(data))
                other.sendall(data)
        for sock in (one, other):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def _count(self, count: int) -> None:
        with self._changed:
            if count > self.SMALL:
                self._changed.wait_for(lambda: self.passed < self._budget or self._closed)
                if self.passed >= self._budget:
                    raise OSError("closed while it held its breath")
            self.passed += count
            self._changed.notify_all()

    def wait_full(self, timeout: float = 30) -> None:
        """Blocks until the budget is spent."""
        with self._changed:
            assert self._changed.wait_for(lambda: self.passed >= self._budget, timeout), self.passed

    def go(self) -> None:
        """No limit from now on."""
        with self._changed:
            self._budget = 1 << 62
            self._changed.notify_all()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        for sock in list(self._sockets):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()


@contextlib.contextmanager
def slow(target: str, budget: int, port: int = 0) -> Iterator[Slow]:
    relay = Slow(target, budget, port)
    try:
        yield relay
    finally:
        relay.close()


def eventually(what: Callable[[], object], timeout: float = 20) -> None:
    """Blocks until `what` holds: for what another process does and cannot tell."""
    end = time.monotonic() + timeout
    while not what():
        assert time.monotonic() < end, "it never held"
        time.sleep(0.02)
