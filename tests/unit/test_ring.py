"""The room of a stream: any sizes through little memory, in order, whoever is slow, whatever is kept."""

from __future__ import annotations

import ctypes
import gc
import random
import threading
from collections.abc import Callable, Sequence

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mx_cli.base.errors import Unreachable
from mx_cli.engine.buffers import HUGE, Pool, at_address
from mx_cli.engine.ports import Block, ReadItem
from mx_cli.model.manifest import Entry
from mx_cli.sinks.ring import ALIGN, Buffers, Group, Ring, RingSink, Room

STEP = 250_000
NOISE = random.Random(1).randbytes(65_521)
ENTRY = Entry("model.safetensors", None)
MAKE: dict[str, Callable[[int], Room]] = {
    "ring": Ring,
    "another's ring": lambda size: Ring(size, Pool(size)),
    "buffers": Buffers,
}


@pytest.fixture(params=list(MAKE))
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def groups_of(sizes: Sequence[int], gaps: Sequence[int]) -> list[Group]:
    found, at = [], 0
    for size, gap in zip(sizes, gaps, strict=True):
        at += gap
        found.append(Group(ENTRY.path, at, at + size))
        at += size
    return found


def items_of(groups: Sequence[Group]) -> list[ReadItem]:
    return [
        ReadItem(ENTRY, at, min(STEP, group.end - at)) for group in groups for at in range(group.start, group.end, STEP)
    ]


def bytes_from(offset: int, length: int) -> bytes:
    begin = offset % len(NOISE)
    return (NOISE * (length // len(NOISE) + 2))[begin : begin + length]


def put(sink: RingSink, item: ReadItem) -> None:
    ((_, length, address),) = sink.acquire(item).parts
    at_address(address, length)[:] = bytes_from(item.offset, length)
    sink.commit(item, Block(item.offset, length, b""))


class Filler(threading.Thread):
    """Fills what there is room for, several items at once and out of order, as an engine does."""

    def __init__(self, sink: RingSink, items: Sequence[ReadItem], seed: int = 0) -> None:
        super().__init__(daemon=True)
        self.sink, self.items = sink, list(items)
        self.ended = threading.Event()
        self.full = threading.Event()
        self.chance = random.Random(seed)

    def run(self) -> None:
        begun: list[ReadItem] = []
        while self.items or begun:
            while self.items and len(begun) < 4 and self.sink.has_room(self.items[0]):
                begun.append(self.items.pop(0))
            if begun:
                put(self.sink, begun.pop(self.chance.randrange(len(begun))))
            else:
                self.full.set()
                if self.ended.wait(0.001):
                    return


def largest(groups: Sequence[Group]) -> int:
    return max(map(Buffers.needed, groups))


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    sizes=st.lists(st.integers(1, 1_500_000), min_size=1, max_size=12),
    gap=st.sampled_from([0, 0, 1, 4095, 10_000]),
    spare=st.sampled_from([0, 1, ALIGN, 30_000, 1 << 20]),
    seed=st.integers(0, 9),
)
def test_every_byte_in_order(kind: str, sizes: list[int], gap: int, spare: int, seed: int) -> None:
    groups = groups_of(sizes, [gap] * len(sizes))
    least = largest(groups) if kind == "buffers" else max(group.shift + group.size for group in groups)
    sink = RingSink(groups, MAKE[kind](least + spare))
    filler = Filler(sink, items_of(groups), seed)
    filler.start()
    taken = []
    for group, buffer in sink.take():
        assert bytes(buffer) == bytes_from(group.start, group.size)
        assert group.address % ALIGN == group.start % ALIGN
        taken.append(group)
    assert taken == groups
    filler.join(10)
    assert not filler.is_alive()


def test_a_slow_consumer_holds_up_the_source(kind: str) -> None:
    groups = groups_of([HUGE - ALIGN] * 8, [0] * 8)
    sink = RingSink(groups, MAKE[kind](3 * HUGE))
    filler = Filler(sink, items_of(groups))
    filler.start()
    stream = sink.take()
    next(stream)
    assert filler.full.wait(30)
    assert sum(group.missing == 0 for group in groups) == 3
    filler.full.clear()
    next(stream)
    assert filler.full.wait(30)
    assert sum(group.missing == 0 for group in groups) == 4
    filler.ended.set()
    filler.join(10)


def test_what_is_kept_is_not_written_over() -> None:
    groups = groups_of([HUGE - ALIGN] * 6, [0] * 6)
    sink = RingSink(groups, Buffers(2 * HUGE))
    filler = Filler(sink, items_of(groups))
    filler.start()
    kept = [(group, buffer) for group, buffer in sink.take()]
    for group, buffer in kept:
        assert bytes(buffer) == bytes_from(group.start, group.size)
    assert len({ctypes.addressof(buffer) for _, buffer in kept}) == 6


def test_what_is_dropped_is_used_again() -> None:
    groups = groups_of([HUGE - ALIGN] * 20, [0] * 20)
    sink = RingSink(groups, Buffers(2 * HUGE))
    places = set()
    for group, item_list in ((group, items_of([group])) for group in groups):
        for item in item_list:
            assert sink.has_room(item)
            put(sink, item)
        places.add(group.address - group.shift)
        if group is groups[0]:
            stream = sink.take()
        _, buffer = next(stream)
        del buffer
        gc.collect()
    assert len(places) <= 3


def test_memory_of_other_sizes_gives_way() -> None:
    sizes = [HUGE - ALIGN, HUGE - ALIGN, 3 * HUGE, HUGE // 2, 3 * HUGE]
    groups = groups_of(sizes, [0] * 5)
    sink = RingSink(groups, Buffers(largest(groups)))
    filler = Filler(sink, items_of(groups))
    filler.start()
    assert [group for group, _ in sink.take()] == groups


def test_a_failure_reaches_who_waits(kind: str) -> None:
    groups = groups_of([100, 100], [0, 0])
    sink = RingSink(groups, MAKE[kind](4 * HUGE))
    stream = sink.take()
    first = items_of(groups)[0]
    assert sink.has_room(first)
    put(sink, first)
    sink.fail(Unreachable("the origin is gone"))
    assert next(stream)[0] is groups[0]
    with pytest.raises(Unreachable, match="the origin is gone"):
        next(stream)


def test_too_small_a_room_has_none(kind: str) -> None:
    groups = groups_of([5 * HUGE], [0])
    sink = RingSink(groups, MAKE[kind](2 * HUGE))
    assert not sink.has_room(items_of(groups)[0])
