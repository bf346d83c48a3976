"""What the UCX inside NIXL's package says of this machine: its transports, each with a device (`tcp/eth0`)."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path

from mx_cli.base.errors import TransportFailed

_RMA_AND_MESSAGES = 1 << 1 | 1 << 6
_FEATURES = 1
_RESOURCE = re.compile(r"^#\s+resource \d+\s*:.*-- (\S+)", re.MULTILINE)


class _Parameters(ctypes.Structure):
    """The head of ucp_params_t, and room for the rest of it."""

    _fields_ = (("field_mask", ctypes.c_uint64), ("features", ctypes.c_uint64), ("rest", ctypes.c_char * 256))


def version(libraries: Path) -> str:
    """UCX's version."""
    numbers = _numbers(_load(libraries, "libucp"))
    return ".".join(str(number.value) for number in numbers)


def resources(libraries: Path) -> list[str]:
    """TRANSPORT/DEVICE of all that a context would use, as `ucx_info` prints them. Blocks for 0.1 s.

    UCX reads its environment now. Raises TransportFailed when it cannot start.
    """
    for name in ("libucm", "libucs", "libuct"):
        _load(libraries, name)
    ucp = _load(libraries, "libucp")
    major, minor, _ = _numbers(ucp)
    config, context = ctypes.c_void_p(), ctypes.c_void_p()
    parameters = _Parameters(_FEATURES, _RMA_AND_MESSAGES)
    status = ucp.ucp_config_read(None, None, ctypes.byref(config))
    status = status or ucp.ucp_init_version(major, minor, ctypes.byref(parameters), config, ctypes.byref(context))
    if status:
        raise TransportFailed(f"UCX cannot start (status {status})")
    return _RESOURCE.findall(_printed(ucp, context))


def _printed(ucp: ctypes.CDLL, context: ctypes.c_void_p) -> str:
    libc = ctypes.CDLL(None)
    libc.open_memstream.restype = ctypes.c_void_p
    text, size = ctypes.c_char_p(), ctypes.c_size_t()
    stream = ctypes.c_void_p(libc.open_memstream(ctypes.byref(text), ctypes.byref(size)))
    ucp.ucp_context_print_info(context, stream)
    libc.fclose(stream)
    return (text.value or b"").decode(errors="replace")


def _numbers(ucp: ctypes.CDLL) -> list[ctypes.c_uint]:
    numbers = [ctypes.c_uint() for _ in range(3)]
    ucp.ucp_get_version(*map(ctypes.byref, numbers))
    return numbers


def _load(libraries: Path, name: str) -> ctypes.CDLL:
    found = sorted(libraries.glob(f"{name}-*.so*"))
    if not found:
        raise TransportFailed(f"no {name} in {libraries}")
    try:
        return ctypes.CDLL(str(found[0]), mode=ctypes.RTLD_GLOBAL)
    except OSError as error:
        raise TransportFailed(f"{name} cannot be loaded: {error}") from None
