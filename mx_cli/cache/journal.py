"""Which blocks of which parts are in place: what makes a killed download resumable.

A journal belongs to one term. A record is one line, `id offset length xxh3 crc`, written by one write(2); a torn or foreign
line is ignored. A claim is never believed: whoever adopts a part hashes the bytes again.
"""

from __future__ import annotations

import contextlib
import os
import threading
import zlib
from dataclasses import dataclass
from pathlib import Path

from mx_cli.base.oserrors import explain
from mx_cli.cache.layout import names


@dataclass(frozen=True, slots=True)
class Claim:
    """`length` bytes at `offset` of a part, with their xxh3-128 in hex."""

    part: str
    offset: int
    length: int
    digest: str


class Journal:
    """The journal of one term, open for writing. `record` may be called by any thread."""

    def __init__(self, staging: Path, term: int) -> None:
        self.path = staging / f"journal.{term}"
        self._lock = threading.Lock()
        try:
            self._fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        except OSError as error:
            raise explain(error, f"opening {self.path}") from None

    def record(self, claim: Claim) -> None:
        """Append one claim. Raises NoSpace, FilesystemRefused."""
        body = f"{claim.part} {claim.offset} {claim.length} {claim.digest}"
        line = f"{body} {zlib.crc32(body.encode()):08x}\n".encode()
        try:
            with self._lock:
                os.write(self._fd, line)
        except OSError as error:
            raise explain(error, f"writing {self.path}") from None

    def close(self) -> None:
        with self._lock, contextlib.suppress(OSError):
            if self._fd >= 0:
                os.close(self._fd)
            self._fd = -1


def claims(staging: Path, before: int) -> dict[str, list[Claim]]:
    """All claims of terms lower than `before`, by part id, without duplicates."""
    found: dict[str, dict[tuple[int, int, str], Claim]] = {}
    for name in names(staging):
        head, _, term = name.partition(".")
        if head != "journal" or not term.isdigit() or int(term) >= before:
            continue
        try:
            data = (staging / name).read_bytes()
        except OSError:
            continue
        for line in data.split(b"\n"):
            claim = _parse(line)
            if claim:
                found.setdefault(claim.part, {})[claim.offset, claim.length, claim.digest] = claim
    return {part: list(by_place.values()) for part, by_place in found.items()}


def _parse(line: bytes) -> Claim | None:
    body, _, crc = line.rpartition(b" ")
    fields = body.split(b" ")
    try:
        if len(fields) != 4 or int(crc, 16) != zlib.crc32(body):
            return None
        part, offset, length, digest = (field.decode("ascii") for field in fields)
        return Claim(part, int(offset), int(length), digest)
    except ValueError:
        return None
