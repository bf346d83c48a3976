"""Weights in a GPU's memory. torch is imported inside: who has no GPU does not pay for it."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any

from mx_cli.base.errors import MissingCapability, NoSpace
from mx_cli.engine.buffers import Pool
from mx_cli.model.holding import Extent
from mx_cli.transport import cuda

_streams = threading.local()


def require(index: int) -> Any:
    """torch, when GPU `index` is there. Raises MissingCapability."""
    try:
        import torch
    except (ImportError, OSError) as error:
        raise MissingCapability.package("torch", error, "pip install 'mx-cli[peer]'") from None
    if not torch.cuda.is_available() or index >= torch.cuda.device_count():
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        raise MissingCapability(f"no such GPU (--device cuda:{index}: torch sees {count})", hint="cpu is host memory")
    return torch


def current() -> int:
    """The number of the GPU that torch uses when nobody says which; 0 where there is none."""
    import torch

    return int(torch.cuda.current_device()) if torch.cuda.is_available() else 0


def allocate(index: int, size: int) -> Any:
    """One block of a GPU's memory as a tensor of bytes. Raises MissingCapability, NoSpace.

    Memory of expandable segments cannot be registered: the block is then refused with the remedy.
    """
    torch = require(index)
    try:
        block = torch.empty(max(size, 1), dtype=torch.uint8, device=f"cuda:{index}")
    except torch.cuda.OutOfMemoryError as error:
        raise NoSpace(f"no GPU memory for the weights (cuda:{index}: {size} bytes)", hint=str(error)[:200]) from None
    cuda.refuse_virtual({"the weights": block})
    return block


class GpuPool:
    """One run of a GPU's memory. See `sinks.ring.Run`."""

    def __init__(self, index: int, size: int) -> None:
        """Raises MissingCapability, NoSpace."""
        self.size = size
        self.view = allocate(index, size)
        self.address = int(self.view.data_ptr())


def copy_in(block: Any, offset: int, view: memoryview) -> None:
    """Host bytes into a block, at `offset`. Blocks until they are there."""
    import torch

    block[offset : offset + len(view)].copy_(torch.frombuffer(view, dtype=torch.uint8))
    torch.cuda.synchronize(block.device)


def finish(index: int) -> None:
    """Blocks until what this thread has asked of GPU `index` is done."""
    import torch

    torch.cuda.current_stream(index).synchronize()


class _Bytes:
    """GPU memory by its address, as the CUDA array interface (version 3) describes it."""

    def __init__(self, address: int, length: int) -> None:
        self.__cuda_array_interface__ = {"shape": (length,), "typestr": "|u1", "data": (address, False), "version": 3}


def copy_out(index: int) -> Callable[[Extent, memoryview], None]:
    """A function that copies an extent of GPU `index` to host memory. Blocks until it is there."""
    torch = require(index)

    def copy(extent: Extent, view: memoryview) -> None:
        source = torch.as_tensor(_Bytes(extent.address, extent.length), device=f"cuda:{index}")
        torch.frombuffer(view, dtype=torch.uint8).copy_(source)

    return copy


def copy_to(index: int, address: int, view: memoryview) -> None:
    """Host bytes to an address of GPU `index`. Blocks until they are there."""
    torch = require(index)
    _copy(torch, index, _at(torch, index, address, len(view)), torch.frombuffer(view, dtype=torch.uint8))


def copy_within(index: int, source: int, target: int, length: int) -> None:
    """Bytes of GPU `index` to another place of it. Blocks until they are there."""
    torch = require(index)
    _copy(torch, index, _at(torch, index, target, length), _at(torch, index, source, length))


def bytes_at(index: int, address: int, length: int) -> bytes:
    """What stands at an address of GPU `index`. Blocks."""
    torch = require(index)
    return bytes(_at(torch, index, address, length).cpu().numpy())


def _at(torch: Any, index: int, address: int, length: int) -> Any:
    return torch.as_tensor(_Bytes(address, length), device=f"cuda:{index}")


def _copy(torch: Any, index: int, target: Any, source: Any) -> None:
    """In a stream of this thread's own: it waits for no copies but its own, and those of other threads go on meanwhile.

    What was under way before, such as the first values of a module, comes first.
    """
    stream = getattr(_streams, f"cuda:{index}", None)
    if stream is None:
        torch.cuda.synchronize(index)
        stream = torch.cuda.Stream(index)
        setattr(_streams, f"cuda:{index}", stream)
    stream.wait_stream(torch.cuda.default_stream(index))
    with torch.cuda.stream(stream):
        target.copy_(source, non_blocking=True)
    stream.synchronize()


def pin(pool: Pool) -> str:
    """Lock host memory for as long as it lives: copies from it to a GPU need no other copy before. Why not, if it cannot be."""
    torch = require(0)
    status = int(torch.cuda.cudart().cudaHostRegister(pool.address, pool.size, 0))
    if status:
        return f"host memory is not locked (CUDA error {status} for {pool.size} bytes)"
    weakref.finalize(pool, torch.cuda.cudart().cudaHostUnregister, pool.address).atexit = False
    return ""
