"""What the kernel and its limits allow. Asks /proc, /sys and system calls that do not wait for anything."""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import resource
import sys
import time
from pathlib import Path

from mx_cli.base import memory, units
from mx_cli.base.capability import OK, WARN, Capability, judged
from mx_cli.base.interfaces import interfaces, reachable
from mx_cli.base.version import VERSION

LEAST_SHM = 1 << 30
LEAST_FILES = 1024
LEAST_MEMLOCK = 64 << 30
_NETWORKS = Path("/sys/class/net")
_THP = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_IO_URING_SETUP = 425
_TIME_ERROR = 5

_libc = ctypes.CDLL(None, use_errno=True)


def versions() -> list[Capability]:
    """Python's and mx's."""
    return [
        Capability("python", OK, f"{platform.python_version()} {sys.executable}"),
        Capability("mx", OK, VERSION),
    ]


def memory_and_cpus(cores: int) -> list[Capability]:
    """`cores`: CPUs that this process may use."""
    free, limit = memory.available(), memory.limit()
    of = f"{units.size(limit)} of the cgroup" if limit is not None else f"{units.size(memory.total())} of the machine"
    return [
        Capability("memory", OK, f"{units.size(free)} free, {of}", facts={"free": free, "limit": limit}),
        Capability(
            "cpus",
            OK,
            f"{units.count(cores, 'core')} of {os.cpu_count()}",
            facts={"usable": cores, "all": os.cpu_count()},
        ),
    ]


def shared_memory() -> Capability:
    """/dev/shm, which UCX and torch's workers use."""
    try:
        info = os.statvfs("/dev/shm")
    except OSError as error:
        return Capability("/dev/shm", WARN, f"not there ({error.strerror})", "mount a tmpfs at /dev/shm")
    size, free = info.f_blocks * info.f_frsize, info.f_bavail * info.f_frsize
    fix = "docker run --shm-size 8g; in Kubernetes an emptyDir with medium Memory, mounted at /dev/shm"
    value = f"{units.size(free)} free of {units.size(size)}"
    return judged("/dev/shm", free >= LEAST_SHM, value, fix, facts={"free": free, "size": size})


def locked_memory(rdma: bool) -> Capability:
    """How much may be pinned, which RDMA needs: all that is offered or read into."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    unlimited = soft in (resource.RLIM_INFINITY, -1) or soft >= LEAST_MEMLOCK
    value = "unlimited" if soft == resource.RLIM_INFINITY else units.size(soft)
    if not unlimited and not rdma:
        value += "; only RDMA needs more"
    fix = "ulimit -l unlimited; docker run --ulimit memlock=-1; or the capability IPC_LOCK"
    return judged("memlock", unlimited or not rdma, value, fix, facts={"limit": soft})


def open_files() -> Capability:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    fix = f"ulimit -n {min(hard, 65536) if hard > 0 else 65536}"
    return judged(
        "open files", soft >= LEAST_FILES, f"{soft} (at most {hard})", fix, facts={"soft": soft, "hard": hard}
    )


def huge_pages() -> Capability:
    """Transparent huge pages: pools of weights ask for them."""
    try:
        chosen = _THP.read_text().partition("[")[2].partition("]")[0]
    except OSError:
        chosen = "not there"
    fix = f"echo madvise > {_THP} (as root, on the host): registering and copying of memory take half the time"
    return judged("huge pages", chosen in ("always", "madvise"), chosen, fix)


def io_uring() -> Capability:
    """Tried, since seccomp and kernel.io_uring_disabled refuse it where the kernel has it. mx does without."""
    parameters = ctypes.create_string_buffer(120)
    fd = _libc.syscall(_IO_URING_SETUP, 1, parameters)
    if fd >= 0:
        os.close(fd)
        return Capability("io_uring", OK, "works", facts={"works": True})
    name = errno.errorcode.get(ctypes.get_errno(), "?")
    return Capability("io_uring", OK, f"not here ({name}); mx does without", facts={"works": False})


def clock() -> Capability:
    """Whether the kernel believes that its time is right: signed requests and the ages of records depend on it."""
    state = _libc.ntp_adjtime(ctypes.create_string_buffer(256))
    now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    kept = state != _TIME_ERROR
    value = f"{now}, {'synchronised' if kept else 'nobody keeps it right'}"
    return judged("clock", kept, value, "run chrony or systemd-timesyncd on the host", facts={"synchronised": kept})


def network() -> Capability:
    """The interfaces with their addresses and MTUs, the likeliest to be reached by others first."""
    try:
        usable, every = reachable(), interfaces()
    except OSError as error:
        return Capability(
            "network", WARN, f"the addresses cannot be listed ({error})", "mx serve --advertise names one"
        )
    rows = [[one.name, one.address, mtu(one.name)] for one in usable]
    shown = ", ".join(f"{name} {address} (MTU {size})" for name, address, size in rows[:4])
    more = f", and {len(rows) - 4} more" if len(rows) > 4 else ""
    fix = "this host can only be a peer for itself; look at `ip address`"
    facts = {"reachable": rows, "all": [[one.name, one.address] for one in every]}
    return judged("network", bool(rows), shown + more or "no address that others could reach", fix, facts=facts)


def mtu(interface: str) -> int:
    """Bytes; 0 where the kernel does not tell."""
    try:
        return int((_NETWORKS / interface / "mtu").read_text())
    except (OSError, ValueError):
        return 0
