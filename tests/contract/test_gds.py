"""Files straight into memory by NIXL: its backend for host memory (POSIX) does what GDS does for a GPU's, by the same code."""

from __future__ import annotations

import itertools
import os
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from mx_cli.base.errors import OriginChanged, StillLanding, TransportFailed
from mx_cli.engine.buffers import Pool, at_address
from mx_cli.engine.many import Bell, Member
from mx_cli.flows.catalog import catalog
from mx_cli.flows.from_python import process_context
from mx_cli.flows.pull_memory import move
from mx_cli.flows.targets import own_tensors
from mx_cli.model.holding import HOST
from mx_cli.transport import gds
from mx_cli.transport.disk import BLOCK, Disk
from mx_cli.transport.gds import BUFFER, Gds
from mx_cli.transport.nixl_files import GDS, POSIX, FileAgent
from mx_cli.transport.peer import PeerSource
from tests.support import capability, make_safetensors

pytestmark = [capability("torch"), capability("nixl")]

MIB = 1 << 20
_names = itertools.count(1)


class Agent(FileAgent):
    """NIXL's own, which writes down what it reads: (first byte, bytes). `fails` is raised from that read on."""

    def __init__(self) -> None:
        super().__init__(f"test-{os.getpid()}-{next(_names)}", POSIX)
        self.reads: list[tuple[int, int]] = []
        self.fails: tuple[int, TransportFailed] | None = None

    def read(self, fd: int, at: int, address: int, length: int, given_up: Callable[[], bool]) -> None:
        self.reads.append((at, length))
        if self.fails and len(self.reads) > self.fails[0]:
            raise self.fails[1]
        super().read(fd, at, address, length, given_up)


class OnHost:
    """Buffers of host memory; see `gds.Landing`."""

    def __init__(self, count: int) -> None:
        self._pool = Pool(count * BUFFER)
        self.addresses = [self._pool.address + index * BUFFER for index in range(count)]

    def copy(self, source: int, target: int, length: int) -> None:
        at_address(target, length)[:] = at_address(source, length)

    def peek(self, address: int, length: int) -> bytes:
        return bytes(at_address(address, length))


class Loading:
    """One load by path `gds` over host memory. `prepare` is called when all is open, before the first read."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.agent = Agent()
        self.notices: list[str] = []

    def __call__(
        self, names: list[str] | None = None, prepare: Callable[[], object] = lambda: None
    ) -> dict[str, bytes]:
        context = process_context({})
        found, origin = catalog(str(self.place), None, context)
        origin.close()
        assert found.directory
        disk = Disk(found.directory, found.holding, found.entries, self.notices.append)
        path = Gds(disk, self.agent, OnHost(disk.window), HOST, self.notices.append)
        tensors: dict[str, Any] = {}
        layout = own_tensors(found.holding, names, HOST, tensors)
        bell = Bell()
        source = PeerSource("disk", found.holding, path, bell.ring, lambda: None)
        prepare()
        move(found.holding, layout.targets, [Member("disk", source)], bell, context, layout, found.entries)
        layout.finish()
        return {name: tensor.numpy().tobytes() for name, tensor in tensors.items()}


@pytest.fixture
def loading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Loading]:
    monkeypatch.setenv("MX_CACHE_DIR", str(tmp_path / "cache"))
    one = Loading(tmp_path / "model")
    yield one
    one.agent.close(60)


def evict(path: Path) -> None:
    """Out of the page cache: what is in it is not read from the disk."""
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)


def make(place: Path, tensors: dict[str, int]) -> dict[str, bytes]:
    """A cold file of bytes, and what they are."""
    path = place / "model.safetensors"
    make_safetensors(path, {name: ("U8", [size], None) for name, size in tensors.items()})
    data = path.read_bytes()
    at = 8 + struct.unpack("<Q", data[:8])[0]
    found = {}
    for name, size in tensors.items():
        found[name] = data[at : at + size]
        at += size
    evict(path)
    return found


def test_tensors_anywhere_in_their_blocks(loading: Loading) -> None:
    """Odd sizes: they begin and end within blocks, and the file within one. NIXL reads whole blocks, each once or twice."""
    sizes = {f"t{i:03}": 70_001 + 997 * i for i in range(60)} | {"u": 21 * MIB + 3, "v": 1, "w": 0}
    expected = make(loading.place, sizes)
    assert loading() == expected
    size = (loading.place / "model.safetensors").stat().st_size
    reads = loading.agent.reads
    assert all(at % BLOCK == 0 and length % BLOCK == 0 and at + length <= size for at, length in reads)
    assert all(length <= BUFFER for _, length in reads)
    assert sum(length for _, length in reads) > 0.9 * size
    assert loading.notices == []


def test_a_file_of_whole_blocks_and_one_of_none(loading: Loading) -> None:
    expected = make(loading.place, {"t": 4 * MIB})
    path = loading.place / "model.safetensors"
    assert loading() == expected
    # The first read is the one that proves the file.
    assert loading.agent.reads[0] == (0, BLOCK)
    path.unlink()
    small = make(loading.place, {"t": 100})
    seen = len(loading.agent.reads)
    other = Loading(loading.place)
    assert other() == small
    assert other.agent.reads == []
    other.agent.close(60)
    assert len(loading.agent.reads) == seen


def test_what_is_in_the_page_cache_comes_from_there(loading: Loading) -> None:
    expected = make(loading.place, {"t": 9 * MIB})
    (loading.place / "model.safetensors").read_bytes()
    assert loading() == expected
    assert loading.agent.reads == []


def test_offsets_beyond_2_gib(loading: Loading) -> None:
    """A sparse file: `far` begins 5 GiB from its beginning."""
    hole, far = 5 << 30, bytes(range(256)) * (3 * MIB // 256) + b"end"
    header = (
        f'{{"hole":{{"dtype":"U8","shape":[{hole}],"data_offsets":[0,{hole}]}},'
        f'"far":{{"dtype":"U8","shape":[{len(far)}],"data_offsets":[{hole},{hole + len(far)}]}}}}'
    ).encode()
    loading.place.mkdir()
    path = loading.place / "model.safetensors"
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.seek(8 + len(header) + hole)
        file.write(far)
    evict(path)
    assert loading(["far"]) == {"far": far}
    assert max(at for at, _ in loading.agent.reads) >= hole


def test_a_file_that_is_truncated_meanwhile(loading: Loading) -> None:
    """NIXL's read of what is gone fails; the other path says what happened."""
    make(loading.place, {f"t{i}": 4 * MIB for i in range(4)})
    path = loading.place / "model.safetensors"
    with pytest.raises(OriginChanged, match=r"model\.safetensors"):
        loading(prepare=lambda: os.truncate(path, 6 * MIB))


