"""The sink of files: bytes land at their offsets, and everything that needs them in order follows close behind."""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from mx_cli.base.cancel import Stop
from mx_cli.base.errors import IntegrityError, MxError
from mx_cli.base.oserrors import explain
from mx_cli.base.threads import begin_some
from mx_cli.engine.buffers import write_at
from mx_cli.engine.meter import Meter
from mx_cli.engine.ports import Block, Dest, File, Host, ReadItem
from mx_cli.engine.verify import Consumer
from mx_cli.model.manifest import Entry
from mx_cli.plan.ranges import Span, merge

CHUNK = 1 << 20
FEED_STEP = 8 << 20
OPEN_LIMIT = 256
CLOSE_LIMIT = 1.0
SMALL = 256 << 10
HELD_LIMIT = 16 << 20


@dataclass(slots=True)
class _Open:
    """A file that is being filled: `edge` = contiguous bytes from its start, `fed` = those the consumers have read."""

    entry: Entry
    fd: int
    consumers: Sequence[Consumer]
    have: list[Span] = field(default_factory=list)
    size: int | None = None
    fed: int = 0
    queued: bool = False

    @property
    def edge(self) -> int:
        return self.have[0][1] if self.have and self.have[0][0] == 0 else 0

    @property
    def ended(self) -> bool:
        return self.size is not None and self.edge >= self.size


@dataclass(slots=True)
class _Held:
    """A small file that is gathered in memory: one write instead of a reservation, writes and reads."""

    entry: Entry
    data: bytearray


@dataclass(frozen=True, slots=True)
class Opened:
    """What `open_file` gives: a descriptor (the sink closes it), and the spans that are in place already."""

    fd: int
    have: list[Span]


