"""A directory of the reader's own that appears in one step: whole, or not there at all."""

from __future__ import annotations

import contextlib
import errno
import filecmp
import os
import secrets
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

from mx_cli.base.errors import UsageError
from mx_cli.base.oserrors import explain
from mx_cli.base.process import boot_id, is_gone, pid_namespace, start_time
from mx_cli.cache.layout import make_dirs, sync_directory


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

    def has(self, sizes: Mapping[str, int | None]) -> bool:
        """Whether it has files of these names and sizes (None: any). Raises UsageError when it has others."""
        found = self.files()
        if not found:
            return False
        try:
            if found.keys() == sizes.keys() and all(
                sizes[name] in (None, path.stat().st_size) for name, path in found.items()
            ):
                return True
        except OSError as error:
            raise explain(error, f"looking at {self.path}") from None
        raise self.other_files()

    @contextlib.contextmanager
    def making(self) -> Iterator[Path]:
        """A directory beside it to fill, which becomes it at the end of the block; after an error nothing of it is left.

        What is filled in must be durable by then, directories too. When the same files are there already, they stay, and
        so do others: that raises UsageError. Raises FilesystemRefused, NoSpace.
        """
        make_dirs(self.path.parent)
        self._sweep()
        own = f"{os.getpid()}-{start_time(os.getpid())}-{secrets.token_hex(3)}"
        work = self.path.with_name(self._prefix() + own)
        try:
            make_dirs(work)
            yield work
            self._publish(work)
        except BaseException:
            with contextlib.suppress(OSError):
                shutil.rmtree(work)
            raise

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
        return f".{self.path.name}.mx-{boot_id()[:8]}-{pid_namespace()}-"

    def _sweep(self) -> None:
        """Remove what commands of this boot left that were killed. Of another container nobody can tell whether it lives."""
        prefix = self._prefix()
        with contextlib.suppress(OSError):
            for path in self.path.parent.iterdir():
                pid, _, rest = path.name.removeprefix(prefix).partition("-")
                if path.name.startswith(prefix) and pid.isdecimal() and is_gone(int(pid), rest.partition("-")[0]):
                    shutil.rmtree(path, ignore_errors=True)
