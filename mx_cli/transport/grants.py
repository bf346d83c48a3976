"""Grants: who may read now, who waits for a slot, and who else has the bytes by now."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from mx_cli.base.errors import NotFound
from mx_cli.base.threads import begin
from mx_cli.transport.protocol import POLL

_TICKET_LIFE = 5 * POLL
_BETTER_LIFE = 600.0
_MOST_BETTER = 16


@dataclass(slots=True)
class _Grant:
    deadline: float
    reader: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Place:
    """A place in the queue: `position` readers are before this one. `ticket` holds the place; show it again soon."""

    ticket: str
    position: int


class Grants:
    """Slots, and a first-in-first-out queue before them. Thread-safe; does not block.

    A grant lasts `ttl` seconds from its last beat.
    """

    def __init__(self, slots: int, ttl: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.slots = slots
        self.ttl = ttl
        self._clock = clock
        self._changed = threading.Condition()
        self._open: dict[str, _Grant] = {}
        self._queue: dict[str, float] = {}
        self._better: dict[str, float] = {}
        self._expirer: threading.Thread | None = None
        self._closed = False
        self.given = 0
        self.expired = 0

    @property
    def readers(self) -> int:
        return len(self._open)

    @property
    def queued(self) -> int:
        with self._changed:
            self._forget_absent()
            return len(self._queue)

    def ask(self, reader: Mapping[str, Any], ticket: str = "") -> str | Place:
        """The id of a new grant, or a place in the queue. A ticket that is not known (any more) is a new reader."""
        with self._changed:
            self._forget_absent()
            if ticket not in self._queue:
                ticket = secrets.token_hex(16)
            self._queue[ticket] = self._clock() + _TICKET_LIFE
            position = list(self._queue).index(ticket)
            if position >= self.slots - len(self._open):
                return Place(ticket, position)
            if self._expirer is None:
                expirer = threading.Thread(target=self._expire, name="mx-grants", daemon=True)
                begin(expirer)
                self._expirer = expirer
            del self._queue[ticket]
            grant = secrets.token_hex(16)
            self._open[grant] = _Grant(self._clock() + self.ttl, reader)
            self.given += 1
            self._changed.notify_all()
            return grant

    def beat(self, grant: str) -> None:
        """The reader lives. Raises NotFound when the grant has ended."""
        with self._changed:
            self._live(grant).deadline = self._clock() + self.ttl

    def check(self, grant: str) -> None:
        """Raises NotFound when the grant has ended."""
        with self._changed:
            self._live(grant)

    def _live(self, grant: str) -> _Grant:
        found = self._open.get(grant)
        if found is None:
            raise NotFound("no such grant (it ended, expired or was revoked)", hint="ask for another one")
        return found

    def end(self, grant: str) -> None:
        """The reader leaves, or leaves the queue (with its ticket). Idempotent."""
        with self._changed:
            self._queue.pop(grant, None)
            self._open.pop(grant, None)
            self._changed.notify_all()

    def revoke(self) -> None:
        """End all grants, and empty the queue."""
        with self._changed:
            self._queue.clear()
            grants = list(self._open)
        for grant in grants:
            self.end(grant)

    def praise(self, address: str) -> None:
        """A reader that verified what it read serves it at this address."""
        with self._changed:
            self._better.pop(address, None)
            self._better[address] = self._clock() + _BETTER_LIFE
            while len(self._better) > _MOST_BETTER:
                del self._better[next(iter(self._better))]

    def better(self, turn: int = 0, but: str = "") -> list[str]:
        """Where else to ask. Each `turn` begins with another one, so that not all go to the first."""
        with self._changed:
            now = self._clock()
            self._better = {address: until for address, until in self._better.items() if until > now}
            found = [address for address in self._better if address != but]
        start = turn % len(found) if found else 0
        return found[start:] + found[:start]

    def wait_empty(self, timeout: float) -> list[Mapping[str, Any]]:
        """Wait until there are no grants, for at most `timeout` seconds; the readers that still have one."""
        with self._changed:
            self._changed.wait_for(lambda: not self._open, timeout)
            return [grant.reader for grant in self._open.values()]

    def close(self) -> None:
        """End all, and the thread that looks for expired ones. Idempotent."""
        self.revoke()
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _forget_absent(self) -> None:
        now = self._clock()
        self._queue = {ticket: until for ticket, until in self._queue.items() if until > now}

    def _expire(self) -> None:
        while True:
            with self._changed:
                if self._closed:
                    return
                now = self._clock()
                late = [grant for grant, state in self._open.items() if state.deadline <= now]
                if not late:
                    deadlines = [state.deadline for state in self._open.values()]
                    self._changed.wait(min(deadlines) - now if deadlines else None)
                    continue
                self.expired += len(late)
            for grant in late:
                self.end(grant)
