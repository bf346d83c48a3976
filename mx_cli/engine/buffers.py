"""The pool of host buffers: what a transfer uses of memory, whatever the sizes of the files."""

from __future__ import annotations

import mmap
import threading

STEP = 1 << 20


class Buffers:
    """Reused, page-aligned buffers of STEP bytes. At most as many exist as are in use at once. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free: list[memoryview] = []

    def take(self) -> memoryview:
        with self._lock:
            if self._free:
                return self._free.pop()
        return memoryview(mmap.mmap(-1, STEP))

    def give(self, view: memoryview) -> None:
        with self._lock:
            self._free.append(view)
