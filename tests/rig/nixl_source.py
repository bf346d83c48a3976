"""A process that offers its memory over NIXL: `python -m tests.rig.nixl_source '{"name": "s-1", …}'`.

It says in one line of JSON where its memory lies, and ends with its stdin. `Source` starts it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

MIB = 1 << 20


class Source:
    """.name .blob .digest .address .size of the memory, all of whose bytes are `fill`; `secret` was never registered."""

    def __init__(self, name: str, *, fill: int = 7, size: int = 4 * MIB, network: dict[str, Any] | None = None) -> None:
        wish = {"name": name, "fill": fill, "size": size, "network": network or {}}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.rig.nixl_source", json.dumps(wish)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[2],
        )
        assert self.process.stdout is not None
        said = json.loads(self.process.stdout.readline())
        self.name, self.size, self.pid = name, size, self.process.pid
        self.blob = bytes.fromhex(said["blob"])
        self.digest = hashlib.sha256(self.blob).hexdigest()
        self.address, self.secret = said["address"], said["secret"]

    def freeze(self) -> None:
        """SIGSTOP; returns when it is stopped."""
        os.kill(self.pid, signal.SIGSTOP)
        while Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
            time.sleep(0.001)

    def thaw(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def end(self) -> int:
        """Its exit code after an orderly end."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        return self.process.wait(30)


@contextlib.contextmanager
def source(name: str, **options: Any) -> Iterator[Source]:
    made = Source(name, **options)
    try:
        yield made
    finally:
        made.kill()


def main() -> None:
    import numpy as np

    from mx_cli.transport.nixl import Agent, Network

    wish = json.loads(sys.argv[1])
    memory = np.full(wish["size"], wish["fill"], np.uint8)
    secret = np.full(MIB, 0xEE, np.uint8)
    agent = Agent(wish["name"], Network(**wish["network"]))
    agent.register([(memory.ctypes.data, memory.nbytes, -1)])
    said = {"blob": agent.blob().hex(), "address": memory.ctypes.data, "secret": secret.ctypes.data}
    print(json.dumps(said), flush=True)
    sys.stdin.read()
    agent.destroy()


if __name__ == "__main__":
    main()
