"""How much has moved, and how fast. The one progress counter."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

WINDOW = 5.0
SETTLED = 0.5


class Meter:
    """Counts bytes of a job. `add` from any thread; rates are over the last WINDOW seconds.

    `workers` items are in flight, of the files `current`: (path, bytes in place, size).
    `throttled_until` and `last_error_at` are seconds since 1970, for other processes.
    `ticks` grows with every sign of work (bytes fetched, written or hashed): who watches for life compares it.
    """

    def __init__(self, total: int = 0) -> None:
        self._lock = threading.Lock()
        self.total = total
        self.done = 0
        self.fetched = 0
        self.files_total = 0
        self.files_done = 0
        self.workers = 0
        self.current: tuple[tuple[str, int, int], ...] = ()
        self.retries = 0
        self.phase = "transfer"
        self.throttled_until = 0.0
        self.last_error = ""
        self.last_message = ""
        self.last_error_at = 0.0
        self.ticks = 0
        self._waits: dict[object, float] = {}
        self._pause_until = 0.0
        self._marks: deque[tuple[float, int]] = deque([(time.monotonic(), 0)])

    def expect(self, count: int) -> None:
        """`count` bytes more are to come, or fewer."""
        with self._lock:
            self.total += count

    def add(self, count: int) -> None:
        """`count` bytes came from the source."""
        with self._lock:
            self.done += count
            self.fetched += count
            self.ticks += 1

    def have(self, count: int) -> None:
        """`count` bytes were there already."""
        with self._lock:
            self.done += count
            self.ticks += 1

    def lose(self, count: int) -> None:
        """`count` bytes have to be fetched again."""
        with self._lock:
            self.done -= count

    def tick(self) -> None:
        with self._lock:
            self.ticks += 1

    def failed(self, name: str, message: str) -> None:
        """Something failed that is tried again."""
        with self._lock:
            self.last_error, self.last_message, self.last_error_at = name, message, time.time()

    def throttled(self, seconds: float) -> None:
        """The source asked to be left alone for that long."""
        with self._lock:
            self.throttled_until = max(self.throttled_until, time.time() + seconds)

    def waiting(self, seconds: float) -> None:
        """An announced pause begins: silence until then is no death."""
        with self._lock:
            self._pause_until = max(self._pause_until, time.monotonic() + seconds)

    @contextmanager
    def bounded(self, seconds: float) -> Iterator[None]:
        """Around a call that shows no progress (an fsync, a listing): silence is no death before `seconds` have passed."""
        token = object()
        with self._lock:
            self._waits[token] = time.monotonic() + seconds
        try:
            yield
        finally:
            with self._lock:
                del self._waits[token]
                self.ticks += 1

    @property
    def waits_until(self) -> float:
        """The moment (monotonic) until which silence is explained."""
        with self._lock:
            return max(self._pause_until, *self._waits.values(), 0.0)

    def file_done(self) -> None:
        with self._lock:
            self.files_done += 1
            self.ticks += 1

    def rate(self) -> float:
        """Bytes fetched a second, over the last few seconds; 0 in the first moment. Call it now and then: it keeps marks."""
        with self._lock:
            now = time.monotonic()
            self._marks.append((now, self.fetched))
            while len(self._marks) > 2 and now - self._marks[0][0] > WINDOW:
                self._marks.popleft()
            start, before = self._marks[0]
            return (self.fetched - before) / (now - start) if now - start >= SETTLED else 0.0
