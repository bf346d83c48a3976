"""One contract for the shared cache, on every kind of file system: who leads, who follows, and what they end with."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.rig import cachecheck, mounts, servers
from tests.support import MIB, Mx, Result, Running, capability, checkpoint_files, need, tree

# Of each race, on each kind of file system. `scripts/bench torture` asks for more.
ROUNDS = int(os.environ.get("MX_TEST_ROUNDS", "5"))
STALE = ("-o", "attr_timeout=30,entry_timeout=30,negative_timeout=30")
OTHER_NODE = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")
Faults = Callable[..., dict[str, str]]


@dataclass
class Place:
    """A cache that several processes see: through one directory, or each node through its own."""

    mx: Mx
    hub: servers.Hub
    backing: Path
    roots: tuple[Path, ...]
    env: dict[str, str] = field(default_factory=dict)
    nodes: bool = False
    weights: int = 0

    def start(self, number: int, *args: str, **env: str) -> Running:
        root = self.roots[number % len(self.roots)]
        prefix = OTHER_NODE if self.nodes and number % 2 else ()
        settings = {"MX_CACHE_DIR": str(root), "MX_PROGRESS_EVERY": "0.1s", **self.env, **env}
        return self.mx.start("prefetch", self.hub.uri, "--json", *args, env=self.hub.env | settings, prefix=prefix)

    def freeze(self, number: int) -> Running:
        """A leader, stopped in the middle of its transfer."""
        self.hub.flags("slow=1500000")
        leader = self.start(number)
        leader.wait_err("transfer +[1-7][0-9] %", 30)
        os.killpg(leader.pid, signal.SIGSTOP)
        self.hub.flags("ok")
        return leader

    def commit(self, number: int) -> dict[str, str]:
        """A new revision: {path: SHA-256} of what is right."""
        files = checkpoint_files(shards=2, size=3 * MIB, seed=f"round {number}")
        self.hub.commit(files)
        self.hub.reset()
        self.weights = sum(len(data) for name, data in files.items() if name.startswith("model-0"))
        return cachecheck.sums(files)

    def check(self, result: Result, right: dict[str, str]) -> dict[str, Any]:
        """All that must hold for one process that ended; its answer."""
        document = result.ok().json()
        directory = Path(document["dir"])
        assert tree(self.backing / directory.relative_to(self.root_of(directory))) == right
        return document

    def root_of(self, path: Path) -> Path:
        return next(root for root in self.roots if path.is_relative_to(root))


FAULTS: dict[str, dict[str, str]] = {
    "flock=NOOP": {"FLOCK": "NOOP"},
    "flock=ENOLCK": {"FLOCK": "ENOLCK"},
    "flock=ENOSYS": {"FLOCK": "ENOSYS"},
    "flock=EOPNOTSUPP": {"FLOCK": "EOPNOTSUPP"},
    "link=EPERM": {"LINK": "EPERM"},
    "symlink=EPERM": {"SYMLINK": "EPERM"},
    "fallocate=EOPNOTSUPP": {"FALLOC": "EOPNOTSUPP"},
    "chmod=EPERM": {"CHMOD": "EPERM"},
    "syncfs=ENOSYS": {"SYNCFS": "ENOSYS"},
}
PLACES = ["plain", "nodes", "bindfs", "cifuse", "hiding", "flock=NOOP"]
REST = [name for name in FAULTS if name not in PLACES]


@pytest.fixture
def place(request: pytest.FixtureRequest, mx: Mx, hub: servers.Hub, tmp_path: Path) -> Iterator[Place]:
    kind = request.param
    with contextlib.ExitStack() as stack:
        yield make_place(kind, request, mx, hub, tmp_path, stack)


def make_place(
    kind: str, request: pytest.FixtureRequest, mx: Mx, hub: servers.Hub, tmp_path: Path, stack: contextlib.ExitStack
) -> Place:
    if kind == "plain":
        return Place(mx, hub, mx.cache, (mx.cache,))
    if kind == "nodes":
        need("pidns")
        return Place(mx, hub, mx.cache, (mx.cache,), nodes=True)
    if kind == "bindfs":
        need("bindfs")
        source = tmp_path / "source"
        source.mkdir()
        roots = [stack.enter_context(mounts.bindfs(source, tmp_path / name, *STALE)) / "cache" for name in "ab"]
        return Place(mx, hub, source / "cache", tuple(roots))
    if kind in ("cifuse", "hiding"):
        need("fuse")
        options = {"HIDE": "1"} if kind == "hiding" else {}
        backing = tmp_path / "backing"
        mounted = stack.enter_context(mounts.cifuse(backing, tmp_path / "fuse", name_max=143, **options))
        return Place(mx, hub, backing / "cache", (mounted / "cache",))
    need("gcc")
    env = request.getfixturevalue("fault_env")(mx.cache, **FAULTS[kind])
    return Place(mx, hub, mx.cache, (mx.cache,), env)


def after(place: Place, number: int, right: dict[str, str], *ends: Result) -> list[dict[str, Any]]:
    documents = [place.check(end, right) for end in ends]
    cachecheck.check_manifests(place.backing)
    cachecheck.check_clean(place.backing)
    return documents


@pytest.mark.race
@pytest.mark.parametrize("place", PLACES + REST, indirect=True)
def test_herd(place: Place) -> None:
    """Several at once: one downloads, each byte comes once, all end well."""
    for number in range(ROUNDS):
        right = place.commit(number)
        running = [place.start(n, MX_TTL="20s") for n in range(4)]
        documents = after(place, number, right, *(one.wait() for one in running))
        roles = sorted(document["role"] for document in documents)
        assert roles.count("leader") == 1, roles
        assert sum(document["bytes_fetched"] for document in documents) <= documents[0]["bytes_total"]
        assert place.hub.bytes_served("model-0") == place.weights


@pytest.mark.race
@pytest.mark.parametrize("place", PLACES, indirect=True)
def test_leader_killed(place: Place) -> None:
    """One of the followers takes over, and the others follow it."""
    for number in range(ROUNDS):
        right = place.commit(number)
        leader = place.freeze(1)
        others = [place.start(n, MX_TTL="1s") for n in (0, 2, 3)]
        for other in others:
            other.wait_err("^revision", 30)
        leader.kill()
        documents = after(place, number, right, *(other.wait() for other in others))
        assert [document["role"] for document in documents].count("leader") == 1, documents


@pytest.mark.race
@pytest.mark.parametrize("place", PLACES, indirect=True)
def test_leader_frozen(place: Place) -> None:
    """It is deposed, woken while its successor works or after, and ends as well as the others."""
    for number in range(ROUNDS):
        right = place.commit(number)
        leader = place.freeze(2)
        others = [place.start(n, MX_TTL="1s") for n in (0, 4)]
        if number % 2:
            ended = [other.wait() for other in others]
            os.killpg(leader.pid, signal.SIGCONT)
        else:
            others[0].wait_err("leading term|another process|transfer|follow", 30)
            os.killpg(leader.pid, signal.SIGCONT)
            ended = [other.wait() for other in others]
        after(place, number, right, leader.wait(), *ended)


# --- what cannot work says so, and leaves nothing wrong behind -------------------------------------------------------


def staging(mx: Mx, hub: servers.Hub) -> Path:
    """The staging directory of the model, in a cache that has been used before."""
    hub.commit({"config.json": b"{}", "model.safetensors": checkpoint_files(1, MIB)["model.safetensors"]})
    mx("prefetch", hub.uri, env=hub.env).ok()
    return next(mx.cache.glob("models/*/staging"))


@capability("gcc")
def test_no_rename(mx: Mx, hub: servers.Hub, fault_env: Faults) -> None:
    hub.commit(checkpoint_files(1, MIB))
    refused = mx("prefetch", hub.uri, env=hub.env | fault_env(mx.cache, RENAME="EXDEV")).exits(21)
    assert "rename" in refused.err
    assert not hub.bytes_served("safetensors")


@capability("gcc")
@pytest.mark.parametrize(
    ("faults", "code"),
    [
        ({"FSYNC": "EIO"}, 21),
        ({"WRITE": "ENOSPC", "WRITE_AFTER": str(MIB)}, 15),
        ({"WRITE": "EDQUOT", "WRITE_AFTER": str(MIB)}, 15),
        ({"WRITE": "EIO", "WRITE_AFTER": str(MIB)}, 21),
        ({"FALLOC": "ENOSPC"}, 15),
    ],
)
def test_disk_troubles(faults: dict[str, str], code: int, mx: Mx, hub: servers.Hub, fault_env: Faults) -> None:
    """Named, not published, and the next run ends right."""
    bad = staging(mx, hub)
    if "FSYNC" in faults:
        bad = bad.parent / "snapshots"
    files = checkpoint_files(shards=2, size=6 * MIB)
    hub.commit(files)
    right = cachecheck.sums(files)
    refused = mx("prefetch", hub.uri, env=hub.env | fault_env(bad, **faults)).exits(code)
    assert "Traceback" not in refused.err
    assert "a bug" not in refused.err
    assert not {row[0] for row in _weights(mx, right)}
    result = mx("prefetch", hub.uri, env=hub.env).ok()
    assert tree(Path(result.out.strip())) == right
    cachecheck.check_clean(mx.cache)


@capability("gcc")
def test_a_claim_without_room_leaves_no_record(mx: Mx, hub: servers.Hub, fault_env: Faults) -> None:
    """Where links do not exist, the record is written under its name: an empty one would hold the term until the TTL."""
    leases = staging(mx, hub).parent / "lease"
    sha = hub.commit(checkpoint_files(1, MIB))
    full = fault_env(leases, LINK="EPERM", WRITE="ENOSPC", WRITE_AFTER="1")
    mx("prefetch", hub.uri, env=hub.env | full).exits(15)
    assert not list((leases / sha).glob("lead.*"))
    assert "leading term 1" in mx("prefetch", hub.uri, env=hub.env).ok().err


def _weights(mx: Mx, right: dict[str, str]) -> list[tuple[str, str]]:
    """The large files of the new revision that have their final names."""
    found = list(mx.cache.glob("models/*/snapshots/*/model-0*"))
    return [(path.name, right[path.name]) for path in found]


@capability("gcc")
def test_what_the_disk_lost_is_fetched_again(mx: Mx, hub: servers.Hub, fault_env: Faults) -> None:
    """After a failed fsync the page cache still shows the bytes: they are not believed."""
    bad = staging(mx, hub).parent / "snapshots"
    files = checkpoint_files(shards=1, size=3 * MIB)
    hub.commit(files)
    mx("prefetch", hub.uri, env=hub.env | fault_env(bad, FSYNC="EIO")).exits(21)
    hub.reset()
    mx("prefetch", hub.uri, env=hub.env).ok()
    assert hub.bytes_served("model.safetensors") == len(files["model.safetensors"])
