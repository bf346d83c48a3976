"""P-55 sigterm-init: a stopped download ends at once, says how far it came, and the next run goes on from there."""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from mx_cli.base import units
from tests.rig import cachecheck, servers
from tests.support import MIB, Mx, Running, capability, checkpoint_files, tree

FILES = checkpoint_files(shards=2, size=24 * MIB)
WEIGHTS = sum(len(data) for name, data in FILES.items() if name.startswith("model-0"))
PID1 = ("unshare", "--pid", "--fork", "--mount-proc")
Start = Callable[..., Running]


@pytest.fixture
def start(mx: Mx, hub: servers.Hub) -> Start:
    """start(prefix) -> a download that is half done."""

    def begin(prefix: tuple[str, ...] = (), **variables: str) -> Running:
        hub.commit(FILES)
        hub.flags("slow=3000000")
        env = hub.env | {"MX_PROGRESS_EVERY": "0.1s"} | variables
        running = mx.start("prefetch", hub.uri, "--json", env=env, prefix=prefix)
        deadline = time.monotonic() + 40
        while hub.bytes_served("model-0") < 0.3 * WEIGHTS:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        return running

    return begin


def pid_of(running: Running, prefix: tuple[str, ...]) -> int:
    """mx itself, when it is a child of what was started."""
    if not prefix:
        return running.pid
    return int(Path(f"/proc/{running.pid}/task/{running.pid}/children").read_text().split()[0])


def check_stopped(mx: Mx, hub: servers.Hub, running: Running, sent: float, code: int) -> None:
    result = running.wait(20)
    assert time.monotonic() - sent < 4
    assert result.code == code
    assert result.err.splitlines()[-1].startswith("mx: error: stopped by SIG") or "stopped by SIG" in result.err
    cachecheck.check_parts(mx.cache)
    assert cachecheck.parts(mx.cache)
    check_next(mx, hub)


def check_next(mx: Mx, hub: servers.Hub) -> None:
    hub.flags("ok")
    result = mx("prefetch", hub.uri, "--json", env=hub.env | {"MX_TTL": "60s"}, timeout=30).ok().json()
    assert tree(Path(result["dir"])) == cachecheck.sums(FILES)
    assert result["bytes_fetched"] < 0.8 * WEIGHTS
    assert hub.bytes_served("model-0") <= 1.1 * WEIGHTS + 2 * MIB


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGHUP, 129)])
def test_stopped(signum: signal.Signals, code: int, mx: Mx, hub: servers.Hub, start: Start) -> None:
    running = start()
    sent = time.monotonic()
    running.send(signum)
    check_stopped(mx, hub, running, sent, code)


def test_the_last_line_says_what_is_kept(mx: Mx, faultd: servers.Faultd) -> None:
    """Also of the blocks that the stop cut short."""
    running = mx.start("prefetch", faultd.file("slow=300000", 9_000_000, "x"))
    deadline = time.monotonic() + 40
    while faultd.bytes_served("x") < 500_000:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    running.send(signal.SIGTERM)
    *_, last, error = running.wait(20).exits(143).err.splitlines()
    assert error == "mx: error: stopped by SIGTERM"
    [kept] = mx("status", "--json").ok().json()["downloads"]
    assert kept["resumable"] > 0
    assert re.match(rf"transfer +\d+ %  {units.size(kept['resumable'])} of 8\.6 MiB ", last)


def test_a_lost_terminal_does_not_stop_what_nohup_runs(hub: servers.Hub, start: Start) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        running = start()
    finally:
        signal.signal(signal.SIGHUP, before)
    running.send(signal.SIGHUP)
    hub.flags("ok")
    assert running.wait().code == 0


def test_the_last_lines_say_how_far_it_came(mx: Mx, hub: servers.Hub, start: Start) -> None:
    """With few lines of progress too, the one before the error tells it, and as many bytes are kept."""
    running = start(MX_PROGRESS_EVERY="100s")
    running.send(signal.SIGTERM)
    *_, last, error = running.wait(20).exits(143).err.splitlines()
    assert error == "mx: error: stopped by SIGTERM"
    said = re.match(r"transfer +(\d+) %", last)
    assert said
    assert 20 <= int(said[1]) <= 90
    (row,) = mx("status", "--json").ok().json()["downloads"]
    assert row["resumable"] >= int(said[1]) / 100 * WEIGHTS - 5 * MIB


@capability("pidns")
def test_stopped_as_pid_1(mx: Mx, hub: servers.Hub, start: Start) -> None:
    import os

    running = start(PID1)
    sent = time.monotonic()
    os.kill(pid_of(running, PID1), signal.SIGTERM)
    check_stopped(mx, hub, running, sent, 143)


def test_twice_is_at_once(mx: Mx, hub: servers.Hub, start: Start) -> None:
    running = start()
    running.send(signal.SIGINT)
    running.send(signal.SIGINT)
    running.wait(10).exits(130)
    check_next(mx, hub)


# Sends the signal in the midst of the imports, which take longest of all until a command begins.
EARLY = """
import importlib.abc, os, sys
signum = int(sys.argv[1])
class Hook(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name == "typer":
            os.kill(os.getpid(), signum)
sys.meta_path.insert(0, Hook())
from mx_cli.__main__ import main
sys.argv = ["mx", "config"]
main()
"""


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGHUP, 129)])
def test_stopped_before_it_began(signum: signal.Signals, code: int) -> None:
    done = subprocess.run([sys.executable, "-c", EARLY, str(int(signum))], capture_output=True, text=True)
    assert done.returncode == code
    assert done.stderr == f"mx: error: stopped by {signum.name}\n"


@capability("fuse")
def test_stopped_while_names_are_hidden(mx: Mx, hub: servers.Hub, cifuse: Callable[..., Path]) -> None:
    """Waiting for a look-up to see what a listing shows takes up to a minute, but not after a signal."""
    hub.commit(checkpoint_files(shards=1, size=MIB))
    env = hub.env | {"MX_CACHE_DIR": str(cifuse(HIDE="30") / "cache")}
    mx("prefetch", hub.uri, env=env).ok()
    late = mx.start("prefetch", hub.uri, env=env)
    late.wait_err("^cache")
    with pytest.raises(BaseException, match="still runs"):
        late.wait(2)
    late.send(signal.SIGTERM)
    late.wait(5).exits(143)


def test_a_stop_does_not_wait_for_a_server_that_takes_no_connection(mx: Mx) -> None:
    """The kernel goes on with connect(2) after a signal, and so do libraries with their own requests."""
    with socket.socket() as server, socket.socket() as first, socket.socket() as second:
        server.bind(("127.0.0.1", 0))
        server.listen(0)
        port = server.getsockname()[1]
        for taken in (first, second):
            taken.setblocking(False)
            taken.connect_ex(("127.0.0.1", port))
        running = mx.start("prefetch", f"http://127.0.0.1:{port}/x", "--json", env={"MX_CONNECT_TIMEOUT": "20s"})
        running.wait_err("^cache ", 20)
        sent = time.monotonic()
        running.send(signal.SIGTERM)
        result = running.wait(20)
    assert time.monotonic() - sent < 4
    assert result.code == 143
    assert result.json()["error"]["name"] == "interrupted"
    assert result.err.count("stopped by SIGTERM") == 1
