"""What a file lies on, and how much of it is in memory: asked of the kernel, not guessed from a path."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import platform
import stat
from pathlib import Path

_NAMES = {
    0x01021994: "tmpfs", 0x858458F6: "ramfs", 0x958458F6: "hugetlbfs", 0xEF53: "ext4", 0x58465342: "xfs",
    0x9123683E: "btrfs", 0x2FC12FC1: "zfs", 0x794C7630: "overlay", 0x6969: "nfs", 0xFF534D42: "cifs",
    0xFE534D42: "smb2", 0x517B: "smb", 0x0BD00BD0: "lustre", 0x65735546: "fuse", 0x00C36400: "ceph",
    0x01021997: "9p", 0x47504653: "gpfs", 0x5346414F: "afs", 0x19830326: "beegfs", 0x73717368: "squashfs",
    0xE0F5E1E2: "erofs",
}  # fmt: skip
NETWORK = frozenset({"nfs", "cifs", "smb2", "smb", "lustre", "fuse", "ceph", "9p", "gpfs", "afs", "beegfs"})
"""Where a read may cross a network, or another process: few large reads, and the page cache stays in between."""
LOCAL = frozenset({"ext4", "xfs", "btrfs", "zfs", "overlay", "tmpfs", "ramfs"})
"""What one kernel alone has mounted: what another boot of it left, nobody writes to any more."""
IN_MEMORY = frozenset({"tmpfs", "ramfs", "hugetlbfs"})

NO_LINK = frozenset({errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK, errno.EACCES, errno.EXDEV})
"""What os.link fails with where there can be no hard link."""
_CACHESTAT = 451
_HAS_CACHESTAT = platform.machine() in ("x86_64", "aarch64", "riscv64", "s390x", "ppc64le", "loongarch64")
_libc = ctypes.CDLL(None, use_errno=True)


class _Range(ctypes.Structure):
    _fields_ = (("offset", ctypes.c_uint64), ("length", ctypes.c_uint64))


class _Stat(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_uint64) for name in ("cached", "dirty", "writeback", "evicted", "recent"))


def kind(fd: int) -> str:
    """The file system's name, or its number in hexadecimal where it has none here."""
    # struct statfs is 120 bytes on 64-bit Linux, and begins with the type.
    buffer = ctypes.create_string_buffer(256)
    if _libc.fstatfs(fd, buffer):
        return "unknown"
    number = ctypes.c_long.from_buffer(buffer).value & 0xFFFFFFFF
    return _NAMES.get(number, hex(number))


def mounts() -> list[tuple[str, str]]:
    """(mount point, type) of what is mounted here, by /proc/self/mountinfo (proc(5)); empty where the kernel does not tell."""
    found = []
    with contextlib.suppress(OSError), open("/proc/self/mountinfo", encoding="latin-1") as file:
        for line in file:
            left, _, right = line.partition(" - ")
            # Spaces and the like are octal escapes there; every other byte is the name's own.
            point = left.split(" ")[4].encode("latin-1").decode("unicode_escape").encode("latin-1")
            found.append((os.fsdecode(point), right.split(" ")[0]))
    return found


def nearest(path: Path) -> Path:
    """The path, or what is there of those above it. A link that leads nowhere is not there."""
    # os.path.exists: Path.exists raises for a name that is too long.
    return next((place for place in (path, *path.parents) if os.path.exists(place)), Path("/"))


def may(mode: int, path: Path) -> bool:
    """Whether this process may do that (os.R_OK | os.W_OK | os.X_OK), by who it acts as and what it is capable of.

    access(2) alone asks for who started it, without capabilities.
    """
    return os.access(path, mode, effective_ids=True)


def is_mount(path: Path) -> bool:
    """Whether something is mounted on the directory; also a part of its own file system, which has no device of its own."""
    return os.path.ismount(path) or os.path.realpath(path) in {point for point, _ in mounts()}


def give_name(source: Path, target: Path, *, exclusive: bool) -> bool:
    """Put a file under its name; exclusive = unless somebody was faster, where the file system can tell.

    The file may keep its first name too. Raises OSError.
    """
    if exclusive:
        try:
            os.link(source, target)
            return True
        except FileExistsError:
            return False
        except OSError as error:
            if error.errno not in NO_LINK:
                raise
    os.rename(source, target)
    return True


def open_regular(path: Path, flags: int = os.O_RDONLY, *, follow: bool = False) -> int:
    """A descriptor of a regular file; what else took its name (a link, a pipe, a device) is not opened. Raises OSError.

    `follow`: a link to a regular file will do.
    """
    # Without O_NONBLOCK the open alone waits for the other end of a pipe.
    fd = os.open(path, flags | os.O_CLOEXEC | os.O_NONBLOCK | (0 if follow else os.O_NOFOLLOW), 0o666)
    if stat.S_ISREG(os.fstat(fd).st_mode):
        return fd
    os.close(fd)
    raise OSError(errno.EINVAL, "not a regular file", str(path))


def version(status: os.stat_result) -> str:
    """Tells one state of a file from another, as far as its metadata can."""
    return f"{status.st_mtime_ns}-{status.st_ino}"


def cached(fd: int, offset: int, length: int) -> int:
    """Bytes of a piece of a file that are in the page cache. Reads nothing.

    Where the kernel does not tell (it hides other users' files), all of them are.
    """
    if length <= 0:
        return 0
    if _HAS_CACHESTAT:
        found = _Stat()
        if _libc.syscall(_CACHESTAT, fd, ctypes.byref(_Range(offset, length)), ctypes.byref(found), 0) == 0:
            return min(length, int(found.cached) * mmap.PAGESIZE)
    return _mincore(fd, offset, length)


def _mincore(fd: int, offset: int, length: int) -> int:
    begin = offset // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
    size = offset + length - begin
    try:
        window = mmap.mmap(fd, size, access=mmap.ACCESS_COPY, offset=begin)
    except (OSError, ValueError):
        return length
    pages = -(-size // mmap.PAGESIZE)
    flags = (ctypes.c_ubyte * pages)()
    first = ctypes.c_char.from_buffer(window)
    try:
        if _libc.mincore(ctypes.c_void_p(ctypes.addressof(first)), ctypes.c_size_t(size), flags):
            return length
    finally:
        del first
        window.close()
    return min(length, sum(flag & 1 for flag in bytes(flags)) * mmap.PAGESIZE)
