"""Which host, and which namespace of processes, this process lives in: what decides whether two peers can share memory."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_PIDS = "/proc/self/ns/pid"


def host_facts() -> dict[str, Any]:
    """`boot_id` (one per boot of a kernel), `pid_namespace` (an inode number), `uid`; "" and 0 where /proc does not say."""
    try:
        boot_id = _BOOT_ID.read_text().strip()
    except OSError:
        boot_id = ""
    try:
        pid_namespace = os.stat(_PIDS).st_ino
    except OSError:
        pid_namespace = 0
    return {"boot_id": boot_id, "pid_namespace": pid_namespace, "uid": os.geteuid()}


def share_memory(mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> bool:
    """Whether the kernel lets me read their memory: one kernel, one PID namespace, and the same user or root.

    The two are what `host_facts` gave. A security module may still refuse; a probe tells.
    """
    if not mine.get("boot_id") or not mine.get("pid_namespace"):
        return False
    same = all(mine.get(fact) == theirs.get(fact) for fact in ("boot_id", "pid_namespace"))
    return same and mine.get("uid") in (0, theirs.get("uid"))
