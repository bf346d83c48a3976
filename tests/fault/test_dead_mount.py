"""A mount that dies under a read: whoever reads gives up, and memory that the kernel may still write to is never freed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.rig.serving import Hosts, eventually
from tests.support import ROOT, capability, make_checkpoint, make_safetensors

pytestmark = [capability("fuse"), capability("torch")]

MIB = 1 << 20
SIZE = 48 * MIB

READ = """
import gc, logging, os, signal, sys, threading, time
import mx_cli, torch

logging.basicConfig(format="%(message)s")
how, path, hung = sys.argv[1:]

def say(text):
    print(text, flush=True)

def mapped():
    # What is advised to be on huge pages: memory of weights.
    found = 0
    with open("/proc/self/smaps") as file:
        for line in file:
            if line.startswith("Size:"):
                size = int(line.split()[1]) << 10
            elif line.startswith("VmFlags:") and "hg" in line.split():
                found += size
    return found

def until_it_hangs():
    while not os.path.exists(hung):
        time.sleep(0.02)

def interrupt():
    until_it_hangs()
    os.kill(os.getpid(), signal.SIGINT)

def load():
    mx_cli.load(path, mapped=False)

def stream():
    for name, tensor in mx_cli.stream(path, memory="128MiB"):
        say("first")

def closed():
    tensors = mx_cli.stream(path, memory="256MiB")
    next(tensors)
    until_it_hangs()
    tensors.close()

before = mapped()
if how != "closed":
    threading.Thread(target=interrupt).start()
try:
    globals()[how]()
    say("done")
except BaseException as error:
    say(f"{type(error).__name__}: {error}")
    error.__traceback__ = error.__context__ = error.__cause__ = None
gc.collect()
say(f"kept {mapped() - before >= SIZE}")
sys.stdin.readline()
say("alive")
os._exit(0)
""".replace("SIZE", str(SIZE))


@pytest.fixture
def dead(cifuse: Callable[..., Path], tmp_path: Path) -> Path:
    """A directory whose file hangs from its tenth MiB on."""
    place = cifuse(HANG=str(10 * MIB))
    tensors = {"a": ("U8", [4 * MIB], None), "t": ("U8", [SIZE], None)}
    make_safetensors(tmp_path / "backing-1" / "model.safetensors", tensors)
    return place


@pytest.mark.parametrize("how", ["load", "stream", "closed"])
def test_memory_outlives_a_read_that_hangs(how: str, dead: Path, tmp_path: Path) -> None:
    """Ctrl-C, or the end of the iterator, comes through; what was to be read stays mapped until the process ends."""
    process = subprocess.Popen(
        [sys.executable, "-c", READ, how, str(dead), str(tmp_path / "backing-1" / ".hung")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "HOME": str(tmp_path), "MX_CACHE_DIR": str(tmp_path / "cache")},
    )
    try:
        assert process.stdout
        assert process.stdin
        lines = []
        for line in process.stdout:
            lines.append(line.strip())
            if line.startswith("kept"):
                break
        # The server is back: the read lands now.
        (tmp_path / "backing-1" / ".go").touch()
        out, err = process.communicate("\n", timeout=30)
        assert lines[-1] == "kept True", lines
        assert "alive" in out
        assert process.returncode == 0
        assert "has not ended" in err
        if how != "closed":
            assert any(line.startswith("KeyboardInterrupt") for line in lines), lines
    finally:
        (tmp_path / "backing-1" / ".go").touch()
        process.send_signal(signal.SIGKILL)
        process.wait()


def test_v_a_dead_directory_of_peers_holds_no_peer_up(
    hosts: Hosts, cifuse: Callable[..., Path], tmp_path: Path
) -> None:
    """It serves with a warning, and is in the directory as soon as that answers."""
    place, backing = cifuse(), tmp_path / "backing-1"
    model = make_checkpoint(tmp_path / "model", size=1 * MIB)
    (backing / ".hang").touch()
    try:
        running = hosts.start("serve", model, "--discovery", f"dir:{place}/peers", env={"MX_RECORD_BEAT": "200ms"})
        ready = json.loads(running.wait_out(r"^\{.*\}$", 60).group())
        running.wait_err("has not answered within 5 s")
        assert not (backing / "peers").exists()
    finally:
        (backing / ".hang").unlink()
    eventually(lambda: (backing / "peers").is_dir() and ready["generation"] in _text(backing / "peers"))
    running.send(signal.SIGTERM)
    running.wait(30).exits(143)
    assert not list((backing / "peers").glob("*.json"))


def _text(directory: Path) -> str:
    return "".join(path.read_text() for path in directory.iterdir())
