"""A bug in one of the threads of a peer: the peer ends, loudly, and is no longer found. There are no half-dead ones."""

from __future__ import annotations

import json
import logging
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

import mx_cli
from mx_cli.base.address import split_address
from tests.rig.serving import Hosts, eventually
from tests.support import ROOT, capability, make_checkpoint

BROKEN = """
import os, sys
from {module} import {cls}
from mx_cli.cli.app import main

whole = {cls}.{method}

def broken(self, *args):
    if os.path.exists({trigger!r}):
        raise KeyError("a bug")
    return whole(self, *args)

{cls}.{method} = broken
sys.argv[0] = "mx"
main()
"""


@pytest.mark.parametrize(
    ("module", "cls", "method"),
    [("mx_cli.discovery.beating", "Beating", "_beat"), ("mx_cli.transport.door", "Door", "_sweep")],
    ids=["beats", "lobby"],
)
def test_a_peer_that_breaks_ends(module: str, cls: str, method: str, hosts: Hosts, tmp_path: Path) -> None:
    model, trigger = make_checkpoint(tmp_path / "model", size=1 << 20), tmp_path / "now"
    code = BROKEN.format(module=module, cls=cls, method=method, trigger=str(trigger))
    env = {**os.environ, **hosts.env("a", {"MX_RECORD_BEAT": "200ms"}), "HOME": str(tmp_path)}
    process = subprocess.Popen(
        [sys.executable, "-c", code, "serve", str(model)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=env,
    )
    try:
        assert process.stdout
        address = json.loads(process.stdout.readline())["address"]
        assert [record["address"] for record in hosts.records()] == [address]
        trigger.touch()
        # The lobby sweeps when somebody is there.
        with socket.create_connection(split_address(address)):
            err = process.communicate(timeout=60)[1]
    finally:
        process.kill()
    assert process.returncode == 1, err
    assert "a bug in mx, this peer ends: KeyError" in err
    assert hosts.records() == []


@capability("torch")
def test_a_peer_in_a_process_that_breaks_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """And the process goes on: it computes."""
    import torch

    monkeypatch.setenv("MX_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    with mx_cli.serve({"t": torch.arange(10)}) as handle, caplog.at_level(logging.WARNING, "mx"):
        place = split_address(handle.address)
        socket.create_connection(place).close()
        monkeypatch.setattr("mx_cli.transport.door.Door._advance", lambda *args: {}["a bug"])
        socket.create_connection(place).close()
        eventually(lambda: _refuses(place))
        eventually(lambda: not list((tmp_path / "peers").glob("*.json")))
    assert "a bug in mx, this peer ends: KeyError" in caplog.text


def _refuses(place: tuple[str, int]) -> bool:
    try:
        socket.create_connection(place).close()
    except ConnectionRefusedError:
        return True
    return False
