"""What a sink promises the engine: over files, and over the memory sink of the tests."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import xxhash

from mx_cli.base.cancel import Stop
from mx_cli.base.errors import IntegrityError, MxError, Unreachable
from mx_cli.engine.meter import Meter
from mx_cli.engine.ports import Block, File, Host, ReadItem, Sink
from mx_cli.engine.retry import Gate
from mx_cli.engine.run import Limits, Transfer
from mx_cli.engine.threads import Lifted
from mx_cli.engine.verify import Consumer, WholeDigest
from mx_cli.model.manifest import BLOCK, Entry
from mx_cli.sinks.files import HELD_LIMIT, OPEN_LIMIT, SMALL, FileSink, Opened
from tests.rig.memory import MemoryReader, MemorySink
from tests.support import noise

SIZES = (0, 1, 1000, BLOCK, 2 * BLOCK + 5)


class Files:
    """A FileSink over a directory; `done` has what was completed: path -> (size, xxh3)."""

    def __init__(self, directory: Path, have: dict[str, bytes] | None = None) -> None:
        self.directory, self.have = directory, have or {}
        self.done: dict[str, tuple[int, str]] = {}
        self.journal: list[tuple[str, int, int]] = []
        self.refuse: Callable[[str], MxError | None] = lambda path: None
        self.sink = FileSink(
            self._open,
            lambda entry: [WholeDigest()],
            lambda entry, block: self.journal.append((entry.path, block.offset, block.length)),
            self._complete,
            Meter(),
            2,
        )

    def _open(self, entry: Entry) -> Opened:
        fd = os.open(self.directory / entry.path, os.O_RDWR | os.O_CREAT)
        present = self.have.get(entry.path, b"")
        os.pwrite(fd, present, 0)
        return Opened(fd, [(0, len(present))] if present else [])

    def _complete(self, entry: Entry, size: int, fd: int, consumers: Sequence[Consumer]) -> None:
        error = self.refuse(entry.path)
        if error:
            raise error
        (whole,) = consumers
        assert isinstance(whole, WholeDigest)
        self.done[entry.path] = size, whole.value

    def content(self, path: str) -> bytes:
        return (self.directory / path).read_bytes()


@pytest.fixture
def files(tmp_path: Path) -> Iterator[Files]:
    found = Files(tmp_path)
    yield found
    found.sink.close()


def put(sink: Sink, item: ReadItem, data: bytes) -> None:
    """What a source and the engine do with one item."""
    assert sink.has_room(item)
    dest = sink.acquire(item)
    if isinstance(dest, Host):
        dest.view[:] = data
    else:
        assert isinstance(dest, File)
        os.pwrite(dest.fd, data, dest.offset)
    for start in range(0, len(data), BLOCK):
        piece = data[start : start + BLOCK]
        sink.commit(item, Block(item.offset + start, len(piece), xxhash.xxh3_128(piece).digest()))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", ["files", "memory"])
@pytest.mark.parametrize("order", ["forwards", "backwards"])
def test_pieces_in_any_order_make_the_file(kind: str, size: int, order: str, tmp_path: Path) -> None:
    data = noise("x", size)
    entry = Entry("x", size, "v")
    held = Files(tmp_path)
    sink: Sink = MemorySink() if kind == "memory" else held.sink
    cuts = sorted({0, size // 3, size // 2, size})
    spans = list(itertools.pairwise(cuts)) or [(0, 0)]
    for start, end in reversed(spans) if order == "backwards" else spans:
        put(sink, ReadItem(entry, start, end - start), data[start:end])
    sink.end(entry, size)
    held.sink.wait(Stop())
    if isinstance(sink, MemorySink):
        assert sink.content("x") == data
    else:
        assert held.content("x") == data
        assert held.done == {"x": (size, xxhash.xxh3_128_hexdigest(data))}
    held.sink.close()


def test_what_was_there_counts_and_is_read_once(tmp_path: Path) -> None:
    data = noise("x", 2 * BLOCK)
    held = Files(tmp_path, {"x": data[:BLOCK]})
    entry = Entry("x", len(data), "v")
    put(held.sink, ReadItem(entry, BLOCK, BLOCK), data[BLOCK:])
    held.sink.end(entry, len(data))
    held.sink.wait(Stop())
    held.sink.close()
    assert held.done["x"] == (len(data), xxhash.xxh3_128_hexdigest(data))
    assert held.journal == [("x", BLOCK, BLOCK)]


def test_a_file_of_unknown_size_ends_where_the_engine_says(files: Files) -> None:
    data = noise("x", 5000)
    entry = Entry("x", None)
    dest = files.sink.acquire(ReadItem(entry, 0, None, whole=True))
    assert isinstance(dest, File)
    os.pwrite(dest.fd, data, 0)
    files.sink.commit(ReadItem(entry, 0, None, whole=True), Block(0, 5000, xxhash.xxh3_128(data).digest()))
    files.sink.end(entry, 5000)
    files.sink.wait(Stop())
    assert files.done == {"x": (5000, xxhash.xxh3_128_hexdigest(data))}


def test_a_reset_forgets(files: Files) -> None:
    old, new = noise("old", BLOCK + 9), noise("new", BLOCK + 9)
    entry = Entry("x", len(old), "v")
    put(files.sink, ReadItem(entry, 0, BLOCK), old[:BLOCK])
    files.sink.reset(entry)
    put(files.sink, ReadItem(entry, 0, len(new), whole=True), new)
    files.sink.end(entry, len(new))
    files.sink.wait(Stop())
    assert files.content("x") == new
    assert files.done["x"][1] == xxhash.xxh3_128_hexdigest(new)


@pytest.mark.parametrize("size", [100, BLOCK])
def test_a_failure_behind_the_transfer_is_raised_and_names_its_file(files: Files, size: int) -> None:
    files.refuse = lambda path: IntegrityError("wrong") if path == "bad" else None
    for path in ("good", "bad"):
        data = noise(path, size)
        put(files.sink, ReadItem(Entry(path, size, "v"), 0, size), data)
        files.sink.end(Entry(path, size, "v"), size)
    with pytest.raises(IntegrityError, match="wrong"):
        files.sink.wait(Stop())
    assert [entry.path for entry in files.sink.suspects] == ["bad"]


@pytest.mark.parametrize("size", [200_000, 300_000])
def test_files_that_were_begun_are_bounded(files: Files, size: int) -> None:
    """Small ones by their memory, others by their descriptors; there is room again when some were verified."""
    data = noise("x", size)
    begun = []
    while files.sink.has_room(item := ReadItem(Entry(f"f{len(begun)}", size, "v"), 0, size)):
        put(files.sink, item, data)
        begun.append(item)
    assert len(begun) == (HELD_LIMIT // size + 1 if size <= SMALL else OPEN_LIMIT)
    assert all(map(files.sink.has_room, begun))
    for item in begun:
        files.sink.end(item.entry, size)
    files.sink.wait(Stop())
    assert files.sink.has_room(item)
    assert len(files.done) == len(begun)


@pytest.mark.parametrize("size", [100_000, 300_000])
def test_more_failures_than_files_may_be_open(files: Files, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """While an origin is away every file is begun and none ends: what is tried again must get its turn."""
    monkeypatch.setattr("mx_cli.sinks.files.HELD_LIMIT", 10 * size)
    monkeypatch.setattr("mx_cli.sinks.files.OPEN_LIMIT", 10)
    content = {f"f{number}": noise(f"f{number}", size) for number in range(40)}
    reader = MemoryReader(content, fault=lambda item, count: Unreachable("away") if count == 1 else None)
    source, gate = Lifted(reader), Gate()
    items = [ReadItem(Entry(path, size, "v"), 0, size) for path in content]
    Transfer(source, files.sink, Limits(30, 30, 16, 16), gate, Meter(), Stop(), lambda *told: None).run(items)
    source.close()
    files.sink.wait(Stop())
    assert len(files.done) == 40
    assert [path for path, data in content.items() if files.content(path) != data] == []


def test_closing_twice_is_fine(files: Files) -> None:
    put(files.sink, ReadItem(Entry("x", BLOCK, "v"), 0, 100), noise("x", 100))
    files.sink.close()
    files.sink.close()
    assert files.done == {}
