"""The one retry policy, and the one limiter per host."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from mx_cli.base import units
from mx_cli.base.cancel import Stop
from mx_cli.base.errors import IntegrityError, MxError, OriginChanged, Unreachable
from mx_cli.engine.ports import OnRetry

FIRST_DELAY = 0.25
LONGEST_DELAY = 30.0
REFUSALS = 3

T = TypeVar("T")


class Gate:
    """Closed for as long as a host asked to be left alone; shared by all that talk to it in this process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._opens = 0.0

    def hold(self, seconds: float) -> None:
        """Close the gate for `seconds` from now, unless it is closed for longer already."""
        with self._lock:
            self._opens = max(self._opens, time.monotonic() + seconds)

    @property
    def closed_for(self) -> float:
        """Seconds until it opens; 0 when open."""
        return max(0.0, self._opens - time.monotonic())

    def wait(self, stop: Stop) -> None:
        """Block until open. Raises the stop's reason."""
        while (left := self.closed_for) > 0:
            stop.wait(left)


class Gates:
    """One gate per host name."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._gates: dict[str, Gate] = {}

    def __getitem__(self, host: str) -> Gate:
        with self._lock:
            return self._gates.setdefault(host, Gate())


class Patience:
    """How long to try one thing again: until `retry_for` seconds have passed since it last made progress."""

    def __init__(self, what: str, retry_for: float, on_retry: OnRetry) -> None:
        self._what = what
        self._retry_for = retry_for
        self._on_retry = on_retry
        self._attempts = 0
        self._since: float | None = None
        self._repeats = 0
        self._refusals = 0

    def doubts_refusal(self) -> bool:
        """Whether a piece that was refused as a piece is worth asking for again: a few times it is."""
        self._refusals += 1
        return self._refusals <= REFUSALS

    def progressed(self) -> None:
        """Bytes came: failures are counted from zero again."""
        self._attempts, self._since = 0, None

    def delay(self, error: MxError, gate: Gate) -> float:
        """Seconds to wait before the next try; raises `error` when there should be none.

        Exponential with full jitter over the upper half; a Retry-After counts as the least, and closes the host's gate.
        """
        if isinstance(error, IntegrityError) and not isinstance(error, OriginChanged):
            self._repeats += 1
            if self._repeats > 1:
                raise error
            return self._announce(error, FIRST_DELAY)
        if not isinstance(error, Unreachable) or error.permanent:
            raise error
        now = time.monotonic()
        self._since = self._since or now
        self._attempts += 1
        wait = min(LONGEST_DELAY, FIRST_DELAY * 2 ** (self._attempts - 1)) * random.uniform(0.5, 1.0)
        if error.retry_after is not None:
            wait += error.retry_after
        if now + wait - self._since > self._retry_for:
            tries = f"{self._attempts} {'try' if self._attempts == 1 else 'tries'}"
            spent = f"gave up after {tries} in {now - self._since:.0f} s"
            if error.retry_after:
                spent = f"to be asked again in {units.duration(error.retry_after)}; {spent}"
            raise type(error)(
                f"{error.what} ({spent}; --retry-for {self._retry_for:g}s)", hint=error.hint, via=error.via
            )
        if error.retry_after is not None:
            gate.hold(wait)
        return self._announce(error, wait)

    def _announce(self, error: MxError, wait: float) -> float:
        self._on_retry(self._what, error, wait, self._attempts or self._repeats)
        return wait


def patiently(what: str, call: Callable[[], T], gate: Gate, stop: Stop, retry_for: float, on_retry: OnRetry) -> T:
    """`call()`, again as long as the policy allows. Blocks; raises the last error or the stop's reason."""
    patience = Patience(what, retry_for, on_retry)
    while True:
        gate.wait(stop)
        stop.check()
        try:
            return call()
        except MxError as error:
            stop.wait(patience.delay(error, gate))
