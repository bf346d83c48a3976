"""Several sources as one: a single queue that each source takes from as it gets free, and the end of one that fails."""

from __future__ import annotations

import contextlib
import queue
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from mx_cli.base.errors import IntegrityError, MxError, NotFound, TransportFailed, Unreachable
from mx_cli.engine.ports import Dest, Done, NoRanges, ReadItem, Source, SourceCaps


class Bell:
    """What sources ring when they have news, so that one thread can wait for all of them."""

    def __init__(self) -> None:
        self._rings: queue.SimpleQueue[None] = queue.SimpleQueue()

    def ring(self) -> None:
        self._rings.put(None)

    def wait(self, timeout: float) -> None:
        """Block until it rang since the last wait, for `timeout` seconds at most."""
        try:
            self._rings.get(timeout=timeout)
            while True:
                self._rings.get_nowait()
        except queue.Empty:
            return


MOST_WRONG = 3
"""Pieces with wrong bytes after which a source is left, where there is another one: each was read for nothing."""


@dataclass(eq=False, slots=True)
class Member:
    """One of the sources. A `reserve` (the origin) is asked only for what no other member can give. One that `returns` (a
    disk) is asked again by the policy where what failed may pass and nobody else is there; a peer is left.

    `silence`: seconds in which no byte of its reads came, after which the member has failed. `failure` says why it did; `wrong`
    counts its pieces with wrong bytes.
    """

    name: str
    source: Source
    reserve: bool = False
    returns: bool = False
    silence: float = float("inf")
    failure: MxError | None = None
    bytes: int = 0
    wrong: int = 0
    flights: dict[ReadItem, _Job] = field(default_factory=dict)
    moved_at: float = field(default_factory=time.monotonic)
    moved: int = 0

    @property
    def alive(self) -> bool:
        return self.failure is None


@dataclass(eq=False, slots=True)
class _Job:
    """An item on its way: `wrong` are the members that gave no right bytes for it, and why. An aborted one is never begun
    again."""

    item: ReadItem
    dest: Dest
    wrong: dict[Member, MxError] = field(default_factory=dict)
    retried: bool = False
    aborted: bool = False


