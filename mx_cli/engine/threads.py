"""Makes a Source of what blocks: one thread per item in flight."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable

import xxhash

from mx_cli.base.errors import IntegrityError, MxError, NoSpace, TransportFailed, Unreachable
from mx_cli.base.oserrors import explain
from mx_cli.base.threads import begin
from mx_cli.engine.buffers import STEP, Buffers, Pool, at_address, run_at, scatter, write_at
from mx_cli.engine.ports import (
    Block,
    Dest,
    Done,
    File,
    Host,
    Memory,
    NoRanges,
    Reader,
    ReadItem,
    SourceCaps,
    Stream,
    Through,
)
from mx_cli.model.manifest import BLOCK

TELL_EVERY = 0.25
"""Seconds: on a slow connection a block ends before it is full, so that a kill costs no more than this or LEAST_BLOCK."""
LEAST_BLOCK = 256 << 10
"""Bytes of a block that ends early, unless it takes ten times as long: who takes over reads every claim."""


class Throttle:
    """At most `rate` bytes a second over all threads; a burst of one second is allowed."""

    def __init__(self, rate: int) -> None:
        self._rate = rate
        self._lock = threading.Lock()
        self._next = time.monotonic()
        # Many connections wait for one another: in small steps each moves often enough not to look stalled.
        self.step = max(4096, min(STEP, rate // 64))

    def take(self, count: int) -> None:
        """Block until `count` more bytes may move."""
        with self._lock:
            now = time.monotonic()
            self._next = max(self._next, now - 1.0) + count / self._rate
            wait = self._next - now
        if wait > 0:
            time.sleep(wait)


class Flight:
    """One item on its way."""

    def __init__(self, item: ReadItem, dest: Dest) -> None:
        self.item, self.dest = item, dest
        self.moved = 0
        self.begun = False
        self.aborted = False
        self.stream: Stream | None = None
        self.lock = threading.Lock()

    def attach(self, stream: Stream) -> None:
        with self.lock:
            self.stream = stream
            if self.aborted:
                stream.close()

    def abort(self) -> None:
        with self.lock:
            self.aborted = True
            if self.stream:
                self.stream.close()


class Threads:
    """A Source whose items are each read by a thread that blocks. Subclasses say how: `caps` and `read`.

    Threads are daemons: an exit does not wait for a connection that hangs. `ring` is called when there is news.
    """

    def __init__(self, ring: Callable[[], None] = lambda: None) -> None:
        self._ring = ring
        self._news: queue.SimpleQueue[Done] = queue.SimpleQueue()
        self._work: queue.SimpleQueue[Flight | None] = queue.SimpleQueue()
        self._flights: dict[ReadItem, Flight] = {}
        self._lock = threading.Lock()
        self._width = 1
        self._threads = 0
        self._waiting = 0
        self._busy = 0

    def read(self, flight: Flight) -> Done:
        """Bring the item into its destination. Blocks until it is over; an aborted flight ends soon, with an error."""
        raise NotImplementedError

    def tell(self, done: Done) -> None:
        """Report news of an item. From any thread."""
        self._news.put(done)
        self._ring()

    @property
    def caps(self) -> SourceCaps:
        raise NotImplementedError

    def widen(self, width: int) -> None:
        self._width = width

    def start(self, item: ReadItem, dest: Dest) -> None:
        with self._lock:
            if item in self._flights:
                return
            flight = self._flights[item] = Flight(item, dest)
            self._waiting += 1
            spawn = self._threads < min(self._width, self._busy + self._waiting)
            self._threads += spawn
        if not spawn or self._begin_thread(flight):
            self._work.put(flight)

    def _begin_thread(self, flight: Flight) -> bool:
        """Whether there is a thread for it now. Those that are there do what one that cannot be had would have done."""
        try:
            begin(threading.Thread(target=self._serve, name=f"read-{self._threads}", daemon=True))
        except NoSpace as error:
            with self._lock:
                self._threads -= 1
                if self._threads:
                    return True
                self._waiting -= 1
                del self._flights[flight.item]
            self.tell(Done(flight.item, finished=True, error=error))
            return False
        return True

    def poll(self, timeout: float) -> list[Done]:
        found: list[Done] = []
        try:
            found.append(self._news.get(timeout=timeout))
            while True:
                found.append(self._news.get_nowait())
        except queue.Empty:
            return found

    def moved(self, item: ReadItem) -> int | None:
        flight = self._flights.get(item)
        return flight.moved if flight and flight.begun else None

    def abort(self, item: ReadItem) -> None:
        flight = self._flights.get(item)
        if flight:
            flight.abort()

    def close(self) -> None:
        for flight in list(self._flights.values()):
            flight.abort()
        for _ in range(self._threads):
            self._work.put(None)

    def _serve(self) -> None:
        while (flight := self._work.get()) is not None:
            with self._lock:
                if self._threads > self._width:
                    self._threads -= 1
                    self._work.put(flight)
                    return
                self._waiting -= 1
                self._busy += 1
            flight.begun = True
            done = self.read(flight)
            with self._lock:
                del self._flights[flight.item]
                self._busy -= 1
            self.tell(done)


class Lifted(Threads):
    """The Source made of a Reader, which stays its owner's to close."""

    def __init__(
        self,
        reader: Reader,
        bandwidth: int | None = None,
        ring: Callable[[], None] = lambda: None,
        made: Callable[[Pool], None] | None = None,
    ) -> None:
        """`bandwidth`: bytes a second at most, over all its threads; None for no limit. `made`: see Buffers."""
        super().__init__(ring)
        self._reader = reader
        self._throttle = Throttle(bandwidth) if bandwidth else None
        self._buffers = Buffers(made)

    @property
    def caps(self) -> SourceCaps:
        return self._reader.caps

    def read(self, flight: Flight) -> Done:
        copy = _Copy(flight, self._throttle, lambda block: self.tell(Done(flight.item, (block,))))
        error: MxError | NoRanges | None = None
        buffer: memoryview | None = None
        try:
            buffer = self._buffers.take()
            if flight.item.length != 0 and not flight.aborted:
                stream = self._reader.open(flight.item)
                flight.attach(stream)
                try:
                    copy.run(stream, buffer)
                finally:
                    stream.close()
        except (MxError, NoRanges) as failure:
            error = failure
        except OSError as failure:
            error = explain(failure, f"writing {flight.item.entry.path}")
        except Exception as failure:  # noqa: BLE001 - a bug in a source must reach the engine, not end a thread in silence
            error = TransportFailed(f"reading {flight.item.entry.path}: {type(failure).__name__}: {failure}")
            error.__cause__ = failure
        finally:
            if buffer is not None:
                self._buffers.give(buffer)
        if flight.aborted and error is None and not copy.complete:
            error = Unreachable(f"{flight.item.entry.path}: given up")
        return Done(flight.item, copy.rest(), finished=True, error=error, received=copy.position - flight.item.offset)


