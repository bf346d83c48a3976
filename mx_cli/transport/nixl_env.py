"""How NIXL and UCX are loaded and set up: which build of them, their environment, their logs, their threads."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib
import importlib.metadata
import importlib.util
import logging
import os
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mx_cli.base.errors import MissingCapability, UsageError
from mx_cli.base.filesystem import may
from mx_cli.transport.nixl_log import Log

INSTALL = "pip install 'mx-cli[peer]'"
RDMA_DEVICES = Path("/sys/class/infiniband")
PROGRESS_DELAY = 10_000
"""Microseconds between two looks of NIXL's progress thread when nothing wakes it: its own 0 burns a core."""

_BUILDS = ("nixl_cu12", "nixl_cu13")
PORTS = re.compile(r"(\d{1,5})-(\d{1,5})", re.ASCII)
_MESSAGE_TRANSPORTS = frozenset({"all", "tcp"})
_RDMA_TRANSPORTS = frozenset({"ib", "rc", "ud", "dc", "rc_v", "rc_x", "rc_verbs", "rc_mlx5", "ud_v", "ud_x", "dc_x"})

_ASK = """
import ctypes, sys
numbers = [ctypes.c_uint() for _ in range(3)]
ctypes.CDLL(sys.argv[1]).ucp_get_version(*map(ctypes.byref, numbers))
print(*[number.value for number in numbers], sep=".")
"""

_SELECTING = ("UCX_NET_DEVICES", "UCX_TCP_PORT_RANGE", "UCX_TLS")
_environment = threading.RLock()
_traced: list[Log] = []
_started = False
_forked = False


def _after_fork() -> None:
    global _forked
    _forked = _started


os.register_at_fork(after_in_child=_after_fork)


@dataclass(frozen=True)
class Network:
    """Which networks the data path may use.

    `interface`: comma-separated names of network interfaces or RDMA devices (`eth0`, `mlx5_0:1`); those that exist here
    are used. `data_ports`: FIRST-LAST, where this process listens for the data path. `loopback`: `lo` alone, whatever
    `interface` says, which must make sense all the same. `tcp_only`: neither shared memory nor RDMA, for a peer with
    another UCX.
    """

    interface: str | None = None
    data_ports: str | None = None
    loopback: bool = False
    tcp_only: bool = False

    def variables(self) -> dict[str, str]:
        """UCX's variables for it. Raises UsageError that names the option at fault."""
        found = {}
        if self.interface is not None:
            found["UCX_NET_DEVICES"] = ",".join(_existing(self.interface))
        if self.loopback:
            found["UCX_NET_DEVICES"] = "lo"
        if self.data_ports is not None:
            found["UCX_TCP_PORT_RANGE"] = _port_range(self.data_ports)
        if self.tcp_only:
            found["UCX_TLS"] = "tcp"
        return found


def _existing(interface: str) -> list[str]:
    wanted = [name.strip() for name in interface.split(",")]
    here = {name for _, name in socket.if_nameindex()}
    if RDMA_DEVICES.is_dir():
        here |= set(os.listdir(RDMA_DEVICES))
    found = [name for name in wanted if name.partition(":")[0] in here]
    if not found:
        raise UsageError(
            f"--interface {interface}: no such network interface on this host",
            hint=f"there are: {', '.join(sorted(here))}",
        )
    return found


def _port_range(data_ports: str) -> str:
    match = PORTS.fullmatch(data_ports)
    if match is None or not 1 <= int(match[1]) <= int(match[2]) <= 65535:
        raise UsageError(
            f"--data-ports {data_ports}: expected FIRST-LAST between 1 and 65535", hint="--data-ports 20000-20100"
        )
    return data_ports


def variables(network: Network, gpu: bool) -> dict[str, str]:
    """What UCX should find in its environment. Raises UsageError, also for a UCX_TLS of the user that cannot work."""
    chosen = os.environ.get("UCX_TLS", "")
    if chosen and not _carries_messages(chosen):
        raise UsageError(f"UCX_TLS={chosen}: peers need the transport tcp", hint="unset UCX_TLS, or add tcp to it")
    found = loading() | network.variables()
    # UCX's own segments of 8 KiB halve the speed, and its own keepalive takes minutes to see a host that is gone.
    found |= {"UCX_TCP_TX_SEG_SIZE": "1M", "UCX_TCP_RX_SEG_SIZE": "1M"}
    found |= {"UCX_TCP_KEEPIDLE": "2s", "UCX_TCP_KEEPINTVL": "1s", "UCX_TCP_KEEPCNT": "3"}
    # Where packets to the peer are dropped, UCX would block in connect() for two minutes.
    found |= {"UCX_TCP_CONN_NB": "y", "UCX_TCP_SYN_CNT": "2"}
    if gpu:
        # GPU memory that no device can read directly would be copied piece by piece, silently; the source may crash of it.
        found["UCX_PROTO_EMULATION_ENABLE"] = "n"
    return found


