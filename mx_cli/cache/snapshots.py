"""Manifests and the snapshots that they vouch for: what is complete, and what can be reused."""

from __future__ import annotations

import json
import os
import stat
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from mx_cli.base import canonical
from mx_cli.base.errors import IntegrityError
from mx_cli.base.filesystem import may
from mx_cli.base.oserrors import explain
from mx_cli.cache.files import make_dirs, names, read_file, seen, sync_directory, write_atomic
from mx_cli.cache.layout import Model
from mx_cli.engine.verify import digest_of
from mx_cli.model.manifest import FileRecord, Manifest


@dataclass(frozen=True, slots=True)
class Missing:
    """A file that a manifest promises and this process does not get: `why` is absent, size, unreadable or sparse."""

    path: str
    why: str


class Snapshots:
    """All manifests of a model. `patience`: seconds for which a name seen in a listing may be hidden from look-ups.

    `pause` waits in the meantime, and may raise to stop.
    """

    def __init__(self, model: Model, patience: float = 0.0, pause: Callable[[float], None] = time.sleep) -> None:
        self._model = model
        self._patience = patience
        self._pause = pause
        self._read: dict[Path, Manifest] = {}
        self._digests: dict[tuple[Path, int, int], str] = {}

    def of(self, revision: str) -> list[Manifest]:
        """The manifests of a revision. One that cannot be read is not there: nothing is trusted because of it."""
        directory = self._model.manifests(revision)
        if revision not in names(directory.parent):
            return []
        found = (self.read(directory / name) for name in sorted(names(directory)) if is_manifest(name))
        return [manifest for manifest in found if manifest]

    def revisions(self) -> list[str]:
        return sorted(names(self._model.path / "manifests"))

    def everything(self) -> list[Manifest]:
        return [manifest for revision in self.revisions() for manifest in self.of(revision)]

    def read(self, path: Path) -> Manifest | None:
        if path not in self._read:
            try:
                data = seen(lambda: read_file(path), self._patience, within=self._model.path, pause=self._pause)
                self._read[path] = Manifest.from_json(json.loads(data), str(path))
            except (OSError, ValueError, RecursionError, IntegrityError):
                return None
        return self._read[path]

    def complete(self, revision: str, files: frozenset[str], weights: frozenset[str]) -> Manifest | None:
        """A manifest that covers `files`, whose directory holds no other weight set, and whose files are really there."""
        manifests = self.of(revision)
        for manifest in manifests:
            if not files <= {record.path for record in manifest.files}:
                continue
            if weights and weights_in(manifests, manifest.directory) != weights:
                continue
            if not self.missing(manifest, files):
                return manifest
        return None

    def missing(self, manifest: Manifest, files: Iterable[str] | None = None) -> list[Missing]:
        """What of the manifest's files (or of `files`) is not on the disk: names, sizes, and blocks behind the sizes."""
        wanted = None if files is None else set(files)
        root = self._model.snapshot(manifest.directory)
        found = []
        for record in manifest.files:
            if wanted is not None and record.path not in wanted:
                continue
            why = self._wrong(root / record.path, record)
            if why:
                found.append(Missing(record.path, why))
        return found

    def _wrong(self, path: Path, record: FileRecord) -> str:
        try:
            info = seen(
                lambda: os.stat(path, follow_symlinks=False),
                self._patience,
                within=self._model.path,
                pause=self._pause,
            )
        except OSError:
            return "absent"
        if not stat.S_ISREG(info.st_mode) or info.st_size != record.size:
            return "size"
        if not may(os.R_OK, path):
            return "unreadable"
        return "sparse" if is_sparse(path, info) and not self._is_packed(path, info, record) else ""

    def _is_packed(self, path: Path, info: os.stat_result, record: FileRecord) -> bool:
        """Whether the holes are the file's own zeros, which some file systems and copies do not write. Reads all of it."""
        state = path, info.st_ino, info.st_mtime_ns
        if state not in self._digests:
            try:
                self._digests[state] = digest_of(path, lambda: self._pause(0.0))
            except OSError:
                return False
        return self._digests[state] == record.xxh3

    def directory_for(self, revision: str, weights: frozenset[str]) -> str:
        """The snapshot directory of a weight set: the plain one unless another weight set lives there."""
        manifests = self.of(revision)
        for directory in dict.fromkeys([revision, *(manifest.directory for manifest in manifests)]):
            present = weights_in(manifests, directory)
            if not present or not weights or present == weights:
                return directory
        return f"{revision}+{canonical.sha256(sorted(weights))[:8]}"

    def publish(self, manifest: Manifest) -> None:
        """Write the commit point. All its files are in place, verified and durable. Idempotent."""
        directory = self._model.manifests(manifest.revision)
        make_dirs(directory)
        write_atomic(directory / f"{manifest.selection}.json", canonical.dumps(manifest.to_json()))
        try:
            sync_directory(directory.parent)
        except OSError as error:
            raise explain(error, f"syncing {directory.parent}") from None


def is_manifest(name: str) -> bool:
    return name.endswith(".json") and not name.startswith(".")


def is_sparse(path: Path, info: os.stat_result) -> bool:
    """Whether there are holes behind the size. Fewer blocks alone mean nothing: file systems compress and pack."""
    if info.st_blocks * 512 >= info.st_size or info.st_size == 0:
        return False
    try:
        fd = os.open(path, os.O_RDONLY)
    except OSError:
        return False
    try:
        return os.lseek(fd, 0, os.SEEK_HOLE) < info.st_size
    except OSError:
        return False
    finally:
        os.close(fd)


def weights_in(manifests: Iterable[Manifest], directory: str) -> frozenset[str]:
    """All weight files that manifests put into one directory."""
    return frozenset(path for m in manifests if m.directory == directory for path in m.weights)
