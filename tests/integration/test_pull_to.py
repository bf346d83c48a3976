"""`mx pull --to DIR`: the directory appears whole, is left alone when it is right, and nothing half-done stays behind."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from mx_cli.base.process import boot_id, pid_namespace, start_time
from mx_cli.flows.new_directory import NewDirectory
from tests.rig.checkpoints import make_checkpoint, tree
from tests.rig.serving import Hosts


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return make_checkpoint(tmp_path / "checkpoint", shards=2, size=1 << 20)


def test_a_directory_that_is_right_is_left_alone(hosts: Hosts, checkpoint: Path, tmp_path: Path) -> None:
    served = hosts.serve(checkpoint)
    to = tmp_path / "to"
    first = hosts("pull", served.content, "--to", to, "--json", host="b")
    assert first.json()["bytes_moved"] == first.json()["bytes_total"] > 0
    before = (to / "config.json").stat().st_mtime_ns
    again = hosts("pull", served.content, "--to", to, "--json", host="b")
    assert again.code == 0
    assert again.json()["bytes_moved"] == 0
    assert again.json()["dir"] == str(to)
    assert "holds these files already" in again.err
    assert (to / "config.json").stat().st_mtime_ns == before


@pytest.mark.parametrize("change", ["other bytes", "one more", "one less"])
def test_other_files_are_never_touched(change: str, hosts: Hosts, checkpoint: Path, tmp_path: Path) -> None:
    served = hosts.serve(checkpoint)
    to = tmp_path / "to"
    assert hosts("pull", served.content, "--to", to, host="b").code == 0
    if change == "other bytes":
        data = (to / "config.json").read_bytes()
        (to / "config.json").write_bytes(data.replace(b"l", b"k", 1))
    elif change == "one more":
        (to / "notes.txt").write_text("mine")
    else:
        (to / "config.json").unlink()
    before = tree(to)
    refused = hosts("pull", served.content, "--route", "peer", "--to", to, host="b")
    assert refused.code == 2
    assert "with other files in it" in refused.err
    assert tree(to) == before


@pytest.mark.parametrize("route", ["cache", "origin"])
@pytest.mark.parametrize("change", ["other bytes", "one more", "one less"])
def test_other_files_are_never_touched_by_way_of_the_cache(
    change: str, route: str, hosts: Hosts, checkpoint: Path, tmp_path: Path
) -> None:
    pull = ("pull", checkpoint.as_uri(), "--to", tmp_path / "to", "--route")
    hosts(*pull, "origin").ok()
    config = tmp_path / "to" / "config.json"
    data = config.read_bytes()
    config.unlink()
    if change == "one less":
        # So a fill that was killed looks.
        hosts(*pull, route).ok()
        assert tree(tmp_path / "to") == tree(checkpoint)
        return
    if change == "other bytes":
        config.write_bytes(data.replace(b"l", b"k", 1))
    else:
        (tmp_path / "to" / "model-00001-of-00007.safetensors").write_text("another's")
    before = tree(tmp_path / "to")
    assert "with other files in it" in hosts(*pull, route).exits(2).err
    assert tree(tmp_path / "to") == before


def test_what_a_killed_pull_left_goes_with_the_next(
    hosts: Hosts, checkpoint: Path, tmp_path: Path, fault_env: Callable[..., dict[str, str]]
) -> None:
    served = hosts.serve(checkpoint)
    to = tmp_path / "place" / "to"
    killed = hosts("pull", served.content, "--to", to, host="b", env=fault_env(to.parent, KILL_AT=3))
    assert killed.code == -signal.SIGKILL
    left = [path.name for path in to.parent.iterdir()]
    assert left
    assert not to.exists()
    assert hosts("pull", served.content, "--to", to, host="b").code == 0
    assert [path.name for path in to.parent.iterdir()] == ["to"]
    assert tree(to) == tree(checkpoint)


def work_of(directory: NewDirectory, boot: str = "", namespace: int = 0) -> Path:
    """What a process that has ended left, of this boot and pid namespace or another one."""
    ended = subprocess.Popen(["true"])
    start = start_time(ended.pid)
    ended.wait()
    owner = f"{boot or boot_id()[:8]}-{namespace or pid_namespace()}"
    work = directory.path.with_name(f"{directory._prefix()}{owner}-{ended.pid}-{start}-abcdef")
    (work / "below").mkdir(parents=True)
    (work / "below" / "config.json").write_text("{}")
    return work


def test_what_another_container_is_filling_is_left_alone(tmp_path: Path) -> None:
    directory = NewDirectory(tmp_path / "to")
    ours, theirs = work_of(directory), work_of(directory, namespace=1)
    directory._beside.sweep()
    assert not ours.exists()
    assert theirs.exists()
    _age(theirs)
    directory._beside.sweep()
    assert not theirs.exists()


def test_what_another_boot_left_goes(tmp_path: Path) -> None:
    directory = NewDirectory(tmp_path / "to")
    left = work_of(directory, boot="0123abcd")
    with directory.making() as work:
        (work / "file").write_text("new")
    assert not left.exists()
    assert [path.name for path in tmp_path.iterdir()] == ["to"]


def test_what_another_machine_fills_is_left_alone_for_a_day(bindfs_pair: tuple[Path, Path]) -> None:
    """On a file system that others may have, another boot may be another machine."""
    directory = NewDirectory(bindfs_pair[0] / "to")
    theirs = work_of(directory, boot="0123abcd")
    directory._beside.sweep()
    assert theirs.exists()
    _age(theirs, but=theirs / "below" / "config.json")
    directory._beside.sweep()
    assert theirs.exists()
    _age(theirs)
    directory._beside.sweep()
    assert not theirs.exists()


def _age(work: Path, but: Path | None = None) -> None:
    """As if nothing had been written for two days, but to one of the files."""
    then = time.time() - 2 * 24 * 3600
    for path in (*work.rglob("*"), work):
        if path != but:
            os.utime(path, (then, then))


@pytest.mark.parametrize("length", [81, 143, 255])
def test_a_directory_of_a_long_name(length: int, hosts: Hosts, checkpoint: Path, tmp_path: Path) -> None:
    served = hosts.serve(checkpoint)
    to = tmp_path / "place" / ("ü" * (length // 2) + "x" * (length % 2))
    hosts("pull", served.content, "--to", to, host="b").ok()
    assert tree(to) == tree(checkpoint)
    left = work_of(NewDirectory(to))
    other = to.with_name("y" + to.name[1:])
    hosts("pull", served.content, "--to", other, host="b").ok()
    assert left.exists()
    NewDirectory(to)._beside.sweep()
    assert {path.name for path in to.parent.iterdir()} == {to.name, other.name}