def loading() -> dict[str, str]:
    """What has to be set when the libraries are loaded."""
    # They would write to stdout, which is for the answer.
    found = {"UCX_LOG_FILE": "stderr", "UCX_LOG_LEVEL": "fatal", "NIXL_LOG_LEVEL": "FATAL"}
    for log in _traced:
        found |= log.variables()
    if not RDMA_DEVICES.is_dir():
        # A library that this module of UCX brings crashes in its destructor at the end of the process.
        found["UCX_MODULES"] = "^ib"
    return found


def _carries_messages(transports: str) -> bool:
    """Whether a UCX_TLS has a transport for messages between processes that may die: shared memory is none."""
    names = {name.strip() for name in transports.removeprefix("^").split(",")}
    if transports.startswith("^"):
        return not names & _MESSAGE_TRANSPORTS
    return bool(names & (_MESSAGE_TRANSPORTS | (_RDMA_TRANSPORTS if RDMA_DEVICES.is_dir() else frozenset())))


@contextlib.contextmanager
def environment(wanted: Mapping[str, str]) -> Iterator[None]:
    """While the block runs, these variables are set, except for those that the user has set; afterwards they are as before.

    UCX reads them when it is loaded and when a context is made. They must reach no program that this process starts.
    """
    with _environment:
        added = {name: value for name, value in wanted.items() if name not in os.environ}
        os.environ.update(added)
        try:
            yield
        finally:
            for name in added:
                os.environ.pop(name, None)


def selecting(wanted: Mapping[str, str]) -> str:
    """Which networks UCX was told to use by these variables: those that the user has set count instead, see `wished`."""
    return ", ".join(f"{name}={wanted[name]}" for name in _SELECTING if name in wanted and name not in os.environ)


def wished() -> str:
    """The user's own choice of networks, for an error that may come of it; "" without one."""
    found = ", ".join(f"{name}={os.environ[name]}" for name in _SELECTING if name in os.environ)
    return f"the environment has {found}" if found else ""


def trace() -> Log | None:
    """UCX's log of this process, in memory instead of on stderr.

    None when UCX was loaded before the first call, or when the user wants to see the log.
    """
    with _environment:
        shown = not {"UCX_LOG_LEVEL", "UCX_LOG_FILE"}.isdisjoint(os.environ)
        if not _traced and not shown and not _ucx_is_loaded():
            _traced.append(Log())
        return _traced[0] if _traced else None


def load() -> Any:
    """NIXL's Python module. Takes 0.3 s the first time. Raises MissingCapability."""
    reason = missing()
    if reason:
        raise MissingCapability(f"NIXL cannot be used: {reason}", hint=INSTALL)
    return _module()


def missing() -> str:
    """Why NIXL cannot be used here; "" when it can be. Takes 0.3 s the first time; does not import torch."""
    if _forked:
        return "UCX was started before this process was forked, and would hang"
    return _missing()


