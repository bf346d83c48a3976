"""Files straight from peers into a directory of the reader's own: whole and verified, or not there at all."""

from __future__ import annotations

import contextlib
import errno
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
from mx_cli.base.process import boot_id, is_gone, pid_namespace, start_time
from mx_cli.cache.layout import make_dirs, sync_directory
from mx_cli.cache.reserve import check_space, reserve
from mx_cli.engine.many import Bell, Many, Member, trouble
from mx_cli.engine.meter import Meter
from mx_cli.engine.ports import Block
from mx_cli.engine.run import Limits, Transfer, cores
from mx_cli.engine.verify import Consumer, WholeDigest, read_through
from mx_cli.flows.context import Context
from mx_cli.flows.inspect import Inspection
from mx_cli.flows.lead import items_of
from mx_cli.flows.peering import Peering
from mx_cli.flows.progress import watching
from mx_cli.model.holding import Holding
from mx_cli.model.manifest import Entry
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

    Idempotent: a target that holds these very files is left as it is. Raises UsageError when it holds anything else,
    NoPeer, IntegrityError, TransportFailed, NoSpace, FilesystemRefused.
    """
    assert peering.group is not None, "find comes first"
    holding = peering.group.holding
    total, count = sum(record.size for record in holding.manifest.files), len(holding.manifest.files)
    if _is_there(target, holding, context):
        context.notice(f"{target} holds these files already")
        return Pulled(target, (), total, 0, 0.0, count)
    make_dirs(target.parent)
    _sweep(target)
    work = target.with_name(f"{_prefix(target)}{os.getpid()}-{start_time(os.getpid())}-{secrets.token_hex(3)}")
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
        _publish(work, target, holding, context)
        seconds = time.monotonic() - start
    except BaseException:
        with contextlib.suppress(OSError):
            shutil.rmtree(work)
        raise
    by_name = {member.name: member.bytes for member in members}
    rows = [(peer.address, peer.path, by_name[peer.address], peer.reason) for peer in peering.group.peers if peer.path]
    moved = sum(by_name.values())
    return Pulled(target, tuple(rows), total, moved, seconds, count)


def _is_there(target: Path, holding: Holding, context: Context) -> bool:
    """Whether the target holds the files of the manifest; False when it is empty or not there at all."""
    records = {record.path: record for record in holding.manifest.files}
    try:
        if not os.path.lexists(target):
            return False
        if target.is_symlink() or not target.is_dir():
            raise UsageError(f"--to {target} is there already, and not a directory", hint="choose another --to")
        found = {str(path.relative_to(target)): path for path in target.rglob("*") if not path.is_dir()}
        if not found:
            return False
        same = found.keys() == records.keys() and all(
            path.stat().st_size == records[name].size for name, path in found.items()
        )
        if same and all(_digest(path, context) == records[name].xxh3 for name, path in found.items()):
            return True
    except OSError as error:
        raise explain(error, f"looking at {target}") from None
    raise UsageError(f"--to {target} is there already, with other files in it", hint="choose another --to")


def _digest(path: Path, context: Context) -> str:
    whole = WholeDigest()

    def take(view: memoryview) -> None:
        context.stop.check()
        whole.update(view)

    with open(path, "rb") as file:
        read_through(file.fileno(), take)
    whole.finish()
    return whole.value


def _prefix(target: Path) -> str:
    return f".{target.name}.mx-{boot_id()[:8]}-{pid_namespace()}-"


def _sweep(target: Path) -> None:
    """Remove what pulls of this boot left that were killed. Of another container nobody can tell whether it lives."""
    prefix = _prefix(target)
    with contextlib.suppress(OSError):
        for path in target.parent.iterdir():
            pid, _, rest = path.name.removeprefix(prefix).partition("-")
            if path.name.startswith(prefix) and pid.isdecimal() and is_gone(int(pid), rest.partition("-")[0]):
                shutil.rmtree(path, ignore_errors=True)


def _publish(work: Path, target: Path, holding: Holding, context: Context) -> None:
    try:
        os.rename(work, target)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST) or not _is_there(target, holding, context):
            raise explain(error, f"publishing {target}") from None
        # Another pull was quicker.
        shutil.rmtree(work, ignore_errors=True)
    try:
        sync_directory(target.parent)
    except OSError as error:
        raise explain(error, f"syncing {target.parent}") from None


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
            try:
                reserve(fd, entry.size or 0, str(path))
            except BaseException:
                os.close(fd)
                raise
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
