"""Several sources as one: who gets what, and what happens to the work of one that fails. Real peers' sources, in memory."""

from __future__ import annotations

import ctypes
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import xxhash

from mx_cli.base.cancel import Stop
from mx_cli.base.errors import (
    AccessDenied,
    IntegrityError,
    Interrupted,
    MxError,
    NotFound,
    TransportFailed,
    Unreachable,
)
from mx_cli.engine import many
from mx_cli.engine.many import Bell, Many, Member
from mx_cli.engine.meter import Meter
from mx_cli.engine.ports import Host, Memory, ReadItem, Through
from mx_cli.engine.retry import Gate
from mx_cli.engine.run import Limits, Transfer
from mx_cli.engine.threads import Lifted
from mx_cli.model.holding import Holding, start_key
from mx_cli.model.manifest import BLOCK, FileRecord, Manifest
from mx_cli.transport import peer
from mx_cli.transport.nixl import rows
from mx_cli.transport.paths import in_steps
from mx_cli.transport.peer import ITEM, PeerSource
from tests.rig.memory import MemoryPath, MemoryReader, MemorySink
from tests.support import noise

FILES = {f"f{index:02}": noise(f"f{index}", 10_000 + index) for index in range(20)}


def holding_of(files: dict[str, bytes]) -> Holding:
    """Each file is one tensor."""
    rows, starts = [], {}
    for name, data in files.items():
        blocks = tuple(xxhash.xxh3_128_hexdigest(data[at : at + BLOCK]) for at in range(0, len(data), BLOCK))
        rows.append((name, f"t.{name}", "U8", (len(data),), blocks))
        starts[start_key(name, f"t.{name}")] = 0
    records = tuple(FileRecord(name, len(data), xxhash.xxh3_128_hexdigest(data)) for name, data in files.items())
    return Holding(Manifest("", "", "", 1, "", records, tensors=tuple(rows)), (), starts)


HOLDING = holding_of(FILES)
ITEMS = [ReadItem(HOLDING.entry(record), 0, record.size) for record in HOLDING.manifest.files]


class Bench:
    """One transfer from peers a, b, …, and the origin when there is one."""

    def __init__(self, count: int, *, origin: bool = False, silence: float = 30.0, window: int = 2) -> None:
        self.bell = Bell()
        self.paths = {name: MemoryPath(FILES, window=window) for name in "abcd"[:count]}
        self.gone: dict[str, MxError] = {}
        self.members = [
            Member(name, PeerSource(name, HOLDING, path, self.bell.ring, self.failure_of(name)), silence=silence)
            for name, path in self.paths.items()
        ]
        self.origin = MemoryReader(FILES)
        if origin:
            self.members.append(Member("origin", Lifted(self.origin, None, self.bell.ring), reserve=True))
        self.told: list[tuple[str, MxError]] = []
        self.sink, self.meter, self.stop = MemorySink(), Meter(), Stop()
        self.retries: list[MxError] = []

    def failure_of(self, name: str) -> Callable[[], MxError | None]:
        return lambda: self.gone.get(name)

    def run(self, items: list[ReadItem] | None = None) -> None:
        source = Many(self.members, self.bell, lambda member, error: self.told.append((member.name, error)))
        width = source.caps.max_in_flight
        transfer = Transfer(
            source,
            self.sink,
            Limits(5.0, 30.0, width, width),
            Gate(),
            self.meter,
            self.stop,
            lambda what, error, delay, attempt: self.retries.append(error),
        )
        try:
            transfer.run(ITEMS if items is None else items)
        finally:
            source.close()

    def check(self) -> None:
        """Everything came, and each byte is counted once."""
        for path, data in FILES.items():
            assert self.sink.content(path) == data, path
        total = sum(map(len, FILES.values()))
        assert self.meter.fetched == total
        assert sum(member.bytes for member in self.members) == total

    def brought(self, name: str) -> int:
        return len(self.paths[name].brought)

    def member(self, name: str) -> Member:
        return next(member for member in self.members if member.name == name)


def test_each_item_comes_once() -> None:
    bench = Bench(3)
    bench.run()
    bench.check()
    asked = Counter(item.entry.path for path in bench.paths.values() for item in path.asked)
    assert asked == dict.fromkeys(FILES, 1)
    assert not bench.told


