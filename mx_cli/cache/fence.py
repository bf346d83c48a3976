"""What a leader asks before each step that others will see: does it still lead?"""

from __future__ import annotations

import contextlib
import time

from mx_cli.base.cancel import Stop
from mx_cli.base.errors import MxError
from mx_cli.cache.beat import Deposed
from mx_cli.cache.lease import Lease

CHECK_EVERY = 0.1


class Fence:
    """One term of one lease. `work` is the stop of what the term does. Any thread may ask; each look is one listing."""

    def __init__(self, lease: Lease, term: int, work: Stop) -> None:
        self._lease, self.term, self.work = lease, term, work
        self._checked = 0.0

    def check(self) -> None:
        """Raises Deposed when another leads, or the reason of the stop."""
        self.work.check()
        if self._lease.look().term > self.term:
            raise Deposed("another process leads now")

    def check_now_and_then(self) -> None:
        """For each of many small files a look would cost more than the file; the renamed parts are the fence."""
        now = time.monotonic()
        if now - self._checked > CHECK_EVERY:
            self.check()
            self._checked = now
        self.work.check()

    def superseded(self) -> bool:
        """Whether another is known to lead."""
        with contextlib.suppress(MxError):
            return self._lease.is_lost(self.term)
        return False
