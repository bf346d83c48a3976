"""What options are given: paths, for what a command leaves there, and durations."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from mx_cli.base.config import read_path
from mx_cli.base.errors import UsageError
from mx_cli.base.units import parse_duration


def place(option: str, text: str | None) -> Path | None:
    """The path that an option names. An empty one is a variable that the caller forgot to set, and is refused."""
    if text == "":
        raise UsageError(f"{option} is empty", hint="leave it out, or give a path")
    return None if text is None else read_path(text)


def apart(places: Mapping[str, Path | None]) -> None:
    """Raises UsageError where two options name one path: what the second one leaves would take the first one's place."""
    seen: dict[str, str] = {}
    for option, path in places.items():
        real = os.path.join(os.path.realpath(path.parent), path.name) if path else ""
        if path and (other := seen.setdefault(real, option)) != option:
            raise UsageError(f"{other} {path} and {option} are the same path")


def seconds(option: str, text: str) -> float:
    """Those of a duration. Raises UsageError, which names the option."""
    try:
        return parse_duration(text)
    except UsageError as error:
        raise UsageError(f"{option}: {error.what}", hint=error.hint) from None
