"""What each rank of a group reads, and the sinks that it reads into."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mx_cli.base.errors import IntegrityError
from mx_cli.engine.buffers import Pool, at_address, scatter
from mx_cli.engine.ports import Block, ReadItem, Through
from mx_cli.model.holding import HOST, Extent
from mx_cli.model.manifest import Entry
from mx_cli.plan.portions import portions
from mx_cli.plan.rows import Rows
from mx_cli.sinks.portions import PortionSink, RingOfPieces
from mx_cli.sinks.rows import RowsSink, pick

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


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 60), st.integers(1, 9), st.integers(1, 7), st.integers(0, 12), st.integers(0, 5)),
        max_size=4,
    ),
    st.lists(st.integers(1, 150), max_size=5),
    st.integers(1, 40),
    st.sampled_from([0, 4, 1000]),
)
def test_rows_land_where_they_belong(
    shapes: list[tuple[int, int, int, int, int]], cuts: list[int], step: int, copy_along: int
) -> None:
    """However the file is cut into items, and an item into what a source hands over at once."""
    data = bytes(n % 251 for n in range(300))
    pool, at = Pool(4000), 0
    rows: list[Rows] = []
    for offset, length, runs, gap, apart in shapes:
        rows.append(Rows("f", offset, length, runs, length + gap, pool.address + at, length + apart, HOST))
        at += runs * (length + apart)
    expected = bytearray(pool.view[:at])
    for row in rows:
        for start, count, address in row.inside(0, 300):
            expected[address - pool.address : address - pool.address + count] = data[start : start + count]
    sink = RowsSink(rows, copy_along)
    edges = sorted({0, 300, *cuts})
    for start, end in itertools.pairwise(edges):
        dest = sink.acquire(ReadItem(ENTRY, start, end - start))
        for low in range(start, end, step):
            piece = memoryview(data)[low : min(end, low + step)]
            if isinstance(dest, Through):
                dest.place(low - start, piece)
            else:
                scatter(dest, low - start, piece)
    assert bytes(pool.view[:at]) == bytes(expected)


def test_rows_go_to_a_gpu_by_few_copies() -> None:
    """Host bytes are packed first: one copy for rows that lie together there, one for each otherwise."""
    data = bytes(range(200))
    copies: list[tuple[int, int, bytes]] = []

    def put(device: int, address: int, view: memoryview) -> None:
        copies.append((device, address, bytes(view)))

    together = Rows("f", 10, 4, 5, 20, 1000, 4, 0)
    pick(together, 0, memoryview(data), put)
    assert copies == [(0, 1000, b"".join(data[10 + n * 20 : 14 + n * 20] for n in range(5)))]
    copies.clear()
    pick(together._replace(step=8), 0, memoryview(data), put)
    assert copies == [(0, 1000 + n * 8, data[10 + n * 20 : 14 + n * 20]) for n in range(5)]
