"""Tensors of torch as runs of memory: what a module or a mapping holds, and tensors made of received bytes.

torch is imported inside the functions: only who has tensors pays for it.
"""

from __future__ import annotations

import bisect
import ctypes
import functools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from mx_cli.base import memory
from mx_cli.base.errors import MissingCapability, UsageError
from mx_cli.model.header import BITS
from mx_cli.model.holding import HOST, size_of
from mx_cli.model.synthetic import METADATA

_DTYPES = {
    "bool": "BOOL", "uint8": "U8", "int8": "I8", "int16": "I16", "uint16": "U16", "int32": "I32", "uint32": "U32",
    "int64": "I64", "uint64": "U64", "float16": "F16", "bfloat16": "BF16", "float32": "F32", "float64": "F64",
    "complex64": "C64", "float8_e5m2": "F8_E5M2", "float8_e4m3fn": "F8_E4M3", "float8_e8m0fnu": "F8_E8M0",
    "float8_e5m2fnuz": "F8_E5M2FNUZ", "float8_e4m3fnuz": "F8_E4M3FNUZ", "float4_e2m1fn_x2": "F4",
}  # fmt: skip
"""torch's names -> those of safetensors. An element of float4_e2m1fn_x2 is two of F4."""

PARAMETER, BUFFER = "parameter", "buffer"


def require_torch() -> None:
    """Raises MissingCapability without torch, UsageError where its tensors have no bytes."""
    try:
        import torch
    except (ImportError, OSError) as error:
        raise MissingCapability.package("torch", error, "pip install 'mx-cli[peer]'") from None
    made = type(torch.empty(0, device="cpu"))
    if made is not torch.Tensor:
        raise UsageError(
            f"torch makes {made.__name__}s here, which have no bytes", hint="leave FakeTensorMode for this"
        )


@dataclass(frozen=True, slots=True)
class Described:
    """A tensor as bytes: `address` and `size` of its contiguous run of memory on `device` (HOST or a GPU's number).

    `tensor` keeps the memory alive. `scattered`: the tensor itself is no run of memory, and the run is a copy.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    kind: str
    device: int
    address: int
    size: int
    tensor: Any
    scattered: bool = False

    @property
    def memory(self) -> object:
        """Equal for tensors that are the same elements of the same memory."""
        return self.tensor.data_ptr(), self.tensor.stride(), self.shape, self.dtype, self.device


def named_tensors(
    source: Any, *, all_buffers: bool = False, path: str = "", within: tuple[int, ...] = ()
) -> Iterator[tuple[str, str, Any]]:
    """(name, kind, tensor) of a module's parameters and persistent buffers, or of a mapping; tied names each.

    A mapping may hold tensors, modules and mappings: names are joined by dots. `all_buffers`: also buffers that a state
    dict leaves out. `path` comes before each name; `within`: the mappings that this one is in. Raises UsageError for
    anything else.
    """
    import torch

    if isinstance(source, torch.nn.Module):
        for name, parameter in source.named_parameters(remove_duplicate=False):
            yield path + name, PARAMETER, _ready(path + name, parameter)
        hidden = set() if all_buffers else _not_persistent(source)
        for name, buffer in source.named_buffers(remove_duplicate=False):
            if name not in hidden:
                yield path + name, BUFFER, _ready(path + name, buffer)
        return
    if not isinstance(source, Mapping):
        raise UsageError(f"not a module or a mapping of tensors: {type(source).__name__}")
    for key, value in source.items():
        name = f"{path}{key}"
        if isinstance(value, (torch.nn.Module, Mapping)):
            if id(value) in (id(source), *within):
                raise UsageError(f"{name!r} is a mapping that it is in itself")
            yield from named_tensors(value, all_buffers=all_buffers, path=f"{name}.", within=(id(source), *within))
        elif isinstance(value, torch.Tensor):
            _refuse_wrapper(name, value)
            yield name, PARAMETER, value.detach()
        else:
            raise UsageError(f"not a tensor: {name!r} is a {type(value).__name__}")


def _ready(name: str, tensor: Any) -> Any:
    """What a parameter or a buffer holds. Raises UsageError for one that a lazy module has not made yet."""
    import torch

    if torch.nn.parameter.is_lazy(tensor):
        raise UsageError(f"{name!r} is not initialised: its module is lazy", hint="run the module once")
    _refuse_wrapper(name, tensor)
    return tensor.data


def _refuse_wrapper(name: str, tensor: Any) -> None:
    """Raises UsageError for what looks like a tensor and has only others: sharded (DTensor), quantised or fake ones."""
    import torch

    if type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__ and not _pointer(name, tensor):
        raise UsageError(
            f"{name!r} is a {type(tensor).__name__}, which has no memory of its own",
            hint="plain tensors can be moved: of a DTensor those are to_local() and full_tensor()",
        )


def _not_persistent(module: Any) -> set[str]:
    found = set()
    for path, child in module.named_modules(remove_duplicate=False):
        for name in child._non_persistent_buffers_set:
            found.add(f"{path}.{name}" if path else name)
    return found


def describe(source: Any, *, all_buffers: bool = False, copy: bool = True) -> list[Described]:
    """Every tensor of a module or a mapping. Those whose elements are scattered are copied when `copy`, else left so.

    Of a tensor that is left so, `address` is 0: bytes for it need a place of their own. Raises UsageError naming what has
    no bytes of its own (meta, sparse, sharded), a dtype that safetensors does not know, or a name that cannot be used.
    """
    found: dict[str, Described] = {}
    for name, kind, tensor in named_tensors(source, all_buffers=all_buffers):
        _check_name(name, found)
        found[name] = _described(name, kind, tensor, copy)
    return list(found.values())


def reach(tensor: Any) -> int:
    """Bytes from the tensor's first element to the end of its last, with what is between them."""
    if not tensor.numel():
        return 0
    last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return int((last + 1) * tensor.element_size())


