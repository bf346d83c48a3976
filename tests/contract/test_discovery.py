"""One contract for every place where peers find one another: who is listed, who may have a name, what survives a loss."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from mx_cli.base.cancel import Stop
from mx_cli.base.errors import FilesystemRefused, Interrupted, NoSpace, UsageError
from mx_cli.discovery.beating import Beating
from mx_cli.discovery.directory import MOST_PRUNED, FileDirectory, file_name
from mx_cli.discovery.registry import open_directory
from mx_cli.engine.ports import Directory
from mx_cli.model.record import DRAINING, LOADING, SERVING, UNKNOWN, Record
from tests.rig import dnsd, mounts
from tests.rig.memory_directory import MemoryDirectory
from tests.support import capability, clean_env, need

BEAT = 15.0
STOP = Stop()


@dataclass
class Place:
    """A directory of peers, as its users have it. Redis, Kubernetes: one more of these."""

    open: Callable[[], Directory]
    """What another process would open."""
    age: Callable[[str, float], None]
    """Let this many seconds pass since the last sign of life of the record with that name."""
    wipe: Callable[[], None]
    """Lose everything, as a service that is restarted empty."""
    exact: bool = True
    """Of those who come at the same moment one gets the name."""


def memory_place() -> Place:
    one = MemoryDirectory(BEAT)

    def age(name: str, seconds: float) -> None:
        record, _, start = one.kept[name]
        one.kept[name] = record, one.now - seconds, start

    return Place(lambda: one, age, one.kept.clear)


def file_place(path: Path, backing: Path, *, exact: bool) -> Place:
    def age(name: str, seconds: float) -> None:
        at = time.time() - seconds
        os.utime(backing / file_name(name), (at, at))

    return Place(lambda: FileDirectory(path, BEAT), age, lambda: shutil.rmtree(backing), exact)


@pytest.fixture(params=["memory", "dir", "cifuse"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    with contextlib.ExitStack() as stack:
        if request.param == "memory":
            yield memory_place()
        elif request.param == "dir":
            yield file_place(tmp_path / "peers", tmp_path / "peers", exact=True)
        else:
            need("fuse")
            mounted = stack.enter_context(mounts.cifuse(tmp_path / "backing", tmp_path / "fuse", name_max=143))
            yield file_place(mounted / "peers", tmp_path / "backing" / "peers", exact=False)


@pytest.fixture
def life() -> Iterator[Callable[[], subprocess.Popen[bytes]]]:
    """life() -> a process that does nothing but live."""
    started: list[subprocess.Popen[bytes]] = []

    def start() -> subprocess.Popen[bytes]:
        started.append(subprocess.Popen(["sleep", "600"]))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()


def peer(name: str = "web", generation: str = "mx-a-1", host: str = "host-a", pid: int | None = None) -> Record:
    return Record(
        name=name,
        generation=generation,
        address="10.0.0.1:8000",
        identities=("mx1c-" + "0" * 32, "mx1o-" + "1" * 32),
        uri="hf://org/größe",
        revision="main",
        rank="pp0,tp1",
        device="cuda:1",
        size=1 << 40,
        version=3,
        readers=1,
        slots=4,
        host=host,
        pid=os.getpid() if pid is None else pid,
        started=1.5,
        mx="1.0",
    )


def found(directory: Directory) -> dict[str, Record]:
    return {record.name: record for record in directory.records(STOP)}


# --- who keeps records -------------------------------------------------------------------------------------------


def test_what_is_published_is_found(place: Place) -> None:
    empty = place.open()
    assert empty.records(STOP) == []
    assert empty.reason()
    place.open().publish(peer())
    place.open().publish(peer())
    other = place.open()
    assert other.records(STOP) == [peer()]
    assert other.reason() == ""
    (sighting,) = other.sightings(STOP)
    assert (sighting.record, sighting.stale) == (peer(), False)
    assert sighting.age is not None
    assert 0 <= sighting.age < BEAT


def test_a_beat_shows_the_present_state(place: Place) -> None:
    place.open().publish(replace(peer(), state=LOADING))
    place.open().beat(replace(peer(), state=SERVING, readers=2))
    assert found(place.open())["web"] == replace(peer(), readers=2)


def test_v04_every_rank_has_a_record(place: Place) -> None:
    names = [f"llama-pp{pp}-tp{tp}" for pp in range(2) for tp in range(2)] + ["Llama-pp0-tp0", "a/b", "../c", "n" * 300]
    for number, name in enumerate(names):
        place.open().publish(peer(name, f"mx-a-{number}"))
    assert {name: record.generation for name, record in found(place.open()).items()} == {
        name: f"mx-a-{number}" for number, name in enumerate(names)
    }


def test_v04_a_foreign_living_name_is_refused(place: Place, life: Callable[[], subprocess.Popen[bytes]]) -> None:
    place.open().publish(peer())
    with pytest.raises(UsageError) as refused:
        place.open().publish(peer(generation="mx-b-2", host="host-b"))
    assert "mx-a-1" in refused.value.what
    assert "mx-b-2" in refused.value.what
    place.wipe()
    place.open().publish(peer(pid=life().pid))
    with pytest.raises(UsageError):
        place.open().publish(peer(generation="mx-a-2"))
    assert found(place.open())["web"].generation == "mx-a-1"


def test_v04_one_of_many_gets_the_name(place: Place) -> None:
    barrier, refused = threading.Barrier(8), []

    def publish(number: int) -> None:
        directory = place.open()
        barrier.wait()
        try:
            directory.publish(peer(generation=f"mx-{number}", host=f"host-{number}"))
        except UsageError as error:
            refused.append(error)

    threads = [threading.Thread(target=publish, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(refused) == 7 or (not place.exact and len(refused) < 7)
    assert set(found(place.open())) == {"web"}


def test_v05_a_lost_record_is_back_at_the_next_beat(place: Place) -> None:
    directory = place.open()
    directory.publish(peer())
    place.wipe()
    assert found(place.open()) == {}
    directory.beat(peer())
    assert found(place.open()) == {"web": peer()}
    place.wipe()
    directory.publish(peer())
    assert found(place.open()) == {"web": peer()}


def test_v05_the_record_of_a_killed_life_is_replaced(place: Place, life: Callable[[], subprocess.Popen[bytes]]) -> None:
    earlier = life()
    place.open().publish(peer(pid=earlier.pid))
    earlier.send_signal(signal.SIGKILL)
    earlier.wait()
    place.open().publish(peer(generation="mx-a-2"))
    assert found(place.open())["web"].generation == "mx-a-2"


def test_a_stale_record_gives_way(place: Place) -> None:
    place.open().publish(peer())
    place.age("web", 3 * BEAT + 1)
    directory = place.open()
    assert directory.records(STOP) == []
    assert "web" not in found(directory)
    assert directory.reason()
    (sighting,) = directory.sightings(STOP)
    assert sighting.stale
    assert sighting.age == pytest.approx(3 * BEAT + 1, abs=10)
    place.open().publish(peer(generation="mx-b-2", host="host-b"))
    assert found(place.open())["web"].generation == "mx-b-2"


def test_who_slept_neither_takes_nor_removes_what_is_anothers(place: Place) -> None:
    sleeper = place.open()
    sleeper.publish(peer())
    place.age("web", 3 * BEAT + 1)
    place.open().publish(peer(generation="mx-b-2", host="host-b"))
    with pytest.raises(UsageError):
        sleeper.beat(peer())
    sleeper.remove(peer())
    assert found(place.open())["web"].generation == "mx-b-2"


def test_what_is_late_is_listed(place: Place) -> None:
    place.open().publish(peer())
    place.age("web", 2.5 * BEAT)
    assert "web" in found(place.open())
    place.age("web", 9 * BEAT)
    place.open().beat(peer())
    assert "web" in found(place.open())


def test_anybody_removes_what_is_long_dead(place: Place) -> None:
    place.open().publish(peer())
    place.open().publish(peer("db", "mx-a-2"))
    place.age("web", 10 * BEAT + 1)
    assert [sighting.record.name for sighting in place.open().sightings(STOP)] == ["db"]
    place.open().beat(peer())
    assert set(found(place.open())) == {"web", "db"}


def test_nobody_waits_until_all_of_the_long_dead_are_removed(tmp_path: Path) -> None:
    directory = FileDirectory(tmp_path, BEAT)
    for number in range(MOST_PRUNED + 5):
        directory.publish(peer(f"dead-{number}", f"mx-{number}"))
        os.utime(tmp_path / file_name(f"dead-{number}"), (1, 1))
    directory.publish(peer())
    for left in (5, 0):
        assert sum(sighting.stale for sighting in directory.sightings(STOP)) == left
        assert directory.records(STOP) == [peer()]


def test_a_peer_leaves(place: Place) -> None:
    directory = place.open()
    directory.remove(peer())
    directory.publish(peer())
    place.open().remove(peer(generation="mx-other"))
    assert "web" in found(directory)
    place.open().remove(peer())
    place.open().remove(peer())
    assert place.open().sightings(STOP) == []


def test_a_stop_is_heard(place: Place) -> None:
    place.open().publish(peer())
    stop = Stop()
    stop.request(Interrupted(signal.SIGINT))
    with pytest.raises(Interrupted):
        place.open().sightings(stop)


# --- who only lists ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["static:localhost:7000,[::1]:7001,localhost:7000", "dns:localhost:7000"])
def test_one_that_only_lists(text: str, tmp_path: Path) -> None:
    directory = open_directory(text, tmp_path)
    for act in (directory.publish, directory.beat, directory.remove, directory.remove):
        act(peer())
    records = directory.records(STOP)
    assert records == [sighting.record for sighting in directory.sightings(STOP) if not sighting.stale]
    for record in records:
        assert (record.name, record.generation, record.state) == (record.address, "", UNKNOWN)
    addresses = [record.address for record in records]
    assert len(set(addresses)) == len(addresses)
    assert directory.reason() == ""
    if text.startswith("static"):
        assert addresses == ["localhost:7000", "[::1]:7001"]
        assert str(directory) == "static:localhost:7000,[::1]:7001"
    else:
        assert "127.0.0.1:7000" in addresses
        assert str(directory) == text


ASK = """
import json, pathlib, sys, threading
from mx_cli.base.cancel import Stop
from mx_cli.discovery.registry import open_directory

