"""What the operating system's refusals mean to the user."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from mx_cli.base.errors import FilesystemRefused, MxError, NoSpace, Unreachable

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
_PASSING = frozenset({errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EAGAIN, errno.EREMOTEIO})


def explain(error: OSError, what: str) -> MxError:
    """NoSpace for a full disk or quota, FilesystemRefused for everything else. `what` says what was being done."""
    said = error.strerror or str(error)
    if error.errno == errno.EFBIG:
        return NoSpace(f"{what}: {said}", hint="ulimit -f, or a file system without such large files, is in the way")
    if error.errno in _FULL:
        return NoSpace(f"{what}: {said}", hint="free space (mx cache gc), or choose another --cache-dir")
    if error.errno in (errno.EACCES, errno.EPERM):
        groups = ",".join(map(str, sorted({os.getgid(), *os.getgroups()})))
        said += f" (this process is uid {os.geteuid()}, groups {groups})"
    many = error.errno in (errno.EMFILE, errno.ENFILE)
    return FilesystemRefused(f"{what}: {said}", hint="more open files: ulimit -n 65536" if many else "")


def explain_reading(error: OSError, what: str) -> MxError:
    """The same of what is read: a medium or a mount that may answer the next time is Unreachable, and so asked again."""
    if error.errno in _PASSING:
        return Unreachable(f"{what}: {error.strerror or error}")
    return explain(error, what)


def reason(error: Exception) -> str:
    """An error of a library or the system in its own words."""
    text = str(error) or type(error).__name__
    return (error.strerror or text) if isinstance(error, OSError) else text


def in_the_way(directory: Path) -> str:
    """What keeps a directory from being there: the first on its path that is something else. Empty when nothing does."""
    for place in (*reversed(directory.parents), directory):
        if os.path.lexists(place) and not os.path.isdir(place):
            return f"{place} is a link that leads nowhere" if place.is_symlink() else f"{place} is not a directory"
    return ""
