"""How much has moved, and how fast. The one progress counter."""

from __future__ import annotations

import threading
import time
from collections import deque

WINDOW = 5.0


class Meter:
    """Counts bytes of a job. `add` from any thread; rates are over the last WINDOW seconds.

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
        self.retries = 0
        self.phase = "transfer"
        self.throttled_until = 0.0
        self.last_error = ""
        self.ticks = 0
        self.waits_until = 0.0
        self._marks: deque[tuple[float, int]] = deque([(time.monotonic(), 0)])

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

    def waiting(self, seconds: float) -> None:
        """A wait with a known limit begins (an fsync, a listing, an announced pause): silence until then is no death."""
        with self._lock:
            self.waits_until = max(self.waits_until, time.monotonic() + seconds)

    def file_done(self) -> None:
        with self._lock:
            self.files_done += 1
            self.ticks += 1

    def rate(self) -> float:
        """Bytes fetched a second, over the last few seconds. Call it now and then: it keeps the marks."""
        with self._lock:
            now = time.monotonic()
            self._marks.append((now, self.fetched))
            while len(self._marks) > 2 and now - self._marks[0][0] > WINDOW:
                self._marks.popleft()
            start, before = self._marks[0]
            return (self.fetched - before) / (now - start) if now > start else 0.0
