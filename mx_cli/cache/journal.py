"""Which blocks of which parts are in place: what makes a killed download resumable.

A journal belongs to one term. A record is one line, `id offset length xxh3 crc`, written by one write(2); a torn or foreign
line is ignored. A claim is never believed: whoever adopts a part hashes the bytes again.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from mx_cli.base.filesystem import open_regular
from mx_cli.base.oserrors import explain
from mx_cli.cache.files import make_way, names, read_file
from mx_cli.cache.layout import number_of


@dataclass(frozen=True, slots=True)
class Claim:
    """`length` bytes at `offset` of a part, with their xxh3-128 in hex.

    No bytes: the term means to make that file; `digest` then names the content that the origin promised, `-` for none.
    """

    part: str
    offset: int
    length: int
    digest: str


class Journal:
    """The journal of one term, open for writing. `record` may be called by any thread."""

    def __init__(self, staging: Path, term: int) -> None:
        self.path = staging / f"journal.{term}"
        self._lock = threading.Lock()
        self._at = 0
        try:
            make_way(self.path)
            self._fd = open_regular(self.path, os.O_WRONLY | os.O_CREAT)
        except OSError as error:
            raise explain(error, f"opening {self.path}") from None

    def record(self, claim: Claim) -> None:
        """Append one claim. Raises NoSpace, FilesystemRefused."""
        self._write(_line(claim))

    def announce(self, parts: Iterable[tuple[str, str]]) -> None:
        """Say which files (part, promised content) the term means to make, before it makes any.

        gc knows by that what is ours, and what is foreign; another revision's leader, which parts are of its files too.
        """
        self._write(b"".join(_line(Claim(part, 0, 0, content or "-")) for part, content in parts))

    def _write(self, lines: bytes) -> None:
        try:
            # Not O_APPEND: it is not to be had everywhere, and nobody else writes into this journal.
            with self._lock:
                while lines:
                    count = os.pwrite(self._fd, lines, self._at)
                    self._at, lines = self._at + count, lines[count:]
        except OSError as error:
            raise explain(error, f"writing {self.path}") from None

    def close(self) -> None:
        with self._lock, contextlib.suppress(OSError):
            if self._fd >= 0:
                os.close(self._fd)
            self._fd = -1


def claims(staging: Path, before: int) -> dict[str, list[Claim]]:
    """All claims of terms lower than `before`, by part id, without duplicates."""
    found: dict[str, set[Claim]] = {}
    for name in names(staging):
        head, _, term = name.partition(".")
        number = number_of(term)
        if head != "journal" or number is None or number >= before:
            continue
        try:
            data = read_file(staging / name)
        except OSError:
            continue
        for line in data.split(b"\n"):
            claim = _parse(line)
            if claim:
                found.setdefault(claim.part, set()).add(claim)
    return {part: sorted(known, key=lambda claim: claim.offset) for part, known in found.items()}


def _line(claim: Claim) -> bytes:
    body = f"{claim.part} {claim.offset} {claim.length} {claim.digest}".encode()
    return body + f" {zlib.crc32(body):08x}\n".encode()


def _parse(line: bytes) -> Claim | None:
    body, _, crc = line.rpartition(b" ")
    fields = body.split(b" ")
    try:
        if len(fields) != 4 or int(crc, 16) != zlib.crc32(body):
            return None
        part, offset, length, digest = (field.decode("ascii") for field in fields)
        # Hundreds of thousands of claims share few parts.
        return Claim(sys.intern(part), int(offset), int(length), digest)
    except ValueError:
        return None
