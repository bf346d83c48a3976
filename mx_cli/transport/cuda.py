"""GPU memory as a transport sees it: blocks of the CUDA driver, a context, and what cannot be registered."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterable, Mapping
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


def device_count() -> int:
    """How many GPUs the driver has for this process; 0 without a driver."""
    try:
        driver, count = _driver(), ctypes.c_int()
    except MissingCapability:
        return 0
    return 0 if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)) else count.value


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
    return blocks_of((address, 1) for address in addresses)


def blocks_of(regions: Iterable[tuple[int, int]]) -> list[Allocation]:
    """The blocks that hold these regions (address, length), each once. Raises MissingCapability, TransportFailed."""
    found: list[Allocation] = []
    for address, length in sorted(regions):
        end = found[-1].address + found[-1].length if found else 0
        while end < address + length:
            found.append(allocation_of(max(end, address)))
            end = found[-1].address + found[-1].length
    return found


def refuse_virtual(tensors: Mapping[str, Any]) -> None:
    """Raises MissingCapability that names the first of these CUDA tensors in expandable segments.

    UCX registers such memory without complaint, and then reads it at a hundredth of the speed or crashes over it.
    """
    _refuse({tensor.data_ptr(): name for name, tensor in tensors.items()})


def refuse_virtual_regions(addresses: Iterable[int]) -> None:
    """The same by addresses."""
    _refuse({address: hex(address) for address in addresses})


def _refuse(names: Mapping[int, str]) -> None:
    found = _in_expandable_segments(names)
    if found:
        raise MissingCapability(
            f"GPU memory in expandable segments cannot be read by peers ({names[found[0]]})", hint=REMEDY
        )


def _in_expandable_segments(addresses: Iterable[int]) -> list[int]:
    """Those of the addresses that lie in memory which torch has mapped piece by piece."""
    import torch

    cuda: Any = torch.cuda
    segments = [
        (segment["address"], segment["address"] + segment["total_size"])
        for segment in cuda.memory_snapshot()
        if segment.get("is_expandable")
    ]
    return [address for address in addresses if any(first <= address < end for first, end in segments)]


def make_context(device: int | None = None) -> None:
    """Give this thread a context on a GPU (None = torch's current one). Raises MissingCapability."""
    try:
        import torch
    except (ImportError, OSError) as error:
        raise MissingCapability.package("torch", error, "pip install 'mx-cli[peer]'") from None
    if not torch.cuda.is_available():
        raise MissingCapability(
            "no CUDA device (torch.cuda.is_available() is false)",
            hint="nvidia-smi shows the GPUs of this host; without one use --device cpu",
        )
    torch.cuda.synchronize(device)


def using(device: int) -> AbstractContextManager[Any]:
    """A block in which this thread has a context on that GPU; UCX works in the context of the thread that calls it."""
    import torch

    return torch.cuda.device(device)


def synchronize(device: int) -> None:
    """Blocks until what came from outside is visible to kernels: a READ that is done is not yet."""
    import torch

    torch.cuda.synchronize(device)
