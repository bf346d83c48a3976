"""Paths that options name, for what a command leaves there."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from mx_cli.base.config import read_path
from mx_cli.base.errors import UsageError


def place(option: str, text: str | None) -> Path | None:
    """The path that an option names. An empty one is a variable that the caller forgot to set, and is refused."""
    if text == "":
        raise UsageError(f"{option} is empty", hint="leave it out, or give a path")
    return None if text is None else read_path(text)


def apart(places: Mapping[str, Path | None]) -> None:
    """Raises UsageError where two options name one path: what the second one leaves would take the first one's place."""
    seen: dict[Path, str] = {}
    for option, path in places.items():
        if path and (other := seen.setdefault(path, option)) != option:
            raise UsageError(f"{other} {path} and {option} are the same path")
