"""`mx pull` and `mx prefetch --from peer,origin`: routes, paths, sources that fail, and what is refused by name."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.rig import netns, servers
from tests.rig.netns import Namespace
from tests.rig.serving import Hosts, slow
from tests.support import MIB, Result, capability, checkpoint_files, make_checkpoint, tree

NOBODY = "mx1c-" + "0" * 32


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("pull") / "model", size=2 * MIB)


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("pull") / "large", size=64 * MIB)


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("pull") / "other", size=2 * MIB, seed="other")


@pytest.fixture
def token(tmp_path: Path) -> Path:
    path = tmp_path / "token"
    path.write_text("a-secret-for-the-tests-of-pull-0123456789\n")
    path.chmod(0o600)
    return path


@pytest.fixture
def pair() -> Iterator[tuple[Namespace, Namespace]]:
    with netns.pair() as sides:
        yield sides


def size_of(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())


def routes(result: Result) -> list[tuple[str, bool]]:
    return [(one["route"], one["taken"]) for one in result.ok().json()["routes"]]


def bodies(origin: servers.Hub) -> int:
    """Bytes of files that the hub gave; questions for names and revisions are none."""
    return origin.bytes_served("/resolve/")


# --- L-02 reader-poisons-source ------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", ["file", pytest.param("cpu", marks=capability("nixl"))])
def test_l02_readers_that_end_badly(
    device: str, hosts: Hosts, large: Path, tmp_path: Path, fault_env: Callable[..., dict[str, str]]
) -> None:
    served = hosts.serve(large, "--device", device)
    pull = ("pull", served.content, "--route", "peer", "--json", "--to")

    def pulled(name: str) -> None:
        assert routes(hosts(*pull, tmp_path / name, host="b")) == [("peer", True)]
        assert tree(tmp_path / name) == tree(large)

    pulled("1")
    # Half of the way: it has opened six files, and the weights come in about nine pieces.
    env = fault_env(tmp_path / ".2", STOP_AT=14)
    stopped = hosts.start(*pull, tmp_path / "2", host="b", env=env)
    stopped.wait_stopped()
    stopped.send(signal.SIGTERM)
    stopped.send(signal.SIGCONT)
    assert stopped.wait().code == 143
    assert served.metrics()["readers"] == 0
    pulled("3")
    killed = hosts(*pull, tmp_path / "4", host="b", env=fault_env(tmp_path / ".4", KILL_AT=14))
    assert killed.code == -signal.SIGKILL
    pulled("5")
    assert served.get("/readyz") == (200, "ok\n")
    assert not (tmp_path / "2").exists()
    assert not (tmp_path / "4").exists()
    # Who was killed could not say goodbye; its grant ends by itself.
    assert served.metrics()["readers"] == 1


# --- L-07 path-priority --------------------------------------------------------------------------------------------


def test_l07_peer_then_cache_then_origin(hosts: Hosts, hub: servers.Hub, tmp_path: Path) -> None:
    files = checkpoint_files()
    revision = hub.commit(files)
    uri = f"{hub.uri}@{revision}"
    hosts("prefetch", uri, host="a", env=hub.env).ok()
    hosts("prefetch", uri, host="b", env=hub.env).ok()
    served = hosts.serve(uri, "--offline", host="a", env=hub.env)
    hub.reset()

    def pulled(name: str, *more: str) -> Result:
        return hosts("pull", uri, "--to", tmp_path / name, "--json", *more, host="b", env=hub.env)

    from_peer = pulled("1")
    assert routes(from_peer) == [("peer", True)]
    assert [one["address"] for one in from_peer.json()["sources"]] == [served.address]
    configured = pulled("2", "--route", "cache,peer")
    assert routes(configured) == [("cache", True)]
    served.stop()
    from_cache = pulled("3")
    assert routes(from_cache) == [("peer", False), ("cache", True)]
    assert hub.log() == []
    shutil.rmtree(hosts.cache("b"))
    from_origin = pulled("4")
    assert routes(from_origin) == [("peer", False), ("cache", False), ("origin", True)]
    # The index is read before it is fetched.
    assert 0 <= bodies(hub) - sum(map(len, files.values())) < 10_000
    for one in from_origin.json()["routes"]:
        verb = "taken" if one["taken"] else "not taken"
        assert f"route {one['route']} {verb}: {one['reason']}" in from_origin.err
    assert tree(tmp_path / "1") == tree(tmp_path / "2") == tree(tmp_path / "3") == tree(tmp_path / "4")
    hub.server.process.kill()
    hub.server.process.wait()
    shutil.rmtree(hosts.cache("b"))
    nothing = pulled("5", "--retry-for", "0s")
    assert nothing.exits(12).json()["error"]["message"].startswith("peer: ")
    assert "; cache: " in nothing.err
    assert "; origin: " in nothing.err
    assert not (tmp_path / "5").exists()


# --- L-08 no-source ------------------------------------------------------------------------------------------------


def test_l08_nobody(hosts: Hosts) -> None:
    nobody = hosts("pull", NOBODY).exits(18)
    assert f"no peer holds {NOBODY}" in nobody.err
    waited = hosts("pull", NOBODY, "--route", "peer", "--wait", "1s", "--json").exits(18)
    assert "within 1 s" in waited.json()["error"]["message"]
    assert waited.seconds >= 1


def test_l08_a_directory_that_cannot_be_listed_costs_only_the_peers(hosts: Hosts, model: Path, tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("no directory")
    lost = {"MX_DISCOVERY": f"dir:{tmp_path / 'taken'}"}
    said = f"listing {tmp_path / 'taken'}: Not a directory"
    assert said in hosts("pull", NOBODY, "--route", "peer", env=lost).exits(18).err
    pulled = hosts("pull", model.as_uri(), "--to", tmp_path / "out", env=lost).ok()
    assert said in pulled.err
    assert tree(tmp_path / "out") == tree(model)
    assert said in hosts("prefetch", model.as_uri(), "--from", "peer,origin", env=lost, host="b").ok().err


def test_l08_only_others(hosts: Hosts, model: Path) -> None:
    served = hosts.serve(model)
    result = hosts("pull", NOBODY, "--route", "peer").exits(17)
    for identity in (served.content, served.address, NOBODY, "mx hash MODEL --diff OTHER"):
        assert identity in result.err


def test_l08_only_expired_records(hosts: Hosts, model: Path) -> None:
    served = hosts.serve(model)
    served.running.kill()
    (record,) = hosts.directory.glob("*.json")
    long_ago = record.stat().st_mtime - 100
    os.utime(record, (long_ago, long_ago))
    hosts("pull", served.content, "--route", "peer").exits(18)


def test_l08_somebody_comes_while_one_waits(hosts: Hosts, model: Path, tmp_path: Path) -> None:
    content = hosts("hash", model, "--kind", "content").ok().out.strip()
    waiting = hosts.start("pull", content, "--route", "peer", "--wait", "60s", "--to", tmp_path / "out", host="b")
    waiting.wait_err("^cache")
    hosts.serve(model)
    waiting.wait().ok()
    assert tree(tmp_path / "out") == tree(model)


def test_an_identity_of_a_configuration_is_no_model(hosts: Hosts) -> None:
    hosts("pull", "mx1x-" + "0" * 32).exits(2)


# --- L-09 wrong-device ---------------------------------------------------------------------------------------------


@capability("nixl")
def test_l09_an_interface_that_is_not_there(hosts: Hosts, model: Path, tmp_path: Path) -> None:
    wrong = ("--interface", "nosuch0")
    source = hosts("serve", model, "--device", "cpu", *wrong, timeout=30)
    assert source.code == 2
    assert "nosuch0" in source.err
    assert "--interface" in source.err
    served = hosts.serve(model, "--device", "cpu")
    pull = ("pull", served.content, "--route", "peer", *wrong, "--to", tmp_path / "out")
    reader = hosts(*pull, "--path", "nixl-read", host="b", timeout=30)
    assert reader.code == 2
    assert "nosuch0" in reader.err
    assert "--interface" in reader.err
    assert not (tmp_path / "out").exists()


@capability("nixl", "CAP_NET_ADMIN")
def test_l09_the_right_one_among_duplicates(
    hosts: Hosts, large: Path, token: Path, pair: tuple[Namespace, Namespace], tmp_path: Path
) -> None:
    here, there = pair
    tcp = {"UCX_TLS": "tcp"}
    cpu = ("--device", "cpu", "--listen", f"{here.address}:0", "--peer-token-file", token)
    served = hosts.serve(large, *cpu, "--interface", here.device, env=tcp, prefix=here.prefix)
    pull = ("pull", served.content, "--route", "peer", "--peer-token-file", token, "--json")
    command = (*pull, "--path", "nixl-read", "--interface", there.device, "--to", tmp_path / "1")
    result = hosts(*command, host="b", env=tcp, prefix=there.apart).ok().json()
    assert tree(tmp_path / "1") == tree(large)
    (source,) = result["sources"]
    assert source["path"] == "nixl-read"
    assert re.fullmatch(rf"tcp/{there.device}.*, \d+\.\d GB/s probed", source["reason"])
    # Without a wish, another host without RDMA is read by socket, and the reason is told.
    result = hosts(*pull, "--to", tmp_path / "2", host="b", env=tcp, prefix=there.apart).ok().json()
    assert tree(tmp_path / "2") == tree(large)
    assert result["sources"][0]["path"] == "socket"
    assert "no RDMA" in result["sources"][0]["reason"]
    # The bridge leads to oneself: NIXL's error is found by the probe, and names the choice.
    command = (*pull, "--path", "nixl-read", "--interface", "docker0", "--to", tmp_path / "3")
    lost = hosts(*command, host="b", env=tcp, prefix=there.apart, timeout=40).exits(20)
    assert "docker0" in lost.err
    assert not (tmp_path / "3").exists()


# --- paths ---------------------------------------------------------------------------------------------------------


@capability("nixl")
def test_the_path_that_is_wished(hosts: Hosts, large: Path, tmp_path: Path) -> None:
    served = hosts.serve(large, "--device", "cpu")
    paths = {}
    for number, wish in enumerate([(), ("--path", "socket"), ("--require", "encrypted")]):
        out = tmp_path / str(number)
        result = hosts("pull", served.content, *wish, "--to", out, "--json", host="b").ok().json()
        assert tree(out) == tree(large)
        paths[wish] = [one["path"] for one in result["sources"]]
    assert list(paths.values()) == [["nixl-read"], ["socket"], ["socket"]]
    refused = hosts("pull", served.content, "--require", "rdma", "--to", tmp_path / "x", host="b").exits(20)
    assert "no RDMA device on both sides" in refused.err
    hosts("pull", served.content, "--require", "encrypted", "--path", "nixl-read", host="b").exits(2)


def test_a_directory_that_is_there(hosts: Hosts, model: Path, tmp_path: Path) -> None:
    """Empty: filled. With these very files: done. With others: refused. No byte moves twice."""
    served = hosts.serve(model)
    out = tmp_path / "out"
    out.mkdir()
    hosts("pull", served.content, "--to", out, host="b").ok()
    hosts("pull", served.content, "--to", out, host="b").ok()
    assert tree(out) == tree(model)
    (out / "config.json").write_text("{}")
    hosts("pull", served.content, "--to", out, host="b").exits(2)
    assert (out / "config.json").read_text() == "{}"
    assert served.metrics()["bytes_served_total"] == size_of(model)


@pytest.mark.parametrize("device", ["file", pytest.param("cpu", marks=capability("nixl"))])
def test_names_that_a_url_would_break(device: str, hosts: Hosts, tmp_path: Path) -> None:
    directory = make_checkpoint(tmp_path / "model")
    (directory / "a b").mkdir()
    for name in ("a b/ünï.json", "100%.json", "q?x#y.json", "a+b&c=d.json"):
        (directory / name).write_text("{}")
    (directory / "merges.txt").write_bytes(b"")
    served = hosts.serve(directory, "--device", device)
    hosts("pull", served.content, "--route", "peer", "--to", tmp_path / "out", host="b").ok()
    assert tree(tmp_path / "out") == tree(directory)


@pytest.mark.parametrize("device", ["file", pytest.param("cpu", marks=capability("nixl"))])
def test_then_a_command(device: str, hosts: Hosts, model: Path) -> None:
    served = hosts.serve(model, "--device", device)
    result = hosts("pull", served.content, "--to", hosts.place / "out", "--", "ls", "{}", host="b").ok()
    assert result.out.split() == sorted(path.name for path in model.iterdir())
    assert served.metrics()["readers"] == 0


# --- prefetch from peers -------------------------------------------------------------------------------------------


FROM_PEERS = ("--from", "peer,origin")


def test_three_at_once_and_one_asks_the_peer(hosts: Hosts, hub: servers.Hub) -> None:
    """One election for all: the leader reads the peer, and the origin gives no byte."""
    files = checkpoint_files(size=32 * MIB)
    revision = hub.commit(files)
    hosts("prefetch", hub.uri, host="a", env=hub.env).ok()
    served = hosts.serve(hub.uri, host="a", env=hub.env)
    hub.reset()
    command = ("prefetch", hub.uri, "--revision", revision, "--json", *FROM_PEERS)
    with slow(served.address, 4 * MIB) as relay:
        env = {**hub.env, "MX_DISCOVERY": f"static:{relay.address}"}
        first = hosts.start(*command, host="b", env=env)
        relay.wait_full()
        others = [hosts.start(*command, host="b", env=env) for _ in range(2)]
        for one in others:
            one.wait_err("follow|leader", 30)
        relay.go()
        results = [one.wait().ok().json() for one in (first, *others)]
    assert sorted(one["role"] for one in results) == ["follower", "follower", "leader"]
    assert bodies(hub) == 0
    assert served.metrics()["grants_total"] == 1
    assert served.metrics()["bytes_served_total"] <= sum(map(len, files.values()))
    assert {name: (Path(results[0]["dir"]) / name).read_bytes() for name in files} == files


def test_a_moving_name_is_the_origins_to_resolve(hosts: Hosts, hub: servers.Hub) -> None:
    files = checkpoint_files()
    hub.commit(files)
    hosts("prefetch", hub.uri, host="a", env=hub.env).ok()
    hosts.serve(hub.uri, host="a", env=hub.env)
    hub.reset()
    result = hosts("prefetch", hub.uri, "--json", *FROM_PEERS, host="b", env=hub.env).ok().json()
    assert {name: (Path(result["dir"]) / name).read_bytes() for name in files} == files
    assert hub.log() != []
    # The config and the index choose what is wanted; they are the origin's to tell.
    assert bodies(hub) < 10_000
    # The branch moves, and nobody has the new commit: the origin gives it.
    newer = checkpoint_files(seed="newer")
    hub.commit(newer)
    result = hosts("prefetch", hub.uri, "--json", *FROM_PEERS, host="b", env=hub.env).ok().json()
    assert {name: (Path(result["dir"]) / name).read_bytes() for name in newer} == newer


def test_only_peers(hosts: Hosts, hub: servers.Hub) -> None:
    revision = hub.commit(checkpoint_files())
    command = ("prefetch", hub.uri, "--revision", revision, "--from", "peer")
    hosts(*command, host="b", env=hub.env).exits(18)
    assert hub.log() == []


# --- "Done when" 6: identities agree, and the origin may be away ---------------------------------------------------


@pytest.fixture
def off() -> Iterator[contextlib.ExitStack]:
    """Ends what was entered, before the test's end."""
    with contextlib.ExitStack() as stack:
        yield stack


