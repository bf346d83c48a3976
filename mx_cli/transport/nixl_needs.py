"""What UCX needs of the system when it starts. By itself it would look for a port for ever, and end the process for want of a
descriptor or a thread."""

from __future__ import annotations

import errno
import os
import resource
import socket
import threading
from collections.abc import Mapping

from mx_cli.base.errors import NoSpace, TransportFailed
from mx_cli.base.interfaces import Interface, interfaces
from mx_cli.base.threads import begin
from mx_cli.transport import nixl_env

DESCRIPTORS = 32
"""Files that have to be free: starting takes about 20, and reading from a peer some more."""


def check(wanted: Mapping[str, str]) -> None:
    """Raises TransportFailed where UCX would not find what it needs with the variables `wanted`."""
    if full := _full_interface(wanted):
        told = nixl_env.selecting(wanted) or nixl_env.wished()
        raise TransportFailed(
            f"UCX cannot be started ({told}): no port is free on {full}",
            hint="--data-ports FIRST-LAST: a reader takes a port for each of its cores, four at most, of each peer",
        )
    allowed, left = _descriptors()
    if left < DESCRIPTORS:
        raise TransportFailed(
            f"UCX cannot be started: {left} of {allowed} descriptors are left, and it needs {DESCRIPTORS}",
            hint="ulimit -n",
        )
    try:
        begin(threading.Thread(target=int, name="mx-one-more", daemon=True))
    except NoSpace as error:
        raise TransportFailed(f"UCX cannot be started: {error.what}", hint=error.hint) from None


def _descriptors() -> tuple[int, int]:
    """How many this process may have, and how many of them are left; DESCRIPTORS where nobody can tell."""
    allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        used = len(os.listdir("/proc/self/fd"))
    except FileNotFoundError:
        return allowed, DESCRIPTORS
    return allowed, DESCRIPTORS if allowed == resource.RLIM_INFINITY else max(0, allowed - used)


def _full_interface(wanted: Mapping[str, str]) -> str:
    """An interface on which none of the data ports is free, "" without one: UCX itself would look for one for ever."""
    match = nixl_env.PORTS.fullmatch(os.environ.get("UCX_TCP_PORT_RANGE", wanted.get("UCX_TCP_PORT_RANGE", "")))
    if match is None:
        return ""
    ports = range(int(match[1]), int(match[2]) + 1)
    devices = os.environ.get("UCX_NET_DEVICES", wanted.get("UCX_NET_DEVICES", ""))
    names = {device.partition(":")[0] for device in devices.split(",")} - {"", "all"}
    try:
        here = interfaces()
    except OSError:
        return ""
    first = {one.name: one for one in reversed(here)}
    used = [one for one in first.values() if one.name in names or (not names and one.is_usable and not one.is_bridge)]
    return next((one.name for one in used if not any(_is_free(one, port) for port in ports)), "")


def _is_free(interface: Interface, port: int) -> bool:
    family = socket.AF_INET6 if ":" in interface.address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as sock:
        try:
            sock.bind((interface.address, port))
        except OSError as error:
            # What else is wrong, UCX itself says.
            return error.errno != errno.EADDRINUSE
    return True