def refuse_read_only(described: Iterable[Described]) -> None:
    """Raises UsageError for tensors in memory that may not be written to: who writes there is ended by the kernel."""
    forbidden = memory.read_only()
    for one in described:
        start, size = one.tensor.data_ptr(), reach(one.tensor)
        if one.device != HOST or not size:
            continue
        after = bisect.bisect_left(forbidden, (start + size, 0))
        if after and forbidden[after - 1][1] > start:
            raise UsageError(
                f"{one.name!r} lies in memory that cannot be written to (a file that is mapped read-only)",
                hint="make a copy of it: clone()",
            )


def _check_name(name: str, known: Mapping[str, Described]) -> None:
    if name in known:
        raise UsageError(f"two tensors have the name {name!r}")
    if name == METADATA:
        raise UsageError(f"no tensor can have the name {name}: safetensors keeps it for other things")
    if not name.isascii() and any("\ud800" <= letter <= "\udfff" for letter in name):
        raise UsageError(f"a tensor's name is not Unicode ({name!a})")


def _described(name: str, kind: str, tensor: Any, copy: bool) -> Described:
    import torch

    if tensor.is_meta:
        raise UsageError(f"{name!r} is on the device meta: it has no bytes", hint="materialise it first (to_empty)")
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_nested:
        what = "is quantised" if tensor.is_quantized else "is nested" if tensor.is_nested else f"is {tensor.layout}"
        raise UsageError(f"{name!r} {what}: only dense tensors can be moved")
    dtype, shape = dtype_and_shape(name, tensor)
    device = HOST if tensor.device.type == "cpu" else tensor.device.index
    if tensor.device.type not in ("cpu", "cuda"):
        raise UsageError(f"{name!r} is on {tensor.device}: only host and CUDA memory can be read")
    # A conjugate or a negative view has other bytes than its values.
    is_view = tensor.is_conj() or tensor.is_neg()
    scattered = is_view or not tensor.is_contiguous()
    if scattered and copy:
        memory.require(size_of(dtype, shape), f"a copy of {name!r}")
        tensor = tensor.resolve_conj().resolve_neg().contiguous()
    elif scattered and any(step == 0 and size > 1 for step, size in zip(tensor.stride(), tensor.shape, strict=True)):
        raise UsageError(f"{name!r} is expanded: several of its elements are one in memory", hint="make a copy of it")
    if tensor.numel() and not _pointer(name, tensor):
        raise UsageError(f"{name!r} has no bytes: its memory was given back (FSDP does that to shards)")
    address = tensor.data_ptr() if not scattered or copy else 0
    return Described(name, dtype, shape, kind, device, address, size_of(dtype, shape), tensor, scattered)


