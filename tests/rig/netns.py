"""Two hosts without a shared network: namespaces with a veth pair between them, and the subnets that docker makes on both.

The names carry the pid, and are removed at the end. Both share the kernel, so memory could still be read directly: give
UCX_TLS=tcp, and `Namespace.apart` for a process that must look like another host's.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass

_numbers = itertools.count(1)


@dataclass(frozen=True)
class Namespace:
    """`prefix` goes before a command; `address` is this side of the pair, on the interface `device`."""

    name: str
    address: str
    device: str

    @property
    def prefix(self) -> tuple[str, ...]:
        return ("ip", "netns", "exec", self.name)

    @property
    def apart(self) -> tuple[str, ...]:
        """The same in a PID namespace of its own: neither side can read the other's memory."""
        return (*self.prefix, "unshare", "--pid", "--fork", "--kill-child", "--mount-proc")


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=20)


@contextlib.contextmanager
def pair() -> Iterator[tuple[Namespace, Namespace]]:
    """10.77.0.1 and 10.77.0.2. Each side also has 172.17.0.1/16 on a bridge docker0, and 10.9.0.1/24 on lo: duplicates."""
    number = f"{os.getpid()}-{next(_numbers)}"
    sides = tuple(
        Namespace(f"mxt{number}{side}", f"10.77.0.{index}", f"v{side}") for index, side in ((1, "a"), (2, "b"))
    )
    one, other = sides
    try:
        for side in sides:
            _ip("netns", "add", side.name)
        _ip(
            "link",
            "add",
            one.device,
            "netns",
            one.name,
            "type",
            "veth",
            "peer",
            "name",
            other.device,
            "netns",
            other.name,
        )
        for side in sides:
            _ip("-n", side.name, "link", "set", "lo", "up")
            _ip("-n", side.name, "addr", "add", "10.9.0.1/24", "dev", "lo")
            _ip("-n", side.name, "link", "add", "docker0", "type", "bridge")
            _ip("-n", side.name, "addr", "add", "172.17.0.1/16", "dev", "docker0")
            _ip("-n", side.name, "addr", "add", f"{side.address}/24", "dev", side.device)
            for device in ("docker0", side.device):
                _ip("-n", side.name, "link", "set", device, "up")
        yield one, other
    finally:
        for side in sides:
            subprocess.run(["ip", "netns", "del", side.name], capture_output=True, timeout=20)
