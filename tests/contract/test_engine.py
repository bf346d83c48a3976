"""The engine over the memory adapters: what it promises whatever the source and the sink are."""

from __future__ import annotations

import threading

import pytest

from mx_cli.base.cancel import Stop
from mx_cli.base.errors import (
    AccessDenied,
    IntegrityError,
    Interrupted,
    MxError,
    NoSpace,
    NotFound,
    OriginChanged,
    Unreachable,
)
from mx_cli.engine.buffers import Pool
from mx_cli.engine.meter import Meter
from mx_cli.engine.ports import NoRanges, ReadItem
from mx_cli.engine.retry import Gate
from mx_cli.engine.run import Limits, Transfer
from mx_cli.engine.threads import Lifted
from mx_cli.flows.lead import items_of
from mx_cli.model.manifest import BLOCK, Entry
from mx_cli.plan.ranges import interleave
from tests.rig.memory import MemoryReader, MemorySink
from tests.support import noise

SIZES = {"empty": 0, "one": 1, "small": 1000, "block": BLOCK, "large": 3 * BLOCK + 17}


def entry_of(path: str, size: int | None, validator: str = "v1") -> Entry:
    return Entry(path, size, validator)


class Bench:
    """One transfer of `files` with everything around it."""

    def __init__(
        self, files: dict[str, bytes], *, width: int = 4, stall: float = 30.0, retry_for: float = 30.0
    ) -> None:
        self.files = files
        self.reader = MemoryReader(files)
        self.sink = MemorySink()
        self.meter, self.stop, self.gate = Meter(), Stop(), Gate()
        self.limits = Limits(retry_for, stall, width, 16)
        self.retries: list[tuple[str, MxError]] = []
        self.entries = [entry_of(path, len(data)) for path, data in files.items()]

    def run(self, items: list[ReadItem] | None = None) -> Transfer:
        source = Lifted(self.reader)
        transfer = Transfer(
            source,
            self.sink,
            self.limits,
            self.gate,
            self.meter,
            self.stop,
            lambda what, error, delay, attempt: self.retries.append((what, error)),
        )
        try:
            transfer.run(items or list(interleave((items_of(e, [], 1 << 20) for e in self.entries), 4)))
        finally:
            source.close()
        return transfer

    def check(self) -> None:
        for path, data in self.files.items():
            assert self.sink.content(path) == data, path
        assert self.meter.fetched >= sum(map(len, self.files.values()))


@pytest.fixture
def bench() -> Bench:
    return Bench({path: noise(path, size) for path, size in SIZES.items()})


def test_every_byte_arrives_once(bench: Bench) -> None:
    bench.run()
    bench.check()
    assert bench.meter.fetched == sum(SIZES.values())
    assert bench.meter.retries == 0
    assert bench.reader.most <= bench.limits.max_width


def test_nothing_is_in_flight_afterwards(bench: Bench) -> None:
    assert bench.run().in_flight == frozenset()


def test_blocks_are_at_most_four_mebibytes_and_tile_the_file(bench: Bench) -> None:
    bench.run()
    blocks = sorted(bench.sink.committed["large"], key=lambda block: block.offset)
    assert max(block.length for block in blocks) <= BLOCK
    assert [block.offset for block in blocks] == [0, *(b.offset + b.length for b in blocks)][:-1]


def test_a_cut_connection_goes_on_where_it_stopped(bench: Bench) -> None:
    bench.reader.cut = {"large": 700_001, "small": 3}
    bench.run()
    bench.check()
    assert bench.meter.fetched == sum(SIZES.values())
    assert {path for path, _ in bench.retries} == {"large", "small"}


@pytest.mark.parametrize(
    "error", [AccessDenied("no"), NotFound("gone"), OriginChanged("other"), Unreachable("x", permanent=True)]
)
def test_what_retrying_does_not_cure_is_raised_at_once(bench: Bench, error: MxError) -> None:
    bench.reader.fault = lambda item, count: error if item.entry.path == "large" else None
    with pytest.raises(type(error)):
        bench.run()
    assert bench.retries == []


def test_an_integrity_error_is_tried_once_more(bench: Bench) -> None:
    bench.reader.fault = lambda item, count: (
        IntegrityError("odd") if item.entry.path == "small" and count == 1 else None
    )
    bench.run()
    bench.check()
    assert [path for path, _ in bench.retries] == ["small"]


def test_an_integrity_error_that_stays_is_raised(bench: Bench) -> None:
    bench.reader.fault = lambda item, count: IntegrityError("odd") if item.entry.path == "small" else None
    with pytest.raises(IntegrityError):
        bench.run()
    assert len(bench.retries) == 1


def test_retries_end_when_their_time_is_spent(bench: Bench) -> None:
    bench.limits = Limits(0.5, 30.0, 4, 16)
    bench.reader.fault = lambda item, count: Unreachable("busy") if item.entry.path == "small" else None
    with pytest.raises(Unreachable, match="gave up after"):
        bench.run()


def test_retry_after_closes_the_gate_for_all(bench: Bench) -> None:
    held: list[float] = []

    def fault(item: ReadItem, count: int) -> Exception | None:
        if item.entry.path == "small":
            held.append(bench.gate.closed_for)
            return Unreachable("later", retry_after=0.3) if count == 1 else None
        return None

    bench.reader.fault = fault
    bench.run()
    bench.check()
    assert [path for path, _ in bench.retries] == ["small"]
    assert held == [0.0, 0.0]