Off = tuple[str, dict[str, str], Callable[[], object]]


def _file(tmp_path: Path, files: dict[str, bytes]) -> Off:
    directory = tmp_path / "origin"
    for name, data in files.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_bytes(data)
    return directory.as_uri(), {}, lambda: os.rename(directory, tmp_path / "away")


@pytest.mark.parametrize("scheme", ["file", "hf", pytest.param("s3", marks=capability("moto"))])
def test_identities_agree_and_the_origin_may_be_away(
    scheme: str,
    hosts: Hosts,
    tmp_path: Path,
    hub: servers.Hub,
    off: contextlib.ExitStack,
) -> None:
    files = checkpoint_files()
    if scheme == "file":
        uri, env, switch_off = _file(tmp_path, files)
    elif scheme == "hf":
        hub.commit(files)
        uri, env, switch_off = hub.uri, hub.env, hub.server.process.kill
    else:
        bucket = off.enter_context(servers.s3stub(tmp_path)).new_bucket()
        for name, data in files.items():
            bucket.put(f"model/{name}", data)
        uri, env, switch_off = bucket.uri("model"), bucket.env, off.close
    fetched = hosts("prefetch", uri, "--json", host="a", env=env).ok().json()
    by_uri = hosts("hash", uri, host="c", env=env).ok().out.strip()
    by_directory = ids(hosts("hash", fetched["dir"], "--json", host="a", env=env))
    switch_off()
    served = hosts.serve(fetched["dir"], host="a", env=env)
    published = dict(served.ready["identity"])
    assert by_directory == published
    assert (by_uri, set(published)) == (published["origin"], {"content", "origin", "config"})
    (record,) = hosts.records()
    assert set(published.values()) == set(record["identities"])
    pinned = ("pull", uri, "--revision", fetched["revision"], "--json")
    pulled = hosts(*pinned, host="b", env=env).ok().json()
    assert (pulled["route"], pulled["identity"]) == ("peer", published["origin"])
    assert tree(Path(pulled["dir"])) == tree(Path(fetched["dir"]))
    assert ids(hosts("hash", pulled["dir"], "--json", host="b", env=env)) == published
    assert routes(hosts(*pinned, "--route", "cache", host="b", env=env)) == [("cache", True)]


