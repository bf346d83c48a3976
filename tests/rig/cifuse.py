#!/usr/bin/env python3
"""A FUSE pass-through that is case-insensitive and knows neither symlinks nor hard links (libfuse2, fusepy, root).

  cifuse.py BACKING MOUNT [NAME_MAX]      NAME_MAX=143 imitates eCryptfs; ends with `umount MOUNT`

HIDE=SECS     a name made by one process is ENOENT to every other for SECS (the negative cache of NFS)
NORENAME=1    rename -> ENOSYS        NOAPPEND=1    O_APPEND -> EPERM        LINKS=1    hard links work
HANG=BYTES    a read of bytes from there on, in any file, returns only when BACKING/.go is there: a dead server;
              the first one makes BACKING/.hung
BACKING/.hang while it is there, whatever is asked waits
"""

from __future__ import annotations

import errno
import os
import sys
import time
from typing import Any

from fuse import FUSE, FuseOSError, Operations, fuse_get_context

HIDE = float(os.environ.get("HIDE", "0"))
HANG = int(os.environ.get("HANG", "0"))
STAT_FIELDS = ("st_atime", "st_ctime", "st_gid", "st_mode", "st_mtime", "st_nlink", "st_size", "st_uid")


def caller() -> int:
    """The calling process: FUSE tells its thread only."""
    thread = fuse_get_context()[2]
    try:
        with open(f"/proc/{thread}/status") as file:
            return int(next(line.split()[1] for line in file if line.startswith("Tgid:")))
    except (OSError, StopIteration):
        return int(thread)


class CaseInsensitive(Operations):
    def __init__(self, root: str, name_max: int) -> None:
        self.root, self.name_max = root, name_max
        self.born: dict[str, tuple[int, float]] = {}

    def real(self, path: str) -> str:
        while os.path.exists(os.path.join(self.root, ".hang")):
            time.sleep(0.02)
        parts: list[str] = []
        for name in filter(None, path.split("/")):
            if len(name.encode()) > self.name_max:
                raise FuseOSError(errno.ENAMETOOLONG)
            try:
                same = [other for other in os.listdir(os.path.join(self.root, *parts)) if other.lower() == name.lower()]
            except OSError:
                same = []
            parts.append(same[0] if same else name)
        return os.path.join(self.root, *parts)

    def note_birth(self, real: str) -> None:
        self.born[real] = (caller(), time.monotonic())

    def refuse_hidden(self, real: str) -> None:
        maker, since = self.born.get(real, (0, 0.0))
        if HIDE and maker and maker != caller() and time.monotonic() - since < HIDE:
            raise FuseOSError(errno.ENOENT)

    def getattr(self, path: str, fh: int | None = None) -> dict[str, Any]:
        real = self.real(path)
        self.refuse_hidden(real)
        st = os.lstat(real)
        return {key: getattr(st, key) for key in STAT_FIELDS}

    def readdir(self, path: str, fh: int) -> list[str]:
        return [".", "..", *os.listdir(self.real(path))]

    def symlink(self, target: str, source: str) -> None:
        raise FuseOSError(errno.EPERM)

    def link(self, target: str, source: str) -> None:
        if not os.environ.get("LINKS"):
            raise FuseOSError(errno.EPERM)
        real = self.real(target)
        os.link(self.real(source), real)
        self.note_birth(real)

    def mkdir(self, path: str, mode: int) -> None:
        os.mkdir(self.real(path), mode)

    def rmdir(self, path: str) -> None:
        os.rmdir(self.real(path))

    def unlink(self, path: str) -> None:
        os.unlink(self.real(path))

    def rename(self, old: str, new: str) -> None:
        if os.environ.get("NORENAME"):
            raise FuseOSError(errno.ENOSYS)
        real = self.real(new)
        os.rename(self.real(old), real)
        self.note_birth(real)

    def chmod(self, path: str, mode: int) -> None:
        os.chmod(self.real(path), mode)

    def chown(self, path: str, uid: int, gid: int) -> None:
        pass

    def truncate(self, path: str, length: int, fh: int | None = None) -> None:
        os.truncate(self.real(path), length)

    def utimens(self, path: str, times: tuple[float, float] | None = None) -> None:
        os.utime(self.real(path), times)

    def statfs(self, path: str) -> dict[str, int]:
        st = os.statvfs(self.real(path))
        names = ("f_bavail", "f_bfree", "f_blocks", "f_bsize", "f_favail", "f_ffree", "f_files", "f_frsize")
        return {key: getattr(st, key) for key in names} | {"f_namemax": self.name_max}

    def open(self, path: str, flags: int) -> int:
        if flags & os.O_APPEND and os.environ.get("NOAPPEND"):
            raise FuseOSError(errno.EPERM)
        real = self.real(path)
        self.refuse_hidden(real)
        return os.open(real, flags)

    def create(self, path: str, mode: int, fi: object = None) -> int:
        real = self.real(path)
        # The kernel looked in vain for a hidden name, but the server of an NFS knows better.
        hidden = HIDE and os.path.exists(real)
        fd = os.open(real, os.O_RDWR | os.O_CREAT | (os.O_EXCL if hidden else 0), mode)
        self.note_birth(real)
        return fd

    def read(self, path: str, size: int, offset: int, fh: int) -> bytes:
        if HANG and offset + size > HANG:
            open(os.path.join(self.root, ".hung"), "w").close()
            while not os.path.exists(os.path.join(self.root, ".go")):
                time.sleep(0.02)
        return os.pread(fh, size, offset)

    def write(self, path: str, data: bytes, offset: int, fh: int) -> int:
        return os.pwrite(fh, data, offset)

    def flush(self, path: str, fh: int) -> None:
        pass

    def release(self, path: str, fh: int) -> None:
        os.close(fh)

    def fsync(self, path: str, datasync: int, fh: int) -> None:
        os.fsync(fh)


def main() -> None:
    name_max = int(sys.argv[3]) if len(sys.argv) > 3 else 255
    FUSE(
        CaseInsensitive(sys.argv[1], name_max),
        sys.argv[2],
        foreground=True,
        nothreads=not HANG,
        attr_timeout=0,
        entry_timeout=0,
        allow_other=True,
    )


if __name__ == "__main__":
    main()