@pytest.mark.parametrize("after", [0, 1, 3], ids=["the proof", "the first", "later"])
def test_a_file_whose_reads_fail_comes_by_the_other_path(after: int, loading: Loading) -> None:
    expected = make(loading.place, {f"t{i}": 5 * MIB + i for i in range(5)})
    loading.agent.fails = after, TransportFailed("reading: POSIX says backend")
    assert loading() == expected
    assert len(loading.notices) == 1
    assert "through host memory (gds: reading: POSIX says backend)" in loading.notices[0]


def test_a_block_that_comes_with_other_bytes_refuses_the_file(
    loading: Loading, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = make(loading.place, {"t": 5 * MIB})
    monkeypatch.setattr(OnHost, "peek", lambda self, address, length: bytes(length))
    assert loading() == expected
    assert loading.agent.reads == [(0, BLOCK)]
    assert "other bytes" in loading.notices[0]


# --- what NIXL says ---------------------------------------------------------------------------------------------------


def test_reads_past_the_end_fail_by_name(loading: Loading, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(3 * BLOCK))
    landing = OnHost(1)
    loading.agent.register(landing.addresses[0], BUFFER)
    fd = os.open(path, os.O_RDONLY)
    try:
        loading.agent.open(fd, 1 << 40)
        loading.agent.read(fd, BLOCK, landing.addresses[0], 2 * BLOCK, lambda: False)
        with pytest.raises(TransportFailed, match="POSIX says"):
            loading.agent.read(fd, 2 * BLOCK, landing.addresses[0], 2 * BLOCK, lambda: False)
    finally:
        loading.agent.close(60)
        os.close(fd)
    with pytest.raises(TransportFailed, match="was closed"):
        loading.agent.read(fd, 0, landing.addresses[0], BLOCK, lambda: False)


@capability("fuse")
def test_a_read_that_hangs_is_waited_for_and_then_outlived(cifuse: Callable[..., Path], tmp_path: Path) -> None:
    import threading

    place = cifuse(HANG=str(BLOCK))
    backing = tmp_path / "backing-1"
    (backing / "file").write_bytes(bytes(4 * BLOCK))
    agent, landing = Agent(), OnHost(1)
    agent.register(landing.addresses[0], BUFFER)
    fd = os.open(place / "file", os.O_RDONLY)
    agent.open(fd, 4 * BLOCK)
    failed: list[TransportFailed] = []

    def read() -> None:
        try:
            agent.read(fd, BLOCK, landing.addresses[0], BLOCK, (backing / ".hung").exists)
        except TransportFailed as error:
            failed.append(error)

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        while not (backing / ".hung").exists():
            reader.join(0.02)
        with pytest.raises(StillLanding, match="has not ended"):
            agent.close(0.5)
    finally:
        (backing / ".go").touch()
    reader.join(60)
    assert not reader.is_alive()
    agent.close(60)
    os.close(fd)


# --- whether it can be used -------------------------------------------------------------------------------------------


def test_the_verdict_is_in_words(tmp_path: Path) -> None:
    make(tmp_path / "model", {"t": MIB})
    file = tmp_path / "model" / "model.safetensors"
    assert gds.verdict(0, file) == ", ".join(gds.lacking())
    if "libcufile missing" in gds.lacking():
        with pytest.raises(TransportFailed, match="starting GDS_MT: GDS_MT says not found"):
            FileAgent("test-gds", GDS)


@pytest.mark.skipif(not gds.lacking(), reason="this machine has what GDS takes")
def test_without_it_files_come_through_host_memory(loading: Loading) -> None:
    make(loading.place, {"t": MIB})
    context = process_context({})
    found, origin = catalog(str(loading.place), None, context)
    origin.close()
    assert found.directory
    disk = Disk(found.directory, found.holding, found.entries)
    assert gds.over(disk, 0, loading.notices.append) is disk
    disk.close()
    assert loading.notices == [f"files go through host memory (gds: {', '.join(gds.lacking())})"]


@capability("gpu")
@pytest.mark.parametrize("cold", [True, False])
def test_into_a_gpu(cold: bool, tmp_path: Path) -> None:
    import torch

    import mx_cli

    expected = make(tmp_path / "model", {f"t{i}": 9 * MIB + i for i in range(4)})
    for way in (
        lambda: mx_cli.load(str(tmp_path / "model"), device="cuda"),
        lambda: dict(mx_cli.stream(str(tmp_path / "model"), device="cuda")),
    ):
        if cold:
            evict(tmp_path / "model" / "model.safetensors")
        tensors = way()
        torch.cuda.synchronize()
        assert {name: tensor.cpu().numpy().tobytes() for name, tensor in tensors.items()} == expected