zone, stop = pathlib.Path(sys.argv[1]), Stop()
peers = open_directory("dns:peers.test:7000", zone.parent)
answers = [sorted(record.address for record in peers.records(stop))]
zone.write_text(json.dumps({"peers.test": ["10.9.0.3"]}))
answers.append([record.address for record in peers.records(stop)])
zone.write_text(json.dumps({}))
answers.append([len(peers.records(stop)), peers.reason()])
zone.write_text(json.dumps({"peers.test": None}))
silent = open_directory("dns:peers.test:7000", zone.parent, timeout=0.5)
answers.append([len(silent.records(stop)), silent.reason()])
answers.append([len(silent.records(stop)), sum(t.name == "resolve" for t in threading.enumerate())])
print(json.dumps(answers))
"""


@capability("netns", "mount", "ip")
def test_every_address_of_a_name_asked_for_afresh(tmp_path: Path) -> None:
    zone = tmp_path / "zone.json"
    zone.write_text(json.dumps({"peers.test": ["10.9.0.1", "10.9.0.2", "fd00::9"]}))
    done = subprocess.run(
        [*dnsd.command(zone), sys.executable, "-c", ASK, str(zone)],
        env=clean_env(tmp_path, tmp_path),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    first, second, lost, silent, again = json.loads(done.stdout)
    assert first == ["10.9.0.1:7000", "10.9.0.2:7000", "[fd00::9]:7000"]
    assert second == ["10.9.0.3:7000"]
    assert lost[0] == 0
    assert "peers.test does not resolve" in lost[1]
    assert silent == [0, "peers.test does not resolve (no answer for 0.5 s)"]
    assert again == [0, 1]


# --- which one ---------------------------------------------------------------------------------------------------


def test_forms(tmp_path: Path) -> None:
    assert str(open_directory(None, tmp_path)) == f"dir:{tmp_path}/peers"
    assert str(open_directory("dir:", tmp_path)) == f"dir:{tmp_path}/peers"
    assert str(open_directory("dir:/x/y", tmp_path)) == "dir:/x/y"
    assert str(open_directory("dns:[::1]:80", tmp_path)) == "dns:[::1]:80"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "text",
    [
        "redis:x",
        "/peers",
        "dir",
        "static:",
        "static:a",
        "static:a:0",
        "static:a:1,",
        "static:::1:80",
        "static:a b:1",
        "dns:a",
        "dns:a:b",
        "dns:a:70000",
        f"dns:{'x' * 64}:1",
        "dns:http://a:1",
        "DIR:/x",
    ],
)
def test_anything_else_is_refused(text: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="dir:PATH, static:HOST:PORT") as refused:
        open_directory(text, tmp_path)
    assert text in refused.value.what


# --- files -------------------------------------------------------------------------------------------------------


def test_what_is_no_record_is_ignored_and_named(tmp_path: Path) -> None:
    directory = FileDirectory(tmp_path / "peers", BEAT)
    directory.publish(peer())
    good = (tmp_path / "peers" / file_name("web")).read_bytes()

    def other(name: str, data: bytes) -> None:
        (tmp_path / "peers" / name).write_bytes(data)

    document = json.loads(good)
    number = iter(range(100))

    def odd(**fields: object) -> None:
        name = f"odd-{next(number)}"
        other(file_name(name), json.dumps({**document, "name": name, **fields}).encode())

    other("README", b"hello")
    other(file_name("empty"), b"")
    other(file_name("list"), b"[1]")
    other(file_name("deep"), b"[" * 100_000)
    other(file_name("long"), b" " * (1 << 20))
    other(file_name("copy"), good)
    odd(size="big")
    odd(size=-1)
    odd(size=10**200)
    odd(started=10**400)
    odd(address=["a"])
    odd(address="nowhere")
    odd(address="127.0.0.1:0")
    odd(address="127.0.0.1:80\n")
    odd(device=None)
    odd(proto=[1])
    odd(identities=7)
    os.symlink("/etc/passwd", tmp_path / "peers" / file_name("link"))
    os.mkfifo(tmp_path / "peers" / file_name("pipe"))
    (tmp_path / "peers" / file_name("directory")).mkdir()
    before = sorted(os.listdir(tmp_path / "peers"))
    assert directory.records(STOP) == [peer()]
    assert "20 files" in directory.reason()
    assert sorted(os.listdir(tmp_path / "peers")) == before
    for name in ("empty", "link", "pipe", "copy"):
        directory.publish(peer(name, f"mx-{name}"))
    assert set(found(directory)) == {"web", "empty", "link", "pipe", "copy"}
    with pytest.raises(FilesystemRefused):
        directory.publish(peer("directory"))
    assert not [name for name in os.listdir(tmp_path / "peers") if name.endswith(".tmp")]


def test_unknown_fields_and_intervals(tmp_path: Path) -> None:
    """A newer mx may say more; a peer that beats more slowly than we would is not stale for that."""
    FileDirectory(tmp_path, 60.0).publish(peer())
    path = tmp_path / file_name("web")
    document = json.loads(path.read_bytes())
    path.write_text(json.dumps({**document, "colour": {"x": [1]}}))
    at = time.time() - 100
    os.utime(path, (at, at))
    assert FileDirectory(tmp_path, BEAT).records(STOP) == [peer()]
    path.write_text(json.dumps({**document, "beat": 1e9, "process": 7}))
    os.utime(path, (at, at))
    assert FileDirectory(tmp_path, BEAT).records(STOP) == []


def test_hosts_need_not_agree_on_the_time(tmp_path: Path) -> None:
    """No field of a record is a sign of life, and a time that is yet to come is none for ever."""
    directory = FileDirectory(tmp_path, BEAT)
    directory.publish(replace(peer(), beaten=1.0, started=4e9))
    directory.publish(replace(peer("early", "mx-2"), beaten=9e9))
    assert set(found(directory)) == {"web", "early"}
    at = time.time() + 5 * BEAT
    os.utime(tmp_path / file_name("early"), (at, at))
    assert set(found(directory)) == {"web"}


@capability("mount")
def test_a_read_only_directory(tmp_path: Path, read_only: Callable[[Path], Path]) -> None:
    writable = tmp_path / "peers"
    FileDirectory(writable, BEAT).publish(peer())
    FileDirectory(writable, BEAT).publish(peer("old", "mx-2"))
    at = time.time() - 20 * BEAT
    os.utime(writable / file_name("old"), (at, at))
    directory = FileDirectory(read_only(writable), BEAT)
    with pytest.raises(FilesystemRefused, match="Read-only"):
        directory.publish(peer("new", "mx-3"))
    assert set(found(directory)) == {"web"}
    assert {one.record.name: (one.age, one.stale) for one in directory.sightings(STOP)} == {
        "web": (None, False),
        "old": (None, True),
    }
    directory.remove(peer())
    assert set(found(directory)) == {"web"}


@capability("mount")
def test_a_full_directory(tmpfs: Callable[..., Path]) -> None:
    place = tmpfs("64k")
    directory = FileDirectory(place, BEAT)
    directory.publish(peer())
    with contextlib.suppress(OSError), open(place / "ballast", "wb", buffering=0) as ballast:
        while True:
            ballast.write(bytes(4096))
    with pytest.raises(NoSpace):
        directory.beat(peer())
    assert set(found(directory)) == {"web"}
    assert sorted(os.listdir(place)) == sorted(["ballast", file_name("web")])
    (place / "ballast").unlink()
    directory.beat(peer())


def test_no_directory_at_all(tmp_path: Path) -> None:
    directory = FileDirectory(tmp_path / "a" / "b", BEAT)
    assert directory.records(STOP) == []
    assert "does not exist" in directory.reason()
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "a").write_text("a file")
    with pytest.raises(FilesystemRefused):
        directory.publish(peer())
    with pytest.raises(FilesystemRefused):
        directory.records(STOP)


def test_files_follow_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o007)
    try:
        FileDirectory(tmp_path, BEAT).publish(peer())
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / file_name("web")).stat().st_mode) == 0o660


def test_what_a_killed_writer_left(tmp_path: Path) -> None:
    directory = FileDirectory(tmp_path, BEAT)
    directory.publish(peer())
    old, new = tmp_path / f".{'0' * 16}.tmp", tmp_path / f".{'1' * 16}.tmp"
    for path in (old, new):
        path.write_bytes(b"{")
    at = time.time() - 11 * BEAT
    os.utime(old, (at, at))
    assert set(found(directory)) == {"web"}
    assert directory.reason() == ""
    assert (old.exists(), new.exists()) == (False, True)


def test_a_container_that_was_started_again(tmp_path: Path) -> None:
    """Pid and address are the same, the namespace another; a neighbour, whose pid or address differs, may live."""
    directory = FileDirectory(tmp_path, BEAT)
    own, other = "10.0.0.1:8001", "10.0.0.2:8000"
    for pid, address, replaced in ((0, own, True), (1, own, False), (0, other, False)):
        directory.publish(replace(peer(generation="mx-first", pid=os.getpid() + pid), address=address))
        path = tmp_path / file_name("web")
        document = json.loads(path.read_bytes())
        document["process"]["pid_namespace"] += 1
        path.write_text(json.dumps(document))
        with contextlib.nullcontext() if replaced else pytest.raises(UsageError):
            directory.publish(peer(generation="mx-second"))
        path.unlink()


def test_nobody_reads_a_part(tmp_path: Path) -> None:
    writer, reader = FileDirectory(tmp_path, BEAT), FileDirectory(tmp_path, BEAT)
    writer.publish(peer())
    done = threading.Event()

    def beat() -> None:
        for number in range(300):
            writer.beat(replace(peer(), readers=number % 2, uri="x" * (1 + number * 50)))
        done.set()

    thread = threading.Thread(target=beat)
    thread.start()
    while not done.is_set():
        assert set(found(reader)) == {"web"}
        assert reader.reason() == ""
    thread.join()


# --- a record that beats -----------------------------------------------------------------------------------------


def broken(bug: BaseException) -> None:
    raise AssertionError from bug


def wait_for(directory: MemoryDirectory, condition: Callable[[], bool]) -> None:
    with directory.changed:
        assert directory.changed.wait_for(condition, 30), directory.calls


def test_it_beats_until_it_is_closed() -> None:
    directory, warned = MemoryDirectory(), []
    readers = iter(range(10_000))
    beating = Beating(directory, lambda: replace(peer(), readers=next(readers)), 0.01, warned.append, broken)
    beating.start()
    assert directory.calls[0][0] == "publish"
    wait_for(directory, lambda: len(directory.calls) >= 5)
    assert [what for what, _ in directory.calls[1:5]] == ["beat"] * 4
    assert [record.readers for _, record in directory.calls[:5]] == list(range(5))
    assert directory.calls[1][1].beaten > 1e9
    beating.close()
    beating.close()
    assert directory.calls[-1][0] == "remove"
    assert directory.kept == {}
    assert warned == []


def test_it_beats_when_told() -> None:
    directory = MemoryDirectory()
    beating = Beating(directory, peer, 3600, print, broken)
    beating.start()
    beating.beat_now()
    wait_for(directory, lambda: len(directory.calls) == 2)
    beating.close()


def test_v08_draining_is_shown_before_it_leaves() -> None:
    directory = MemoryDirectory()
    beating = Beating(directory, peer, 3600, print, broken)
    beating.start()
    beating.drain()
    assert found(directory)["web"].state == DRAINING
    beating.drain()
    assert found(directory)["web"].state == DRAINING
    beating.close()
    assert [what for what, _ in directory.calls] == ["publish", "beat", "beat", "remove"]
    assert directory.kept == {}


def test_a_taken_name_is_refused_at_the_start() -> None:
    directory = MemoryDirectory()
    directory.publish(peer(generation="mx-b", host="host-b"))
    beating = Beating(directory, peer, 0.01, print, broken)
    with pytest.raises(UsageError):
        beating.start()
    beating.close()
    assert directory.kept["web"][0].generation == "mx-b"


def test_it_outlives_a_directory_that_fails() -> None:
    directory, warned = MemoryDirectory(), []
    directory.fault = FilesystemRefused("gone")
    beating = Beating(directory, peer, 0.01, warned.append, broken)
    beating.start()
    wait_for(directory, lambda: len(directory.calls) >= 4)
    assert {what for what, _ in directory.calls} == {"publish"}
    assert len(warned) == 1
    assert "gone" in warned[0]
    directory.fault = None
    wait_for(directory, lambda: "beat" in [what for what, _ in directory.calls])
    assert found(directory)["web"].generation == "mx-a-1"
    directory.fault = FilesystemRefused("gone again")
    seen = len(directory.calls)
    wait_for(directory, lambda: len(directory.calls) >= seen + 3)
    assert len(warned) == 2
    beating.close()


def test_a_directory_that_hangs_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its answer counts whenever it comes."""
    monkeypatch.setattr("mx_cli.discovery.beating.PATIENCE", 0.2)
    directory, answer = MemoryDirectory(), threading.Event()
    warned: list[str] = []
    publish = directory.publish

    def hang(record: Record) -> None:
        assert answer.wait(60)
        publish(record)

    directory.publish = hang  # type: ignore[method-assign]
    beating = Beating(directory, peer, 0.01, warned.append, broken)
    beating.start()
    assert warned == ["peers may not find this one: memory: has not answered within 0.2 s"]
    assert not directory.kept
    answer.set()
    wait_for(directory, lambda: "beat" in [what for what, _ in directory.calls])
    assert found(directory)["web"].generation == "mx-a-1"
    beating.close()
    assert len(warned) == 1


