"""What every sink promises, whatever it is: what the engine brings is there, also when the source breaks off and is asked again."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from mx_cli.base.cancel import Stop
from mx_cli.base.errors import MxError, Unreachable
from mx_cli.engine.buffers import Pool
from mx_cli.engine.meter import Meter
from mx_cli.engine.ports import ReadItem, Sink
from mx_cli.engine.retry import Gate
from mx_cli.engine.run import Limits, Transfer
from mx_cli.engine.threads import Lifted
from mx_cli.engine.verify import WholeDigest
from mx_cli.model.holding import HOST, Extent
from mx_cli.model.manifest import BLOCK, Entry
from mx_cli.plan.rows import Rows
from mx_cli.sinks.files import FileSink, Opened
from mx_cli.sinks.host import MemorySink
from mx_cli.sinks.part_files import PartFilesSink
from mx_cli.sinks.portions import PortionSink
from mx_cli.sinks.ring import Group, Ring, RingSink
from mx_cli.sinks.rows import RowsSink
from tests.rig import memory
from tests.rig.checkpoints import noise
from tests.rig.memory import MemoryReader

STEP = 700_001
CONTENT = {"a": noise("a", 2 * BLOCK + 5), "b": noise("b", 1000), "c": noise("c", BLOCK)}
STARTS = {"a": 0, "b": 2 * BLOCK + 5, "c": 2 * BLOCK + 1005}
TOTAL = sum(map(len, CONTENT.values()))
ENTRIES = {path: Entry(path, len(data), "v") for path, data in CONTENT.items()}
ITEMS = [
    ReadItem(ENTRIES[path], at, min(STEP, len(data) - at))
    for path, data in CONTENT.items()
    for at in range(0, len(data), STEP)
]


class Made:
    """A sink; `ended` waits for what goes on behind it, `found` are the bytes of each file as they lie there."""

    def __init__(
        self, sink: Sink, found: Callable[[], dict[str, bytes]], ended: Callable[[], None] = lambda: None
    ) -> None:
        self.sink, self.found, self.ended = sink, found, ended


def files(place: Path) -> Made:
    def opened(entry: Entry) -> Opened:
        return Opened(os.open(place / entry.path, os.O_RDWR | os.O_CREAT), [])

    sink = FileSink(opened, lambda entry: [WholeDigest()], lambda *block: None, lambda *done: None, Meter(), 2)

    def ended() -> None:
        sink.wait(Stop())
        sink.close()

    return Made(sink, lambda: {path: (place / path).read_bytes() for path in CONTENT}, ended)


def in_memory(place: Path) -> Made:
    sink = memory.MemorySink()
    return Made(sink, lambda: {path: sink.content(path) for path in CONTENT})


def _parted(data: bytes) -> dict[str, bytes]:
    return {path: data[start : start + len(CONTENT[path])] for path, start in STARTS.items()}


def _extents(pool: Pool) -> list[Extent]:
    return [Extent(path, 0, len(data), pool.address + STARTS[path]) for path, data in CONTENT.items()]


def _rows(address: int, device: int) -> list[Rows]:
    return [Rows(path, 0, len(data), 1, len(data), address + STARTS[path], 0, device) for path, data in CONTENT.items()]


def host(place: Path) -> Made:
    pool = Pool(TOTAL)
    return Made(MemorySink(_extents(pool)), lambda: _parted(bytes(pool.view[:TOTAL])))


def portion(place: Path) -> Made:
    pool = Pool(TOTAL)
    sink = PortionSink(_extents(pool), None)
    sink.expect(pool.address, pool.address + TOTAL)

    def ended() -> None:
        assert sink.filled()

    return Made(sink, lambda: _parted(bytes(pool.view[:TOTAL])), ended)


def rows(place: Path) -> Made:
    pool = Pool(TOTAL)
    return Made(RowsSink(_rows(pool.address, HOST), 0), lambda: _parted(bytes(pool.view[:TOTAL])))


def part_files(place: Path) -> Made:
    fd = os.open(place / "part", os.O_RDWR | os.O_CREAT)
    return Made(PartFilesSink(_rows(0, 0), [fd]), lambda: _parted((place / "part").read_bytes()), lambda: os.close(fd))


def ring(place: Path) -> Made:
    """Less room than there are bytes: somebody takes them meanwhile."""
    groups = [Group(item.entry.path, item.offset, item.offset + (item.length or 0)) for item in ITEMS]
    sink = RingSink(groups, Ring(4 * STEP))
    taken: dict[str, bytes] = dict.fromkeys(CONTENT, b"")

    def take() -> None:
        for group, buffer in sink.take():
            taken[group.file] += bytes(buffer)

    taker = threading.Thread(target=take, daemon=True)
    taker.start()

    def ended() -> None:
        taker.join(10)
        assert not taker.is_alive()

    return Made(sink, lambda: taken, ended)


KINDS = {one.__name__: one for one in (files, in_memory, host, portion, rows, part_files, ring)}


def away_at_first(item: ReadItem, count: int) -> MxError | None:
    return Unreachable("away") if count == 1 else None


@pytest.mark.parametrize("troubled", [False, True], ids=["smooth", "troubled"])
@pytest.mark.parametrize("kind", KINDS)
def test_what_the_engine_brings_is_there(kind: str, troubled: bool, tmp_path: Path) -> None:
    reader = MemoryReader(CONTENT)
    if troubled:
        reader = MemoryReader(CONTENT, fault=away_at_first, cut={"a": 100_000, "c": 1})
    made = KINDS[kind](tmp_path)
    source = Lifted(reader)
    limits = Limits(30, 30, 3, 3, in_order=True)
    Transfer(source, made.sink, limits, Gate(), Meter(), Stop(), lambda *told: None).run(ITEMS)
    made.sink.raise_failure()
    source.close()
    made.ended()
    assert made.found() == CONTENT
