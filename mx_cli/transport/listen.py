"""The listening socket of a peer, and who has the port when it cannot be had."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import time

from mx_cli.base.address import split_address
from mx_cli.base.errors import UsageError

_BACKLOG = 1024
_LOOK_FOR = 1.0
"""Seconds to look for the process that has the port: hosts have tens of thousands of open files."""

_LISTEN = "0A"


def listen(text: str) -> socket.socket:
    """A socket that listens on HOST:PORT; port 0 takes a free one. The caller keeps it: nothing is bound twice.

    Raises UsageError, which names the process that has the port if that can be seen. Blocks for two seconds at most,
    but for a host name as long as its resolution takes.
    """
    host, port = split_address(text)
    try:
        family, kind, protocol, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise UsageError(f"cannot listen on {text}: {error.strerror or error}") from None
    listener = socket.socket(family, kind, protocol)
    try:
        # Not for sharing the port: a peer has to be able to bind it while connections of the one before linger.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, int(host != "::"))
        listener.bind(place)
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise _explain(error, text, port) from None
    listener.setblocking(False)
    return listener


def _explain(error: OSError, text: str, port: int) -> UsageError:
    if error.errno != errno.EADDRINUSE:
        return UsageError(f"cannot listen on {text}: {error.strerror or error}", hint="see --listen")
    holder = _holder(port)
    who = f"by process {holder}" if holder else "by another process"
    return UsageError(
        f"cannot listen on {text}: port {port} is taken {who}", hint="end that process, or give --listen another port"
    )


def _holder(port: int) -> str:
    """`PID (name)` of the process that listens on the port; empty when it cannot be seen."""
    end = time.monotonic() + _LOOK_FOR
    sockets = {f"socket:[{inode}]" for inode in _inodes(port)}
    pids = [name for name in os.listdir("/proc") if name.isdecimal()] if sockets and os.path.isdir("/proc") else []
    for pid in sorted(pids, key=int, reverse=True):
        if time.monotonic() > end:
            break
        with contextlib.suppress(OSError):
            for fd in os.listdir(f"/proc/{pid}/fd"):
                if os.readlink(f"/proc/{pid}/fd/{fd}") in sockets:
                    with open(f"/proc/{pid}/comm") as comm:
                        return f"{pid} ({comm.read().strip()})"
    return ""


def _inodes(port: int) -> list[str]:
    found: list[str] = []
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with contextlib.suppress(OSError), open(table) as rows:
            for row in rows:
                columns = row.split()
                if len(columns) > 9 and columns[3] == _LISTEN and int(columns[1].rpartition(":")[2], 16) == port:
                    found.append(columns[9])
    return found