def test_nobody_has_more_open_than_its_window() -> None:
    bench, open_now, most, lock = Bench(2), Counter[str](), Counter[str](), threading.Lock()
    for name, path in bench.paths.items():

        def count(item: ReadItem, number: int, name: str = name) -> None:
            with lock:
                open_now[name] += 1
                most[name] = max(most[name], open_now[name])

        def leave(
            item: ReadItem, dest: Any, flight: Any, landed: Any, name: str = name, path: MemoryPath = path
        ) -> None:
            try:
                MemoryPath.bring(path, item, dest, flight)
            finally:
                with lock:
                    open_now[name] -= 1

        path.before, path.bring = count, leave  # type: ignore[method-assign]
    bench.run()
    bench.check()
    assert max(most.values()) <= 2


def test_who_is_free_takes_the_work_of_who_is_slow() -> None:
    bench = Bench(2)
    done = threading.Event()

    def wait_for_the_rest(item: ReadItem, count: int) -> None:
        done.wait(30)

    def finish(item: ReadItem, count: int) -> None:
        if len(bench.paths["b"].asked) == len(ITEMS) - 2:
            done.set()

    bench.paths["a"].before, bench.paths["b"].before = wait_for_the_rest, finish
    bench.run()
    bench.check()
    assert (bench.brought("a"), bench.brought("b")) == (2, len(ITEMS) - 2)


@pytest.mark.parametrize("error", [TransportFailed("broken"), Unreachable("broken"), AccessDenied("broken")])
def test_the_work_of_one_that_fails_goes_elsewhere(error: MxError) -> None:
    bench = Bench(3)

    def fail(item: ReadItem, count: int) -> None:
        if count > 1:
            raise error

    bench.paths["a"].before = fail
    bench.run()
    bench.check()
    assert [name for name, _ in bench.told] == ["a"]
    assert bench.member("a").failure is error
    assert bench.paths["a"].closed.is_set()
    assert not bench.retries


def test_a_bug_in_one_ends_that_one_only() -> None:
    bench = Bench(2)

    def stumble(item: ReadItem, count: int) -> None:
        raise ZeroDivisionError("a bug")

    bench.paths["a"].before = stumble
    bench.run()
    bench.check()
    assert "ZeroDivisionError" in bench.told[0][1].what


def test_what_was_open_at_one_that_fails_is_begun_again_first_and_counted_once() -> None:
    """The read that hangs would still land: the path is closed before anybody else gets the piece."""
    bench = Bench(2)
    both = threading.Barrier(2)

    def fail_or_hang(item: ReadItem, count: int) -> None:
        if count <= 2:
            both.wait(30)
        if count == 1:
            raise TransportFailed("broken")
        bench.paths["a"].hang(item, count)

    closed_before: list[bool] = []

    def look(item: ReadItem, count: int) -> None:
        if item in bench.paths["a"].asked:
            closed_before.append(bench.paths["a"].closed.is_set())

    bench.paths["a"].before, bench.paths["b"].before = fail_or_hang, look
    bench.run()
    bench.check()
    assert closed_before == [True, True]
    lost = {item.entry.path for item in bench.paths["a"].asked}
    assert len(lost) == 2
    assert bench.brought("a") == 0
    assert bench.member("a").bytes == 0
    assert lost <= {item.entry.path for item in bench.paths["b"].brought}


def test_all_fail() -> None:
    bench = Bench(2)
    for name, path in bench.paths.items():

        def fail(item: ReadItem, count: int, name: str = name) -> None:
            raise TransportFailed(f"{name} broke")

        path.before = fail
    with pytest.raises(TransportFailed, match="no source is left") as caught:
        bench.run()
    assert "a: a broke" in caught.value.what
    assert "b: b broke" in caught.value.what


def test_a_grant_that_is_gone_ends_the_source_even_when_its_reads_hang() -> None:
    bench = Bench(2)

    def hang(item: ReadItem, count: int) -> None:
        bench.gone["a"] = TransportFailed("the grant is gone")
        bench.bell.ring()
        bench.paths["a"].hang(item, count)

    bench.paths["a"].before = hang
    bench.run()
    bench.check()
    assert [(name, error.what) for name, error in bench.told] == [("a", "the grant is gone")]


def test_silence_is_a_failure() -> None:
    bench = Bench(2)
    bench.member("a").silence = 0.2
    bench.paths["a"].before = bench.paths["a"].hang
    bench.run()
    bench.check()
    assert "no verified byte for 0.2 s" in bench.told[0][1].what


