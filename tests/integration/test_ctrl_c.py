"""Ctrl-C in Python: whoever is silent, the caller has his prompt back at once, and no thread keeps the process alive."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from mx_cli.base.cancel import Stop
from mx_cli.base.errors import Interrupted, UsageError
from mx_cli.engine.together import side_by_side
from tests.support import ROOT, capability

LONG = "600s"
READ = f"""
import sys
import mx_cli
how, place, token = sys.argv[1:]
settings = dict(connect_timeout="{LONG}", stall_timeout="{LONG}", peer_stall_timeout="{LONG}", retry_for="{LONG}")
try:
    if how == "pull":
        mx_cli.pull("mx1c-" + "0" * 32, peers=[place], routes=["peer"], peer_token_file=token, **settings)
    elif how == "load":
        mx_cli.load(f"http://{{place}}/model.safetensors", **settings)
    else:
        next(mx_cli.stream(f"http://{{place}}/model.safetensors", **settings))
except KeyboardInterrupt:
    print("heard", flush=True)
"""


@pytest.fixture
def silent() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server


@capability("torch")
@pytest.mark.parametrize("how", ["pull", "load", "stream"])
def test_whoever_is_silent_holds_nobody_up(how: str, silent: socket.socket, tmp_path: Path) -> None:
    env = {**os.environ, "HOME": str(tmp_path), "MX_CACHE_DIR": str(tmp_path), "XDG_RUNTIME_DIR": str(tmp_path)}
    token = tmp_path / "token"
    token.write_text("a-secret-for-the-tests-of-ctrl-c-0123456789\n")
    token.chmod(0o600)
    place = f"127.0.0.1:{silent.getsockname()[1]}"
    process = subprocess.Popen(
        [sys.executable, "-c", READ, how, place, str(token)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=env,
    )
    try:
        silent.settimeout(60)
        connection, _ = silent.accept()
        with connection:
            # It has said something, and waits for the answer.
            assert connection.recv(1)
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 0, err
    assert out == "heard\n"


# --- side by side -----------------------------------------------------------------------------------------------------


def test_results_are_in_order() -> None:
    first = threading.Event()

    def call(thing: int) -> int:
        if thing == 0:
            assert first.wait(60)
        first.set()
        return thing * 2

    assert side_by_side(call, range(20), 3, Stop()) == [2 * thing for thing in range(20)]
    assert side_by_side(call, [], 3, Stop()) == []


def test_the_first_error_comes_when_the_others_have_ended() -> None:
    ended: list[int] = []
    both = threading.Barrier(2)

    def call(thing: int) -> None:
        if thing < 2:
            both.wait(60)
        if thing == 1:
            raise UsageError("wrong")
        ended.append(thing)

    with pytest.raises(UsageError, match="wrong"):
        side_by_side(call, range(100), 2, Stop())
    assert 0 in ended
    assert len(ended) < 100


def test_a_stop_comes_at_once() -> None:
    stop, never, begun = Stop(), threading.Event(), threading.Event()

    def call(thing: int) -> None:
        begun.set()
        never.wait(60)

    def request() -> None:
        assert begun.wait(60)
        stop.request(Interrupted(signal.SIGTERM))

    threading.Thread(target=request).start()
    with pytest.raises(Interrupted):
        side_by_side(call, range(5), 2, stop)
    never.set()
