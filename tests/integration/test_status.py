"""`mx status`: who leads, how far it is, and one line about why a slow download is slow."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest

from tests.integration.cache_tools import model_dir
from tests.rig.servers import Hub
from tests.support import MIB, Mx, Running, checkpoint_files

FAST = {"MX_PROGRESS_EVERY": "100ms", "MX_PROGRESS": "plain"}


def begin(mx: Mx, hub: Hub, flags: str, size: int = 32 * MIB, **env: str) -> tuple[str, Running]:
    """A slow download that has begun. Without an index: that is read before anybody leads."""
    sha = hub.commit(checkpoint_files(shards=1, size=size, seed="status"))
    hub.flags(flags)
    running = mx.start("prefetch", hub.uri, env={**hub.env, **FAST, **env})
    running.wait_err(r"leading term \d+", timeout=60)
    return sha, running


def status(mx: Mx, wanted: Callable[[dict[str, Any]], bool], timeout: float = 60) -> dict[str, Any]:
    """The only download, as soon as it is as wanted."""
    deadline = time.monotonic() + timeout
    while True:
        found = mx("status", "--json").ok().json()["downloads"]
        if len(found) == 1 and wanted(found[0]):
            row: dict[str, Any] = found[0]
            return row
        assert time.monotonic() < deadline, found


def test_nothing_is_in_progress(mx: Mx, hub: Hub) -> None:
    nothing = mx("status", "--json").ok()
    assert nothing.json() == {"schema": 1, "downloads": []}
    assert f"{mx.cache} is not there" in nothing.err
    assert not mx.cache.exists()
    hub.commit(checkpoint_files())
    mx("prefetch", hub.uri, env=hub.env).ok()
    result = mx("status").ok()
    assert result.out.startswith("MODEL")
    assert len(result.out.splitlines()) == 1


def test_a_leader(mx: Mx, hub: Hub) -> None:
    sha, running = begin(mx, hub, "slow=3000000", MX_NODE_NAME="web-3")
    row = status(mx, lambda row: row["state"] == "leading" and (row["rate"] or 0) > 0 and row["bytes_total"])
    assert (row["uri"], row["revision"], row["term"]) == (hub.uri, sha, 1)
    assert row["leader"] == f"web-3/{running.pid}"
    assert row["phase"] == "transfer"
    assert 0 < row["bytes_done"] < row["bytes_total"]
    assert row["eta"] >= 0
    assert row["alive"] < 5
    text = mx("status").ok().out
    assert re.search(rf"{sha[:12]}\s+web-3/{running.pid}\s+1\s+(leading|silent)", text)


def test_a_throttled_leader(mx: Mx, hub: Hub) -> None:
    _, running = begin(mx, hub, "fail=503:6:30")
    row = status(mx, lambda row: "throttled" in row["why"])
    assert row["state"] == "leading"
    assert row["error"] == "unreachable"
    assert row["retries"] >= 1
    assert "503" in row["why"]
    assert "why: throttled" in mx("status").ok().out
    running.send(signal.SIGTERM)


def test_a_retrying_leader(mx: Mx, hub: Hub) -> None:
    begin(mx, hub, "fail=500:1000")
    row = status(mx, lambda row: row["why"].startswith("retrying"))
    assert row["retries"] >= 1
    assert "500" in row["why"]


def test_a_leader_that_stands_still(mx: Mx, hub: Hub) -> None:
    _, running = begin(mx, hub, "slow=1000000")
    running.send(signal.SIGSTOP)
    running.wait_stopped()
    row = status(mx, lambda row: row["state"] == "silent")
    assert "no sign of life" in row["why"]
    assert row["alive"] > 0.2
    running.send(signal.SIGCONT)
    status(mx, lambda row: row["state"] == "leading")


def test_a_killed_leader(mx: Mx, hub: Hub) -> None:
    _, running = begin(mx, hub, "slow=2000000")
    status(mx, lambda row: row["bytes_done"] > 0)
    running.kill()
    row = status(mx, lambda row: True)
    assert row["state"] == "dead"
    assert "gone" in row["why"]


def test_a_stopped_leader_leaves_what_can_be_resumed(mx: Mx, hub: Hub) -> None:
    _, running = begin(mx, hub, "slow=2000000")
    status(mx, lambda row: row["bytes_done"] > 0)
    running.send(signal.SIGTERM)
    running.wait().exits(143)
    row = status(mx, lambda row: True)
    assert row["state"] == "left"
    assert row["resumable"] > 0
    assert hub.uri in row["why"]
    mx("cache", "gc", "--yes").ok()
    assert mx("status", "--json").ok().json()["downloads"] == []


def test_a_failed_leader(mx: Mx, hub: Hub) -> None:
    hub.commit(checkpoint_files(shards=1, seed="failed"))
    hub.flags("fail=503:1000")
    code = mx("prefetch", hub.uri, env={**hub.env, "MX_RETRY_FOR": "1s"}).code
    assert code == 12
    row = status(mx, lambda row: True)
    assert row["state"] == "failed"
    assert row["error"] == "unreachable"
    assert "503" in row["why"]
    hub.flags("ok")
    mx("prefetch", hub.uri, env=hub.env).ok()
    assert mx("status", "--json").ok().json()["downloads"] == []


@pytest.mark.parametrize("damage", ["garbage", "empty", "gone"])
def test_records_that_cannot_be_read(mx: Mx, hub: Hub, damage: str) -> None:
    _, running = begin(mx, hub, "slow=1000000")
    status(mx, lambda row: bool(row["bytes_total"]))
    running.kill()
    (lease,) = (model_dir(mx.cache) / "lease").iterdir()
    for path in (*lease.glob("note.*"), lease / "lead.1"):
        if damage == "gone" and path.name != "lead.1":
            path.unlink()
        else:
            path.write_text("{" if damage == "garbage" else "")
    row = status(mx, lambda row: True)
    assert row["state"] == "silent"
    assert row["leader"] == "term 1"
