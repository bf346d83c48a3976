"""Counts the threads that are using something, so that who closes it can wait for them."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from mx_cli.base.errors import TransportFailed


class Inside:
    """Counts the threads in a block; once it is closed nobody gets in. Thread-safe."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._count = 0
        self.closed = False

    @contextlib.contextmanager
    def entered(self, what: str) -> Iterator[None]:
        """Be inside while the block runs. Raises TransportFailed, naming `what`, once it is closed."""
        with self._changed:
            if self.closed:
                raise TransportFailed(f"{what}: given up")
            self._count += 1
        try:
            yield
        finally:
            with self._changed:
                self._count -= 1
                self._changed.notify_all()

    def close(self, limit: float) -> bool:
        """Let nobody in any more, and wait until all are out, for `limit` seconds at most; whether they are. Idempotent."""
        with self._changed:
            self.closed = True
            return self._changed.wait_for(lambda: not self._count, limit)
