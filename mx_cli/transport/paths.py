"""The two paths of a peer's bytes: `nixl-read`, out of its memory, and `socket`, over TLS."""

from __future__ import annotations

import base64
import contextlib
import itertools
import mmap
import queue
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from mx_cli.base.errors import IntegrityError, StillLanding, TransportFailed
from mx_cli.engine.buffers import STEP, Pool, at_address, never_free, scatter
from mx_cli.engine.ports import Memory, ReadItem, Stream
from mx_cli.engine.threads import Flight
from mx_cli.model.holding import HOST, Extent, Extents
from mx_cli.transport.inside import Inside
from mx_cli.transport.peer import ITEM, Landed, not_told

if TYPE_CHECKING:
    from mx_cli.transport.nixl import Agent, Probe, Read, Rows

PROBE = 1 << 20
HOT = 4 << 20
"""Bytes that are in a core's cache still when they are verified right after they were copied."""
LEAST_WINDOW = 2
"""Reads at once where the kernel copies, also of one agent."""
LEAST_PART = 32 << 10
"""Bytes below which the kernel's work for a run of memory is more than a second copy of it."""
LONGEST_PAUSE = 0.002
LEAVE = 2.0
"""Seconds in which the threads of a path that is closed have to come out of it."""


class Opens(Protocol):
    """Gives the bytes of a piece of a file, in order; over connections of its own, several at once."""

    def __call__(self, file: str, offset: int, length: int) -> Stream: ...


class ReadBuffers:
    """`size` bytes of host memory for each read at once, in one pool that is made when the first is asked for.

    `made` is shown the pool.
    """

    def __init__(self, count: int, size: int = ITEM, made: Callable[[Pool], None] = lambda pool: None) -> None:
        self._made = made
        self._count, self._size = count, -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
        self._lock = threading.Lock()
        self._free: queue.SimpleQueue[int] = queue.SimpleQueue()
        self.pool: Pool | None = None

    def take(self) -> int:
        with self._lock:
            if self.pool is None:
                self.make()
        return self._free.get()

    def make(self) -> Pool:
        self.pool = Pool(self._count * self._size)
        self._made(self.pool)
        for index in range(self._count):
            self._free.put(self.pool.address + index * self._size)
        return self.pool

    def give_back(self, address: int) -> None:
        self._free.put(address)


class Socket:
    """Path `socket`: ranges of the files over `window` TLS connections."""

    name = "socket"
    ahead = 0
    least_part = LEAST_PART

    def __init__(self, opens: Opens, window: int) -> None:
        self.window = window
        self._opens = opens
        self._inside = Inside()
        self._buffers = ReadBuffers(window)

    def bring(self, item: ReadItem, dest: Memory, flight: Flight, landed: Landed = not_told) -> None:
        """Into place directly where that is host memory without gaps, else through a buffer."""
        assert item.length is not None
        begin, end = dest.parts[0][0], dest.parts[-1][0] + dest.parts[-1][1]
        stream = self._opens(item.entry.path, item.offset + begin, end - begin)
        flight.attach(stream)
        try:
            with self._inside.entered(item.entry.path):
                if dest.put is None and sum(length for _, length, _ in dest.parts) == end - begin:
                    count = 0
                    for _, length, address in dest.parts:
                        self._fill(stream, at_address(address, length), item, flight, landed, count)
                        count += length
                else:
                    self._scatter(stream, item, dest, flight)
        finally:
            stream.close()

    def _scatter(self, stream: Stream, item: ReadItem, dest: Memory, flight: Flight) -> None:
        begin, end = dest.parts[0][0], dest.parts[-1][0] + dest.parts[-1][1]
        address = self.buffer()
        try:
            for at in range(begin, end, ITEM):
                view = at_address(address, min(ITEM, end - at))
                self._fill(stream, view, item, flight, not_told, 0)
                scatter(dest, at, view)
        finally:
            self.give_back(address)

    def _fill(
        self, stream: Stream, view: memoryview, item: ReadItem, flight: Flight, landed: Landed, before: int
    ) -> None:
        filled = 0
        while filled < len(view):
            # What has come is verified while it is in the cache.
            count = stream.read_into(view[filled : filled + STEP])
            if count == 0:
                raise TransportFailed(f"{item.entry.path}: the peer's answer ended {len(view) - filled} bytes early")
            filled += count
            flight.moved += count
            landed(before + filled)

    def buffer(self) -> int:
        return self._buffers.take()

    def give_back(self, address: int) -> None:
        self._buffers.give_back(address)

    def close(self) -> None:
        """Aborted streams are closed already: a thread that reads one gets no more than what it has received."""
        if not self._inside.close(LEAVE):
            raise StillLanding(f"path socket does not end (a read has gone on for {LEAVE:g} s)")


