"""`mx pull --rank R/N --to DIR`: one rank's part as files, only its bytes read, whatever the route."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.rig import capabilities, limits, servers
from tests.rig import tensor_parallel as tp
from tests.rig.big_file import big_file, name_of
from tests.rig.serving import Hosts, slow
from tests.support import MIB, Result, capability, make_safetensors, tree

if not capabilities.have("torch"):
    pytest.skip("missing: torch", allow_module_level=True)

import torch

ALONG = re.compile(r"and ([\d.]+ \w+) between them were read along")
FIRST_READ = 256 << 10


def read(directory: Path) -> dict[str, Any]:
    """The tensors of the files of one rank."""
    found: dict[str, Any] = {}
    for path in sorted(directory.glob("model-rank-*-part-*.safetensors")):
        data = bytearray(path.read_bytes())
        end = 8 + int.from_bytes(data[:8], "little")
        table = json.loads(data[8:end])
        assert table.pop("__metadata__")["format"] == "pt"
        assert found.keys().isdisjoint(table)
        for name, entry in table.items():
            first, last = entry["data_offsets"]
            piece = torch.frombuffer(data, dtype=torch.uint8)[end + first : end + last].clone()
            found[name] = piece.view(torch.bfloat16).reshape(entry["shape"])
    return found


def headers(model: Path) -> int:
    """Bytes that are read of a checkpoint's files to know where its tensors are, and what is said of them by their index."""
    shards = sum(min(FIRST_READ, path.stat().st_size) for path in model.glob("*.safetensors"))
    return shards + (model / "model.safetensors.index.json").stat().st_size


# --- every route -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("route", ["stream", "cache", "origin", "peer"])
def test_the_part_by_every_route(route: str, hosts: Hosts, s3: servers.S3, tmp_path: Path) -> None:
    whole = tp.write(tmp_path / "model")
    s3.put_tree("model", tmp_path / "model")
    uri = s3.uri("model")
    if route == "cache":
        hosts("prefetch", uri, host="b", env=s3.env).ok()
    if route == "peer":
        hosts("prefetch", uri, host="a", env=s3.env).ok()
        hosts.serve(uri, host="a", env=s3.env)
    s3.reset()
    to = tmp_path / "out"
    pull = ("pull", uri, "--rank", "1/2", "--route", route, "--to", to, "--json")
    said = hosts(*pull, host="b", env=s3.env).ok().json()
    expected = tp.shares(whole, 1, 2)
    assert not tp.differing(read(to), expected)
    assert (said["route"], said["rank"], said["dir"]) == (route, "1/2", str(to))
    assert said["identity"].startswith("mx1")
    # What is small comes along; what names the shards of the whole does not.
    assert (to / "config.json").read_bytes() == (tmp_path / "model" / "config.json").read_bytes()
    assert sorted(path.name for path in to.iterdir()) == ["config.json", "model-rank-1-part-0.safetensors"]
    assert tp.size(expected) <= said["bytes_moved"] < tp.size(whole)
    paths = [(one["path"], one["bytes"]) for one in said["sources"]]
    assert paths == ([("socket", said["bytes_moved"])] if route == "peer" else [])
    if route in ("cache", "peer"):
        assert s3.bytes_served(".safetensors") <= (tmp_path / "model" / "model.safetensors.index.json").stat().st_size
    before = tree(to)
    hosts(*pull, host="b", env=s3.env).ok()
    assert tree(to) == before
    other = hosts("pull", uri, "--rank", "0/2", "--route", route, "--to", to, host="b", env=s3.env).exits(2)
    assert "with other files in it" in other.err
    assert tree(to) == before


