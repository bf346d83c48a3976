"""Host buffers: what a transfer uses of memory, whatever the sizes of the files; and memory by its address."""

from __future__ import annotations

import bisect
import ctypes
import mmap
import threading

from mx_cli.engine.ports import Memory

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


def at_address(address: int, length: int) -> memoryview:
    """The host memory at an address. The caller keeps it alive and mapped."""
    return memoryview((ctypes.c_char * length).from_address(address)).cast("B")


def scatter(dest: Memory, offset: int, view: memoryview) -> None:
    """Copy bytes `offset`.. of an item to the parts that want them."""
    end = offset + len(view)
    first = max(0, bisect.bisect_right(dest.parts, offset, key=lambda part: part[0]) - 1)
    for start, length, address in dest.parts[first:]:
        if start >= end:
            return
        low, high = max(start, offset), min(start + length, end)
        if low < high:
            piece, target = view[low - offset : high - offset], address + low - start
            if dest.put:
                dest.put(target, piece)
            else:
                at_address(target, high - low)[:] = piece