class FileSink:
    """Fills files. `open_file`, `on_commit` and `on_complete` are the flow's: the sink knows no cache.

    `consumers(entry)` makes a file's consumers; they run in `threads` threads behind the transfer, each file in order.
    `on_complete(entry, size, fd, consumers)` follows in the same thread when the last byte was consumed.
    `suspects`: the files whose bytes were found to be wrong.
    """

    def __init__(
        self,
        open_file: Callable[[Entry], Opened],
        consumers: Callable[[Entry], Sequence[Consumer]],
        on_commit: Callable[[Entry, Block], None],
        on_complete: Callable[[Entry, int, int, Sequence[Consumer]], None],
        meter: Meter,
        threads: int,
    ) -> None:
        self._open_file, self._consumers = open_file, consumers
        self._on_commit, self._on_complete = on_commit, on_complete
        self._meter = meter
        self._files: dict[str, _Open] = {}
        self._held: dict[str, _Held] = {}
        self._held_bytes = 0
        self._changed = threading.Condition()
        self._queue: queue.SimpleQueue[_Open | _Held | None] = queue.SimpleQueue()
        self._failure: MxError | None = None
        self._closing = False
        self.suspects: list[Entry] = []
        self._threads = begin_some(
            [threading.Thread(target=self._serve, name=f"verify-{n}", daemon=True) for n in range(threads)]
        )

    # -- the port ------------------------------------------------------------------------------------------------

    def has_room(self, item: ReadItem) -> bool:
        """Descriptors, memory and page cache are bounded."""
        path = item.entry.path
        with self._changed:
            is_begun = path in self._files or path in self._held
            return is_begun or (len(self._files) < OPEN_LIMIT and self._held_bytes <= HELD_LIMIT)

    def acquire(self, item: ReadItem) -> Dest:
        entry = item.entry
        # Only what is fetched whole: of another file, a part is on the disk already.
        is_whole = entry.size is not None and item.offset == 0 and item.end == entry.size <= SMALL
        if entry.size is not None and (entry.path in self._held or (is_whole and entry.path not in self._files)):
            return Host(memoryview(self._hold(entry, entry.size).data)[item.offset : item.end])
        file = self.open(entry)
        return File(file.fd, item.offset, lambda at, view: self._seen(file, at, view))

    def _hold(self, entry: Entry, size: int) -> _Held:
        with self._changed:
            held = self._held.get(entry.path)
            if held is None:
                held = self._held[entry.path] = _Held(entry, bytearray(size))
                self._held_bytes += size
            return held

    def open(self, entry: Entry) -> _Open:
        """The open file of an entry; opens it, with what is there already, the first time."""
        file = self._files.get(entry.path)
        if file is None:
            opened = self._open_file(entry)
            file = _Open(entry, opened.fd, self._consumers(entry), have=list(opened.have))
            with self._changed:
                self._files[entry.path] = file
                self._feed(file)
        return file

    def commit(self, item: ReadItem, block: Block) -> None:
        entry = item.entry
        self._on_commit(entry, block)
        if entry.path in self._held:
            return
        with self._changed:
            file = self._files[entry.path]
            file.have = merge([*file.have, (block.offset, block.offset + block.length)])
            self._feed(file)

    def reset(self, entry: Entry) -> None:
        if entry.path in self._held:
            return
        with self._changed:
            file = self._files[entry.path]
            file.have = []
            while file.queued:
                self._changed.wait(0.2)
            file.fed, file.consumers = 0, self._consumers(entry)

    def end(self, entry: Entry, size: int) -> None:
        held = self._held.get(entry.path)
        if held:
            self._queue.put(held)
            return
        file = self.open(entry)
        with self._changed:
            file.size = size
            self._feed(file)

    def raise_failure(self) -> None:
        if self._failure:
            raise self._failure

    def _seen(self, file: _Open, at: int, view: memoryview) -> None:
        """Consume bytes at the edge right where they are hot; what comes out of order is read again later."""
        with self._changed:
            if file.queued or at != file.fed or self._closing:
                return
            file.queued = True
        try:
            for consumer in file.consumers:
                consumer.update(view)
        except MxError as error:
            self._fail(file, error)
            return
        with self._changed:
            file.fed += len(view)
            file.queued = False
            self._feed(file)
            self._changed.notify_all()

    # -- behind the transfer -------------------------------------------------------------------------------------

    def wait(self, stop: Stop) -> None:
        """Block until every ended file is complete. Raises the first failure, or the stop's reason."""
        while True:
            stop.check()
            self.raise_failure()
            with self._changed:
                if not self._held and not any(file.ended for file in self._files.values()):
                    return
                self._changed.wait(0.1)

    def close(self, in_use: Collection[str] = ()) -> None:
        """End the threads and close all files but those `in_use`. Idempotent; what is incomplete stays on the disk.

        A descriptor that a thread may still use is given up, not closed: its number would become another file's.
        """
        self._closing = True
        for _ in self._threads:
            self._queue.put(None)
        end = time.monotonic() + CLOSE_LIMIT
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))
        stuck = any(thread.is_alive() for thread in self._threads)
        self._threads = []
        with self._changed:
            files, self._files = list(self._files.values()), {}
        for file in files:
            if file.entry.path not in in_use and not (stuck and file.queued):
                os.close(file.fd)

    def _feed(self, file: _Open) -> None:
        """Queue the file if there is enough to consume. Call with the lock held."""
        if not file.queued and (file.ended or file.edge - file.fed >= FEED_STEP):
            file.queued = True
            self._queue.put(file)

    def _serve(self) -> None:
        buffer = memoryview(bytearray(CHUNK))
        while (file := self._queue.get()) is not None:
            try:
                if isinstance(file, _Held):
                    self._consume_held(file)
                else:
                    self._consume(file, buffer)
            except MxError as error:
                self._fail(file, error)
            except OSError as error:
                self._fail(file, explain(error, f"verifying {file.entry.path}"))
            except Exception as error:  # noqa: BLE001 - a bug must stop the transfer, not end a thread in silence
                failure = MxError(f"verifying {file.entry.path}: {type(error).__name__}: {error}")
                failure.__cause__ = error
                self._fail(file, failure)

    def _fail(self, file: _Open | _Held, error: MxError) -> None:
        with self._changed:
            self._failure = self._failure or error
            if isinstance(error, IntegrityError):
                self.suspects.append(file.entry)
            if isinstance(file, _Open):
                file.queued = False
            self._changed.notify_all()

    def _consume(self, file: _Open, buffer: memoryview) -> None:
        while True:
            edge, consumers = file.edge, file.consumers
            while file.fed < edge:
                if self._closing:
                    return
                count = os.preadv(file.fd, [buffer[: min(CHUNK, edge - file.fed)]], file.fed)
                if count == 0:
                    raise MxError(f"{file.entry.path}: the part is shorter than what was written into it")
                for consumer in consumers:
                    consumer.update(buffer[:count])
                file.fed += count
                self._meter.tick()
            with self._changed:
                if file.edge > file.fed:
                    continue
                if not file.ended:
                    file.queued = False
                    self._changed.notify_all()
                    return
            break
        for consumer in file.consumers:
            consumer.finish()
        self._on_complete(file.entry, file.size or 0, file.fd, file.consumers)
        with self._changed:
            self._files.pop(file.entry.path, None)
            os.close(file.fd)
            self._changed.notify_all()

    def _consume_held(self, held: _Held) -> None:
        consumers = self._consumers(held.entry)
        for consumer in consumers:
            consumer.update(memoryview(held.data))
            consumer.finish()
        fd = self._open_file(held.entry).fd
        try:
            write_at(fd, memoryview(held.data), 0)
            self._on_complete(held.entry, len(held.data), fd, consumers)
        finally:
            os.close(fd)
        with self._changed:
            del self._held[held.entry.path]
            self._held_bytes -= len(held.data)
            self._changed.notify_all()