@pytest.mark.parametrize("there", ["a file", "a link", "other files"])
def test_a_place_that_is_taken_is_said_before_weights_are_read(
    there: str, hosts: Hosts, s3: servers.S3, tmp_path: Path
) -> None:
    tp.write(tmp_path / "model")
    s3.put_tree("model", tmp_path / "model")
    to, other = tmp_path / "out", tmp_path / "other"
    other.mkdir()
    if there == "a file":
        to.write_text("mine")
    elif there == "a link":
        to.symlink_to(other)
    else:
        to.mkdir()
        (to / "notes.txt").write_text("mine")
    code, why = (21, "is not a directory") if there == "a file" else (2, "is there already")
    assert why in hosts("pull", s3.uri("model"), "--rank", "0/2", "--to", to, env=s3.env).exits(code).err
    assert s3.bytes_served(".safetensors") <= headers(tmp_path / "model")
    assert sorted(path.name for path in tmp_path.iterdir() if path.name.startswith(".")) == []


def test_the_usual_routes_of_a_part(hosts: Hosts, s3: servers.S3, tmp_path: Path) -> None:
    tp.write(tmp_path / "model")
    s3.put_tree("model", tmp_path / "model")
    pull = ("pull", s3.uri("model"), "--rank", "0/2", "--json", "--to")

    def order(name: str) -> list[tuple[str, bool]]:
        found = hosts(*pull, tmp_path / name, host="b", env=s3.env).ok().json()["routes"]
        return [(one["route"], one["taken"]) for one in found]

    assert order("1") == [("peer", False), ("cache", False), ("stream", True)]
    assert not hosts.cache("b").exists()
    hosts("prefetch", s3.uri("model"), host="b", env=s3.env).ok()
    assert order("2") == [("peer", False), ("cache", True)]
    hosts.serve(s3.uri("model"), host="b", env=s3.env)
    assert order("3") == [("peer", True)]
    assert tree(tmp_path / "1") == tree(tmp_path / "2") == tree(tmp_path / "3")


@pytest.mark.parametrize("ranks", [2, 4])
def test_all_ranks_read_every_byte_once(
    ranks: int, hosts: Hosts, s3stub: Callable[..., servers.S3Stub], tmp_path: Path
) -> None:
    """Column-parallel layers: their sum is 1.00x of what is split, and what every rank has whole comes for each."""
    whole = tp.write(tmp_path / "model")
    store = s3stub()
    store.put_tree("model", tmp_path / "model")
    rules = tmp_path / "rules.json"
    rules.write_text(
        json.dumps({"rules": [["*.down_proj.weight", "replicate"], ["*.weight", "col"], ["*.bias", "col"]]})
    )
    moved = 0
    parts: list[dict[str, Any]] = []
    for rank in range(ranks):
        to = tmp_path / str(rank)
        pull = ("pull", store.uri("model"), "--rank", f"{rank}/{ranks}", "--rules", rules, "--to", to, "--json")
        result = hosts(*pull, "--route", "stream", env=store.env).ok()
        parts.append(read(to))
        extra = result.json()["bytes_moved"] - tp.size(parts[-1])
        assert bool(extra) == bool(ALONG.search(result.err))
        moved += result.json()["bytes_moved"]
    down = f"{tp.LAYER}.mlp.down_proj.weight"
    for name, tensor in whole.items():
        pieces = [part[name] for part in parts]
        assert not tp.differing({name: pieces[0] if name == down else torch.cat(pieces)}, {name: tensor})
    split = {name: tensor for name, tensor in whole.items() if name != down}
    replicated = tp.size({down: whole[down]}) * ranks
    # Between the small tensors of a rank are those of others: what is read along is said.
    assert tp.size(split) + replicated <= moved <= 1.25 * tp.size(split) + replicated
    served = store.bytes_served("-of-") - ranks * sum(
        min(FIRST_READ, path.stat().st_size) for path in (tmp_path / "model").glob("*.safetensors")
    )
    assert served == moved


