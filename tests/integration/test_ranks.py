"""Shares of ranks: only what a rank needs is read, whatever the route, and it is byte for byte what slicing gives."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path
from typing import Any

import pytest

import mx_cli
from mx_cli.base.errors import IntegrityError, UsageError
from tests.rig import capabilities
from tests.rig import tensor_parallel as tp
from tests.rig.servers import S3, S3Stub
from tests.rig.serving import Hosts

if not capabilities.have("torch"):
    pytest.skip("missing: torch", allow_module_level=True)

import torch

RANKS = [(0, 2), (1, 2), (0, 4), (3, 4), (0, 1)]


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setenv("HOME", str(tmp_path))
    return {"cache_dir": str(tmp_path / "cache"), "discovery": f"dir:{tmp_path / 'peers'}", "node_name": "here"}


def extra(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if "read along" in record.getMessage()]


@pytest.mark.parametrize(("rank", "ranks"), RANKS)
def test_a_share_from_a_directory(tmp_path: Path, settings: dict[str, Any], rank: int, ranks: int) -> None:
    whole = tp.write(tmp_path / "model")
    found = mx_cli.load(str(tmp_path / "model"), rank=f"{rank}/{ranks}", **settings)
    assert not tp.differing(found, tp.shares(whole, rank, ranks))


def test_only_what_a_rank_needs_is_asked_of_a_store(
    tmp_path: Path,
    s3stub: Any,
    settings: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    whole = tp.write(tmp_path / "model")
    store: S3Stub = s3stub()
    store.put_tree("model", tmp_path / "model")
    for name, value in store.env.items():
        monkeypatch.setenv(name, value)
    # Rows that are far apart: 512 KiB of one rank, and 512 KiB of the other.
    rules = {"rules": [["*.mlp.[gu]*", "col"], ["*", "replicate"]]}
    names = [f"{tp.LAYER}.mlp.gate_proj.weight", f"{tp.LAYER}.mlp.up_proj.weight"]
    mx_cli.load(store.uri("model"), names=[tp.LAYER + ".input_layernorm.weight"], **settings)
    before = store.bytes_served("safetensors")
    with caplog.at_level(logging.INFO, "mx"):
        found = mx_cli.load(store.uri("model"), rank="1/2", rules=rules, names=names, **settings)
    expected = {name: whole[name].chunk(2)[1] for name in names}
    assert not tp.differing(found, expected)
    headers = before - 512
    assert store.bytes_served("safetensors") - before - headers == tp.size(expected)
    assert not extra(caplog)
    # Columns: the rows of the other rank lie between, which is said.
    name = f"{tp.LAYER}.mlp.down_proj.weight"
    before = store.bytes_served("safetensors")
    with caplog.at_level(logging.INFO, "mx"):
        found = mx_cli.load(store.uri("model"), rank="1/2", names=[name], **settings)
    assert not tp.differing(found, {name: whole[name].chunk(2, 1)[1]})
    half = tp.size(found)
    read = store.bytes_served("safetensors") - before - headers
    assert read == 2 * half - 10240
    assert re.search(r"2\.5 MiB are this rank's, and 2\.5 MiB between them were read along", extra(caplog)[0])


def test_blocks_that_are_read_whole_are_verified(tmp_path: Path, settings: dict[str, Any], mx: Any) -> None:
    whole = tp.write(tmp_path / "model")
    snapshot = Path(mx("prefetch", str(tmp_path / "model")).ok().out.strip())
    mine = {**settings, "cache_dir": str(mx.cache)}
    name = f"{tp.LAYER}.mlp.down_proj.weight"
    found = mx_cli.load(str(snapshot), rank="1/2", names=[name], **mine)
    assert not tp.differing(found, {name: tp.share(name, whole[name], 1, 2)})
    file = snapshot / "model-00002-of-00002.safetensors"
    damaged = file.resolve()
    damaged.chmod(0o644)
    data = damaged.read_bytes()
    header = 8 + int.from_bytes(data[:8], "little")
    start = header + json.loads(data[8:header])[name]["data_offsets"][0]
    # A byte of the other rank's columns: the block is wrong all the same.
    with damaged.open("r+b") as out:
        out.seek(start + 1)
        out.write(bytes([data[start + 1] ^ 1]))
    with pytest.raises(IntegrityError, match=re.escape(name)):
        mx_cli.load(str(snapshot), rank="1/2", names=[name], **mine)


def test_rules_from_a_file_and_by_name(tmp_path: Path, settings: dict[str, Any]) -> None:
    whole = tp.write(tmp_path / "model")
    model = str(tmp_path / "model")
    file = tmp_path / "rules.json"
    file.write_text(json.dumps({"rules": [["*.mlp.*", "row"]], "default": "replicate"}))
    name = f"{tp.LAYER}.mlp.up_proj.weight"
    found = mx_cli.load(model, rank="1/2", rules=file, names=[name], **settings)
    assert not tp.differing(found, {name: whole[name].chunk(2, 1)[1]})
    found = mx_cli.load(model, rank="1/2", rules="llama", names=[name], **settings)
    assert not tp.differing(found, {name: whole[name].chunk(2)[1]})


def test_what_cannot_be_split(tmp_path: Path, settings: dict[str, Any]) -> None:
    tp.write(tmp_path / "model")
    model = str(tmp_path / "model")
    for rank in ("2/2", "-1/2", "1", "1/0", "", "1/2/3"):
        with pytest.raises(UsageError, match="not a rank"):
            mx_cli.load(model, rank=rank, **settings)
    with pytest.raises(UsageError, match="without a rank"):
        mx_cli.load(model, rules="llama", **settings)
    with pytest.raises(UsageError, match="not a rule file"):
        mx_cli.load(model, rank="0/2", rules=str(tmp_path / "none.json"), **settings)
    with pytest.raises(UsageError, match=r"no rule says how model\.embed_tokens\.weight \[1000, 256\]"):
        mx_cli.load(model, rank="0/2", rules={"rules": []}, **settings)
    with pytest.raises(UsageError, match=r"o_proj.*8 heads cannot be split evenly over 16"):
        mx_cli.load(model, rank="0/16", names=[f"{tp.LAYER}.self_attn.o_proj.weight"], **settings)
    (tmp_path / "model" / "config.json").unlink()
    with pytest.raises(UsageError, match=r"no config\.json"):
        mx_cli.load(model, rank="0/2", **settings)


@pytest.mark.parametrize("source", ["cache", "origin", "peer"])
def test_a_share_by_every_route(
    tmp_path: Path, settings: dict[str, Any], s3: S3, hosts: Hosts, monkeypatch: pytest.MonkeyPatch, source: str
) -> None:
    """A snapshot, one that is fetched first, and peers that have the weights whole."""
    whole = tp.write(tmp_path / "model")
    s3.put_tree("model", tmp_path / "model")
    for name, value in s3.env.items():
        monkeypatch.setenv(name, value)
    model = s3.uri("model")
    if source == "cache":
        mx_cli.pull(model, names=["model.norm.weight"], routes=("origin",), **settings)
    options = dict(settings)
    if source == "peer":
        hosts("prefetch", model, host="a", env=s3.env).ok()
        hosts.serve(model, "--device", "cpu", host="a", env=s3.env)
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(hosts.runtime))
    expected = tp.shares(whole, 1, 4)
    found = mx_cli.pull(model, rank="1/4", routes=(source,), **options)
    assert not tp.differing(found, expected)
    target = {name: torch.zeros_like(tensor) for name, tensor in expected.items()}
    received = mx_cli.pull_into(target, model, rank="1/4", rules="llama", routes=(source,), **options)
    assert received.route == source
    assert not tp.differing(target, expected)
