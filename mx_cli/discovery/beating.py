"""A peer's record, kept alive for as long as the peer is."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable

from mx_cli.base.errors import MxError, UsageError
from mx_cli.engine.ports import Directory
from mx_cli.model.record import DRAINING, Record

PATIENCE = 5.0
"""Seconds for which a directory that hangs may hold up the end of a peer."""


class Beating:
    """Publishes a record and beats in a thread, until it is closed. Outlives every failure of the directory.

    `record` gives the present state and is called from the thread; its name, generation and address stay the same.
    `warn` is called once for a directory that fails, and again only after it worked in between.
    """

    def __init__(
        self, directory: Directory, record: Callable[[], Record], interval: float, warn: Callable[[str], None]
    ) -> None:
        """`interval`: seconds between two beats."""
        self._directory, self._record, self._interval, self._warn = directory, record, interval, warn
        self._changed = threading.Condition()
        self._asked = 0
        self._answered = 0
        self._draining = False
        self._closed = False
        self._published = False
        self._failed = False
        self._thread = threading.Thread(target=self._run, name="beat", daemon=True)

    def start(self) -> None:
        """Publish. Blocks; call it once. Raises UsageError when the name belongs to another peer that lives.

        Any other failure is warned of, and tried again at each beat.
        """
        self._beat(refuse=True)
        self._thread.start()

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
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread.is_alive():
            self._thread.join(PATIENCE)

    def _run(self) -> None:
        while self._wait_for_turn():
            asked = self._asked
            self._beat()
            with self._changed:
                self._answered = asked
                self._changed.notify_all()
        self._try(lambda: self._directory.remove(self._record()))

    def _wait_for_turn(self) -> bool:
        """Whether to beat once more."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._asked > self._answered, self._interval)
            return not self._closed

    def _beat(self, *, refuse: bool = False) -> None:
        record = dataclasses.replace(self._record(), beaten=round(time.time(), 3))
        if self._draining:
            record = dataclasses.replace(record, state=DRAINING)
        # Until it is there for the first time it may take the place of an earlier life.
        show = self._directory.beat if self._published else self._directory.publish
        if self._try(lambda: show(record), refuse=refuse):
            self._published, self._failed = True, False

    def _try(self, act: Callable[[], None], *, refuse: bool = False) -> bool:
        try:
            act()
        except MxError as error:
            if refuse and isinstance(error, UsageError):
                raise
            if not self._failed:
                self._warn(f"peers may not find this one: {error.what}")
            self._failed = True
            return False
        return True
