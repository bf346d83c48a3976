"""Weights from peers of another parallel size: TP 1 to 2, 2 to 1, 2 to 4, 4 to 2, by both paths, byte for byte."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import mx_cli
from mx_cli.base.errors import Incompatible, MxError, NoPeer, TransportFailed, UsageError
from tests.rig import capabilities
from tests.rig import tensor_parallel as tp
from tests.rig.serving import slow
from tests.rig.tensor_source import TensorSource, tensor_source
from tests.support import Mx, capability

if not capabilities.have("torch"):
    pytest.skip("missing: torch", allow_module_level=True)

import torch

PATHS = ["socket", pytest.param("nixl-read", marks=capability("nixl"))]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    found = tmp_path_factory.mktemp("ranks")
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("MX_")]:
            patch.delenv(name)
        patch.setenv("HOME", str(found))
        patch.setenv("XDG_RUNTIME_DIR", str(found / "run"))
        yield found


@pytest.fixture(scope="module")
def whole() -> dict[str, Any]:
    return tp.tensors()


@pytest.fixture(scope="module")
def sources(place: Path) -> Iterator[dict[int, list[TensorSource]]]:
    """Of each parallel size the processes that serve it."""
    with (
        tensor_source(place, "rank:0/1", "rank:0/4", "rank:1/4") as one,
        tensor_source(place, "rank:0/2", "rank:2/4", "rank:3/4") as two,
        tensor_source(place, "rank:1/2") as three,
    ):
        yield {1: [one], 2: [two, three], 4: [one, two]}


def addresses(sources: dict[int, list[TensorSource]], ranks: int) -> list[str]:
    return [
        peer["address"]
        for source in sources[ranks]
        for text, peer in source.peers.items()
        if text.endswith(f"/{ranks}")
    ]


def settings(place: Path) -> dict[str, Any]:
    return {
        "cache_dir": str(place / "cache"), "discovery": f"dir:{place / 'peers'}", "routes": ("peer",),
        "revision": tp.REVISION,
    }  # fmt: skip


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(("theirs", "own"), [(1, 2), (2, 1), (2, 4), (4, 2), (2, 2)])
def test_another_parallel_size(
    sources: dict[int, list[TensorSource]], place: Path, whole: dict[str, Any], theirs: int, own: int, path: str
) -> None:
    peers = addresses(sources, theirs)
    assert len(peers) == theirs
    for rank in range(own):
        expected = tp.shares(whole, rank, own)
        target = {name: torch.zeros_like(tensor) for name, tensor in expected.items()}
        received = mx_cli.pull_into(
            target, tp.URI, rank=f"{rank}/{own}", rules="llama", peers=peers, path=path, **settings(place)
        )
        assert not tp.differing(target, expected)
        assert received.bytes - received.extra == tp.size(expected)
        # Rows of more columns than are wanted are read along, and what stands between two small tensors.
        rows = tp.size({n: t for n, t in whole.items() if n.endswith(tp.ROWS)}) if theirs < own else 0
        assert received.extra <= rows + (128 << 10)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(("theirs", "own"), [(1, 2), (2, 1), (2, 4), (4, 2)])
def test_another_parallel_size_into_files(
    sources: dict[int, list[TensorSource]],
    place: Path,
    whole: dict[str, Any],
    theirs: int,
    own: int,
    path: str,
    mx: Mx,
    tmp_path: Path,
) -> None:
    """`mx pull --rank`, by the peers' URI: the store itself is never asked."""
    env = {"XDG_RUNTIME_DIR": place / "run", "MX_DISCOVERY": f"dir:{place / 'peers'}"}
    peers = [word for address in addresses(sources, theirs) for word in ("--peer", address)]
    for rank in range(own):
        to = tmp_path / str(rank)
        pull = ("pull", tp.URI, "--revision", tp.REVISION, "--rank", f"{rank}/{own}", "--rules", "llama", "--json")
        said = mx(*pull, "--route", "peer", "--path", path, "--to", to, *peers, env=env).ok().json()
        expected = tp.shares(whole, rank, own)
        assert not tp.differing(mx_cli.load(str(to), cache_dir=str(place / "cache")), expected)
        # Columns are picked from rows that come whole, since files take no runs from memory.
        rows = tp.size({name: tensor for name, tensor in whole.items() if name.endswith(tp.ROWS)})
        assert tp.size(expected) <= said["bytes_moved"] <= tp.size(expected) + rows + (128 << 10)


