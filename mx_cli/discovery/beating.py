"""A peer's record, kept alive for as long as the peer is."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable

from mx_cli.base.errors import MxError, UsageError
from mx_cli.base.threads import begin
from mx_cli.engine.ports import Directory
from mx_cli.model.record import DRAINING, Record

PATIENCE = 5.0
"""Seconds for which a directory that hangs may hold up the start or the end of a peer."""


class Beating:
    """Publishes a record and beats in a thread, until it is closed. Outlives every failure of the directory.

    `record` gives the present state and is called from the thread; its name, generation and address stay the same.
    `warn` is called once for a directory that fails or hangs, and again only after it worked in between. `broken` is told
    of a bug, with which the thread ends.
    """

    def __init__(
        self,
        directory: Directory,
        record: Callable[[], Record],
        interval: float,
        warn: Callable[[str], None],
        broken: Callable[[BaseException], None],
    ) -> None:
        """`interval`: seconds between two beats."""
        self._directory, self._record, self._interval = directory, record, interval
        self._warn, self._broken = warn, broken
        self._changed = threading.Condition()
        self._asked = 1
        self._answered = 0
        self._starting = True
        self._refusal: UsageError | None = None
        self._draining = False
        self._closed = False
        self._shown: Record | None = None
        self._failed = False
        self._thread = threading.Thread(target=self._run, name="beat", daemon=True)

    def start(self) -> None:
        """Publish. Blocks for PATIENCE; call it once. Raises UsageError when the name belongs to another peer that lives.

        Any other failure is warned of, and tried again at each beat. So is a directory that hangs: its answer counts
        whenever it comes.
        """
        with self._changed:
            begin(self._thread)
            in_time = self._changed.wait_for(lambda: self._answered or self._closed, PATIENCE)
            self._starting = False
            hangs = not in_time and not self._failed
            self._failed = self._failed or hangs
        if self._refusal:
            raise self._refusal
        if hangs:
            self._warn(f"peers may not find this one: {self._directory} has not answered within {PATIENCE:g} s")

    def beat_now(self) -> None:
        """The state has changed: beat without waiting for the next turn. Does not block."""
        with self._changed:
            self._asked += 1
            self._changed.notify_all()

    def drain(self) -> None:
        """From now on the record says so. Returns when it is written, or cannot be. Idempotent; blocks for PATIENCE."""
        with self._changed:
            self._draining = True
            self._asked += 1
            mine = self._asked
            self._changed.notify_all()
            if self._thread.is_alive():
                self._changed.wait_for(lambda: self._answered >= mine or self._closed, PATIENCE)

    def close(self) -> None:
        """Remove the record and end. Idempotent; blocks for PATIENCE."""
        self._end()
        if self._thread.is_alive():
            self._thread.join(PATIENCE)

    def _run(self) -> None:
        try:
            while self._wait_for_turn():
                asked = self._asked
                self._beat()
                with self._changed:
                    self._answered = asked
                    self._changed.notify_all()
            if not self._refusal:
                self._try(lambda: self._directory.remove(self._record()))
        except BaseException as bug:  # noqa: BLE001 - whoever beats no more must be missed
            self._end()
            self._broken(bug)
            if shown := self._shown:
                self._try(lambda: self._directory.remove(shown))

    def _end(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _wait_for_turn(self) -> bool:
        """Whether to beat once more."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._asked > self._answered, self._interval)
            return not self._closed

    def _beat(self) -> None:
        record = dataclasses.replace(self._record(), beaten=round(time.time(), 3))
        if self._draining:
            record = dataclasses.replace(record, state=DRAINING)
        # Until it is there for the first time it may take the place of an earlier life.
        show = self._directory.beat if self._shown else self._directory.publish
        if self._try(lambda: show(record)):
            self._shown, self._failed = record, False

    def _try(self, act: Callable[[], None]) -> bool:
        try:
            act()
        except MxError as error:
            with self._changed:
                if self._starting and isinstance(error, UsageError):
                    self._refusal, self._closed = error, True
                    return False
            if not self._failed:
                self._warn(f"peers may not find this one: {error.what}")
            self._failed = True
            return False
        return True
