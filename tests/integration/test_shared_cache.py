"""Several processes on one cache: who leads, who waits, what they say, and how failures spread (P-39 to P-46)."""

from __future__ import annotations

import json
import os
import signal
import threading
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mx_cli.cache.layout import slug
from tests.integration.cache_tools import weight_sets
from tests.rig import cachecheck, servers
from tests.support import MIB, Mx, Running, capability, checkpoint_files, tree

Faults = Callable[..., dict[str, str]]
PLAIN = {"MX_PROGRESS_EVERY": "0.1s"}


def pod(name: str) -> tuple[str, ...]:
    """Runs mx as pid 1 of a pid namespace of its own, on a host of that name."""
    return (
        "unshare",
        "--pid",
        "--uts",
        "--fork",
        "--kill-child",
        "--mount-proc",
        "sh",
        "-c",
        f'hostname {name}; exec "$@"',
        "sh",
    )


def freeze(hub: servers.Hub, start: Callable[[], Running], share: str = "[2-7][0-9]", slow: int = 4_000_000) -> Running:
    """A leader, stopped when it has that share (a regular expression for percents) of its bytes."""
    hub.flags(f"slow={slow}")
    leader = start()
    leader.wait_err(f"transfer +{share} %", 40)
    os.killpg(leader.pid, signal.SIGSTOP)
    hub.flags("ok")
    return leader


def staging(mx: Mx) -> Path:
    """What a leader makes first when it leads."""
    return mx.cache / "models" / slug("hf://org/model") / "staging"


def roles(ends: list[Any]) -> list[str]:
    return sorted(end.ok().json()["role"] for end in ends)


# --- locks that lie, or are not there --------------------------------------------------------------------------------


class Reader:
    """Reads a published file in a loop, as soon as it has its name."""

    def __init__(self, cache: Path, name: str, right: bytes) -> None:
        self._cache, self._name, self._right = cache, name, right
        self.reads, self.wrong = 0, 0
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Reader:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._end.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._end.is_set():
            for path in self._cache.glob(f"models/*/snapshots/*/{self._name}"):
                self.reads += 1
                self.wrong += path.read_bytes() != self._right


@capability("gcc")
def test_a_lock_that_always_says_yes(mx: Mx, hub: servers.Hub, fault_env: Faults) -> None:
    """P-39 flock-noop."""
    files = checkpoint_files(shards=2, size=8 * MIB)
    hub.commit(files)
    hub.flags("slow=8000000")
    env = hub.env | fault_env(mx.cache, FLOCK="NOOP")
    with Reader(mx.cache, "config.json", files["config.json"]) as reader:
        running = [mx.start("prefetch", hub.uri, "--json", env=env) for _ in range(4)]
        ends = [one.wait() for one in running]
    assert roles(ends).count("leader") == 1
    assert reader.reads
    assert not reader.wrong
    cachecheck.check_names(mx.cache, cachecheck.sums(files))


@capability("gcc")
@pytest.mark.parametrize("code", ["ENOLCK", "EOPNOTSUPP", "ENOSYS"])
def test_no_locks(code: str, mx: Mx, hub: servers.Hub, fault_env: Faults) -> None:
    """P-40 no-flock."""
    files = checkpoint_files(shards=2, size=2 * MIB)
    hub.commit(files)
    env = hub.env | fault_env(mx.cache, FLOCK=code)
    ends = [one.wait() for one in [mx.start("prefetch", hub.uri, "--json", env=env) for _ in range(3)]]
    assert roles(ends).count("leader") == 1
    assert [end.err.count("flock does not work") for end in ends if end.json()["role"] == "leader"] == [1]
    assert hub.bytes_served("model-0") == sum(len(data) for name, data in files.items() if name.startswith("model-0"))


# --- leaders that die, in containers that look alike -----------------------------------------------------------------


@capability("pidns")
def test_a_leader_dies_on_another_host(mx: Mx, hub: servers.Hub) -> None:
    """P-41 dead-leader: nothing but its silence tells."""
    files = checkpoint_files(shards=2, size=24 * MIB)
    hub.commit(files)

    def start(name: str) -> Running:
        return mx.start("prefetch", hub.uri, "--json", env=hub.env | PLAIN | {"MX_NODE_NAME": name}, prefix=pod(name))

    hub.flags("slow=3000000")
    leader = start("node-a")
    leader.wait_err("transfer")
    follower = start("node-b")
    follower.wait_err(r"following node-a/1 +[4-7][0-9] %")
    leader.kill()
    hub.flags("ok")
    end = follower.wait().ok()
    assert end.json()["role"] == "leader"
    assert tree(Path(end.json()["dir"])) == cachecheck.sums(files)
    check_no_waste(hub, files)


