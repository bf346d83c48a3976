"""Stopping in an orderly way: everything that waits hears of the request at once."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from mx_cli.base.errors import MxError, TimedOut

STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals that ask for a stop. The last one says that the terminal is gone; under nohup it is ignored."""
SLICE = 0.5
"""Seconds of one sleep: a signal that comes between the check and the sleep does not wake it."""


class Stop:
    """Says whether, and why, work has to stop. Safe to use from any thread and from a signal handler.

    A handler runs between any two steps of the main thread, also while that holds the lock: it has to be re-entrant, which
    that of an Event is not.

    `timeout` (seconds from now, for the whole command) turns into a TimedOut reason by itself.
    """

    def __init__(self, timeout: float | None = None) -> None:
        self._changed = threading.Condition(threading.RLock())
        self._reason: MxError | None = None
        self._hooks: list[Callable[[], None]] = []
        if timeout is not None:
            reason = TimedOut(
                f"the command did not finish within --timeout ({timeout:g} s)",
                hint="run it again: it goes on from what is there",
            )
            timer = threading.Timer(min(timeout, threading.TIMEOUT_MAX), self.request, [reason])
            timer.daemon = True
            timer.start()

    def request(self, reason: MxError) -> None:
        """Ask everybody to stop; the first reason stays. Idempotent, does not block."""
        with self._changed:
            if self._reason is None:
                self._reason = reason
            self._changed.notify_all()
            hooks = list(self._hooks)
        for hook in hooks:
            hook()

    @property
    def requested(self) -> bool:
        return self._reason is not None

    @property
    def reason(self) -> MxError | None:
        return self._reason

    def check(self) -> None:
        """Raise the reason if a stop was requested."""
        if self._reason is not None:
            raise self._reason

    def wait(self, seconds: float) -> None:
        """Sleep, but raise the reason as soon as a stop is requested."""
        end = time.monotonic() + seconds
        with self._changed:
            while self._reason is None and (left := end - time.monotonic()) > 0:
                self._changed.wait(min(left, SLICE))
        self.check()

    @contextmanager
    def following(self, outer: Stop) -> Iterator[None]:
        """While the block runs, stop when `outer` stops (at once if it already has), for the same reason."""

        def pass_on() -> None:
            assert outer.reason is not None, "the reason is set before hooks are called"
            self.request(outer.reason)

        with outer.calling(pass_on):
            yield

    @contextmanager
    def calling(self, hook: Callable[[], None]) -> Iterator[None]:
        """While the block runs, call `hook` when a stop is requested (at once if it already was)."""
        with self._changed:
            self._hooks.append(hook)
            already = self.requested
        try:
            if already:
                hook()
            yield
        finally:
            with self._changed:
                self._hooks.remove(hook)