def ids(result: Result) -> dict[str, str]:
    return {row["kind"]: row["id"] for row in result.ok().json()["identities"]}


@pytest.mark.parametrize(
    ("device", "path"),
    [("file", "socket"), pytest.param("cpu", "nixl-read", marks=capability("nixl"))],
)
def test_a_complete_snapshot_wins_before_any_peer(device: str, path: str, hosts: Hosts, hub: servers.Hub) -> None:
    revision = hub.commit(checkpoint_files())
    fetched = hosts("prefetch", hub.uri, "--json", host="a", env=hub.env).ok().json()
    served = hosts.serve(hub.uri, "--device", device, host="a", env=hub.env)
    command = ("prefetch", hub.uri, "--revision", revision, "--from", "peer", "--json")
    result = hosts(*command, host="b", env=hub.env).ok()
    assert f"from peer {served.address} by {path}" in result.err
    assert result.json()["role"] == "leader"
    assert tree(Path(result.json()["dir"])) == tree(Path(fetched["dir"]))
    assert served.metrics()["grants_total"] == 1
    assert hosts(*command, host="b", env=hub.env).ok().json()["role"] == "hit"
    assert served.metrics()["grants_total"] == 1


def test_a_peer_that_has_a_part(hosts: Hosts, hub: servers.Hub) -> None:
    """What it lacks, and only that, comes from the origin."""
    files = {**checkpoint_files(), "original/consolidated.safetensors": b"\x02\0\0\0\0\0\0\0{}"}
    revision = hub.commit(files)
    hosts("prefetch", hub.uri, host="a", env=hub.env).ok()
    served = hosts.serve(hub.uri, host="a", env=hub.env)
    hub.reset()
    command = ("prefetch", hub.uri, "--revision", revision, "--all", "--json", *FROM_PEERS)
    result = hosts(*command, host="b", env=hub.env).ok().json()
    assert {name: (Path(result["dir"]) / name).read_bytes() for name in files} == files
    assert 0 < bodies(hub) < 10_000
    assert served.metrics()["bytes_served_total"] > 2 * MIB


def test_the_port_of_then_serve_is_taken_before_anything_is_pulled(hosts: Hosts, model: Path) -> None:
    served = hosts.serve(model)
    taken = hosts("pull", served.content, "--then-serve", "--listen", served.address, host="b").exits(2)
    assert served.address.rpartition(":")[2] in taken.err
    assert served.metrics()["grants_total"] == 0