def test_silence_of_the_only_one() -> None:
    bench = Bench(1, silence=0.2)
    bench.paths["a"].before = bench.paths["a"].hang
    with pytest.raises(TransportFailed, match=r"no verified byte for 0\.2 s"):
        bench.run()


def test_who_has_nothing_to_do_is_not_silent() -> None:
    """While a gets nothing, since there is nothing, b takes much longer than a's patience."""
    bench = Bench(2, window=1)
    bench.member("a").silence = 0.5
    bench.paths["b"].before = lambda item, count: threading.Event().wait(1.5)
    bench.run(ITEMS[:4])
    assert not bench.told
    assert bench.brought("b") == 1


# --- wrong bytes -----------------------------------------------------------------------------------------------------


def test_wrong_bytes_are_read_once_more_elsewhere() -> None:
    bench = Bench(2)
    bench.paths["a"].spoil = {1}
    bench.run()
    bench.check()
    assert [(name, type(error)) for name, error in bench.told] == [("a", IntegrityError)]
    assert bench.member("a").alive
    path = bench.paths["a"].asked[0].entry.path
    assert path in {item.entry.path for item in bench.paths["b"].asked}
    assert "tensor t." in bench.told[0][1].what
    assert "block 0" in bench.told[0][1].what


def test_wrong_bytes_of_the_only_one_are_read_once_more_there() -> None:
    bench = Bench(1)
    bench.paths["a"].spoil = {3}
    bench.run()
    bench.check()
    assert len(bench.paths["a"].asked) == len(ITEMS) + 1


def test_bytes_that_are_wrong_everywhere() -> None:
    bench = Bench(2)
    for path in bench.paths.values():
        path.spoil = range(100)
    with pytest.raises(IntegrityError, match="no source gives right bytes") as caught:
        bench.run(ITEMS[:1])
    assert "a: " in caught.value.what
    assert "b: " in caught.value.what
    assert bench.meter.fetched == 0
    assert not bench.sink.ended


def test_one_with_many_wrong_bytes_is_left() -> None:
    bench = Bench(2)
    bench.paths["a"].spoil = range(100)
    bench.run()
    bench.check()
    assert not bench.member("a").alive
    assert len(bench.paths["a"].asked) <= many.MOST_WRONG + bench.paths["a"].window


def test_wrong_bytes_here_and_nobody_else_any_more() -> None:
    """The one other source dies: the error says both, and that bytes were wrong."""
    bench = Bench(2)
    bench.paths["a"].spoil = range(100)

    def die(item: ReadItem, count: int) -> None:
        raise TransportFailed("b died")

    bench.paths["b"].before = die
    with pytest.raises(IntegrityError, match="wrong bytes from a"):
        bench.run(ITEMS[:2])


# --- what one does not have, and the reserve -------------------------------------------------------------------------


def lack(paths: set[str]) -> Callable[[ReadItem, int], None]:
    def before(item: ReadItem, count: int) -> None:
        if item.entry.path in paths:
            raise NotFound(f"no such file here: {item.entry.path}")

    return before


def test_a_file_that_one_lacks_comes_from_another() -> None:
    bench = Bench(2)
    bench.paths["a"].before = lack(set(list(FILES)[:10]))
    bench.run()
    bench.check()
    assert bench.member("a").alive
    assert not bench.told


def test_a_file_that_nobody_has() -> None:
    bench = Bench(2)
    for path in bench.paths.values():
        path.before = lack({"f03"})
    with pytest.raises(NotFound, match="f03"):
        bench.run()


def test_a_file_that_one_lacks_and_the_other_took_to_its_grave() -> None:
    """Nobody can say that the bytes were wrong."""
    bench = Bench(2)

    def lacking(item: ReadItem, count: int) -> None:
        raise NotFound("no such file here")

    def die(item: ReadItem, count: int) -> None:
        raise TransportFailed("b died")

    bench.paths["a"].before, bench.paths["b"].before = lacking, die
    with pytest.raises((TransportFailed, NotFound)):
        bench.run(ITEMS[:1])


def test_the_reserve_is_not_asked_while_anybody_else_can_give() -> None:
    bench = Bench(2, origin=True)
    bench.paths["a"].spoil = {1}
    bench.run()
    bench.check()
    assert bench.origin.opened == []


