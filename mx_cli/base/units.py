"""Bytes, rates and durations: read from people, written for people (IEC units)."""

from __future__ import annotations

import re

from mx_cli.base.errors import UsageError

# No more digits than what is meant can need: a float has an end, and int() a limit.
_SIZE = re.compile(r"(\d{1,18}(?:\.\d{1,18})?)\s*(?:([kmgtp])i?b?|b)?", re.IGNORECASE)
_DURATION = re.compile(r"(\d{1,18}(?:\.\d{1,18})?)\s*(ms|s|m|h|d)?", re.IGNORECASE)
_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_STEPS = "kmgtp"


def parse_size(text: str) -> int:
    """Bytes of `64MiB`, `64M` (= MiB), `1.5G` or `100`. Raises UsageError."""
    match = _SIZE.fullmatch(text.strip())
    if not match:
        raise UsageError(f"not a size: {text!r}", hint="write it as 64MiB, 1.5GiB or a number of bytes")
    unit = match[2]
    return int(float(match[1]) * (1024 ** (_STEPS.index(unit.lower()) + 1) if unit else 1))


def parse_duration(text: str) -> float:
    """Seconds of `90`, `90s`, `5m`, `500ms` or `1h`. Raises UsageError."""
    match = _DURATION.fullmatch(text.strip())
    if not match:
        raise UsageError(f"not a duration: {text!r}", hint="write it as 90, 90s, 5m, 1h or 7d")
    return float(match[1]) * _SECONDS[(match[2] or "s").lower()]


def size(count: float) -> str:
    """`1.4 GiB`; whole bytes below 1 KiB."""
    if count < 1024:
        return f"{int(count)} B"
    for unit in ("KiB", "MiB", "GiB", "TiB"):  # noqa: B007
        count /= 1024
        if count < 1024:
            break
    else:
        unit, count = "PiB", count / 1024
    return f"{count:.1f} {unit}" if count < 100 else f"{count:.0f} {unit}"


def rate(per_second: float) -> str:
    """`1.2 GiB/s`."""
    return f"{size(per_second)}/s"


def duration(seconds: float) -> str:
    """`0.4 s`, `42 s`, `3m05s`, `2h07m`."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02d}m"


def count(number: int, noun: str) -> str:
    """`1 file`, `3 files`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