def test_no_extra_byte_where_parts_lie_in_one_run(
    hosts: Hosts, s3stub: Callable[..., servers.S3Stub], tmp_path: Path
) -> None:
    """Large layers split by rows: 1.00x between all ranks, and not a byte along."""
    model = tmp_path / "model"
    make_safetensors(
        model / "model.safetensors", {f"layers.{i}.up_proj.weight": ("BF16", (4096, 512), None) for i in range(3)}
    )
    (model / "config.json").write_text(json.dumps(tp.CONFIG))
    store = s3stub()
    store.put_tree("model", model)
    total = 0
    for rank in range(4):
        pull = ("pull", store.uri("model"), "--rank", f"{rank}/4", "--to", tmp_path / str(rank), "--json")
        result = hosts(*pull, env=store.env).ok()
        assert "read along" not in result.err
        total += result.json()["bytes_moved"]
    assert total == 3 * 4096 * 512 * 2
    assert store.bytes_served("model.safetensors") == total + 4 * FIRST_READ


@pytest.mark.parametrize("device", ["file", "cpu"])
def test_the_dry_run_tells_a_ranks_bytes(device: str, hosts: Hosts, s3: servers.S3, tmp_path: Path) -> None:
    tp.write(tmp_path / "model")
    s3.put_tree("model", tmp_path / "model")
    uri = s3.uri("model")
    look = ("pull", uri, "--rank", "1/2", "--to", tmp_path / "out", "--json")
    found = hosts(*look, "--dry-run", host="b", env=s3.env).ok().json()
    moved = hosts(*look, host="b", env=s3.env).ok().json()["bytes_moved"]
    assert [one["route"] for one in found["routes"]] == ["peer", "cache", "stream"]
    assert (found["route"], found["bytes"]) == ("stream", moved)
    hosts("prefetch", uri, host="b", env=s3.env).ok()
    hosts.serve(uri, "--device", device, host="b", env=s3.env)
    found = hosts(*look, "--dry-run", host="c", env=s3.env).ok().json()
    moved = hosts(*look, host="c", env=s3.env).ok().json()
    assert (found["route"], found["bytes"]) == ("peer", moved["bytes_moved"])
    assert moved["route"] == "peer"
    cached = hosts(*look, "--dry-run", "--route", "cache", host="b", env=s3.env).ok().json()
    assert "gds: " in cached["routes"][0]["reason"]


# --- what is refused -------------------------------------------------------------------------------------------------


def refused(hosts: Hosts, *words: str | Path) -> Result:
    return hosts("pull", *words).exits(2)


def test_what_makes_no_part(hosts: Hosts, tmp_path: Path) -> None:
    tp.write(tmp_path / "model")
    model, to = (tmp_path / "model").as_uri(), tmp_path / "out"
    assert "--to DIR" in refused(hosts, model, "--rank", "0/2").err
    assert "--rank R/N" in refused(hosts, model, "--rules", "llama", "--to", to).err
    assert "not a rank" in refused(hosts, model, "--rank", "2/2", "--to", to).err
    assert "leave one of them out" in refused(hosts, model, "--rank", "0/2", "--to", to, "--then-serve").err
    assert "not a rule file" in refused(hosts, model, "--rank", "0/2", "--rules", "gpt", "--to", to).err
    rules = tmp_path / "rules.json"
    rules.write_text(json.dumps({"rules": [["*_proj.*", "col"], ["*norm*", "replicate"]]}))
    unmatched = refused(hosts, model, "--rank", "0/2", "--rules", rules, "--to", to)
    assert re.search(r"no rule says how (lm_head|model\.embed_tokens)\.weight \[1000, 256\] is split", unmatched.err)
    assert not to.exists()
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".out")] == []


@pytest.mark.parametrize("name", ["llama", "qwen", "mistral", "mixtral", "deepseek"])
def test_rules_by_name(name: str, hosts: Hosts, tmp_path: Path) -> None:
    whole = tp.write(tmp_path / "model")
    pull = ("pull", (tmp_path / "model").as_uri(), "--rank", "0/2", "--rules", name, "--to", tmp_path / "out")
    hosts(*pull).ok()
    assert not tp.differing(read(tmp_path / "out"), tp.shares(whole, 0, 2))


