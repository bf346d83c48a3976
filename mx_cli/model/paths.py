"""The one rule for names of files that somebody else chose: what may be created below a directory of ours."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable

from mx_cli.base.errors import IntegrityError

MAX_COMPONENT = 255
MAX_PATH = 2048


def fault(path: str) -> str | None:
    """Why a relative path can't be a file below our directory, None when it can."""
    if not path:
        return "empty name"
    if "\0" in path:
        return "NUL in the name"
    if path.startswith("/"):
        return "absolute path"
    try:
        encoded = path.encode()
    except UnicodeEncodeError:
        return "name that is not Unicode"
    if len(encoded) > MAX_PATH:
        return f"path of {len(encoded)} bytes, expected at most {MAX_PATH}"
    for part in encoded.split(b"/"):
        if part in (b"", b".", b".."):
            return f"component {part.decode()!r} in the path"
        if len(part) > MAX_COMPONENT:
            return f"component of {len(part)} bytes, expected at most {MAX_COMPONENT}"
    return None


def check_paths(paths: Iterable[str]) -> None:
    """Refuse a listing that can't become files: names that escape, repeat, or are both a file and a folder.

    IntegrityError with up to three of them. Names that only differ in case are fine here: see collisions.
    """
    wrong: list[str] = []
    files: set[str] = set()
    folders: set[str] = set()
    for path in paths:
        why = fault(path) or ("stands twice" if path in files else None)
        if why:
            wrong.append(f"{_shown(path)}: {why}")
            continue
        files.add(path)
        parent = path.rpartition("/")[0]
        while parent and parent not in folders:
            folders.add(parent)
            parent = parent.rpartition("/")[0]
    wrong += [f"{_shown(path)}: both a file and a folder" for path in sorted(files & folders)]
    if wrong:
        raise IntegrityError(f"names that mx doesn't write to a disk ({some(wrong)})")


def collisions(paths: Iterable[str]) -> list[tuple[str, str]]:
    """Pairs of paths that a file system without case, or one that normalises Unicode, takes for the same."""
    first: dict[str, str] = {}
    pairs = []
    for path in sorted(paths):
        folded = unicodedata.normalize("NFC", unicodedata.normalize("NFC", path).casefold())
        if folded in first:
            pairs.append((first[folded], path))
        first.setdefault(folded, path)
    return pairs


def some(items: list[str]) -> str:
    """The first three of a list, and how many more there are."""
    return "; ".join(items[:3]) + (f"; and {len(items) - 3} more" if len(items) > 3 else "")


def _shown(path: str) -> str:
    text = ascii(path) if not path.isprintable() else repr(path)
    return text if len(text) <= 120 else text[:60] + "…" + text[-50:]
