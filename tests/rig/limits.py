"""A limit of memory for the processes of a test: a cgroup of its own, of either version."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
from collections.abc import Iterator
from pathlib import Path

PLACES = (
    (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"),
    (Path("/sys/fs/cgroup"), "memory.max"),
)
_numbers = itertools.count(1)


@functools.cache
def place() -> tuple[Path, str] | None:
    """Where such a cgroup can be made, and the name of its limit; None where it cannot."""
    for parent, limit in PLACES:
        probe = parent / f"mx-probe-{os.getpid()}"
        try:
            probe.mkdir()
        except OSError:
            continue
        found = os.access(probe / limit, os.W_OK)
        probe.rmdir()
        if found:
            return parent, limit
    return None


@contextlib.contextmanager
def memory(size: int) -> Iterator[tuple[str, ...]]:
    """A prefix for a command: it, and what it starts, may use `size` bytes of memory, and is killed for more."""
    found = place()
    assert found is not None, "capability memory-cgroup"
    parent, limit = found
    group = parent / f"mx-test-{os.getpid()}-{next(_numbers)}"
    group.mkdir()
    try:
        (group / limit).write_text(str(size))
        yield ("sh", "-c", f'echo $$ > {group}/cgroup.procs; exec "$@"', "sh")
    finally:
        group.rmdir()
