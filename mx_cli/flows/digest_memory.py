"""Digests of weight files that were read before, so that `mx hash DIR` reads 400 GB once.

A file is recognised by device, inode, size, mtime and ctime in nanoseconds. Files that changed within the last two
seconds are not remembered: a second change could fall on the same time stamp.

    <folder>/digests/<user id>/<32 hex of the file's key>.json    {"format", "key", "rows"}: one for each weight file
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from mx_cli.base import canonical
from mx_cli.model.digest import FILE_DTYPE, TensorDigest

FORMAT = 1
SETTLED = 2.0
KEPT = 1000


class DigestMemory:
    """A memory below `folder`. It only saves work: what can't be read or written is as if it had never been there.

    `forgetful`: recall nothing, but remember. `clock`: seconds since 1970, as the file system stamps them.
    """

    def __init__(self, folder: Path, *, forgetful: bool = False, clock: Callable[[], float] = time.time) -> None:
        # Entries of others are not believed, so each user of a shared cache has its own.
        self._folder = folder / "digests" / str(os.geteuid())
        self._forgetful = forgetful
        self._clock = clock

    def recall(self, path: str, info: os.stat_result) -> tuple[TensorDigest, ...] | None:
        """The rows of the file with that state, `path` being its path in the checkpoint."""
        if self._forgetful:
            return None
        key = _key(path, info)
        try:
            with (self._folder / _name(key)).open("rb") as file:
                if os.fstat(file.fileno()).st_uid != os.geteuid():
                    return None
                document = json.load(file)
            if document["format"] != FORMAT or document["key"] != key:
                return None
            rows = tuple(TensorDigest.from_json(row) for row in document["rows"])
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return tuple(row._replace(name=path) if row.dtype == FILE_DTYPE else row for row in rows)

    def remember(self, path: str, info: os.stat_result, rows: Sequence[TensorDigest]) -> None:
        """Keep the rows, unless the file changed a moment ago. Atomic; forgets the oldest beyond 1,000 files."""
        if self._clock() - max(info.st_mtime, info.st_ctime) < SETTLED:
            return
        key = _key(path, info)
        final = self._folder / _name(key)
        fresh = final.with_suffix(f".{os.getpid()}.tmp")
        document = {"format": FORMAT, "key": key, "rows": [row.to_json() for row in rows]}
        try:
            self._folder.parent.mkdir(parents=True, exist_ok=True)
            self._folder.mkdir(mode=0o700, exist_ok=True)
            fresh.write_bytes(canonical.dumps(document))
            fresh.replace(final)
            self._forget()
        except OSError:
            with contextlib.suppress(OSError):
                fresh.unlink()

    def _forget(self) -> None:
        names = os.listdir(self._folder)
        if len(names) <= KEPT:
            return
        oldest = sorted((self._folder / name).stat().st_mtime_ns for name in names)[KEPT // 10]
        for name in names:
            if (self._folder / name).stat().st_mtime_ns <= oldest:
                (self._folder / name).unlink(missing_ok=True)


def _key(path: str, info: os.stat_result) -> list[str | int]:
    # Read as tensors and read as one file give different rows.
    kind = "tensors" if path.endswith(".safetensors") else "file"
    return [kind, info.st_dev, info.st_ino, info.st_size, info.st_mtime_ns, info.st_ctime_ns]


def _name(key: list[str | int]) -> str:
    return f"{canonical.sha256(key)[:32]}.json"