def check_no_waste(hub: servers.Hub, files: dict[str, bytes]) -> None:
    """What was killed had 4 MiB of blocks in the making on each connection at most: here, a tenth."""
    weights = sum(len(data) for name, data in files.items() if name.startswith("model-0"))
    assert hub.bytes_served("model-0") <= 1.1 * weights + 2 * MIB


@capability("pidns")
def test_the_next_pod_has_the_same_pid_and_host(mx: Mx, hub: servers.Hub) -> None:
    """P-42 pid1-collision (a): the dead leader was pid 1 of node-a, and so is its successor."""
    hub.commit(checkpoint_files(shards=2, size=8 * MIB))
    leader = freeze(
        hub, lambda: mx.start("prefetch", hub.uri, env=hub.env | PLAIN, prefix=pod("node-a")), slow=2_000_000
    )
    leader.kill()
    second = mx("prefetch", hub.uri, "--json", env=hub.env, prefix=pod("node-a"))
    assert roles([second]) == ["leader"]


@capability("pidns")
def test_a_living_leader_has_no_pid_here(mx: Mx, hub: servers.Hub) -> None:
    """P-42 pid1-collision (b): its pid does not exist in the other pod, and it is alive."""
    hub.commit(checkpoint_files(shards=2, size=8 * MIB))
    hub.flags("slow=1000000")
    env = hub.env | PLAIN | {"MX_TTL": "20s"}
    leader = mx.start("prefetch", hub.uri, "--json", env=env, prefix=pod("node-a"))
    leader.wait_err("leading")
    second = mx.start("prefetch", hub.uri, "--json", env=env, prefix=(*pod("node-a"), "sh", "-c", 'true; "$@"', "sh"))
    second.wait_err("following")
    hub.flags("ok")
    assert roles([leader.wait(), second.wait()]) == ["follower", "leader"]


def test_no_descriptor_outlives_the_leader(mx: Mx, hub: servers.Hub) -> None:
    """P-43 inherited-lock-fd: whatever a leader starts inherits nothing of the cache."""
    hub.commit(checkpoint_files(shards=2, size=4 * MIB))
    leader = freeze(hub, lambda: mx.start("prefetch", hub.uri, env=hub.env | PLAIN), slow=1_000_000)
    held = []
    for fd in Path(f"/proc/{leader.pid}/fd").iterdir():
        target = os.readlink(fd)
        if target.startswith(str(mx.cache)):
            flags = Path(f"/proc/{leader.pid}/fdinfo/{fd.name}").read_text().split("flags:")[1].split()[0]
            held.append((target, bool(int(flags, 8) & os.O_CLOEXEC)))
    assert any(target.endswith("/lock") for target, _ in held)
    assert all(closes for _, closes in held), held
    leader.kill()


def test_a_herd(mx: Mx, hub: servers.Hub) -> None:
    """P-44 thundering-herd."""
    files = checkpoint_files(shards=3, size=6 * MIB)
    hub.commit(files)
    hub.flags("slow=1500000")
    env = hub.env | PLAIN | {"MX_TTL": "20s"}
    ends = [one.wait() for one in [mx.start("prefetch", hub.uri, "--json", env=env) for _ in range(8)]]
    found = roles(ends)
    assert found.count("leader") == 1
    for name, data in files.items():
        if name.startswith("model-0"):
            assert hub.bytes_served(name) == len(data)
    assert any("following" in end.err and " MiB" in end.err for end in ends)
    assert max(end.seconds for end in ends) - min(end.seconds for end in ends) < 10


def test_followers_take_over(mx: Mx, hub: servers.Hub) -> None:
    """P-45 leader-dies-followers-take-over."""
    files = checkpoint_files(shards=2, size=32 * MIB)
    hub.commit(files)

    def start() -> Running:
        return mx.start("prefetch", hub.uri, "--json", env=hub.env | PLAIN | {"MX_TTL": "20s"})

    hub.flags("slow=3000000")
    leader = start()
    leader.wait_err("transfer")
    followers = [start() for _ in range(3)]
    for follower in followers:
        follower.wait_err("following +[^ ]+ +[4-7][0-9] %")
    leader.kill()
    hub.flags("ok")
    assert roles([follower.wait() for follower in followers]) == ["follower", "follower", "leader"]
    check_no_waste(hub, files)
    cachecheck.check_names(mx.cache, cachecheck.sums(files))


