"""What this machine has for moving bytes between peers: packages, GPUs, NIXL's plug-ins, UCX's devices, RDMA."""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from mx_cli.base import units
from mx_cli.base.capability import OK, WARN, Capability, judged
from mx_cli.base.errors import MxError
from mx_cli.transport import nixl_env, ucx_info
from mx_cli.transport.nixl_env import INSTALL, RDMA_DEVICES

PLUGINS = ("UCX", "LIBFABRIC", "GDS_MT", "POSIX")
"""Those that move weights; the others are for stores that mx reads itself."""
NIXL_ROWS = ("nixl", "nixl plug-ins", "ucx")
GPU_ROWS = ("gpus", "gds")
NVIDIA_FS = Path("/proc/driver/nvidia-fs")
_PEER_READS = "peers' memory is read by path socket, over TLS"


def torch() -> Capability:
    """Its version and the CUDA that it was built for, without importing it: that takes seconds."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return Capability("torch", WARN, "missing", f"{INSTALL}: for tensors in Python, and for GPU memory")
    try:
        version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        version = "of unknown version"
    cuda = ""
    try:
        found = re.search(r"^cuda\b[^=]*= '([\d.]+)'", (Path(spec.origin).parent / "version.py").read_text(), re.M)
        cuda = found[1] if found else ""
    except OSError:
        pass
    built = f"for CUDA {cuda}" if cuda else "without CUDA"
    return Capability("torch", OK, f"{version} {built}", facts={"version": version, "cuda": cuda})


def rdma() -> Capability:
    """The ports of RDMA devices, as the kernel sees them."""
    rows = []
    for device in sorted(os.listdir(RDMA_DEVICES)) if RDMA_DEVICES.is_dir() else ():
        for port in sorted(os.listdir(RDMA_DEVICES / device / "ports")):
            state, rate = (_line(RDMA_DEVICES / device / "ports" / port / name) for name in ("state", "rate"))
            rows.append({"device": device, "port": port, "state": state.rpartition(" ")[2], "rate": rate})
    if not rows:
        fix = "between hosts bytes come by path socket; in a container give it /dev/infiniband"
        return Capability("rdma", WARN, "no device", fix, {"ports": []})
    active = [row for row in rows if row["state"] == "ACTIVE"]
    shown = ", ".join(f"{row['device']}:{row['port']} {row['state']} {row['rate']}" for row in rows[:8])
    return judged("rdma", bool(active), shown, "no port is active: look at ibstat", facts={"ports": rows})


def _line(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return "?"


def gpus(arguments: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """GPU_ROWS in order. Blocks for seconds where there are many."""
    found = _gpus()
    yield found.to_json()
    yield _gds(bool(found.facts["gpus"])).to_json()


def _gds(has_gpus: bool) -> Capability:
    """Whether files go straight from the disk into a GPU; which of them do is tried with each."""
    from mx_cli.transport import gds

    why = gds.verdict()
    kernel = NVIDIA_FS.exists()
    facts = {"works": not why, "nvidia_fs": kernel}
    if not has_gpus:
        # Nobody misses it.
        return Capability("gds", OK, f"none ({why})", facts=facts)
    if not why and not kernel:
        fix = "cuFile copies by way of the host where the kernel module nvidia-fs is missing (lsmod)"
        return Capability("gds", WARN, "works, in compatibility mode", fix, facts)
    fix = "files go through locked host memory until then; nvidia-cufile-cu12 or the CUDA toolkit brings libcufile"
    return judged("gds", not why, why or "works", fix, facts=facts)


def _gpus() -> Capability:
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return Capability("gpus", OK, "none (no CUDA driver)", facts={"gpus": []})
    count = ctypes.c_int()
    status = driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count))
    if status:
        fix = "nvidia-smi says more; in a container give it the GPUs (docker run --gpus all)"
        return Capability("gpus", WARN, f"the CUDA driver refuses (error {status})", fix, {"gpus": []})
    found = [_gpu(driver, number) for number in range(count.value)]
    shown = ", ".join(f"{one['name']} {units.size(one['bytes'])}" for one in found[:4])
    more = f", and {len(found) - 4} more" if len(found) > 4 else ""
    return Capability("gpus", OK, shown + more or "none", facts={"gpus": found})


def _gpu(driver: ctypes.CDLL, number: int) -> dict[str, Any]:
    name, size, device = ctypes.create_string_buffer(100), ctypes.c_size_t(), ctypes.c_int()
    driver.cuDeviceGet(ctypes.byref(device), number)
    driver.cuDeviceGetName(name, len(name), device)
    driver.cuDeviceTotalMem_v2(ctypes.byref(size), device)
    return {"name": name.value.decode(errors="replace"), "bytes": size.value}


def nixl(arguments: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """NIXL_ROWS in order. Loads NIXL and starts its plug-ins: 0.7 s, and they may crash."""
    if reason := nixl_env.missing():
        fix = f"{INSTALL}; without it {_PEER_READS}"
        yield Capability("nixl", WARN, f"missing ({reason})", fix).to_json()
        yield Capability("nixl plug-ins", WARN, "none without nixl", fix).to_json()
        yield Capability("ucx", WARN, "none without nixl", fix).to_json()
        return
    api = nixl_env.load()
    facts = {"version": nixl_env.version(), "build": nixl_env.build()}
    yield Capability("nixl", OK, f"{facts['version']} ({facts['build']})", facts=facts).to_json()
    with nixl_env.environment(nixl_env.loading()):
        yield _plugins(api).to_json()
        yield _ucx().to_json()


def _plugins(api: Any) -> Capability:
    agent = nixl_env.make_bare_agent(api, f"mx-doctor-{os.getpid()}")
    states: dict[str, str] = {}
    for name in PLUGINS:
        try:
            agent.create_backend(name, {})
            states[name] = "works"
        except nixl_env.errors(api) as error:
            states[name] = str(error).removeprefix("NIXL_ERR_").lower().replace("_", " ") or type(error).__name__
    value = ", ".join(f"{name} {state}" for name, state in states.items())
    fix = f"UCX_LOG_LEVEL=info NIXL_LOG_LEVEL=INFO shows what they say; until then {_PEER_READS}"
    return judged("nixl plug-ins", states["UCX"] == "works", value, fix, facts=states)


def _ucx() -> Capability:
    libraries = nixl_env.ucx_libraries()
    if libraries is None:
        return Capability("ucx", WARN, "not inside NIXL's package", f"{INSTALL} brings it; until then {_PEER_READS}")
    try:
        version, found = ucx_info.version(libraries), ucx_info.resources(libraries)
    except MxError as error:
        return Capability("ucx", WARN, error.what, f"until then {_PEER_READS}")
    near = any(one.startswith("cma/") for one in found)
    fix = "cma is not there: processes of this host cannot read each other's memory (ptrace_scope, seccomp)"
    facts = {"version": version, "resources": found}
    return judged("ucx", near, f"{version}: {', '.join(found)}", fix, facts=facts)
