"""Names of files in the making: they are written under these, and renamed to what they are when they are whole."""

from __future__ import annotations

import re
import secrets
from pathlib import Path

_NAME = re.compile(r"\.[0-9a-f]{16}\.tmp")


def temporary_in(directory: Path) -> Path:
    """A name in `directory` that nothing has. The caller removes what it has made under it."""
    return directory / f".{secrets.token_hex(8)}.tmp"


def is_temporary(name: str) -> bool:
    """Whether `temporary_in` gave this name: what a process that was killed has left is known by it."""
    return bool(_NAME.fullmatch(name))
