"""`mx doctor`: what it says of this machine and of the way to another one, and that nothing makes it wait."""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mx_cli.base.aside import Aside
from mx_cli.base.capability import STATES
from mx_cli.flows import measure_model
from mx_cli.sources import survey
from tests.rig import mounts, netns, servers
from tests.rig.netns import Namespace
from tests.rig.serving import Hosts, eventually
from tests.support import MIB, Mx, Result, Running, capability, make_checkpoint, need

SECRET = "a-secret-for-the-tests-of-doctor-0123456789"
ROWS = {
    *("python", "mx", "torch", "gpus", "gds", "nixl", "nixl plug-ins", "ucx", "rdma", "network", "/dev/shm", "memlock"),
    *("memory", "cpus", "huge pages", "open files", "io_uring", "cache root", "free space", "rename", "hard links"),
    *("O_DIRECT", "flock", "credentials s3", "credentials gs", "credentials hf", "discovery", "clock"),
}
WITHOUT = """
import sys
from importlib.machinery import PathFinder
class Blind(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        hidden = ("torch", "nixl", "nixl_cu12", "nixl_cu13", "numpy", "safetensors")
        return None if name.partition(".")[0] in hidden else super().find_spec(name, path, target)
sys.meta_path[:] = [Blind if finder is PathFinder else finder for finder in sys.meta_path]
"""


def table(result: Result) -> dict[str, dict[str, Any]]:
    """{name: row} of a --json."""
    document = result.json()
    assert document["schema"] == 1
    for row in document["rows"]:
        assert set(row) == {"name", "state", "value", "fix", "facts"}
        assert row["state"] in STATES
        assert row["value"]
        assert bool(row["fix"]) == (row["state"] != "ok"), row
    rows = {row["name"]: row for row in document["rows"]}
    assert len(rows) == len(document["rows"])
    for state, key in (("fail", "failed"), ("warn", "warned")):
        assert document[key] == [name for name, row in rows.items() if row["state"] == state]
    return rows


def without(tmp_path: Path) -> dict[str, str]:
    """Variables with which Python does not find the optional packages."""
    place = tmp_path / "blocked"
    place.mkdir(exist_ok=True)
    (place / "sitecustomize.py").write_text(WITHOUT)
    return {"PYTHONPATH": f"{place}:{Path(__file__).parents[2]}"}


# --- this machine --------------------------------------------------------------------------------------------------


def test_every_row_is_there_and_nothing_is_left_behind(mx: Mx) -> None:
    mx.cache.mkdir(parents=True)
    result = mx("doctor", "--json").ok()
    rows = table(result)
    assert set(rows) == ROWS
    assert list(mx.cache.iterdir()) == []
    assert rows["flock"]["facts"]["works"] is True
    assert rows["cpus"]["facts"]["usable"] == len(os.sched_getaffinity(0)) or rows["cpus"]["facts"]["usable"] > 0
    assert rows["open files"]["facts"]["soft"] == _limit_of_files()


def _limit_of_files() -> int:
    import resource

    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def test_people_get_a_table_with_fixes(mx: Mx) -> None:
    """Also in a pod whose variables are those of mx serve."""
    result = mx("doctor", env={"MX_LISTEN": "0.0.0.0:7400", "MX_ADVERTISE": "10.0.0.1"}).ok()
    lines = result.out.splitlines()
    assert lines[0].split() == ["CAPABILITY", "STATE", "VALUE"]
    warned = sum(" warn " in line for line in lines)
    assert sum(line.startswith("  fix: ") for line in lines) == warned
    assert f"{warned} warn, 0 fail" in result.err
    # A root that is not there is not made.
    assert not mx.cache.exists()


def test_without_the_optional_packages(mx: Mx, tmp_path: Path) -> None:
    rows = table(mx("doctor", "--json", env=without(tmp_path)).ok())
    assert set(rows) == ROWS
    for name in ("torch", "nixl", "nixl plug-ins", "ucx"):
        assert rows[name]["state"] == "warn"
        assert "pip install" in rows[name]["fix"]
    assert rows["nixl"]["value"].startswith("missing")