def test_the_reserve_gives_what_the_others_cannot() -> None:
    bench = Bench(2, origin=True)
    for path in bench.paths.values():
        path.before = lack({"f03", "f04"})
    bench.run()
    bench.check()
    assert {item.entry.path for item in bench.origin.opened} == {"f03", "f04"}


def test_the_reserve_gives_all_when_the_others_are_gone() -> None:
    bench = Bench(1, origin=True)

    def die(item: ReadItem, count: int) -> None:
        if count > 5:
            raise TransportFailed("a died")

    bench.paths["a"].before = die
    bench.run()
    bench.check()
    assert len(bench.origin.opened) >= len(ITEMS) - 5


def test_the_engine_retries_what_the_reserve_could_not_give_at_once() -> None:
    bench = Bench(1, origin=True)
    bench.paths["a"].before = lack(set(FILES))
    bench.origin.cut = {"f05": 4000}
    bench.origin.fault = lambda item, count: Unreachable("later") if (item.entry.path, count) == ("f06", 1) else None
    bench.run()
    bench.check()
    assert len(bench.retries) == 2


# --- giving up -------------------------------------------------------------------------------------------------------


def test_a_stop_ends_all_and_nothing_is_begun_elsewhere() -> None:
    bench = Bench(2, window=1)
    reached = threading.Barrier(3)
    for path in bench.paths.values():
        path.stuck, path.before = {1}, lambda item, count: reached.wait(30)

    def stop() -> None:
        reached.wait(30)
        bench.stop.request(Interrupted(2))

    threading.Thread(target=stop).start()
    with pytest.raises(Interrupted):
        bench.run()
    assert sum(len(path.asked) for path in bench.paths.values()) == 2
    assert all(path.closed.is_set() for path in bench.paths.values())
    assert not bench.told


def test_an_item_that_waits_can_be_given_up() -> None:
    bell = Bell()
    path = MemoryPath(FILES, window=1)
    path.before = path.hang
    source = Many([Member("a", PeerSource("a", HOLDING, path, bell.ring, lambda: None))], bell, lambda m, e: None)
    memory = bytearray(20_000)
    for item in ITEMS[:2]:
        source.start(item, Host(memoryview(memory)[: item.length]))
    source.abort(ITEMS[1])
    source.abort(ITEMS[2])
    done = source.poll(0)
    assert [(one.item, one.finished, type(one.error)) for one in done] == [(ITEMS[1], True, TransportFailed)]
    assert source.moved(ITEMS[1]) is None
    source.close()


def test_closing_waits_for_what_is_being_placed() -> None:
    bell, placing, go_on, closed = Bell(), threading.Event(), threading.Event(), threading.Event()
    source = PeerSource("a", HOLDING, MemoryPath(FILES), bell.ring, lambda: None)
    placed: list[int] = []

    def place(offset: int, view: memoryview) -> None:
        placing.set()
        assert go_on.wait(60)
        placed.append(len(view))

    def close() -> None:
        source.close()
        closed.set()

    source.widen(2)
    source.start(ITEMS[0], Through(place))
    assert placing.wait(60)
    closing = threading.Thread(target=close)
    closing.start()
    assert not closed.wait(0.3)
    go_on.set()
    assert closed.wait(60)
    assert placed == [ITEMS[0].length]
    closing.join()


def test_nothing_is_placed_once_it_is_closed() -> None:
    bell, arrived, go_on = Bell(), threading.Event(), threading.Event()
    path = MemoryPath(FILES)
    source = PeerSource("a", HOLDING, path, bell.ring, lambda: None)
    placed: list[int] = []

    def bring(item: ReadItem, dest: Any, flight: Any, landed: Any) -> None:
        MemoryPath.bring(path, item, dest, flight)
        arrived.set()
        assert go_on.wait(60)

    path.bring = bring  # type: ignore[method-assign]
    source.start(ITEMS[0], Through(lambda offset, view: placed.append(len(view))))
    assert arrived.wait(60)
    source.close()
    go_on.set()
    (done,) = source.poll(60)
    assert isinstance(done.error, TransportFailed)
    assert not placed


