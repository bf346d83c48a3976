"""Which host, and which namespace of processes, this process lives in: what decides whether two peers can share memory."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from mx_cli.base.process import boot_id, pid_namespace


def host_facts() -> dict[str, Any]:
    """`boot_id` (one per boot of a kernel), `pid_namespace` (an inode number), `uid`; "" and 0 where /proc does not say."""
    return {"boot_id": boot_id(), "pid_namespace": pid_namespace(), "uid": os.geteuid()}


def share_memory(mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> bool:
    """Whether the kernel lets me read their memory: one kernel, one PID namespace, and the same user or root.

    The two are what `host_facts` gave. A security module may still refuse; a probe tells.
    """
    if not mine.get("boot_id") or not mine.get("pid_namespace"):
        return False
    same = all(mine.get(fact) == theirs.get(fact) for fact in ("boot_id", "pid_namespace"))
    return same and mine.get("uid") in (0, theirs.get("uid"))
