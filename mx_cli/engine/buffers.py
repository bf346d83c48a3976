"""Host buffers: what a transfer uses of memory, whatever the sizes of the files; and memory by its address."""

from __future__ import annotations

import bisect
import contextlib
import ctypes
import mmap
import os
import threading
import weakref
from collections.abc import Callable

from mx_cli.base import memory, units
from mx_cli.base.errors import NoSpace
from mx_cli.base.threads import begin
from mx_cli.engine.ports import Memory

STEP = 1 << 20
WRITE_STEP = 64 << 10
"""Bytes of one pwrite(2), and so of the page cache's pages at most. Larger ones are taken from free blocks of 2 MiB, which
a virtual machine has given back to its host (free page reporting): each page then costs a fault in the host, up to 1.6 s
of CPU a GB where this costs 0.2. Where memory stays, larger writes would save 0.03."""
HUGE = 2 << 20
AHEAD = 8 << 20
"""Bytes that are touched at once."""
POPULATE_WRITE = 23
"""MADV_POPULATE_WRITE of madvise(2), Linux 5.14: Python has no name for it."""


_KEPT: list[object] = []


def never_free(memory: object) -> None:
    """Keep memory for as long as the process lives: bytes of a read that cannot be ended may still land in it."""
    _KEPT.append(memory)


class Buffers:
    """Reused, page-aligned buffers of STEP bytes. At most as many exist as are in use at once. Thread-safe.

    `made`, where there is one, is shown the memory of each.
    """

    def __init__(self, made: Callable[[Pool], None] | None = None) -> None:
        self._made = made
        self._pools: list[Pool] = []
        self._lock = threading.Lock()
        self._free: list[memoryview] = []

    def take(self) -> memoryview:
        with self._lock:
            if self._free:
                return self._free.pop()
        if self._made is None:
            return memoryview(mmap.mmap(-1, STEP))
        pool = Pool(STEP)
        self._made(pool)
        with self._lock:
            self._pools.append(pool)
        return pool.view[:STEP]

    def give(self, view: memoryview) -> None:
        with self._lock:
            self._free.append(view)


class Pool:
    """One run of host memory, on huge pages where the kernel has them: a kernel copies from those at the speed of memcpy,
    from small ones at a fifth of it. Touched once, so that no transfer pays for the first touch; unless it is `fresh`: then
    the threads that fill it touch it, while others wait for bytes."""

    def __init__(self, size: int, *, fresh: bool = False) -> None:
        """Raises NoSpace."""
        self.size = size
        memory.require(size, "weights")
        try:
            self._map = mmap.mmap(-1, max(HUGE, -(-size // HUGE) * HUGE), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, OverflowError) as error:
            raise NoSpace(f"no memory for {units.size(size)} of weights ({error})") from None
        with contextlib.suppress(OSError):
            self._map.madvise(mmap.MADV_HUGEPAGE)
        self.view = memoryview(self._map)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        if not fresh:
            self._touch()

    def touch_ahead(self) -> None:
        """Touch fresh memory that is filled once, from its beginning, in a thread ahead of those that fill it."""
        ahead = weakref.ref(self._map), self.address, len(self.view)
        # Where no thread can be had, those that fill it touch it.
        with contextlib.suppress(NoSpace):
            begin(threading.Thread(target=_touch_ahead, args=ahead, name="touch", daemon=True))

    def _touch(self) -> None:
        try:
            self._map.madvise(POPULATE_WRITE)
        except OSError:
            for at in range(0, len(self.view), mmap.PAGESIZE):
                self.view[at] = 0


def _touch_ahead(memory: weakref.ref[mmap.mmap], address: int, size: int) -> None:
    """Until all is touched, or nobody has the memory any more. Changes no byte, whoever writes them meanwhile."""
    # Who fills it needs the core more.
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
    # Python's own madvise would hold the GIL.
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    for at in range(0, size, AHEAD):
        held = memory()
        if held is None or madvise(address + at, min(AHEAD, size - at), POPULATE_WRITE):
            return
        del held


def write_at(fd: int, view: memoryview, offset: int) -> None:
    """Write all of the view at `offset` of a file. Raises OSError."""
    done = 0
    while done < len(view):
        done += os.pwrite(fd, view[done : done + WRITE_STEP], offset + done)


def at_address(address: int, length: int) -> memoryview:
    """The host memory at an address. The caller keeps it alive and mapped."""
    return memoryview((ctypes.c_char * length).from_address(address)).cast("B")


def run_at(dest: Memory, offset: int, length: int) -> tuple[int | None, int]:
    """Where byte `offset` of an item belongs (None: nowhere), and of how many bytes from there on the same can be said."""
    index = bisect.bisect_right(dest.parts, offset, key=lambda part: part[0]) - 1
    if index >= 0:
        start, size, address = dest.parts[index]
        if offset < start + size:
            return address + offset - start, min(length, start + size - offset)
    after = dest.parts[index + 1][0] if index + 1 < len(dest.parts) else offset + length
    return None, min(length, after - offset)


def scatter(dest: Memory, offset: int, view: memoryview) -> None:
    """Copy bytes `offset`.. of an item to the parts that want them."""
    end = offset + len(view)
    first = max(0, bisect.bisect_right(dest.parts, offset, key=lambda part: part[0]) - 1)
    parts = dest.parts[first : bisect.bisect_left(dest.parts, end, key=lambda part: part[0])]
    if not parts:
        return
    base = min(address for _, _, address in parts)
    # A view of each part would cost more than the copy of a small one.
    whole = None if dest.put else at_address(base, max(address + length for _, length, address in parts) - base)
    for start, length, address in parts:
        low, high = max(start, offset), min(start + length, end)
        if low < high:
            piece, target = view[low - offset : high - offset], address + low - start
            if dest.put:
                dest.put(target, piece)
            elif whole is not None:
                whole[target - base : target - base + high - low] = piece
