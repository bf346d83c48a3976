"""A checkpoint on this machine's file system, read for its identity: its files, its config, its tensor table."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from mx_cli.base.cancel import Stop
from mx_cli.base.errors import IntegrityError, NotFound, UsageError
from mx_cli.engine.verify import read_through
from mx_cli.flows.digest_memory import DigestMemory
from mx_cli.flows.local_files import ADVICE, LocalFiles, explain, explained, refuse_caches
from mx_cli.model import hf_config, json_strict, shard_index
from mx_cli.model.digest import TensorDigest, digester
from mx_cli.model.selection import Selection, index_files, is_weight, read_index, select
from mx_cli.model.tables import whole_table

MAX_FILES = 100_000
_SKIPPED = (".git", ".cache", ".locks")


class LocalModel:
    """A directory or a single file. Opening it looks at names only; `config` and `table` read.

    Raises NotFound (nothing there, or nothing of a model in it), UsageError (a FIFO, a cache's root, a config without
    one meaning) and FilesystemRefused (unreadable).
    """

    def __init__(self, path: str) -> None:
        if "\0" in path:
            raise UsageError(f"not a path ({path!a}: NUL in it)")
        self.path = Path(path).expanduser()
        with explained(self.path):
            info = os.stat(self.path)
        self.folder = self.path
        self.selection: Selection | None = None
        if stat.S_ISREG(info.st_mode):
            self.folder = self.path.parent
            self._open_file(self.path.name, info.st_size)
        elif stat.S_ISDIR(info.st_mode):
            self._open_folder()
        else:
            raise UsageError(f"not a file or a directory ({self.path})", hint=ADVICE)

    def _open_file(self, name: str, size: int) -> None:
        if shard_index.is_index(name):
            raise UsageError(f"a shard index, not a model ({self.path})", hint=f"mx hash {self.folder}")
        self.config_name = name if name.endswith(".json") else None
        if is_weight(name):
            self.selection = select([(name, size)])
        elif not self.config_name:
            raise UsageError(f"neither weights nor a config ({self.path})", hint=ADVICE)

    def _open_folder(self) -> None:
        refuse_caches(self.path, "mx hash")
        listing = list(_walk(self.path))
        names = {name for name, _ in listing}
        self.config_name = "config.json" if "config.json" in names else None
        indexes = {name: read_index(name, self.read_small(name)) for name in index_files(names)}
        for index in indexes.values():
            if not any(map(is_weight, names)):
                raise NotFound(
                    f"an index without its shards ({self.path / index.name}: none of {len(index.shards)} is there)",
                    hint="fetch the weights first: mx prefetch URI",
                )
        if any(map(is_weight, names)):
            self.selection = select(listing, indexes)
        elif not self.config_name:
            raise NotFound(f"no config.json and no weights ({self.path}: {len(names)} files)", hint=ADVICE)

    def read_small(self, name: str) -> bytes:
        """The bytes of a JSON file of the model."""
        return LocalFiles(self.folder).read(name, json_strict.MAX_BYTES)

    def config(self) -> dict[str, Any] | None:
        """The normalised config, None when there is none."""
        if self.config_name is None:
            return None
        return hf_config.load(self.read_small(self.config_name), str(self.folder / self.config_name))

    def table(
        self,
        memory: DigestMemory | None,
        known: Mapping[str, Sequence[TensorDigest]],
        *,
        threads: int,
        stop: Stop | None,
        on_bytes: Callable[[int], None],
    ) -> tuple[TensorDigest, ...]:
        """The tensor table: rows that are `known` (by path), else remembered, else read, several files at once."""
        if self.selection is None:
            raise NotFound(f"no weights ({self.path})", hint="--kind config identifies the configuration alone")

        ended: list[BaseException] = []

        def check() -> None:
            if ended:
                raise ended[0]
            if stop:
                stop.check()

        def rows(path: str) -> Sequence[TensorDigest]:
            return known[path] if path in known else self._rows(path, memory, check, on_bytes)

        prefixes = dict(self.selection.weights)
        with ThreadPoolExecutor(max(1, min(threads, len(prefixes)))) as pool:
            pending = [pool.submit(rows, path) for path in prefixes]
            try:
                found = [future.result() for future in pending]
            except BaseException as error:
                # The other files must not be read to their ends first.
                ended.append(error)
                pool.shutdown(cancel_futures=True)
                raise
        tables = dict(zip(prefixes, found, strict=True))
        return whole_table(tables, prefixes, self.selection.indexes)

    def _rows(
        self, path: str, memory: DigestMemory | None, check: Callable[[], None], on_bytes: Callable[[int], None]
    ) -> tuple[TensorDigest, ...]:
        with LocalFiles(self.folder).opened(path) as (fd, info):
            remembered = memory.recall(path, info) if memory else None
            if remembered is not None:
                return remembered
            taker = digester(path, info.st_size)

            def take(view: memoryview) -> None:
                taker.update(view)
                on_bytes(len(view))
                check()

            read_through(fd, take, 0, info.st_size)
            after = os.fstat(fd)
            if (after.st_size, after.st_mtime_ns) != (info.st_size, info.st_mtime_ns):
                raise IntegrityError(
                    f"changed while it was read ({self.folder / path})", hint="run it again when it rests"
                )
            rows = taker.finish()
            if memory:
                memory.remember(path, info, rows)
            return rows


def _walk(top: Path) -> Iterator[tuple[str, int]]:
    """(relative path, size) of the regular files below, links followed, each folder once."""
    seen: set[tuple[int, int]] = set()
    waiting = [""]
    count = 0
    while waiting:
        folder = waiting.pop()
        with explained(top / folder):
            info = os.stat(top / folder)
            entries = sorted(os.scandir(top / folder), key=lambda entry: entry.name)
        if (info.st_dev, info.st_ino) in seen:
            continue
        seen.add((info.st_dev, info.st_ino))
        for entry in entries:
            path = f"{folder}/{entry.name}" if folder else entry.name
            found = _kind(entry, path, top)
            if found is None:
                if entry.name not in _SKIPPED:
                    waiting.append(path)
            elif found >= 0:
                yield path, found
                count += 1
        if count > MAX_FILES:
            raise UsageError(f"not a model ({top}: more than {MAX_FILES} files)", hint=ADVICE)


def _kind(entry: os.DirEntry[str], path: str, top: Path) -> int | None:
    """The size of a regular file, None for a folder, -1 for what has no bytes of a model."""
    matters = path == "config.json" or is_weight(path) or shard_index.is_index(path)
    try:
        info = entry.stat()
    except OSError as error:
        if not matters:
            return -1
        raise explain(error, top / path) from None
    if stat.S_ISDIR(info.st_mode):
        return None
    if stat.S_ISREG(info.st_mode):
        return info.st_size
    if matters:
        raise UsageError(
            f"not a regular file ({top / path})", hint="replace the pipe, socket or device by the file itself"
        )
    return -1
