"""`--to DIR`: a directory of its own with the snapshot's files. Where only a copy will do, one process copies.

DIR/.mx-lease/                  who copies, as in the cache's lease/; gone when the directory is whole
    .<16hex>.copy.<term>        a copy in the making, beside its place
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import stat
import time
from collections.abc import Sequence
from pathlib import Path

from mx_cli.base import units
from mx_cli.base.errors import FilesystemRefused, NoSpace, WaitExpired
from mx_cli.base.events import Progress
from mx_cli.base.oserrors import explain
from mx_cli.base.temporary import is_temporary
from mx_cli.cache.beat import WAIT_LIMIT, Deposed
from mx_cli.cache.fence import Fence
from mx_cli.cache.files import make_dirs, names, sync_directory
from mx_cli.cache.follow import Watch
from mx_cli.cache.lease import Lease
from mx_cli.cache.reuse import duplicate, link_in_place
from mx_cli.engine.meter import Meter
from mx_cli.engine.verify import digest_of
from mx_cli.flows.context import Context
from mx_cli.flows.progress import watching
from mx_cli.flows.term import leading
from mx_cli.model.manifest import FileRecord
from mx_cli.model.selection import is_weight
from mx_cli.model.shard_index import is_index

LEASE = ".mx-lease"
LAST = (".json",)
CLAIM_TRIES = 3
# Seconds without a write. Who copies writes all the time, but for the sync of a large file at its end.
ABANDONED_AFTER = 3600.0
_COPY = re.compile(r"\.[0-9a-f]{16}\.copy\.\d+")


class Filling:
    """Fills `directory` with files of the snapshot `source`: hard links, else clones, else copies. Foreign files stay.

    Files that are there and are the same are left; weights come before the small files that name them, so that whoever
    waits for `config.json` or an index finds everything. Idempotent.
    """

    def __init__(self, context: Context, source: Path, records: Sequence[FileRecord], directory: Path) -> None:
        self._context, self._source, self._directory = context, source, directory
        self._records = sorted(records, key=lambda r: (r.path.endswith(LAST), r.path))
        self._touched = {directory}
        self._known: dict[str, tuple[tuple[int, ...], bool]] = {}
        self._began = time.monotonic()
        self._refusals = 0
        self.meter = Meter()

    def others(self) -> list[str]:
        """Files of the directory that are not the snapshot's, by name or by what they hold."""
        ours = {record.path: record for record in self._records}
        found = (path for path in self._directory.rglob("*") if not path.is_dir())
        there = (path.relative_to(self._directory) for path in found)
        names_there = (str(name) for name in there if not any(map(_is_own, name.parts)))
        return [name for name in names_there if name not in ours or not self._is_there(ours[name])]

    def run(self) -> None:
        """Blocks until the directory is whole, also while another process copies. Raises NoSpace, FilesystemRefused."""
        make_dirs(self._directory)
        for place in {(self._directory / record.path).parent for record in self._records}:
            _sweep(place)
        if self._link() or LEASE in names(self._directory):
            self._elect()
        for place in self._touched:
            try:
                sync_directory(place)
            except OSError as error:
                raise explain(error, f"syncing {place}") from None
        self._context.notice(f"filled {self._directory}: {self._made_of()}")
        self._warn_of_other_weights()

    def _warn_of_other_weights(self) -> None:
        """An engine reads the weights that it finds, or that an index names, whoever put them there."""
        if not any(is_weight(record.path) for record in self._records):
            return
        places = {Path(record.path).parent for record in self._records}
        found = (place / name for place in places for name in names(self._directory / place))
        weights = (name for name in found if is_weight(name.name) or is_index(name.name))
        others = sorted(str(name) for name in weights if not os.path.lexists(self._source / name))
        if others:
            more = f" and {len(others) - 1} more" if len(others) > 1 else ""
            self._context.warn(f"{self._directory} also holds weights from elsewhere: {others[0]}{more}")

    def _made_of(self) -> str:
        """Whether its files share the cache's room, and its fate when they are written to."""
        linked = sum(self._is_linked(record) for record in self._records)
        kinds = {"hard links into the cache": linked, "copies": len(self._records) - linked}
        return ", ".join(f"{units.count(number, 'file')} as {kind}" for kind, number in kinds.items() if number)

    def _is_linked(self, record: FileRecord) -> bool:
        with contextlib.suppress(OSError):
            return os.path.samefile(self._source / record.path, self._directory / record.path)
        return False

    def _link(self) -> bool:
        """Hard links for what is not there. True as soon as one is not possible: the rest has to wait for its turn."""
        for record in self._records:
            self._context.stop.check()
            if not self._is_there(record) and not link_in_place(self._source / record.path, self._place(record)):
                return True
        return False

    def _place(self, record: FileRecord) -> Path:
        target = self._directory / record.path
        if os.path.isdir(target):
            raise FilesystemRefused(f"{target} is a directory, where a file of the checkpoint belongs")
        make_dirs(target.parent)
        self._touched.add(target.parent)
        return target

    # -- who copies ----------------------------------------------------------------------------------------------

    def _elect(self) -> None:
        """Copy, or wait for whoever does."""
        lease = self._context.lease_at(self._directory / LEASE)
        watch, following = Watch(lease, self._context.settings.ttl), 0
        while True:
            self._context.stop.check()
            view, vacant = watch.look(), watch.vacant()
            if not self._left():
                if vacant:
                    lease.remove(view.term)
                return
            if view.failed and following == view.term:
                failure = lease.failure(view.term)
                if isinstance(failure, NoSpace):
                    raise failure
            if vacant:
                with contextlib.suppress(Deposed):
                    if self._lead(lease, view.term + 1):
                        return
            else:
                following = view.term
                self._tell(watch, lease)
            self._context.stop.wait(watch.pause())

    def _left(self) -> list[FileRecord]:
        return [record for record in self._records if not self._is_there(record)]

    def _lead(self, lease: Lease, term: int) -> bool:
        """Copy as the leader of `term`; False when somebody else is. Raises Deposed when another leads meanwhile."""
        try:
            if not lease.claim(term):
                return False
        except FilesystemRefused:
            # Whoever led before may just have taken the lease away.
            self._refusals += 1
            if self._refusals < CLAIM_TRIES:
                return False
            raise
        with leading(self._context, lease, term, self.meter) as fence, watching(self._context, self):
            self._copy(fence)
        lease.remove(term)
        return True

    def _copy(self, fence: Fence) -> None:
        # Afresh: another may have copied everything since the last look.
        left = self._left()
        if left:
            self._context.notice(f"copying to {self._directory}")
        self.meter.phase, self.meter.files_total = "copy", len(left)
        self.meter.total = sum(record.size for record in left)
        for place in {(self._directory / record.path).parent for record in self._records}:
            _sweep_copies(place)

        def moved(count: int) -> None:
            self.meter.add(count)
            fence.check_now_and_then()

        for record in left:
            fence.check()
            target, before = self._place(record), self.meter.done
            temporary = target.with_name(f".{secrets.token_hex(8)}.copy.{fence.term}")
            with self.meter.bounded(WAIT_LIMIT):
                duplicate(self._source / record.path, target, temporary, moved)
            self.meter.have(before + record.size - self.meter.done)
            self.meter.file_done()

    def _tell(self, watch: Watch, lease: Lease) -> None:
        limit, view = self._context.settings.wait, watch.view
        total = sum(record.size for record in self._records)
        self._context.emit(
            Progress("copy", view.bytes_done, total, watch.rate, leader=lease.leader(view.term), alive=watch.silent_for)
        )
        if limit is not None and time.monotonic() - self._began > limit:
            raise WaitExpired(f"another process has been copying to {self._directory} for longer than {limit:g} s")

    # -- what is there -------------------------------------------------------------------------------------------

    def _is_there(self, record: FileRecord) -> bool:
        """Whether the file is there already; each is read once. One that cannot be read is none: it is replaced."""
        origin, target = self._source / record.path, self._directory / record.path
        try:
            info = os.stat(target, follow_symlinks=False)
            if os.path.samestat(info, os.stat(origin)):
                return True
        except OSError:
            return False
        if not stat.S_ISREG(info.st_mode) or info.st_size != record.size:
            return False
        state = info.st_dev, info.st_ino, info.st_mtime_ns
        if self._known.get(record.path, ((), False))[0] != state:
            self._known[record.path] = state, self._is_same(target, record)
        return self._known[record.path][1]

    def _is_same(self, target: Path, record: FileRecord) -> bool:
        try:
            return digest_of(target, self._context.stop.check) == record.xxh3
        except OSError:
            return False


def _is_own(name: str) -> bool:
    """Whether the name is of something that mx is making, or has left when it was killed."""
    return name.startswith(".mx-") or is_temporary(name) or bool(_COPY.fullmatch(name))


def _sweep(directory: Path) -> None:
    """Remove what killed processes left unfinished. A link in the making takes no room, and is left."""
    for name in names(directory):
        if is_temporary(name):
            with contextlib.suppress(OSError):
                info = os.lstat(directory / name)
                if info.st_nlink == 1 and time.time() - info.st_mtime > ABANDONED_AFTER:
                    os.unlink(directory / name)


def _sweep_copies(directory: Path) -> None:
    """Whoever made the copies that are here when a term begins is dead or deposed; they may take the room that is needed."""
    for name in names(directory):
        if _COPY.fullmatch(name):
            with contextlib.suppress(OSError):
                os.unlink(directory / name)