@capability("nixl")
def test_nixl_is_asked_and_not_its_list_of_names(monkeypatch: pytest.MonkeyPatch) -> None:
    def asked() -> dict[str, dict[str, Any]]:
        answers, why = Aside("mx_cli.transport.survey:nixl", {}, 60).answers()
        assert why == ""
        return {row["name"]: row for row in answers}

    monkeypatch.setenv("UCX_NET_DEVICES", "lo")
    rows = asked()
    assert rows["nixl plug-ins"]["facts"]["UCX"] == "works"
    assert [name for name in rows["ucx"]["facts"]["resources"] if name.startswith("tcp/")] == ["tcp/lo"]
    # With a device that is not there UCX does not start, though the plug-in is listed.
    monkeypatch.setenv("UCX_TLS", "rc")
    monkeypatch.setenv("UCX_NET_DEVICES", "nowhere")
    row = asked()["nixl plug-ins"]
    assert row["state"] == "warn"
    assert row["facts"]["UCX"] != "works"


def test_credentials_are_named_and_never_shown(mx: Mx) -> None:
    secrets = {
        "AWS_ACCESS_KEY_ID": "AKIAIOSFODNN7EXAMPLE",
        "AWS_SECRET_ACCESS_KEY": "hush-hush",
        "HF_TOKEN": "hf_quiet",
    }
    result = mx("doctor", "--json", env=secrets).ok()
    rows = table(result)
    assert rows["credentials s3"]["value"] == "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
    assert rows["credentials hf"]["value"] == "HF_TOKEN"
    assert [value for value in secrets.values() if value in result.out + result.err] == []