def test_a_name_that_turns_out_to_be_taken_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a directory that hung when the peer started: it serves already."""
    monkeypatch.setattr("mx_cli.discovery.beating.PATIENCE", 0.2)
    directory, answer = MemoryDirectory(), threading.Event()
    warned: list[str] = []
    directory.publish(peer(generation="mx-b", host="host-b"))
    publish = directory.publish

    def hang(record: Record) -> None:
        assert answer.wait(60)
        publish(record)

    directory.publish = hang  # type: ignore[method-assign]
    beating = Beating(directory, peer, 0.01, warned.append, broken)
    beating.start()
    answer.set()
    wait_for(directory, lambda: len(directory.calls) >= 3)
    beating.close()
    assert directory.kept["web"][0].generation == "mx-b"


def test_a_bug_is_told_and_ends_it() -> None:
    directory = MemoryDirectory()
    bugs: list[BaseException] = []
    records = iter([peer()])
    beating = Beating(directory, lambda: next(records), 0.01, print, bugs.append)
    beating.start()
    beating.drain()
    beating.close()
    assert [type(bug) for bug in bugs] == [StopIteration]


def test_v05_it_comes_back_by_itself(tmp_path: Path) -> None:
    place = tmp_path / "peers"
    warned: list[str] = []
    beating = Beating(FileDirectory(place, BEAT), peer, 0.01, warned.append, broken)
    beating.start()
    shutil.rmtree(place, ignore_errors=True)
    deadline = time.monotonic() + 30
    while "web" not in found(FileDirectory(place, BEAT)):
        assert time.monotonic() < deadline, warned
    beating.close()
    assert os.listdir(place) == []
