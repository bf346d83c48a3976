"""How a snapshot leaves the cache: --to, --link, --result, -- CMD, --hf-cache, --pin; and what later runs make of it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.integration.cache_tools import model_dir, weight_sets
from tests.rig import cachecheck, servers
from tests.rig.scripted import manifests
from tests.support import Mx, Running, capability, checkpoint_files, clean_env, noise, safetensors_bytes, tree

SMALL = {"config.json": b"{}", "model.bin": noise("m", 300_000), "sub/tokenizer.json": b"[1]"}


def inodes(directory: Path) -> dict[str, int]:
    return {str(p.relative_to(directory)): p.stat().st_ino for p in directory.rglob("*") if p.is_file()}


# --- --to DIR ----------------------------------------------------------------------------------------------------


def test_to_is_filled_with_hard_links_and_nothing_else_is_touched(mx: Mx, hub: servers.Hub, tmp_path: Path) -> None:
    hub.commit(SMALL)
    to = tmp_path / "deep" / "er"
    (to / "sub").mkdir(parents=True)
    foreign = {"mine.txt": b"mine", "sub/model.bin": b"mine too", ".hidden": b"h"}
    for name, data in foreign.items():
        (to / name).write_bytes(data)
    # Half of it is there, and wrong in each way: other bytes of the same size, too short, a link to something.
    (to / "model.bin").write_bytes(b"\0" * len(SMALL["model.bin"]))
    (to / "config.json").symlink_to(to / "mine.txt")
    (to / "sub" / "tokenizer.json").write_bytes(b"[")
    fetched = mx("prefetch", hub.uri, "--to", to, env=hub.env).ok()
    assert f"filled {to}: 3 files as hard links into the cache\n" in fetched.err
    snapshot = Path(fetched.out.strip())
    assert tree(to) == cachecheck.sums(SMALL | foreign)
    assert {name: inodes(to)[name] for name in SMALL} == inodes(snapshot)
    assert not (to / "config.json").is_symlink()
    assert not list(to.rglob("*.tmp"))

    before = {path: path.stat().st_ctime_ns for path in to.rglob("*")}
    result = mx("prefetch", hub.uri, "--to", to, "--json", env=hub.env).ok().json()
    assert result["role"] == "hit"
    assert {path: path.stat().st_ctime_ns for path in to.rglob("*")} == before, "nothing to do, nothing done"

    (to / "model.bin").unlink()
    mx("prefetch", hub.uri, "--to", to, "--offline", env=hub.env).ok()
    assert tree(to) == cachecheck.sums(SMALL | foreign)


def test_to_weights_of_another_checkpoint_are_left_and_told(mx: Mx, hub: servers.Hub, tmp_path: Path) -> None:
    """An engine that reads all weights of the directory would mix the two."""
    to = tmp_path / "to"
    prefetch = ("prefetch", hub.uri, "--to", to)
    hub.commit(checkpoint_files(shards=2, size=1000))
    assert "elsewhere" not in mx(*prefetch, env=hub.env).ok().err
    assert "elsewhere" not in mx(*prefetch, "--include", "*.json", env=hub.env).ok().err
    hub.commit(checkpoint_files(shards=3, size=1000))
    told = mx(*prefetch, "--strict", env=hub.env).exits(3).err
    assert f"{to} also holds weights from elsewhere: model-00001-of-00002.safetensors and 1 more" in told
    assert (to / "model-00001-of-00002.safetensors").exists()


@capability("mount")
def test_to_another_file_system_is_a_copy(mx: Mx, hub: servers.Hub, tmpfs: Callable[..., Path]) -> None:
    hub.commit(SMALL)
    to = tmpfs("8m") / "model"
    fetched = mx("prefetch", hub.uri, "--to", to, env=hub.env).ok()
    assert f"filled {to}: 3 files as copies\n" in fetched.err
    snapshot = Path(fetched.out.strip())
    assert tree(to) == cachecheck.sums(SMALL)
    assert (to / "model.bin").stat().st_dev != snapshot.stat().st_dev
    before = inodes(to)
    mx("prefetch", hub.uri, "--to", to, "--offline", env=hub.env).ok()
    assert inodes(to) == before
    # Same size, other bytes: seen, because what is there is read.
    (to / "model.bin").write_bytes(b"\1" * len(SMALL["model.bin"]))
    mx("prefetch", hub.uri, "--to", to, "--offline", env=hub.env).ok()
    assert tree(to) == cachecheck.sums(SMALL)


@capability("mount")
def test_to_a_place_that_is_too_small(mx: Mx, hub: servers.Hub, tmpfs: Callable[..., Path]) -> None:
    hub.commit(SMALL)
    to = tmpfs("128k") / "model"
    mx("prefetch", hub.uri, "--to", to, env=hub.env).exits(15)
    assert not [path for path in to.rglob("*") if path.name.endswith(".tmp") or path.name == "model.bin"]
    assert mx("prefetch", hub.uri, "--offline", env=hub.env).ok().out, "the cache has it all the same"


@pytest.mark.parametrize("kind", ["same", pytest.param("other", marks=capability("mount"))])
def test_to_from_several_processes(
    mx: Mx, hub: servers.Hub, tmpfs: Callable[..., Path], tmp_path: Path, kind: str
) -> None:
    files = SMALL | {f"{number}.bin": noise(str(number), 200_000) for number in range(8)}
    hub.commit(files)
    to = (tmpfs("32m") if kind == "other" else tmp_path) / "model"
    runs = [mx.start("prefetch", hub.uri, "--to", to, env=hub.env) for _ in range(4)]
    ends = [run.wait().ok() for run in runs]
    assert len({end.out for end in ends}) == 1
    assert sum("copying to" in end.err for end in ends) == (kind == "other"), "one process copies, and none links twice"
    assert tree(to) == cachecheck.sums(files)
    assert hub.bytes_served("/resolve/") == sum(map(len, files.values()))


@pytest.fixture
def copier(
    mx: Mx, hub: servers.Hub, tmpfs: Callable[..., Path], fault_env: Callable[..., dict[str, str]], tmp_path: Path
) -> Callable[..., tuple[Path, Running]]:
    """A process that is stopped while it copies: before the call `name` of the `number`-th copy of three."""

    def start(name: str, number: int, room: str = "8m", **env: str) -> tuple[Path, Running]:
        hub.commit(SMALL)
        to, count = tmpfs("8m") / "model", tmp_path / "count"
        steady = hub.env | {"MX_BEAT": "60s"}
        mx("prefetch", hub.uri, "--to", to, env=steady | fault_env(to, COUNT_FILE=count)).ok()
        calls = [line.split() for line in count.read_text().splitlines()]
        point = [int(call[1]) for call in calls if call[2] == name and ".mx-lease" not in call[3]][number - 1]
        to = tmpfs(room) / "model"
        run = mx.start("prefetch", hub.uri, "--to", to, env=steady | fault_env(to, STOP_AT=point) | env)
        run.wait_stopped()
        return to, run

    return start


@capability("mount")
def test_to_goes_on_when_its_copier_is_killed(mx: Mx, hub: servers.Hub, copier: Callable[..., Any]) -> None:
    to, leader = copier("rename", 2, MX_TTL="60s")
    assert (to / "model.bin").exists()
    assert not list(to.rglob("*.json")), "weights come first"
    others = [mx.start("prefetch", hub.uri, "--to", to, env=hub.env | {"MX_TTL": "60s"}) for _ in range(2)]
    for other in others:
        other.wait_err("following", timeout=30)
    leader.kill()
    ends = [other.wait().ok() for other in others]
    assert sum("copying to" in end.err for end in ends) == 1
    assert tree(to) == cachecheck.sums(SMALL), "nothing of the killed one is left"


@capability("mount")
@pytest.mark.parametrize("point", range(6, 36, 4))
def test_to_is_whole_after_a_kill(
    point: int, mx: Mx, hub: servers.Hub, tmpfs: Callable[..., Path], fault_env: Callable[..., dict[str, str]]
) -> None:
    hub.commit(SMALL)
    mx("prefetch", hub.uri, env=hub.env).ok()
    to = tmpfs("8m") / "model"
    killed = mx("prefetch", hub.uri, "--to", to, env=hub.env | fault_env(to, KILL_AT=point))
    assert killed.code == -signal.SIGKILL
    mx("prefetch", hub.uri, "--to", to, env=hub.env).ok()
    assert tree(to) == cachecheck.sums(SMALL), "and nothing is left of the lease"


@capability("mount")
def test_to_is_right_when_its_copier_wakes_too_late(mx: Mx, hub: servers.Hub, copier: Callable[..., Any]) -> None:
    to, frozen = copier("rename", 2, MX_TTL="0.6s")
    mx("prefetch", hub.uri, "--to", to, env=hub.env | {"MX_TTL": "0.6s"}).ok()
    assert tree(to) == cachecheck.sums(SMALL)
    frozen.send(signal.SIGCONT)
    frozen.wait().ok()
    assert tree(to) == cachecheck.sums(SMALL)


@capability("mount")
def test_to_whoever_waits_hears_that_there_is_no_room(mx: Mx, hub: servers.Hub, copier: Callable[..., Any]) -> None:
    to, first = copier("copy_file_range", 1, room="128k")
    second = mx.start("prefetch", hub.uri, "--to", to, env=hub.env | {"MX_TTL": "60s"})
    second.wait_err("following", timeout=30)
    first.send(signal.SIGCONT)
    first.wait().exits(15)
    assert "via: leader" in second.wait().exits(15).err


def test_to_sweeps_what_killed_copies_left(mx: Mx, hub: servers.Hub, tmp_path: Path) -> None:
    hub.commit(SMALL)
    to = tmp_path / "to"
    (to / "sub").mkdir(parents=True)
    old, young, foreign = to / "sub" / f".{'a' * 16}.tmp", to / f".{'b' * 16}.tmp", to / ".mine.tmp"
    for file in (old, young, foreign):
        file.write_bytes(b"half")
    for file in (old, foreign):
        os.utime(file, (0, 0))
    mx("prefetch", hub.uri, "--to", to, env=hub.env).ok()
    assert [file.exists() for file in (old, young, foreign)] == [False, True, True]


@capability("root", "setpriv")
def test_to_replaces_what_cannot_be_read(mx: Mx, hub: servers.Hub, tmp_path: Path) -> None:
    hub.commit(SMALL)
    place = tmp_path / "to"
    place.mkdir()
    (place / "model.bin").write_bytes(noise("other", 300_000))
    (place / "model.bin").chmod(0)
    no_override = ("setpriv", "--bounding-set=-dac_override,-dac_read_search")
    mx("prefetch", hub.uri, "--to", place, env=hub.env, prefix=no_override).ok()
    assert (place / "model.bin").read_bytes() == SMALL["model.bin"]


def test_to_a_directory_where_a_file_belongs(mx: Mx, hub: servers.Hub, tmp_path: Path) -> None:
    hub.commit(SMALL)
    (tmp_path / "to" / "model.bin").mkdir(parents=True)
    assert "is a directory" in mx("prefetch", hub.uri, "--to", tmp_path / "to", env=hub.env).exits(21).err
    (tmp_path / "file").write_bytes(b"")
    mx("prefetch", hub.uri, "--to", tmp_path / "file", env=hub.env).exits(21)


@capability("mount")
def test_to_stops_when_asked(
    mx: Mx, hub: servers.Hub, tmpfs: Callable[..., Path], fault_env: Callable[..., dict[str, str]]
) -> None:
    """A signal during the copy ends it, and the next run completes the directory."""
    hub.commit(SMALL)
    mx("prefetch", hub.uri, env=hub.env).ok()
    to = tmpfs("8m") / "model"
    run = mx.start("prefetch", hub.uri, "--to", to, env=hub.env | fault_env(to, STOP_AT=1))
    run.wait_stopped()
    run.send(signal.SIGTERM)
    run.send(signal.SIGCONT)
    run.wait().exits(143)
    assert len(list(to.rglob("*.json"))) < 2
    mx("prefetch", hub.uri, "--to", to, env=hub.env).ok()
    assert tree(to) == cachecheck.sums(SMALL)


# --- --link PATH -------------------------------------------------------------------------------------------------


def test_link_is_replaced_in_one_step(mx: Mx, hub: servers.Hub, tmp_path: Path) -> None:
    hub.commit(SMALL)
    link = tmp_path / "links" / "current"
    first = mx("prefetch", hub.uri, "--link", link, env=hub.env).ok().out.strip()
    assert os.readlink(link) == first
    hub.commit(SMALL | {"config.json": b'{"v": 2}'})
    with Watcher(link / "config.json") as watcher:
        second = mx("prefetch", hub.uri, "--link", link, env=hub.env).ok().out.strip()
        mx("prefetch", f"{hub.uri}@{Path(first).name}", "--link", link, env=hub.env).ok()
    assert os.readlink(link) == first != second
    assert watcher.seen >= {b"{}"}
    assert watcher.missing == 0
    assert os.listdir(link.parent) == ["current"]


class Watcher:
    """Reads a file in a loop; counts when it is not there."""

    def __init__(self, path: Path) -> None:
        self.path, self.missing, self.seen = path, 0, set[bytes]()
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Watcher:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._end.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._end.wait(0.001):
            try:
                self.seen.add(self.path.read_bytes())
            except FileNotFoundError:
                self.missing += 1


def test_link_replaces_nothing_but_links(mx: Mx, hub: servers.Hub, tmp_path: Path) -> None:
    hub.commit(SMALL)
    (tmp_path / "file").write_bytes(b"precious")
    (tmp_path / "directory").mkdir()
    for name in ("file", "directory"):
        result = mx("prefetch", hub.uri, "--link", tmp_path / name, env=hub.env).exits(2)
        assert "exists and is not a symlink" in result.err
    assert (tmp_path / "file").read_bytes() == b"precious"
    (tmp_path / "dangling").symlink_to("nowhere")
    (tmp_path / "circle").symlink_to("circle")
    for name in ("dangling", "circle"):
        directory = mx("prefetch", hub.uri, "--link", tmp_path / name, env=hub.env).ok().out.strip()
        assert os.readlink(tmp_path / name) == directory


def test_link_inside_the_root_is_relative(mx: Mx, hub: servers.Hub, tmp_path: Path) -> None:
    """So that the root can be mounted elsewhere; a cache named by a relative path is linked to all the same."""
    hub.commit(SMALL)
    directory = (
        mx("prefetch", hub.uri, "--cache-dir", "cache", "--link", "out", env=hub.env, cwd=tmp_path).ok().out.strip()
    )
    assert Path(directory).is_absolute()
    assert tree(tmp_path / "out") == cachecheck.sums(SMALL)
    mx("prefetch", hub.uri, "--cache-dir", "cache", "--link", "cache/links/m", env=hub.env, cwd=tmp_path).ok()
    (tmp_path / "cache").rename(tmp_path / "moved")
    assert tree(tmp_path / "moved" / "links" / "m") == cachecheck.sums(SMALL)


# --- --result FILE -----------------------------------------------------------------------------------------------


def test_result_is_the_json_document(mx: Mx, hub: servers.Hub, tmp_path: Path) -> None:
    hub.commit(SMALL)
    file = tmp_path / "new" / "result.json"
    result = mx("prefetch", hub.uri, "--result", file, "--json", env=hub.env).ok()
    assert json.loads(file.read_text()) == result.json()
    again = mx("prefetch", hub.uri, "--result", file, env=hub.env).ok()
    assert json.loads(file.read_text())["role"] == "hit"
    assert again.out.strip() == result.json()["dir"]
    assert os.listdir(file.parent) == ["result.json"]


def test_result_of_an_earlier_run_does_not_outlive_a_failure(mx: Mx, hub: servers.Hub, tmp_path: Path) -> None:
    hub.commit(SMALL)
    file = tmp_path / "result.json"
    mx("prefetch", hub.uri, "--result", file, env=hub.env).ok()
    mx("prefetch", "/nope", "--result", file).exits(10)
    assert not file.exists()


def test_result_goes_into_what_is_no_file(mx: Mx, hub: servers.Hub, tmp_path: Path) -> None:
    """As root, a rename would put a file where the device is, for everybody."""
    hub.commit(SMALL)
    device = tmp_path / "stdout"
    device.symlink_to("/proc/self/fd/2")
    result = mx("prefetch", hub.uri, "-q", "--result", device, env=hub.env).ok()
    assert json.loads(result.err)["role"] == "leader"
    assert device.is_symlink()
    device.unlink()
    device.symlink_to("/proc/self/fd/0")
    with open(tmp_path / "file", "wb+") as file:
        command = [sys.executable, "-m", "mx_cli", "prefetch", hub.uri, "--result", str(device)]
        subprocess.run(command, env=clean_env(mx.home, mx.cache, hub.env), stdin=file, check=True)
    assert json.loads((tmp_path / "file").read_text())["role"] == "hit"
    assert device.is_symlink()


# --- -- CMD ------------------------------------------------------------------------------------------------------

SHOW = "import json, os, sys; print(json.dumps({'args': sys.argv[1:], 'env': dict(os.environ)}))"


def test_cmd_takes_the_process_over(mx: Mx, hub: servers.Hub) -> None:
    """The command gets what mx was given, and two variables; nothing that mx made for itself."""
    hub.commit(SMALL | {"model.safetensors": safetensors_bytes({"a": ("BF16", (8, 8), None)})})
    python = [sys.executable, "-I", "-c", SHOW]
    env = hub.env | {"SOME": "value", "MX_DIR": "old", "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "kept"}
    plain = mx("prefetch", hub.uri, "--json", env=env).ok().json()
    result = mx("prefetch", hub.uri, "--", *python, "{}", "--model={}/x", "{", "--", "{}{}", env=env).ok()
    shown = result.json()
    directory = plain["dir"]
    assert shown["args"] == [directory, f"--model={directory}/x", "{", "--", directory * 2]
    given = clean_env(mx.home, mx.cache, env)
    added = {name: value for name, value in shown["env"].items() if given.get(name) != value}
    assert added == {"MX_DIR": directory, "MX_IDENTITY": plain["identity"]["content"]}
    assert set(given) <= set(shown["env"])
    # Where there is no locale, as in most containers, Python gives itself one.
    bare = mx("prefetch", hub.uri, "--", "env", env=hub.env | {"LANG": ""}).ok().out
    assert {line.partition("=")[0] for line in bare.splitlines()} == {*given, "MX_IDENTITY"} - {*env} | {
        *hub.env,
        "MX_DIR",
    }


def _direct(command: list[str], env: dict[str, str], cwd: Path) -> str:
    """The same command without mx before it, started as the fixture starts mx."""
    return subprocess.run(
        command,
        env=env,
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=True,
        start_new_session=True,
    ).stdout


@pytest.mark.parametrize("ignored", ["", "INT TERM"])
def test_cmd_gets_what_its_caller_had(mx: Mx, hub: servers.Hub, ignored: str) -> None:
    """Signals, descriptors, umask, directory. What mx and Python handle or ignore by themselves is not handed on."""
    hub.commit(SMALL)
    look = ("sh", "-c", "grep ^Sig[BIC] /proc/self/status; ls /proc/self/fd; umask; pwd")
    prefix = ("sh", "-c", f"trap '' {ignored}; exec \"$@\"", "sh") if ignored else ()
    direct = _direct([*prefix, *look], clean_env(mx.home, mx.cache), mx.home)
    assert mx("prefetch", hub.uri, "--", *look, env=hub.env, prefix=prefix).ok().out == direct


def test_cmd_has_its_own_exit_code_and_stdout(mx: Mx, hub: servers.Hub, tmp_path: Path) -> None:
    hub.commit(SMALL)
    result = mx(
        "prefetch", hub.uri, "--result", tmp_path / "r", "--json", "--", "sh", "-c", "echo out; exit 7", env=hub.env
    )
    assert (result.code, result.out) == (7, "out\n")
    assert json.loads((tmp_path / "r").read_text())["files"] == 3
    assert mx("prefetch", hub.uri, "--", "sh", "-c", "kill -9 $$", env=hub.env).code == -9
    # The same pid: whoever waits for mx, or signals it, has the command.
    run = mx.start("prefetch", hub.uri, "--", "sh", "-c", "echo $$; exec sleep 60", env=hub.env)
    assert int(run.wait_out(r"\d+")[0]) == run.pid
    run.send(signal.SIGTERM)
    assert run.wait().code == -signal.SIGTERM


def test_cmd_is_not_run_when_something_failed(mx: Mx, hub: servers.Hub, tmp_path: Path) -> None:
    hub.commit(SMALL)
    mark = tmp_path / "ran"
    mx("prefetch", f"{hub.uri}@{'0' * 40}", "--", "touch", mark, env=hub.env).exits(10)
    assert not mark.exists()
    result = mx("prefetch", hub.uri, "--", "no-such-program", "{}", env=hub.env).exits(2)
    assert "no-such-program" in result.err
    assert result.out == ""
    (tmp_path / "plain.txt").write_text("#!/bin/sh\n")
    assert "cannot run" in mx("prefetch", hub.uri, "--", tmp_path / "plain.txt", env=hub.env).exits(2).err
    assert not hub.bytes_served("model.bin"), "a program that is not there is found before the download"
    hub.commit({"run.sh": b"#!/bin/sh\necho $MX_DIR\n"})
    assert "Permission denied" in mx("prefetch", hub.uri, "--", "{}/run.sh", env=hub.env).exits(2).err


def test_cmd_is_not_run_with_warnings_that_are_refused(mx: Mx, faultd: servers.Faultd, tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    mx("prefetch", faultd.file("nolen", 1000, "x.bin"), "--strict", "--", "touch", mark).exits(3)
    assert not mark.exists()


# --- --hf-cache --------------------------------------------------------------------------------------------------

LOAD = """
import sys
from huggingface_hub import hf_hub_download, scan_cache_dir, snapshot_download, try_to_load_from_cache
cache, repo, name, revision = sys.argv[1:5]
print(hf_hub_download(repo, name, cache_dir=cache, revision=revision, local_files_only=True))
print(snapshot_download(repo, cache_dir=cache, revision=revision, local_files_only=True))
print(try_to_load_from_cache(repo, name, cache_dir=cache, revision=revision))
found = scan_cache_dir(cache)
print(len(found.warnings), *sorted(revision.commit_hash for repo in found.repos for revision in repo.revisions))
"""


def test_hf_cache_has_the_names_that_the_hub_client_expects(mx: Mx, hub: servers.Hub, tmp_path: Path) -> None:
    sha = hub.commit(SMALL)
    place = tmp_path / "hf"
    snapshot = Path(mx("prefetch", hub.uri, "--hf-cache", place, env=hub.env).ok().out.strip())
    repository = place / "models--org--model"
    assert (repository / "refs" / "main").read_text() == sha
    assert tree(repository / "snapshots" / sha) == cachecheck.sums(SMALL)
    assert inodes(repository / "snapshots" / sha) == inodes(snapshot)
    before = {
        path: path.stat().st_ctime_ns for path in place.rglob("*") if path.is_file() and "snapshots" in path.parts
    }
    mx("prefetch", hub.uri, "--hf-cache", place, env=hub.env).ok()
    assert {path: path.stat().st_ctime_ns for path in before} == before
    assert not list(place.rglob("*.tmp"))


def test_hf_cache_of_hits_folders_and_other_names(mx: Mx, hub: servers.Hub, tmp_path: Path) -> None:
    sha = hub.commit(SMALL)
    mx("prefetch", hub.uri, env=hub.env).ok()
    offline = tmp_path / "offline"
    mx("prefetch", hub.uri, "--offline", "--hf-cache", offline, env=hub.env).ok()
    assert (offline / "models--org--model" / "refs" / "main").read_text() == sha
    pinned = tmp_path / "pinned"
    mx("prefetch", f"{hub.uri}@{sha}", "--hf-cache", pinned, env=hub.env).ok()
    assert tree(pinned / "models--org--model" / "snapshots" / sha) == cachecheck.sums(SMALL)
    assert not list((pinned / "models--org--model").rglob("refs/*"))
    # A folder of a repository lies where the client looks for it: in the repository.
    folder = tmp_path / "folder"
    for uri in (f"{hub.uri}/sub", f"{hub.uri}/sub/tokenizer.json"):
        mx("prefetch", uri, "--hf-cache", folder, env=hub.env).ok()
    assert tree(folder) == cachecheck.sums(
        {
            f"models--org--model/snapshots/{sha}/sub/tokenizer.json": SMALL["sub/tokenizer.json"],
            "models--org--model/refs/main": sha.encode(),
        }
    )
    # The default place, and a branch with a slash.
    (hub.dir / "refs" / "refs" / "pr").mkdir(parents=True)
    hub.move("refs/pr/1", sha)
    env = hub.env | {"HF_HOME": str(tmp_path / "home")}
    told = mx("prefetch", hub.uri, "--revision", "refs/pr/1", "--hf-cache", "", env=env).ok().err
    shown = tmp_path / "home" / "hub" / "models--org--model" / "snapshots" / sha
    assert f"filled {shown}: 3 files as hard links into the cache\n" in told
    assert (tmp_path / "home" / "hub" / "models--org--model" / "refs" / "refs" / "pr" / "1").read_text() == sha


@capability("huggingface_hub")
def test_hf_cache_is_read_by_the_hub_client(mx: Mx, hub: servers.Hub, tmp_path: Path) -> None:
    sha = hub.commit(SMALL)
    place = tmp_path / "hf"
    mx("prefetch", hub.uri, "--hf-cache", place, env=hub.env).ok()
    snapshot = place / "models--org--model" / "snapshots" / sha
    for revision in ("main", sha):
        command = [sys.executable, "-c", LOAD, str(place), "org/model", "sub/tokenizer.json", revision]
        done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "HF_HUB_OFFLINE": "1"})
        file = str(snapshot / "sub" / "tokenizer.json")
        assert done.stdout.splitlines() == [file, str(snapshot), file, f"0 {sha}"], done.stderr


@capability("mount")
def test_hf_cache_is_refused_where_links_cannot_be(mx: Mx, hub: servers.Hub, tmpfs: Callable[..., Path]) -> None:
    hub.commit(SMALL)
    place = tmpfs("8m")
    result = mx("prefetch", hub.uri, "--hf-cache", place, env=hub.env).exits(21)
    assert "cannot hard-link" in result.err
    assert "--to" in result.err
    assert not [path for path in place.rglob("*") if path.is_file()]


def test_hf_cache_is_for_the_hub(mx: Mx, tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.json").write_bytes(b"{}")
    assert "--hf-cache is for hf://" in mx("prefetch", tmp_path / "m", "--hf-cache", tmp_path / "hub").exits(2).err
    assert not (tmp_path / "hub").exists()
    assert not mx.cache.exists(), "a usage error is found before anything is fetched"


# --- --pin -------------------------------------------------------------------------------------------------------


def test_pin_follows_its_name(mx: Mx, hub: servers.Hub) -> None:
    first = hub.commit(SMALL)
    mx("prefetch", hub.uri, "--pin", "prod", env=hub.env).ok()
    second = hub.commit(SMALL | {"config.json": b'{"v": 2}'})
    mx("prefetch", hub.uri, "--pin", "canary/1", env=hub.env).ok()
    pins = {
        json.loads(path.read_text())["name"]: json.loads(path.read_text())
        for path in (model_dir(mx.cache) / "pins").iterdir()
    }
    assert {name: pin["revision"] for name, pin in pins.items()} == {"prod": first, "canary/1": second}
    mx("prefetch", hub.uri, "--pin", "prod", env=hub.env).ok()
    mx("prefetch", f"{hub.uri}@{first}", env=hub.env).ok()
    gone = mx("cache", "gc", "--keep-last", "0", "--min-age", "0", "--json").ok().json()
    assert {row["revision"]: row["action"] for row in gone["revisions"]}[second] == "keep"


# --- later revisions, later selections ---------------------------------------------------------------------------


def test_a_second_commit_fetches_what_changed(mx: Mx, hub: servers.Hub) -> None:
    files = checkpoint_files(shards=3, size=600_000)
    hub.commit(files)
    first = mx("prefetch", hub.uri, "--json", env=hub.env).ok().json()
    shard = "model-00002-of-00003.safetensors"
    changed = checkpoint_files(shards=3, size=600_000, seed="new")[shard]
    hub.commit(files | {shard: changed})
    hub.reset()
    second = mx("prefetch", hub.uri, "--json", env=hub.env).ok().json()
    assert tree(Path(second["dir"])) == cachecheck.sums(files | {shard: changed})
    assert tree(Path(first["dir"])) == cachecheck.sums(files)
    shards = [entry for entry in hub.log() if ".safetensors" in entry["path"] and not entry["path"].endswith(".json")]
    assert {entry["path"].rpartition("/")[2] for entry in shards if entry["sent"]} == {shard}
    assert second["bytes_fetched"] < second["bytes_total"] / 2
    same = {name for name, inode in inodes(Path(first["dir"])).items() if inodes(Path(second["dir"]))[name] == inode}
    assert same >= {name for name in files if name.endswith(".safetensors")} - {shard}


def test_everything_after_the_default_has_its_own_directory(mx: Mx, hub: servers.Hub) -> None:
    """An engine's glob in the default's directory never meets two weight sets."""
    files, others = weight_sets()
    sha = hub.commit(files | others)
    default = mx("prefetch", hub.uri, "--json", env=hub.env).ok().json()
    plain = Path(default["dir"])
    assert plain.name == sha
    hub.reset()
    every = Path(mx("prefetch", hub.uri, "--all", env=hub.env).ok().out.strip())
    assert every.parent == plain.parent
    assert len(every.name) == len(sha) + 9
    assert every.name.startswith(f"{sha}+")
    assert tree(every) == cachecheck.sums(files | others)
    assert tree(plain) == cachecheck.sums(files)
    assert {name: inodes(every)[name] for name in files} == inodes(plain)
    assert not [
        entry for entry in hub.log() if "/resolve/" in entry["path"] and entry["sent"] and "-of-" in entry["path"]
    ]
    for words, directory in (([], plain), (["--all"], every)):
        again = mx("prefetch", hub.uri, *words, "--offline", "--json", env=hub.env).ok().json()
        assert (again["role"], again["dir"]) == ("hit", str(directory))
    assert again["identity"]["content"] == default["identity"]["content"]


def test_the_default_after_everything_has_one_weight_set(mx: Mx, hub: servers.Hub) -> None:
    files, others = weight_sets()
    hub.commit(files | others)
    every = Path(mx("prefetch", hub.uri, "--all", env=hub.env).ok().out.strip())
    hub.reset()
    default = mx("prefetch", hub.uri, "--json", env=hub.env).ok().json()
    assert default["bytes_fetched"] == 0
    assert tree(Path(default["dir"])) == cachecheck.sums(files)
    assert tree(every) == cachecheck.sums(files | others)
    # What is added to either later goes where its weights are.
    both = mx("prefetch", hub.uri, "--include", "README.md", "--offline", "--json", env=hub.env).ok().json()
    assert both["role"] == "hit"


def test_small_files_are_added_in_place(mx: Mx, hub: servers.Hub) -> None:
    files, others = weight_sets()
    hub.commit(files | others)
    weights = ("--include", "model-*", "--include", "model.safetensors.index.json")
    first = mx("prefetch", hub.uri, *weights, env=hub.env).ok().out
    hub.reset()
    second = mx("prefetch", hub.uri, *weights, "--include", "*.json", "--json", env=hub.env).ok().json()
    assert second["dir"] == first.strip()
    assert second["bytes_fetched"] < 10_000
    assert mx("prefetch", hub.uri, env=hub.env).ok().out == first
    assert tree(Path(second["dir"])) == cachecheck.sums(files)
    assert len(manifests(mx.cache)) == 3


# --- damage ------------------------------------------------------------------------------------------------------


def test_verify_names_what_is_damaged(mx: Mx, hub: servers.Hub) -> None:
    hub.commit(SMALL)
    directory = Path(mx("prefetch", hub.uri, env=hub.env).ok().out.strip())
    assert (
        "verified against the origin's digests and the manifest"
        in mx("prefetch", hub.uri, "--verify", env=hub.env).ok().err
    )
    assert "verified against the manifest" in mx("prefetch", hub.uri, "--verify", "--offline", env=hub.env).ok().err
    file = directory / "model.bin"
    file.write_bytes(SMALL["model.bin"][:1000] + b"!" + SMALL["model.bin"][1001:])
    assert mx("prefetch", hub.uri, env=hub.env).ok(), "without --verify, names and sizes are looked at"
    hub.reset()
    for words in ([], ["--offline"]):
        result = mx("prefetch", hub.uri, "--verify", *words, env=hub.env).exits(16)
        assert "model.bin: wrong xxh3" in result.err
        assert result.out == ""
    assert not hub.bytes_served("model.bin")
    # Also where something has to be fetched besides.
    (directory / "config.json").unlink()
    assert "model.bin" in mx("prefetch", hub.uri, "--verify", env=hub.env).exits(16).err


def test_verify_reads_what_was_asked_for(mx: Mx, hub: servers.Hub) -> None:
    hub.commit(SMALL)
    directory = Path(mx("prefetch", hub.uri, env=hub.env).ok().out.strip())
    (directory / "model.bin").write_bytes(noise("other", 300_000))
    some = ("--include", "config.json", "--verify")
    assert "verified against" in mx("prefetch", hub.uri, *some, env=hub.env).ok().err
    (directory / "config.json").write_bytes(b"[]")
    assert "config.json" in mx("prefetch", hub.uri, *some, "--offline", env=hub.env).exits(16).err


def test_what_is_lost_is_fetched_again(mx: Mx, hub: servers.Hub) -> None:
    """Missing, cut, or a hole where bytes were: never trusted, and only that is fetched."""
    hub.commit(SMALL)
    directory = Path(mx("prefetch", hub.uri, env=hub.env).ok().out.strip())
    file = directory / "model.bin"

    def sparse() -> None:
        file.unlink()
        with file.open("wb") as hole:
            hole.truncate(len(SMALL["model.bin"]))

    for damage in (file.unlink, sparse, lambda: os.truncate(file, 100)):
        damage()
        assert "model.bin" in mx("prefetch", hub.uri, "--offline", env=hub.env).exits(10).err
        hub.reset()
        result = mx("prefetch", hub.uri, "--json", env=hub.env).ok().json()
        assert result["bytes_fetched"] == len(SMALL["model.bin"])
        assert tree(directory) == cachecheck.sums(SMALL)
        assert not hub.bytes_served("tokenizer.json")


def test_a_damaged_small_file_is_not_handed_on(mx: Mx, hub: servers.Hub) -> None:
    """Where something has to be fetched anyway, what is small is read again: a new revision gets no damaged file."""
    files = checkpoint_files(shards=1, size=200_000)
    hub.commit(files)
    first = mx("prefetch", hub.uri, "--json", env=hub.env).ok().json()
    config = Path(first["dir"]) / "config.json"
    config.write_bytes(files["config.json"].replace(b"256", b"257"))
    changed = files | {"tokenizer.json": b'{"new": true}'}
    hub.commit(changed)
    second = mx("prefetch", hub.uri, "--json", env=hub.env).ok().json()
    assert tree(Path(second["dir"])) == cachecheck.sums(changed)
    assert second["identity"]["content"] == first["identity"]["content"]


def test_what_is_cached_is_not_enough(mx: Mx, hub: servers.Hub) -> None:
    """The origin is away: what is missing is named, and nothing is asked for by a list that only knows names."""
    hub.commit(SMALL)
    mx("prefetch", hub.uri, "--include", "config.json", env=hub.env).ok()
    away = {"HF_ENDPOINT": "http://127.0.0.1:1", "MX_RETRY_FOR": "0.1s"}
    cached = ("--if-unreachable", "cached")
    mx("prefetch", hub.uri, "--include", "config.json", *cached, env=away).ok()
    error = mx("prefetch", hub.uri, *cached, env=away).exits(12).err
    assert "not in the cache: model.bin, sub/tokenizer.json" in error


def test_a_damaged_index_decides_nothing(mx: Mx, hub: servers.Hub) -> None:
    """It is asked for again, and never makes a checkpoint unusable for ever."""
    files = checkpoint_files(shards=2, size=200_000)
    sha = hub.commit(files)
    name = "model.safetensors.index.json"
    mx("prefetch", hub.uri, "--include", "config.json", env=hub.env).ok()
    # Pinned, and known without its index: the origin has it.
    index = Path(mx("prefetch", f"{hub.uri}@{sha}", env=hub.env).ok().out.strip()) / name
    for damage in (index.unlink, lambda: os.truncate(index, 10), lambda: index.write_bytes(b"x" * len(files[name]))):
        damage()
        assert name in mx("prefetch", hub.uri, "--offline", env=hub.env).exits(10).err
        again = mx("prefetch", f"{hub.uri}@{sha}", "--json", env=hub.env).ok().json()
        assert again["bytes_fetched"] in (len(files[name]), 0)
    error = mx("prefetch", hub.uri, "--verify", env=hub.env).exits(16).err
    assert f"{name}: wrong xxh3" in error


# --- --dry-run ---------------------------------------------------------------------------------------------------


def test_dry_run_writes_nothing(mx: Mx, hub: servers.Hub, tmp_path: Path) -> None:
    hub.commit(SMALL)
    out = tmp_path / "out"
    words = ("--to", out, "--link", tmp_path / "link", "--hf-cache", out, "--pin", "p", "--result", tmp_path / "result")
    places = set(os.listdir(tmp_path))
    first = mx("prefetch", hub.uri, "--dry-run", *words, env=hub.env).ok().out
    assert first.count("\nfetch ") == 3
    assert not mx.cache.exists()
    mx("prefetch", hub.uri, "--include", "*.bin", env=hub.env).ok()
    before = {path: path.stat().st_mtime_ns for path in mx.cache.rglob("*")}
    second = mx("prefetch", hub.uri, "--dry-run", "--json", *words, "--", "touch", out, env=hub.env).ok().json()
    assert {row["path"] for row in second["files"] if row["cached"]} == {"model.bin"}
    assert second["bytes_missing"] == len(SMALL["config.json"]) + len(SMALL["sub/tokenizer.json"])
    assert {path: path.stat().st_mtime_ns for path in mx.cache.rglob("*")} == before
    assert set(os.listdir(tmp_path)) == places
    assert hub.bytes_served("/resolve/") == len(SMALL["model.bin"])


def test_what_another_revision_began_is_gone_on_with(mx: Mx, hub: servers.Hub) -> None:
    """The branch moved while a download was killed: the files that did not change go on where they were."""
    files = checkpoint_files(shards=2, size=4_000_000)
    hub.commit(files)
    hub.flags("slow=1500000")
    first = mx.start("prefetch", hub.uri, env=hub.env | {"MX_PROGRESS_EVERY": "0.1s"})
    first.wait_err("transfer +[5-8][0-9] %", 60)
    first.kill()
    hub.flags("ok")
    changed = files | {"config.json": files["config.json"].replace(b"{", b'{"new": 1, ', 1)}
    hub.commit(changed)
    hub.reset()
    second = mx("prefetch", hub.uri, "--json", env=hub.env).ok().json()
    assert tree(Path(second["dir"])) == cachecheck.sums(changed)
    total = sum(len(data) for name, data in files.items() if name.endswith(".safetensors"))
    assert hub.bytes_served("model-0") < 0.7 * total


def test_what_cannot_be_delivered_is_refused_before_the_download(mx: Mx, hub: servers.Hub, tmp_path: Path) -> None:
    hub.commit(checkpoint_files(shards=1, size=100_000))
    inside = mx.cache / "models"
    for words in ((hub.uri, "true"), ("--pin", "", hub.uri), ("--to", inside, hub.uri), ("--to", mx.cache, hub.uri)):
        result = mx("prefetch", *words, env=hub.env).exits(2)
        assert "Traceback" not in result.err
    assert hub.bytes_served("model") == 0


@pytest.mark.parametrize("option", ["--to", "--link", "--result", "--pin", "--cache-dir"])
def test_an_option_whose_variable_was_never_set_is_refused(mx: Mx, hub: servers.Hub, option: str) -> None:
    """`--link "$PLACE"` without PLACE: an exit code 0 would say that there is a link."""
    hub.commit(SMALL)
    result = mx("prefetch", hub.uri, option, "", env=hub.env).exits(2)
    assert "empty" in result.err or "''" in result.err
    assert hub.bytes_served("model") == 0
    variable = f"MX_{option.removeprefix('--').upper()}"
    if option != "--cache-dir":
        mx("prefetch", hub.uri, env=hub.env | {variable: ""}).ok()


def test_a_result_where_something_else_will_be_is_refused(mx: Mx, hub: servers.Hub, tmp_path: Path) -> None:
    hub.commit(SMALL)
    for option in ("--link", "--to"):
        result = mx("prefetch", hub.uri, option, tmp_path / "x", "--result", tmp_path / "x", env=hub.env).exits(2)
        assert "same path" in result.err
    assert os.listdir(tmp_path / "mx" / "home") == []
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("where", ["file", "file/new", "link", "link/new", "circle"])
def test_a_directory_that_cannot_be_is_refused_before_the_download(
    mx: Mx, hub: servers.Hub, tmp_path: Path, where: str
) -> None:
    hub.commit(SMALL)
    (tmp_path / "file").write_bytes(b"")
    (tmp_path / "link").symlink_to("nowhere")
    (tmp_path / "circle").symlink_to("circle")
    for option in ("--to", "--cache-dir"):
        said = mx("prefetch", hub.uri, option, tmp_path / where, env=hub.env).exits(21).err
        assert f"{tmp_path / where.split('/')[0]} is " in said
        assert re.search("is not a directory|is a link that leads nowhere", said)
        assert "hint: choose another" in said
    assert "nowhere" in mx("cache", "ls", "--cache-dir", tmp_path / "link").exits(21).err
    assert hub.bytes_served("model") == 0


def test_a_result_that_cannot_be_written_is_refused_before_the_download(
    mx: Mx, hub: servers.Hub, tmp_path: Path
) -> None:
    hub.commit(SMALL)
    (tmp_path / "file").write_bytes(b"")
    for place, code in ((Path("/"), 2), (tmp_path, 2), (tmp_path / "file" / "new", 21)):
        result = mx("prefetch", hub.uri, "--result", place, env=hub.env).exits(code)
        assert "Traceback" not in result.err
    assert hub.bytes_served("model") == 0


@capability("root", "setpriv")
def test_what_only_another_user_may_write_is_refused_before_the_download(
    mx: Mx, hub: servers.Hub, tmp_path: Path
) -> None:
    hub.commit(SMALL)
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o755)
    os.chown(closed, 1, 1)
    no_override = ("setpriv", "--bounding-set=-dac_override,-dac_read_search")
    for option in ("--to", "--link", "--result"):
        said = mx("prefetch", hub.uri, option, closed / "x", env=hub.env, prefix=no_override).exits(21).err
        assert f"{option} {closed}" in said
        assert f"{closed} belongs to 1:1, mode 0755" in said
    assert hub.bytes_served("model") == 0


def test_nothing_is_left_among_the_files_of_the_cache(mx: Mx, hub: servers.Hub) -> None:
    """A result in the place of a snapshot's config.json would be what the engine reads."""
    hub.commit(SMALL)
    snapshot = Path(mx("prefetch", hub.uri, "--json", env=hub.env).ok().json()["dir"])
    before = cachecheck.sums(SMALL)
    for place in (snapshot / "config.json", snapshot / "new", mx.cache / "models" / "new", mx.cache / "format"):
        for option in ("--link", "--result"):
            assert "cache" in mx("prefetch", hub.uri, option, place, env=hub.env).exits(2).err or option == "--link"
    assert tree(snapshot) == before
    mx("prefetch", hub.uri, "--link", mx.cache / "current", "--result", mx.cache / "result.json", env=hub.env).ok()
    mx("cache", "verify").ok()


