"""`mx cache`: what it shows, what it takes away, and what it never touches (P-53, P-54, P-57)."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.integration.cache_tools import broken_promises, fates, leftovers, make_older, model_dir, snapshots
from tests.rig.servers import Hub
from tests.support import MIB, Mx, Running, capability, checkpoint_files, tree

SHARD = "model-00001-of-00002.safetensors"


def fetch(mx: Mx, hub: Hub, *options: str | Path, seed: str = "seed") -> str:
    """Commit a checkpoint, prefetch it, return its revision."""
    sha = hub.commit(checkpoint_files(size=4 * MIB, seed=seed))
    mx("prefetch", hub.uri, *options, env=hub.env).ok()
    return sha


def wait_for(what: Callable[[], bool], timeout: float = 60) -> None:
    deadline = time.monotonic() + timeout
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def begin(
    mx: Mx, hub: Hub, flags: str = "slow=1000000", size: int = 24 * MIB, seed: str = "new"
) -> tuple[str, Running]:
    """A download that takes its time; returns once parts are there."""
    sha = hub.commit(checkpoint_files(size=size, seed=seed))
    hub.flags(flags)
    running = mx.start("prefetch", hub.uri, env={**hub.env, "MX_PROGRESS_EVERY": "100ms", "MX_PROGRESS": "plain"})
    running.wait_err(r"transfer +[1-9]\d* %", timeout=60)
    wait_for(lambda: (model_dir(mx.cache) / "snapshots" / sha / "config.json").exists())
    return sha, running


# --- looking -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["ls", "du", "verify", "gc"])
def test_no_cache_is_an_empty_one(mx: Mx, command: str) -> None:
    result = mx("cache", command).ok()
    assert result.out.strip()
    assert f"{mx.cache} is not there" in result.err
    assert mx("cache", command, "--json").ok().json()["schema"] == 1
    assert not mx.cache.exists()
    mx.cache.mkdir()
    assert "is not there" not in mx("cache", command).ok().err


def test_ls_shows_what_is_there(mx: Mx, hub: Hub) -> None:
    sha = fetch(mx, hub, "--pin", "prod")
    row = snapshots(mx)[sha]
    assert row["uri"] == hub.uri
    assert row["state"] == "complete"
    assert row["pins"] == ["prod"]
    assert row["files"] == 7
    assert row["size"] == sum(map(len, checkpoint_files(size=4 * MIB).values()))
    text = mx("cache", "ls").ok().out
    assert text.startswith("MODEL")
    assert sha in text
    assert "prod" in text


@pytest.mark.parametrize("command", ["ls", "du", "verify", "gc", "rm"])
def test_a_named_model_that_is_not_there(mx: Mx, hub: Hub, command: str) -> None:
    fetch(mx, hub)
    for name in ("hf://org/other", "s3://bucket/key", "nonsense", f"{hub.uri}@0123456"):
        result = mx("cache", command, name).exits(10)
        assert result.out == ""
        assert name.partition("@0")[0] in result.err


def test_names_of_a_model(mx: Mx, hub: Hub) -> None:
    one, two = fetch(mx, hub), fetch(mx, hub, seed="two")
    slug = model_dir(mx.cache).name
    for name in (hub.uri, "org/model", slug):
        assert set(snapshots(mx, name)) == {one, two}
    for name in (f"{hub.uri}@{one}", f"{slug}@{one[:8]}"):
        assert set(snapshots(mx, name)) == {one}
    assert set(snapshots(mx, f"{hub.uri}@main")) == {two}


def test_damage_is_shown_and_named(mx: Mx, hub: Hub) -> None:
    sha = fetch(mx, hub)
    assert "all right" in mx("cache", "verify").ok().out
    snapshot = model_dir(mx.cache) / "snapshots" / sha
    with (snapshot / SHARD).open("r+b") as file:
        file.seek(1 << 20)
        file.write(b"\0" * 100)
    assert snapshots(mx)[sha]["state"] == "complete"
    result = mx("cache", "verify", hub.uri).exits(16)
    assert SHARD in result.err
    assert result.out == ""
    (snapshot / SHARD).unlink()
    os.truncate(snapshot / "tokenizer.json", 10)
    assert "damaged" in snapshots(mx)[sha]["state"]
    document = mx("cache", "verify", "--json").exits(16).json()
    assert SHARD in document["error"]["message"]
    assert "tokenizer.json" in document["error"]["message"]


def test_a_manifest_that_is_none_is_damage(mx: Mx, hub: Hub) -> None:
    sha = fetch(mx, hub)
    (path,) = (model_dir(mx.cache) / "manifests" / sha).iterdir()
    path.write_text("{")
    assert "damaged" in snapshots(mx)[sha]["state"]
    assert "not a manifest" in mx("cache", "verify").exits(16).err
    mx("prefetch", hub.uri, env=hub.env).ok()
    mx("cache", "verify").ok()
    path.write_text('{"format": 99}')
    assert "newer" in snapshots(mx)[sha]["state"]
    assert "was not verified" in mx("cache", "verify").ok().err
    mx("cache", "rm", hub.uri, "--yes", "--force").exits(2)


def test_a_directory_where_a_manifest_belongs_is_removed(mx: Mx, hub: Hub) -> None:
    sha = fetch(mx, hub)
    (path,) = (model_dir(mx.cache) / "manifests" / sha).iterdir()
    path.unlink()
    (path / "deep").mkdir(parents=True)
    (path / "deep" / "file").write_bytes(b"x")
    assert "not a manifest" in mx("cache", "verify").exits(16).err
    mx("cache", "rm", hub.uri, "--yes").ok()
    assert not list((model_dir(mx.cache) / "manifests").glob("*/*"))
    assert leftovers(mx.cache) == []
    mx("prefetch", hub.uri, env=hub.env).ok()


@pytest.mark.parametrize("command", [("cache", "du"), ("cache", "ls"), ("status",), ("prefetch", "/x")], ids=" ".join)
def test_a_cache_that_is_a_file(command: tuple[str, ...], mx: Mx, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    assert "is not a directory" in mx(*command, "--cache-dir", tmp_path / "file").exits(21).err


@pytest.mark.parametrize("needs", ['"x"', "null", "[1]", "1.5"])
def test_a_format_that_says_nothing(needs: str, mx: Mx) -> None:
    mx.cache.mkdir(parents=True)
    (mx.cache / "format").write_text(f'{{"format":1,"reads_need":{needs}}}')
    assert "format is damaged" in mx("cache", "du").exits(21).err
    (mx.cache / "format").write_text('{"format":9,"reads_need":9}')
    assert "newer format" in mx("cache", "du").exits(2).err


def test_du_counts_shared_files_once(mx: Mx, hub: Hub) -> None:
    fetch(mx, hub)
    before = mx("cache", "du", "--json").ok().json()["disk"]
    files = checkpoint_files(size=4 * MIB)
    hub.commit({**files, "config.json": files["config.json"] + b"\n"})
    mx("prefetch", hub.uri, env=hub.env).ok()
    document = mx("cache", "du", "--json").ok().json()
    assert before < document["disk"] < before + MIB
    assert document["models"][0]["revisions"] == 2


# --- rm, pins ----------------------------------------------------------------------------------------------------


def test_rm_asks_for_yes_and_spares_pins(mx: Mx, hub: Hub) -> None:
    sha = fetch(mx, hub, "--pin", "prod")
    assert "prod" in mx("cache", "rm", hub.uri, "--yes").exits(2).err
    assert "remove" in mx("cache", "rm", hub.uri, "--force").ok().out
    assert snapshots(mx)[sha]["state"] == "complete"
    mx("cache", "unpin", "other").exits(10)
    assert mx("cache", "unpin", "prod", "--json").ok().json()["unpinned"] == [{"uri": hub.uri, "revision": sha}]
    assert mx("cache", "rm", f"{hub.uri}@{sha}", "--yes", "--json").ok().json()["done"] is True
    mx("cache", "ls", hub.uri).exits(10)
    model = model_dir(mx.cache)
    assert not list((model / "refs").iterdir())
    assert not list((model / "snapshots").iterdir())
    assert mx("prefetch", hub.uri, env=hub.env).ok().out.strip().endswith(sha)
    assert broken_promises(mx.cache) == []


def test_rm_of_an_empty_revision_is_refused(mx: Mx, hub: Hub) -> None:
    """MODEL@$REV with an empty REV must not take every revision of the model."""
    fetch(mx, hub)
    assert "no revision after the @" in mx("cache", "rm", f"{hub.uri}@", "--yes", env=hub.env).exits(2).err


def test_rm_with_force_takes_the_pin_too(mx: Mx, hub: Hub) -> None:
    sha = fetch(mx, hub, "--pin", "prod")
    mx("cache", "rm", f"{hub.uri}@{sha[:10]}", "--force", "--yes").ok()
    mx("cache", "unpin", "prod").exits(10)


def test_what_two_revisions_share_stays(mx: Mx, hub: Hub) -> None:
    one = fetch(mx, hub)
    files = checkpoint_files(size=4 * MIB)
    two = hub.commit({**files, "config.json": files["config.json"] + b"\n"})
    mx("prefetch", hub.uri, env=hub.env).ok()
    document = mx("cache", "rm", f"{hub.uri}@{one}", "--yes", "--json").ok().json()
    assert document["freed"] < MIB
    mx("cache", "verify").ok()
    assert set(snapshots(mx)) == {two}


# --- gc ----------------------------------------------------------------------------------------------------------


def test_gc_keeps_the_newest_the_pinned_and_the_used(mx: Mx, hub: Hub) -> None:
    pinned = fetch(mx, hub, "--pin", "prod", seed="1")
    old, used, third, newest = (fetch(mx, hub, seed=seed) for seed in "2345")
    for age, sha in enumerate((newest, third, used, old, pinned)):
        make_older(mx.cache, sha, 20 + age)
    mx("prefetch", f"{hub.uri}@{used}", env=hub.env).ok()
    wanted = {pinned: "keep", old: "remove", used: "keep", third: "keep", newest: "keep"}
    document = mx("cache", "gc", "--json").ok().json()
    assert fates(document) == wanted
    assert not document["done"]
    assert document["freed"] > 3 * MIB
    assert set(snapshots(mx)) == set(wanted)
    assert fates(mx("cache", "gc", "--yes", "--json").ok().json()) == wanted
    assert set(snapshots(mx)) == set(wanted) - {old}
    document = mx("cache", "gc", "--keep-last=0", "--min-age=0", "--yes", "--json").ok().json()
    assert set(snapshots(mx)) == {pinned}
    assert leftovers(mx.cache) == []
    mx("cache", "verify").ok()


def test_min_age_counts_publication_and_use(mx: Mx, hub: Hub) -> None:
    sha = fetch(mx, hub)
    for days, action in ((6, "keep"), (9, "remove")):
        make_older(mx.cache, sha, days)
        assert fates(mx("cache", "gc", "--keep-last=0", "--json").ok().json()) == {sha: action}
    assert fates(mx("cache", "gc", "--keep-last=0", "--min-age=30d", "--json").ok().json()) == {sha: "keep"}


def test_foreign_files_stay(mx: Mx, hub: Hub) -> None:
    sha = fetch(mx, hub)
    model = model_dir(mx.cache)
    foreign = ("snapshots/note.txt", f"snapshots/{sha}/engine/cache.bin", f"staging/{sha}/mine", "README")
    for name in foreign:
        (model / name).parent.mkdir(parents=True, exist_ok=True)
        (model / name).write_text(name)
    mx("cache", "gc", "--keep-last=0", "--min-age=0", "--yes").ok()
    assert all((model / name).read_text() == name for name in foreign)
    assert set(tree(model / "snapshots")) == {"note.txt", f"{sha}/engine/cache.bin"}
    assert {name: row["state"] for name, row in snapshots(mx).items()} == {sha: "foreign files"}


def test_gc_leaves_a_live_download_alone_and_sweeps_a_dead_one(mx: Mx, hub: Hub) -> None:
    sha, running = begin(mx, hub)
    for _ in range(2):
        document = mx("cache", "gc", "--keep-last=0", "--min-age=0", "--yes", "--json").ok().json()
        assert fates(document) == {sha: "keep"}
        assert "in use" in document["revisions"][0]["why"]
    assert "in use" in mx("cache", "rm", hub.uri, "--yes").exits(13).err
    assert "downloading" in snapshots(mx)[sha]["state"]
    assert any(".part." in name for name in leftovers(mx.cache))
    running.kill()
    assert snapshots(mx)[sha]["state"] == "unfinished"
    assert mx("cache", "du", "--json").ok().json()["models"][0]["unfinished"] > 0
    assert fates(mx("cache", "gc", "--json").ok().json()) == {sha: "sweep"}
    mx("cache", "gc", "--yes").ok()
    assert leftovers(mx.cache) == []
    assert not list((model_dir(mx.cache) / "snapshots").iterdir())
    hub.flags("ok")
    assert mx("prefetch", hub.uri, env=hub.env).ok().out.strip().endswith(sha)


def test_a_download_that_lives_through_gc_finishes(mx: Mx, hub: Hub) -> None:
    sha, running = begin(mx, hub, flags="slow=4000000")
    mx("cache", "gc", "--keep-last=0", "--min-age=0", "--yes").ok()
    result = running.wait(60).ok()
    assert "took over" not in result.err
    assert broken_promises(mx.cache) == []
    assert set(snapshots(mx)) == {sha}


def test_files_of_a_dead_download_go_and_foreign_ones_stay(mx: Mx, hub: Hub) -> None:
    sha, running = begin(mx, hub)
    snapshot = model_dir(mx.cache) / "snapshots" / sha
    assert (snapshot / "config.json").exists()
    (snapshot / "mine.txt").write_text("mine")
    running.kill()
    mx("cache", "gc", "--yes").ok()
    assert set(tree(snapshot)) == {"mine.txt"}


def test_after_ten_kills_one_part_for_each_object(mx: Mx, hub: Hub) -> None:
    """P-53."""
    for _ in range(5):
        begin(mx, hub, seed="same")[1].kill()
        revisions = {name.split("/")[1] for name in leftovers(mx.cache)}
        for revision in revisions:
            parts = [n for n in leftovers(mx.cache) if f"/{revision}/" in n and ".part." in n]
            assert len({name.partition(".part.")[0] for name in parts}) == len(parts)
    hub.flags("ok")
    mx("prefetch", hub.uri, env=hub.env).ok()
    mx("cache", "gc", "--yes").ok()
    assert leftovers(mx.cache) == []
    assert broken_promises(mx.cache) == []


@capability("mount")
def test_a_read_only_cache(mx: Mx, hub: Hub, read_only: Callable[[Path], Path]) -> None:
    """P-54: looking works, taking away says that it cannot."""
    sha = fetch(mx, hub)
    make_older(mx.cache, sha, 30)
    env = {"MX_CACHE_DIR": read_only(mx.cache)}
    before = tree(mx.cache)
    for words in (("ls",), ("du",), ("verify",), ("gc", "--keep-last=0")):
        mx("cache", *words, env=env).ok()
    mx("status", env=env).ok()
    for words in (("gc", "--keep-last=0", "--yes"), ("rm", hub.uri, "--yes")):
        result = mx("cache", *words, env=env).exits(21)
        assert "Traceback" not in result.err
        assert "Read-only" in result.err
    assert tree(mx.cache) == before


# --- killed ------------------------------------------------------------------------------------------------------


def test_gc_killed_anywhere_leaves_no_manifest_over_missing_files(
    mx: Mx, hub: Hub, tmp_path: Path, fault_env: Callable[..., dict[str, str]]
) -> None:
    words = ("cache", "gc", "--keep-last=0", "--min-age=0", "--yes")
    sha = fetch(mx, hub)
    counts = tmp_path / "counts"
    mx(*words, env=fault_env(mx.cache, COUNT_FILE=counts)).ok()
    points = len(counts.read_text().splitlines())
    assert points > 10
    for point in sorted({*range(2, points + 1, 3), points}):
        mx("prefetch", hub.uri, env=hub.env).ok()
        killed = mx(*words, env=fault_env(mx.cache, KILL_AT=point))
        # A busy machine beats more or less often: the last points are not always reached.
        assert killed.code == -signal.SIGKILL or (killed.code == 0 and point > points - 4), (
            f"point {point}: {killed.err}"
        )
        assert broken_promises(mx.cache) == [], f"point {point}"
        mx(*words).ok()
        assert leftovers(mx.cache) == [], f"point {point}"
        assert not list((model_dir(mx.cache) / "snapshots").iterdir()), f"point {point}"
        assert sha not in snapshots(mx)


def test_prefetch_after_a_killed_gc(mx: Mx, hub: Hub, tmp_path: Path, fault_env: Callable[..., dict[str, str]]) -> None:
    """What gc had set aside does not stand in the way, and does not stay."""
    words = ("cache", "gc", "--keep-last=0", "--min-age=0", "--yes")
    fetch(mx, hub)
    counts = tmp_path / "counts"
    mx(*words, env=fault_env(mx.cache, COUNT_FILE=counts)).ok()
    renames = [
        n for n, line in enumerate(counts.read_text().splitlines(), 1) if "rename" in line and "/trash" not in line
    ]
    for point in (renames[-2], renames[-1], renames[-1] + 1, renames[-1] + 4):
        mx("prefetch", hub.uri, env=hub.env).ok()
        mx(*words, env=fault_env(mx.cache, KILL_AT=point))
        mx("prefetch", hub.uri, env=hub.env).ok()
        mx("cache", "gc", "--yes").ok()
        assert leftovers(mx.cache) == []
        assert broken_promises(mx.cache) == []
        mx("cache", "verify").ok()


# --- racing ------------------------------------------------------------------------------------------------------

GC = ("cache", "gc", "--keep-last=0", "--min-age=7d", "--yes")


@pytest.mark.parametrize("pinned", [False, True])
def test_a_hit_that_gc_overtakes_is_fetched_again(
    mx: Mx, hub: Hub, fault_env: Callable[..., dict[str, str]], pinned: bool
) -> None:
    """The hit has found its manifest and is about to leave its mark of use."""
    sha = fetch(mx, hub)
    make_older(mx.cache, sha, 30)
    uri = f"{hub.uri}@{sha}" if pinned else hub.uri
    running = mx.start("prefetch", uri, "--json", env={**hub.env, **fault_env(mx.cache, STOP_AT=1)})
    running.wait_stopped()
    assert fates(mx(*GC, "--json").ok().json()) == {sha: "remove"}
    running.send(signal.SIGCONT)
    assert running.wait().ok().json()["role"] == "leader"
    assert broken_promises(mx.cache) == []
    mx("cache", "verify").ok()


@pytest.mark.parametrize("before", ["rename.*json$", "fsync.*/manifests/", r"rename.*\.d$"])
def test_a_frozen_gc_that_is_overtaken_takes_nothing_away(
    mx: Mx, hub: Hub, tmp_path: Path, fault_env: Callable[..., dict[str, str]], before: str
) -> None:
    """It stops just before a step; a download takes over and publishes; then gc goes on with the step."""
    sha = fetch(mx, hub)
    steady = {"MX_BEAT": "60s"}
    make_older(mx.cache, sha, 30)
    counts = tmp_path / "counts"
    mx(*GC, env={**steady, **fault_env(mx.cache, COUNT_FILE=counts)}).ok()
    point = next(n for n, line in enumerate(counts.read_text().splitlines(), 1) if re.search(before, line))
    mx("prefetch", hub.uri, env=hub.env).ok()
    make_older(mx.cache, sha, 30)
    gc = mx.start(*GC, env={**steady, **fault_env(mx.cache, STOP_AT=point)})
    gc.wait_stopped()
    mx("prefetch", hub.uri, env=hub.env).ok()
    gc.send(signal.SIGCONT)
    gc.wait().ok()
    assert broken_promises(mx.cache) == []
    assert mx("prefetch", hub.uri, "--json", env=hub.env).ok().json()["dir"].endswith(sha)
    mx("cache", "verify").ok()
    mx("cache", "gc", "--yes").ok()
    assert leftovers(mx.cache) == []