@capability("memory-cgroup")
def test_t01_a_part_keeps_to_its_memory(hosts: Hosts, tmp_path: Path) -> None:
    """Half a gigabyte of rank 1/2 in a quarter of it: what is read goes to the disk at once."""
    rules = tmp_path / "rules.json"
    rules.write_text(json.dumps({"rules": [["*", "col"]]}))
    count, size = 96, 8 * MIB
    with big_file(count, size) as server, limits.memory(256 * MIB) as prefix:
        to = tmp_path / "out"
        pull = ("pull", server.url, "--rank", "1/2", "--rules", rules, "--memory", "64MiB", "--to", to, "--json")
        said = hosts(*pull, prefix=prefix, timeout=110).ok().json()
        assert said["bytes_moved"] == count * size // 2
        assert server.sent <= count * size // 2 + MIB
    (path,) = to.glob("*.safetensors")
    with path.open("rb") as file:
        table = json.loads(file.read(8 + int.from_bytes(file.read(8), "little") - 8))
        start = file.tell()
        for index in (0, count - 1):
            first, last = table[name_of(index)]["data_offsets"]
            assert last - first == size // 2
            file.seek(start + first)
            assert file.read(16) == bytes([index % 256]) * 16
            file.seek(start + last - 16)
            assert file.read(16) == bytes([index % 256]) * 16


# --- faults ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("point", [1, 2, 5, 9])
def test_a_kill_at_any_write_leaves_no_part(
    point: int, hosts: Hosts, tmp_path: Path, fault_env: Callable[..., dict[str, str]]
) -> None:
    whole = tp.write(tmp_path / "model")
    to = tmp_path / "place" / "out"
    pull = ("pull", (tmp_path / "model").as_uri(), "--rank", "1/2", "--to", to)
    killed = hosts(*pull, env=fault_env(to.parent, KILL_AT=point))
    assert killed.code == -signal.SIGKILL
    assert not to.exists()
    hosts(*pull).ok()
    assert not tp.differing(read(to), tp.shares(whole, 1, 2))
    assert [path.name for path in to.parent.iterdir()] == ["out"]


@pytest.mark.parametrize("call", ["WRITE", "FSYNC", "RENAME"])
def test_a_disk_that_refuses_leaves_nothing(
    call: str, hosts: Hosts, tmp_path: Path, fault_env: Callable[..., dict[str, str]]
) -> None:
    tp.write(tmp_path / "model")
    to = tmp_path / "place" / "out"
    pull = ("pull", (tmp_path / "model").as_uri(), "--rank", "1/2", "--to", to)
    hosts(*pull, env=fault_env(to.parent, **{call: "ENOSPC"})).exits(15)
    assert list(to.parent.iterdir()) == []


def test_a_peer_that_dies_is_followed_by_a_stream_that_begins_afresh(
    hosts: Hosts, hub: servers.Hub, tmp_path: Path
) -> None:
    whole = tp.write(tmp_path / "model")
    revision = hub.commit(tmp_path / "model")
    hosts("prefetch", hub.uri, host="a", env=hub.env).ok()
    served = hosts.serve(hub.uri, host="a", env=hub.env)
    with slow(served.address, MIB) as relay:
        peer = (
            "--peer",
            relay.address,
            "--route",
            "peer,stream",
            "--connect-timeout",
            "2s",
            "--peer-stall-timeout",
            "2s",
        )
        pull = ("pull", hub.uri, "--revision", revision, "--rank", "1/2", "--to", tmp_path / "out", "--json", *peer)
        running = hosts.start(*pull, host="b", env=hub.env)
        relay.wait_full()
        served.running.kill()
        relay.go()
        said = running.wait().ok().json()
    assert [(one["route"], one["taken"]) for one in said["routes"]] == [("peer", False), ("stream", True)]
    assert not tp.differing(read(tmp_path / "out"), tp.shares(whole, 1, 2))
