"""Small files and directories that several processes and hosts share: written whole, read as strangers left them."""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import stat
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from mx_cli.base.errors import FilesystemRefused
from mx_cli.base.filesystem import nearest, open_regular
from mx_cli.base.oserrors import explain, in_the_way
from mx_cli.base.temporary import temporary_in

HIDDEN = frozenset({errno.ENOENT, errno.ESTALE})
NO_FILE = frozenset({errno.EISDIR, errno.EINVAL, errno.ENXIO, errno.ELOOP})
"""What opening says where a directory, a link, a pipe or a device has a file's name."""
NO_RENAME = frozenset({errno.ENOSYS, errno.EXDEV, errno.ENOTSUP})

T = TypeVar("T")


def names(directory: Path) -> list[str]:
    """The directory's names; empty when it is not there. Raises FilesystemRefused."""
    try:
        return os.listdir(directory)
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise explain(error, f"listing {directory}") from None


def make_dirs(directory: Path) -> None:
    """Like mkdir -p. Raises FilesystemRefused naming owner, mode and who we are."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        # Another host made it, and look-ups here do not know yet: the listing does.
        taken = directory.is_file() or directory.is_symlink()
        if error.errno == errno.EEXIST and directory.name in names(directory.parent) and not taken:
            return
        raise refused(error, f"creating {directory}", directory) from None


def refused(error: OSError, what: str, path: Path) -> FilesystemRefused:
    """The refusal with the state of the nearest directory that exists, or with what has its place."""
    if error.errno in (errno.EEXIST, errno.ENOTDIR, errno.ELOOP) and (why := in_the_way(path)):
        return FilesystemRefused(f"{what}: {why}", hint="choose another place, or move it away")
    found = explain(error, what)
    if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
        raise found
    near = nearest(path)
    info = near.stat()
    mode = stat.S_IMODE(info.st_mode)
    hint = (
        "in Kubernetes set securityContext.fsGroup, or chown the volume once (initial chown); else choose --cache-dir"
    )
    if error.errno == errno.EROFS:
        hint = "mount the volume writable for the pod that fills it"
    return FilesystemRefused(f"{found.what}; {near} belongs to {info.st_uid}:{info.st_gid}, mode {mode:04o}", hint=hint)


def write_all(fd: int, data: bytes) -> None:
    """Write all of it where the descriptor stands. Raises OSError."""
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def write_private(path: Path, data: bytes, *, sync: bool = True) -> None:
    """Write a new file that nobody reads under this name yet. Raises NoSpace, FilesystemRefused."""
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        try:
            write_all(fd, data)
            if sync:
                os.fsync(fd)
        finally:
            os.close(fd)
    except OSError as error:
        if not isinstance(error, FileExistsError):
            with contextlib.suppress(OSError):
                os.unlink(path)
        raise refused(error, f"writing {path}", path.parent) from None


def write_atomic(path: Path, data: bytes) -> None:
    """Replace `path` in one step; readers see the old or the new content, never a part of it."""
    temporary = temporary_in(path.parent)
    write_private(temporary, data)
    try:
        os.rename(temporary, path)
        sync_directory(path.parent)
    except OSError as error:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        if error.errno in NO_RENAME:
            raise cannot_rename(error, path.parent) from None
        raise explain(error, f"renaming to {path}") from None


def cannot_rename(error: OSError, directory: Path) -> FilesystemRefused:
    """The refusal of a place where nothing could ever be published."""
    return FilesystemRefused(
        f"{directory} cannot rename files ({os.strerror(error.errno or 0)})",
        hint="object-store mounts cannot hold a cache; use a local or network file system",
    )


def sync_directory(directory: Path) -> None:
    """Make the directory's names durable, where the file system knows how."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS):
            raise
    finally:
        os.close(fd)


def seen(what: Callable[[], T], patience: float, *, within: Path, pause: Callable[[float], None] = time.sleep) -> T:
    """`what()`, again while look-ups hide a name that listings show, for at most `patience` seconds. Raises OSError.

    Network file systems remember for up to a minute that a name was not there; a listing knows better. `pause` may raise.
    """
    end = time.monotonic() + patience
    while True:
        try:
            return what()
        except OSError as error:
            hidden = error.errno in HIDDEN and error.filename and is_listed(Path(error.filename), within)
            if not hidden or time.monotonic() >= end:
                raise
        pause(0.1)


def is_listed(path: Path, within: Path) -> bool:
    """Whether listings, from `within` downwards, show the path, or show a directory on its way that cannot be entered yet."""
    place = within
    for name in path.relative_to(within).parts:
        try:
            if name not in os.listdir(place):
                return False
        except OSError as error:
            return error.errno in HIDDEN and place != within
        place = place / name
        if place.is_symlink():
            # It can be looked up. What it leads to is not there, and nothing of ours is a link.
            return False
    return True


def read_file(path: Path) -> bytes:
    """All bytes of a regular file; what else took its name (a pipe, a device) is not read. Raises OSError."""
    with open(open_regular(path, follow=True), "rb") as file:
        return file.read()


def make_way(path: Path) -> None:
    """Take what is no regular file off a name that is ours: a directory gets another name, a link or a pipe goes.

    Raises OSError.
    """
    with contextlib.suppress(FileNotFoundError):
        mode = os.lstat(path).st_mode
        if stat.S_ISDIR(mode):
            os.rename(path, temporary_in(path.parent).with_suffix(".foreign"))
        elif not stat.S_ISREG(mode):
            os.unlink(path)


def read_json(path: Path) -> Any:
    """The document, or None when it is missing, hidden, unreadable or not JSON (yet)."""
    try:
        return json.loads(read_file(path))
    except (OSError, ValueError, RecursionError):
        return None


def number_in(document: Mapping[str, Any], name: str) -> float:
    """A number that a record of another process holds; 0 for everything else that stands there."""
    value = document.get(name)
    return value if isinstance(value, (int, float)) and math.isfinite(value) else 0
