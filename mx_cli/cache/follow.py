"""Watching a leader: is it alive, how far is it, what ended it."""

from __future__ import annotations

import time
from collections import deque

from mx_cli.cache.lease import Lease, View

FIRST_POLL = 0.2
LONGEST_POLL = 1.0
PROOF_EVERY = 0.4
BEATS = 8


class Watch:
    """Judges a lease directory by this process's own clock: no sign of life for `ttl` seconds means dead."""

    def __init__(self, lease: Lease, ttl: float) -> None:
        self._lease, self._ttl = lease, ttl
        self._sign: tuple[int, str] | None = None
        self._since = time.monotonic()
        self._proof_at = 0.0
        self._poll = FIRST_POLL
        self._beats: deque[tuple[float, int]] = deque(maxlen=BEATS)
        self.view = View()
        self.ended = ""

    def look(self) -> View:
        """Look again; blocks for one listing."""
        self.view = self._lease.look()
        if self.view.sign != self._sign:
            if self._sign is None or self._sign[0] != self.view.term:
                self._beats.clear()
            self._sign, self._since = self.view.sign, time.monotonic()
            self._beats.append((self._since, self.view.bytes_done))
        return self.view

    @property
    def rate(self) -> float:
        """The leader's bytes a second over the last beats that were seen; 0 when that isn't known yet."""
        if len(self._beats) < 3:
            return 0.0
        # The first one may be old: it was there before this process looked.
        (began, before), (ended, after) = self._beats[1], self._beats[-1]
        return max(0, after - before) / max(1e-6, ended - began)

    @property
    def silent_for(self) -> float:
        """Seconds since this process last saw a new sign of life."""
        return time.monotonic() - self._since

    def vacant(self) -> bool:
        """Whether the next term may begin: nobody leads, or the leader left, failed, is silent for the TTL or surely dead.

        `ended` then says which.
        """
        self.ended = self._end()
        return bool(self.ended)

    def _end(self) -> str:
        view = self.view
        if view.term == 0:
            return "nobody ever led"
        if view.left or view.failed:
            return f"term {view.term} {'failed' if view.failed else 'was left'}"
        if self.silent_for > self._ttl:
            return f"term {view.term} was silent for {self.silent_for:.1f} s"
        now = time.monotonic()
        if now < self._proof_at:
            return ""
        self._proof_at = now + PROOF_EVERY
        return f"the leader of term {view.term} is dead" if self._lease.surely_dead(view.term) else ""

    def pause(self) -> float:
        """Seconds until the next look: longer each time, but not past the moment when silence means death."""
        self._poll = min(LONGEST_POLL, self._poll * 1.3)
        return min(self._poll, max(FIRST_POLL, self._ttl - self.silent_for))
