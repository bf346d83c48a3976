"""Routes of `mx pull`: their order and reasons as sources go away, the stream past the cache, and faults at each stage."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import mx_cli
from mx_cli.base.errors import Incompatible, MxError, NotFound, TransportFailed
from tests.rig import capabilities, limits, servers
from tests.rig import tensor_parallel as tp
from tests.rig.big_file import big_file
from tests.rig.serving import Hosts, slow
from tests.support import MIB, Result, capability, checkpoint_files, make_checkpoint, tree


def routes(result: Result) -> list[tuple[str, bool]]:
    return [(one["route"], one["taken"]) for one in result.ok().json()["routes"]]


def contents(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def leftovers(target: Path) -> list[str]:
    """What stands beside a directory that was to be made."""
    return [path.name for path in target.parent.iterdir() if path.name.startswith(f".{target.name}.")]


# --- the stream ------------------------------------------------------------------------------------------------------


def test_a_stream_fills_a_directory_and_no_cache(hosts: Hosts, hub: servers.Hub, tmp_path: Path) -> None:
    files = checkpoint_files()
    hub.commit(files)
    to = tmp_path / "out"
    result = hosts("pull", hub.uri, "--route", "stream", "--to", to, "--json", env=hub.env)
    assert routes(result) == [("stream", True)]
    said = result.json()
    assert (said["bytes_total"], said["files"]) == (sum(map(len, files.values())), len(files))
    assert contents(to) == files
    # The index is read before it is fetched.
    assert 0 <= hub.bytes_served("/resolve/") - sum(map(len, files.values())) < 10_000
    assert not hosts.cache("a").exists()
    assert said["identity"] == hosts("hash", to, "--kind", "content").ok().out.strip()


def test_a_stream_again(hosts: Hosts, hub: servers.Hub, tmp_path: Path) -> None:
    """The same files stay, whether their origin has digests of them or not; others are never touched."""
    hub.commit(checkpoint_files())
    to = tmp_path / "out"
    pull = ("pull", hub.uri, "--route", "stream", "--to", to, "--json")
    hosts(*pull, env=hub.env).ok()
    before = (to / "config.json").stat().st_mtime_ns
    hosts(*pull, env=hub.env).ok()
    assert (to / "config.json").stat().st_mtime_ns == before
    data = (to / "config.json").read_bytes()
    (to / "config.json").write_bytes(data.replace(b"l", b"k", 1))
    changed = tree(to)
    assert "with other files in it" in hosts(*pull, env=hub.env).exits(2).err
    assert tree(to) == changed
    assert leftovers(to) == []


@capability("moto")
def test_what_the_origin_has_digests_of_is_not_fetched_twice(
    hosts: Hosts, s3stub: Callable[..., servers.S3Stub], tmp_path: Path
) -> None:
    make_checkpoint(tmp_path / "model")
    store = s3stub()
    store.put_tree("model", tmp_path / "model")
    pull = ("pull", store.uri("model"), "--route", "stream", "--to", tmp_path / "out", "--json")
    assert hosts(*pull, env=store.env).ok().json()["bytes_moved"] > 2 * MIB
    before = store.bytes_served("-of-")
    again = hosts(*pull, env=store.env).ok()
    assert again.json()["bytes_moved"] == 0
    assert "holds these files already" in again.err
    assert store.bytes_served("-of-") == before
    assert again.json()["identity"].startswith("mx1c-")


@capability("moto")
def test_what_is_there_already_is_compared_with_the_identity(
    hosts: Hosts, s3stub: Callable[..., servers.S3Stub], tmp_path: Path
) -> None:
    for name in ("model", "other"):
        make_checkpoint(tmp_path / name, seed=name)
    store = s3stub()
    store.put_tree("model", tmp_path / "model")
    other = hosts("hash", tmp_path / "other", "--kind", "content").ok().out.strip()
    more = ("--route", "stream", "--to", tmp_path / "out")
    hosts("pull", store.uri("model"), *more, env=store.env).ok()
    refused = hosts("pull", other, "--origin", store.uri("model"), *more, env=store.env).exits(17)
    assert "other weights" in refused.err
    assert tree(tmp_path / "out") == tree(tmp_path / "model")


@pytest.mark.parametrize("more", [(), ("--route", "stream"), ("--route", "stream", "--rank", "0/2")])
def test_a_model_gets_nothing_put_into_it(more: tuple[str, ...], hosts: Hosts, tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path / "model")
    before = tree(model)
    refused = hosts("pull", model, *more, "--to", model / "out").exits(2)
    assert "lies inside the origin" in refused.err
    assert tree(model) == before


def test_a_stream_needs_a_place(hosts: Hosts, hub: servers.Hub, tmp_path: Path) -> None:
    hub.commit(checkpoint_files())
    assert "--to DIR" in hosts("pull", hub.uri, "--route", "stream", env=hub.env).exits(2).err
    inside = hosts.cache("a") / "out"
    assert "inside the cache" in hosts("pull", hub.uri, "--to", inside, env=hub.env).exits(2).err
    offline = hosts("pull", hub.uri, "--route", "stream", "--offline", "--to", tmp_path / "out", env=hub.env)
    assert "offline" in offline.exits(10).err
    assert hub.log() == []


def test_a_stream_of_an_identity_is_compared(hosts: Hosts, hub: servers.Hub, tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "model")
    make_checkpoint(tmp_path / "other", seed="other")
    hub.commit(tmp_path / "model")
    content = hosts("hash", tmp_path / "model", "--kind", "content").ok().out.strip()
    other = hosts("hash", tmp_path / "other", "--kind", "content").ok().out.strip()
    pull = ("--origin", hub.uri, "--route", "stream", "--json", "--to")
    said = hosts("pull", content, *pull, tmp_path / "out", env=hub.env).ok().json()
    assert said["identity"] == content
    assert tree(tmp_path / "out") == tree(tmp_path / "model")
    refused = hosts("pull", other, *pull, tmp_path / "no", env=hub.env).exits(17)
    assert content in refused.err
    assert other in refused.err
    assert not (tmp_path / "no").exists()
    assert leftovers(tmp_path / "no") == []
    # By its origin, an identity is compared before anything moves.
    hub.reset()
    elsewhere = hosts("pull", "mx1o-" + "0" * 32, *pull, tmp_path / "no", env=hub.env).exits(17)
    assert "other weights" in elsewhere.err
    assert hub.bytes_served("-of-") == 0


@capability("memory-cgroup")
def test_t01_a_stream_to_a_directory_keeps_to_its_memory(hosts: Hosts, tmp_path: Path) -> None:
    with big_file(64, 8 * MIB) as server, limits.memory(256 * MIB) as prefix:
        to = tmp_path / "out"
        pull = ("pull", server.url, "--route", "stream", "--memory", "64MiB", "--to", to, "--json")
        said = hosts(*pull, prefix=prefix, timeout=110).ok().json()
        assert said["bytes_moved"] == server.length
        assert [path.stat().st_size for path in to.iterdir()] == [server.length]


# --- the order -------------------------------------------------------------------------------------------------------


def test_sources_go_away_one_by_one(hosts: Hosts, hub: servers.Hub, tmp_path: Path) -> None:
    files = checkpoint_files()
    uri = f"{hub.uri}@{hub.commit(files)}"
    for host in ("a", "b"):
        hosts("prefetch", uri, host=host, env=hub.env).ok()
    served = hosts.serve(uri, "--offline", host="a", env=hub.env)
    made: list[Path] = []

    def pulled(**more: str | Path) -> Result:
        made.append(tmp_path / f"out{len(made)}")
        return hosts("pull", uri, "--to", made[-1], "--retry-for", "0s", "--json", host="b", env={**hub.env, **more})

    assert routes(pulled()) == [("peer", True)]
    served.stop()
    assert routes(pulled()) == [("peer", False), ("cache", True)]
    shutil.rmtree(hosts.cache("b"))
    assert routes(pulled()) == [("peer", False), ("cache", False), ("origin", True)]
    # No cache can be made where a file stands.
    blocked = tmp_path / "blocked"
    blocked.write_text("a file")
    past = pulled(MX_CACHE_DIR=blocked / "cache")
    assert routes(past) == [("peer", False), ("cache", False), ("origin", False), ("stream", True)]
    assert "past the cache" in past.json()["routes"][-1]["reason"]
    for one in past.json()["routes"]:
        verb = "taken" if one["taken"] else "not taken"
        assert f"route {one['route']} {verb}: {one['reason']}" in past.err
    for place in made:
        assert contents(place) == files
    hub.server.process.kill()
    hub.server.process.wait()
    nothing = pulled(MX_CACHE_DIR=tmp_path / "fresh").exits(12)
    message = nothing.json()["error"]["message"]
    for part in ("peer: ", "cache: ", "origin: ", "stream: only where the cache cannot take the weights"):
        assert part in message
    assert not made[-1].exists()


def test_the_dry_run_tells_of_each_route(hosts: Hosts, hub: servers.Hub, tmp_path: Path) -> None:
    files = checkpoint_files()
    uri = f"{hub.uri}@{hub.commit(files)}"
    size = sum(map(len, files.values()))
    look = ("pull", uri, "--dry-run", "--json")

    def planned(*more: str | Path) -> dict[str, dict[str, Any]]:
        return {one["route"]: one for one in hosts(*look, *more, host="b", env=hub.env).ok().json()["routes"]}

    assert list(planned()) == ["peer", "cache", "origin"]
    found = planned("--to", tmp_path / "out")
    assert list(found) == ["peer", "cache", "origin", "stream"]
    assert [one["usable"] for one in found.values()] == [False, False, True, False]
    found = planned("--to", tmp_path / "out", "--route", "stream,peer", "--memory", "64MiB")
    assert list(found) == ["stream", "peer"]
    assert (found["stream"]["usable"], found["stream"]["bytes"]) == (True, size)
    assert 0 < found["stream"]["memory"] <= 64 * MIB
    hosts("prefetch", uri, host="a", env=hub.env).ok()
    served = hosts.serve(uri, host="a", env=hub.env)
    found = planned("--to", tmp_path / "out")
    assert found["peer"]["reason"].startswith(f"1 source ({served.address}: socket")
    assert found["peer"]["bytes"] == size
    assert not (tmp_path / "out").exists()
    assert not hosts.cache("b").exists()


def test_a_route_that_is_none(hosts: Hosts, hub: servers.Hub) -> None:
    wrong = hosts("pull", hub.uri, "--route", "peer,disk", env=hub.env).exits(2)
    assert "expected peer, cache, origin, stream" in wrong.err


# --- faults ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("route", ["peer", "cache", "origin", "stream"])
@pytest.mark.parametrize("point", [1, 3, 9])
def test_a_kill_at_any_write_leaves_no_target(
    route: str, point: int, hosts: Hosts, hub: servers.Hub, tmp_path: Path, fault_env: Callable[..., dict[str, str]]
) -> None:
    files = checkpoint_files()
    uri = f"{hub.uri}@{hub.commit(files)}"
    hosts("prefetch", uri, host="a", env=hub.env).ok()
    hosts.serve(uri, host="a", env=hub.env)
    if route == "cache":
        hosts("prefetch", uri, host="b", env=hub.env).ok()
    to = tmp_path / "place" / "out"
    pull = ("pull", uri, "--route", route, "--to", to, "--json")
    killed = hosts(*pull, host="b", env={**hub.env, **fault_env(to.parent, KILL_AT=point)})
    assert killed.code in (-signal.SIGKILL, 0)
    if killed.code == 0:
        assert contents(to) == files
    elif route in ("peer", "stream"):
        assert not to.exists()
    hosts(*pull, host="b", env=hub.env).ok()
    assert contents(to) == files
    assert leftovers(to) == []


@pytest.mark.parametrize("call", ["WRITE", "FSYNC", "RENAME"])
def test_a_disk_that_refuses_is_said_and_leaves_nothing(
    call: str, hosts: Hosts, hub: servers.Hub, tmp_path: Path, fault_env: Callable[..., dict[str, str]]
) -> None:
    hub.commit(checkpoint_files())
    to = tmp_path / "place" / "out"
    env = {**hub.env, **fault_env(to.parent, **{call: "ENOSPC"})}
    refused = hosts("pull", hub.uri, "--route", "stream", "--to", to, env=env).exits(15)
    assert os.strerror(errno.ENOSPC).lower() in refused.err.lower() or "no space" in refused.err.lower()
    assert not to.exists()
    assert leftovers(to) == []


@pytest.mark.parametrize(("flags", "code"), [("rot=0", 16), ("html", 16), ("failget=503:100000", 12)])
def test_bytes_that_are_wrong_leave_nothing(
    flags: str, code: int, hosts: Hosts, hub: servers.Hub, tmp_path: Path
) -> None:
    hub.commit(checkpoint_files())
    uri = hub.uri
    hub.flags(flags)
    to = tmp_path / "out"
    pull = ("pull", uri, "--route", "stream", "--retry-for", "1s", "--to", to)
    hosts(*pull, env=hub.env).exits(code)
    assert not to.exists()
    assert leftovers(to) == []
    hub.reset()
    hosts(*pull, env=hub.env).ok()


def test_what_breaks_off_is_read_on(hosts: Hosts, hub: servers.Hub, tmp_path: Path) -> None:
    files = checkpoint_files()
    hub.commit(files)
    hub.flags("cutonce=300000")
    hosts("pull", hub.uri, "--route", "stream", "--to", tmp_path / "out", env=hub.env).ok()
    assert contents(tmp_path / "out") == files


# --- into memory -----------------------------------------------------------------------------------------------------


@pytest.fixture
def here(tmp_path: Path, hosts: Hosts, hub: servers.Hub, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Settings of a reader in this process, on host b."""
    if not capabilities.have("torch"):
        pytest.skip("missing: torch")
    for name in [name for name in os.environ if name.startswith("MX_")]:
        monkeypatch.delenv(name)
    for name, value in {**hub.env, "HOME": str(tmp_path), "XDG_RUNTIME_DIR": str(hosts.runtime)}.items():
        monkeypatch.setenv(name, value)
    return {
        "cache_dir": str(hosts.cache("b")), "discovery": f"dir:{hosts.directory}", "node_name": "b", "retry_for": 0.2,
    }  # fmt: skip


