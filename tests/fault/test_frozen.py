"""A leader stopped anywhere, deposed, and woken when its successor has finished: it harms nothing."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.fault.points import RIGHT, Faults, spread
from tests.rig import cachecheck, servers
from tests.support import Mx, Running, capability, tree

pytestmark = capability("gcc")

RENAMES, OTHERS = 10, 10


def depose_and_wake(mx: Mx, origin: servers.Hub, env: dict[str, str], theirs: dict[str, str] | None = None) -> None:
    """The env of the frozen leader, and what of it its successor has too."""
    times = origin.env | {"MX_TTL": "0.6s"}
    frozen = mx.start("prefetch", origin.uri, env=times | env)
    stopped = cachecheck.stops(frozen)
    after = mx("prefetch", origin.uri, env=times | {"MX_BEAT": "0.2s"} | (theirs or {})).ok()
    check_finished(mx, after.out)
    if stopped:
        frozen.send(signal.SIGCONT)
    woken = frozen.wait().ok()
    check_finished(mx, woken.out)
    assert woken.out == after.out


def check_finished(mx: Mx, out: str) -> None:
    assert tree(Path(out.strip())) == RIGHT
    cachecheck.check_names(mx.cache, RIGHT)
    cachecheck.check_manifests(mx.cache)
    cachecheck.check_clean(mx.cache)


@pytest.mark.parametrize(("beat", "faults"), [("0.2s", {}), ("60s", {"LINK": "EPERM"})], ids=["links", "no-links"])
@pytest.mark.parametrize("slot", range(RENAMES))
def test_frozen_before_a_rename(
    slot: int, beat: str, faults: dict[str, str], mx: Mx, origin: servers.Hub, calls: list[list[str]], fault_env: Faults
) -> None:
    renames = [row for row in calls if row[2] == "rename"]
    leading = [n + 1 for n, row in enumerate(renames) if "/refs/" not in row[3] and "/models/" in row[3]]
    env = fault_env(mx.cache, STOP_RENAME=spread(leading, slot, RENAMES), **faults)
    depose_and_wake(mx, origin, env | {"MX_BEAT": beat}, fault_env(mx.cache, **faults))


@pytest.mark.parametrize("slot", range(OTHERS))
def test_frozen_before_another_call(
    slot: int, mx: Mx, origin: servers.Hub, calls: list[list[str]], fault_env: Faults
) -> None:
    first = next(int(row[1]) for row in calls if row[2] == "link")
    others = [int(row[1]) for row in calls if int(row[1]) >= first and row[2] != "rename" and "/used/" not in row[3]]
    depose_and_wake(mx, origin, fault_env(mx.cache, STOP_AT=spread(others, slot, OTHERS)) | {"MX_BEAT": "60s"})


def test_woken_while_its_successor_works(mx: Mx, origin: servers.Hub, fault_env: Faults) -> None:
    """Both write the same bytes at the same places; both end well, and follow whoever leads."""
    origin.flags("slow=6000000")
    try:
        times = origin.env | {"MX_TTL": "1s", "MX_BEAT": "0.2s"}
        frozen = mx.start("prefetch", origin.uri, env=times | {"MX_PROGRESS_EVERY": "0.1s"})
        frozen.wait_err("transfer +[1-9]")
        frozen.send(signal.SIGSTOP)
        second = mx.start("prefetch", origin.uri, env=times)
        second.wait_err("leading term 2")
        frozen.send(signal.SIGCONT)
        ends = [frozen.wait().ok().out, second.wait().ok().out]
    finally:
        origin.flags("ok")
    assert ends[0] == ends[1]
    check_finished(mx, ends[0])


def test_readers_of_a_finished_snapshot_never_see_it_change(mx: Mx, origin: servers.Hub, fault_env: Faults) -> None:
    """Frozen before the manifest: the successor takes over files that have their names; they stay where they are."""
    env = origin.env | {"MX_TTL": "0.6s"}
    frozen = mx.start(
        "prefetch", origin.uri, env=env | fault_env(mx.cache / "models", STOP_RENAME=1000) | {"MX_BEAT": "60s"}
    )
    frozen.wait().ok()
    manifest = next(mx.cache.glob("models/*/manifests/*/*.json"))
    held = manifest.read_bytes()
    manifest.unlink()
    watcher = Watcher(next(mx.cache.glob("models/*/snapshots/*")))
    second: Running = mx.start("prefetch", origin.uri, env=env)
    while second.process.poll() is None:
        watcher.look()
    second.wait().ok()
    assert held
    check_finished(mx, second.stdout)


class Watcher:
    """Sees that large files of a snapshot neither vanish nor shrink."""

    def __init__(self, snapshot: Path) -> None:
        self._sizes = {path: path.stat().st_size for path in snapshot.iterdir()}

    def look(self) -> None:
        for path, size in self._sizes.items():
            assert path.stat().st_size == size
