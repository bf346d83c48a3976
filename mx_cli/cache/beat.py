"""The leader's signs of life, from a thread of their own."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable
from typing import Any

from mx_cli.base import canonical, redact
from mx_cli.base.errors import MxError
from mx_cli.base.threads import begin
from mx_cli.cache.files import names, write_private
from mx_cli.cache.lease import Lease
from mx_cli.engine.meter import Meter

WAIT_LIMIT = 300.0


class Deposed(MxError):
    """A higher term exists: another process leads. Not an error for the user; the flow goes on as a follower."""


class Beat:
    """Renames `beat.<term>.<seq>.<bytes>` every `interval` seconds while the meter shows progress. A context manager.

    `on_deposed` is called once, from the beat's thread, when a listing shows a higher term.
    """

    def __init__(self, lease: Lease, term: int, meter: Meter, interval: float, on_deposed: Callable[[], None]) -> None:
        self._lease, self._term, self._meter, self._interval = lease, term, meter, interval
        self._on_deposed = on_deposed
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="beat", daemon=True)
        self._seq = 0
        self._name = ""
        self._note: dict[str, Any] = {}
        self._note_name = ""
        self._notes = 0

    def __enter__(self) -> Beat:
        self._beat()
        begin(self._thread)
        return self

    def __exit__(self, *exc: object) -> None:
        self._end.set()
        self._thread.join(timeout=self._interval + 1)

    def _run(self) -> None:
        ticks = -1
        while not self._end.wait(self._interval):
            try:
                if self._lease.look().term > self._term:
                    self._on_deposed()
                    return
                if self._meter.ticks != ticks or time.monotonic() < self._meter.waits_until:
                    ticks = self._meter.ticks
                    self._beat()
                self._tell()
            except (OSError, MxError):
                # A cache that does not answer shows no sign of life; the transfer meets the same error and reports it.
                continue

    def _beat(self) -> None:
        self._seq += 1
        name = f"beat.{self._term}.{self._seq}.{self._meter.done}"
        if not self._renamed(name):
            write_private(self._lease.path / name, b"", sync=False)
        self._name = name

    def _renamed(self, name: str) -> bool:
        """A rename needs no new inode: a leader on a full disk goes on living."""
        if not self._name:
            return False
        try:
            os.rename(self._lease.path / self._name, self._lease.path / name)
        except FileNotFoundError:
            # Swept, or done already: NFS may answer a retransmission of our own request.
            return name in names(self._lease.path)
        except OSError:
            return False
        return True

    def _tell(self) -> None:
        """Write a note when something worth knowing changed: how the others learn why it is slow.

        It has a number of its own: what stops the beats is worth a note.
        """
        meter = self._meter
        note: dict[str, Any] = {"phase": meter.phase, "total": meter.total, "interval": self._interval}
        if meter.retries:
            note |= {
                "retries": meter.retries,
                "error": meter.last_error,
                "message": redact.text(meter.last_message)[:400],
            }
            note["error_at"] = round(meter.last_error_at)
        if meter.throttled_until > time.time():
            note["throttled_until"] = round(meter.throttled_until)
        if note == self._note:
            return
        self._notes += 1
        name = f"note.{self._term}.{self._notes}"
        write_private(self._lease.path / name, canonical.dumps(note), sync=False)
        if self._note_name:
            with contextlib.suppress(OSError):
                os.unlink(self._lease.path / self._note_name)
        self._note, self._note_name = note, name
