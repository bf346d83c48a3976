"""Python's garbage collector while large tables are made: they are no garbage, and it looks through all of them again and again."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

SELDOM = 100_000
"""Objects that are made between two looks in a process of mx's own."""


@contextlib.contextmanager
def resting() -> Iterator[None]:
    """No collections meanwhile, in a process that is somebody else's; for moments. Also a decorator."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def look_seldom() -> None:
    """For the process of a command."""
    gc.set_threshold(SELDOM)
