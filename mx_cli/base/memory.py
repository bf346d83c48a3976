"""How much memory this process may still take, and which of its own it may not write to."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from mx_cli.base import units
from mx_cli.base.errors import NoSpace

_GROUPS = Path("/sys/fs/cgroup")
_MAPS = Path("/proc/self/maps")
_ALL_FILE_PAGES = ("inactive_file", "active_file")
NOTABLE = 64 << 20


def available() -> int:
    """Bytes: what the machine has to give, and no more than what the cgroups that this process is in leave."""
    return min([_machine("MemAvailable"), *(max(0, most - used) for most, used in _groups())])


def require(size: int, what: str) -> None:
    """Raises NoSpace for more bytes than could be had if the kernel dropped all file pages and swapped out the rest.

    Taking them all the same would make the kernel kill this process, or another one. Small sizes are not checked.
    """
    if size < NOTABLE:
        return
    machine, groups = _machine("MemAvailable") + _machine("SwapFree"), _groups(_ALL_FILE_PAGES)
    most = min([machine, *(max(0, most - used) for most, used in groups)])
    if size > most:
        raise NoSpace(
            f"no memory for {what} (need {units.size(size)}, at most {units.size(most)} can be had)",
            hint="more memory for this container or machine; mx doctor MODEL tells what is needed",
        )


def limit() -> int | None:
    """Bytes that the cgroups allow; None where they set no limit."""
    return min((most for most, _ in _groups() if most < _machine("MemTotal")), default=None)


def total() -> int:
    """Bytes of the machine."""
    return _machine("MemTotal")


def read_only() -> list[tuple[int, int]]:
    """(start, end) of the memory of this process that a write to would end it, by address; none where nobody can tell."""
    found = []
    try:
        lines = _MAPS.read_text(errors="replace").splitlines()
    except OSError:
        return []
    for line in lines:
        place, permissions = line.split(maxsplit=2)[:2]
        start, _, end = place.partition("-")
        if "w" not in permissions:
            found.append((int(start, 16), int(end, 16)))
    return found


def _groups(droppable: tuple[str, ...] = ("inactive_file",)) -> Iterator[tuple[int, int]]:
    """(limit, used) of each cgroup with a limit, of either version. File pages that are `droppable` are not used."""
    for base, path, limit, usage, prefix in _memberships():
        for group in (path, *path.parents):
            # In a container the path may be one of the host's, and only the root of it is there.
            place = base / group.relative_to("/")
            most, used = _number(place / limit), _number(place / usage)
            if most is not None and used is not None:
                dropped = sum(_field(place / "memory.stat", prefix + kind) or 0 for kind in droppable)
                yield most, max(0, used - dropped)


def _memberships() -> Iterator[tuple[Path, Path, str, str, str]]:
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_")
            yield _GROUPS / "memory", Path(path), *names
        elif not controllers:
            yield _GROUPS, Path(path), "memory.max", "memory.current", ""


def _machine(name: str) -> int:
    """Bytes, as /proc/meminfo says; 1 GiB where it does not."""
    kibibytes = _field(Path("/proc/meminfo"), f"{name}:")
    return 1 << 30 if kibibytes is None else kibibytes << 10


def _field(path: Path, name: str) -> int | None:
    """The number after a name that begins a line; None where there is none."""
    try:
        rows = [line.split() for line in path.read_text().splitlines()]
        return next((int(row[1]) for row in rows if row and row[0] == name), None)
    except (OSError, ValueError, IndexError):
        return None


def _number(path: Path) -> int | None:
    """None where there is no limit, or nothing to read."""
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdecimal() else None