@functools.cache
def _missing() -> str:
    if not any(importlib.util.find_spec(build) for build in _BUILDS):
        return "the package nixl is not installed"
    if not _can_be_written(log := os.environ.get("UCX_LOG_FILE", "")):
        # It would end the process.
        return f"UCX cannot write its log (UCX_LOG_FILE={log})"
    try:
        _module()
    except (ImportError, OSError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _can_be_written(log: str) -> bool:
    """Whether UCX's log can be: `log` is one of its words, or a file, `%p` and the like in its name."""
    if log in ("", "stdout", "stderr"):
        return True
    path = Path(log.removeprefix("file:"))
    if path.exists():
        return not path.is_dir() and may(os.W_OK, path)
    return may(os.W_OK | os.X_OK, path.parent)


@functools.cache
def _module() -> Any:
    """The `_api` module of one build. The package `nixl` itself would import torch to choose between them."""
    logger = logging.getLogger("nixl")
    # While it is imported it writes to stdout what the user's NIXL_LOG_LEVEL did.
    logger.addFilter(_nothing)
    try:
        with environment(loading()):
            module = importlib.import_module(f"{build()}._api")
    finally:
        logger.removeFilter(_nothing)
    if "NIXL_LOG_LEVEL" not in os.environ:
        logger.setLevel(logging.CRITICAL)
    for handler in logger.handlers:
        if isinstance(handler, logging.StreamHandler) and handler.stream is sys.stdout:
            handler.setStream(sys.stderr)
    return module


def _nothing(record: logging.LogRecord) -> bool:
    return False


def build() -> str:
    """The build that the process already uses (two copies of UCX do not go together), else that of torch's CUDA."""
    loaded = [build for build in _BUILDS if f"{build}._api" in sys.modules]
    if loaded:
        return loaded[0]
    cuda = getattr(getattr(sys.modules.get("torch"), "version", None), "cuda", None) or "12"
    wanted = f"nixl_cu{cuda.partition('.')[0]}"
    found = [build for build in sorted(_BUILDS, key=lambda build: build != wanted) if importlib.util.find_spec(build)]
    return found[0]


def make_agent(api: Any, name: str, variables: Mapping[str, str]) -> Any:
    """NIXL's agent with its UCX backend, of the module that `load` gave. Raises one of `errors`."""
    global _started
    _started = True
    bindings = api.nixlBind

    class Config(bindings.nixlAgentConfig):  # type: ignore[misc, name-defined]
        def __setattr__(self, key: str, value: Any) -> None:
            super().__setattr__(key, PROGRESS_DELAY if key == "pthrDelay" else value)

    class Bindings:
        nixlAgentConfig = Config

        def __getattr__(self, key: str) -> Any:
            return getattr(bindings, key)

    with environment(variables):
        # Calls come one at a time, see `Agent`; NIXL before 1.1 leaves it at that.
        modes = getattr(api, "nixl_thread_sync_t", None)
        strict = {"sync_mode": modes.NIXL_THREAD_SYNC_STRICT} if modes else {}
        config = api.nixl_agent_config(backends=[], **strict)
        # NIXL's Python class leaves no choice of the progress thread's delay. Others in this process keep theirs.
        api.nixlBind = Bindings()
        try:
            made = api.nixl_agent(name, config)
        finally:
            api.nixlBind = bindings
        made.create_backend("UCX", {})
    return made


def make_bare_agent(api: Any, name: str) -> Any:
    """An agent without a backend, on which plug-ins can be tried."""
    return api.nixl_agent(name, api.nixl_agent_config(backends=[]))


def ucx_libraries() -> Path | None:
    """The directory of the libraries that NIXL's package brings; None where they are not known."""
    library = _ucx()
    return library.parent if library else None


def errors(api: Any) -> tuple[type[Exception], ...]:
    """What NIXL raises: its errors have nothing in common."""
    found = [value for value in vars(api.nixlBind).values() if isinstance(value, type) and issubclass(value, Exception)]
    return (*found, RuntimeError)


def version() -> str:
    """NIXL's version, "" when it is not installed."""
    for distribution in (*_BUILDS, "nixl"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(distribution)
    return ""


@functools.cache
def ucx_version() -> str:
    """Version of the UCX inside NIXL's package, "" when it is not known: peers with different ones may not fit.

    Takes 0.1 s the first time, in a process of its own: UCX reads its settings when it is loaded.
    """
    library = _ucx()
    if library is None or not sys.executable:
        return ""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("UCX_")}
    command = [sys.executable, "-I", "-S", "-c", _ASK, str(library)]
    try:
        said = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ""
    # UCX writes to stdout too what it cannot do.
    found = re.search(r"^\d+\.\d+\.\d+$", said, re.MULTILINE)
    return found.group() if found else ""


def _ucx() -> Path | None:
    """The library of UCX that NIXL's package brings."""
    if missing():
        return None
    package = Path(_module().__file__).parent
    return next(iter(sorted(package.with_name(f"{package.name}.libs").glob("libucp-*.so*"))), None)


def _ucx_is_loaded() -> bool:
    library = _ucx()
    if library is None:
        return False
    try:
        ctypes.CDLL(str(library), mode=os.RTLD_NOLOAD)
    except OSError:
        return False
    return True
