"""What is offered stays readable for who has begun to read it, and for nobody else once it is given back."""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from pathlib import Path

import pytest

from mx_cli.base.errors import NotFound
from mx_cli.engine.buffers import Pool
from mx_cli.model.holding import Extent, Holding
from mx_cli.model.manifest import FileRecord, Manifest
from mx_cli.transport.held import STEP, Held, InMemory, OnDisk
from tests.rig.checkpoints import noise

FILE = "model.safetensors"
DATA = noise("held", 2 * STEP + 5)
HOLDING = Holding(Manifest("", "", "", 1, "", (FileRecord(FILE, len(DATA), ""),)), (), {})


def on_disk(tmp_path: Path) -> OnDisk:
    (tmp_path / FILE).write_bytes(DATA)
    return OnDisk(tmp_path, HOLDING)


def in_memory() -> tuple[InMemory, weakref.ref[Pool]]:
    pool = Pool(len(DATA))
    pool.view[: len(DATA)] = DATA
    return InMemory("cpu", [Extent(FILE, 0, len(DATA), pool.address)], pool, None), weakref.ref(pool)


@pytest.mark.parametrize("kind", ["disk", "memory"])
def test_a_piece_is_what_was_asked_for(kind: str, tmp_path: Path) -> None:
    held: Held = on_disk(tmp_path) if kind == "disk" else in_memory()[0]
    assert b"".join(map(bytes, held.read(FILE, 7, len(DATA) - 7))) == DATA[7:]
    held.close()


def test_memory_lives_as_long_as_anybody_reads_it() -> None:
    held, pool = in_memory()
    reading = held.read(FILE, 0, len(DATA))
    found = bytes(next(reading))
    held.close()
    assert pool() is not None
    assert found + b"".join(map(bytes, reading)) == DATA
    del reading
    assert pool() is None


def test_memory_that_was_given_back_is_not_read() -> None:
    held, _ = in_memory()
    held.close()
    with pytest.raises(NotFound):
        next(held.read(FILE, 0, 10))


def test_memory_that_others_take_away_is_said_to_be_gone(tmp_path: Path) -> None:
    """Memory without a mapping, and pages of a file that was shortened: reading them directly ends a process."""
    path = tmp_path / "mapped"
    path.write_bytes(DATA)
    with path.open("rb") as file:
        mapped = mmap.mmap(file.fileno(), len(DATA), flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(mapped))
    held = InMemory("cpu", [Extent(FILE, 0, len(DATA), address)], mapped, None, lent=True)
    assert b"".join(map(bytes, held.read(FILE, 5, len(DATA) - 5))) == DATA[5:]
    os.truncate(path, 0)
    with pytest.raises(NotFound, match="taken away"):
        list(held.read(FILE, 0, len(DATA)))
    mapped.close()
    with pytest.raises(NotFound, match="taken away"):
        list(held.read(FILE, 0, len(DATA)))


def test_a_file_that_was_shortened_is_said_to_have_changed(tmp_path: Path) -> None:
    held = on_disk(tmp_path)
    os.truncate(tmp_path / FILE, len(DATA) - 1)
    with pytest.raises(NotFound, match=f"has changed since it is offered .{len(DATA) - 1} bytes, it had {len(DATA)}"):
        next(held.read(FILE, 0, 10))
    held.close()


def test_a_file_that_is_being_read_is_never_another_one(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.write_bytes(bytes(len(DATA)))
    held = on_disk(tmp_path)
    reading = held.read(FILE, 0, len(DATA))
    found = bytes(next(reading))
    held.close()
    taken = [os.open(other, os.O_RDONLY) for _ in range(4)]
    assert found + b"".join(map(bytes, reading)) == DATA
    with pytest.raises(NotFound):
        next(held.read(FILE, 0, 10))
    for fd in taken:
        os.close(fd)


@pytest.mark.parametrize(("offset", "length"), [(-1, 5), (0, len(DATA) + 1), (len(DATA), 1), (5, -1)])
def test_bytes_that_are_not_there(offset: int, length: int, tmp_path: Path) -> None:
    held = on_disk(tmp_path)
    with pytest.raises(NotFound):
        next(held.read(FILE, offset, length))
    held.close()
