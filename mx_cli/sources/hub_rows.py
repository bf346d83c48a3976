"""What a hub's listing says of each file: its size, and the digests that its bytes can be compared with.

A file outside LFS has the name that git gives to its content. Of a file in LFS (or xet) git holds a pointer only: that
name is the pointer's, and the pointer's SHA-256 is the content's.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from typing import Any

from mx_cli.base import redact
from mx_cli.base.errors import IntegrityError
from mx_cli.engine.verify import GIT
from mx_cli.model.manifest import Entry

_HEX = re.compile(r"[0-9a-f]+")
_SHA256_DIGITS = 64


def entries(rows: list[Any], shown: str) -> list[Entry]:
    """The files of a whole listing. Raises IntegrityError for a row that is neither a file nor a folder."""
    files = [row for row in rows if not (isinstance(row, dict) and row.get("type") in ("directory", "submodule"))]
    for row in files:
        if not isinstance(row, dict) or not isinstance(row.get("path"), str) or row.get("type") != "file":
            raise IntegrityError(f"{shown}: the listing holds a row that is no file: {redact.text(repr(row))[:80]}")
    named_by_git = _named_by_git(files)
    return [_entry(row, named_by_git) for row in files]


def _entry(row: dict[str, Any], named_by_git: bool) -> Entry:
    lfs, name = _lfs(row), _name(row)
    sha256 = _sha256(lfs)
    size = _size(lfs["size"] if "size" in lfs else row.get("size"))
    digests: dict[str, str] = {}
    if _is_hex(sha256, _SHA256_DIGITS):
        digests["sha256"] = sha256
    elif named_by_git and not lfs and not row.get("xetHash") and _is_hex(name, len(name)) and len(name) in GIT:
        digests[GIT[len(name)]] = name
    return Entry(row["path"], size, sha256 or name, digests=digests, key=row["path"])


def _named_by_git(rows: list[dict[str, Any]]) -> bool:
    """Whether the names in a listing can be git's. Those that a mirror makes up are told by the pointers, whose text is
    known, and by one name for contents of two lengths."""
    sizes: dict[str, Any] = {}
    for row in rows:
        if not _lfs(row) and sizes.setdefault(_name(row), row.get("size")) != row.get("size"):
            return False
    pointers = list(_pointers(rows))
    return not pointers or any(pointers)


def _pointers(rows: list[dict[str, Any]]) -> Iterator[bool]:
    """For each file in LFS that is named at all, whether its name is the one of the usual pointer."""
    for row in rows:
        lfs, name = _lfs(row), _name(row)
        if _sha256(lfs) and len(name) in GIT:
            size = _size(lfs.get("size")) or 0
            text = f"version https://git-lfs.github.com/spec/v1\noid sha256:{_sha256(lfs)}\nsize {size}\n"
            pointer = text.encode("utf-8", "replace")
            whole = b"blob %d\0" % len(pointer) + pointer
            made = hashlib.sha1(whole, usedforsecurity=False) if GIT[len(name)] == "git-sha1" else hashlib.sha256(whole)
            yield made.hexdigest() == name


def _size(told: Any) -> int | None:
    return told if type(told) is int and told >= 0 else None


def _lfs(row: dict[str, Any]) -> dict[str, Any]:
    lfs = row.get("lfs")
    return lfs if isinstance(lfs, dict) else {}


def _sha256(lfs: dict[str, Any]) -> str:
    return str(lfs.get("oid") or lfs.get("sha256") or "").removeprefix("sha256:").lower()


def _name(row: dict[str, Any]) -> str:
    return str(row.get("oid") or row.get("blobId") or "").strip('"').lower()


def _is_hex(text: str, digits: int) -> bool:
    return len(text) == digits and _HEX.fullmatch(text) is not None and any(digit != "0" for digit in text)
