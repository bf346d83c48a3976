"""A cache that somebody edited by hand, or that another program wrote into: what is there is never trusted, nor followed elsewhere."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mx_cli.cache.layout import part_id
from tests.integration.cache_tools import model_dir
from tests.rig import cachecheck
from tests.rig.servers import Hub
from tests.support import MIB, Mx, checkpoint_files, tree

FILES = checkpoint_files(size=MIB)
COMMANDS = (("cache", "ls"), ("cache", "du"), ("cache", "verify"), ("cache", "gc", "--yes"), ("status",))


@pytest.fixture
def sha(mx: Mx, hub: Hub) -> str:
    found = hub.commit(FILES)
    mx("prefetch", hub.uri, env=hub.env).ok()
    return found


def manifest(mx: Mx) -> Path:
    (path,) = model_dir(mx.cache).glob("manifests/*/*.json")
    return path


def mended(mx: Mx, hub: Hub) -> None:
    """The next prefetch gives the right files, whatever is there."""
    directory = Path(mx("prefetch", hub.uri, env=hub.env, timeout=20).ok().out.strip())
    assert tree(directory) == cachecheck.sums(FILES)


def leads_outside(document: dict[str, Any]) -> None:
    document["files"][0]["path"] = "../" * 12 + "etc/hostname"
    document["files"][0]["size"] = os.path.getsize("/etc/hostname")


def absolute(document: dict[str, Any]) -> None:
    document["files"][0]["path"] = "/etc/hostname"
    document["files"][0]["size"] = os.path.getsize("/etc/hostname")


def twice(document: dict[str, Any]) -> None:
    document["files"].append(document["files"][0])


def directory_outside(document: dict[str, Any]) -> None:
    document["directory"] = "../../../../victim"


def directory_above(document: dict[str, Any]) -> None:
    document["directory"] = ".."


@pytest.mark.parametrize("edit", [leads_outside, absolute, twice, directory_outside, directory_above])
def test_a_manifest_that_leads_elsewhere(
    edit: Callable[[dict[str, Any]], None], mx: Mx, hub: Hub, sha: str, tmp_path: Path
) -> None:
    victim = mx.cache.parent / "victim"
    victim.mkdir()
    for name, data in FILES.items():
        (victim / name).parent.mkdir(parents=True, exist_ok=True)
        (victim / name).write_bytes(data)
    document = json.loads(manifest(mx).read_bytes())
    edit(document)
    manifest(mx).write_text(json.dumps(document))
    to = tmp_path / "deep" / "to"
    mx("prefetch", f"{hub.uri}@{sha}", "--offline", "--to", to, env=hub.env).exits(10)
    for command in COMMANDS:
        assert mx(*command).code in (0, 16)
    mx("cache", "rm", hub.uri, "--yes").ok()
    assert tree(victim) == cachecheck.sums(FILES)
    assert not to.exists()
    mended(mx, hub)


@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_what_is_no_file_is_not_read(kind: str, mx: Mx, hub: Hub, sha: str) -> None:
    """A pipe would be waited for without end, and /dev/zero read without end."""
    for path in (manifest(mx), model_dir(mx.cache) / "refs" / "main.json"):
        path.unlink()
        if kind == "pipe":
            os.mkfifo(path)
        else:
            path.symlink_to("/dev/zero")
    for command in COMMANDS:
        assert mx(*command, timeout=20).code in (0, 16)
    mended(mx, hub)


@pytest.mark.parametrize("value", ['"x"', "null", "[1]", "NaN", "-5", "1e999", '{"a":1}'])
def test_records_with_other_values_than_numbers(value: str, mx: Mx, hub: Hub, sha: str) -> None:
    lease = model_dir(mx.cache) / "lease" / sha
    boot, namespace = Path("/proc/sys/kernel/random/boot_id").read_text().strip(), os.readlink("/proc/self/ns/pid")
    lead = {"token": "t", "host": "h", "boot": boot, "pidns": namespace, "pid": "VALUE", "start": "VALUE"}
    note = dict.fromkeys(("interval", "total", "retries", "throttled_until", "error_at", "phase", "error"), "VALUE")
    failed = {"name": "not-found", "message": "VALUE", "at": "VALUE", "selection": "VALUE"}
    for name, record in (("lead.7", lead), ("beat.7.1.5", {}), ("note.7.1", note), ("failed.6", failed)):
        (lease / name).write_text(json.dumps(record).replace('"VALUE"', value))
    (model_dir(mx.cache) / "refs" / "main.json").write_text(f'{{"name":"main","revision":"{sha}","resolved":{value}}}')
    for command in COMMANDS:
        mx(*command, "--json").ok().json()
    assert mx("prefetch", hub.uri, "--offline", env=hub.env).ok().out.strip().endswith(sha)
    (lease / "left.7").write_text("")
    mended(mx, hub)
    manifest(mx).unlink()
    (lease / "left.7").unlink()
    mended(mx, hub)


@pytest.mark.parametrize(
    "name", ["lead.\u00b2", "lead.\u0663", "lead.007", "lead." + "9" * 240, "beat.1.\u00b2.5", "failed.\u00b2"]
)
def test_names_in_a_lease_that_nobody_of_ours_gives(name: str, mx: Mx, hub: Hub, sha: str) -> None:
    (model_dir(mx.cache) / "lease" / sha / name).write_text("")
    manifest(mx).unlink()
    mended(mx, hub)
    for command in COMMANDS:
        mx(*command, "--json").ok().json()


KINDS: dict[str, Callable[[Path, Path], None]] = {
    "link": lambda path, victim: path.symlink_to(victim / "config.json"),
    "link to a directory": lambda path, victim: path.symlink_to(victim),
    "link to nothing": lambda path, victim: path.symlink_to("nowhere"),
    "pipe": lambda path, victim: os.mkfifo(path),
    "directory": lambda path, victim: (path / "of" / "whoever").mkdir(parents=True),
}


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    """A directory that is none of the cache's business."""
    place = tmp_path / "victim"
    (place / "sub").mkdir(parents=True)
    for name, data in FILES.items():
        (place / name).write_bytes(data)
    return place


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["PART.part.1", "PART.part.2", "journal.1", "journal.2", "lock"])
def test_what_has_the_name_of_a_file_in_the_making(
    name: str, kind: str, mx: Mx, hub: Hub, sha: str, victim: Path
) -> None:
    """A download wrote through a link, and waited for the other end of a pipe without end."""
    place = model_dir(mx.cache) / ("lease" if name == "lock" else "staging") / sha
    path = place / name.replace("PART", part_id("model-00001-of-00002.safetensors"))
    path.unlink(missing_ok=True)
    KINDS[kind](path, victim)
    before = set(os.listdir(mx.cache.parent))
    manifest(mx).unlink()
    for file in (model_dir(mx.cache) / "snapshots" / sha).iterdir():
        file.unlink()
    mended(mx, hub)
    assert tree(victim) == cachecheck.sums(FILES)
    assert not [file for file in (model_dir(mx.cache) / "snapshots" / sha).iterdir() if file.is_symlink()]
    assert set(os.listdir(mx.cache.parent)) == before
    assert not (place / "nowhere").exists()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["PART.part.1", "PART.copy.1", "journal.1", ".trash.1"])
