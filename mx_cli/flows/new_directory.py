"""A directory of the reader's own that appears in one step: whole, or not there at all."""

from __future__ import annotations

import contextlib
import errno
import filecmp
import hashlib
import os
import secrets
import shutil
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from mx_cli.base import filesystem
from mx_cli.base.errors import UsageError
from mx_cli.base.oserrors import explain
from mx_cli.base.process import boot_id, is_gone, pid_namespace, start_time
from mx_cli.cache.layout import make_dirs, sync_directory

LONGEST = 80
"""Bytes of a name that is repeated in that of the directory beside it: some file systems allow 143 in all."""
ABANDONED_AFTER = 24 * 3600.0
"""Seconds without a change after which what others fill is left: nothing that they may wait for takes as long."""
_PARTS = ("boot", "namespace", "pid", "start", "token")


class NewDirectory:
    """`path` is what will be there; files that are there already and are not the same are never touched."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def files(self) -> dict[str, Path]:
        """The files that are there; none when it is empty or not there. Raises UsageError when it is no directory."""
        try:
            if not os.path.lexists(self.path):
                return {}
            if self.path.is_symlink() or not self.path.is_dir():
                raise UsageError(f"--to {self.path} is there already, and not a directory", hint="choose another --to")
            return {str(path.relative_to(self.path)): path for path in self.path.rglob("*") if not path.is_dir()}
        except OSError as error:
            raise explain(error, f"looking at {self.path}") from None

    def has(self, sizes: Mapping[str, int | None], *, among_others: bool = False) -> bool:
        """Whether it has files of these names and sizes (None: any). Raises UsageError when it has others."""
        found = self.files()
        if not found:
            return False
        try:
            if (found.keys() == sizes.keys() or (among_others and found.keys() > sizes.keys())) and all(
                size in (None, found[name].stat().st_size) for name, size in sizes.items()
            ):
                return True
        except OSError as error:
            raise explain(error, f"looking at {self.path}") from None
        raise self.other_files()

    @contextlib.contextmanager
    def making(self) -> Iterator[Path]:
        """A directory beside it to fill, which becomes it at the end of the block; after an error nothing of it is left.

        What is filled in must be durable by then, directories too. When the same files are there already, they stay, and
        so do others: that raises UsageError, as does at the beginning what cannot become a directory of one's own. Raises
        FilesystemRefused, NoSpace.
        """
        self._check_place()
        make_dirs(self.path.parent)
        self._sweep()
        own = f"{self._owner()}-{os.getpid()}-{start_time(os.getpid())}-{secrets.token_hex(3)}"
        work = self.path.with_name(self._prefix() + own)
        try:
            make_dirs(work)
            yield work
            self._publish(work)
        except BaseException:
            with contextlib.suppress(OSError):
                shutil.rmtree(work)
            raise

    def _check_place(self) -> None:
        """Raises UsageError where nothing could be put in one step, before anything is filled for it."""
        self.files()
        if os.path.ismount(self.path):
            raise UsageError(
                f"--to {self.path} is a mount point: no directory can take its place in one step",
                hint=f"--to {self.path / 'model'}",
            )

    def _publish(self, work: Path) -> None:
        try:
            os.rename(work, self.path)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise explain(error, f"publishing {self.path}") from None
            if not self._is_same(work):
                raise self.other_files() from None
            shutil.rmtree(work, ignore_errors=True)
        try:
            sync_directory(self.path.parent)
        except OSError as error:
            raise explain(error, f"syncing {self.path.parent}") from None

    def _is_same(self, work: Path) -> bool:
        """Whether the directory has the files of `work`, byte for byte."""
        found, made = self.files(), NewDirectory(work).files()
        try:
            return found.keys() == made.keys() and all(
                filecmp.cmp(found[name], made[name], shallow=False) for name in found
            )
        except OSError as error:
            raise explain(error, f"looking at {self.path}") from None

    def other_files(self) -> UsageError:
        """For files that are there and differ."""
        return UsageError(f"--to {self.path} is there already, with other files in it", hint="choose another --to")

    def _prefix(self) -> str:
        """How all names of what becomes this directory begin. A name has to fit into the shortest limit that there is."""
        name = self.path.name
        if len(os.fsencode(name)) > LONGEST:
            name = hashlib.sha256(os.fsencode(name)).hexdigest()[:16]
        return f".{name}.mx-"

    def _owner(self) -> str:
        """Where a process's number means something: its boot and its pid namespace."""
        return f"{boot_id()[:8]}-{pid_namespace()}"

    def _sweep(self) -> None:
        """Remove what killed commands left, as far as one can tell that they are gone."""
        prefix = self._prefix()
        for path in _below(self.path.parent):
            parts = path.name.removeprefix(prefix).split("-")
            if not path.name.startswith(prefix) or len(parts) != len(_PARTS):
                continue
            with contextlib.suppress(OSError):
                if self._is_left(path, *parts):
                    shutil.rmtree(path)

    def _is_left(self, work: Path, boot: str, namespace: str, pid: str, start: str, token: str) -> bool:
        if boot and self._owner() == f"{boot}-{namespace}":
            return pid.isdecimal() and is_gone(int(pid), start)
        if boot and boot_id() and boot != boot_id()[:8] and _is_local(work):
            return True
        # Another container, or another machine.
        return time.time() - _last_change(work) > ABANDONED_AFTER


def _below(directory: Path) -> list[Path]:
    try:
        return list(directory.iterdir())
    except OSError:
        return []


def _is_local(path: Path) -> bool:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        return filesystem.kind(fd) in filesystem.LOCAL
    finally:
        os.close(fd)


def _last_change(directory: Path) -> float:
    return max(path.lstat().st_mtime for path in (directory, *directory.rglob("*")))