def test_where_credentials_are_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith(("AWS_", "GOOGLE_", "HF_", "CLOUDSDK_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))

    def found() -> dict[str, tuple[str, str]]:
        rows = survey.probe({"settings": {}})
        return {row["name"].removeprefix("credentials "): (row["state"], row["value"]) for row in rows}

    assert all(state == "ok" and "none found" in value for state, value in found().values())
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(tmp_path / "absent.json"))
    monkeypatch.setenv("AWS_PROFILE", "somebody")
    monkeypatch.setenv("HF_TOKEN", "two words")
    assert {store: state for store, (state, _) in found().items()} == dict.fromkeys(("s3", "gs", "hf"), "fail")
    (tmp_path / ".aws").mkdir()
    (tmp_path / ".aws" / "credentials").write_text("[somebody]\naws_access_key_id = x\n")
    assert found()["s3"] == ("ok", f"profile somebody in {tmp_path}/.aws/credentials")
    assert next(survey.probe({"settings": {"anon": "true"}}))["value"] == "none wanted (--anon)"


def test_a_failing_row_is_20_and_the_table_is_printed_all_the_same(mx: Mx, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    result = mx("doctor", "--cache-dir", file).exits(20)
    assert result.out.startswith("CAPABILITY")
    assert re.search(r"^cache root +fail +/.*/file is not a directory\n  fix: .*--cache-dir", result.out, re.M)
    assert "mx: error: failing: cache root" in result.err


@capability("fuse")
def test_what_the_file_system_cannot(mx: Mx, cifuse: Any) -> None:
    rows = table(mx("doctor", "--json", "--cache-dir", cifuse(NORENAME="1")).exits(20))
    assert (rows["rename"]["state"], rows["hard links"]["state"]) == ("fail", "warn")
    assert "ENOSYS" in rows["rename"]["value"]


def test_flock_that_keeps_nobody_out_is_seen(mx: Mx, fault_env: Any, tmp_path: Path) -> None:
    rows = table(mx("doctor", "--json", env=fault_env(tmp_path, FLOCK="NOOP")).ok())
    assert (rows["flock"]["state"], rows["flock"]["facts"]["works"]) == ("warn", False)


@capability("fuse")
def test_a_mount_that_hangs_is_a_failing_row(mx: Mx, tmp_path: Path) -> None:
    """The daemon of the mount is frozen: whoever touches it waits in the kernel, and cannot even be killed."""
    with mounts.cifuse(tmp_path / "backing", tmp_path / "mount") as place:
        (place / "model").mkdir()
        daemon = _daemon_of(place)
        os.kill(daemon, signal.SIGSTOP)
        try:
            rows = table(mx("doctor", place / "model", "--json", "--cache-dir", place / "cache", timeout=60).exits(20))
        finally:
            os.kill(daemon, signal.SIGCONT)
        # What was under way ends now, and takes its files away.
        eventually(lambda: {path.name for path in (tmp_path / "backing").iterdir()} == {"model"})
    assert rows["cache root"]["state"] == rows["discovery"]["state"] == rows["model"]["state"] == "fail"
    assert rows["cache root"]["value"] == "no answer in time"
    assert rows["flock"]["value"] == "not tried"
    assert rows["credentials hf"]["state"] == "ok"


def _daemon_of(place: Path) -> int:
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        words = path.read_bytes().split(b"\0")
        if str(place).encode() in words and any(word.endswith(b"cifuse.py") for word in words):
            return int(path.parent.name)
    raise AssertionError("no daemon of the mount")


# --- a function in a process of its own ----------------------------------------------------------------------------


def test_where_no_process_can_be_had() -> None:
    """A container may have few processes, and few open files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.dup(0)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, hard))
    try:
        probe = Aside("tests.integration.asides:two", {"first": 1}, 20)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        os.close(free)
    assert probe.answers() == ([], "no process can be started for it (Too many open files)")


def test_a_function_that_crashes_or_fails_is_told_with_what_it_gave() -> None:
    here = "tests.integration.asides"
    assert Aside(f"{here}:two", {"first": 1}, 20).answers() == ([1, 2], "")
    assert Aside(f"{here}:crash", {}, 20).answers() == ([1], "it crashed (SIGABRT)")
    assert Aside(f"{here}:fail", {}, 20).answers() == ([1], "it failed (exit code 1)")
    assert Aside(f"{here}:noisy", {}, 20).answers() == (["quiet"], "")
    hung = Aside(f"{here}:hang", {}, 3)
    assert hung.answers() == ([1], "no answer in time")


# --- a model -------------------------------------------------------------------------------------------------------


def measured(mx: Mx, model: str | Path) -> dict[str, dict[str, Any]]:
    answers = measure_model.probe({"model": str(model), "settings": {"cache_dir": str(mx.cache)}})
    return {row["name"]: row for row in answers}


def test_a_model_and_what_each_rank_needs(
    mx: Mx, tmp_path: Path, hub: servers.Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_checkpoint(tmp_path / "model", shards=2, size=2 * MIB)
    rows = table(mx("doctor", model, "--ranks", "4", "--json").ok())
    size = sum(path.stat().st_size for path in model.iterdir())
    assert rows["model"]["facts"] == {"bytes": size, "files": len(list(model.iterdir())), "missing": 0}
    assert rows["memory per rank"]["facts"]["bytes"] == -(-size // 4)
    hub.commit(model)
    rows = table(mx("doctor", hub.uri, "--json", env=hub.env).ok())
    assert rows["model"]["facts"]["missing"] == rows["model"]["facts"]["bytes"] == size
    assert rows["origin"]["facts"]["seconds"] > 0
    for name, value in hub.env.items():
        monkeypatch.setenv(name, str(value))
    directory = mx("prefetch", hub.uri, "-q", env=hub.env).ok().out.strip()
    assert measured(mx, hub.uri)["model"]["facts"]["missing"] == 0
    content = mx("hash", directory, "-q").ok().out.strip()
    assert measured(mx, content)["model"]["facts"] == rows["model"]["facts"] | {"missing": 0}
    unknown = measured(mx, "mx1c-00000000000000000000000000000000")["model"]
    assert (unknown["state"], "neither in the cache nor at a peer" in unknown["value"]) == ("fail", True)


@pytest.mark.parametrize(
    ("name", "data", "cause"),
    [
        (
            "model.safetensors",
            b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n",
            "git-lfs pointer",
        ),
        ("model.safetensors", b"\0" * 4096, "preallocated and never filled"),
        ("notes.txt", b"to do", "neither weights nor a config"),
    ],
)
def test_what_is_no_model_fails(mx: Mx, tmp_path: Path, name: str, data: bytes, cause: str) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / name).write_bytes(data)
    row = measured(mx, tmp_path / "model" / name)["model"]
    assert row["state"] == "fail"
    assert cause in row["value"]
    if name != "notes.txt":
        assert measured(mx, tmp_path / "model")["model"]["state"] == "fail"


def test_an_origin_that_is_not_there_fails(mx: Mx) -> None:
    env = {"HF_ENDPOINT": f"http://127.0.0.1:{servers.free_port()}"}
    rows = table(mx("doctor", "hf://acme/nothing", "--json", env=env).exits(20))
    assert rows["model"]["state"] == "fail"
    for model in ("hf://acme/nothing", "nothing"):
        (row,) = [
            row for row in mx("doctor", model, "--json", env=env).exits(20).json()["rows"] if row["name"] == "model"
        ]
        assert row["value"].count(f"{model}:") == 1, row


@capability("mount")
def test_a_model_that_does_not_fit_fails(mx: Mx, tmpfs: Any, hub: servers.Hub, tmp_path: Path) -> None:
    hub.commit(make_checkpoint(tmp_path / "model", shards=1, size=4 * MIB))
    rows = table(mx("doctor", hub.uri, "--json", "--cache-dir", tmpfs("2m") / "cache", env=hub.env).exits(20))
    assert rows["free space"]["state"] == "fail"
    assert "4.0 MiB are to come" in rows["free space"]["value"]


# --- two hosts -----------------------------------------------------------------------------------------------------


@pytest.fixture
def pair() -> Iterator[tuple[Namespace, Namespace]]:
    need("CAP_NET_ADMIN")
    with netns.pair() as sides:
        yield sides


@pytest.fixture
def token(tmp_path: Path) -> Path:
    path = tmp_path / "token"
    path.write_text(SECRET + "\n")
    path.chmod(0o600)
    return path


def listening(mx: Mx, where: str, token: Path, prefix: tuple[str, ...] = (), **env: str) -> tuple[Running, str]:
    running = mx.start("doctor", "--listen", where, "--peer-token-file", token, env=env, prefix=prefix)
    return running, json.loads(running.wait_out(r"^\{.*\}$", 60).group())["address"]


def test_two_hosts_both_ways(mx: Mx, token: Path, pair: tuple[Namespace, Namespace]) -> None:
    here, there = pair
    running, address = listening(mx, "0.0.0.0:7400", token, here.apart)
    assert address == f"{here.address}:7400"
    command = ("doctor", "--peer", address, "--peer-token-file", token, "--json")
    rows = table(mx(*command, "--listen", "0.0.0.0:7401", prefix=there.apart).ok())
    assert rows["reachable"]["state"] == "ok"
    assert rows["back"]["facts"]["address"] == f"{there.address}:7401"
    assert rows["back"]["facts"]["tried"] is True
    assert rows["route"]["facts"]["interface"] == there.device
    assert rows["route"]["facts"]["same_host"] is False
    assert rows["mtu"]["facts"] == {"here": 1500, "there": 1500}
    assert abs(rows["clock"]["facts"]["difference"]) < 1
    assert rows["socket"]["facts"]["rate"] > 0
    assert rows["verdict"]["value"].startswith("TCP fallback: ")
    assert rows["verdict"]["fix"]
    # It is in no directory: nobody would take its bytes for weights.
    assert not (mx.cache / "peers").exists()
    assert running.process.poll() is None


def test_two_hosts_that_do_not_agree(mx: Mx, token: Path, tmp_path: Path, pair: tuple[Namespace, Namespace]) -> None:
    """Another secret, another MTU, a port where nobody listens, one whose packets vanish, and a way back that is none."""
    here, there = pair
    _, address = listening(mx, f"{here.address}:7400", token, here.apart)
    other = tmp_path / "other"
    other.write_text("another-secret-of-these-tests-0123456789\n")
    rows = table(mx("doctor", "--peer", address, "--peer-token-file", other, "--json", prefix=there.apart).exits(20))
    assert (list(rows), "same --peer-token-file" in rows["reachable"]["fix"]) == (["reachable"], True)

    subprocess.run(["ip", "-n", there.name, "link", "set", there.device, "mtu", "1400"], check=True)
    command = ("doctor", "--peer-token-file", token, "--json")
    back = ("--listen", f"{there.address}:7401", "--advertise", f"{there.address}:7402")
    rows = table(mx(*command, "--peer", address, *back, prefix=there.apart).exits(20))
    assert rows["mtu"]["state"] == "warn"
    assert rows["mtu"]["facts"] == {"here": 1400, "there": 1500}
    assert (rows["back"]["state"], rows["back"]["facts"]["address"]) == ("fail", f"{there.address}:7402")
    assert rows["socket"]["state"] == "ok"

    refused = table(mx(*command, "--peer", f"{here.address}:7999", prefix=there.apart).exits(20))
    assert "refused" in refused["reachable"]["value"]
    nowhere = ["neigh", "replace", here.address, "lladdr", "02:00:00:00:00:99", "dev", there.device, "nud", "permanent"]
    subprocess.run(["ip", "-n", there.name, *nowhere], check=True)
    silent = table(mx(*command, "--peer", address, prefix=there.apart).exits(20))
    assert "mx doctor --listen" in silent["reachable"]["fix"]


@capability("nixl")
def test_one_host_reads_memory_directly(mx: Mx, token: Path) -> None:
    running, address = listening(mx, "127.0.0.1:0", token)
    rows = table(mx("doctor", "--peer", address, "--peer-token-file", token, "--json").ok())
    running.send(signal.SIGTERM)
    assert running.wait().code == 128 + signal.SIGTERM
    assert rows["nixl-read"]["state"] == rows["verdict"]["state"] == "ok"
    assert rows["nixl-read"]["facts"]["rate"] > 0
    assert "nixl-read" in rows["verdict"]["value"]


def test_without_nixl_the_fallback_is_named(mx: Mx, token: Path, tmp_path: Path) -> None:
    _, address = listening(mx, "127.0.0.1:0", token)
    command = ("doctor", "--peer", address, "--peer-token-file", token, "--json")
    rows = table(mx(*command, env=without(tmp_path)).ok())
    assert rows["nixl-read"]["state"] == "warn"
    assert rows["verdict"]["value"].startswith("TCP fallback: ")
    assert "pip install" in rows["verdict"]["fix"]


@capability("nixl")
def test_where_ucx_cannot_start_sockets_are_measured(mx: Mx, token: Path) -> None:
    _, address = listening(mx, "127.0.0.1:0", token, UCX_NET_DEVICES="nope0")
    rows = table(mx("doctor", "--peer", address, "--peer-token-file", token, "--json").ok())
    assert "the peer offers only socket" in rows["nixl-read"]["value"]
    assert rows["socket"]["state"] == "ok"


def test_a_peer_with_weights_can_be_measured_too(hosts: Hosts, tmp_path: Path) -> None:
    served = hosts.serve(make_checkpoint(tmp_path / "model", size=2 * MIB), "--max-readers", "1")
    rows = table(hosts("doctor", "--peer", served.address, "--json").ok())
    assert rows["socket"]["facts"]["rate"] > 0
    assert "serves from disk" in rows["nixl-read"]["value"]
    assert served.metrics()["readers"] == 0


def test_wrong_options_are_usage_errors(mx: Mx, tmp_path: Path, token: Path) -> None:
    assert "no secret" in mx("doctor", "--listen", "0.0.0.0:0").exits(2).err
    assert "no secret" in mx("doctor", "--peer", "192.0.2.9:7400").exits(2).err
    mx("doctor", tmp_path, "--peer", "127.0.0.1:7400").exits(2)
    mx("doctor", "--advertise", "127.0.0.1").exits(2)
    mx("doctor", "--ranks", "0").exits(2)
    mx("doctor", "--peer", "nonsense", "--peer-token-file", token).exits(2)


# --- pull --dry-run ------------------------------------------------------------------------------------------------


def test_a_dry_run_ranks_the_routes_and_moves_nothing(hosts: Hosts, tmp_path: Path, hub: servers.Hub) -> None:
    """Sources are removed one by one, and the next one comes first."""
    model = make_checkpoint(tmp_path / "model", shards=2, size=2 * MIB)
    hub.commit(model)
    hosts("prefetch", hub.uri, host="a", env=hub.env).ok()
    served = hosts.serve(hub.uri, host="a", env=hub.env)
    size = sum(path.stat().st_size for path in model.iterdir())

    def planned(code: int = 0) -> dict[str, Any]:
        command = ("pull", hub.uri, "--dry-run", "--json")
        found: dict[str, Any] = hosts(*command, host="b", env=hub.env).exits(code).json()
        return found

    found = planned()
    assert (found["route"], found["bytes"]) == ("peer", size)
    assert [one["route"] for one in found["routes"]] == ["peer", "cache", "origin"]
    assert f"1 source ({served.address}: socket: the peer serves from disk)" in found["routes"][0]["reason"]
    assert found["memory"] > 0
    assert not (hosts.cache("b") / "models").exists()
    assert served.metrics()["bytes_served_total"] == served.metrics()["readers"] == 0
    into_cache = hosts("pull", hub.uri, "--dry-run", "--json", host="a", env=hub.env).ok().json()
    assert (into_cache["route"], into_cache["bytes"]) == ("peer", 0)
    assert into_cache["routes"][0]["reason"].endswith("; the cache has all of it")
    beside = ("--to", hosts.cache("a").parent / "beside", "--dry-run", "--json")
    assert hosts("pull", hub.uri, *beside, host="a", env=hub.env).ok().json()["bytes"] == size
    served.stop()

    found = planned()
    assert (found["route"], found["bytes"]) == ("origin", size)
    assert "to fetch" in found["routes"][2]["reason"]
    hosts("prefetch", hub.uri, "--from", "origin", host="b", env=hub.env).ok()
    found = planned()
    assert (found["route"], found["bytes"]) == ("cache", 0)
    assert "complete snapshot" in found["routes"][1]["reason"]
    text = hosts("pull", hub.uri, "--dry-run", host="b", env=hub.env).ok().out
    assert text.splitlines()[0].split() == ["ROUTE", "STATE", "TO", "MOVE", "MEMORY", "WHY"]
    refused = hosts("pull", served.content, "--dry-run", "--json", host="c").exits(18)
    assert "peer: " in refused.json()["error"]["message"]
