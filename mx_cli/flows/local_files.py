"""The files of a checkpoint in a directory of this machine, opened one by one."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mx_cli.base import oserrors
from mx_cli.base.errors import IntegrityError, MxError, NotFound, UsageError
from mx_cli.model.header import Header
from mx_cli.model.tables import read_header

ADVICE = "give a directory with config.json or weights, a config.json, or a .safetensors or .gguf file"
_STEP = 1 << 20


class LocalFiles:
    """Whatever opens one raises NotFound, UsageError for what is no regular file, FilesystemRefused."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @contextmanager
    def opened(self, name: str) -> Iterator[tuple[int, os.stat_result]]:
        """The file's descriptor, and its state when it was opened."""
        path = self.folder / name
        with explained(path):
            # O_NONBLOCK: a pipe that took the file's place must not block the open.
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
            try:
                info = os.fstat(fd)
                if not stat.S_ISREG(info.st_mode):
                    raise UsageError(f"not a regular file ({path})", hint=ADVICE)
                yield fd, info
            finally:
                os.close(fd)

    def read(self, name: str, limit: int | None = None) -> bytes:
        """A small file, whole; of a larger one somewhat more than `limit` bytes."""
        with self.opened(name) as (fd, _):
            data = bytearray()
            while (limit is None or len(data) <= limit) and (piece := os.read(fd, _STEP)):
                data += piece
        return bytes(data)

    def header(self, name: str) -> Header:
        """Of a safetensors file. Two small reads; raises IntegrityError too."""
        path = self.folder / name
        with self.opened(name) as (fd, info):

            def piece(offset: int, length: int) -> bytes:
                data = os.pread(fd, length, offset)
                if len(data) < length:
                    raise IntegrityError(f"{path}: changed while it was read")
                return data

            return read_header(piece, info.st_size, str(path))


@contextmanager
def explained(path: Path) -> Iterator[None]:
    """What the system refuses, as the errors of mx."""
    try:
        yield
    except OSError as error:
        raise explain(error, path) from None


def explain(error: OSError, path: Path) -> MxError:
    """The error of mx for the system's at `path`."""
    if error.errno in (errno.ENOENT, errno.ENOTDIR):
        dangling = os.path.islink(path)
        return NotFound(f"{'a link to nothing' if dangling else 'no such file or directory'} ({path})", hint=ADVICE)
    if error.errno == errno.ELOOP:
        return UsageError(f"symbolic links in a circle ({path})", hint=ADVICE)
    if error.errno == errno.ENAMETOOLONG:
        return UsageError(f"a name that is too long ({str(path)[:60]}…)", hint=ADVICE)
    return oserrors.explain(error, f"reading {path}")


def refuse_caches(path: Path, instead: str) -> None:
    """Raises UsageError for a directory that holds models, and is none; `instead` begins the advice to name one of them."""
    snapshots = path / "snapshots"
    if snapshots.is_dir() and ((path / "blobs").is_dir() or (path / "refs").is_dir()):
        found = sorted(item.name for item in snapshots.iterdir())
        advice = f"{instead} {snapshots / found[-1]}" if found else "fetch a snapshot first: mx prefetch hf://org/name"
        raise UsageError(f"a cache of several revisions, not one of them ({path})", hint=advice)
    with explained(path):
        names = os.listdir(path)
    if "CACHEDIR.TAG" in names or any(name.startswith(("models--", "datasets--")) for name in names):
        raise UsageError(f"a cache of models, not one of them ({path})", hint="give a snapshot's directory in it")
