"""`mx pull --to DIR`: the directory appears whole, is left alone when it is right, and nothing half-done stays behind."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from mx_cli.base.process import start_time
from mx_cli.flows import new_directory
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


def test_what_another_container_is_filling_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ended = subprocess.Popen(["true"])
    start = start_time(ended.pid)
    ended.wait()
    directory = NewDirectory(tmp_path / "to")
    ours = tmp_path / f"{directory._prefix()}{ended.pid}-{start}-abcdef"
    monkeypatch.setattr(new_directory, "pid_namespace", lambda: 1)
    theirs = tmp_path / f"{directory._prefix()}{ended.pid}-{start}-abcdef"
    monkeypatch.undo()
    for path in (ours, theirs):
        path.mkdir(exist_ok=True)
    directory._sweep()
    assert list(tmp_path.iterdir()) == [theirs]