def test_what_does_not_end_is_told_each_time_and_the_others_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer, "LEAVE", 0.1)
    bell, placing, go_on = Bell(), threading.Event(), threading.Event()

    def place(offset: int, view: memoryview) -> None:
        placing.set()
        assert go_on.wait(60)

    paths = [MemoryPath(FILES), MemoryPath(FILES)]
    members = [
        Member(name, PeerSource(name, HOLDING, p, bell.ring, lambda: None)) for name, p in zip("ab", paths, strict=True)
    ]
    source = Many(members, bell, lambda member, error: None)
    source.start(ITEMS[0], Through(place))
    assert placing.wait(60)
    for _ in range(2):
        with pytest.raises(TransportFailed, match="still being placed"):
            source.close()
    assert all(path.closed.is_set() for path in paths)
    go_on.set()
    (done,) = members[0].source.poll(60)
    assert done.error is None
    source.close()


def test_no_source_at_all() -> None:
    with pytest.raises(ValueError, match="no source"):
        Many([], Bell(), lambda member, error: None)


# --- small parts -----------------------------------------------------------------------------------------------------


def crumbs_of(memory: bytearray, count: int, each: int) -> Memory:
    """Parts of `each` bytes, one after the other in the item, with a gap between any two in memory."""
    base = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    return Memory(tuple((at * each, each, base + at * (each + 1)) for at in range(count)))


@pytest.mark.parametrize("least", [0, 11, 10])
def test_small_parts_come_together_and_are_verified_before_they_are_placed(least: int) -> None:
    data = noise("crumbs", 10_000)
    holding, bell, path = holding_of({"f": data}), Bell(), MemoryPath({"f": data}, least_part=least)
    source = PeerSource("a", holding, path, bell.ring, lambda: None)
    memory = bytearray(11_000)
    item = ReadItem(holding.entry(holding.manifest.files[0]), 0, len(data))
    source.start(item, crumbs_of(memory, 1000, 10))
    (done,) = source.poll(60)
    assert done.error is None
    assert [block.length for block in done.blocks] == [len(data)]
    assert b"".join(memory[at : at + 10] for at in range(0, 11_000, 11)) == data
    path.spoil = {2}
    memory[:] = bytes(11_000)
    source.start(item, crumbs_of(memory, 1000, 10))
    (done,) = source.poll(60)
    # The one tensor lies in many parts: only together they can be verified.
    assert isinstance(done.error, IntegrityError) == (least == 11)
    assert any(memory) == (least != 11)
    source.close()


def test_small_parts_of_a_long_item_split_no_block() -> None:
    """A buffer's worth at a time, cut where the digests are."""
    data = noise("long", 3 * ITEM)
    holding, bell = holding_of({"f": data}), Bell()
    path = MemoryPath({"f": data}, least_part=1 << 20)
    source = PeerSource("a", holding, path, bell.ring, lambda: None)
    each = 1 << 19
    memory = bytearray(3 * ITEM // each * (each + 1))
    item = ReadItem(holding.entry(holding.manifest.files[0]), 0, len(data))
    source.start(item, crumbs_of(memory, len(data) // each, each))
    (done,) = source.poll(60)
    assert done.error is None
    assert all(one.length == ITEM and one.offset % BLOCK == 0 for one in path.asked)
    assert b"".join(memory[at : at + each] for at in range(0, len(memory), each + 1)) == data
    source.close()


def test_pieces_of_host_memory_are_neither_small_nor_many() -> None:
    assert [peer.piece_size(size >> 20 << 20) >> 20 for size in (0, 1 << 28, 1 << 29, 1 << 30, 1 << 40)] == [
        8,
        8,
        16,
        32,
        32,
    ]


def test_rows_are_cut_and_grouped_in_steps() -> None:
    local = rows([1000, 5000, 9000, 20_000], [10, 25, 3, 4])
    remote = rows([100, 200, 300, 400], [10, 25, 3, 4])
    own, theirs, steps = in_steps(local, remote, 10)
    assert own[:, :2].tolist() == [[1000, 10], [5000, 10], [5010, 10], [5020, 5], [9000, 3], [20_000, 4]]
    assert theirs[:, :2].tolist() == [[100, 10], [200, 10], [210, 10], [220, 5], [300, 3], [400, 4]]
    assert steps == [(0, 1, 10), (1, 2, 10), (2, 3, 10), (3, 6, 12)]
    assert in_steps(local, remote, 1000)[2] == [(0, 4, 42)]
    assert in_steps(local[:1], remote[:1], 10)[2] == [(0, 1, 10)]
