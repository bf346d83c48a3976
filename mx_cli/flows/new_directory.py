"""A directory of the reader's own, whole or not there at all: it appears in one step, and inside a mount point file by file."""

from __future__ import annotations

import contextlib
import errno
import filecmp
import hashlib
import json
import os
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path

from mx_cli.base.errors import UsageError
from mx_cli.base.filesystem import give_name, is_mount, may
from mx_cli.base.oserrors import explain
from mx_cli.cache.files import NO_FILE, make_dirs, read_file, sync_directory, write_private
from mx_cli.flows.fill_directory import LAST
from mx_cli.flows.work_directory import WorkDirectories
from mx_cli.model.paths import fault

LONGEST = 80
"""Bytes of a name that is repeated in that of the directory beside it: some file systems allow 143 in all."""
FILES, GIVEN = "files", "given.json"


class NewDirectory:
    """`path` is what will be there; files that are there already and are not the same are never touched.

    Usually it is filled beside its place, and renamed. Where nothing can take its place (a mount point, or its parent is
    somebody else's), it is filled inside:

        path/.mx-to-<owner>/files/…       what is filled, until all of it is whole and durable
        path/.mx-to-<owner>/given.json    while files get their names: {name: inode}, so that the next command can take
                                          those back which a killed one gave. Small files, which name others, come last.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._inside = WorkDirectories(path, ".mx-to-")
        self._beside = WorkDirectories(path.parent, self._prefix())

    def files(self) -> dict[str, Path]:
        """The files that are there; none when it is empty or not there. Raises UsageError when it is no directory."""
        try:
            if not os.path.lexists(self.path):
                return {}
            if self.path.is_symlink() or not self.path.is_dir():
                raise UsageError(f"--to {self.path} is there already, and not a directory", hint="choose another --to")
            return self._files_of(self.path)
        except OSError as error:
            raise explain(error, f"looking at {self.path}") from None

    def _files_of(self, directory: Path) -> dict[str, Path]:
        found = {path.relative_to(directory): path for path in directory.rglob("*") if not path.is_dir()}
        return {str(name): path for name, path in found.items() if not self._inside.owns(name.parts[0])}

    def has(self, sizes: Mapping[str, int | None], *, among_others: bool = False) -> bool:
        """Whether it has files of these names and sizes (None: any). Raises UsageError when it has others."""
        found = self.files()
        if not found:
            return False
        try:
            if (found.keys() == sizes.keys() or (among_others and found.keys() > sizes.keys())) and all(
                size in (None, found[name].stat().st_size) for name, size in sizes.items()
            ):
                if not among_others:
                    # All of them have their names, and keep them.
                    self._inside.sweep()
                return True
        except OSError as error:
            raise explain(error, f"looking at {self.path}") from None
        self._inside.sweep(self._take_back)
        if not self.files():
            return False
        raise self.other_files()

    @contextlib.contextmanager
    def making(self) -> Iterator[Path]:
        """A directory to fill, which becomes it at the end of the block; after an error nothing of it is left.

        What is filled in must be durable by then, directories too. When the same files are there already, they stay, and
        so do others: that raises UsageError, as does at the beginning what cannot become a directory of one's own. Raises
        FilesystemRefused, NoSpace.
        """
        self.files()
        make_dirs(self.path.parent)
        self._beside.sweep()
        self._inside.sweep(self._take_back)
        if self._has_to_stay():
            with self._inside.making() as work:
                make_dirs(work / FILES)
                yield work / FILES
                self._publish_inside(work)
        else:
            with self._beside.making() as work:
                yield work
                self._publish(work)

    def _has_to_stay(self) -> bool:
        """Whether the directory is there, and nothing can take its place."""
        return self.path.is_dir() and (is_mount(self.path) or not may(os.W_OK | os.X_OK, self.path.parent))

    def _publish(self, work: Path) -> None:
        try:
            self._take_over(work)
            os.rename(work, self.path)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise explain(error, f"publishing {self.path}") from None
            if not self._is_same(work):
                raise self.other_files() from None
        self._sync(self.path.parent)

    def _take_over(self, work: Path) -> None:
        """What an empty directory that is there allows to whom is also meant for what takes its place."""
        with contextlib.suppress(FileNotFoundError):
            there, new = self.path.stat(), work.stat()
            if (there.st_uid, there.st_gid) != (new.st_uid, new.st_gid):
                with contextlib.suppress(PermissionError):
                    os.chown(work, there.st_uid, there.st_gid)
            work.chmod(stat.S_IMODE(there.st_mode))

    def _is_same(self, work: Path) -> bool:
        """Whether the directory has the files of `work`, byte for byte."""
        found, made = self.files(), self._files_of(work)
        try:
            return found.keys() == made.keys() and all(
                filecmp.cmp(found[name], made[name], shallow=False) for name in found
            )
        except OSError as error:
            raise explain(error, f"looking at {self.path}") from None

    def _publish_inside(self, work: Path) -> None:
        files = self._files_of(work / FILES)
        if self.files():
            if not self._is_same(work / FILES):
                raise self.other_files()
            return
        try:
            self._give_all(work / GIVEN, files)
        except BaseException:
            with contextlib.suppress(OSError):
                self._take_back(work)
            raise

    def _give_all(self, note: Path, files: Mapping[str, Path]) -> None:
        try:
            write_private(note, json.dumps({name: path.stat().st_ino for name, path in files.items()}).encode())
            for name in sorted(files, key=lambda name: (name.endswith(LAST), name)):
                self._give(files[name], self.path / name)
            for place in {parent for name in files for parent in Path(name).parents}:
                self._sync(self.path / place)
            note.unlink()
        except OSError as error:
            raise explain(error, f"publishing {self.path}") from None

    def _give(self, source: Path, target: Path) -> None:
        make_dirs(target.parent)
        if not os.path.lexists(target) and give_name(source, target, exclusive=True):
            return
        # Another command is publishing, too.
        if not filecmp.cmp(source, target, shallow=False):
            raise self.other_files()
        os.rename(source, target)

    def _take_back(self, work: Path) -> None:
        """Remove what was given its name from `work`, whose command did not come to its end. Raises OSError."""
        root = self.path.resolve()
        for name, inode in _noted(work / GIVEN).items():
            place = self.path / name
            # Whoever may write here could have left a note of other people's files.
            if fault(name) or not place.parent.resolve().is_relative_to(root):
                continue
            with contextlib.suppress(FileNotFoundError):
                if place.lstat().st_ino == inode:
                    place.unlink()

    def other_files(self) -> UsageError:
        """For files that are there and differ."""
        return UsageError(f"--to {self.path} is there already, with other files in it", hint="choose another --to")

    def _prefix(self) -> str:
        """How all names of what becomes this directory begin. A name has to fit into the shortest limit that there is."""
        name = self.path.name
        if len(os.fsencode(name)) > LONGEST:
            name = hashlib.sha256(os.fsencode(name)).hexdigest()[:16]
        return f".{name}.mx-"

    def _sync(self, directory: Path) -> None:
        try:
            sync_directory(directory)
        except OSError as error:
            raise explain(error, f"syncing {directory}") from None


def _noted(note: Path) -> dict[str, object]:
    """What a note says of names and inodes: nothing where there is none, or it is no note. Raises OSError."""
    try:
        given = json.loads(read_file(note))
    except (FileNotFoundError, ValueError, RecursionError):
        return {}
    except OSError as error:
        if error.errno in NO_FILE:
            return {}
        raise
    return given if isinstance(given, dict) else {}