class Many:
    """The Source made of several. All calls from one thread; `members` may be watched from others.

    Members that are no reserve report blocks with the end of an item only: a failed one leaves nothing half counted.
    A member that fails is closed (after which nothing of its lands any more), and what it had open goes back into the
    queue. A wrong digest, or a file that it does not have, is no failure of the member: the piece is read once more,
    elsewhere where there is an elsewhere; but MOST_WRONG wrong digests are one, then. Errors of a reserve are the engine's
    to retry. `on_trouble(member, error)` tells of wrong bytes, and of a member's end (see `trouble`).
    """

    def __init__(self, members: Sequence[Member], bell: Bell, on_trouble: Callable[[Member, MxError], None]) -> None:
        if not members:
            raise ValueError("no source")
        self.members = tuple(members)
        self._bell, self._on_trouble = bell, on_trouble
        self._queue: deque[_Job] = deque()
        self._jobs: dict[ReadItem, _Job] = {}
        self._news: list[Done] = []

    @property
    def caps(self) -> SourceCaps:
        """Those of the members that live, added up."""
        alive = [m.source.caps for m in self.members if m.alive] or [m.source.caps for m in self.members]
        if len(self.members) == 1:
            return alive[0]
        return SourceCaps(
            sum(caps.max_in_flight for caps in alive),
            min(caps.item_size for caps in alive),
            next((m.source.caps.host for m in self.members if m.reserve), self.members[0].source.caps.host),
            next((caps.blocks for caps in alive if caps.blocks), None),
        )

    def widen(self, width: int) -> None:
        for member in self.members:
            if member.alive:
                member.source.widen(min(width, member.source.caps.max_in_flight))

    def start(self, item: ReadItem, dest: Dest) -> None:
        if item not in self._jobs:
            job = self._jobs[item] = _Job(item, dest)
            self._queue.append(job)
            self._deal()

    def poll(self, timeout: float) -> list[Done]:
        self._deal()
        if not self._news:
            self._bell.wait(timeout)
        now = time.monotonic()
        for member in self.members:
            if member.alive:
                for done in member.source.poll(0):
                    self._take(member, done)
                self._look_for_silence(member, now)
        self._deal()
        news, self._news = self._news, []
        return news

    def moved(self, item: ReadItem) -> int | None:
        for member in self.members:
            if item in member.flights:
                return member.source.moved(item)
        return None

    def abort(self, item: ReadItem) -> None:
        job = self._jobs.get(item)
        if job is None:
            return
        job.aborted = True
        for member in self.members:
            if item in member.flights:
                member.source.abort(item)
                return
        self._queue.remove(job)
        self._finish(job, _given_up(job))

    def close(self) -> None:
        with contextlib.ExitStack() as each:
            for member in reversed(self.members):
                each.callback(member.source.close)

    # -- dealing -------------------------------------------------------------------------------------------------

    def _deal(self) -> None:
        """Give what waits to whoever is free; each takes the next as it gets free, so the faster takes more."""
        waiting, self._queue = self._queue, deque()
        while waiting:
            job = waiting.popleft()
            able = [m for m in self.members if m.alive and m not in job.wrong]
            able = [m for m in able if not m.reserve] or able
            if not able:
                self._finish(job, self._why_nobody(job))
                continue
            free = [m for m in able if len(m.flights) < m.source.caps.max_in_flight]
            if not free:
                self._queue.append(job)
                continue
            self._give(min(free, key=lambda m: len(m.flights) / m.source.caps.max_in_flight), job)

    def _give(self, member: Member, job: _Job) -> None:
        if not member.flights:
            member.moved_at = time.monotonic()
        member.flights[job.item] = job
        member.source.start(job.item, job.dest)

    def _why_nobody(self, job: _Job) -> MxError:
        errors = {m: m.failure for m in self.members if m.failure} | job.wrong
        causes = "; ".join(_said(member, error) for member, error in errors.items())
        if any(isinstance(error, IntegrityError) for error in job.wrong.values()):
            return IntegrityError(f"{job.item.entry.path}: no source gives right bytes ({causes})")
        if errors and all(isinstance(error, NotFound) for error in errors.values()):
            return NotFound(f"{job.item.entry.path}: no source has it ({causes})")
        return TransportFailed(f"no source is left ({causes})")

    # -- news ----------------------------------------------------------------------------------------------------

    def _take(self, member: Member, done: Done) -> None:
        job = member.flights.get(done.item)
        if job is None or not member.alive:
            return
        member.moved_at = time.monotonic()
        if done.blocks:
            member.bytes += sum(block.length for block in done.blocks)
            self._news.append(Done(job.item, done.blocks))
        if not done.finished:
            return
        del member.flights[done.item]
        if done.error is None:
            self._finish(job, None, done.received)
        elif job.aborted or member.reserve or isinstance(done.error, NoRanges) or self._returns(member, done.error):
            self._finish(job, done.error, done.received)
        elif isinstance(done.error, (IntegrityError, NotFound)):
            self._again_elsewhere(member, job, done.error)
        else:
            self._queue.appendleft(job)
            self._fail(member, done.error)

    def _returns(self, member: Member, error: MxError) -> bool:
        return (
            member.returns
            and isinstance(error, Unreachable)
            and not any(m.alive for m in self.members if m is not member)
        )

    def _finish(self, job: _Job, error: MxError | NoRanges | None, received: int = 0) -> None:
        del self._jobs[job.item]
        self._news.append(Done(job.item, finished=True, error=error, received=received))

    def _again_elsewhere(self, member: Member, job: _Job, error: MxError) -> None:
        others = [m for m in self.members if m.alive and m is not member and m not in job.wrong]
        if others or job.wrong:
            job.wrong[member] = error
        if not others and (job.retried or isinstance(error, NotFound)):
            self._finish(job, self._why_nobody(job) if job.wrong else error)
            return
        job.retried = True
        self._queue.appendleft(job)
        if isinstance(error, IntegrityError):
            member.wrong += 1
            if others and member.wrong >= MOST_WRONG:
                self._fail(member, error)
            else:
                self._on_trouble(member, error)

    # -- failing a source ----------------------------------------------------------------------------------------

    def _look_for_silence(self, member: Member, now: float) -> None:
        if not member.flights or now - member.moved_at <= member.silence / 4:
            return
        # Blocks of a slow network take longer than the silence of one that is gone.
        moved = sum(member.source.moved(item) or 0 for item in member.flights)
        if moved != member.moved:
            member.moved, member.moved_at = moved, now
        elif now - member.moved_at > member.silence:
            self._fail(member, TransportFailed(f"no verified byte for {member.silence:g} s"))

    def _fail(self, member: Member, error: MxError) -> None:
        member.failure = error
        member.source.close()
        for job in reversed(member.flights.values()):
            if job.aborted:
                self._finish(job, _given_up(job))
            else:
                self._queue.appendleft(job)
        member.flights.clear()
        self._on_trouble(member, error)


def trouble(member: Member, error: MxError) -> str:
    """What `on_trouble` is told, in words."""
    return f"source {_said(member, error, ' is left')}" if member.failure else f"{error.what}; it is read once more"


def _said(member: Member, error: MxError, does: str = "") -> str:
    """The member and its error, which may begin with its name itself."""
    return f"{member.name}{does}: {error.what.removeprefix(f'{member.name}: ')}"


def _given_up(job: _Job) -> TransportFailed:
    return TransportFailed(f"{job.item.entry.path}: given up")
