"""How much memory this process may still take."""

from __future__ import annotations

from pathlib import Path

_GROUP = Path("/sys/fs/cgroup")


def available() -> int:
    """Bytes: what the machine has to give, and no more than what the cgroup (v2, as it is mounted) leaves."""
    most, used = limit(), _number(_GROUP / "memory.current")
    if most is None or used is None:
        return _machine("MemAvailable")
    return min(_machine("MemAvailable"), max(0, most - used))


def limit() -> int | None:
    """Bytes that the cgroup allows; None where it sets no limit."""
    return _number(_GROUP / "memory.max")


def total() -> int:
    """Bytes of the machine."""
    return _machine("MemTotal")


def _machine(field: str) -> int:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith(f"{field}:"):
                return int(line.split()[1]) << 10
    except (OSError, ValueError, IndexError):
        pass
    return 1 << 30


def _number(path: Path) -> int | None:
    """None where there is no limit, or nothing to read."""
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdecimal() else None