def test_without_ranges_one_stream_brings_the_whole_file(bench: Bench) -> None:
    bench.reader.ranges = False
    bench.run()
    bench.check()
    whole = [item for item in bench.reader.opened if item.whole and item.entry.path == "large"]
    assert len(whole) == 1


def test_without_ranges_what_was_there_counts_no_longer(bench: Bench) -> None:
    bench.files = {"large": bench.files["large"]}
    (entry,) = [entry for entry in bench.entries if entry.path == "large"]
    bench.meter.have(BLOCK)
    bench.reader.ranges = False
    bench.reader.cut = {"large": 2_000_000}
    bench.run(items_of(entry, [(0, BLOCK)], 1 << 20))
    bench.check()
    assert bench.meter.done == entry.size


def test_a_range_that_is_refused_among_many_costs_no_other(bench: Bench) -> None:
    refused: list[ReadItem] = []

    def fault(item: ReadItem, count: int) -> Exception | None:
        if item.entry.path == "large" and item.offset > 0 and not item.whole and len(refused) < 2:
            refused.append(item)
            return NoRanges("busy")
        return None

    bench.reader.fault = fault
    bench.limits = Limits(30.0, 30.0, 1, 1)
    bench.run()
    bench.check()
    assert len(refused) == 2
    assert not [item for item in bench.reader.opened if item.whole and item.entry.path == "large"]


def test_without_ranges_a_cut_starts_over(bench: Bench) -> None:
    bench.reader.ranges = False
    bench.reader.cut = {"large": 2_000_000}
    bench.run()
    bench.check()


def test_a_file_without_validator_is_never_put_together(bench: Bench) -> None:
    bench.entries = [entry_of(path, len(data), validator="") for path, data in bench.files.items()]
    bench.run()
    bench.check()
    assert all(item.offset == 0 for item in bench.reader.opened)


def test_a_file_of_unknown_size(bench: Bench) -> None:
    bench.files = {"large": bench.files["large"][:3_000_000]}
    bench.reader.files = bench.files
    bench.entries = [entry_of("large", None)]
    bench.run()
    bench.check()
    assert bench.sink.ended == {"large": 3_000_000}


def test_a_stalled_stream_is_given_up_and_read_again(bench: Bench) -> None:
    bench.limits = Limits(30.0, 0.3, 4, 16)
    hold = threading.Event()
    bench.reader.hold = hold

    def fault(item: ReadItem, count: int) -> Exception | None:
        if bench.retries:
            hold.set()
        return None

    bench.reader.fault = fault
    bench.run()
    bench.check()
    assert "stalled" in bench.retries[0][1].what


def test_stop_ends_a_transfer_whose_streams_hang(bench: Bench) -> None:
    bench.reader.hold = threading.Event()
    threading.Timer(0.2, bench.stop.request, [Interrupted(15)]).start()
    with pytest.raises(Interrupted):
        bench.run()
    assert set(bench.sink.ended) <= {"empty"}


def test_a_failing_sink_stops_the_transfer(bench: Bench) -> None:
    bench.sink.failure = IntegrityError("found while verifying")
    with pytest.raises(IntegrityError, match="found while"):
        bench.run()


def test_who_has_no_buffer_ends_with_an_error() -> None:
    """A thread that ended in silence would leave its item in flight for ever."""

    def refuse(pool: Pool) -> None:
        raise NoSpace("no memory can be locked")

    source = Lifted(MemoryReader({"f": b"bytes"}), made=refuse)
    item = ReadItem(entry_of("f", 5), 0, 5)
    source.start(item, MemorySink().acquire(item))
    (done,) = source.poll(30)
    assert done.finished
    assert isinstance(done.error, NoSpace)
    source.close()


def test_small_items_wait_their_turn_without_counting_as_stalled() -> None:
    files = {f"f{n:04d}": noise(str(n), 100) for n in range(500)}
    bench = Bench(files, width=2)
    bench.reader.in_flight = 2
    bench.run()
    bench.check()
    assert bench.reader.most <= 2


def test_a_width_that_shrinks_holds_for_what_waits_too() -> None:
    data = {f"f{n}": noise(str(n), 100) for n in range(40)}
    reader, sink = MemoryReader(data), MemorySink()
    source = Lifted(reader)
    for width, paths in ((4, [*data][:20]), (1, [*data][20:])):
        reader.most = 0
        source.widen(width)
        items = [ReadItem(entry_of(path, 100), 0, 100) for path in paths]
        for item in items:
            source.start(item, sink.acquire(item))
        left = set(items)
        while left:
            left -= {done.item for done in source.poll(5) if done.finished}
        assert reader.most <= width
    source.close()


def test_threads_end_with_their_source(bench: Bench) -> None:
    bench.run()
    for thread in threading.enumerate():
        if thread.name.startswith("read-"):
            thread.join(5)
            assert not thread.is_alive()


def test_what_is_there_already_is_not_read() -> None:
    entry = entry_of("a", 10 * BLOCK)
    items = items_of(entry, [(0, BLOCK), (2 * BLOCK, 3 * BLOCK)], BLOCK)
    assert [(item.offset, item.length) for item in items[:2]] == [(BLOCK, BLOCK), (3 * BLOCK, BLOCK)]
    assert sum(item.length or 0 for item in items) == 8 * BLOCK
