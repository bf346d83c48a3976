"""Ranks that read together: every byte leaves the origin once, and no rank waits for ever for another."""

from __future__ import annotations

import re
import signal
from pathlib import Path
from typing import Any

import pytest

import mx_cli
from mx_cli.base.errors import UsageError
from tests.rig import capabilities
from tests.rig import tensor_parallel as tp
from tests.rig.group_reader import Group, digest, group_load
from tests.rig.servers import S3Stub
from tests.rig.serving import eventually

if not capabilities.have("torch"):
    pytest.skip("missing: torch", allow_module_level=True)


def stored(tmp_path: Path, s3stub: Any) -> tuple[S3Stub, str, dict[str, Any]]:
    whole = tp.write(tmp_path / "model")
    store: S3Stub = s3stub()
    store.put_tree("model", tmp_path / "model")
    return store, store.uri("model"), whole


@pytest.mark.parametrize("ranks", [2, 4])
def test_every_byte_is_read_once(tmp_path: Path, s3stub: Any, ranks: int) -> None:
    store, model, whole = stored(tmp_path, s3stub)
    with Group(tmp_path / "group", ranks, model, env=store.env, keys="AWS_ACCESS_KEY_ID") as group:
        group.wait_there()
        assert [group.line(rank) for rank in range(ranks)] == [{"sha256": digest(whole)}] * ranks
    files = sum(file.stat().st_size for file in (tmp_path / "model").glob("*.safetensors"))
    headers = 2 * (256 << 10)
    assert tp.size(whole) <= store.bytes_served("safetensors") <= files + headers
    by_rank = dict.fromkeys(range(ranks), 0)
    for row in store.log():
        if "safetensors" in row["path"] and row["key"].startswith("rank"):
            by_rank[int(row["key"].removeprefix("rank"))] += row["sent"]
    by_rank[0] -= min(headers, by_rank[0])
    assert sum(by_rank.values()) >= tp.size(whole) - headers
    assert max(by_rank.values()) <= 1.25 * tp.size(whole) / ranks


def test_a_directory_and_a_part_of_it(tmp_path: Path) -> None:
    whole = tp.write(tmp_path / "model")
    names = [name for name in whole if "mlp" in name or "norm" in name]
    said = group_load(tmp_path / "group", 2, str(tmp_path / "model"), names=names)
    assert said == [{"sha256": digest({name: whole[name] for name in names})}] * 2


@pytest.mark.parametrize("ranks", [2, 4])
def test_each_rank_keeps_its_part(tmp_path: Path, s3stub: Any, ranks: int) -> None:
    """Of a tensor-parallel group each has its columns, of rows that were read once; of four, two share a head."""
    store, model, whole = stored(tmp_path, s3stub)
    odd = {rank: {"rank": f"{rank}/{ranks}"} for rank in range(ranks)}
    with Group(tmp_path / "group", ranks, model, env=store.env, odd=odd) as group:
        group.wait_there()
        said = [group.line(rank) for rank in range(ranks)]
    assert said == [{"sha256": digest(tp.shares(whole, rank, ranks))} for rank in range(ranks)]
    headers = 2 * (256 << 10)
    files = sum(file.stat().st_size for file in (tmp_path / "model").glob("*.safetensors"))
    assert tp.size(whole) <= store.bytes_served("safetensors") <= files + headers


def test_a_snapshot_with_a_wrong_block(tmp_path: Path, mx: Any) -> None:
    """One rank reads the wrong byte; all hear of it, and from whom."""
    tp.write(tmp_path / "model")
    snapshot = Path(mx("prefetch", str(tmp_path / "model")).ok().out.strip())
    file = (snapshot / "model-00002-of-00002.safetensors").resolve()
    file.chmod(0o644)
    with file.open("r+b") as out:
        out.seek(-2000, 2)
        out.write(b"wrong bytes")
    said = group_load(tmp_path / "group", 2, str(snapshot), env={"MX_CACHE_DIR": str(mx.cache)})
    assert said[1]["error"] == "IntegrityError"
    assert said[0]["error"] == "TransportFailed"
    assert said[0]["what"].startswith("rank 1 of the group failed: wrong bytes from")


def test_ranks_that_want_different_things(tmp_path: Path) -> None:
    tp.write(tmp_path / "model")
    said = group_load(tmp_path / "group", 2, str(tmp_path / "model"), odd={1: {"names": ["model.norm.weight"]}})
    assert [one["error"] for one in said] == ["UsageError"] * 2
    assert "differ in what they load" in said[0]["what"]


def test_what_rank_0_does_not_find(tmp_path: Path) -> None:
    said = group_load(tmp_path / "group", 2, str(tmp_path / "nothing"))
    assert said[0]["error"] == "NotFound"
    assert said[1]["error"] == "TransportFailed"
    assert "rank 0 of the group failed" in said[1]["what"]


@pytest.mark.parametrize(("ranks", "how"), [(4, signal.SIGKILL), (2, signal.SIGSTOP)])
def test_a_lost_rank_ends_the_others(tmp_path: Path, s3stub: Any, ranks: int, how: signal.Signals) -> None:
    store, model, _ = stored(tmp_path, s3stub)
    slow = {1: {"max_bandwidth": "256KiB"}}
    with Group(tmp_path / "group", ranks, model, env=store.env, odd=slow, stall_timeout="3s") as group:
        group.wait_there()
        # Rank 0 alone asks for headers: there are as many requests of bytes as files, and then those of the ranks.
        eventually(lambda: store.bytes_served("safetensors") > 2 << 20)
        group.ranks[1].send_signal(how)
        others = [group.line(rank) for rank in range(ranks) if rank != 1]
        # Nor does a broken group keep a process from its end.
        for rank in set(range(ranks)) - {1}:
            group.ranks[rank].wait(20)
    assert [one["error"] for one in others] == ["TransportFailed"] * (ranks - 1)
    assert all(re.match(r"the group lost ranks? 1\b", one["what"]) for one in others)


def test_what_is_no_group(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"without torch\.distributed"):
        mx_cli.load(str(tmp_path), group=object())
    with pytest.raises(UsageError, match="a group, and mapped"):
        mx_cli.load(str(tmp_path), group=object(), mapped=True)
    with pytest.raises(UsageError, match="rules without a rank"):
        mx_cli.load(str(tmp_path), group=object(), rules="llama")


def test_what_is_no_group_of_this_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch import distributed

    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        with pytest.raises(UsageError, match=r"not a group of this process: int"):
            mx_cli.load(str(tmp_path), group=5)
    finally:
        distributed.destroy_process_group()
