"""What the fault tests share: a checkpoint, and the calls of a whole run, at each of which something may happen."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from tests.rig import cachecheck, servers
from tests.support import MIB, Mx, checkpoint_files

FILES = checkpoint_files(shards=2, size=11 * MIB)
RIGHT = cachecheck.sums(FILES)
Faults = Callable[..., dict[str, str]]


def calls_of_a_run(place: Path, fault_so: Path, origin: servers.Hub) -> list[list[str]]:
    """[pid, number, call, path] of each call of a whole run; beats are too rare to be among them."""
    mx = Mx(place / "mx")
    env = {"LD_PRELOAD": fault_so, "MXF_DIR": mx.cache, "MXF_COUNT_FILE": place / "count", "MX_BEAT": "60s"}
    mx("prefetch", origin.uri, env=origin.env | env).ok()
    return [line.split() for line in (place / "count").read_text().splitlines()]


def spread(numbers: Sequence[int], slot: int, slots: int) -> int:
    """One of `slots` numbers, evenly taken from first to last."""
    return numbers[slot * (len(numbers) - 1) // (slots - 1)]
