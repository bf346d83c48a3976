"""Which process this is, and whether another one of this machine has ended.

A pid and a start time mean something within one boot and one pid namespace.
"""

from __future__ import annotations

import os
from pathlib import Path


def boot_id() -> str:
    """One for each boot of a machine; empty where the kernel does not tell."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def pid_namespace() -> int:
    """The number of this process's pid namespace; 0 where the kernel does not tell."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0


def start_time(pid: int) -> str:
    """The process's start time in clock ticks since boot; empty when there is no such process, or only its corpse."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[19]


def is_gone(pid: int, start: str) -> bool:
    """Whether the process that had this pid and start time has ended. One that /proc hides may live."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except (OSError, OverflowError):
        pass
    return os.path.exists(f"/proc/{pid}/stat") and start_time(pid) != start