class NixlRead:
    """Path `nixl-read`: READs out of the peer's memory, by agents of this path's own.

    Closing destroys the agents, which is the barrier. `regions`: own memory that bytes will land in, (address, length,
    device). One agent has `window` reads on their way at once; where the kernel copies (`use_agents`) each makes one step of a
    read at a time.
    """

    name = "nixl-read"
    ahead = 0
    least_part = LEAST_PART

    def __init__(
        self, agent: Agent, capability: Mapping[str, Any], regions: Sequence[tuple[int, int, int]], window: int
    ):
        """Connects. Blocks for a moment; raises TransportFailed, IntegrityError for extents that make no sense."""
        self.window = window
        self._agents: list[Agent] = []
        self._idle: queue.SimpleQueue[Agent] = queue.SimpleQueue()
        self._peer, self._blob, self._digest = _capability(capability)
        self._extents = Extents(extents_of(capability))
        self._given_up = False
        self._step = ITEM
        self._inside = Inside()
        self._buffers = ReadBuffers(window)
        pool = self._buffers.make()
        self._regions = [(pool.address, pool.size, HOST), *regions]
        self._connect(agent)
        for _ in range(window):
            self._idle.put(agent)

    @property
    def size(self) -> int:
        """The bytes that the peer has."""
        return self._extents.size

    def use_agents(self, agents: Sequence[Agent]) -> None:
        """The kernel copies, within one host: each agent, the first one and these, copies a step at a time from now on.

        Before the first `bring`. The kernel copies in `post`: two copies of one agent would wait for each other, those of two
        use two cores. Each costs as much as the first one. They only save time: from the first that cannot be had on, none
        is used.
        """
        self._step = HOT
        usable = [self._agents[0]]
        with contextlib.suppress(TransportFailed):
            for agent in agents:
                self._connect(agent)
                usable.append(agent)
        # While one read is copied, what another one has brought is verified; more would only keep the cores from both.
        self.window, self.ahead = max(LEAST_WINDOW, len(usable)), 1
        self._idle = queue.SimpleQueue()
        for _, agent in zip(range(self.window), itertools.cycle(usable), strict=False):
            self._idle.put(agent)

    def _connect(self, agent: Agent) -> None:
        self._agents.append(agent)
        agent.register(self._regions)
        agent.connect(self._blob, self._peer, self._digest)

    def probe(self, deadline: float, pause: Callable[[float], None]) -> Probe:
        """Read a little, to see that it works, and how. Blocks for `deadline` seconds. Raises TransportFailed."""
        from mx_cli.transport.nixl import probe, rows

        first = self._extents.largest
        length = min(PROBE, first.length, ITEM)
        address = self.buffer()
        try:
            local, remote = rows([address], [length]), rows([first.address], [length], first.device)
            return probe(
                self._agents[0], self._peer, local, remote, (HOST, first.device), deadline=deadline, pause=pause
            )
        finally:
            self.give_back(address)

    def bring(self, item: ReadItem, dest: Memory, flight: Flight, landed: Landed = not_told) -> None:
        with self._inside.entered(item.entry.path):
            runs = self._runs(item, dest)
            for devices, local, remote in runs:
                agent = self._idle.get()
                try:
                    # Bytes of several devices do not come in the order of the parts.
                    tell = landed if len(runs) == 1 else not_told
                    own, theirs, steps = in_steps(local, remote, self._step)
                    self._move(agent.read(self._peer, own, theirs, devices), steps, item, flight, tell)
                finally:
                    self._idle.put(agent)

    def _runs(self, item: ReadItem, dest: Memory) -> list[tuple[tuple[int, int], Any, Any]]:
        """The runs to copy, (devices, own rows, the peer's rows), one group for each kind of the peer's memory."""
        import numpy as np

        from mx_cli.transport.nixl import rows

        if not dest.parts:
            return []
        parts = np.array(dest.parts, np.uint64)
        first, last = item.offset + int(parts[0, 0]), item.offset + int(parts[-1, 0] + parts[-1, 1])
        extents = self._extents.within(item.entry.path, first, last)
        if len(extents) == 1 and (extents[0].offset, extents[0].end) == (first, last):
            theirs = parts[:, 0] - parts[0, 0] + np.uint64(extents[0].address)
            devices = dest.device, extents[0].device
            return [(devices, rows(parts[:, 2], parts[:, 1], devices[0]), rows(theirs, parts[:, 1], devices[1]))]
        return self._runs_of_each_part(item, dest)

    def _runs_of_each_part(self, item: ReadItem, dest: Memory) -> list[tuple[tuple[int, int], Any, Any]]:
        from mx_cli.transport.nixl import rows

        found: dict[int, tuple[list[int], list[int], list[int]]] = {}
        for offset, length, address in dest.parts:
            for extent in self._extents.cut(item.entry.path, item.offset + offset, item.offset + offset + length):
                own, theirs, lengths = found.setdefault(extent.device, ([], [], []))
                own.append(address + extent.offset - item.offset - offset)
                theirs.append(extent.address)
                lengths.append(extent.length)
        return [
            ((dest.device, device), rows(own, lengths, dest.device), rows(theirs, lengths, device))
            for device, (own, theirs, lengths) in found.items()
        ]

    def _move(self, read: Read, steps: Iterable[Step], item: ReadItem, flight: Flight, landed: Landed) -> None:
        count = 0
        try:
            for first, last, size in steps:
                if flight.aborted or self._inside.closed:
                    raise TransportFailed(f"{item.entry.path}: given up")
                read.post(first, last)
                pause = 0.0001
                while not read.done():
                    if flight.aborted or self._inside.closed:
                        # It may land until the agent is gone: no buffer is used again until then.
                        self._given_up = True
                        raise TransportFailed(f"{item.entry.path}: given up")
                    time.sleep(pause)
                    pause = min(LONGEST_PAUSE, pause * 1.5)
                flight.moved += size
                count += size
                landed(count)
        finally:
            read.release()

    def buffer(self) -> int:
        if self._given_up:
            raise TransportFailed("given up")
        return self._buffers.take()

    def give_back(self, address: int) -> None:
        if not self._given_up:
            self._buffers.give_back(address)

    def close(self) -> None:
        """Raises StillLanding when an agent cannot be destroyed: what its reads land in must not be used again."""
        from mx_cli.transport.nixl import LIMIT

        self._inside.close(LEAVE)
        landing: StillLanding | None = None
        end = time.monotonic() + LIMIT
        for agent in self._agents:
            try:
                agent.destroy(max(0.0, end - time.monotonic()))
            except StillLanding as error:
                landing = error
        if landing:
            never_free(self._buffers)
            raise landing


