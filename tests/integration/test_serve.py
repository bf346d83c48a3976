"""`mx serve`: where it listens, what it tells discovery, how it drains, and what its readers become."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from mx_cli.discovery.directory import FileDirectory
from mx_cli.model.record import Record
from tests.rig import limits, netns, servers
from tests.rig.netns import Namespace
from tests.rig.scripted import Asked, scripted
from tests.rig.serving import Hosts, Served, eventually, slow
from tests.support import MIB, capability, make_checkpoint, tree

SECRET = "a-secret-for-the-tests-of-serve-0123456789"
BEAT = {"MX_RECORD_BEAT": "200ms"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("serve") / "model", size=2 * MIB)


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """More than all buffers between two processes take."""
    return make_checkpoint(tmp_path_factory.mktemp("serve") / "large", size=64 * MIB)


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("serve") / "other", size=2 * MIB, seed="other")


@pytest.fixture
def token(tmp_path: Path) -> Path:
    path = tmp_path / "token"
    path.write_text(SECRET + "\n")
    path.chmod(0o600)
    return path


# --- V-01 port-taken -----------------------------------------------------------------------------------------------


def test_v01_a_taken_port_is_found_before_anything_is_loaded(hosts: Hosts, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as held:
        port = held.getsockname()[1]
        result = hosts("serve", tmp_path / "no-such-model", "--listen", f"127.0.0.1:{port}").exits(2)
    assert str(port) in result.err
    assert f"{os.getpid()} (" in result.err
    assert not hosts.records()


def test_v01_four_at_once_on_port_0(hosts: Hosts, model: Path) -> None:
    names = ("a", "b", "c", "d")
    started = [hosts.start("serve", model, host=name) for name in names]
    ready = [json.loads(one.wait_out(r"^\{.*\}$", 60).group()) for one in started]
    assert len({one["address"] for one in ready}) == len({one["generation"] for one in ready}) == len(names)
    shown = hosts("peers", "--probe", "--json").ok().json()["peers"]
    assert {row["address"] for row in shown if row["answers"]} == {one["address"] for one in ready}
    taken = hosts("serve", model, "--listen", ready[0]["address"]).exits(2)
    assert f"{ready[0]['pid']} (" in taken.err


# --- V-02 advertised-address ---------------------------------------------------------------------------------------


@pytest.fixture
def pair() -> Iterator[tuple[Namespace, Namespace]]:
    with netns.pair() as sides:
        yield sides


@capability("CAP_NET_ADMIN")
def test_v02_the_address_that_answers_from_outside(
    hosts: Hosts, model: Path, token: Path, pair: tuple[Namespace, Namespace], tmp_path: Path
) -> None:
    here, there = pair
    served = hosts.serve(model, "--listen", "0.0.0.0:0", "--peer-token-file", token, prefix=here.prefix)
    assert served.address.rpartition(":")[0] == here.address
    said = served.running.wait_err("^advertised").string
    assert f"{here.address} on {here.device}" in said
    assert "172.17.0.1 on docker0" in said
    (record,) = hosts.records()
    assert record["address"] == served.address
    out = tmp_path / "out"
    command = ("pull", served.content, "--to", out, "--peer-token-file", token, "--json")
    result = hosts(*command, host="b", prefix=there.apart).ok().json()
    assert tree(out) == tree(model)
    assert [(one["address"], one["path"]) for one in result["sources"]] == [(served.address, "socket")]


@capability("CAP_NET_ADMIN")
def test_v02_what_was_wished_is_advertised(
    hosts: Hosts, model: Path, token: Path, pair: tuple[Namespace, Namespace]
) -> None:
    here, there = pair
    wished = ("--listen", "0.0.0.0:0", "--advertise", "10.9.0.1", "--peer-token-file", token)
    served = hosts.serve(model, *wished, prefix=here.prefix)
    assert served.address.startswith("10.9.0.1:")
    # Both sides have that address: the handshake is what tells that nobody is there.
    lost = hosts("pull", served.content, "--route", "peer", "--peer-token-file", token, prefix=there.apart)
    assert served.address in lost.exits(18).err


@pytest.mark.parametrize("port", ["", ":0"])
def test_v02_an_address_without_a_port_has_the_listeners(port: str, hosts: Hosts, model: Path) -> None:
    held = hosts.serve(model, "--advertise", f"192.0.2.7{port}")
    listening = servers.listening_port(held.running.pid)
    assert held.address == f"192.0.2.7:{listening}"
    assert [row["address"] for row in hosts.records()] == [held.address]


@pytest.mark.parametrize("given", ["0.0.0.0", "0.0.0.0:7400", "[::]:7400"])
def test_v02_no_wildcard_is_advertised(given: str, hosts: Hosts, model: Path) -> None:
    assert (
        f"--advertise {given}: nobody can connect to that" in hosts("serve", model, "--advertise", given).exits(2).err
    )


@capability("mount")
def test_v02_a_name_of_this_host_alone_is_said(hosts: Hosts, model: Path, token: Path, tmp_path: Path) -> None:
    """As distributions write it into /etc/hosts."""
    names = tmp_path / "names"
    names.write_text("127.0.0.1 localhost\n127.0.1.1 node-a\n")
    prefix = ("unshare", "--mount", "sh", "-c", f'mount --bind {names} /etc/hosts && exec "$@"', "sh")
    served = hosts.serve(model, "--listen", "node-a:0", "--peer-token-file", token, prefix=prefix)
    assert served.address.startswith("127.0.1.1:")
    served.running.wait_err("warning: --listen node-a:0 is 127.0.1.1 here, which other hosts cannot reach")


@capability("netns")
def test_v02_a_link_local_address_is_refused(hosts: Hosts, model: Path, token: Path) -> None:
    inside = 'ip link set lo up && ip addr add fe80::7/64 dev lo nodad && exec "$@"'
    command = ("serve", model, "--listen", "[fe80::7%lo]:0", "--peer-token-file", token)
    refused = hosts(*command, prefix=("unshare", "--net", "sh", "-c", inside, "sh")).exits(2)
    assert "a link-local address means nothing on other hosts" in refused.err


@capability("nixl")
def test_a_log_that_ucx_cannot_write(hosts: Hosts, model: Path, tmp_path: Path) -> None:
    """UCX would abort the process."""
    env: dict[str, str | Path] = {"UCX_LOG_FILE": tmp_path / "nowhere" / "ucx.log"}
    served = hosts.serve(model, "--device", "cpu", env=env)
    assert served.ready["paths"] == ["socket"]
    hosts("pull", served.content, "--to", tmp_path / "target", host="b", env=env).ok()
    env = {"UCX_LOG_FILE": f"file:{tmp_path}/ucx-%p.log"}
    assert "nixl-read" in hosts.serve(model, "--device", "cpu", env=env).ready["paths"]


@capability("mount")
@pytest.mark.parametrize("device", ["file", "cpu"])
def test_where_no_proc_is_mounted(hosts: Hosts, model: Path, tmp_path: Path, device: str) -> None:
    """Neither side needs it; without it nobody can tell which processes share memory."""
    hidden = ("unshare", "--mount", "sh", "-c", 'mount -t tmpfs none /proc && exec "$@"', "sh")
    served = hosts.serve(model, "--device", device, prefix=hidden)
    for prefix in ((), hidden):
        target = tmp_path / f"target-{len(prefix)}"
        result = hosts("pull", served.content, "--to", target, "--json", host="b", prefix=prefix).ok()
        assert tree(target) == tree(model)
        [source] = result.json()["sources"]
        assert source["path"] == "socket"
        assert "\n" not in source["reason"]
    served.stop().exits(143)


@capability("memory-cgroup")
def test_weights_that_do_not_fit_into_memory(hosts: Hosts, tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path / "model", size=256 * MIB)
    with limits.memory(200 * MIB) as prefix:
        refused = hosts("serve", model, "--device", "cpu", prefix=prefix).exits(15)
    assert re.search(r"no memory for weights \(need 25\d MiB, at most \d+ MiB can be had\)", refused.err)


@capability("nixl")
def test_where_ucx_cannot_start_readers_get_the_bytes_by_sockets(hosts: Hosts, model: Path, tmp_path: Path) -> None:
    served = hosts.serve(model, "--device", "cpu", env={"UCX_NET_DEVICES": "nope0"})
    assert served.ready["paths"] == ["socket"]
    served.running.wait_err("^warning: readers get the bytes by path socket only: UCX cannot be started .*nope0")
    found = hosts("pull", served.content, "--to", tmp_path / "out", "--json", host="b").ok().json()
    assert [one["path"] for one in found["sources"]] == ["socket"]
    assert tree(tmp_path / "out") == tree(model)


def test_v02_others_only_with_a_secret(hosts: Hosts, model: Path, token: Path) -> None:
    bare = hosts("serve", model, "--listen", "0.0.0.0:0").exits(2)
    assert "head -c 32 /dev/urandom | base64 > FILE; --peer-token-file FILE" in bare.err
    both = hosts("serve", model, "--listen", "0.0.0.0:0", "--peer-token-file", token, "--insecure").exits(2)
    assert "--peer-token-file and --insecure contradict each other" in both.err
    both = hosts("serve", model, "--peer-token-file", token, "--insecure").exits(2)
    assert "contradict" in both.err
    assert not hosts.records()


# --- V-03 stale-generation -----------------------------------------------------------------------------------------


def test_v03_a_killed_life_is_not_listed(hosts: Hosts, model: Path, tmp_path: Path) -> None:
    """On its own host its process is known to be gone, whatever the age of its record."""
    first = hosts.serve(model)
    assert [row["stale"] for row in hosts("peers", "--json").ok().json()["peers"]] == [False]
    first.running.kill()
    assert [row["stale"] for row in hosts("peers", "--json", host="b").ok().json()["peers"]] == [True]
    refused = hosts("pull", first.content, "--to", tmp_path / "out", host="c").exits(18)
    assert "no living peer" in refused.err
    assert first.address not in refused.err


@capability("pidns")
def test_v03_another_life_at_the_same_address(hosts: Hosts, model: Path, other: Path, tmp_path: Path) -> None:
    first = hosts.serve(model, prefix=("unshare", "--pid", "--fork", "--kill-child", "--mount-proc"))
    first.running.kill()
    second = hosts.serve(other, "--listen", first.address, host="b")
    assert {row["generation"] for row in hosts.records()} == {first.generation, second.generation}
    refused = hosts("pull", first.content, "--to", tmp_path / "out", host="c").exits(17)
    assert f"another life than its record's ({second.generation})" in refused.err
    assert second.content in refused.err
    assert not (tmp_path / "out").exists()
    shown = hosts("peers", "--probe", "--json").ok().json()["peers"]
    assert {row["generation"]: row["answers"] for row in shown} == {first.generation: False, second.generation: True}
    hosts("pull", second.content, "--to", tmp_path / "out", host="c").ok()
    assert tree(tmp_path / "out") == tree(other)


def test_v03_the_same_weights_in_another_life_are_as_good(hosts: Hosts, model: Path, tmp_path: Path) -> None:
    first = hosts.serve(model)
    first.running.kill()
    second = hosts.serve(model, "--listen", first.address, host="b")
    assert second.content == first.content
    hosts("pull", first.content, "--to", tmp_path / "out", host="c").ok()
    assert tree(tmp_path / "out") == tree(model)


# --- V-05 directory-restart ----------------------------------------------------------------------------------------


def test_v05_an_emptied_directory_is_filled_at_the_next_beat(hosts: Hosts, model: Path, tmp_path: Path) -> None:
    served = hosts.serve(model, env=BEAT)
    shutil.rmtree(hosts.directory)
    eventually(lambda: [row["generation"] for row in hosts.records()] == [served.generation])
    hosts("pull", served.content, "--to", tmp_path / "out", host="b").ok()


def test_v05_a_name_outlives_a_life_and_is_not_taken_from_the_living(hosts: Hosts, model: Path, other: Path) -> None:
    first = hosts.serve(model, "--name", "node-a", env=BEAT)
    taken = hosts("serve", other, "--name", "node-a", host="b", env=BEAT)
    assert first.generation in taken.exits(2).err
    first.running.kill()
    again = hosts.serve(model, "--name", "node-a", env=BEAT)
    assert [row["generation"] for row in hosts.records()] == [again.generation]


def test_v05_files_that_are_removed_are_served_all_the_same(hosts: Hosts, tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path / "model")
    right = tree(model)
    served = hosts.serve(model)
    shutil.rmtree(model)
    hosts("pull", served.content, "--to", tmp_path / "out", host="b").ok()
    assert tree(tmp_path / "out") == right


def test_a_file_that_was_shortened_is_named_at_both_ends(hosts: Hosts, tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path / "model")
    served = hosts.serve(model)
    name = next(path.name for path in model.glob("*.safetensors"))
    os.truncate(model / name, 100)
    said = rf"{name} has changed since it is offered \(100 bytes, it had \d+\)"
    result = hosts("pull", served.content, "--to", tmp_path / "out", host="b").exits(10)
    assert re.search(rf"error: .*{served.address}: {said}", result.err)
    assert not (tmp_path / "out").exists()
    served.running.wait_err(f"warning: readers cannot have what is offered here: {said}")
    assert served.get("/livez")[0] == 200


# --- V-08 drain ----------------------------------------------------------------------------------------------------


def test_no_ready_file_of_an_earlier_life(hosts: Hosts, tmp_path: Path) -> None:
    file = tmp_path / "ready.json"
    file.write_text("{}")
    seen: list[bool] = []

    def answer(asked: Asked) -> None:
        seen.append(file.exists())
        asked.say(404)

    with scripted(answer) as origin:
        assert hosts("serve", f"{origin.url}/model.safetensors", "--ready-file", file).code == 10
    assert seen
    assert not any(seen)


def test_a_ready_file_that_is_a_pipe_stays(hosts: Hosts, tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    assert hosts("serve", tmp_path / "absent", "--ready-file", pipe).code == 10
    assert pipe.is_fifo()


def test_what_others_wrote_gives_a_terminal_no_orders(hosts: Hosts, model: Path, tmp_path: Path) -> None:
    evil = "mx1c-\x1b]0;owned\x07"
    record = Record("evil", "g", "127.0.0.1:9", identities=(evil,))
    FileDirectory(tmp_path / "peers", 15.0).publish(record)
    refused = hosts(
        "pull", model, "--route", "peer", "--to", tmp_path / "to", "--discovery", f"dir:{tmp_path / 'peers'}"
    )
    assert refused.code == 17
    assert "owned" in refused.err
    assert "\x1b" not in refused.err


def test_v08_stopped_when_idle(hosts: Hosts, model: Path, tmp_path: Path) -> None:
    file = tmp_path / "ready.json"
    served = hosts.serve(model, "--ready-file", file)
    assert json.loads(file.read_text()) == served.ready
    assert served.get("/livez") == served.get("/readyz") == (200, "ok\n")
    assert served.stop().code == 143
    assert not hosts.records()
    assert not file.exists()
    assert hosts("peers", "--json").ok().json()["peers"] == []


def test_x02_one_document_for_a_life(hosts: Hosts, model: Path, tmp_path: Path) -> None:
    """What a script waits for is on stdout when it is ready; that it was stopped is an exit code."""
    served = hosts.serve(model, "--json")
    pulled = hosts.then_served(
        hosts.start("pull", served.content, "--to", tmp_path / "out", "--then-serve", "--json", host="b")
    )
    for result in (served.stop(), pulled.stop()):
        assert result.code == 143
        assert "error" not in json.loads(result.out)
        assert result.err.endswith("mx: error: stopped by SIGTERM\n")


def test_v08_readers_finish_first(hosts: Hosts, large: Path, tmp_path: Path) -> None:
    served = hosts.serve(large, "--drain-timeout", "60s")
    with slow(served.address, 8 * MIB) as relay:
        reader = hosts.start("pull", served.content, "--peer", relay.address, "--to", tmp_path / "out", host="b")
        relay.wait_full()
        served.running.send(signal.SIGTERM)
        eventually(lambda: [row["state"] for row in hosts.records()] == ["draining"])
        assert served.get("/readyz") == (503, "draining\n")
        assert served.get("/livez") == (200, "ok\n")
        late = hosts("pull", served.content, "--route", "peer", "--to", tmp_path / "late", host="c").exits(18)
        assert "draining" in late.err
        relay.go()
        reader.wait().ok()
    assert tree(tmp_path / "out") == tree(large)
    ended = served.running.wait()
    assert ended.code == 143
    assert "still read" not in ended.err
    assert not hosts.records()


def test_v08_a_reader_that_takes_too_long_is_told(hosts: Hosts, large: Path, tmp_path: Path) -> None:
    served = hosts.serve(large, "--drain-timeout", "300ms")
    with slow(served.address, 8 * MIB) as relay:
        reader = hosts.start("pull", served.content, "--peer", relay.address, "--to", tmp_path / "out", host="b")
        relay.wait_full()
        ended = served.stop()
        relay.go()
        left = reader.wait().exits(19)
    assert ended.code == 143
    assert f"ended while 1 reader still read: {socket.gethostname()} pid {reader.pid}" in ended.err
    assert relay.address in left.err
    assert not (tmp_path / "out").exists()
    assert not list(tmp_path.glob(".out*"))


# --- V-09 target-becomes-source ------------------------------------------------------------------------------------


@pytest.mark.parametrize("to", [False, True], ids=["cache", "to"])
def test_v09_who_was_filled_is_a_peer(to: bool, hosts: Hosts, model: Path, tmp_path: Path) -> None:
    first = hosts.serve(model)
    place = ("--to", tmp_path / "second") if to else ()
    second = hosts.then_served(hosts.start("pull", first.content, "--then-serve", "--json", *place, host="b"))
    assert second.address != first.address
    first.stop()
    third = hosts("pull", first.content, "--route", "peer", "--to", tmp_path / "third", "--json", host="c").ok()
    assert [one["address"] for one in third.json()["sources"]] == [second.address]
    assert tree(tmp_path / "third") == tree(model)
    (record,) = hosts.records()
    assert first.content in record["identities"]
    assert record["generation"] != first.generation
    assert second.stop().code == 143
    assert not hosts.records()


def test_v09_who_was_filled_by_the_origin_is_found_by_the_origin(
    hosts: Hosts, model: Path, hub: servers.Hub, tmp_path: Path
) -> None:
    uri = f"{hub.uri}@{hub.commit(model)}"
    first = hosts.then_served(
        hosts.start("pull", uri, "--then-serve", "--to", tmp_path / "first", "--json", env=hub.env, host="b")
    )
    pulled = hosts("pull", uri, "--route", "peer", "--to", tmp_path / "second", "--json", host="c").ok().json()
    assert [one["address"] for one in pulled["sources"]] == [first.address]
    assert tree(tmp_path / "first") == tree(tmp_path / "second") == tree(model)


def test_v09_the_source_names_it_as_a_better_one(hosts: Hosts, model: Path, tmp_path: Path) -> None:
    """A reader that only knows the busy source finds the one that was filled."""
    first = hosts.serve(model, "--max-readers", "1")
    second = hosts.then_served(hosts.start("pull", first.content, "--then-serve", "--json", host="b"))
    eventually(lambda: first.metrics()["readers"] == 0)
    shutil.rmtree(hosts.directory)
    with slow(first.address, 0) as relay:
        busy = hosts.start("pull", first.content, "--peer", relay.address, "--to", tmp_path / "busy", host="c")
        eventually(lambda: first.metrics()["readers"] == 1)
        found = hosts("pull", first.content, "--peer", first.address, "--to", tmp_path / "found", "--json", host="d")
        assert [one["address"] for one in found.ok().json()["sources"]] == [second.address]
        relay.go()
        busy.wait().ok()


# --- secrets -------------------------------------------------------------------------------------------------------


def test_secrets_appear_nowhere(hosts: Hosts, model: Path, token: Path, tmp_path: Path) -> None:
    wrong = tmp_path / "wrong"
    wrong.write_text("another-secret-that-nobody-knows-9876543210\n")
    wrong.chmod(0o600)
    served = hosts.serve(model, "--device", "cpu", "-vv", "--peer-token-file", token)
    texts = []
    for file, code in ((token, 0), (wrong, 11)):
        out = tmp_path / f"out-{code}"
        pull = ("pull", served.content, "--route", "peer", "--peer-token-file", file, "--to", out, "--json", "-vv")
        result = hosts(*pull, host="b").exits(code)
        texts += [result.out, result.err]
    texts += [Path(f"/proc/{served.running.pid}/cmdline").read_text()]
    texts += [path.read_text() for path in hosts.directory.iterdir()]
    texts += [served.get(path)[1] for path in ("/metrics", "/livez", "/readyz", "/v1/source", "/v1/manifest")]
    ended = served.stop()
    texts += [ended.out, ended.err]
    for text in texts:
        for secret in (SECRET, wrong.read_text().strip(), "nixlSerDes", "bml4bFNlckRlc"):
            assert secret not in text
    for path in tmp_path.rglob("*"):
        if path.is_file() and path not in (token, wrong):
            assert SECRET.encode() not in path.read_bytes(), path


def test_a_wrong_secret_is_said_and_other_routes_are_tried(
    hosts: Hosts, model: Path, token: Path, tmp_path: Path
) -> None:
    served = hosts.serve(model, "--peer-token-file", token)
    denied = hosts("pull", served.content, "--route", "peer", host="b").exits(11)
    assert served.address in denied.err
    fallen = hosts(
        "pull", served.content, "--origin", model.as_uri(), "--to", tmp_path / "out", "--json", host="b"
    ).ok()
    assert [(one["route"], one["taken"]) for one in fallen.json()["routes"]] == [
        ("peer", False),
        ("cache", False),
        ("origin", True),
    ]
    assert tree(tmp_path / "out") == tree(model)


def test_a_token_file_that_is_rotated(hosts: Hosts, model: Path, token: Path, tmp_path: Path) -> None:
    served = hosts.serve(model, "--peer-token-file", token)
    fresh = tmp_path / "fresh"
    fresh.write_text("the-next-secret-of-these-hosts-0123456789\n")
    fresh.chmod(0o600)
    command = ("pull", served.content, "--route", "peer", "--to")
    hosts(*command, tmp_path / "1", "--peer-token-file", fresh, host="b").exits(11)
    token.write_text(fresh.read_text() + SECRET + "\n")
    hosts(*command, tmp_path / "1", "--peer-token-file", fresh, host="b").ok()
    token.write_text("")
    lost = hosts(*command, tmp_path / "2", "--peer-token-file", fresh, host="b").exits(18)
    assert "this peer cannot read its secrets now" in lost.err
    served.running.wait_err(f"warning: nobody is let in: no peer secret in {token}")


# --- grants --------------------------------------------------------------------------------------------------------


def test_one_slot_and_a_queue(hosts: Hosts, large: Path, tmp_path: Path) -> None:
    served = hosts.serve(large, "--max-readers", "1")
    pull = ("pull", served.content, "--route", "peer", "--to")
    with slow(served.address, 8 * MIB) as relay:
        first = hosts.start(*pull, tmp_path / "1", "--peer", relay.address, host="b")
        relay.wait_full()
        none = hosts(*pull, tmp_path / "2", "--wait", "100ms", host="c").exits(18)
        assert "no slot" in none.err
        second = hosts.start(*pull, tmp_path / "2", "--wait", "60s", host="c")
        second.wait_err("^no slot is free at 1 peer; waiting for one")
        third = hosts.start(*pull, tmp_path / "3", host="d")
        third.wait_err("^no slot is free")
        assert served.metrics()["queue"] == 2
        third.send(signal.SIGTERM)
        assert third.wait().code == 143
        assert served.metrics()["queue"] == 1
        relay.go()
        first.wait().ok()
        second.wait().ok()
    assert tree(tmp_path / "1") == tree(tmp_path / "2") == tree(large)
    eventually(lambda: served.metrics()["readers"] == 0)
    assert served.metrics()["grants_total"] == 2


def test_a_reader_that_is_gone_loses_its_slot(hosts: Hosts, large: Path, tmp_path: Path) -> None:
    served = hosts.serve(large, "--max-readers", "1", "--grant-ttl", "500ms")
    with slow(served.address, 8 * MIB) as relay:
        first = hosts.start("pull", served.content, "--to", tmp_path / "1", "--peer", relay.address, host="b")
        relay.wait_full()
        first.kill()
        hosts("pull", served.content, "--route", "peer", "--wait", "30s", "--to", tmp_path / "2", host="c").ok()
    assert served.metrics()["grants_expired_total"] == 1


def test_facts_for_whoever_watches(hosts: Hosts, model: Path) -> None:
    served: Served = hosts.serve(model, "--max-readers", "3")
    metrics = served.metrics()
    assert (metrics["slots"], metrics["readers"], metrics["queue"], metrics["bytes_served_total"]) == (3, 0, 0, 0)
    hosts("pull", served.content, "--to", hosts.place / "out", host="b").ok()
    size = sum(path.stat().st_size for path in model.iterdir())
    assert served.metrics()["bytes_served_total"] == size == served.ready["bytes"]
    assert served.get("/v1/source")[0] == 401
