"""Part files: taking over what earlier terms left, and moving finished ones to their names."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import xxhash

from mx_cli.base import canonical
from mx_cli.base.filesystem import open_regular
from mx_cli.base.oserrors import explain
from mx_cli.base.temporary import temporary_in
from mx_cli.cache.files import make_dirs, make_way, names
from mx_cli.cache.journal import Claim, Journal, claims
from mx_cli.cache.layout import Model, number_of, part_id
from mx_cli.cache.reserve import allocated, reserve
from mx_cli.cache.reuse import clone_or_copy
from mx_cli.engine.meter import Meter
from mx_cli.engine.verify import read_through
from mx_cli.model.manifest import Entry
from mx_cli.plan.ranges import Span, merge

UNRESERVED = 256 << 10
COPY_STEP = 1 << 20


def promised(entry: Entry) -> str:
    """What the origin promises of a file's content, as 16 hex digits; empty when it promises nothing to rely on."""
    if not entry.resumable:
        return ""
    return canonical.sha256([entry.path, entry.size, entry.validator, dict(entry.digests)])[:16]


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
        self.meter = meter
        make_dirs(self._staging)
        self._old = self._earlier()
        self._claims = claims(self._staging, before=term)
        self._proved: dict[str, list[Span]] = {}
        self.journal = Journal(self._staging, term)

    def _earlier(self) -> dict[str, list[tuple[int, str]]]:
        found: dict[str, list[tuple[int, str]]] = {}
        for name in names(self._staging):
            part, _, rest = name.partition(".part.")
            number = number_of(rest)
            if number is None or number > self._term:
                continue
            try:
                make_way(self._staging / name)
            except OSError as error:
                raise explain(error, f"taking over {self._staging / name}") from None
            if number < self._term:
                found.setdefault(part, []).append((number, name))
        return found

    def path(self, entry: Entry) -> Path:
        return self._staging / f"{part_id(entry.path)}.part.{self._term}"

    def announce(self, entries: list[Entry]) -> None:
        """Journal which files this term is about; gc sweeps those that nobody vouches for, should the term die."""
        self.journal.announce((part_id(entry.path), promised(entry)) for entry in entries)

    def fence(self, entries: list[Entry], published: dict[str, Path]) -> None:
        """Take every part away from earlier terms; and look again at published files that no manifest vouches for.

        Raises FilesystemRefused.
        """
        for entry in entries:
            try:
                taken = self._take(entry)
                final = published.get(entry.path)
                if final is not None and not taken and entry.resumable and self._claimed(entry):
                    self._take_back(final, self.path(entry))
            except OSError as error:
                raise explain(error, f"taking over {entry.path}") from None

    def borrow(self, entries: list[Entry]) -> None:
        """Copy what other revisions began of equal files: the blocks that their journals claim.

        Never by a second name: the other leader may publish its file, and what is published is not written into.
        """
        wanted = {part_id(e.path): e for e in entries if promised(e) and not self.started(e)}
        for revision in names(self._staging.parent) if wanted else ():
            staging = self._staging.parent / revision
            begun = {name.partition(".part.")[0]: name for name in sorted(names(staging)) if ".part." in name}
            if staging == self._staging or not begun.keys() & wanted.keys():
                continue
            known = claims(staging, before=sys.maxsize)
            for part in begun.keys() & wanted.keys():
                entry, said = wanted[part], known.get(part, [])
                if not any(claim.length == 0 and claim.digest == promised(entry) for claim in said):
                    continue
                with contextlib.suppress(OSError):
                    self._copy_claimed(staging / begun[part], self.path(entry), said)
                    self._claims[part] = [*self._claims.get(part, []), *said]
                    del wanted[part]

    def _copy_claimed(self, source: Path, target: Path, said: list[Claim]) -> None:
        with open(open_regular(source), "rb") as reading, open(target, "xb") as writing:
            for claim in said:
                at, end = claim.offset, claim.offset + claim.length
                while at < end and (data := os.pread(reading.fileno(), min(COPY_STEP, end - at), at)):
                    at += os.pwrite(writing.fileno(), data, at)
                self.meter.tick()

    def _take(self, entry: Entry) -> bool:
        taken = False
        for _, name in sorted(self._old.pop(part_id(entry.path), ()), reverse=True):
            source = self._staging / name
            with contextlib.suppress(FileNotFoundError):
                if taken or not entry.resumable:
                    os.unlink(source)
                else:
                    os.rename(source, self.path(entry))
                    taken = True
        return taken

    def _take_back(self, final: Path, part: Path) -> None:
        """A second name for the file: an earlier leader may publish its manifest yet, and readers must not see it vanish."""
        with contextlib.suppress(FileNotFoundError):
            try:
                os.link(final, part)
            except FileNotFoundError:
                raise
            except OSError:
                os.rename(final, part)

    def _claimed(self, entry: Entry) -> list[Claim]:
        return [claim for claim in self._claims.get(part_id(entry.path), ()) if claim.length]

    def started(self, entry: Entry) -> bool:
        """Whether the part exists."""
        return os.path.lexists(self.path(entry))

    def allocated(self, entry: Entry) -> int:
        """Bytes of disk that the part has already."""
        return allocated(self.path(entry))

    def have(self, entry: Entry) -> list[Span]:
        """The blocks of an existing part that are right: each that a journal claims is hashed again, once. Reads much."""
        part = part_id(entry.path)
        if part not in self._proved:
            try:
                fd = open_regular(self.path(entry))
            except FileNotFoundError:
                return []
            except OSError as error:
                raise explain(error, f"opening {self.path(entry)}") from None
            try:
                self._proved[part] = self._prove(fd, entry)
            finally:
                os.close(fd)
        return self._proved[part]

    def again(self) -> None:
        """Before another try within the term: the blocks of the first one count too."""
        self._claims = claims(self._staging, before=self._term + 1)
        self._proved = {}

    def open(self, entry: Entry) -> Part:
        """Open the entry's part, with room for all of it; `have` says which blocks of it are right."""
        path = self.path(entry)
        have = self.have(entry)
        fd = -1
        try:
            self._detach(path, whole=have == [(0, entry.size)])
            fd = open_regular(path, os.O_RDWR | os.O_CREAT)
            if entry.size is not None:
                if entry.size > UNRESERVED:
                    reserve(fd, entry.size, str(path))
                if os.fstat(fd).st_size > entry.size:
                    os.ftruncate(fd, entry.size)
        except OSError as error:
            if fd >= 0:
                os.close(fd)
            raise explain(error, f"opening {path}") from None
        return Part(entry, path, fd, have)

    def _detach(self, path: Path, *, whole: bool) -> None:
        """A part that is also a published file (see `_take_back`) and has to be written gets blocks of its own."""
        if whole or not os.path.lexists(path) or os.stat(path).st_nlink < 2:
            return
        temporary = temporary_in(path.parent)
        clone_or_copy(path, temporary, lambda _: self.meter.tick())
        os.rename(temporary, path)

    def _prove(self, fd: int, entry: Entry) -> list[Span]:
        have: list[Span] = []
        for claim in self._claimed(entry) if entry.resumable else ():
            end = claim.offset + claim.length
            if end <= (entry.size or 0) and _digest(fd, claim, self.meter) == claim.digest:
                have.append((claim.offset, end))
                self.journal.record(claim)
        return merge(have)

    def claim(self, entry: Entry, offset: int, length: int, digest: bytes) -> None:
        """Journal a block that is in place."""
        self.journal.record(Claim(part_id(entry.path), offset, length, digest.hex()))

    def void(self, entry: Entry) -> None:
        """Drop the part and its claims: what is in it is wrong."""
        self._claims.pop(part_id(entry.path), None)
        self._proved.pop(part_id(entry.path), None)
        with contextlib.suppress(OSError):
            os.unlink(self.path(entry))

    def copy_name(self, entry: Entry) -> Path:
        """A name of this term for a copy in the making; nobody takes it for a part, and `clear` removes it."""
        return self._staging / f"{part_id(entry.path)}.copy.{self._term}"

    def drop(self, entries: Iterable[Entry]) -> None:
        """After a failure: remove the parts that nobody can resume."""
        for entry in entries:
            if not entry.resumable:
                self.void(entry)

    def clear(self) -> None:
        """After success: no part and no journal of this term or an earlier one stays. The directory does."""
        self.journal.close()
        sweep(self._staging, self._term)


def sweep(staging: Path, term: int, *, journals: bool = True) -> None:
    """Remove what terms up to `term` left in a staging directory. They must be over."""
    for name in names(staging):
        kind, _, end = name.rpartition(".")
        number = number_of(end)
        if number is not None and number <= term and (journals or kind != "journal"):
            with contextlib.suppress(OSError):
                os.unlink(staging / name)


def _digest(fd: int, claim: Claim, meter: Meter) -> str:
    running = xxhash.xxh3_128()
    read_through(fd, running.update, claim.offset, claim.offset + claim.length)
    meter.tick()
    return running.hexdigest()