Step = tuple[int, int, int]
"""Rows [first, last), and their bytes."""


def in_steps(local: Rows, remote: Rows, step: int) -> tuple[Rows, Rows, list[Step]]:
    """The same rows, those that are longer than `step` bytes cut, in groups of `step` bytes or more, but less than twice that;
    the last may have less."""
    import numpy as np

    lengths = local[:, 1].astype(np.int64)
    counts = -(-lengths // step)
    of = np.repeat(np.arange(len(lengths)), counts)
    skipped = (np.arange(len(of)) - np.repeat(np.cumsum(counts) - counts, counts)) * step
    sizes = np.minimum(step, lengths[of] - skipped)
    own, theirs = local[of], remote[of]
    for rows in (own, theirs):
        rows[:, 0] += skipped.astype(np.uint64)
        rows[:, 1] = sizes
    ends = np.cumsum(sizes)
    steps: list[Step] = []
    first = done = 0
    while first < len(of):
        last = min(int(np.searchsorted(ends, done + step)) + 1, len(of))
        steps.append((first, last, int(ends[last - 1]) - done))
        first, done = last, int(ends[last - 1])
    return own, theirs, steps


def _capability(capability: Mapping[str, Any]) -> tuple[str, bytes, str]:
    """(agent's name, its blob, the blob's SHA-256)."""
    try:
        blob = base64.b64decode(capability["blob"], validate=True)
        return str(capability["name"]), blob, str(capability["digest"])
    except (KeyError, TypeError, ValueError) as error:
        raise IntegrityError(f"the peer's way into its memory makes no sense ({error!r})") from None


def extents_of(capability: Mapping[str, Any]) -> list[Extent]:
    """The peer's extents. Raises IntegrityError for what is none."""
    try:
        rows = [Extent(str(f), int(o), int(n), int(a), int(d)) for f, o, n, a, d in capability["extents"]]
    except (KeyError, TypeError, ValueError) as error:
        raise IntegrityError(f"the peer's extents make no sense ({error!r})") from None
    for row in rows:
        if row.offset < 0 or row.length < 0 or not 0 <= row.address < 1 << 64 or row.device < HOST:
            raise IntegrityError(f"the peer's extents make no sense ({row.file}: {row.offset}, {row.length})")
    return rows