@capability("fuse")
def test_names_that_stay_hidden(mx: Mx, hub: servers.Hub, cifuse: Callable[..., Path]) -> None:
    """P-46 negative-lookup: what the manifest promises is waited for, not fetched again."""
    files = checkpoint_files(shards=2, size=2 * MIB)
    hub.commit(files)
    root = cifuse(HIDE="4")
    env = hub.env | {"MX_CACHE_DIR": str(root / "cache"), "MX_TTL": "20s"}
    ends = [one.wait() for one in [mx.start("prefetch", hub.uri, "--json", env=env) for _ in range(3)]]
    assert roles(ends).count("leader") == 1
    late = mx("prefetch", hub.uri, "--json", env=env)
    assert roles([late]) == ["hit"]
    assert hub.bytes_served("model-0") == sum(len(data) for name, data in files.items() if name.startswith("model-0"))


# --- several selections, and none at all -----------------------------------------------------------------------------


def test_a_later_selection_adds_in_place(mx: Mx, hub: servers.Hub) -> None:
    files = checkpoint_files(shards=1, size=2 * MIB) | {"README.md": b"# a model\n" * 50, "notes/a.txt": b"a\n"}
    sha = hub.commit(files)
    first = mx("prefetch", hub.uri, "--json", env=hub.env).ok().json()
    hub.reset()
    second = mx("prefetch", hub.uri, "--all", "--json", env=hub.env).ok().json()
    assert second["dir"] == first["dir"]
    assert not hub.bytes_served("model.safetensors")
    assert tree(Path(second["dir"])) == cachecheck.sums(files)
    hub.reset()
    for selection in ((), ("--all",), ("--include", "README.md")):
        again = mx("prefetch", hub.uri, *selection, "--revision", sha, "--offline", "--json", env=hub.env).ok().json()
        assert again["role"] == "hit"
    assert not hub.log()


def test_another_weight_set_has_its_own_directory(mx: Mx, hub: servers.Hub) -> None:
    files, others = weight_sets()
    hub.commit(files | others)
    first = mx("prefetch", hub.uri, "--json", env=hub.env).ok()
    hub.reset()
    both = ("--include", "original/*", "--include", "*.json")
    second = mx("prefetch", hub.uri, *both, "--json", env=hub.env).ok()
    one, two = Path(first.json()["dir"]), Path(second.json()["dir"])
    assert two.name.startswith(one.name + "+")
    assert (one / "config.json").stat().st_ino == (two / "config.json").stat().st_ino
    assert not list(two.glob("*.safetensors"))
    assert not hub.bytes_served("config.json")
    assert mx("prefetch", hub.uri, *both, "--json", env=hub.env).ok().json()["dir"] == str(two)


def test_two_selections_at_once(mx: Mx, hub: servers.Hub) -> None:
    """They take turns, and share what they have in common."""
    files, others = weight_sets()
    hub.commit(files | others)
    env = hub.env | {"MX_TTL": "20s"}
    include = [("--include", "model.safetensors"), ("--include", "original/*"), ("--include", "*.json"), ("--all",)]
    running = [mx.start("prefetch", hub.uri, *words, "--json", env=env) for words in include for _ in range(2)]
    for one in running:
        assert one.wait().ok().json()["files"]
    cachecheck.check_names(mx.cache, cachecheck.sums(files | others))
    cachecheck.check_manifests(mx.cache)
    cachecheck.check_clean(mx.cache)


@pytest.mark.parametrize("flags", ["etag=none", "etag=weak"])
def test_an_origin_without_versions(flags: str, mx: Mx, faultd: servers.Faultd) -> None:
    """Several at once share one download; nothing of it is mixed with another's."""
    name = flags.replace("=", "-") + ".bin"
    url = faultd.file(f"{flags},slow=1000000", 3 * MIB, name)
    env = PLAIN | {"MX_TTL": "20s"}
    leader = mx.start("prefetch", url, "--json", env=env)
    leader.wait_err("transfer +[1-9]")
    others = [mx.start("prefetch", url, "--json", env=env) for _ in range(3)]
    ends = [leader.wait(), *(other.wait() for other in others)]
    assert roles(ends).count("leader") == 1
    for end in ends:
        assert list(tree(Path(end.json()["dir"])).values()) == [faultd.sum(3 * MIB, name)]
    assert faultd.bytes_served(name) == 3 * MIB


# --- how failures spread ---------------------------------------------------------------------------------------------


