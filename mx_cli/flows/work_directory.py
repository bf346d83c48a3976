"""Directories in which a command fills what it will publish: one for each, and gone with it, or with the next command."""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from mx_cli.base import filesystem
from mx_cli.base.process import boot_id, is_gone, pid_namespace, start_time
from mx_cli.cache.files import make_dirs

ABANDONED_AFTER = 24 * 3600.0
"""Seconds without a change after which what others fill is left: nothing that they may wait for takes as long."""
LOCKED_AFTER = 10.0
"""Seconds within which who makes a directory has also locked it."""
_PARTS = ("boot", "namespace", "pid", "start", "token")


def owner() -> str:
    """Where a process's number means something: its boot and its pid namespace."""
    return f"{boot_id()[:8]}-{pid_namespace()}"


class WorkDirectories:
    """Those in `place` whose names begin with `prefix`."""

    def __init__(self, place: Path, prefix: str) -> None:
        self.place, self.prefix = place, prefix

    @contextlib.contextmanager
    def making(self) -> Iterator[Path]:
        """A new one of this process; nothing of it is left after the block. Raises FilesystemRefused."""
        own = f"{owner()}-{os.getpid()}-{start_time(os.getpid())}-{secrets.token_hex(3)}"
        work = self.place / (self.prefix + own)
        make_dirs(work)
        fd = os.open(work, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            # A hint for other containers of this kernel, which cannot look at our process.
            with contextlib.suppress(OSError):
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield work
        finally:
            os.close(fd)
            with contextlib.suppress(OSError):
                shutil.rmtree(work)

    def owns(self, name: str) -> bool:
        """Whether this is the name of one of them."""
        return name.startswith(self.prefix) and len(self._parts(name)) == len(_PARTS)

    def sweep(self, removing: Callable[[Path], None] = lambda work: None) -> None:
        """Remove what killed commands left, as far as one can tell that they are gone; `removing` is called before."""
        try:
            found = [path for path in self.place.iterdir() if self.owns(path.name)]
        except OSError:
            return
        for path in found:
            with contextlib.suppress(OSError):
                if _is_left(path, *self._parts(path.name)):
                    removing(path)
                    shutil.rmtree(path)

    def _parts(self, name: str) -> list[str]:
        return name.removeprefix(self.prefix).split("-")


def _is_left(work: Path, boot: str, namespace: str, pid: str, start: str, token: str) -> bool:
    if boot and owner() == f"{boot}-{namespace}":
        return pid.isdecimal() and is_gone(int(pid), start)
    silent = time.time() - _last_change(work)
    if boot and boot_id() and _is_local(work):
        # Another boot of this machine, or another container on it.
        return boot != boot_id()[:8] or (silent > LOCKED_AFTER and not _is_locked(work))
    return silent > ABANDONED_AFTER


def _is_locked(work: Path) -> bool:
    fd = os.open(work, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


def _is_local(path: Path) -> bool:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        return filesystem.kind(fd) in filesystem.LOCAL
    finally:
        os.close(fd)


def _last_change(directory: Path) -> float:
    return max(path.lstat().st_mtime for path in (directory, *directory.rglob("*")))
