"""How much memory a transfer may use, and how wide that lets it be."""

from __future__ import annotations

from mx_cli.base.memory import available
from mx_cli.flows.context import Context

MEMORY = 256 << 20
BESIDE = 32 << 20
"""Bytes of it that are no buffers of weights: the plan, headers, digests under way."""
CONNECTION = 2 << 20
"""Bytes of a connection to an origin: its buffer, and what TLS and HTTP hold of it."""


def memory_limit(context: Context) -> int:
    """Bytes: the setting `memory`, by default 256 MiB, and half of what the cgroup leaves if that is less."""
    return context.settings.memory or min(MEMORY, available() // 2)


def width(context: Context, most: int, each: int) -> int:
    """How many reads may be in flight that hold `each` bytes: `most`, and what the memory has room for. One always is."""
    return max(1, min(most, (memory_limit(context) - BESIDE) // each))


def connections(context: Context) -> int:
    """Connections to an origin at once: the setting, and what the memory has room for."""
    return width(context, context.settings.max_connections, CONNECTION)
