"""A peer as a Source: pieces of its files come by one of two paths, and are verified block by block as they land."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Protocol

import xxhash

from mx_cli.base.errors import MxError, NotFound, StillLanding, TransportFailed
from mx_cli.base.oserrors import explain
from mx_cli.engine.buffers import at_address, scatter, write_at
from mx_cli.engine.ports import Block, Done, File, Host, Memory, ReadItem, SourceCaps, Through
from mx_cli.engine.threads import Flight, Threads
from mx_cli.model.holding import HOST, Extent, Holding
from mx_cli.model.manifest import BLOCK
from mx_cli.plan.blocks import aligned
from mx_cli.transport.inside import Inside
from mx_cli.transport.verification import Verification

Landed = Callable[[int], None]
"""Is told how many bytes of the parts of a destination are in place, from the first part's first byte on."""


def not_told(count: int) -> None:
    """A Landed for who does not ask."""


ITEM = 2 * BLOCK
"""Bytes of a piece that goes through a buffer, and at least of one that goes straight into host memory."""
MOST = 4 * ITEM
"""Bytes of such a piece at most."""
PIECES = 32
"""Into how many of them a transfer is cut, within those bounds: the last ones of a slow source must not be long."""
LEAVE = 30.0
"""Seconds for what has come to a source that is closed: a disk may hold up the thread that writes it."""


class Path(Protocol):
    """How a peer's bytes travel. Thread-safe."""

    name: str
    window: int
    """Reads at once."""
    ahead: int
    """Reads that wait for their turn, so that none of those threads waits for the engine."""
    least_part: int
    """Bytes of a part from which it is worth a read of its own: smaller ones come together, by way of a buffer."""

    def bring(self, item: ReadItem, dest: Memory, flight: Flight, landed: Landed = not_told) -> None:
        """Fill the parts of `dest`. Blocks. Raises MxError; gives up soon when the flight is aborted.

        Where the parts are filled in order, `landed` may be called on the way; it may raise, which ends the reading.
        """

    def buffer(self) -> int:
        """The address of ITEM bytes of host memory to read into, for bytes that go on to a file."""

    def give_back(self, address: int) -> None:
        """The buffer is free again."""

    def close(self) -> None:
        """The barrier: when it returns, nothing lands anywhere any more. Idempotent. Raises StillLanding when a read does
        not end: what it reads into must not be used again."""


