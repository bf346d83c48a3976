"""What each rank of a group reads, and the sinks that it reads into."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mx_cli.base.errors import IntegrityError
from mx_cli.engine.buffers import Pool, at_address
from mx_cli.engine.ports import Block, ReadItem
from mx_cli.model.holding import Extent
from mx_cli.model.manifest import Entry
from mx_cli.plan.portions import portions
from mx_cli.sinks.portions import PortionSink, RingOfPieces

ENTRY = Entry("f", 1000)


@given(st.lists(st.integers(0, 50), max_size=40), st.integers(1, 9))
def test_portions_are_contiguous_and_about_equal(sizes: list[int], count: int) -> None:
    cuts = portions(sizes, count)
    assert len(cuts) == count
    assert [index for first, last in cuts for index in range(first, last)] == list(range(len(sizes)))
    most = max((sum(sizes[first:last]) for first, last in cuts), default=0)
    assert most <= sum(sizes) / count + max(sizes, default=0) + 1


def items(count: int, size: int) -> list[ReadItem]:
    return [ReadItem(ENTRY, index * size, size) for index in range(count)]


def fill(ring: RingOfPieces, item: ReadItem, value: int) -> None:
    (start, length, address), *more = ring.acquire(item).parts
    assert (start, length, more) == (0, item.length, [])
    at_address(address, length)[:] = bytes([value]) * length


def test_a_ring_has_room_when_an_older_piece_was_given_back() -> None:
    pieces = items(5, 100)
    ring = RingOfPieces(pieces, 200)
    assert [ring.has_room(item) for item in pieces] == [True, True, False, False, False]
    for index, item in enumerate(pieces):
        assert ring.has_room(item)
        assert not ring.filled(index)
        fill(ring, item, index)
        # A failed read is gone on with by an item that ends where the first one did.
        ring.commit(item, Block(item.offset, 40, b""))
        assert not ring.filled(index)
        rest = ReadItem(ENTRY, item.offset + 40, 60)
        fill(ring, rest, index + 100)
        ring.commit(rest, Block(rest.offset, 60, b""))
        assert ring.filled(index)
        assert bytes(ring.view(index)) == bytes([index]) * 40 + bytes([index + 100]) * 60
        ring.give_back(index)
    assert ring.filled(5)
    with pytest.raises(IntegrityError, match="no ranges"):
        ring.reset(ENTRY)


def test_memory_knows_when_a_run_of_it_is_filled() -> None:
    pool = Pool(1000)
    heard: list[int] = []
    # The bytes from 300 to 399 of the memory are nobody's.
    sink = PortionSink([Extent("f", 0, 300, pool.address), Extent("f", 300, 300, pool.address + 400)], None)
    sink.tell = lambda: heard.append(1)
    sink.expect(pool.address + 200, pool.address + 500)
    item = ReadItem(ENTRY, 0, 600)
    for start, end, filled in ((0, 250, False), (250, 390, False), (390, 400, True), (390, 400, True)):
        sink.commit(item, Block(start, end - start, b""))
        assert sink.filled() is filled
    assert len(heard) == 4
    sink.expect(pool.address + 500, pool.address + 700)
    assert not sink.filled()
    sink.commit(item, Block(400, 200, b""))
    assert sink.filled()
