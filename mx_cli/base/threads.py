"""Threads, of which a container or a user may have only so many."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from mx_cli.base.errors import NoSpace

HINT = "more processes (pids.max of the container, ulimit -u), or more memory (ulimit -v)"


def begin(thread: threading.Thread) -> None:
    """Start a thread. Raises NoSpace where the system allows no more of them."""
    try:
        thread.start()
    except RuntimeError as error:
        raise NoSpace(
            f"the thread {thread.name!r} cannot be started ({error})",
            hint=HINT,
        ) from None


def begin_some(threads: Sequence[threading.Thread]) -> list[threading.Thread]:
    """Start as many of them as there can be. Raises NoSpace when that is none of several."""
    for count, thread in enumerate(threads):
        try:
            begin(thread)
        except NoSpace:
            if count == 0:
                raise
            return list(threads[:count])
    return list(threads)
