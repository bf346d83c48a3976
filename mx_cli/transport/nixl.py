"""NIXL as a transport: one agent registers memory, or reads that of a peer.

A peer's `blob` is a capability: whoever has it can read and write the whole process. It travels over an authenticated
channel only, and never into logs.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import hashlib
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from mx_cli.base.errors import StillLanding, TransportFailed
from mx_cli.model.holding import HOST
from mx_cli.transport import cuda, nixl_env, nixl_log, nixl_needs
from mx_cli.transport.nixl_env import Network, missing, ucx_version, version

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Rows = NDArray[np.uint64]

__all__ = ["Agent", "Network", "Probe", "Read", "leave", "missing", "probe", "rows", "ucx_version", "version"]

BLOB_LIMIT = 64 << 20
LIMIT = 30.0
"""Seconds that `destroy` waits for a call that is still inside NIXL."""
LEAVE = 0.5
"""The same for each agent when the process ends."""
WHY = "UCX_LOG_LEVEL=info NIXL_LOG_LEVEL=INFO shows what UCX says"

_HEAD = b"nixlSerDes|Agent"
_POLL = 0.0005

T = TypeVar("T")
_agents: weakref.WeakSet[Agent] = weakref.WeakSet()


def rows(addresses: Sequence[int] | Rows, lengths: Sequence[int] | Rows, device: int = HOST) -> Rows:
    """Runs of memory as `Agent.read` takes them: (address, length, device) each."""
    import numpy as np

    found = np.zeros((len(addresses), 3), np.uint64)
    found[:, 0] = addresses
    found[:, 1] = lengths
    found[:, 2] = max(device, 0)
    return found


class Agent:
    """A source (`register`, `blob`) or a reader (`register`, `connect`, `read`) of peers' memory.

    `name` is unique per life of the process: NIXL refuses a restarted peer of the same name. `gpu`: GPU memory takes part at
    either end; such reads fail rather than fall back to a copy by software. `trace`: UCX's log goes to memory, so that
    `probe` can name the path and errors their cause; the first agent of a process decides that for all.

    NIXL is loaded and the network opened by the first call that needs them (up to 0.5 s): MissingCapability when NIXL
    is not here, TransportFailed when UCX finds no network, UsageError for a wrong `network`.

    Any thread may call any method; calls go into NIXL one after the other, so one that blocks holds up the others. After
    `destroy` all but `destroy` raise TransportFailed.
    """

    def __init__(self, name: str, network: Network | None = None, *, gpu: bool = False, trace: bool = False) -> None:
        self.name = name
        self._gpu = gpu
        self._device = HOST
        self._log = nixl_env.trace() if trace else None
        self._opened = self._logged = self._log.size if self._log else 0
        self._variables = nixl_env.variables(network or Network(), gpu)
        self._lock = threading.Lock()
        self._nixl: Any = None
        self._errors: tuple[type[Exception], ...] = ()
        self._destroyed = False
        self._held: weakref.ref[Any] | None = None
        self._peers: set[str] = set()
        self._reads: set[Read] = set()
        _agents.add(self)

    def register(self, regions: Sequence[tuple[int, int, int]]) -> None:
        """Open memory to peers or for own reads: (address, length, device). Once, before `blob`; few and large regions.

        NIXL keeps the memory neither alive nor mapped: it must stay until `destroy`. On a GPU the blocks that hold the regions
        are opened, one by one: UCX cannot read across two. Raises TransportFailed, MissingCapability for memory in
        expandable segments.
        """
        host = [(address, length, 0, "") for address, length, device in regions if device == HOST and length]
        if host:
            self._call("registering memory", functools.partial(_register, host, "DRAM"))
        for device in sorted({device for _, _, device in regions} - {HOST}):
            self._refuse_gpu(device)
            self._device = device
            wanted = [(address, length) for address, length, where in regions if where == device]
            cuda.make_context(device)
            cuda.refuse_virtual_regions(address for address, _ in wanted)
            blocks = cuda.blocks_of(wanted)
            table = [(block.address, block.length, device, "") for block in blocks]
            self._call("registering GPU memory", functools.partial(_register, table, "VRAM"))

    def blob(self) -> bytes:
        """What a reader needs to connect, as of now: a capability for all memory of this process."""
        return bytes(self._call("describing its memory", lambda nixl: nixl.get_agent_metadata()))

    def connect(self, blob: bytes, name: str, digest: str) -> None:
        """Make a peer known: `digest` (hex SHA-256 of the blob) and `name` come from its control channel.

        Blocks for up to 0.1 s; an unreachable or frozen peer may show in a read only. Whatever was connected under this
        name is disconnected. Raises TransportFailed.
        """
        _check(blob, name, digest)
        self.disconnect(name)
        self._peers.add(name)
        added = self._call(f"connecting to {name}", lambda nixl: nixl.add_remote_agent(blob))
        added = added.decode(errors="replace") if isinstance(added, bytes) else str(added)
        if added != name:
            self._peers.add(added)
            self.disconnect(added)
            raise TransportFailed(f"the peer's blob is another peer's (name: expected {name}, found {added})")

    def disconnect(self, name: str) -> None:
        """Forget a peer; its reads fail, or land all the same. To read from it again, connect anew. Idempotent."""
        with self._lock:
            self._forget(name)

    def _forget(self, name: str) -> None:
        if name in self._peers and self._nixl is not None:
            self._peers.discard(name)
            with contextlib.suppress(*self._errors):
                self._nixl.remove_remote_agent(name)

    def read(self, name: str, local: Rows, remote: Rows, devices: tuple[int, int] = (HOST, HOST)) -> Read:
        """A READ from the memory `remote` of peer `name` into `local`, row by row; `devices` = (own, the peer's).

        Rows are what `rows` makes; lengths agree pairwise. Rows that are neighbours on both sides become one operation.
        Nothing moves before `post`. Raises TransportFailed: the peer is not connected, memory is not registered.
        """
        for device in devices:
            if device != HOST:
                self._refuse_gpu(device)
        made = Read(self, f"reading from {name}", devices[0])
        kinds = _kind(devices[0] != HOST), _kind(devices[1] != HOST)
        self._call(made.what, lambda nixl: made._prepare(nixl, name, (local, remote), kinds))
        return made

    def destroy(self, limit: float = LIMIT) -> None:
        """Disconnect from all peers and free everything. Afterwards nothing lands in registered memory any more.

        It is the only way to end a read that is under way (20 ms). Idempotent. Raises StillLanding when the agent cannot
        be destroyed, since another thread has been inside NIXL for `limit` s: then the memory must not be used again.
        """
        if not self._lock.acquire(timeout=limit):
            raise StillLanding(f"NIXL agent {self.name} does not end (a call has been blocked for {limit:g} s)")
        try:
            self._destroyed = True
            if self._nixl is None:
                self._check_gone()
                return
            for read in list(self._reads):
                read._free(self._errors)
            for name in list(self._peers):
                self._forget(name)
            # A traceback somewhere may still hold NIXL's wrapper.
            self._held = weakref.ref(self._nixl.agent)
            self._nixl.agent = self._nixl = None
            self._check_gone()
        finally:
            self._lock.release()

    def _check_gone(self) -> None:
        if self._held is not None and self._held() is not None:
            gc.collect()
            if self._held() is not None:
                raise StillLanding(f"NIXL agent {self.name} does not end (something still refers to it)")

    def _call(self, what: str, call: Callable[[Any], T]) -> T:
        """The result of a call into NIXL. Its error goes no further, since its traceback would keep the agent alive."""
        with self._lock:
            if self._destroyed:
                raise TransportFailed(f"{what}: NIXL agent {self.name} was destroyed")
            if self._nixl is None:
                self._open()
            try:
                with self._context():
                    return call(self._nixl)
            except self._errors as error:
                reason = self._explain(error)
        raise TransportFailed(f"{what}: {reason}", hint=WHY)

    def _explain(self, error: Exception) -> str:
        """NIXL's error in words, with what UCX has logged since the last one."""
        said = self._log.since(self._logged) if self._log else ""
        self._logged = self._log.size if self._log else 0
        return ", ".join(filter(None, (type(error).__name__, str(error), nixl_log.reason(said), nixl_env.wished())))

    def path(self, size: int) -> str:
        """How the newest reads of `size` bytes travel, in UCX's words (`cma/memory`, `tcp/eth0 (software emulation)`).

        "" when it is not known: nothing was read, or the agent was made without `trace`.
        """
        return nixl_log.path_of_reads(self._log.since(self._opened), size) if self._log else ""

    def _context(self) -> contextlib.AbstractContextManager[Any]:
        return cuda.using(self._device) if self._device != HOST else contextlib.nullcontext()

    def _open(self) -> None:
        api = nixl_env.load()
        self._errors = nixl_env.errors(api)
        nixl_needs.check(self._variables)
        if self._gpu:
            # UCX looks for GPUs when it starts, and finds those with a context.
            cuda.make_context(self._device if self._device != HOST else None)
        try:
            with self._context():
                self._nixl = nixl_env.make_agent(api, self.name, self._variables)
            return
        except self._errors as error:
            reason = self._explain(error)
        chosen = nixl_env.selecting(self._variables) or "no usable network"
        raise TransportFailed(f"UCX cannot be started ({chosen}): {reason}", hint=WHY)

    def _refuse_gpu(self, device: int) -> None:
        if not self._gpu:
            raise TransportFailed(f"NIXL agent {self.name} was made for host memory only (device: {device})")


class Read:
    """A READ, made by `Agent.read`: of all its rows, or of some after others. Any thread may call its methods.

    `post`; `done` until it says True or raises; then perhaps `post` again; `release` always. While what was posted is neither
    done nor failed its bytes may land, also after `release`: NIXL cannot cancel, only `Agent.destroy` ends it.
    """

    def __init__(self, agent: Agent, what: str, device: int) -> None:
        self.what = what
        self._agent = agent
        self._device = device
        self._handle: Any = None
        self._lists: list[Any] = []
        self._rows = 0
        self._landed = False

    def post(self, first: int = 0, last: int | None = None) -> None:
        """Start with rows [first, last). Within one host the kernel copies before this returns (0.1 s per GB), without the GIL.

        Raises TransportFailed.
        """
        self._landed = self._state(lambda nixl: self._start(nixl, first, self._rows if last is None else last))

    def done(self) -> bool:
        """Whether all posted bytes are in place, on a GPU for every stream. Does not block otherwise. Raises TransportFailed."""
        if not self._landed:
            self._landed = self._state(lambda nixl: nixl.check_xfer_state(self._handle))
            if self._landed and self._device != HOST:
                cuda.synchronize(self._device)
        return self._landed

    def release(self) -> None:
        """Give back what NIXL keeps for it. Idempotent."""
        with self._agent._lock:
            self._free(self._agent._errors)

    def _state(self, call: Callable[[Any], str]) -> bool:
        state = self._agent._call(self.what, call)
        if state == "ERR":
            raise TransportFailed(f"{self.what}: NIXL says ERR", hint=WHY)
        return state == "DONE"

    def _prepare(self, nixl: Any, name: str, sides: tuple[Rows, Rows], kinds: tuple[str, str]) -> None:
        # Only prepared lists are merged where rows are neighbours.
        self._agent._reads.add(self)
        self._lists.append(nixl.prep_xfer_dlist("", sides[0], kinds[0]))
        self._lists.append(nixl.prep_xfer_dlist(name, sides[1], kinds[1]))
        self._rows = len(sides[0])

    def _start(self, nixl: Any, first: int, last: int) -> str:
        import numpy as np

        if self._handle is not None:
            _give_back(self._handle)
            self._handle = None
        rows = np.arange(first, last, dtype=np.int32)
        self._handle = nixl.make_prepped_xfer("READ", self._lists[0], rows, self._lists[1], rows)
        return str(nixl.transfer(self._handle))

    def _free(self, errors: tuple[type[Exception], ...]) -> None:
        """The agent's lock is held."""
        for handle in filter(None, (self._handle, *self._lists)):
            with contextlib.suppress(*errors):
                _give_back(handle)
        self._handle = None
        self._lists.clear()
        self._agent._reads.discard(self)


def _give_back(handle: Any) -> None:
    """NIXL's own handles refer to the agent, and it must not outlive `destroy`."""
    try:
        handle.release()
    finally:
        handle._agent = None
        handle._released = True


@dataclass(frozen=True)
class Probe:
    """A READ that worked. `path`: see `Agent.path`."""

    seconds: float
    bytes_per_second: float
    path: str

    @property
    def emulated(self) -> bool:
        """The source's CPU sends the bytes as messages: over TCP, always."""
        return "software emulation" in self.path

    @property
    def copied_by_kernel(self) -> bool:
        """Within one host: `post` copies, and returns when all is there."""
        return nixl_log.is_kernel_copy(self.path)

    @property
    def rdma(self) -> bool:
        """A network card reads the source's memory."""
        return nixl_log.is_rdma(self.path)


def probe(
    agent: Agent,
    name: str,
    local: Rows,
    remote: Rows,
    devices: tuple[int, int] = (HOST, HOST),
    *,
    deadline: float,
    pause: Callable[[float], None] = time.sleep,
) -> Probe:
    """Try the path to a connected peer: two READs, the first of which opens it, the second is timed.

    Blocks for `deadline` seconds at most. Raises TransportFailed when nothing came by then (a frozen peer, a network that
    swallows packets): then the agent must be destroyed before `local` is used. `pause` waits, and may raise.
    """
    end = time.monotonic() + deadline
    for _ in range(2):
        read = agent.read(name, local, remote, devices)
        started = time.perf_counter()
        read.post()
        while not read.done():
            if time.monotonic() > end:
                raise TransportFailed(f"{read.what}: no byte within {deadline:g} s")
            pause(_POLL)
        seconds = time.perf_counter() - started
        read.release()
    size = int(local[:, 1].sum())
    return Probe(seconds, size / seconds, agent.path(size))


def leave() -> None:
    """Destroy every agent of this process: before it ends or becomes another program.

    A reader that just vanishes can leave an RDMA source useless for all later ones. Raises nothing; idempotent.
    """
    for agent in list(_agents):
        with contextlib.suppress(TransportFailed):
            agent.destroy(LEAVE)


def _check(blob: bytes, name: str, digest: str) -> None:
    """NIXL forgets a good peer over a bad blob, so a bad one never gets there."""
    if len(blob) > BLOB_LIMIT:
        raise TransportFailed(f"the blob of {name} is too large (bytes: {len(blob)}, allowed {BLOB_LIMIT})")
    found = hashlib.sha256(blob).hexdigest()
    if found != digest:
        raise TransportFailed(f"the blob of {name} is damaged (SHA-256: expected {digest}, found {found})")
    if not blob.startswith(_HEAD):
        raise TransportFailed(f"the blob of {name} is not NIXL's", hint="both sides need the same version of NIXL")
    length = int.from_bytes(blob[len(_HEAD) : len(_HEAD) + 8], "little")
    inside = blob[len(_HEAD) + 8 :][:length].decode(errors="replace")
    if inside != name:
        raise TransportFailed(f"the peer's blob is another peer's (name: expected {name}, found {inside})")


def _register(table: Sequence[tuple[int, int, int, str]], kind: str, nixl: Any) -> None:
    nixl.register_memory(table, kind)


def _kind(gpu: bool) -> str:
    return "VRAM" if gpu else "DRAM"