def zeros(whole: dict[str, Any]) -> dict[str, Any]:
    import torch

    return {name: torch.zeros_like(tensor) for name, tensor in whole.items()}


def tried(received: Any) -> list[tuple[str, bool]]:
    return [(one.route, one.taken) for one in received.attempts]


@pytest.mark.parametrize("rank", [None, "1/2"])
def test_sources_of_tensors_go_away_one_by_one(
    rank: str | None, hosts: Hosts, hub: servers.Hub, tmp_path: Path, here: dict[str, Any]
) -> None:
    whole = tp.write(tmp_path / "model")
    expected = whole if rank is None else tp.shares(whole, 1, 2)
    revision = hub.commit(tmp_path / "model")
    for host in ("a", "b"):
        hosts("prefetch", hub.uri, host=host, env=hub.env).ok()
    served = hosts.serve(f"{hub.uri}@{revision}", "--offline", host="a", env=hub.env)

    def pulled(**more: Any) -> list[tuple[str, bool]]:
        target = zeros(expected)
        received = mx_cli.pull_into(target, hub.uri, revision=revision, rank=rank, **{**here, **more})
        assert not tp.differing(target, expected)
        return tried(received)

    assert pulled() == [("peer", True)]
    served.stop()
    assert pulled() == [("peer", False), ("cache", True)]
    shutil.rmtree(hosts.cache("b"))
    last = "origin" if rank is None else "stream"
    assert pulled() == [("peer", False), ("cache", False), (last, True)]
    (tmp_path / "blocked").write_text("a file")
    without_cache = {"cache_dir": str(tmp_path / "blocked" / "cache")}
    if rank is None:
        assert pulled(**without_cache) == [("peer", False), ("cache", False), ("origin", False), ("stream", True)]
    assert pulled(routes=["stream"], **without_cache) == [("stream", True)]
    shutil.rmtree(hosts.cache("b"), ignore_errors=True)
    hub.server.process.kill()
    hub.server.process.wait()
    with pytest.raises(MxError) as caught:
        pulled()
    assert all(f"{name}: " in caught.value.what for name in ("peer", "cache", last))


