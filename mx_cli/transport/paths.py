"""The two paths of a peer's bytes: `nixl-read`, out of its memory, and `socket`, over TLS."""

from __future__ import annotations

import base64
import mmap
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from mx_cli.base.errors import IntegrityError, StillLanding, TransportFailed
from mx_cli.engine.buffers import Pool, at_address, never_free, scatter
from mx_cli.engine.ports import Memory, ReadItem, Stream
from mx_cli.engine.threads import Flight
from mx_cli.model.holding import HOST, Extent, Extents
from mx_cli.transport.inside import Inside
from mx_cli.transport.peer import ITEM

if TYPE_CHECKING:
    from mx_cli.transport.nixl import Agent, Probe, Read

PROBE = 1 << 20
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

    def __init__(self, opens: Opens, window: int) -> None:
        self.window = window
        self._opens = opens
        self._inside = Inside()
        self._buffers = ReadBuffers(window)

    def bring(self, item: ReadItem, dest: Memory, flight: Flight) -> None:
        """Into place directly where the item is one run of host memory, else through a buffer."""
        assert item.length is not None
        begin, end = dest.parts[0][0], dest.parts[-1][0] + dest.parts[-1][1]
        stream = self._opens(item.entry.path, item.offset + begin, end - begin)
        flight.attach(stream)
        try:
            with self._inside.entered(item.entry.path):
                if len(dest.parts) == 1 and dest.put is None:
                    self._fill(stream, at_address(dest.parts[0][2], end - begin), item, flight)
                else:
                    self._scatter(stream, item, dest, flight)
        finally:
            stream.close()

    def _scatter(self, stream: Stream, item: ReadItem, dest: Memory, flight: Flight) -> None:
        begin, end = dest.parts[0][0], dest.parts[-1][0] + dest.parts[-1][1]
        address = self.buffer()
        try:
            view = at_address(address, end - begin)
            self._fill(stream, view, item, flight)
            scatter(dest, begin, view)
        finally:
            self.give_back(address)

    def _fill(self, stream: Stream, view: memoryview, item: ReadItem, flight: Flight) -> None:
        filled = 0
        while filled < len(view):
            count = stream.read_into(view[filled:])
            if count == 0:
                raise TransportFailed(f"{item.entry.path}: the peer's answer ended {len(view) - filled} bytes early")
            filled += count
            flight.moved += count

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
    device). One agent has `window` reads on their way at once; where the kernel copies (`use_lanes`) each has one.
    """

    name = "nixl-read"

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

    def use_lanes(self, agents: Sequence[Agent]) -> None:
        """From now on each agent, the first one and these, makes one read at a time: before the first `bring`.

        Within one host the kernel copies in `post`: two copies of one agent would wait for each other, those of two use two
        cores. Each costs as much as the first one. They only save time: from the first that cannot be had on, none is used.
        """
        self._idle = queue.SimpleQueue()
        self._idle.put(self._agents[0])
        for count, agent in enumerate(agents, 2):
            try:
                self._connect(agent)
            except TransportFailed:
                return
            self._idle.put(agent)
            # A thread more would only keep the cores from those that copy and verify.
            self.window = count

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

    def bring(self, item: ReadItem, dest: Memory, flight: Flight) -> None:
        with self._inside.entered(item.entry.path):
            for devices, local, remote in self._runs(item, dest):
                agent = self._idle.get()
                try:
                    if flight.aborted or self._inside.closed:
                        raise TransportFailed(f"{item.entry.path}: given up")
                    self._move(agent.read(self._peer, local, remote, devices), item, flight)
                finally:
                    self._idle.put(agent)
                flight.moved += int(local[:, 1].sum())

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

    def _move(self, read: Read, item: ReadItem, flight: Flight) -> None:
        try:
            read.post()
            pause = 0.0001
            while not read.done():
                if flight.aborted or self._inside.closed:
                    # It may land until the agent is gone: no buffer is used again until then.
                    self._given_up = True
                    raise TransportFailed(f"{item.entry.path}: given up")
                time.sleep(pause)
                pause = min(LONGEST_PAUSE, pause * 1.5)
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
