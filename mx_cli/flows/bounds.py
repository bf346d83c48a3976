"""How much memory a transfer may use, and how wide that lets it be."""

from __future__ import annotations

from mx_cli.base.memory import available
from mx_cli.flows.context import Context

MEMORY = 256 << 20
BESIDE = 32 << 20
"""Bytes of the limit that are kept for all but buffers: the plan, headers, running digests."""
CONNECTION = 2 << 20
"""Bytes that one connection to an origin takes: its buffer, and what TLS and HTTP keep."""


def memory_limit(context: Context) -> int:
    """Bytes: the setting `memory`, by default 256 MiB, and half of what the cgroup leaves if that is less."""
    return context.settings.memory or min(MEMORY, available() // 2)


def width(context: Context, most: int, each: int) -> int:
    """Reads of `each` bytes that may be in flight: as many as the memory limit allows, at least 1 and at most `most`."""
    return max(1, min(most, (memory_limit(context) - BESIDE) // each))


def connections(context: Context) -> int:
    """Connections to an origin at once: the setting, or fewer where the memory limit allows fewer."""
    return width(context, context.settings.max_connections, CONNECTION)
