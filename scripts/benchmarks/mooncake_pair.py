"""Mooncake's transfer engine over TCP between two processes of this host: `PYTHON mooncake_pair.py MIB`.

Prints [seconds, CPU seconds of the reader, CPU seconds of the source] of one read into touched memory. It verifies
nothing, and it listens on all addresses: run it in a network namespace of its own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from typing import Any

os.environ.setdefault("MC_LOG_LEVEL", "ERROR")
os.environ.setdefault("GLOG_minloglevel", "2")


def engine(size: int, fill: int) -> tuple[Any, Any]:
    import numpy as np
    from mooncake.engine import TransferEngine

    made = TransferEngine()
    memory = np.full(size, fill, np.uint8)
    if made.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") or made.register_memory(memory.ctypes.data, size):
        raise SystemExit("Mooncake does not start")
    return made, memory


def source(size: int) -> None:
    made, memory = engine(size, 7)
    print(made.get_rpc_port(), memory.ctypes.data, flush=True)
    while sys.stdin.readline():
        print(time.process_time(), flush=True)
    os._exit(0)


def main() -> None:
    size = int(sys.argv[1]) << 20
    command = [sys.executable, __file__, sys.argv[1], "source"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None
    assert process.stdout is not None
    made, memory = engine(size, 0)
    port, address = map(int, process.stdout.readline().split())

    def cpu() -> float:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write("\n")
        process.stdin.flush()
        return float(process.stdout.readline())

    taken: list[float] = []
    # The first opens the connection.
    for _ in range(2):
        there, here, start = cpu(), time.process_time(), time.perf_counter()
        if made.transfer_sync_read(f"127.0.0.1:{port}", memory.ctypes.data, address, size):
            raise SystemExit("the read failed")
        taken = [time.perf_counter() - start, time.process_time() - here, cpu() - there]
    if not (memory == 7).all():
        raise SystemExit("wrong bytes")
    print(json.dumps(taken), flush=True)
    process.kill()
    os._exit(0)


if __name__ == "__main__":
    source(int(sys.argv[1]) << 20) if sys.argv[2:] == ["source"] else main()