class PeerSource(Threads):
    """One peer, by one path. `failure()` says why the grant is gone, None while it holds.

    A digest that is wrong is an IntegrityError of the item; everything else that goes wrong is the peer's failure.
    """

    def __init__(
        self, name: str, holding: Holding, path: Path, ring: Callable[[], None], failure: Callable[[], MxError | None]
    ) -> None:
        super().__init__(ring)
        self.name = name
        self._holding, self._path, self._failure = holding, path, failure
        self._caps = SourceCaps(path.window + path.ahead, ITEM, name, holding.blocks)
        self._files = frozenset(record.path for record in holding.manifest.files)
        self._closing = threading.Lock()
        # What has come by the path is looked at where it lies, or is on its way from a buffer to a file.
        self._landing = Inside()
        self._closed = False

    @property
    def caps(self) -> SourceCaps:
        return self._caps

    def widen(self, width: int) -> None:
        super().widen(min(width, self._path.window))

    def poll(self, timeout: float) -> list[Done]:
        news = super().poll(timeout)
        failure = self._failure()
        if failure and not news:
            # Whoever waits in a read of a peer that is gone may wait for ever.
            return [Done(item, finished=True, error=failure) for item in list(self._flights)[:1]]
        return news

    def close(self) -> None:
        """Abort all. Raises StillLanding, each time, when something may still land: then its memory must not be used."""
        with self._closing:
            if self._closed:
                return
            super().close()
            self._path.close()
            if not self._landing.close(LEAVE):
                raise StillLanding(
                    f"{self.name}: what has come is still being placed, {LEAVE:g} s after it was given up"
                )
            self._closed = True

    def read(self, flight: Flight) -> Done:
        item = flight.item
        try:
            blocks = self._bring(flight)
            return Done(item, blocks, finished=True, received=item.length or 0)
        except MxError as error:
            return Done(item, finished=True, error=error)
        except OSError as error:
            return Done(item, finished=True, error=explain(error, f"writing {item.entry.path}"))
        except Exception as error:  # noqa: BLE001 - a bug must reach the engine, not end a thread in silence
            failure = TransportFailed(f"reading {item.entry.path}: {type(error).__name__}: {error}")
            failure.__cause__ = error
            return Done(item, finished=True, error=failure)

    def _bring(self, flight: Flight) -> tuple[Block, ...]:
        item, dest = flight.item, flight.dest
        if item.entry.path not in self._files:
            raise NotFound(f"{item.entry.path}: {self.name} does not have it")
        if item.length is None:
            raise TransportFailed(f"{item.entry.path}: a peer's files have a size")
        if item.length == 0:
            return ()
        if isinstance(dest, Memory):
            if dest.device != HOST:
                self._onto_gpu(item, dest, flight)
                return (Block(item.offset, item.length, b""),)
            if not _is_crumbs(dest, item.length, self._path.least_part):
                self._into_place(item, dest, flight)
                return (Block(item.offset, item.length, b""),)
            memory = dest
            dest = Through(lambda offset, view: scatter(memory, offset, view))
        checks = self._holding.packed_within(item.entry.path, item.offset, item.offset + item.length)
        spans = aligned(
            [(item.offset, item.offset + item.length)], [(check.offset, check.end) for check in checks], ITEM
        )
        return tuple(block for start, end in spans for block in self._through_buffer(flight, dest, start, end))

    def _through_buffer(self, flight: Flight, dest: File | Host | Through, start: int, end: int) -> tuple[Block, ...]:
        """One buffer's worth of an item, [start, end) of its file: a path reads into memory that it has opened for it."""
        item, at, length = ReadItem(flight.item.entry, start, end - start), start - flight.item.offset, end - start
        address = self._path.buffer()
        try:
            self._into_place(item, Memory(((0, length, address),)), flight)
            with self._landing.entered(item.entry.path):
                view = at_address(address, length)
                _place(dest, at, view)
                return (Block(item.offset, length, b""),) if isinstance(dest, Through) else _blocks(item, view)
        finally:
            self._path.give_back(address)

    def _into_place(self, item: ReadItem, memory: Memory, flight: Flight) -> None:
        """Into host memory, verified."""
        assert item.length is not None
        verification = Verification(self.name, self._holding, item, memory)
        self._path.bring(item, memory, flight, verification.landed)
        with self._landing.entered(item.entry.path):
            verification.landed(item.length)

    def _onto_gpu(self, item: ReadItem, dest: Memory, flight: Flight) -> None:
        """Into a GPU's memory; the digests are taken of a copy of what has landed there."""
        self._path.bring(item, dest, flight)
        with self._landing.entered(item.entry.path):
            self._verify_on_gpu(item, dest)

    def _verify_on_gpu(self, item: ReadItem, dest: Memory) -> None:
        from mx_cli.transport.on_gpu import copy_out

        copy = copy_out(dest.device)
        buffer = self._path.buffer()
        try:
            for offset, length, address in dest.parts:
                found = Extent(item.entry.path, item.offset + offset, length, address, dest.device)
                copy(found, at_address(buffer + offset, length))
            memory = Memory(tuple((offset, length, buffer + offset) for offset, length, _ in dest.parts))
            Verification(self.name, self._holding, item, memory).landed(item.length or 0)
        finally:
            self._path.give_back(buffer)


def piece_size(size: int) -> int:
    """Bytes of a piece of host memory, for a transfer of `size` bytes."""
    return max(ITEM, min(MOST, size // PIECES // ITEM * ITEM))


def _is_crumbs(dest: Memory, length: int, least: int) -> bool:
    """Whether an item of `length` bytes is wanted whole, in parts that are smaller than `least` on the average."""
    count = len(dest.parts)
    return length < least * count and count > 1 and sum(part[1] for part in dest.parts) == length


def _place(dest: File | Host | Through, at: int, view: memoryview) -> None:
    if isinstance(dest, Through):
        dest.place(at, view)
        return
    if isinstance(dest, Host):
        dest.view[at : at + len(view)] = view
        return
    write_at(dest.fd, view, dest.offset + at)
    if dest.seen:
        dest.seen(dest.offset + at, view)


def _blocks(item: ReadItem, view: memoryview) -> tuple[Block, ...]:
    """The blocks that a journal claims: they end on multiples of BLOCK of the file."""
    found = []
    at = item.offset
    end = item.offset + len(view)
    while at < end:
        cut = min(end, (at // BLOCK + 1) * BLOCK)
        piece = view[at - item.offset : cut - item.offset]
        found.append(Block(at, cut - at, xxhash.xxh3_128_digest(piece)))
        at = cut
    return tuple(found)
