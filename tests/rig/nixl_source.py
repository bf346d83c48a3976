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
    """.name .blob .digest .address .size of the memory, all of whose bytes are `fill`; `secret` was never registered.

    `network`: the fields of transport.nixl.Network. `device`: a GPU's number. `prefix` goes before the command.
    """

    def __init__(
        self,
        name: str,
        *,
        fill: int = 7,
        size: int = 4 * MIB,
        network: dict[str, Any] | None = None,
        device: int = -1,
        prefix: tuple[str, ...] = (),
    ) -> None:
        wish = {"name": name, "fill": fill, "size": size, "network": network or {}, "device": device}
        self.process = subprocess.Popen(
            [*prefix, sys.executable, "-m", "tests.rig.nixl_source", json.dumps(wish)],
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

    from mx_cli.transport import cuda
    from mx_cli.transport.nixl import Agent, Network

    wish = json.loads(sys.argv[1])
    secret = np.full(MIB, 0xEE, np.uint8)
    device = wish["device"]
    agent = Agent(wish["name"], Network(**wish["network"]), gpu=device >= 0)
    memory: Any
    if device >= 0:
        import torch

        memory = torch.full((wish["size"],), wish["fill"], dtype=torch.uint8, device=device)
        torch.cuda.synchronize()
        address = memory.data_ptr()
        region = cuda.allocation_of(address)
    else:
        memory = np.full(wish["size"], wish["fill"], np.uint8)
        address = memory.ctypes.data
        region = cuda.Allocation(address, memory.nbytes)
    agent.register([(region.address, region.length, device)])
    said = {"blob": agent.blob().hex(), "address": address, "secret": secret.ctypes.data}
    print(json.dumps(said), flush=True)
    sys.stdin.read()
    agent.destroy()


if __name__ == "__main__":
    main()
