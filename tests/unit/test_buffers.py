"""Host memory for weights."""

from __future__ import annotations

import ctypes
import gc
import mmap
import weakref

import pytest

from mx_cli.engine import buffers
from mx_cli.engine.buffers import AHEAD, Pool, scatter
from mx_cli.engine.ports import Memory
from tests.rig.serving import eventually

PAGE = mmap.PAGESIZE


def resident(pool: Pool) -> int:
    """Pages of it that are there (mincore(2))."""
    pages = (ctypes.c_ubyte * (len(pool.view) // PAGE))()
    assert ctypes.CDLL(None).mincore(ctypes.c_void_p(pool.address), ctypes.c_size_t(len(pool.view)), pages) == 0
    return sum(page & 1 for page in pages)


def test_memory_is_touched_ahead_and_keeps_what_is_written_meanwhile() -> None:
    pool = Pool(3 * AHEAD, fresh=True)
    assert resident(pool) == 0
    pool.view[2 * AHEAD] = 7
    pool.touch_ahead()
    pool.view[5] = 9
    eventually(lambda: resident(pool) == len(pool.view) // PAGE)
    assert (pool.view[5], pool.view[2 * AHEAD]) == (9, 7)


def test_touching_ends_with_the_memory() -> None:
    pool = Pool(AHEAD, fresh=True)
    memory = weakref.ref(pool._map)
    del pool
    gc.collect()
    assert memory() is None
    # What has no memory any more is not touched: address 0 would end this.
    buffers._touch_ahead(memory, 0, AHEAD)


@pytest.mark.parametrize("put", [False, True])
def test_bytes_go_to_the_parts_that_want_them(put: bool) -> None:
    target = bytearray(40)
    base = ctypes.addressof(ctypes.c_char.from_buffer(target))

    def copy(address: int, view: memoryview) -> None:
        target[address - base : address - base + len(view)] = view

    parts = ((0, 3, base + 30), (5, 4, base), (9, 2, base + 10))
    memory = Memory(parts, put=copy if put else None)
    scatter(memory, 1, memoryview(bytes(range(1, 10))))
    assert target[:12] == bytes([5, 6, 7, 8, 0, 0, 0, 0, 0, 0, 9, 0])
    assert target[30:] == bytes([0, 1, 2, 0, 0, 0, 0, 0, 0, 0])
    scatter(memory, 3, memoryview(b"xx"))
    scatter(memory, 11, memoryview(b"xx"))
    assert sum(map(bool, target)) == 7
