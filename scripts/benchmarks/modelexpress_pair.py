"""ModelExpress' own Python client between two processes of this host: `PYTHON modelexpress_pair.py MIB [COUNT]`.

Prints [seconds, CPU seconds of the reader, CPU seconds of the source] of `receive_from_source` into touched memory. It
verifies nothing. The one shim is a host-memory backend, handed in through the argument that is there for it.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import time
from dataclasses import dataclass
from typing import Any

COUNT = 64


def backend() -> Any:
    import torch

    torch.set_num_threads(1)

    @dataclass(frozen=True)
    class Host:
        name: str = "host"
        torch_device_type: str = "cpu"
        nixl_mem_type: str = "DRAM"

        def set_device(self, device_id: int) -> None: ...
        def synchronize(self, device_id: int | None = None) -> None: ...
        def empty_cache(self) -> None: ...

        def current_device(self) -> int:
            return 0

        def torch_device(self, device_id: int) -> Any:
            return torch.device("cpu")

        def is_accel_tensor(self, tensor: Any) -> bool:
            return bool(tensor.device.type == "cpu")

        def supports_rdma_p2p(self) -> bool:
            return True

        def supports_pool_reg(self) -> bool:
            return False

        def supports_vmm(self) -> bool:
            return False

        def supports_gds(self) -> bool:
            return False

    return Host()


def tensors(mib: int, count: int, fill: int) -> dict[str, Any]:
    import torch

    size = (mib << 20) // count
    return {f"layer.{i}.weight": torch.full((size,), fill, dtype=torch.uint8) for i in range(count)}


def source(mib: int, count: int, pipe: Any) -> None:
    from modelexpress.nixl_transfer import NixlTransferManager

    manager = NixlTransferManager("source", 0, None, backend())
    manager.initialize()
    held = tensors(mib, count, 7)
    blob = manager.register_tensors(held)
    pipe.send((blob, [(d.name, d.addr, d.size, d.device_id, d.dtype) for d in manager.tensor_descriptors]))
    while pipe.recv() == "cpu":
        pipe.send(time.process_time())
    os._exit(0)


def main() -> None:
    mib, count = int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else COUNT
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if "UCX_TLS" in os.environ:
        os.environ["NIXL_UCX_TLS"] = os.environ["UCX_TLS"]
    multiprocessing.set_start_method("spawn")
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.Process(target=source, args=(mib, count, theirs), daemon=True)
    process.start()
    from modelexpress.nixl_transfer import NixlTransferManager
    from modelexpress.types import TensorDescriptor

    blob, descriptors = ours.recv()
    manager = NixlTransferManager("reader", 0, None, backend())
    manager.initialize()
    held = tensors(mib, count, 0)
    manager.register_tensors(held)
    wanted = [TensorDescriptor(*one) for one in descriptors]
    peer = manager.add_remote_agent(blob)
    taken: list[float] = []
    # The first opens the connection.
    for _ in range(2):
        there, here, start = _cpu(ours), time.process_time(), time.perf_counter()
        manager.receive_from_source(b"", wanted, timeout_seconds=60, remote_agent_name=peer)
        taken = [time.perf_counter() - start, time.process_time() - here, _cpu(ours) - there]
    if not all(bool((tensor == 7).all()) for tensor in held.values()):
        raise SystemExit("wrong bytes")
    print(json.dumps(taken), flush=True)
    process.kill()
    os._exit(0)


def _cpu(pipe: Any) -> float:
    pipe.send("cpu")
    return float(pipe.recv())


if __name__ == "__main__":
    main()
