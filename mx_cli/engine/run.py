"""The one engine: bounded work in flight, retries, stall detection, a width that follows the throughput, stop."""

from __future__ import annotations

import contextlib
import heapq
import itertools
import os
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from mx_cli.base.cancel import Stop
from mx_cli.base.errors import IntegrityError, MxError, NotFound, OriginChanged, Unreachable
from mx_cli.engine.meter import Meter
from mx_cli.engine.ports import Done, NoRanges, OnRetry, ReadItem, Sink, Source
from mx_cli.engine.retry import Gate, Patience
from mx_cli.model.manifest import Entry

POLL = 0.2
CROWDED_POLL = 0.02
WIDEN_EVERY = 0.5
PAUSE = 8
"""Times that it is not tried again."""
QUIET_LIMIT = 15.0
HASTY_LIMIT = 1.0
"""Seconds for reads under way to end: the second when somebody waits for the end."""
SMALL_ITEM = 1 << 20
AHEAD = 8
LOOK = 4
SHOW_EVERY = 0.25
SHOWN = 64


@dataclass(frozen=True, slots=True)
class Limits:
    """`retry_for` and `stall_timeout` in seconds; `width` items in flight to begin with, `max_width` at most.

    `in_order`: items are begun in the order in which they were given; otherwise files take turns, which suits files that
    are written.
    """

    retry_for: float
    stall_timeout: float
    width: int
    max_width: int
    in_order: bool = False


def cores() -> int:
    """CPUs that this process may use: affinity, and the cgroup's quota (cpu.max)."""
    count = len(os.sched_getaffinity(0))
    try:
        with open("/sys/fs/cgroup/cpu.max") as file:
            quota, period = file.read().split()
        if quota != "max":
            count = min(count, max(1, round(int(quota) / int(period))))
    except (OSError, ValueError):
        pass
    return count


@dataclass(slots=True)
class _Flight:
    """An item in flight: how far it was when it last moved."""

    item: ReadItem
    patience: Patience
    moved: int = 0
    at: float = field(default_factory=time.monotonic)
    stalled: bool = False


@dataclass(slots=True)
class _FileState:
    """What is left of one file: bytes, or None when its size is not known; `whole` = in one piece, from the beginning."""

    left: int | None
    whole: bool = False
    switching: bool = False
    in_flight: int = 0
    placed: int = 0


