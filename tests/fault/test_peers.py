"""Peers that are killed, frozen or damaged while they are read, and readers that die: nothing wrong is ever published."""

from __future__ import annotations

import re
import signal
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.rig import servers
from tests.rig.serving import Hosts, Served, eventually, slow
from tests.support import MIB, Running, capability, checkpoint_files, make_checkpoint, tree

Faults = Callable[..., dict[str, str]]

PIECE = 8 * MIB
FILES = 7
NIXL = pytest.param(("--device", "cpu"), ("--path", "nixl-read"), {}, id="nixl-read", marks=capability("nixl"))
NIXL_TCP = pytest.param(
    ("--device", "cpu"), ("--path", "nixl-read"), {"UCX_TLS": "tcp"}, id="nixl-read-tcp", marks=capability("nixl")
)
SOCKET = pytest.param((), ("--path", "socket"), {}, id="socket")


def checkpoint(factory: pytest.TempPathFactory, size: int) -> Path:
    return make_checkpoint(factory.mktemp("peers") / "model", size=size)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint(tmp_path_factory, 64 * MIB)


@pytest.fixture(scope="module")
def larger(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint(tmp_path_factory, 128 * MIB)


@pytest.fixture(scope="module")
def largest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint(tmp_path_factory, 512 * MIB)


def size_of(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.iterdir())


def half_way(model: Path, share: int = 2) -> int:
    """The point of fault.c at which a reader has written about half of the weights: files are opened and sized before.

    `share`: 4 for a quarter.
    """
    return 2 * FILES + size_of(model) // PIECE // share


def halted(
    hosts: Hosts, fault_env: Faults, model: Path, out: Path, *words: str | Path, env: dict[str, str], share: int = 2
) -> Running:
    """A `pull --to OUT` that has stopped itself half of the way."""
    faults = fault_env(out.with_name(f".{out.name}"), STOP_AT=half_way(model, share))
    running = hosts.start("pull", *words, "--to", out, "--json", host="reader", env={**env, **faults})
    running.wait_stopped()
    return running


def check_absent(out: Path) -> None:
    """Neither the directory nor what it was to become."""
    assert not out.exists()
    assert not list(out.parent.glob(f".{out.name}*"))


# --- L-01 source-dies ----------------------------------------------------------------------------------------------


def test_l01_the_second_source_gives_the_rest(hosts: Hosts, largest: Path, tmp_path: Path, fault_env: Faults) -> None:
    """512 MiB out of host memory; what was verified is not read again."""
    first, second = hosts.serve(largest, "--device", "cpu"), hosts.serve(largest, host="b")
    out = tmp_path / "out"
    words = (first.content, "--path", "socket", "--peer", first.address, "--peer", second.address)
    reader = halted(hosts, fault_env, largest, out, *words, env={})
    given = first.metrics()["bytes_served_total"]
    first.running.kill()
    reader.send(signal.SIGCONT)
    result = reader.wait().ok()
    assert f"source {first.address} is left" in result.err
    assert tree(out) == tree(largest)
    assert {one["address"] for one in result.json()["sources"]} == {first.address, second.address}
    assert given > 0
    assert given + second.metrics()["bytes_served_total"] <= 1.1 * size_of(largest)


@pytest.mark.parametrize(("serve", "pull", "env"), [SOCKET, NIXL, NIXL_TCP])
def test_l01_the_only_source(
    serve: tuple[str, ...],
    pull: tuple[str, ...],
    env: dict[str, str],
    hosts: Hosts,
    model: Path,
    tmp_path: Path,
    fault_env: Faults,
) -> None:
    out = tmp_path / "out"
    source = hosts.serve(model, *serve, env=env)
    words = (source.content, *pull, "--peer", source.address)
    reader = halted(hosts, fault_env, model, out, *words, "--route", "peer", env=env)
    other = halted(hosts, fault_env, model, tmp_path / "other", *words, "--origin", model.as_uri(), env=env)
    source.running.kill()
    reader.send(signal.SIGCONT)
    lost = reader.wait().exits(19)
    assert source.address in lost.json()["error"]["message"]
    check_absent(out)
    other.send(signal.SIGCONT)
    routes = other.wait().ok().json()["routes"]
    assert [(one["route"], one["taken"]) for one in routes] == [("peer", False), ("cache", False), ("origin", True)]
    assert tree(tmp_path / "other") == tree(model)


@pytest.mark.parametrize(("serve", "pull", "env"), [SOCKET, NIXL, NIXL_TCP])
def test_v08_a_source_that_ends_in_the_midst(
    serve: tuple[str, ...],
    pull: tuple[str, ...],
    env: dict[str, str],
    hosts: Hosts,
    model: Path,
    tmp_path: Path,
    fault_env: Faults,
) -> None:
    out = tmp_path / "out"
    source = hosts.serve(model, *serve, "--drain-timeout", "200ms", env=env)
    words = (source.content, *pull, "--route", "peer", "--peer", source.address)
    reader = halted(hosts, fault_env, model, out, *words, env=env)
    ended = source.stop()
    assert ended.code == 143
    assert f"ended while 1 reader still read: {socket.gethostname()} pid {reader.pid}" in ended.err
    reader.send(signal.SIGCONT)
    lost = reader.wait().exits(19)
    assert source.address in lost.json()["error"]["message"]
    check_absent(out)


def test_a_reader_that_slept_for_too_long(hosts: Hosts, model: Path, tmp_path: Path, fault_env: Faults) -> None:
    """Its slot is another's by then. It says so, and leaves nothing behind."""
    out = tmp_path / "out"
    source = hosts.serve(model, "--grant-ttl", "500ms")
    words = (source.content, "--route", "peer", "--peer", source.address)
    reader = halted(hosts, fault_env, model, out, *words, env={})
    eventually(lambda: source.metrics()["grants_expired_total"] == 1)
    reader.send(signal.SIGCONT)
    lost = reader.wait().exits(19)
    assert source.address in lost.json()["error"]["message"]
    check_absent(out)


# --- a source that is frozen gives no error, ever ------------------------------------------------------------------


@pytest.mark.parametrize(("serve", "pull", "env"), [SOCKET, NIXL_TCP])
def test_a_frozen_source_is_left(
    serve: tuple[str, ...],
    pull: tuple[str, ...],
    env: dict[str, str],
    hosts: Hosts,
    larger: Path,
    tmp_path: Path,
    fault_env: Faults,
) -> None:
    first, second = hosts.serve(larger, *serve, env=env), hosts.serve(larger, *serve, host="b", env=env)
    out = tmp_path / "out"
    words = (first.content, *pull, "--peer", first.address, "--peer", second.address)
    impatient = {**env, "MX_PEER_STALL_TIMEOUT": "1s"}
    reader = halted(hosts, fault_env, larger, out, *words, env=impatient, share=4)
    first.running.send(signal.SIGSTOP)
    first.running.wait_stopped()
    reader.send(signal.SIGCONT)
    result = reader.wait().ok()
    assert f"source {first.address} is left" in result.err
    assert tree(out) == tree(larger)
    bytes_of = {one["address"]: one["bytes"] for one in result.json()["sources"]}
    assert bytes_of[second.address] > bytes_of[first.address]


def test_frozen_before_it_is_asked(hosts: Hosts, model: Path, tmp_path: Path) -> None:
    first, second = hosts.serve(model), hosts.serve(model, host="b")
    first.running.send(signal.SIGSTOP)
    first.running.wait_stopped()
    result = hosts("pull", first.content, "--route", "peer", "--to", tmp_path / "out", "--json", host="c").ok()
    assert [one["address"] for one in result.json()["sources"]] == [second.address]
    first.running.send(signal.SIGCONT)
    assert first.get("/readyz")[0] == 200


@pytest.mark.parametrize("more", [(), ("--then-serve",)], ids=["pull", "then-serve"])
@pytest.mark.parametrize("frozen", [False, True], ids=["slow", "frozen"])
def test_a_stop_is_heard_while_a_source_is_silent(
    frozen: bool, more: tuple[str, ...], hosts: Hosts, model: Path, tmp_path: Path
) -> None:
    source = hosts.serve(model)
    out = tmp_path / "out"
    with slow(source.address, 8 * MIB) as relay:
        reader = hosts.start("pull", source.content, "--peer", relay.address, "--to", out, *more, host="b")
        relay.wait_full()
        if frozen:
            source.running.send(signal.SIGSTOP)
            source.running.wait_stopped()
        reader.send(signal.SIGTERM)
        ended = reader.wait(20)
    assert ended.code == 143
    assert "stopped by SIGTERM" in ended.err
    assert "is left" not in ended.err, "what a stop breaks off is no fault of the peer"
    assert "not taken" not in ended.err
    check_absent(out)
    if frozen:
        source.running.send(signal.SIGCONT)
    else:
        # Its farewell has a short time; on a busy machine the grant ends by itself.
        eventually(lambda: source.metrics()["readers"] == 0, 60)
    assert source.get("/readyz")[0] == 200


# --- wrong bytes ---------------------------------------------------------------------------------------------------


def damage_files(directory: Path) -> None:
    """One bit in each MiB of the weights."""
    for path in directory.glob("*.safetensors"):
        with path.open("r+b") as file:
            for at in range(MIB // 2, path.stat().st_size, MIB):
                file.seek(at)
                value = file.read(1)
                file.seek(at)
                file.write(bytes([value[0] ^ 1]))


def damage_memory(served: Served, directory: Path) -> None:
    """The same in the memory of a peer that holds the files there."""
    for path in directory.glob("*.safetensors"):
        data = path.read_bytes()
        start = place_of(served.running.pid, data[:4096])
        with open(f"/proc/{served.running.pid}/mem", "r+b", buffering=0) as memory:
            for at in range(MIB // 2, len(data), MIB):
                memory.seek(start + at)
                memory.write(bytes([data[at] ^ 1]))


def place_of(pid: int, wanted: bytes) -> int:
    """The address of some bytes at the beginning of a page, in the largest regions of a process first."""
    regions = []
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        bounds, mode = line.split()[:2]
        start, end = (int(part, 16) for part in bounds.split("-"))
        if mode.startswith("rw"):
            regions.append((start - end, start, end))
    with open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
        for _, start, end in sorted(regions):
            for at in range(start, end, MIB):
                memory.seek(at)
                chunk = memory.read(min(MIB, end - at))
                if (found := chunk.find(wanted)) >= 0 and found % 4096 == 0:
                    return at + found
    raise AssertionError("the weights are not in this process")


@pytest.mark.parametrize(("serve", "pull", "env"), [SOCKET, NIXL])
def test_damage_is_seen_and_named(
    serve: tuple[str, ...], pull: tuple[str, ...], env: dict[str, str], hosts: Hosts, model: Path, tmp_path: Path
) -> None:
    """Damaged after the manifest was made: alone it is an error, with a good source it costs a few pieces."""
    copy = make_checkpoint(tmp_path / "copy", size=64 * MIB)
    bad = hosts.serve(copy, *serve)
    damage_memory(bad, copy) if serve else damage_files(copy)
    alone = hosts("pull", bad.content, *pull, "--to", tmp_path / "alone", "--json", host="c").exits(16)
    seen = rf"wrong bytes from {bad.address} \(tensor model\.layers\.\d\.._proj\.weight, block \d+: expected "
    assert_matches(seen, alone.json()["error"]["message"])
    check_absent(tmp_path / "alone")
    good = hosts.serve(model, *serve, host="b")
    assert good.content == bad.content
    both = hosts("pull", bad.content, *pull, "--to", tmp_path / "both", "--json", host="c").ok()
    assert_matches(f"warning: {seen}", both.err)
    assert_matches(f"warning: source {bad.address} is left: {seen}", both.err)
    assert tree(tmp_path / "both") == tree(model)
    assert {one["address"]: one["bytes"] for one in both.json()["sources"]}[good.address] >= 64 * MIB


def assert_matches(pattern: str, text: str) -> None:
    assert re.search(pattern, text), f"no {pattern!r} in\n{text}"


# --- readers that die ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("serve", "pull", "env"), [SOCKET, NIXL])
def test_killed_readers_leave_the_source_serving(
    serve: tuple[str, ...],
    pull: tuple[str, ...],
    env: dict[str, str],
    hosts: Hosts,
    model: Path,
    tmp_path: Path,
    fault_env: Faults,
) -> None:
    source = hosts.serve(model, *serve, "--max-readers", "2", "--grant-ttl", "500ms")
    command = ("pull", source.content, *pull, "--route", "peer", "--to")
    # As the directory is made, at the first bytes, in their midst, near the end.
    for point in (1, 2 * FILES + 1, half_way(model), half_way(model) + 3):
        out = tmp_path / f"killed-{point}"
        faults = fault_env(out.with_name(f".{out.name}"), KILL_AT=point)
        killed = hosts(*command, out, host="reader", env=faults)
        assert killed.code == -signal.SIGKILL, killed.err
        assert not out.exists()
        assert source.get("/readyz")[0] == 200
    hosts(*command, tmp_path / "out", host="reader").ok()
    assert tree(tmp_path / "out") == tree(model)
    eventually(lambda: source.metrics()["readers"] == 0)
    assert source.metrics()["grants_expired_total"] >= 1
    assert source.stop().code == 143


# --- a prefetch from peers -----------------------------------------------------------------------------------------


@pytest.fixture
def origin(hub: servers.Hub, hosts: Hosts) -> tuple[servers.Hub, Served, str, dict[str, bytes]]:
    """A hub whose checkpoint host `a` serves; its log begins after that."""
    files = checkpoint_files(size=64 * MIB)
    revision = hub.commit(files)
    hosts("prefetch", hub.uri, host="a", env=hub.env).ok()
    served = hosts.serve(hub.uri, host="a", env=hub.env)
    hub.reset()
    return hub, served, revision, files


def test_a_leader_that_is_killed_is_followed_by_one_that_reads_the_peer(
    hosts: Hosts, origin: tuple[servers.Hub, Served, str, dict[str, bytes]]
) -> None:
    hub, served, revision, files = origin
    total = sum(map(len, files.values()))
    command = ("prefetch", hub.uri, "--revision", revision, "--from", "peer,origin", "--json")
    with slow(served.address, 24 * MIB) as relay:
        env = {**hub.env, "MX_DISCOVERY": f"static:{relay.address}"}
        leader = hosts.start(*command, host="b", env=env)
        relay.wait_full()
        follower = hosts.start(*command, "-v", host="b", env=env)
        follower.wait_err("term 1 is led by")
        leader.kill()
        relay.go()
        result = follower.wait().ok().json()
        passed = relay.passed
    assert result["role"] == "leader"
    assert hub.bytes_served("/resolve/") == 0
    # What the dead one had verified is not read again.
    assert result["bytes_fetched"] < total
    assert passed < 1.5 * total
    assert {name: (Path(result["dir"]) / name).read_bytes() for name in files} == files


def test_a_peer_that_dies_is_replaced_by_the_origin(
    hosts: Hosts, origin: tuple[servers.Hub, Served, str, dict[str, bytes]]
) -> None:
    hub, served, revision, files = origin
    command = ("prefetch", hub.uri, "--revision", revision, "--from", "peer,origin", "--json")
    with slow(served.address, 32 * MIB) as relay:
        env = {**hub.env, "MX_DISCOVERY": f"static:{relay.address}"}
        reader = hosts.start(*command, host="b", env=env)
        relay.wait_full()
        served.running.kill()
        relay.go()
        result = reader.wait().ok()
    assert f"source {relay.address} is left" in result.err
    directory = Path(result.json()["dir"])
    assert {name: (directory / name).read_bytes() for name in files} == files
    assert 0 < hub.bytes_served("/resolve/") < sum(map(len, files.values()))


def test_a_peer_that_dies_when_only_peers_are_asked(
    hosts: Hosts, origin: tuple[servers.Hub, Served, str, dict[str, bytes]]
) -> None:
    hub, served, revision, files = origin
    command = ("prefetch", hub.uri, "--revision", revision, "--from", "peer")
    with slow(served.address, 32 * MIB) as relay:
        env = {**hub.env, "MX_DISCOVERY": f"static:{relay.address}"}
        reader = hosts.start(*command, host="b", env=env)
        relay.wait_full()
        served.running.kill()
        relay.go()
        reader.wait().exits(19)
    assert hub.log() == []
    # What came is kept: the next one needs the rest only.
    again = hosts.serve(hub.uri, "--offline", host="a", env=hub.env)
    result = hosts(*command, "--json", host="b", env=hub.env).ok().json()
    assert 0 < again.metrics()["bytes_served_total"] < sum(map(len, files.values()))
    assert {name: (Path(result["dir"]) / name).read_bytes() for name in files} == files


def test_a_peer_with_damaged_files_costs_a_few_pieces(
    hosts: Hosts, origin: tuple[servers.Hub, Served, str, dict[str, bytes]]
) -> None:
    hub, served, revision, files = origin
    (snapshot,) = hosts.cache("a").glob("models/*/snapshots/*/config.json")
    damage_files(snapshot.parent)
    command = ("prefetch", hub.uri, "--revision", revision, "--from", "peer,origin", "--json")
    result = hosts(*command, host="b", env=hub.env).ok()
    assert f"warning: source {served.address} is left: wrong bytes" in result.err
    directory = Path(result.json()["dir"])
    assert {name: (directory / name).read_bytes() for name in files} == files
    hosts("prefetch", *command[1:4], "--from", "peer", host="c", env=hub.env).exits(16)
    assert not list(hosts.cache("c").glob("models/*/snapshots/*/*.safetensors"))
