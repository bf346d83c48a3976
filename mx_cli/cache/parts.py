"""Part files: taking over what earlier terms left, and moving finished ones to their names."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path

import xxhash

from mx_cli.base.oserrors import explain
from mx_cli.cache.journal import Claim, Journal, claims
from mx_cli.cache.layout import Model, make_dirs, names, part_id
from mx_cli.cache.reserve import reserve
from mx_cli.engine.meter import Meter
from mx_cli.model.manifest import Entry
from mx_cli.plan.ranges import Span, merge

CHUNK = 1 << 20


@dataclass(slots=True)
class Part:
    """An open part: `have` are the spans whose bytes are in place, by a fresh look."""

    entry: Entry
    path: Path
    fd: int
    have: list[Span]


class Parts:
    """The parts of one revision as the leader of `term` sees them.

    The fence: parts are renamed to the new term before anything else, so an earlier leader can no longer publish them.
    It may still write into them, but only the same pinned bytes at the same offsets.
    """

    def __init__(self, model: Model, revision: str, term: int, meter: Meter) -> None:
        self._staging = model.staging(revision)
        self._term = term
        self._meter = meter
        make_dirs(self._staging)
        self._old = self._earlier()
        self._claims = claims(self._staging, before=term)
        self.journal = Journal(self._staging, term)

    def _earlier(self) -> dict[str, list[tuple[int, str]]]:
        found: dict[str, list[tuple[int, str]]] = {}
        for name in names(self._staging):
            part, _, rest = name.partition(".part.")
            if rest.isdigit() and int(rest) < self._term:
                found.setdefault(part, []).append((int(rest), name))
        return found

    def path(self, entry: Entry) -> Path:
        return self._staging / f"{part_id(entry.path)}.part.{self._term}"

    def fence(self, entries: list[Entry], published: dict[str, Path]) -> None:
        """Take every part, and every published file that no manifest vouches for, away from earlier terms."""
        for entry in entries:
            old = sorted(self._old.pop(part_id(entry.path), ()), reverse=True)
            taken = False
            for _, name in old:
                source = self._staging / name
                with contextlib.suppress(FileNotFoundError):
                    if taken or not entry.resumable:
                        os.unlink(source)
                    else:
                        os.rename(source, self.path(entry))
                        taken = True
            final = published.get(entry.path)
            if final is not None and not taken:
                with contextlib.suppress(FileNotFoundError):
                    os.rename(final, self.path(entry))

    def open(self, entry: Entry) -> Part:
        """Open the entry's part, with room for all of it, and find out which blocks of it are right."""
        path = self.path(entry)
        fd = -1
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
            have = self._proved(fd, entry) if os.fstat(fd).st_size else []
            if entry.size is not None:
                reserve(fd, entry.size, str(path))
                if os.fstat(fd).st_size > entry.size:
                    os.ftruncate(fd, entry.size)
        except OSError as error:
            if fd >= 0:
                os.close(fd)
            raise explain(error, f"opening {path}") from None
        return Part(entry, path, fd, merge(have))

    def _proved(self, fd: int, entry: Entry) -> list[Span]:
        have: list[Span] = []
        for claim in self._claims.get(part_id(entry.path), ()):
            end = claim.offset + claim.length
            if entry.size is not None and end <= entry.size and _digest(fd, claim, self._meter) == claim.digest:
                have.append((claim.offset, end))
                self.journal.record(claim)
        return have

    def claim(self, entry: Entry, offset: int, length: int, digest: bytes) -> None:
        """Journal a block that is in place."""
        self.journal.record(Claim(part_id(entry.path), offset, length, digest.hex()))

    def void(self, entry: Entry) -> None:
        """Drop the part and its claims: what is in it is wrong."""
        self._claims.pop(part_id(entry.path), None)
        with contextlib.suppress(OSError):
            os.unlink(self.path(entry))

    def clear(self) -> None:
        """After success: no part and no journal of this term or an earlier one stays. The directory does."""
        self.journal.close()
        for name in names(self._staging):
            term = name.rpartition(".")[2]
            if term.isdigit() and int(term) <= self._term:
                with contextlib.suppress(OSError):
                    os.unlink(self._staging / name)


def _digest(fd: int, claim: Claim, meter: Meter) -> str:
    running = xxhash.xxh3_128()
    at, end = claim.offset, claim.offset + claim.length
    while at < end:
        data = os.pread(fd, min(CHUNK, end - at), at)
        if not data:
            break
        running.update(data)
        at += len(data)
    meter.tick()
    return running.hexdigest()
