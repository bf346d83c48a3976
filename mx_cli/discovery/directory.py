"""Peers that find one another through files: the default, in the shared cache.

    PATH/<32 hex digits of the name>.json     a record, its owner's process, and the seconds between its beats

Written beside and then given its name, so nobody reads a part of one; there are no locks. A beat writes the record again.
How old it is, is judged by the file system's own clock: hosts need not agree on the time. Other hosts are heard through
listings, and a network file system may show a new record late, by as long as the setting `visibility` says; who waits
for a peer looks again. Whatever else lies in the directory is left alone and named.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from mx_cli.base import canonical, units
from mx_cli.base.cancel import Stop
from mx_cli.base.errors import IntegrityError, MxError, UsageError
from mx_cli.base.filesystem import give_name
from mx_cli.base.oserrors import explain
from mx_cli.base.process import boot_id, is_gone, pid_namespace, start_time
from mx_cli.base.temporary import is_temporary, temporary_in
from mx_cli.model import json_strict
from mx_cli.model.record import Record, Sighting

LISTED = 3
"""Beats without which a record is stale."""
KEPT = 10
"""Beats without which anybody may remove it."""
MOST_PRUNED = 100
"""Records that are removed at one look: whoever looks for a peer is not to wait for ten thousand."""
LONGEST_BEAT = 3600.0
MAX_BYTES = 64 << 10
TRIES = 4

_RECORD = re.compile(r"[0-9a-f]{32}\.json")
_HIDDEN = frozenset({errno.ENOENT, errno.ESTALE})


def file_name(name: str) -> str:
    """The file of a record's name; the same on file systems that ignore case or know short names only."""
    return hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()[:32] + ".json"


@dataclass(frozen=True, slots=True)
class _Kept:
    """A record as it lies there. `beat`: its owner's interval; `written` by the file system's clock."""

    record: Record
    beat: float
    process: tuple[str, int, str]
    written: float

    def silence(self, now: float) -> float:
        """Seconds between then and now, whichever is first: clocks are set back."""
        return abs(now - self.written)

    def is_stale(self, now: float) -> bool:
        return self.silence(now) > LISTED * self.beat or self.has_ended()

    def is_of_this_kernel(self) -> bool:
        """Whether its owner's pid means something here: within one boot and pid namespace."""
        boot, namespace, _ = self.process
        return bool(boot and namespace) and (boot, namespace) == (boot_id(), pid_namespace())

    def has_ended(self) -> bool:
        """Whether its owner is known to be gone, whatever its last beat."""
        pid, start = self.record.pid, self.process[2]
        return self.is_of_this_kernel() and bool(pid and start) and is_gone(pid, start)