class Transfer:
    """Moves items from a source to a sink. `run` blocks until all are in place, or raises; then nothing is in flight."""

    def __init__(
        self, source: Source, sink: Sink, limits: Limits, gate: Gate, meter: Meter, stop: Stop, on_retry: OnRetry
    ) -> None:
        self._source, self._sink, self._limits = source, sink, limits
        self._gate, self._meter, self._stop, self._on_retry = gate, meter, stop, on_retry
        self._pending: deque[tuple[ReadItem, Patience]] = deque()
        self._delayed: list[tuple[float, int, ReadItem, Patience]] = []
        self._count = itertools.count()
        self._flights: dict[ReadItem, _Flight] = {}
        self._news: deque[Done] = deque()
        self._files: dict[str, _FileState] = {}
        self._width = _Width(limits.width, limits.max_width)
        self._show_at = 0.0

    def run(self, items: Iterable[ReadItem]) -> None:
        """Raises the first error that retrying does not cure, OriginChanged, or the stop's reason."""
        for item in items:
            self._admit(item)
        try:
            while self._pending or self._delayed or self._flights:
                self._stop.check()
                self._sink.raise_failure()
                self._news.extend(self._source.poll(self._start_some()))
                while self._news:
                    self._take(self._news.popleft())
                self._look_for_stalls()
                self._show()
                self._width.adapt(self._meter.fetched, len(self._flights))
        except NotFound as error:
            changed = self._abandon()
            # What is gone because the origin changed is listed again; only what alone is gone is not found.
            raise changed or error from None
        except BaseException as error:
            # Ctrl-C in Python is no stop, and is in as much of a hurry.
            self._abandon(hasty=not isinstance(error, Exception))
            raise
        finally:
            self._meter.workers, self._meter.current = 0, ()

    @property
    def in_flight(self) -> frozenset[str]:
        """Files that something may still be written into: empty after `run`, unless it gave up on a read that hangs."""
        return frozenset(item.entry.path for item in self._flights)

    def _admit(self, item: ReadItem) -> None:
        state = self._files.setdefault(item.entry.path, _FileState(0, item.whole))
        if item.length is None:
            state.left = None
        elif state.left is not None:
            state.left += item.length
        self._pending.append((item, self._patience(item)))

    def _patience(self, item: ReadItem) -> Patience:
        return Patience(item.entry.path, self._limits.retry_for, self._on_retry)

    # -- starting ------------------------------------------------------------------------------------------------

    def _start_some(self) -> float:
        """Start what there is room for; returns how long to wait for news, in seconds."""
        now = time.monotonic()
        while self._delayed and self._delayed[0][0] <= now:
            _, _, item, patience = heapq.heappop(self._delayed)
            self._pending.appendleft((item, patience))
        width = min(self._width.now, self._source.caps.max_in_flight)
        self._source.widen(width)
        while self._pending and not self._gate.closed_for:
            # Small items wait at the source for their turn, so that it need not wait for this loop.
            index = self._next(width)
            item, patience = self._pending[index]
            length = item.length
            ahead = AHEAD if length is not None and length <= SMALL_ITEM else 1
            if len(self._flights) >= width * ahead:
                break
            if not self._sink.has_room(item):
                return CROWDED_POLL
            del self._pending[index]
            dest = self._sink.acquire(item)
            self._flights[item] = _Flight(item, patience)
            self._files[item.entry.path].in_flight += 1
            self._source.start(item, dest)
        return POLL

    def _next(self, width: int) -> int:
        """Which pending item comes next: the first of those at the front whose file nothing is in flight of.

        One writer a file waits for no other (the kernel locks a file for each write), and its bytes come in order, so that
        they are verified while they are hot, not read again.
        """
        ahead = 0 if self._limits.in_order else LOOK * width
        for index, (item, _) in enumerate(itertools.islice(self._pending, ahead)):
            if not self._files[item.entry.path].in_flight:
                return index
        return 0

    # -- news ----------------------------------------------------------------------------------------------------

    def _take(self, done: Done) -> None:
        # Before anything can fail: what is over must not be waited for.
        flight = self._flights.pop(done.item) if done.finished else self._flights[done.item]
        state = self._files[done.item.entry.path]
        for block in done.blocks:
            self._sink.commit(done.item, block)
            self._meter.add(block.length)
            state.placed += block.length
            if state.left is not None:
                state.left -= block.length
        if not done.finished:
            return
        state.in_flight -= 1
        if state.switching:
            self._switch(done.item.entry, state)
        elif done.error is None:
            if state.left in (0, None):
                self._end(done.item.entry, done.item.offset + done.received)
        elif isinstance(done.error, NoRanges):
            # What ranges brought already is not given up for one that a busy server refused.
            if self._done(done.item.entry) and not state.whole and flight.patience.doubts_refusal():
                self._again(done, flight, state, Unreachable(str(done.error)))
            else:
                self._refused_ranges(done, state)
        else:
            self._again(done, flight, state, done.error)

    def _again(self, done: Done, flight: _Flight, state: _FileState, error: MxError) -> None:
        item = done.item
        if flight.stalled and isinstance(error, Unreachable):
            error = Unreachable(f"{item.entry.path}: stalled: no byte for {self._limits.stall_timeout:g} s")
        if isinstance(error, Unreachable) and error.retry_after is not None:
            self._width.halve()
        if done.received and not state.whole:
            flight.patience.progressed()
        self._meter.failed(type(error).name, error.what)
        delay = flight.patience.delay(error, self._gate)
        if self._gate.closed_for:
            self._meter.throttled(self._gate.closed_for)
        self._meter.retries += 1
        self._meter.waiting(delay + POLL)
        if state.whole:
            self._restart(item.entry, state)
        elif item.length is not None:
            item = ReadItem(item.entry, item.offset + done.received, item.length - done.received)
        if item.length == 0:
            if state.left == 0:
                self._end(item.entry, item.offset)
            return
        heapq.heappush(self._delayed, (time.monotonic() + delay, next(self._count), item, flight.patience))

    def _end(self, entry: Entry, reached: int) -> None:
        self._sink.end(entry, reached if entry.size is None else entry.size)

    def _restart(self, entry: Entry, state: _FileState) -> None:
        self._sink.reset(entry)
        self._meter.lose(self._done(entry))
        state.placed = 0
        state.left = entry.size

    def _refused_ranges(self, done: Done, state: _FileState) -> None:
        if state.whole:
            raise IntegrityError(f"{done.error}")
        state.switching = state.whole = True
        entry = done.item.entry
        self._pending = deque(pair for pair in self._pending if pair[0].entry is not entry)
        self._delayed = [row for row in self._delayed if row[2].entry is not entry]
        heapq.heapify(self._delayed)
        for flight in self._flights.values():
            if flight.item.entry is entry:
                self._source.abort(flight.item)
        self._switch(entry, state)

    def _switch(self, entry: Entry, state: _FileState) -> None:
        """Once nothing of the file is in flight, begin it again in one piece."""
        if state.in_flight:
            return
        state.switching = False
        self._restart(entry, state)
        item = ReadItem(entry, 0, entry.size, whole=True)
        self._pending.appendleft((item, self._patience(item)))

    def _show(self) -> None:
        """Tell the meter who is at work, a few times a second."""
        self._meter.workers = len(self._flights)
        now = time.monotonic()
        if now >= self._show_at:
            self._show_at = now + SHOW_EVERY
            entries = dict.fromkeys(item.entry for item in itertools.islice(self._flights, SHOWN))
            self._meter.current = tuple(
                (entry.path, self._done(entry), entry.size) for entry in entries if entry.size is not None
            )

    def _done(self, entry: Entry) -> int:
        """Bytes of a file that are in place, also those that were before this transfer."""
        state = self._files[entry.path]
        return state.placed if state.left is None or entry.size is None else entry.size - state.left

    # -- watching ------------------------------------------------------------------------------------------------

    def _look_for_stalls(self) -> None:
        now = time.monotonic()
        for flight in self._flights.values():
            moved = self._source.moved(flight.item)
            if moved is None:
                flight.at = now
            elif moved != flight.moved:
                flight.moved, flight.at = moved, now
                self._meter.tick()
            elif now - flight.at > self._limits.stall_timeout and not flight.stalled:
                flight.stalled = True
                self._source.abort(flight.item)

    def _abandon(self, *, hasty: bool = False) -> OriginChanged | None:
        """Give up everything in flight and wait, briefly, until nothing lands any more; keep what did.

        Returns the first news among the rest that the origin has changed.
        """
        changed: OriginChanged | None = None
        for item in self._flights:
            self._source.abort(item)
        end = time.monotonic() + (HASTY_LIMIT if hasty or self._stop.requested else QUIET_LIMIT)
        while self._flights and time.monotonic() < end:
            if not self._news:
                self._news.extend(self._source.poll(POLL))
            while self._news:
                done = self._news.popleft()
                if done.finished:
                    self._flights.pop(done.item, None)
                if isinstance(done.error, OriginChanged):
                    changed = changed or done.error
                # A full disk may have no room for the journal either.
                with contextlib.suppress(MxError):
                    for block in done.blocks:
                        self._sink.commit(done.item, block)
                        self._meter.add(block.length)
        return changed


class _Width:
    """Items in flight: doubles while that brings throughput; what brought none is taken back, and tried again later.

    More connections than it takes only cost CPU. It halves when the host asks for less.
    """

    def __init__(self, start: int, most: int) -> None:
        self.now = min(start, most)
        self._most = most
        self._best = 0.0
        self._before = 0
        self._pause = 0
        self._mark = (time.monotonic(), 0)

    def adapt(self, fetched: int, used: int) -> None:
        since, before = self._mark
        elapsed = time.monotonic() - since
        if elapsed < WIDEN_EVERY:
            return
        rate = (fetched - before) / elapsed
        self._mark = (time.monotonic(), fetched)
        if used < self.now:
            return
        if rate > self._best * 1.1:
            self._widen(rate)
        elif self._before:
            self.now, self._before, self._pause = self._before, 0, PAUSE
        elif self._pause:
            self._pause -= 1
        else:
            self._widen(rate)

    def _widen(self, rate: float) -> None:
        self._best, self._before = rate, self.now
        self.now = min(self._most, 2 * self.now)

    def halve(self) -> None:
        self.now = max(1, self.now // 2)
        # Whatever the rate is, it is not widened for a while.
        self._best, self._before, self._pause = float("inf"), 0, PAUSE