@pytest.fixture
def led(mx: Mx, hub: servers.Hub, fault_env: Faults) -> Callable[..., tuple[Running, list[Running]]]:
    """led(flags, followers=2) -> a leader stopped just before its first body, and who follows; the flags hold for all."""

    def begin(flags: str, followers: int = 2, **theirs: str) -> tuple[Running, list[Running]]:
        hub.commit(checkpoint_files(shards=1, size=2 * MIB))
        settings = hub.env | PLAIN | {"MX_TTL": "20s", "MX_RETRY_FOR": "1s"}
        leader = mx.start("prefetch", hub.uri, "--json", env=settings | fault_env(staging(mx), STOP_AT=1))
        leader.wait_stopped()
        others = [mx.start("prefetch", hub.uri, "--json", env=settings | theirs) for _ in range(followers)]
        for other in others:
            other.wait_err("following", 40)
        hub.flags(flags)
        leader.send(signal.SIGCONT)
        return leader, others

    return begin


def error_of(running: Running, code: int) -> dict[str, Any]:
    error: dict[str, Any] = json.loads(running.wait().exits(code).out)["error"]
    return error


def test_followers_end_as_their_leader(led: Callable[..., Any], mx: Mx, hub: servers.Hub) -> None:
    leader, others = led("failget=404:1000")
    assert error_of(leader, 10)["via"] == ""
    for other in others:
        error = error_of(other, 10)
        assert error["via"] == "leader"
    hub.flags("ok")
    assert roles([mx("prefetch", hub.uri, "--json", env=hub.env)]) == ["leader"]


def test_the_next_follower_tries_with_its_own_credentials(led: Callable[..., Any]) -> None:
    leader, others = led("auth=right", HF_TOKEN="right")
    error_of(leader, 11)
    assert roles([other.wait() for other in others]) == ["follower", "leader"]


def test_each_follower_hears_its_own_refusal(led: Callable[..., Any]) -> None:
    leader, others = led("failget=403:1000")
    error_of(leader, 11)
    for other in others:
        assert error_of(other, 11)["via"] == ""


def test_not_every_follower_spends_its_patience(led: Callable[..., Any]) -> None:
    """An unreachable origin: one of them tries, the others believe two."""
    leader, others = led("failget=503:1000", 3)
    error_of(leader, 12)
    assert sorted(error_of(other, 12)["via"] for other in others) == ["", "leader", "leader"]


def test_a_failure_of_another_selection_ends_nobody(mx: Mx, hub: servers.Hub, fault_env: Faults) -> None:
    sha = hub.commit(checkpoint_files(shards=1, size=2 * MIB))
    hub.flags("failget=404:1")
    with pytest.raises(urllib.error.HTTPError):
        urllib.request.urlopen(f"{hub.url}/org/model/resolve/{sha}/config.json", timeout=20)
    env = hub.env | PLAIN | {"MX_TTL": "20s"}
    words = ("prefetch", hub.uri, "--json", "--include")
    leader = mx.start(*words, "model.safetensors", env=env | fault_env(staging(mx), STOP_AT=1))
    leader.wait_stopped()
    other = mx.start(*words, "config.json", env=env)
    other.wait_err("following")
    leader.send(signal.SIGCONT)
    error_of(leader, 10)
    assert roles([other.wait()]) == ["leader"]


def test_an_old_failure_meets_nobody_new(mx: Mx, hub: servers.Hub) -> None:
    hub.commit(checkpoint_files(shards=1, size=2 * MIB))
    hub.flags("failget=404:1000")
    mx("prefetch", hub.uri, env=hub.env).exits(10)
    hub.flags("ok")
    assert roles([mx("prefetch", hub.uri, "--json", env=hub.env)]) == ["leader"]


def test_a_stopped_leader_makes_way(mx: Mx, hub: servers.Hub) -> None:
    """SIGTERM is no failure: who follows goes on at once, from where the leader was."""
    files = checkpoint_files(shards=2, size=24 * MIB)
    hub.commit(files)

    def start() -> Running:
        return mx.start("prefetch", hub.uri, "--json", env=hub.env | PLAIN | {"MX_TTL": "60s"})

    hub.flags("slow=3000000")
    leader = start()
    leader.wait_err("transfer")
    follower = start()
    follower.wait_err("following +[^ ]+ +[4-7][0-9] %")
    leader.send(signal.SIGTERM)
    hub.flags("ok")
    leader.wait().exits(143)
    assert roles([follower.wait()]) == ["leader"]
    check_no_waste(hub, files)