@pytest.mark.parametrize("rank", [None, "0/2"])
def test_a_peer_that_dies_under_way_is_followed_by_the_next_route(
    rank: str | None, hosts: Hosts, hub: servers.Hub, tmp_path: Path, here: dict[str, Any]
) -> None:
    """What it had written is written again, all of it."""
    whole = tp.write(tmp_path / "model")
    expected = whole if rank is None else tp.shares(whole, 0, 2)
    revision = hub.commit(tmp_path / "model")
    hosts("prefetch", hub.uri, host="a", env=hub.env).ok()
    served = hosts.serve(hub.uri, host="a", env=hub.env)
    target = zeros(expected)
    found: list[Any] = []

    def read(address: str) -> None:
        found.append(
            mx_cli.pull_into(
                target, hub.uri, revision=revision, rank=rank, peers=[address], path="socket",
                routes=["peer", "stream"], connect_timeout=2.0, peer_stall_timeout=2.0, **here,
            )
        )  # fmt: skip

    with slow(served.address, MIB) as relay:
        reader = threading.Thread(target=read, args=[relay.address])
        reader.start()
        relay.wait_full()
        served.running.kill()
        relay.go()
        reader.join(60)
    (received,) = found
    assert tried(received) == [("peer", False), ("stream", True)]
    assert not tp.differing(target, expected)


