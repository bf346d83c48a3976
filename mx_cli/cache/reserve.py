"""Refusals before any byte moves, and room for the bytes that will."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import secrets
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

from mx_cli.base import memory, units
from mx_cli.base.errors import FilesystemRefused, NoSpace
from mx_cli.base.filesystem import IN_MEMORY, mounts, nearest
from mx_cli.cache.files import NO_RENAME, cannot_rename, refused
from mx_cli.model.selection import collisions

UNCHOSEN_LIMIT = 1 << 30
VOLATILE = IN_MEMORY | {"overlay"}
SPARE_INODES = 16
USUAL_NAME = 143
"""Bytes of a name that every file system can have."""
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO})

_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True, slots=True)
class Filesystem:
    """What a root stands on. `free` in bytes for this user; `inodes` None where they are not counted."""

    kind: str
    free: int
    inodes: int | None


def filesystem(path: Path) -> Filesystem:
    """The file system of the nearest existing directory. Does not write."""
    near = nearest(path)
    info = os.statvfs(near)
    kind = _kind(near)
    free = info.f_bavail * info.f_frsize
    if kind in IN_MEMORY:
        # What lies there is memory of the container, and counts against its limit.
        free = min(free, memory.available())
    return Filesystem(kind, free, info.f_favail if info.f_files else None)


def _kind(path: Path) -> str:
    """The type in /proc/self/mountinfo of the longest mount point above the path (proc(5))."""
    real = os.path.realpath(path)
    best, kind = "", "unknown"
    for point, named in mounts():
        if (real == point or real.startswith(point.rstrip("/") + "/")) and len(point) >= len(best):
            best, kind = point, named
    return kind


def allocated(path: Path | str) -> int:
    """Bytes of disk that a file has already; 0 when there is none. Raises OSError."""
    try:
        return os.stat(path).st_blocks * 512
    except FileNotFoundError:
        return 0


def check_space(root: Path, need: int, files: int, *, chosen: bool) -> None:
    """Raise NoSpace unless the whole set fits; refuse to fill a node through a root that nobody chose."""
    place = filesystem(root)
    if not chosen and place.kind in VOLATILE and need > UNCHOSEN_LIMIT:
        raise FilesystemRefused(
            f"{root} is on {place.kind}, nobody chose it, and {units.size(need)} would fill the node",
            hint="name a volume with --cache-dir or MX_CACHE_DIR",
        )
    if need > place.free:
        raise NoSpace(
            f"{root} has no room for the whole set (need {units.size(need)}, free {units.size(place.free)})",
            hint="mx cache gc, a larger volume, or another --cache-dir",
        )
    if place.inodes is not None and files + SPARE_INODES > place.inodes:
        raise NoSpace(f"{root} has no inodes for the whole set (need {files + SPARE_INODES}, free {place.inodes})")


def probe_rename(directory: Path) -> None:
    """Refuse a root that cannot rename: it could never publish. Leaves nothing behind."""
    before, after = (directory / f".{secrets.token_hex(8)}.probe" for _ in range(2))
    try:
        os.close(os.open(before, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666))
        os.rename(before, after)
    except OSError as error:
        if error.errno in NO_RENAME:
            raise cannot_rename(error, directory) from None
        raise refused(error, f"writing in {directory}", directory) from None
    finally:
        for name in (before, after):
            with contextlib.suppress(OSError):
                os.unlink(name)


def check_names(directory: Path, paths: Collection[str]) -> None:
    """Refuse paths below the directory that its file system cannot have, or would take for one another."""
    long = {part for path in paths for part in path.split("/") if len(os.fsencode(part)) > USUAL_NAME}
    for name in sorted(long):
        try:
            os.lstat(directory / name)
        except OSError as error:
            if error.errno == errno.ENAMETOOLONG:
                raise FilesystemRefused(
                    f"{directory} cannot have so long a name: {name!r}",
                    hint="leave it out with --exclude, or use another volume",
                ) from None
    if pairs := collisions(paths):
        _check_collisions(directory, pairs)


def _check_collisions(directory: Path, pairs: Iterable[tuple[str, str]]) -> None:
    """Probes with names of its own."""
    for left, right in pairs:
        token = secrets.token_hex(4)
        kind = ("Aa", "aa") if left.casefold() == right.casefold() else ("\u00e9", "e\u0301")
        first, second = (directory / f".{token}{end}" for end in kind)
        try:
            os.close(os.open(first, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666))
            same = os.path.exists(second)
        except OSError as error:
            raise refused(error, f"writing in {directory}", directory) from None
        finally:
            with contextlib.suppress(OSError):
                os.unlink(first)
        if same:
            raise FilesystemRefused(
                f"{directory} cannot tell these files apart: {left!r} and {right!r}",
                hint="leave one out with --exclude, or use a case-sensitive volume",
            )


def reserve(fd: int, size: int, what: str) -> None:
    """Give the file its blocks now, so that a full disk shows at second 0. Keeps the content; sets the size at least.

    fallocate(2) itself: glibc's posix_fallocate writes zeros where the file system cannot.
    """
    if size == 0:
        return
    number = errno.EINTR
    # tmpfs gives up when a signal comes, also one that only stops the process for a while.
    while number == errno.EINTR:
        if _libc.fallocate(fd, 0, ctypes.c_long(0), ctypes.c_long(size)) == 0:
            return
        number = ctypes.get_errno()
    if number in _FULL:
        raise OSError(number, os.strerror(number), what)
    if os.fstat(fd).st_size < size:
        os.truncate(fd, size)


def sync_filesystem(directory: Path) -> bool:
    """One syncfs(2) instead of an fsync for each of many small files. False where it is not there."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        return bool(_libc.syncfs(fd) == 0)
    except AttributeError:
        return False
    finally:
        os.close(fd)