@pytest.mark.parametrize("command", [("gc",), ("rm", "--force")])
def test_gc_takes_away_nothing_that_a_link_leads_to(
    command: tuple[str, ...], name: str, kind: str, mx: Mx, hub: Hub, sha: str, victim: Path
) -> None:
    KINDS[kind](model_dir(mx.cache) / "staging" / sha / name.replace("PART", "0" * 16), victim)
    model = (hub.uri,) if command[0] == "rm" else ()
    mx("cache", *command, *model, "--yes", timeout=20).ok()
    assert tree(victim) == cachecheck.sums(FILES)
    assert (victim / "sub").is_dir()
    mended(mx, hub)


@pytest.mark.parametrize("name", ["", "sub"])
def test_rm_takes_away_nothing_that_a_link_in_a_snapshot_leads_to(name: str, mx: Mx, hub: Hub, tmp_path: Path) -> None:
    files = FILES | {"sub/tokenizer.json": b"[1]"}
    revision = hub.commit(files)
    mx("prefetch", hub.uri, "--all", env=hub.env).ok()
    place = model_dir(mx.cache) / "snapshots" / revision / name
    place.rename(tmp_path / "moved")
    place.symlink_to(tmp_path / "moved")
    before = tree(tmp_path / "moved")
    mx("cache", "rm", hub.uri, "--yes").ok()
    assert tree(tmp_path / "moved") == before


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json"])
def test_what_has_the_name_of_a_file_of_the_snapshot(
    name: str, kind: str, mx: Mx, hub: Hub, sha: str, victim: Path
) -> None:
    path = model_dir(mx.cache) / "snapshots" / sha / name
    path.unlink()
    KINDS[kind](path, victim)
    mx("cache", "verify").exits(16)
    mx("prefetch", hub.uri, "--offline", env=hub.env, timeout=20).exits(10)
    directory = Path(mx("prefetch", hub.uri, env=hub.env, timeout=20).ok().out.strip())
    assert {name: (directory / name).read_bytes() for name in FILES} == FILES
    assert not path.is_symlink()
    mx("cache", "verify").ok()
    assert tree(victim) == cachecheck.sums(FILES)


def test_a_link_to_nothing_in_place_of_a_snapshot(mx: Mx, hub: Hub, sha: str) -> None:
    """It is listed and cannot be looked up, like a name that a network file system hides for a while; but it stays so."""
    snapshot = model_dir(mx.cache) / "snapshots" / sha
    snapshot.rename(mx.cache / "aside")
    snapshot.symlink_to("nowhere")
    result = mx("prefetch", hub.uri, env=hub.env | {"MX_VISIBILITY": "60s"}, timeout=30).exits(21)
    assert str(snapshot) in result.err
    snapshot.unlink()
    mended(mx, hub)


def test_a_cache_with_a_name_that_is_too_long(mx: Mx, tmp_path: Path) -> None:
    root = tmp_path / ("x" * 300)
    for command in (("prefetch", "/nowhere"), *COMMANDS):
        result = mx(*command, "--cache-dir", root)
        assert result.code in (0, 10, 21)
        assert "bug" not in result.err
    (tmp_path / "file").write_bytes(b"x")
    assert "name too long" in mx("prefetch", tmp_path / "file", "--cache-dir", root).exits(21).err
