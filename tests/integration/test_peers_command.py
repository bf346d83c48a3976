"""`mx peers`: who serves what, which of them serve these weights, and why the others do not count."""

from __future__ import annotations

import json
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from mx_cli.base.cancel import Stop
from mx_cli.discovery.directory import FileDirectory, file_name
from mx_cli.model.record import DRAINING, Record
from tests.rig import dnsd
from tests.rig.servers import Hub
from tests.support import ROOT, Mx, capability, checkpoint_files, make_checkpoint

CONTENT = "mx1c-" + "c" * 32
OTHER = "mx1c-" + "d" * 32
ORIGIN = "mx1o-" + "e" * 32
CONFIG = "mx1x-" + "f" * 32


def publish(mx: Mx, *records: Record) -> FileDirectory:
    directory = FileDirectory(mx.cache / "peers", 15.0)
    for record in records:
        directory.publish(record)
    return directory


def peer(name: str, *identities: str, **fields: Any) -> Record:
    record = Record(name, f"mx-host-{name}", f"10.0.0.1:{7000 + len(name)}", identities, device="cpu", size=3 << 30)
    return replace(record, slots=4, host="host", pid=os.getpid(), **fields)


def age(directory: FileDirectory, record: Record, seconds: float) -> None:
    at = time.time() - seconds
    os.utime(directory.path / file_name(record.name), (at, at))


def test_nobody(mx: Mx) -> None:
    result = mx("peers").ok()
    assert result.out.split() == ["PEER", "ADDRESS", "AGE", "DEVICE", "SIZE", "READERS", "STATE", "IDENTITIES"]
    assert f"no peer has a record in {mx.cache}/peers, which does not exist" in result.err
    document = mx("peers", "--json").ok().json()
    assert document["peers"] == []
    assert document["discovery"] == f"dir:{mx.cache}/peers"
    assert not mx.cache.exists()


def test_all_of_them(mx: Mx, tmp_path: Path) -> None:
    web = peer("web", CONTENT, ORIGIN, readers=1)
    late = peer("late", OTHER)
    bare = replace(peer("x", state=DRAINING), name="mx-host-x")
    directory = publish(mx, web, late, bare)
    age(directory, late, 100)
    result = mx("peers").ok()
    lines = [line.split() for line in result.out.splitlines()[1:]]
    assert [line[0] for line in lines] == ["mx-host-x", "web", "late"]
    assert lines[1][:3] == ["web", "(mx-host-web)", "10.0.0.1:7003"]
    assert lines[1][-6:] == ["3.0", "GiB", "1/4", "serving", "mx1c-cccccccc", "mx1o-eeeeeeee"]
    assert "draining" in lines[0]
    assert "stale (serving)" in result.out.splitlines()[3]
    document = mx("peers", "--json").ok().json()
    rows = {row["name"]: row for row in document["peers"]}
    assert rows["web"]["identities"] == [CONTENT, ORIGIN]
    assert rows["web"]["size"] == 3 << 30
    assert {name: row["stale"] for name, row in rows.items()} == {"mx-host-x": False, "web": False, "late": True}
    assert 0 <= rows["web"]["age"] < 60 <= rows["late"]["age"]
    age(directory, late, 160)
    assert "late" not in mx("peers").ok().out
    assert not (directory.path / file_name("late")).exists()
    moved = tmp_path / "elsewhere"
    os.rename(directory.path, moved)
    assert "web" in mx("peers", "--discovery", f"dir:{moved}").ok().out
    assert "web" in mx("peers", env={"MX_DISCOVERY": f"dir:{moved}"}).ok().out


def test_l08_only_the_stale(mx: Mx) -> None:
    directory = publish(mx, peer("web", CONTENT))
    age(directory, peer("web"), 50)
    result = mx("peers").ok()
    assert "no living peer" in result.err
    assert "the last sign of life 5" in result.err


def test_l08_by_identity(mx: Mx) -> None:
    publish(mx, peer("web", CONTENT, ORIGIN), peer("other", OTHER, ORIGIN), peer("config", CONFIG), peer("none"))
    document = mx("peers", CONTENT, "--json").ok().json()
    assert document["wanted"] == [CONTENT]
    assert [(row["name"], row["matches"], row["differs"]) for row in document["peers"]] == [
        ("web", "content", ""),
        ("config", None, "not comparable (it tells config, wanted content)"),
        ("none", None, "its identities are not known before it is asked"),
        ("other", None, "content differs (mx1c-dddddddd, wanted mx1c-cccccccc)"),
    ]
    lines = mx("peers", CONTENT).ok().out.splitlines()
    assert lines[1].startswith("web (mx-host-web)")
    assert lines[4].startswith("other: other (mx-host-other) at 10.0.0.1:7005: content differs (mx1c-dddddddd")
    assert len(lines) == 5
    assert "identifies no weights" in mx("peers", CONFIG).exits(2).err