def test_what_a_route_began_is_not_left_half_done_by_the_next(
    hub: servers.Hub, tmp_path: Path, here: dict[str, Any]
) -> None:
    """With allow_missing the store may lack what a peer had begun to write: that is no success."""
    import torch

    whole = tp.write(tmp_path / "model")
    revision = hub.commit(tmp_path / "model")
    more = {**whole, "made in training": torch.ones(4 << 20)}
    errors: list[MxError] = []

    def read(address: str) -> None:
        try:
            mx_cli.pull_into(
                zeros(more), hub.uri, revision=revision, peers=[address], path="socket", routes=["peer", "stream"],
                allow_missing=True, connect_timeout=2.0, peer_stall_timeout=2.0, **here,
            )  # fmt: skip
        except MxError as error:
            errors.append(error)

    with mx_cli.serve(more, origin=(hub.uri, revision), **here) as peer, slow(peer.address, MIB) as relay:
        reader = threading.Thread(target=read, args=[relay.address])
        reader.start()
        relay.wait_full()
        relay.close()
        reader.join(60)
    (error,) = errors
    assert isinstance(error, (Incompatible, TransportFailed))
    assert "stream: it lacks made in training, which another route began to fill" in error.what


def test_new_tensors_are_not_what_another_route_began(hub: servers.Hub, tmp_path: Path, here: dict[str, Any]) -> None:
    """Nothing of them is half done, so the store need not have all that a peer had."""
    import torch

    whole = tp.write(tmp_path / "model")
    revision = hub.commit(tmp_path / "model")
    more = {**whole, "made in training": torch.ones(4 << 20)}
    found: list[dict[str, Any]] = []

    def read(address: str) -> None:
        found.append(
            mx_cli.pull(
                hub.uri, revision=revision, peers=[address], path="socket", routes=["peer", "stream"],
                connect_timeout=2.0, peer_stall_timeout=2.0, **here,
            )
        )  # fmt: skip

    with mx_cli.serve(more, origin=(hub.uri, revision), **here) as peer, slow(peer.address, MIB) as relay:
        reader = threading.Thread(target=read, args=[relay.address])
        reader.start()
        relay.wait_full()
        relay.close()
        reader.join(60)
    (tensors,) = found
    assert not tp.differing(tensors, whole)


def test_content_cannot_be_told_before_it_is_read(
    hosts: Hosts, hub: servers.Hub, tmp_path: Path, here: dict[str, Any]
) -> None:
    tp.write(tmp_path / "model")
    hub.commit(tmp_path / "model")
    content = hosts("hash", tmp_path / "model", "--kind", "content").ok().out.strip()
    with pytest.raises(Incompatible, match="known only when all of it was read"):
        mx_cli.pull(content, origin=hub.uri, routes=["stream"], **here)
    with pytest.raises(NotFound, match="offline"):
        mx_cli.pull(hub.uri, routes=["stream"], offline=True, **here)
    assert mx_cli.pull(content, origin=hub.uri, **here).keys() == tp.SHAPES.keys()