class _Copy:
    """Moves one stream into one destination, and tells of each block as its last byte is in place."""

    def __init__(self, flight: Flight, throttle: Throttle | None, tell: Callable[[Block], None]) -> None:
        self._flight, self._throttle, self._tell = flight, throttle, tell
        self._hash = xxhash.xxh3_128()
        # Nobody keeps a journal of memory: its blocks need no digest.
        self._hashes = not isinstance(flight.dest, Memory)
        self.position = self._start = flight.item.offset
        self.complete = flight.item.length == 0
        self._told = time.monotonic()
        self._step = throttle.step if throttle else STEP

    def run(self, stream: Stream, buffer: memoryview) -> None:
        item, dest = self._flight.item, self._flight.dest
        end = item.end
        while end is None or self.position < end:
            until = (self.position // BLOCK + 1) * BLOCK
            want = min(
                self._step - self.position % self._step, (until if end is None else min(until, end)) - self.position
            )
            view = self._window(dest, want, buffer)
            count = self._fill(stream, view, dest)
            if count == 0:
                if end is None:
                    break
                raise Unreachable(f"{item.entry.path}: the answer ended {end - self.position} bytes early")
            self._place(dest, view[:count])
            if self._throttle:
                self._throttle.take(count)
            if self.position != end and (self.position == until or self._is_due()):
                self._tell(self._block())
                self._told = time.monotonic()
        if item.whole and end is not None and stream.read_into(buffer[:1]):
            raise IntegrityError(
                f"{item.entry.path}: wrong size (expected {end} bytes from the listing, the answer goes on)"
            )
        self.complete = True

    def _fill(self, stream: Stream, view: memoryview, dest: Dest) -> int:
        """Read until the view is full, the stream ends or a block is due: aligned writes make few pages of page cache."""
        filled = stream.read_into(view)
        while 0 < filled < len(view) and time.monotonic() - self._told < TELL_EVERY:
            try:
                count = stream.read_into(view[filled:])
            except MxError:
                self._place(dest, view[:filled])
                raise
            if count == 0:
                break
            filled += count
        return filled

    def _is_due(self) -> bool:
        since = time.monotonic() - self._told
        return since >= TELL_EVERY and (self.position - self._start >= LEAST_BLOCK or since >= 10 * TELL_EVERY)

    def _window(self, dest: Dest, want: int, buffer: memoryview) -> memoryview:
        """Where to read the next bytes to: their place, if that is host memory, else the buffer."""
        start = self.position - self._flight.item.offset
        if isinstance(dest, Host):
            return dest.view[start : start + want]
        if isinstance(dest, Memory) and dest.put is None:
            address, count = run_at(dest, start, want)
            return buffer[:count] if address is None else at_address(address, count)
        return buffer[:want]

    def _place(self, dest: Dest, view: memoryview) -> None:
        if self._hashes:
            self._hash.update(view)
        if isinstance(dest, File):
            at = dest.offset + self.position - self._flight.item.offset
            write_at(dest.fd, view, at)
            if dest.seen:
                dest.seen(at, view)
        elif isinstance(dest, Memory) and dest.put:
            scatter(dest, self.position - self._flight.item.offset, view)
        elif isinstance(dest, Through):
            dest.place(self.position - self._flight.item.offset, view)
        self.position += len(view)
        self._flight.moved += len(view)

    def _block(self) -> Block:
        block = Block(self._start, self.position - self._start, self._hash.digest() if self._hashes else b"")
        self._hash.reset()
        self._start = self.position
        return block

    def rest(self) -> tuple[Block, ...]:
        """The bytes since the last block that was told."""
        return (self._block(),) if self.position > self._start else ()