def _pointer(name: str, tensor: Any) -> int:
    """Where its bytes begin. Raises UsageError for a tensor that is made of others (sharded, wrapped, fake)."""
    try:
        return int(tensor.data_ptr())
    except (RuntimeError, NotImplementedError) as error:
        raise UsageError(
            f"{name!r} is a {type(tensor).__name__} without memory of its own", hint=str(error).splitlines()[0][:200]
        ) from None


def dtype_and_shape(name: str, tensor: Any) -> tuple[str, tuple[int, ...]]:
    """As safetensors names them. Raises UsageError for a dtype that it has no name for."""
    short = str(tensor.dtype).removeprefix("torch.")
    dtype = _DTYPES.get(short)
    if dtype is None:
        raise UsageError(f"{name!r} has the dtype {tensor.dtype}, which safetensors cannot name")
    shape = tuple(tensor.shape)
    if dtype == "F4":
        if not shape:
            raise UsageError(f"{name!r} is a single pair of F4 without a dimension")
        shape = (*shape[:-1], shape[-1] * 2)
    return dtype, shape


@functools.cache
def _torch_dtypes() -> dict[str, Any]:
    import torch

    return {known: getattr(torch, short) for short, known in _DTYPES.items() if hasattr(torch, short)}


def torch_dtype(dtype: str) -> Any:
    """torch's dtype of one of safetensors. Raises KeyError for what torch has none for."""
    return _torch_dtypes()[dtype]


def tensor_of(block: Any, offset: int, dtype: str, shape: tuple[int, ...]) -> Any:
    """A tensor over bytes of `block` (a tensor of bytes) from `offset`. It keeps the block alive.

    What torch has no dtype for (F6, rows of an odd number of F4) is a tensor of bytes.
    """
    import torch

    size = size_of(dtype, shape)
    known = _torch_dtypes().get(dtype)
    if known is None or (dtype == "F4" and (not shape or shape[-1] % 2)):
        known, shape = torch.uint8, (size,)
    elif dtype == "F4":
        shape = (*shape[:-1], shape[-1] // 2)
    if size == 0:
        return torch.empty(shape, dtype=known, device=block.device)
    if block.is_cuda:
        # The allocator of CUDA only knows the streams that use a whole storage of its own.
        return block[offset : offset + size].view(known).view(shape)
    first = block.storage_offset() + offset
    # Who saves or shares a tensor, or makes it longer, takes its storage: that ends where the tensor does.
    own = block.untyped_storage()[first : first + size]
    made: Any = torch.empty(0, dtype=known, device=block.device)
    return made.set_(own, 0, shape)


def copy_of(piece: Any) -> Any:
    """The same bytes in memory of their own."""
    import torch

    if piece.is_cuda:
        return piece.clone()
    copy = torch.empty_like(piece)
    # torch copies in threads that a fork of the process does not have, and waits for them for ever.
    ctypes.memmove(copy.data_ptr(), piece.data_ptr(), piece.nbytes)
    return copy


def empty_of(dtype: str, shape: tuple[int, ...], device: int) -> Any:
    """A tensor without elements."""
    import torch

    where = "cpu" if device == HOST else f"cuda:{device}"
    return tensor_of(torch.empty(0, dtype=torch.uint8, device=where), 0, dtype, shape)


def copy_all(copies: Iterable[tuple[Described, Any]]) -> None:
    """Fill each tensor with the values of the one beside it."""
    import torch

    # Tensors made in inference mode accept changes only there.
    with torch.inference_mode():
        for one, source in copies:
            one.tensor.copy_(source)


def holds(tensor: Any, values: Any) -> bool:
    """Whether a tensor has these very values, bit by bit, in its own dtype."""
    import torch

    here = tensor.resolve_conj().resolve_neg().contiguous().reshape(-1)
    return torch.equal(here.view(torch.uint8), values.to(here.dtype).reshape(-1).view(torch.uint8))


def alignment(dtype: str) -> int:
    """Bytes that a tensor's address has to be a multiple of."""
    return max(1, BITS.get(dtype, 8) // 8)


def bytes_of(view: memoryview) -> Any:
    """Host memory as a tensor of bytes, which keeps the view alive."""
    import torch

    return torch.frombuffer(view, dtype=torch.uint8)
