"""A peer as a Source: pieces of its files come by one of two paths, and are verified block by block as they land."""

from __future__ import annotations

import operator
import threading
from collections.abc import Callable, Sequence
from typing import Protocol

import xxhash

from mx_cli.base.errors import IntegrityError, MxError, NotFound, StillLanding, TransportFailed
from mx_cli.base.oserrors import explain
from mx_cli.engine.buffers import at_address, write_at
from mx_cli.engine.ports import Block, Done, File, Host, Memory, ReadItem, SourceCaps, Through
from mx_cli.engine.threads import Flight, Threads
from mx_cli.model.holding import HOST, Check, Extent, Holding
from mx_cli.model.manifest import BLOCK
from mx_cli.transport.inside import Inside

ITEM = 2 * BLOCK
"""Bytes of a read: at 16 MiB the rate of verified bytes drops, at 4 the work for each read shows."""
LEAVE = 30.0
"""Seconds for what has come to a source that is closed: a disk may hold up the thread that writes it."""


class Path(Protocol):
    """How a peer's bytes travel. Thread-safe."""

    name: str
    window: int

    def bring(self, item: ReadItem, dest: Memory, flight: Flight) -> None:
        """Fill the parts of `dest`. Blocks. Raises MxError; gives up soon when the flight is aborted."""

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
        self._caps = SourceCaps(path.window, ITEM, name, holding.blocks)
        self._files = frozenset(record.path for record in holding.manifest.files)
        self._closing = threading.Lock()
        # What has come by the path is looked at where it lies, or is on its way from a buffer to a file.
        self._landing = Inside()
        self._closed = False

    @property
    def caps(self) -> SourceCaps:
        return self._caps

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
            self._path.bring(item, dest, flight)
            with self._landing.entered(item.entry.path):
                if dest.device == HOST:
                    self._verify(item, dest)
                else:
                    self._verify_on_gpu(item, dest)
            return (Block(item.offset, item.length, b""),)
        return tuple(
            block
            for at in range(0, item.length, ITEM)
            for block in self._through_buffer(flight, dest, at, min(ITEM, item.length - at))
        )

    def _through_buffer(self, flight: Flight, dest: File | Host | Through, at: int, length: int) -> tuple[Block, ...]:
        """One buffer's worth of an item, from its byte `at`: a path reads into memory that it has opened for it."""
        item = ReadItem(flight.item.entry, flight.item.offset + at, length)
        address = self._path.buffer()
        try:
            memory = Memory(((0, length, address),))
            self._path.bring(item, memory, flight)
            with self._landing.entered(item.entry.path):
                self._verify(item, memory)
                view = at_address(address, length)
                _place(dest, at, view)
                return (Block(item.offset, length, b""),) if isinstance(dest, Through) else _blocks(item, view)
        finally:
            self._path.give_back(address)

    def _verify(self, item: ReadItem, memory: Memory) -> None:
        """Compare every block that lies whole in the item with the digest that the peer published."""
        assert item.end is not None
        checks = self._holding.checks_within(item.entry.path, item.offset, item.end)
        checks, whole, begins, ends = _covered(checks, item, memory)
        # Maps instead of a loop: of small tensors there are tens of thousands.
        found = list(map(xxhash.xxh3_128_hexdigest, map(whole.__getitem__, map(slice, begins, ends))))
        if found != [check.expected for check in checks]:
            raise next(
                self._wrong(check, one) for check, one in zip(checks, found, strict=True) if one != check.expected
            )

    def _verify_on_gpu(self, item: ReadItem, dest: Memory) -> None:
        """The same for what has landed in a GPU's memory: a copy of it is what the digests are taken of."""
        from mx_cli.transport.on_gpu import copy_out

        copy = copy_out(dest.device)
        buffer = self._path.buffer()
        try:
            for offset, length, address in dest.parts:
                found = Extent(item.entry.path, item.offset + offset, length, address, dest.device)
                copy(found, at_address(buffer + offset, length))
            self._verify(item, Memory(tuple((offset, length, buffer + offset) for offset, length, _ in dest.parts)))
        finally:
            self._path.give_back(buffer)

    def _wrong(self, check: Check, found: str) -> IntegrityError:
        where = f"tensor {check.tensor}, block {check.block}"
        return IntegrityError(
            f"wrong bytes from {self.name} ({where}: expected {check.expected}, observed {found})",
            hint="they changed after they were hashed: a peer has to serve them anew, mx cache verify looks through a cache",
        )


def _covered(
    checks: Sequence[Check], item: ReadItem, memory: Memory
) -> tuple[Sequence[Check], memoryview, Sequence[int], Sequence[int]]:
    """The checks whose bytes lie whole in one part, a view of all parts with what lies between, and where they are in it."""
    base = min((address for _, _, address in memory.parts), default=0)
    top = max((address + length for _, length, address in memory.parts), default=0)
    # Only what has a check is touched: a view of each part would cost more than the digest of a small block.
    whole = at_address(base, top - base)
    if len(checks) == len(memory.parts):
        offsets, lengths, addresses = zip(*memory.parts, strict=True) if checks else ((), (), ())
        alike = all(map(operator.eq, offsets, (check.offset - item.offset for check in checks)))
        if alike and all(map(operator.eq, lengths, (check.length for check in checks))):
            begins = [address - base for address in addresses]
            return checks, whole, begins, list(map(operator.add, begins, lengths))
    if len(memory.parts) == 1 and (memory.parts[0][0], memory.parts[0][1]) == (0, item.length):
        begins = [check[0] - item.offset for check in checks]
        return checks, whole, begins, [begin + check[1] for begin, check in zip(begins, checks, strict=True)]
    found: list[Check] = []
    begins, ends = [], []
    at, count = 0, len(checks)
    for offset, length, address in memory.parts:
        start = item.offset + offset
        end, shift = start + length, address - start - base
        while at < count and checks[at].offset < end:
            check = checks[at]
            at += 1
            last = check.offset + check.length
            if check.offset >= start and last <= end:
                found.append(check)
                begins.append(check.offset + shift)
                ends.append(last + shift)
    return found, whole, begins, ends


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
