"""Files straight from peers into a directory of the reader's own: whole and verified, or not there at all."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mx_cli.base.errors import MxError, UsageError
from mx_cli.base.oserrors import explain
from mx_cli.cache.layout import make_dirs, sync_directory
from mx_cli.cache.reserve import check_space
from mx_cli.engine.many import Bell, Many, Member, trouble
from mx_cli.engine.meter import Meter
from mx_cli.engine.ports import Block
from mx_cli.engine.run import Limits, Transfer, cores
from mx_cli.engine.verify import Consumer
from mx_cli.flows.context import Context
from mx_cli.flows.inspect import Inspection
from mx_cli.flows.lead import items_of
from mx_cli.flows.peering import Peering
from mx_cli.flows.progress import watching
from mx_cli.model.holding import Holding
from mx_cli.model.manifest import Entry
from mx_cli.model.paths import fault
from mx_cli.plan.ranges import interleave
from mx_cli.sinks.files import FileSink, Opened

FILES_AT_ONCE = 4


@dataclass(frozen=True)
class Pulled:
    """What came: `sources` are (address, path, bytes, why this path)."""

    directory: Path
    sources: tuple[tuple[str, str, int, str], ...]
    bytes: int
    moved: int
    seconds: float
    files: int


def pull_files(peering: Peering, target: Path, context: Context) -> Pulled:
    """All files of the group's manifest into `target`, which appears in one step. Blocks.

    Raises UsageError when the target is there with something in it, NoPeer, IntegrityError, TransportFailed, NoSpace,
    FilesystemRefused.
    """
    assert peering.group is not None, "find comes first"
    holding = peering.group.holding
    _check_target(target, holding)
    make_dirs(target.parent)
    work = target.with_name(f".{target.name}.mx-{secrets.token_hex(6)}")
    try:
        make_dirs(work)
        filled = _Filled(holding, work, context)
        bell = Bell()
        members = peering.members(bell, [])
        start = time.monotonic()
        with watching(context, filled):
            filled.run(members, bell)
            peering.check_versions()
        filled.make_durable()
        _publish(work, target)
        seconds = time.monotonic() - start
    except BaseException:
        with contextlib.suppress(OSError):
            shutil.rmtree(work)
        raise
    by_name = {member.name: member.bytes for member in members}
    rows = [(peer.address, peer.path, by_name[peer.address], peer.reason) for peer in peering.group.peers if peer.path]
    moved = sum(by_name.values())
    return Pulled(target, tuple(rows), filled.meter.total, moved, seconds, len(holding.manifest.files))


def _check_target(target: Path, holding: Holding) -> None:
    bad = [record.path for record in holding.manifest.files if fault(record.path)]
    if bad:
        raise UsageError(f"the peer offers a file with a name that cannot be: {bad[0]!r}")
    try:
        if target.is_symlink() or (target.exists() and (not target.is_dir() or any(target.iterdir()))):
            raise UsageError(f"--to {target} is there already, and not an empty directory", hint="choose another --to")
    except OSError as error:
        raise explain(error, f"looking at {target}") from None


def _publish(work: Path, target: Path) -> None:
    try:
        os.rename(work, target)
        sync_directory(target.parent)
    except OSError as error:
        raise explain(error, f"publishing {target}") from None


class _Filled:
    """Fills a directory from members of one group."""

    def __init__(self, holding: Holding, directory: Path, context: Context) -> None:
        self._holding, self._directory, self._context = holding, directory, context
        self.meter = Meter(sum(record.size for record in holding.manifest.files))
        self.meter.files_total = len(holding.manifest.files)
        self._lock = threading.Lock()
        self._directories = {directory}

    def run(self, members: Sequence[Member], bell: Bell) -> None:
        context, settings = self._context, self._context.settings
        check_space(self._directory, self.meter.total, self.meter.files_total, chosen=True)
        weights = frozenset(self._holding.manifest.weights)
        entries = [self._holding.entry(record) for record in self._holding.manifest.files]
        sink = FileSink(
            self._open,
            lambda entry: [Inspection(entry, is_weight=entry.path in weights)],
            _claim_nothing,
            self._complete,
            self.meter,
            max(2, cores()),
        )
        source = Many(members, bell, self._tell)
        limits = Limits(settings.retry_for, float("inf"), source.caps.max_in_flight, source.caps.max_in_flight)
        transfer = Transfer(
            source, sink, limits, context.gates[source.caps.host], self.meter, context.stop, context.on_retry
        )
        rows = (items_of(entry, [], source.caps.item_size, source.caps) for entry in entries)
        try:
            transfer.run(interleave(rows, FILES_AT_ONCE))
            sink.wait(context.stop)
        finally:
            source.close()
            sink.close(transfer.in_flight)

    def _tell(self, member: Member, error: MxError) -> None:
        self._context.warn(trouble(member, error))

    def _open(self, entry: Entry) -> Opened:
        path = self._directory / entry.path
        try:
            if path.parent != self._directory:
                make_dirs(path.parent)
                with self._lock:
                    self._directories.update(path.parents[: len(Path(entry.path).parts)])
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            if entry.size:
                os.posix_fallocate(fd, 0, entry.size)
        except OSError as error:
            raise explain(error, f"making {path}") from None
        return Opened(fd, [])

    def _complete(self, entry: Entry, size: int, fd: int, consumers: Sequence[Consumer]) -> None:
        (inspection,) = consumers
        assert isinstance(inspection, Inspection)
        inspection.verdict(fd, size)
        try:
            os.fsync(fd)
        except OSError as error:
            raise explain(error, f"syncing {entry.path}") from None
        self.meter.file_done()

    def make_durable(self) -> None:
        try:
            for directory in self._directories:
                sync_directory(directory)
        except OSError as error:
            raise explain(error, f"syncing {self._directory}") from None


def _claim_nothing(entry: Entry, block: Block) -> None:
    """What a pull has fetched is not resumed: peers are fast, and an unfinished directory is removed."""
