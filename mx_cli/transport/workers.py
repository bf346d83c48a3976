"""Threads that do jobs: as many as there is work, up to a limit."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable


class Workers:
    """Threads are started when they are needed, and stay. They are daemons: nothing that hangs keeps a process alive."""

    def __init__(self, name: str, limit: int) -> None:
        self._name = name
        self._limit = limit
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._threads = 0
        self._waiting = 0

    def do(self, job: Callable[[], None]) -> None:
        """Have the job done by some thread; does not block. What a job raises ends its thread and is reported as usual."""
        with self._lock:
            grow = self._jobs.qsize() >= self._waiting and self._threads < self._limit
            self._threads += grow
        self._jobs.put(job)
        if grow:
            threading.Thread(target=self._run, name=self._name, daemon=True).start()

    def _run(self) -> None:
        try:
            while True:
                with self._lock:
                    self._waiting += 1
                try:
                    job = self._jobs.get()
                finally:
                    with self._lock:
                        self._waiting -= 1
                if job is None:
                    return
                job()
        finally:
            with self._lock:
                self._threads -= 1

    def close(self) -> None:
        """No more jobs: threads end after what they are doing. Idempotent; does not wait."""
        with self._lock:
            threads = self._threads
        for _ in range(threads):
            self._jobs.put(None)
