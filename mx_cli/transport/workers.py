"""Threads that do jobs: as many as there is work, up to a limit."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

from mx_cli.base.errors import NoSpace
from mx_cli.base.threads import begin


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
        """Have the job done by some thread; does not block. What a job raises ends its thread and is reported as usual.

        Raises NoSpace when there is no thread and none can be started.
        """
        with self._lock:
            grow = self._jobs.qsize() >= self._waiting and self._threads < self._limit
            self._threads += grow
        if grow:
            self._begin_thread()
        self._jobs.put(job)

    def _begin_thread(self) -> None:
        try:
            begin(threading.Thread(target=self._run, name=self._name, daemon=True))
        except NoSpace:
            with self._lock:
                self._threads -= 1
                if self._threads:
                    return
            raise

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
