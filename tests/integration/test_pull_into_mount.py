"""`mx pull --to` a directory whose place nothing can take, as every volume of a pod is: it is filled inside, small files last."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from mx_cli.base.errors import UsageError
from mx_cli.base.process import boot_id, start_time
from mx_cli.flows.new_directory import NewDirectory
from tests.rig import mounts
from tests.rig import tensor_parallel as tp
from tests.rig.serving import Hosts
from tests.support import capability, clean_env, make_checkpoint, tree

Tmpfs = Callable[..., Path]
Faults = Callable[..., dict[str, str]]
DEAD = 1 << 22
"""A pid that the kernel gives to nobody."""
FILES = {"config.json": b"{}", "model-1.safetensors": b"w" * 5000, "sub/index.json": b"[]", "sub/more.bin": b"m" * 3000}
FILL = """
import json, sys
from pathlib import Path
from mx_cli.flows.new_directory import NewDirectory
with NewDirectory(Path(sys.argv[1])).making() as work:
    for name, data in json.loads(sys.argv[2]).items():
        (work / name).parent.mkdir(exist_ok=True)
        (work / name).write_text(data)
"""


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return make_checkpoint(tmp_path / "checkpoint", shards=2, size=1 << 20)


@pytest.fixture(params=["volume", "bind mount", "new ext4"])
def volume(request: pytest.FixtureRequest, tmp_path: Path, tmpfs: Tmpfs) -> Iterator[Path]:
    """An empty one; one without a device of its own, under a name that is no ASCII; one with what mkfs leaves."""
    if request.param == "bind mount":
        (tmp_path / "on the node").mkdir()
        with mounts.bind(tmp_path / "on the node", tmp_path / "in the pöd") as place:
            yield place
    else:
        place = tmpfs("64m")
        if request.param == "new ext4":
            (place / "lost+found").mkdir(mode=0o700)
        yield place


def contents(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def hidden(directory: Path) -> list[str]:
    return [name for name in os.listdir(directory) if name.startswith(".")]


def fill(target: Path, files: Mapping[str, bytes], env: Mapping[str, str | Path] | None = None) -> int:
    """A process that fills the directory; its exit code."""

    words = [sys.executable, "-c", FILL, str(target), json.dumps({name: data.decode() for name, data in files.items()})]
    done = subprocess.run(words, env=clean_env(target, target, env), timeout=30, capture_output=True)
    return done.returncode


def put(directory: NewDirectory, files: Mapping[str, bytes]) -> None:
    with directory.making() as work:
        for name, data in files.items():
            (work / name).parent.mkdir(exist_ok=True)
            (work / name).write_bytes(data)


# --- every route -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("route", ["peer", "cache", "origin", "stream"])
def test_a_volume_is_filled(route: str, volume: Path, hosts: Hosts, checkpoint: Path) -> None:
    served = hosts.serve(checkpoint)
    before = volume.stat()
    if route == "cache":
        hosts("prefetch", checkpoint.as_uri(), host="b").ok()
    model = served.content if route == "peer" else checkpoint.as_uri()
    pull = ("pull", model, "--route", route, "--to", volume, "--json")
    assert hosts(*pull, host="b").ok().json()["route"] == route
    assert tree(volume) == tree(checkpoint)
    assert hidden(volume) == []
    assert (volume.stat().st_ino, volume.stat().st_dev) == (before.st_ino, before.st_dev)
    again = hosts(*pull, host="b").ok()
    assert tree(volume) == tree(checkpoint)
    assert route != "peer" or "holds these files already" in again.err
    (volume / "notes.txt").write_text("mine")
    if route in ("peer", "stream"):
        assert "with other files in it" in hosts(*pull, host="b").exits(2).err
        assert (volume / "notes.txt").read_text() == "mine"


def test_a_volume_is_filled_with_a_ranks_part(hosts: Hosts, tmpfs: Tmpfs, tmp_path: Path) -> None:
    tp.write(tmp_path / "model")
    volume = tmpfs("64m")
    pull = ("pull", (tmp_path / "model").as_uri(), "--rank", "1/2", "--to", volume)
    hosts(*pull).ok()
    before = tree(volume)
    assert sorted(before) == ["config.json", "model-rank-1-part-0.safetensors"]
    hosts(*pull).ok()
    assert tree(volume) == before
    assert "with other files in it" in hosts(*pull[:3], "0/2", *pull[4:]).exits(2).err
    assert tree(volume) == before
    assert hidden(volume) == []


def test_a_volume_without_room_says_so_and_stays_empty(hosts: Hosts, checkpoint: Path, tmpfs: Tmpfs) -> None:
    volume = tmpfs("512k")
    served = hosts.serve(checkpoint)
    refused = hosts("pull", served.content, "--to", volume, host="b").exits(15)
    assert str(volume) in refused.err
    assert os.listdir(volume) == []


@capability("root", "setpriv")
def test_a_directory_in_one_of_somebody_elses(hosts: Hosts, checkpoint: Path, tmp_path: Path) -> None:
    """As /models of a pod that is not root: nothing can be made beside it."""
    served = hosts.serve(checkpoint)
    mine = tmp_path / "others" / "mine"
    mine.mkdir(parents=True)
    mine.parent.chmod(0o555)
    no_override = ("setpriv", "--bounding-set=-dac_override,-dac_read_search")
    hosts("pull", served.content, "--to", mine, host="b", prefix=no_override).ok()
    assert tree(mine) == tree(checkpoint)
    assert hidden(mine) == []


# --- what is killed ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("links", [True, False], ids=["links", "no links"])
def test_killed_at_any_call(links: bool, tmpfs: Tmpfs, fault_env: Faults) -> None:
    """What has its name is whole; who finds a small file finds all that it names; the next one fills it all the same."""
    volume = tmpfs("64m")
    faults: dict[str, str] = {} if links else {"LINK": "EPERM"}
    # Files and folders to fill, and then: the note, each file's name, syncs, and what is cleared away.
    seen: set[tuple[str, ...]] = set()
    for point in range(1, 60):
        code = fill(volume, FILES, fault_env(volume, KILL_AT=point, **faults))
        there = {name: data for name, data in contents(volume).items() if not name.startswith(".mx-to-")}
        assert there.items() <= FILES.items()
        if any(name.endswith(".json") for name in there):
            assert {name for name in FILES if not name.endswith(".json")} <= there.keys()
        seen.add(tuple(sorted(there)))
        if code == 0:
            break
        assert code == -signal.SIGKILL
        put(NewDirectory(volume), FILES)
        assert contents(volume) == FILES
        _empty(volume)
    assert code == 0
    assert len(seen) >= 4, "some were killed while files got their names"


def _empty(directory: Path) -> None:
    for path in sorted(directory.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()


def test_what_a_killed_one_gave_makes_way_for_other_weights(tmpfs: Tmpfs, fault_env: Faults) -> None:
    volume = tmpfs("64m")
    code, point = -signal.SIGKILL, 0
    while "model-1.safetensors" not in contents(volume):
        point += 1
        code = fill(volume, FILES, fault_env(volume, KILL_AT=point))
        assert code == -signal.SIGKILL
    assert "config.json" not in contents(volume)
    directory = NewDirectory(volume)
    assert not directory.has({"other.bin": 3})
    put(directory, {"other.bin": b"abc"})
    assert contents(volume) == {"other.bin": b"abc"}
    assert hidden(volume) == []


def test_what_is_whole_is_never_taken_back(tmpfs: Tmpfs, fault_env: Faults) -> None:
    """Killed when all had their names: who asks for these files is told that they are there, and from then on they are."""
    volume = tmpfs("64m")
    point = 0
    while not FILES.keys() <= contents(volume).keys():
        point += 1
        fill(volume, FILES, fault_env(volume, KILL_AT=point))
    assert hidden(volume)
    directory = NewDirectory(volume)
    assert directory.has({name: len(data) for name, data in FILES.items()})
    with pytest.raises(UsageError, match="with other files in it"):
        directory.has({"other.bin": 3})
    assert contents(volume) == FILES


@pytest.mark.parametrize(
    "note",
    ["../outside", "sub/outside", "{outside}", "", "a\0b", "list", "deep", "text", "pipe", "directory", "nowhere"],
)
def test_a_note_that_is_forged_removes_nothing(note: str, tmp_path: Path) -> None:
    """Whoever may write into a shared volume could leave one for a command of root."""
    outside, volume = tmp_path / "outside", tmp_path / "volume"
    outside.write_bytes(b"somebody else's")
    volume.mkdir()
    (volume / "other.bin").write_bytes(b"theirs")
    (volume / "sub").symlink_to(tmp_path)
    left = volume / f".mx-to-{boot_id()[:8]}-{os.stat('/proc/self/ns/pid').st_ino}-{DEAD}-1-abcdef"
    left.mkdir()
    given = left / "given.json"
    inode = outside.stat().st_ino
    texts = {"list": "[1]", "deep": "[" * 100_000, "text": "none"}
    if note == "pipe":
        os.mkfifo(given)
    elif note == "directory":
        given.mkdir()
    elif note == "nowhere":
        given.symlink_to("missing")
    else:
        given.write_text(texts.get(note) or json.dumps({note.format(outside=outside): inode}))
    with pytest.raises(UsageError, match="with other files in it"):
        NewDirectory(volume).has({"w": 1})
    assert outside.read_bytes() == b"somebody else's"
    assert not left.exists()


def test_a_disk_that_refuses_a_name_leaves_nothing(tmpfs: Tmpfs, fault_env: Faults) -> None:
    volume = tmpfs("64m")
    for call in ({"LINK": "EIO"}, {"LINK": "EPERM", "RENAME": "EIO"}, {"FSYNC": "EIO"}):
        assert fill(volume, FILES, fault_env(volume, **call)) == 1
        assert contents(volume) == {}
        assert hidden(volume) == []


# --- several ---------------------------------------------------------------------------------------------------------


def test_others_that_fill_it_meanwhile(tmpfs: Tmpfs) -> None:
    """The same files stay; others are not touched."""
    volume = tmpfs("64m")
    one, other, third = (NewDirectory(volume) for _ in range(3))
    with one.making() as work:
        for name, data in FILES.items():
            (work / name).parent.mkdir(exist_ok=True)
            (work / name).write_bytes(data)
        put(other, FILES)
    assert contents(volume) == FILES
    with pytest.raises(UsageError, match="with other files in it"):
        put(third, FILES | {"config.json": b"[]"})
    assert contents(volume) == FILES
    assert hidden(volume) == []


def test_a_container_that_is_started_again_finds_its_room(tmpfs: Tmpfs) -> None:
    """Its pid namespace is another one: whether who began still works, a lock tells."""
    volume = tmpfs("64m")
    ended = subprocess.Popen(["true"])
    start = start_time(ended.pid)
    ended.wait()
    works = [
        volume / f".mx-to-{boot_id()[:8]}-1-{ended.pid}-{start}-{token}" for token in ("aaaaaa", "bbbbbb", "cccccc")
    ]
    for work in works:
        (work / "files").mkdir(parents=True)
        (work / "files" / "model.safetensors").write_bytes(b"0" * 1000)
    killed, working, beginning = works
    for work in (killed, working):
        for path in (*work.rglob("*"), work):
            os.utime(path, (1e9, 1e9))
    fd = os.open(working, os.O_RDONLY)
    fcntl.flock(fd, fcntl.LOCK_EX)
    try:
        put(NewDirectory(volume), FILES)
    finally:
        os.close(fd)
    assert not killed.exists()
    assert working.exists()
    assert beginning.exists()
    assert NewDirectory(volume).files().keys() == FILES.keys()


def test_an_empty_directory_keeps_who_may_enter(hosts: Hosts, checkpoint: Path, tmp_path: Path) -> None:
    served = hosts.serve(checkpoint)
    to = tmp_path / "to"
    to.mkdir()
    to.chmod(0o2750)
    hosts("pull", served.content, "--to", to, host="b").ok()
    assert to.stat().st_mode & 0o7777 == 0o2750
    assert tree(to) == tree(checkpoint)