def test_by_directory_and_by_uri(mx: Mx, hub: Hub, tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path / "model", shards=1, size=50_000)
    content = mx("hash", model).ok().out.strip()
    files = checkpoint_files(shards=1, size=50_000, seed="hub")
    first = hub.commit(files)
    origin = mx("hash", hub.uri, env=hub.env).ok().out.strip()
    publish(
        mx,
        peer("local", content),
        peer("hub", origin, uri=hub.uri, revision=first),
        peer("old", ORIGIN, uri=hub.uri, revision="0" * 40),
    )
    rows = mx("peers", model, "--json").ok().json()["peers"]
    assert [(row["name"], row["matches"]) for row in rows] == [("local", "content"), ("hub", None), ("old", None)]
    rows = mx("peers", hub.uri, "--json", env=hub.env).ok().json()["peers"]
    assert [(row["name"], row["matches"]) for row in rows] == [("hub", "origin"), ("local", None), ("old", None)]
    assert rows[1]["differs"] == "not comparable (it tells content, wanted origin)"
    assert rows[2]["differs"] == f"revision differs (000000000000, wanted {first[:12]})"


def test_a_terminal_takes_no_orders_from_a_record(mx: Mx) -> None:
    publish(mx, replace(peer("web", CONTENT), device="\x1b[2Jcpu\n", host="\r"))
    (mx.cache / "peers" / "\x1b[2J.json").write_text("{}")
    result = mx("peers").ok()
    assert "\x1b" not in result.out + result.err
    assert len(result.out.splitlines()) == 2
    assert "ignored in" in result.err
    assert json.loads(mx("peers", "--json").ok().out)["peers"][0]["device"] == "\x1b[2Jcpu\n"


def test_static_addresses_and_what_is_no_directory(mx: Mx) -> None:
    result = mx("peers", "--discovery", "static:a.test:7000,[::1]:7001").ok()
    assert [line.split() for line in result.out.splitlines()[1:]] == [
        ["[::1]:7001", "[::1]:7001", "-", "-", "-", "-", "unknown", "-"],
        ["a.test:7000", "a.test:7000", "-", "-", "-", "-", "unknown", "-"],
    ]
    refused = mx("peers", "--discovery", "zookeeper:x").exits(2)
    assert "expected dir:PATH, static:HOST:PORT" in refused.err


@capability("netns", "mount", "ip")
def test_a_headless_service(mx: Mx, tmp_path: Path) -> None:
    zone = tmp_path / "zone.json"
    zone.write_text(json.dumps({"peers.test": ["10.9.0.1", "fd00::9"]}))
    arguments = ("peers", "--json", "--discovery", "dns:peers.test:7000")
    document = mx(*arguments, prefix=dnsd.command(zone), cwd=ROOT).ok().json()
    assert [row["address"] for row in document["peers"]] == ["10.9.0.1:7000", "[fd00::9]:7000"]
    zone.write_text("{}")
    document = mx(*arguments, prefix=dnsd.command(zone), cwd=ROOT).ok().json()
    assert document["peers"] == []
    assert "peers.test does not resolve" in document["reason"]
    zone.write_text(json.dumps({"peers.test": None}))
    document = mx(*arguments, "--connect-timeout", "200ms", prefix=dnsd.command(zone), cwd=ROOT).ok().json()
    assert document["reason"] == "peers.test does not resolve (no answer for 0.2 s)"


def test_what_it_lists_is_what_peers_find(mx: Mx) -> None:
    directory = publish(mx, peer("web", CONTENT))
    (row,) = mx("peers", "--json").ok().json()["peers"]
    assert Record.from_json(row, "stdout") == directory.records(Stop())[0]


def test_v03_each_is_asked(mx: Mx, tmp_path: Path) -> None:
    """A peer is believed rather than its record; a record of an earlier life and one of nobody are named."""
    model = make_checkpoint(tmp_path / "model", shards=1, size=50_000)
    content = mx("hash", model).ok().out.strip()
    secret = tmp_path / "secret"
    secret.write_text("five words that nobody knows\n")
    env = {"MX_PEER_TOKEN_FILE": secret}
    serving = mx.start("serve", model, "--name", "web", env=env)
    told = json.loads(serving.wait_out(r"^\{.*\}$", 60)[0])
    address, generation = told["address"], told["generation"]
    earlier = replace(peer("earlier", CONTENT), address=address)
    nobody = replace(peer("nobody", content), address="127.0.0.1:1")
    publish(mx, earlier, nobody)
    rows = {row["name"]: row for row in mx("peers", content, "--probe", "--json", env=env).ok().json()["peers"]}
    assert (rows["web"]["answers"], rows["web"]["matches"], rows["web"]["state"]) == (True, "content", "serving")
    assert rows["earlier"]["answers"] is False
    assert f"{generation} answers there" in rows["earlier"]["fault"]
    assert rows["nobody"]["answers"] is False
    assert "127.0.0.1:1" in rows["nobody"]["fault"]
    (row,) = mx("peers", "--probe", "--json", "--discovery", f"static:{address}", env=env).ok().json()["peers"]
    assert (row["generation"], row["state"], row["identities"][0]) == (generation, "serving", content)
    stranger = tmp_path / "stranger"
    stranger.write_text("guessed\n")
    lines = mx("peers", content, "--probe", env={"MX_PEER_TOKEN_FILE": stranger}).ok().out.splitlines()
    assert sum("no answer" in line for line in lines) == 2
    assert sum(line.startswith("  why: ") for line in lines) == 2
    assert mx("peers", "--json", env=env).ok().json()["peers"][0]["answers"] is None