def test_a_result_of_a_name_that_is_not_unicode(mx: Mx, hub: servers.Hub, tmp_path: Path) -> None:
    hub.commit(SMALL)
    cache = Path(os.fsdecode(os.fsencode(tmp_path) + b"/c\xff"))
    mx("prefetch", hub.uri, "--cache-dir", cache, "--result", tmp_path / "r.json", env=hub.env).ok()
    assert Path(json.loads((tmp_path / "r.json").read_text())["dir"]).is_relative_to(cache)


@pytest.mark.parametrize("where", [".", "sub", "sub/new"])
@pytest.mark.parametrize("option", ["--to", "--cache-dir"])
def test_nothing_is_put_into_a_directory_that_is_the_origin(mx: Mx, tmp_path: Path, option: str, where: str) -> None:
    """It would be fetched the next time; and --to would put the cache's files in the place of the origin's own."""
    origin = tmp_path / "the origin"
    for name, data in SMALL.items():
        (origin / name).parent.mkdir(parents=True, exist_ok=True)
        (origin / name).write_bytes(data)
    inodes = {path: path.stat().st_ino for path in origin.rglob("*")}
    (tmp_path / "link").symlink_to(origin)
    for spelled in (origin, tmp_path / "link", origin.as_uri()):
        assert "inside the origin" in mx("prefetch", spelled, option, origin / where).exits(2).err
    assert {path: path.stat().st_ino for path in origin.rglob("*")} == inodes
    # Directories of that name are no part of a model.
    mx("prefetch", origin, "--cache-dir", origin / ".cache" / "mx").ok()
    mx("prefetch", origin, "--to", tmp_path / "beside").ok()
