"""Files that need no fetching: a manifest of this model vouches for them already, here or in another snapshot."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from collections.abc import Callable
from pathlib import Path

from mx_cli.base.oserrors import explain
from mx_cli.base.temporary import temporary_in
from mx_cli.cache.files import make_dirs, write_all
from mx_cli.cache.layout import Model
from mx_cli.cache.snapshots import Snapshots
from mx_cli.engine.verify import WholeDigest
from mx_cli.model.manifest import Entry, FileRecord, Manifest

FICLONE = 0x40049409
COPY_STEP = 64 << 20
SMALL = 256 << 10
_NAMES = frozenset({"sha256", "git-sha256", "git-sha1", "crc64nvme"})
"""Digests that two different files do not share by chance."""
Found = tuple[FileRecord, Manifest, bool]
"""(the record, the manifest that it is from, whether a new name was made)."""


class Reuse:
    """Finds files that need no fetching. Reads all manifests of the model once."""

    def __init__(self, model: Model, snapshots: Snapshots) -> None:
        self._model, self._snapshots = model, snapshots
        self._records: dict[tuple[str, ...], list[tuple[FileRecord, Manifest]]] = {}
        for manifest in snapshots.everything():
            for record in manifest.files:
                for key in _keys(record.path, record.size, record.validator, dict(record.digests)):
                    self._records.setdefault(key, []).append((record, manifest))

    def in_place(self, entry: Entry, revision: str, directory: str) -> Found | None:
        """The file under its final name, if a manifest of this very snapshot vouches for it."""
        for manifest in self._snapshots.of(revision):
            record = manifest.record(entry.path) if manifest.directory == directory else None
            if record and entry.size in (None, record.size) and self._usable(manifest, record):
                return record, manifest, False
        return None

    def elsewhere(self, entry: Entry, target: Path, temporary: Path, moved: Callable[[int], None]) -> Found | None:
        """An equal file of another snapshot, by digest or strong validator, linked (else cloned, else copied) to `target`.

        `temporary`: a free name for the copy in the making. `moved` is called as it grows.
        """
        if entry.size is None:
            return None
        validator = entry.validator if entry.strong else ""
        for key in _keys(entry.path, entry.size, validator, dict(entry.digests)):
            for record, manifest in self._records.get(key, ()):
                source = self._model.snapshot(manifest.directory) / record.path
                if source == target or not self._usable(manifest, record):
                    continue
                make_dirs(target.parent)
                duplicate(source, target, temporary, moved)
                digests = record.digests or entry.digests
                return FileRecord(entry.path, record.size, record.xxh3, entry.validator, digests), manifest, True
        return None

    def _usable(self, manifest: Manifest, record: FileRecord) -> bool:
        """Whether the file is there. Small ones are read, too: that costs little, and a damaged configuration much."""
        if self._snapshots.missing(manifest, [record.path]):
            return False
        if record.size > SMALL:
            return True
        try:
            return WholeDigest.of((self._model.snapshot(manifest.directory) / record.path).read_bytes()) == record.xxh3
        except OSError:
            return False


def _keys(path: str, size: int, validator: str, digests: dict[str, str]) -> list[tuple[str, ...]]:
    keys = [(kind, value, str(size)) for kind, value in digests.items() if kind in _NAMES]
    return keys + ([("validator", path, validator, str(size))] if validator else [])


def duplicate(
    source: Path, target: Path, temporary: Path | None = None, moved: Callable[[int], None] = lambda count: None
) -> str:
    """Give `target` the content of `source`, replacing it in one step: a hard link, else a clone, else a copy.

    Returns which. `moved` is called as a copy grows, with the bytes since the last call, and may raise to stop.
    Raises NoSpace, FilesystemRefused.
    """
    temporary = temporary or temporary_in(target.parent)
    try:
        how = _link(source, temporary) or clone_or_copy(source, temporary, moved)
        os.rename(temporary, target)
        return how
    except OSError as error:
        raise explain(error, f"copying {source} to {target}") from None
    finally:
        # rename(2) of two names of one file does nothing and keeps both.
        with contextlib.suppress(OSError):
            os.unlink(temporary)


def link_in_place(source: Path, target: Path) -> bool:
    """Make `target` a hard link to `source`, replacing it in one step; False where that is not possible.

    Raises NoSpace, FilesystemRefused.
    """
    temporary = temporary_in(target.parent)
    try:
        if not _link(source, temporary):
            return False
        os.rename(temporary, target)
        return True
    except OSError as error:
        raise explain(error, f"linking {source} to {target}") from None
    finally:
        # rename(2) of two names of one file does nothing and keeps both.
        with contextlib.suppress(OSError):
            os.unlink(temporary)


def _link(source: Path, target: Path) -> str:
    try:
        os.link(source, target)
        return "link"
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.ENOENT):
            raise
        return ""


def clone_or_copy(source: Path, target: Path, moved: Callable[[int], None]) -> str:
    """A new file with the content of `source` and blocks of its own. Raises OSError."""
    with open(source, "rb") as reading, open(target, "xb") as writing:
        try:
            fcntl.ioctl(writing.fileno(), FICLONE, reading.fileno())
            return "clone"
        except OSError:
            _copy(reading.fileno(), writing.fileno(), moved)
        os.fsync(writing.fileno())
        return "copy"


def _copy(source: int, target: int, moved: Callable[[int], None]) -> None:
    left = os.fstat(source).st_size
    while left > 0:
        try:
            count = os.copy_file_range(source, target, min(left, COPY_STEP))
        except OSError as error:
            if error.errno not in (errno.EXDEV, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL, errno.EBADF):
                raise
            count = _copy_some(source, target)
        if count == 0:
            return
        left -= count
        moved(count)


def _copy_some(source: int, target: int) -> int:
    data = os.read(source, 1 << 20)
    write_all(target, data)
    return len(data)
