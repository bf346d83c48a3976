"""NIXL's backends for files: pieces of a file straight into memory, a GPU's (GDS_MT) or the host's (POSIX)."""

from __future__ import annotations

import contextlib
import gc
import threading
import time
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

from mx_cli.base.errors import StillLanding, TransportFailed
from mx_cli.engine.buffers import never_free
from mx_cli.model.holding import HOST
from mx_cli.transport import cuda, nixl_env

GDS, POSIX = "GDS_MT", "POSIX"
SHORTEST_PAUSE, LONGEST_PAUSE = 0.0001, 0.002

T = TypeVar("T")


class FileAgent:
    """An agent with one backend, which reads files into memory of `device` (HOST or a GPU's number).

    Thread-safe: calls into NIXL come one after the other, and reads are waited for outside of them. Files and memory stay
    the caller's, and must stay until `close`.
    """

    def __init__(self, name: str, backend: str, device: int = HOST) -> None:
        """Raises MissingCapability without NIXL, TransportFailed where the backend cannot be made, in NIXL's words."""
        api = nixl_env.load()
        self._name, self._backend, self._device = name, backend, device
        self._errors = nixl_env.errors(api)
        self._lock = threading.Lock()
        self._given_up: list[Any] = []
        self._closed = False
        with nixl_env.environment(nixl_env.loading()):
            self._nixl = nixl_env.make_bare_agent(api, name)
            self._call(f"starting {backend}", lambda nixl: nixl.create_backend(backend, {}))

    def register(self, address: int, length: int) -> None:
        """Open a run of memory to reads. GPUs are read into fastest where a run begins. Raises TransportFailed."""
        row = [(address, length, max(self._device, 0), "")]
        self._call("registering memory", lambda nixl: nixl.register_memory(row, self._memory, backends=[self._backend]))

    def open(self, fd: int, size: int) -> None:
        """Make a file of `size` bytes known by its descriptor. Raises TransportFailed."""
        row = [(0, size, fd, "")]
        self._call("opening a file", lambda nixl: nixl.register_memory(row, "FILE", backends=[self._backend]))

    def read(self, fd: int, at: int, address: int, length: int, given_up: Callable[[], bool]) -> None:
        """Bytes [at, at + length) of an open file to `address`. Blocks. Raises TransportFailed, also when fewer came.

        `given_up` is asked meanwhile: a read that is given up may land until `close` has returned.
        """
        handle = self._call("reading", lambda nixl: self._start(nixl, fd, at, address, length))
        pause = SHORTEST_PAUSE
        try:
            while not self._over(handle):
                if given_up():
                    with self._lock:
                        self._given_up.append(handle)
                    handle = None
                    raise TransportFailed("reading: given up")
                time.sleep(pause)
                pause = min(LONGEST_PAUSE, pause * 1.5)
        finally:
            if handle is not None:
                with self._lock:
                    self._release(handle)

    def close(self, limit: float) -> None:
        """End. Idempotent. Blocks while reads that were given up go on, for `limit` seconds at most.

        Raises StillLanding when one goes on after that: its memory must not be used again, and this agent never ends.
        """
        end = time.monotonic() + limit
        # A backend may read in the call that is to start a read.
        if not self._lock.acquire(timeout=limit):
            self._outlive(limit)
        try:
            self._closed = True
            while self._given_up and self._nixl is not None:
                if self._goes_on(self._given_up[0]):
                    if time.monotonic() > end:
                        self._outlive(limit)
                    time.sleep(LONGEST_PAUSE)
                    continue
                self._release(self._given_up.pop(0))
            if self._nixl is not None:
                # NIXL's wrappers refer to the agent, which ends with the last of them.
                self._nixl.agent = self._nixl = None
                gc.collect()
        finally:
            self._lock.release()

    def _outlive(self, limit: float) -> NoReturn:
        never_free(self)
        raise StillLanding(f"a read by {self._backend} has not ended {limit:g} s after it was given up")

    def _goes_on(self, handle: Any) -> bool:
        try:
            return bool(self._nixl.check_xfer_state(handle) == "PROC")
        except self._errors:
            return False

    @property
    def _memory(self) -> str:
        return "DRAM" if self._device == HOST else "VRAM"

    def _start(self, nixl: Any, fd: int, at: int, address: int, length: int) -> Any:
        here = nixl.get_xfer_descs([(address, length, max(self._device, 0))], self._memory)
        there = nixl.get_xfer_descs([(at, length, fd)], "FILE")
        handle = nixl.initialize_xfer("READ", here, there, self._name, backends=[self._backend])
        if nixl.transfer(handle) == "ERR":
            raise RuntimeError("NIXL says ERR")
        return handle

    def _over(self, handle: Any) -> bool:
        state = self._call("reading", lambda nixl: nixl.check_xfer_state(handle))
        if state == "ERR":
            raise TransportFailed(f"reading: {self._backend} says ERR")
        return bool(state == "DONE")

    def _release(self, handle: Any) -> None:
        with contextlib.suppress(*self._errors):
            handle.release()

    def _call(self, what: str, call: Callable[[Any], T]) -> T:
        """The result of a call into NIXL. Its error goes no further, since its traceback would keep the agent alive."""
        with self._lock:
            if self._closed:
                raise TransportFailed(f"{what}: {self._backend} was closed")
            try:
                with cuda.using(self._device) if self._device != HOST else contextlib.nullcontext():
                    return call(self._nixl)
            except self._errors as error:
                reason = str(error).removeprefix("NIXL_ERR_").lower().replace("_", " ") or type(error).__name__
        raise TransportFailed(f"{what}: {self._backend} says {reason}")
