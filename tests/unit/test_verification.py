"""Bytes beside the digests of a holding: in any steps, in one run of memory or in many, with packs and without."""

from __future__ import annotations

import ctypes
import dataclasses
import itertools
import random
from collections.abc import Sequence

import pytest
import xxhash

from mx_cli.base.errors import IntegrityError
from mx_cli.engine.ports import Memory, ReadItem
from mx_cli.model.checks import Check, plan_packs
from mx_cli.model.holding import Holding, start_key
from mx_cli.model.manifest import BLOCK, Entry, FileRecord, Manifest
from mx_cli.transport.verification import Verification

FILE = "model.safetensors"
HEAD = 100
SIZES = [10, 0, 5000, 7, 2 * BLOCK + 3, 64, 64, BLOCK, 1, 2_000_000]
DATA = random.Random(5).randbytes(HEAD + sum(SIZES))
ENTRY = Entry(FILE, len(DATA))


def make_holding(*, packs: bool) -> Holding:
    rows, starts, spans = [], {}, []
    at = HEAD
    for index, size in enumerate(SIZES):
        name = f"t{index}"
        blocks = tuple(xxhash.xxh3_128_hexdigest(DATA[at:][:size][b : b + BLOCK]) for b in range(0, size, BLOCK))
        rows.append((FILE, name, "U8", (size,), blocks))
        starts[start_key(FILE, name)] = at
        spans.append((at, size))
        at += size
    manifest = Manifest("", "r", "s", 1, "", (FileRecord(FILE, len(DATA), "0" * 32),), tensors=tuple(rows))
    found = [Check(a, b - a, xxhash.xxh3_128_hexdigest(DATA[a:b])) for a, b in plan_packs(spans, BLOCK)]
    assert [pack.offset for pack in found] == [HEAD, HEAD + 5017 + 2 * BLOCK + 3]
    return Holding(manifest, (), starts, packs={FILE: tuple(found)} if packs else {})


PLAIN, PACKED = make_holding(packs=False), make_holding(packs=True)


class Place:
    """All of the file from `start` in memory: in one run, or in parts that begin at `cuts`, the last part first."""

    def __init__(self, start: int = 0, cuts: Sequence[int] = ()) -> None:
        self.item = ReadItem(ENTRY, start, len(DATA) - start)
        assert self.item.length is not None
        edges = [0, *cuts, self.item.length]
        self.buffer = bytearray(self.item.length + len(edges))
        self.base = ctypes.addressof(ctypes.c_char.from_buffer(self.buffer))
        parts, at = [], 0
        for begin, end in reversed(list(itertools.pairwise(edges))):
            self.buffer[at : at + end - begin] = DATA[start + begin : start + end]
            parts.append((begin, end - begin, self.base + at))
            at += end - begin + 1
        self.memory = Memory(tuple(reversed(parts)))

    def spoil(self, offset: int) -> None:
        """Another byte at this offset of the file."""
        at = offset - self.item.offset
        begin, _, address = next(part for part in self.memory.parts if part[0] <= at < part[0] + part[1])
        self.buffer[address - self.base + at - begin] ^= 1

    def verify(self, holding: Holding, step: int) -> None:
        assert self.item.length is not None
        one = Verification("a", holding, self.item, self.memory)
        for count in range(step, self.item.length, step):
            one.landed(count)
        one.landed(self.item.length)


def tensor_at(offset: int) -> str:
    at = HEAD
    for index, size in enumerate(SIZES):
        if at <= offset < at + size:
            return f"tensor t{index}, block {(offset - at) // BLOCK}"
        at += size
    raise AssertionError(offset)


@pytest.mark.parametrize("holding", [PLAIN, PACKED], ids=["plain", "packed"])
@pytest.mark.parametrize("step", [700_001, 1 << 20, 4 << 20, 1 << 30])
@pytest.mark.parametrize("place", [(0, ()), (HEAD, ()), (0, (HEAD, HEAD + 5010, HEAD + 5017)), (HEAD + 10, (40,))])
def test_right_bytes_pass_and_a_wrong_one_is_named(
    holding: Holding, step: int, place: tuple[int, Sequence[int]]
) -> None:
    Place(*place).verify(holding, step)
    for offset in (HEAD + 5011, HEAD + 5020, HEAD + 5018 + 2 * BLOCK, len(DATA) - 1, len(DATA) - 2_000_001 - BLOCK):
        one = Place(*place)
        one.spoil(offset)
        with pytest.raises(IntegrityError, match=f"wrong bytes from a .{tensor_at(offset)}: expected"):
            one.verify(holding, step)


def test_it_is_said_as_soon_as_a_block_is_there() -> None:
    one = Place(HEAD)
    one.spoil(HEAD + 5017 + 5)
    verification = Verification("a", PLAIN, one.item, one.memory)
    verification.landed(5017 + BLOCK - 1)
    with pytest.raises(IntegrityError, match="tensor t4, block 0"):
        verification.landed(5017 + BLOCK)


def test_a_tensor_that_two_parts_share_has_no_digest_of_its_own_here() -> None:
    one = Place(0, (HEAD + 3000,))
    one.spoil(HEAD + 3000)
    one.verify(PLAIN, 1 << 30)
    one.spoil(HEAD)
    with pytest.raises(IntegrityError, match="tensor t0"):
        one.verify(PACKED, 1 << 30)


def test_a_pack_with_a_wrong_digest_is_no_reason_to_refuse_right_bytes() -> None:
    lying = {FILE: tuple(pack._replace(expected="0" * 32) for pack in PACKED.packs[FILE])}
    one = Place()
    one.verify(dataclasses.replace(PACKED, packs=lying), 1 << 20)
    one.spoil(HEAD + 1)
    with pytest.raises(IntegrityError, match="tensor t0, block 0"):
        one.verify(dataclasses.replace(PACKED, packs=lying), 1 << 20)
