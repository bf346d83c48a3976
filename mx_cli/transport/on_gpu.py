"""Weights in a GPU's memory. torch is imported inside: who has no GPU does not pay for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mx_cli.base.errors import MissingCapability, NoSpace
from mx_cli.model.holding import Extent
from mx_cli.transport import cuda


def require(index: int) -> Any:
    """torch, when GPU `index` is there. Raises MissingCapability."""
    try:
        import torch
    except ImportError:
        raise MissingCapability(
            "the package torch is missing (--device cuda)", hint="pip install 'mx-cli[peer]'"
        ) from None
    if not torch.cuda.is_available() or index >= torch.cuda.device_count():
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        raise MissingCapability(
            f"no such GPU (--device cuda:{index}: torch sees {count})", hint="--device cpu serves from host memory"
        )
    return torch


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


def copy_in(block: Any, offset: int, view: memoryview) -> None:
    """Host bytes into a block, at `offset`. Blocks until they are there."""
    import torch

    block[offset : offset + len(view)].copy_(torch.frombuffer(view, dtype=torch.uint8))
    torch.cuda.synchronize(block.device)


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
    target = torch.as_tensor(_Bytes(address, len(view)), device=f"cuda:{index}")
    target.copy_(torch.frombuffer(view, dtype=torch.uint8))
    torch.cuda.synchronize(index)


def pin(address: int, length: int) -> None:
    """Lock host memory, so that copies to a GPU overlap with what follows. Raises NoSpace."""
    torch = require(0)
    status = torch.cuda.cudart().cudaHostRegister(address, length, 0)
    if int(status):
        raise NoSpace(f"cannot lock {length} bytes of host memory (CUDA error {int(status)})", hint="ulimit -l")
