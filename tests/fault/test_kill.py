"""kill -9 anywhere in a run: nothing half-done is ever believed, and the next run ends right."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.fault.points import RIGHT, Faults, spread
from tests.rig import cachecheck, servers
from tests.support import MIB, Mx, Result, capability, tree

pytestmark = capability("gcc")

SLOTS = 33
# Between these calls the state of the disk changes for others; of the many writes a few are enough.
TELLING = ("rename", "link", "fsync", "unlink", "mkdir", "fallocate", "open")


@pytest.fixture(scope="module")
def points(calls: list[list[str]]) -> list[int]:
    """SLOTS numbers for KILL_AT, spread over the calls of a whole run."""
    telling = [int(row[1]) for row in calls if row[2] in TELLING and "/models/" in row[3]]
    writes = [int(row[1]) for row in calls if row[2] in ("write", "pwrite")]
    mine = sorted({*telling, *writes[:: max(1, len(writes) // 12)]})
    return [spread(mine, slot, SLOTS) for slot in range(SLOTS)]


def check_after_kill(mx: Mx, origin: servers.Hub) -> None:
    cachecheck.check_names(mx.cache, RIGHT)
    cachecheck.check_manifests(mx.cache)
    cachecheck.check_parts(mx.cache)
    offline = mx("prefetch", origin.uri, "--offline", env=origin.env)
    if offline.code != 10:
        check_right(offline)


def check_right(result: Result) -> None:
    assert tree(Path(result.ok().out.strip())) == RIGHT


@pytest.mark.parametrize("slot", [slot for slot in range(SLOTS) if slot % 3])
def test_killed_alone(slot: int, mx: Mx, origin: servers.Hub, points: list[int], fault_env: Faults) -> None:
    killed = mx("prefetch", origin.uri, env=origin.env | fault_env(mx.cache, KILL_AT=points[slot]))
    assert killed.code in (-signal.SIGKILL, 0)
    check_after_kill(mx, origin)
    check_right(mx("prefetch", origin.uri, env=origin.env))
    cachecheck.check_clean(mx.cache)


@pytest.mark.parametrize("slot", [slot for slot in range(SLOTS) if slot % 3 == 0])
def test_killed_while_another_waits(
    slot: int, mx: Mx, origin: servers.Hub, points: list[int], fault_env: Faults
) -> None:
    env = origin.env | {"MX_TTL": "30s"}
    leader = mx.start("prefetch", origin.uri, env=env | fault_env(mx.cache, STOP_AT=points[slot]))
    cachecheck.stops(leader)
    check_after_kill(mx, origin)
    follower = mx.start("prefetch", origin.uri, env=env)
    follower.wait_err("^revision")
    leader.kill()
    check_right(follower.wait())
    cachecheck.check_clean(mx.cache)
    check_right(mx("prefetch", origin.uri, "--offline", env=origin.env))


@pytest.mark.parametrize("faults", [{}, {"LINK": "EPERM"}], ids=["links", "no-links"])
def test_ten_kills_leave_one_part(
    faults: dict[str, str], mx: Mx, origin: servers.Hub, points: list[int], fault_env: Faults
) -> None:
    """P-53 orphan-partials."""
    for slot in range(6, 33, 3):
        mx("prefetch", origin.uri, env=origin.env | fault_env(mx.cache, KILL_AT=points[slot], **faults))
        cachecheck.check_parts(mx.cache)
        cachecheck.check_names(mx.cache, RIGHT)
    check_right(mx("prefetch", origin.uri, env=origin.env))
    cachecheck.check_clean(mx.cache)


def test_ten_kills_of_an_origin_without_versions(mx: Mx, start_faultd: Callable[..., servers.Faultd]) -> None:
    """P-53, where nothing can be resumed: the parts of the dead go all the same."""
    server = start_faultd()
    url = server.file("etag=none,slow=8000000", 6 * MIB, "model.bin")
    for _ in range(3):
        running = mx.start("prefetch", url)
        wait_for_part(mx.cache)
        running.kill()
        assert len(cachecheck.parts(mx.cache)) == 1
        origin_part = next(mx.cache.glob("models/*/staging/*/*.part.*"))
        origin_part.touch()
    mx("prefetch", url).ok()
    cachecheck.check_clean(mx.cache)


def wait_for_part(cache: Path) -> None:
    import time

    before = set(cachecheck.parts(cache))
    end = time.monotonic() + 30
    while not set(cachecheck.parts(cache)) - before:
        assert time.monotonic() < end
        time.sleep(0.01)
