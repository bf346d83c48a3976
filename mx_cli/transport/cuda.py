"""GPU memory as a transport sees it: blocks of the CUDA driver, a context, and what cannot be registered."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

from mx_cli.base.errors import MissingCapability, TransportFailed

REMEDY = "unset expandable_segments in PYTORCH_CUDA_ALLOC_CONF, or load the weights inside a torch.cuda.MemPool"
_INVALID_CONTEXT = 201


class Allocation(NamedTuple):
    """One block of cudaMalloc: the unit to register. Neighbouring blocks are never one region."""

    address: int
    length: int


@functools.cache
def _driver() -> ctypes.CDLL:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise MissingCapability(
            f"the CUDA driver is missing ({error})", hint="run on a host with an NVIDIA GPU"
        ) from None


def allocation_of(address: int) -> Allocation:
    """The block that holds `address`, a pointer into GPU memory. Raises MissingCapability, TransportFailed."""
    base, length = ctypes.c_uint64(), ctypes.c_size_t()
    driver = _driver()
    where = ctypes.byref(base), ctypes.byref(length), ctypes.c_uint64(address)
    status = driver.cuMemGetAddressRange_v2(*where)
    if status == _INVALID_CONTEXT:
        make_context()
        status = driver.cuMemGetAddressRange_v2(*where)
    if status:
        raise TransportFailed(f"no GPU memory at {address:#x} (CUDA driver: {_name(driver, status)})")
    return Allocation(base.value, length.value)


def _name(driver: ctypes.CDLL, status: int) -> str:
    name = ctypes.c_char_p()
    driver.cuGetErrorName(ctypes.c_int(status), ctypes.byref(name))
    return (name.value or b"").decode() or str(status)


def allocations_of(addresses: Iterable[int]) -> list[Allocation]:
    """The blocks that hold these pointers, each once, by address. Raises MissingCapability, TransportFailed."""
    found: list[Allocation] = []
    for address in sorted(addresses):
        if not found or address >= found[-1].address + found[-1].length:
            found.append(allocation_of(address))
    return found


def refuse_virtual(tensors: Iterable[Any]) -> None:
    """Raises MissingCapability when one of these CUDA tensors lies in expandable segments.

    UCX registers such memory without complaint, and then reads it at a hundredth of the speed or crashes over it.
    """
    import torch

    cuda: Any = torch.cuda
    segments = [
        (segment["address"], segment["address"] + segment["total_size"])
        for segment in cuda.memory_snapshot()
        if segment.get("is_expandable")
    ]
    for tensor in tensors:
        if any(first <= tensor.data_ptr() < end for first, end in segments):
            raise MissingCapability(
                f"GPU memory in expandable segments cannot be read by peers ({tensor.device}: {tensor.nbytes} bytes)",
                hint=REMEDY,
            )


def make_context(device: int | None = None) -> None:
    """Give this thread a context on a GPU (None = torch's current one). Raises MissingCapability."""
    try:
        import torch
    except ImportError:
        raise MissingCapability(
            "the package torch is missing (GPU memory)", hint="pip install 'mx-cli[peer]'"
        ) from None
    if not torch.cuda.is_available():
        raise MissingCapability("no CUDA device (torch.cuda.is_available() is false)", hint="mx doctor says why")
    torch.cuda.synchronize(device)


def using(device: int) -> AbstractContextManager[Any]:
    """A block in which this thread has a context on that GPU; UCX works in the context of the thread that calls it."""
    import torch

    return torch.cuda.device(device)


def synchronize(device: int) -> None:
    """Blocks until what came from outside is visible to kernels: a READ that is done is not yet."""
    import torch

    torch.cuda.synchronize(device)
