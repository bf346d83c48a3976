"""Who downloads: numbers by link, signs of life by rename, everything heard by listings.

A leader owns `lead.<term>`, the highest there is; the term is its fencing token. It lives as long as the name of its
`beat.<term>.<seq>.<bytes>` changes within the TTL, judged by each observer on its own monotonic clock. Nothing here makes
the cache correct; it only saves double work.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mx_cli.base import canonical
from mx_cli.base.errors import MxError, by_name
from mx_cli.base.filesystem import NO_LINK
from mx_cli.base.oserrors import explain
from mx_cli.base.process import boot_id, is_gone, pid_namespace, start_time
from mx_cli.base.temporary import is_temporary, temporary_in
from mx_cli.base.version import VERSION
from mx_cli.cache.files import make_dirs, names, number_in, read_json, seen, write_all, write_private
from mx_cli.cache.layout import number_of

LOCK_TRIES = 10
_RECORD = re.compile(r"lock|(?:lead|left|failed|beat|note)\.\d+(?:\.\d+)*")


@dataclass(frozen=True)
class View:
    """What a listing of a lease directory says. `term` 0 = nobody ever led. `failures`: the terms that failed lately."""

    term: int = 0
    beat: str = ""
    seq: int = -1
    bytes_done: int = 0
    note: str = ""
    left: bool = False
    failed: bool = False
    failures: tuple[int, ...] = ()

    @property
    def sign(self) -> tuple[int, str]:
        """Changes with every sign of life."""
        return self.term, self.beat


def whoami(node: str, namespace: str) -> dict[str, Any]:
    """This process, for people and for the fast path: pid and start time mean something within one boot and pid namespace."""
    return {
        "host": socket.gethostname(),
        "node": node,
        "namespace": namespace,
        "pid": os.getpid(),
        "user": os.geteuid(),
        "started": round(time.time(), 3),
        "boot": boot_id(),
        "pidns": pid_namespace(),
        "start": start_time(os.getpid()),
        "mx": VERSION,
    }


class Lease:
    """The lease directory of one revision."""

    def __init__(
        self,
        path: Path,
        node: str = "",
        namespace: str = "",
        patience: float = 0.0,
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        """`patience`: seconds for which a name seen in a listing may be hidden from look-ups.

        `pause` waits in the meantime, and may raise to stop.
        """
        self.path = path
        self._patience, self._pause = patience, pause
        self._me = {"node": node, "namespace": namespace}
        self._token = ""
        self._lock_fd = -1
        self.lock_works = True
        self._names: dict[int, str] = {}

    # -- seeing --------------------------------------------------------------------------------------------------

    def look(self) -> View:
        """The present state, from one listing."""
        return view(names(self.path))

    def record(self, term: int) -> Mapping[str, Any]:
        """The lead record of a term; empty when it cannot be read (yet)."""
        data = read_json(self.path / f"lead.{term}")
        return data if isinstance(data, dict) else {}

    def leader(self, term: int) -> str:
        """`node/pid` of a term's leader, for people."""
        if term not in self._names:
            record = self.record(term)
            if not record:
                return f"term {term}"
            self._names[term] = f"{record.get('node') or record.get('host')}/{record.get('pid')}"
        return self._names[term]

    def surely_dead(self, term: int) -> bool:
        """Whether the leader is gone beyond doubt: same boot and pid namespace and no such process, or its lock is free.

        The lock proves something only on one kernel and one mount (same boot, device and inode) where flock tells the truth.
        """
        record = self.record(term)
        if not record or not record.get("boot") or record.get("boot") != boot_id():
            return False
        if record.get("pidns") and record.get("pidns") == pid_namespace():
            return is_gone(int(number_in(record, "pid")), str(record.get("start")))
        return self._lock_is_free(record.get("lock"))

    def _lock_is_free(self, place: Any) -> bool:
        try:
            fd = os.open(self.path / "lock", os.O_RDWR | os.O_NOFOLLOW)
        except OSError:
            return False
        try:
            info = os.fstat(fd)
            if place != [info.st_dev, info.st_ino]:
                return False
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except OSError:
            return False
        finally:
            os.close(fd)

    # -- leading -------------------------------------------------------------------------------------------------

    def claim(self, term: int) -> bool:
        """Try to become the leader of `term`. False when somebody else did. Raises NoSpace, FilesystemRefused."""
        make_dirs(self.path)
        self._token = secrets.token_hex(16)
        data = canonical.dumps({"token": self._token, "lock": self._take_lock(), **whoami(**self._me)})
        mine = temporary_in(self.path)
        target = self.path / f"lead.{term}"
        won = False
        try:
            write_private(mine, data)
            os.link(mine, target)
            won = True
        except FileExistsError:
            # NFS may have answered a retransmission of our own request.
            won = self._is_mine(term)
        except OSError as error:
            if error.errno not in NO_LINK:
                raise explain(error, f"linking {target}") from None
            won = self._claim_exclusively(target, data)
        finally:
            with contextlib.suppress(OSError):
                os.unlink(mine)
            if not won:
                self.drop_lock()
        return won

    def _claim_exclusively(self, target: Path, data: bytes) -> bool:
        try:
            fd = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        except FileExistsError:
            return False
        except OSError as error:
            raise explain(error, f"creating {target}") from None
        try:
            write_all(fd, data)
        except OSError as error:
            # Nobody leads a term whose record says nothing: the next claim may have it.
            with contextlib.suppress(OSError):
                os.unlink(target)
            raise explain(error, f"writing {target}") from None
        finally:
            os.close(fd)
        return True

    def is_lost(self, term: int) -> bool:
        """Whether a term that this process claimed is surely over: there is a later one, or the lease was taken away."""
        listing = names(self.path)
        if view(listing).term > term or f"lead.{term}" not in listing:
            return True
        return bool(self.record(term).get("token", self._token) != self._token)

    def _is_mine(self, term: int) -> bool:
        return self.record(term).get("token") == self._token

    def _take_lock(self) -> list[int]:
        """Hold the lock file as a hint for those on this kernel; [] where flock does not tell the truth."""
        self.drop_lock()
        try:
            fd = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        except OSError:
            return []
        try:
            self._flock(fd)
            self.lock_works = not self._lock_lies()
            info = os.fstat(fd)
        except OSError as error:
            self.lock_works = isinstance(error, BlockingIOError)
            os.close(fd)
            return []
        if not self.lock_works:
            os.close(fd)
            return []
        self._lock_fd = fd
        return [info.st_dev, info.st_ino]

    def _flock(self, fd: int) -> None:
        """Others hold the lock for a moment only, unless they lead."""
        for _ in range(LOCK_TRIES):
            try:
                return fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                time.sleep(0.01)
        return fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def _lock_lies(self) -> bool:
        fd = os.open(self.path / "lock", os.O_RDWR | os.O_NOFOLLOW)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            return False
        finally:
            os.close(fd)

    def drop_lock(self) -> None:
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1

    def leave(self, term: int) -> None:
        """Say that the term is over; the next may begin at once. Best effort: a TTL does the same."""
        with contextlib.suppress(OSError, MxError):
            write_private(self.path / f"left.{term}", b"", sync=False)
        self.drop_lock()

    def fail(self, term: int, error: MxError, selection: str = "") -> None:
        """Tell those who follow this term, for the same selection, why it ended. Best effort."""
        data = {**error.to_json(), "at": round(time.time()), "selection": selection}
        temporary = temporary_in(self.path)
        try:
            write_private(temporary, canonical.dumps(data), sync=False)
            os.rename(temporary, self.path / f"failed.{term}")
        except (OSError, MxError):
            # A full disk has no room for reasons, but for an empty name.
            self.leave(term)
        self.drop_lock()

    def failure(self, term: int) -> MxError:
        """The error that ended a term, as its followers report it."""
        data = self._failed(term)
        if not data:
            return MxError(f"the leader of term {term} failed", via="leader")
        return by_name(str(data.get("name")), str(data.get("message")), hint=str(data.get("hint", "")), via="leader")

    def failed_selection(self, term: int) -> str:
        """What the failed leader wanted; empty when that is not known."""
        return str(self._failed(term).get("selection", ""))

    def _failed(self, term: int) -> Mapping[str, Any]:
        """The record; blocks for the patience while look-ups hide what a listing shows."""
        path = self.path / f"failed.{term}"
        with contextlib.suppress(OSError):
            seen(lambda: os.stat(path), self._patience, within=self.path, pause=self._pause)
        data = read_json(path)
        return data if isinstance(data, dict) else {}

    def failed_at(self, term: int) -> float:
        """When a term failed, by its leader's clock, in seconds since 1970; 0 when that is not known."""
        return number_in(self._failed(term), "at")

    def note(self, name: str) -> Mapping[str, Any]:
        """What a note says; empty when it cannot be read, or no longer."""
        data = read_json(self.path / name) if name else None
        return data if isinstance(data, dict) else {}

    def remove(self, term: int) -> None:
        """Take the whole lease away, unless a later term than `term` was claimed. Best effort; then terms begin anew.

        A claim in the making fails with FilesystemRefused; the next one may succeed.
        """
        with contextlib.suppress(OSError, MxError):
            listing = names(self.path)
            if view(listing).term <= term:
                # The lead record goes last: as long as it is there, the next claim is for a higher term.
                for name in sorted(listing, key=lambda name: name.startswith("lead.")):
                    if _RECORD.fullmatch(name) or is_temporary(name):
                        os.unlink(self.path / name)
                os.rmdir(self.path)

    def sweep(self, term: int) -> None:
        """Remove beats, notes and other small records of terms before `term`; lead records of the highest term stay."""
        for name in names(self.path):
            kind, _, rest = name.partition(".")
            number = number_of(rest.partition(".")[0])
            if kind in ("beat", "note", "left", "failed") and number is not None and number < term:
                with contextlib.suppress(OSError):
                    os.unlink(self.path / name)


def view(listing: list[str]) -> View:
    """What the names in a lease directory say."""
    leads, failures = (_numbers(listing, kind) for kind in ("lead.", "failed."))
    term = max(leads, default=0)
    if not term:
        return View()
    beat, seq, done, note, note_seq = "", -1, 0, "", -1
    for name in listing:
        kind, *fields = name.split(".")
        numbers = [number_of(field) for field in fields]
        if len(numbers) < 2 or numbers[0] != term or numbers[1] is None:
            continue
        if kind == "beat" and numbers[1] > seq:
            beat, seq, done = name, numbers[1], (numbers[2] or 0) if len(numbers) > 2 else 0
        elif kind == "note" and numbers[1] > note_seq:
            note, note_seq = name, numbers[1]
    return View(term, beat, seq, done, note, f"left.{term}" in listing, term in failures, tuple(failures))


def _numbers(listing: list[str], kind: str) -> list[int]:
    found = (number_of(name.removeprefix(kind)) for name in listing if name.startswith(kind))
    return [number for number in found if number is not None]
