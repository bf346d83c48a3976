"""This process's umask: relaxed for a cache that a group shares, and given back to programs that follow."""

from __future__ import annotations

import os

_given: int | None = None


def relax() -> None:
    """From now on the group may do with new files what their owner may."""
    global _given
    mask = os.umask(0o077)
    os.umask(mask & ~0o070)
    _given = mask if _given is None else _given


def restore() -> None:
    """Before another program takes this process over: what the caller set."""
    if _given is not None:
        os.umask(_given)