@pytest.mark.parametrize("path", PATHS)
def test_all_that_discovery_finds(
    sources: dict[int, list[TensorSource]], place: Path, whole: dict[str, Any], path: str
) -> None:
    """Seven peers of three parallel sizes at once: the work is spread over all that have a piece."""
    found = mx_cli.pull(tp.URI, rank="1/2", path=path, **settings(place))
    expected = tp.shares(whole, 1, 2)
    assert not tp.differing(found, expected)
    target = {name: torch.zeros_like(tensor) for name, tensor in expected.items()}
    received = mx_cli.pull_into(target, tp.URI, rank="1/2", path=path, **settings(place))
    assert not tp.differing(target, expected)
    # Rank 1/2 has all of it, 0/1 too, and 2/4 and 3/4 have a half each.
    assert len([source for source, count in received.sources.items() if count > tp.size(expected) // 10]) >= 3


def test_rows_that_nobody_has_are_named(sources: dict[int, list[TensorSource]], place: Path) -> None:
    for rank, lacking in ((0, "64 to 127"), (1, "64 to 127")):
        peers = [sources[2][0].peers["rank:0/2"]["address"]]
        target = {
            "model.layers.0.self_attn.k_proj.weight": torch.full((64 * (2 - rank), 256), 7.0, dtype=torch.bfloat16)
        }
        with pytest.raises(
            Incompatible, match=rf"rows {lacking} of dimension 0 of model\.layers\.0\.self_attn\.k_proj"
        ) as e:
            mx_cli.pull_into(
                target,
                tp.URI,
                rank=("0/1", "1/2")[rank],
                rules="llama",
                peers=peers,
                allow_extra=True,
                **settings(place),
            )
        assert "0/2" in str(e.value)
        assert all(bool((tensor == 7).all()) for tensor in target.values())


def test_who_wants_whole_weights_does_not_take_a_part(
    sources: dict[int, list[TensorSource]], place: Path, whole: dict[str, Any]
) -> None:
    with pytest.raises((NoPeer, Incompatible), match="no peer holds"):
        mx_cli.pull(tp.URI, **settings(place))
    peer = sources[2][0].peers["rank:0/2"]
    by_identity = {name: value for name, value in settings(place).items() if name != "revision"}
    with pytest.raises(Incompatible, match="has only the part of rank 0/2"):
        mx_cli.pull(peer["identities"]["origin"], peers=[peer["address"]], **by_identity)
    # Its own content is another matter: a replica of the rank asks for exactly that.
    found = mx_cli.pull(peer["identities"]["content"], peers=[peer["address"]], **by_identity)
    assert not tp.differing(found, tp.shares(whole, 0, 2))
    found = mx_cli.pull(peer["identities"]["origin"], rank="0/1", peers=addresses(sources, 2), **by_identity)
    assert not tp.differing(found, whole)


def test_a_target_of_another_shape_is_not_touched(sources: dict[int, list[TensorSource]], place: Path) -> None:
    name = "model.layers.0.self_attn.q_proj.weight"
    target = {name: torch.full((512, 256), 7.0, dtype=torch.bfloat16)}
    with pytest.raises(Incompatible, match=r"q_proj\.weight: BF16\[512, 256\] here, BF16\[256, 256\] there"):
        mx_cli.pull_into(target, tp.URI, rank="0/2", rules="llama", allow_extra=True, **settings(place))
    assert bool((target[name] == 7).all())


@pytest.mark.parametrize("path", PATHS)
def test_scattered_and_tied_targets(
    sources: dict[int, list[TensorSource]], place: Path, whole: dict[str, Any], path: str
) -> None:
    q, down = "model.layers.0.self_attn.q_proj.weight", "model.layers.0.mlp.down_proj.weight"
    expected = tp.shares(whole, 1, 2)
    target = {q: torch.zeros(256, 256, dtype=torch.bfloat16).t(), down: torch.zeros(256, 5120, dtype=torch.bfloat16)}
    mx_cli.pull_into(target, tp.URI, rank="1/2", rules="llama", allow_extra=True, path=path, **settings(place))
    assert not tp.differing(target, {name: expected[name] for name in target})
    shared = torch.zeros(512, 256, dtype=torch.bfloat16)
    tied = {"model.embed_tokens.weight": shared, "lm_head.weight": shared}
    with pytest.raises(Incompatible, match="share memory here"):
        mx_cli.pull_into(tied, tp.URI, rank="0/2", rules="llama", allow_extra=True, path=path, **settings(place))


def test_a_peer_that_dies_is_replaced_by_who_has_the_same_rows(
    sources: dict[int, list[TensorSource]], place: Path, whole: dict[str, Any]
) -> None:
    expected = tp.shares(whole, 1, 2)
    target = {name: torch.zeros_like(tensor) for name, tensor in expected.items()}
    errors: list[MxError] = []

    def read(peers: list[str]) -> None:
        try:
            mx_cli.pull_into(
                target, tp.URI, rank="1/2", rules="llama", peers=peers, path="socket", peer_stall_timeout=2.0,
                connect_timeout=2.0, **settings(place),
            )  # fmt: skip
        except MxError as error:
            errors.append(error)

    with tensor_source(place, "rank:1/2") as dying, slow(dying.peers["rank:1/2"]["address"], 1 << 20) as relay:
        thread = threading.Thread(target=read, args=[[relay.address, *addresses(sources, 4)]])
        thread.start()
        relay.wait_full()
        dying.kill()
        relay.go()
        thread.join(60)
        assert not thread.is_alive()
    assert not errors
    assert not tp.differing(target, expected)


def test_what_a_peer_that_dies_should_have_given_is_counted_once(
    sources: dict[int, list[TensorSource]], place: Path, mx: Mx, tmp_path: Path
) -> None:
    env = {"XDG_RUNTIME_DIR": place / "run", "MX_DISCOVERY": f"dir:{place / 'peers'}"}
    with tensor_source(place, "rank:1/2") as dying, slow(dying.peers["rank:1/2"]["address"], 1 << 20) as relay:
        peers = [word for address in [relay.address, *addresses(sources, 4)] for word in ("--peer", address)]
        pull = ("pull", tp.URI, "--revision", tp.REVISION, "--rank", "1/2", "--rules", "llama", "--route", "peer")
        how = ("--to", tmp_path / "out", "--path", "socket", "--peer-stall-timeout", "2s", "--log-format", "json")
        running = mx.start(*pull, *how, *peers, env=env)
        relay.wait_full()
        dying.kill()
        relay.go()
        running.wait(60).ok()
    told = [json.loads(line) for line in running.err]
    assert any("are left" in one["msg"] for one in told)
    last = [one["fields"] for one in told if one["event"] == "progress"][-1]
    assert last["bytes_done"] == last["bytes_total"]


def test_a_peer_that_dies_alone_ends_the_pull(place: Path) -> None:
    errors: list[MxError] = []

    def read(address: str) -> None:
        try:
            mx_cli.pull(
                tp.URI, rank="1/2", rules="llama", peers=[address], path="socket", peer_stall_timeout=2.0,
                connect_timeout=2.0, **settings(place),
            )  # fmt: skip
        except MxError as error:
            errors.append(error)

    with tensor_source(place, "rank:1/2") as dying, slow(dying.peers["rank:1/2"]["address"], 1 << 20) as relay:
        thread = threading.Thread(target=read, args=[relay.address])
        thread.start()
        relay.wait_full()
        dying.kill()
        relay.go()
        thread.join(60)
    assert [type(error) for error in errors] == [TransportFailed]


def test_serving_a_rank_needs_an_origin(place: Path, whole: dict[str, Any]) -> None:
    options = {"cache_dir": str(place / "cache"), "discovery": f"dir:{place / 'peers'}"}
    with pytest.raises(UsageError, match="without an origin"):
        mx_cli.serve(tp.shares(whole, 0, 2), rank="0/2", config=tp.CONFIG, **options)
    wrong = {"model.layers.0.self_attn.qkv_proj.weight": torch.zeros(7, 4)}
    with pytest.raises(UsageError, match=r"qkv_proj\.weight \[7, 4\] is not what rank 0/2 has"):
        mx_cli.serve(wrong, rank="0/2", config=tp.CONFIG, origin=(tp.URI, tp.REVISION), **options)
    with pytest.raises(UsageError, match=r"lm_head\.weight \[512, 256\] is not what rank 1/2 has of \[1000, 256\]"):
        mx_cli.serve(
            {"lm_head.weight": torch.zeros(512, 256)}, rank="1/2", config=tp.CONFIG, whole={"lm_head.weight": (1000, 256)},
            origin=(tp.URI, tp.REVISION), **options,
        )  # fmt: skip