class FileDirectory:
    """See the port `Directory`. Opening one writes nothing. `beat`: seconds between two beats, ours and what we expect
    of records that do not say theirs.
    """

    def __init__(self, path: Path, beat: float) -> None:
        self.path, self._beat = path, beat
        self._reason = ""

    def __str__(self) -> str:
        return f"dir:{self.path}"

    def reason(self) -> str:
        return self._reason

    # -- our own record ------------------------------------------------------------------------------------------

    def publish(self, record: Record) -> None:
        self._put(record, begins=True)

    def beat(self, record: Record) -> None:
        self._put(record, begins=False)

    def remove(self, record: Record) -> None:
        path = self.path / file_name(record.name)
        with contextlib.suppress(IntegrityError):
            kept = self._read(path.name)
            if kept is not None and kept.record.generation == record.generation:
                _unlink(path)

    def _put(self, record: Record, *, begins: bool) -> None:
        path = self.path / file_name(record.name)
        temporary, now = self._write(self._document(record))
        try:
            for left in reversed(range(TRIES)):
                taken = self._check_holder(path, record, now, begins=begins)
                # Where nobody has the name, only one of those who come at once may get it.
                if give_name(temporary, path, exclusive=not taken and left > 0):
                    return
        except OSError as error:
            raise explain(error, f"publishing {record.name} in {self.path}") from None
        finally:
            _unlink(temporary)

    def _check_holder(self, path: Path, record: Record, now: float, *, begins: bool) -> bool:
        """Whether something has the name, which may be replaced. Raises UsageError when it may not."""
        try:
            kept = self._read(path.name)
        except IntegrityError:
            return True
        if kept is None:
            return False
        other = kept.record
        own = other.generation == record.generation or (begins and _is_predecessor(kept, record))
        if not own and not kept.is_stale(now):
            raise UsageError(
                f"another peer has this name and lives ({self} {record.name}: {other.generation} on host {other.host}"
                f" at {other.address}; this is {record.generation} on host {record.host} at {record.address})",
                hint=f"give each peer a name of its own; a dead one's is free after {units.duration(LISTED * kept.beat)}",
            )
        return True

    def _document(self, record: Record) -> bytes:
        process = {"boot": boot_id(), "pid_namespace": pid_namespace(), "start": start_time(record.pid)}
        data = canonical.dumps({**record.to_json(), "beat": self._beat, "process": process})
        if len(data) > MAX_BYTES:
            raise UsageError(f"a record that is too long ({record.name[:80]}: {len(data)} bytes, at most {MAX_BYTES})")
        return data

    def _write(self, data: bytes) -> tuple[Path, float]:
        """A new file, and the file system's time. Raises NoSpace, FilesystemRefused."""
        path = temporary_in(self.path)
        try:
            os.makedirs(self.path, exist_ok=True)
            try:
                with open(path, "xb") as file:
                    file.write(data)
                # After closing: a network file system has sent it by then, and knows its server's time.
                return path, os.stat(path).st_mtime
            except OSError:
                _unlink(path)
                raise
        except OSError as error:
            raise explain(error, f"writing in {self.path}") from None

    # -- everybody's ---------------------------------------------------------------------------------------------

    def records(self, stop: Stop) -> list[Record]:
        return [sighting.record for sighting in self.sightings(stop) if not sighting.stale]

    def sightings(self, stop: Stop) -> list[Sighting]:
        names = self._names()
        ignored: list[str] = []
        kept = list(self._kept(names, ignored, stop))
        now = self._now() if kept or any(map(is_temporary, names)) else None
        if now is not None:
            dead = [one for one in kept if one.silence(now) > KEPT * one.beat][:MOST_PRUNED]
            gone = {one.record.name for one in dead if self._prune(one)}
            kept = [one for one in kept if one.record.name not in gone]
            self._prune_temporary(names, now)
        # Where we may not write, the youngest record tells the time: no host's own clock can be trusted with that.
        base = now if now is not None else max((one.written for one in kept), default=0.0)
        found = [Sighting(one.record, None if now is None else one.silence(base), one.is_stale(base)) for one in kept]
        self._reason = self._explain(found, ignored)
        return found

    def _kept(self, names: list[str], ignored: list[str], stop: Stop) -> Iterator[_Kept]:
        for name in names:
            stop.check()
            if is_temporary(name):
                continue
            try:
                if not _RECORD.fullmatch(name):
                    raise IntegrityError(f"not a peer's record: {name!r} (not a name that mx gives)")
                if (one := self._read(name)) is not None:
                    yield one
            except MxError as error:
                ignored.append(error.what)

    def _names(self) -> list[str]:
        try:
            return sorted(os.listdir(self.path))
        except FileNotFoundError:
            return []
        except OSError as error:
            raise explain(error, f"listing {self.path}") from None

    def _read(self, name: str) -> _Kept | None:
        """None when it is not there (any more). Raises IntegrityError for what is no record of this name."""
        path = self.path / name
        try:
            # Opened, not only looked up: that makes a network file system ask its server. A pipe must not block us.
            fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            if error.errno in _HIDDEN:
                return None
            if error.errno in (errno.ELOOP, errno.ENXIO):
                raise IntegrityError(f"not a peer's record: {path} (not a regular file)") from None
            raise explain(error, f"reading {path}") from None
        try:
            info = os.fstat(fd)
            if not stat.S_ISREG(info.st_mode):
                raise IntegrityError(f"not a peer's record: {path} (not a regular file)")
            data = os.read(fd, MAX_BYTES + 1)
        except OSError as error:
            if error.errno in _HIDDEN:
                return None
            raise explain(error, f"reading {path}") from None
        finally:
            os.close(fd)
        return self._parse(data, path, info.st_mtime)

    def _parse(self, data: bytes, path: Path, written: float) -> _Kept:
        if len(data) > MAX_BYTES:
            raise IntegrityError(f"not a peer's record: {path} (longer than {MAX_BYTES} bytes)")
        document = json_strict.parse(data, str(path), error=IntegrityError)
        record = Record.from_json(document, str(path))
        if file_name(record.name) != path.name:
            raise IntegrityError(f"not a peer's record: {path} (it says {record.name!r}, whose file is another)")
        beat, process = document.get("beat"), document.get("process")
        if not isinstance(beat, (int, float)) or not 0 < beat <= LONGEST_BEAT:
            beat = self._beat
        process = process if isinstance(process, dict) else {}
        namespace = process.get("pid_namespace")
        owner = (
            str(process.get("boot") or ""),
            namespace if isinstance(namespace, int) else 0,
            str(process.get("start") or ""),
        )
        return _Kept(record, float(beat), owner, written)

    def _now(self) -> float | None:
        """The file system's time; None where nothing can be written."""
        try:
            path, now = self._write(b"\n")
        except MxError:
            return None
        _unlink(path)
        return now

    def _prune(self, one: _Kept) -> bool:
        """Remove a record whose owner has long been silent; whether it is gone."""
        path = self.path / file_name(one.record.name)
        with contextlib.suppress(MxError):
            # A beat may have come while we read the others.
            if self._read(path.name) == one:
                return _unlink(path)
        return False

    def _prune_temporary(self, names: list[str], now: float) -> None:
        """What a process left that was killed while it wrote."""
        for path in (self.path / name for name in names if is_temporary(name)):
            with contextlib.suppress(OSError):
                if abs(now - os.lstat(path).st_mtime) > KEPT * self._beat:
                    _unlink(path)

    def _explain(self, found: list[Sighting], ignored: list[str]) -> str:
        parts = []
        if not found:
            missing = "" if os.path.isdir(self.path) else ", which does not exist"
            parts.append(f"no peer has a record in {self.path}{missing}")
        elif all(sighting.stale for sighting in found):
            ages = [sighting.age for sighting in found if sighting.age is not None]
            last = f", the last sign of life {units.duration(min(ages))} ago" if ages else ""
            parts.append(f"no living peer in {self.path} ({units.count(len(found), 'stale record')}{last})")
        if ignored:
            parts.append(f"ignored in {self.path}: {units.count(len(ignored), 'file')} ({ignored[0]})")
        return "; ".join(parts)


def _is_predecessor(kept: _Kept, record: Record) -> bool:
    """Whether the record is left from an earlier process of the same host, which has ended.

    Where its pid means nothing here, the same one at the same address is a container that was started again; a neighbour
    has an address of its own.
    """
    if kept.record.host != record.host:
        return False
    if kept.is_of_this_kernel():
        return kept.has_ended()
    hosts = {one.address.rpartition(":")[0] for one in (kept.record, record)}
    return kept.record.pid == record.pid and len(hosts) == 1


def _unlink(path: Path) -> bool:
    """Whether it is gone now."""
    try:
        os.unlink(path)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True
