"""Files straight from peers into a directory of the reader's own: whole and verified, or not there at all."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from mx_cli.base.oserrors import explain
from mx_cli.engine.many import Bell, Many, Member
from mx_cli.engine.ports import Source
from mx_cli.engine.run import Limits
from mx_cli.engine.verify import digest_of
from mx_cli.flows.bounds import width
from mx_cli.flows.context import Context
from mx_cli.flows.group import Sourced, sources_of
from mx_cli.flows.new_directory import NewDirectory
from mx_cli.flows.peering import Peering
from mx_cli.flows.progress import watching
from mx_cli.flows.refusals import telling
from mx_cli.flows.whole_files import WholeFiles
from mx_cli.transport.peer import ITEM


@dataclass(frozen=True)
class Pulled:
    """What came, and from whom."""

    directory: Path
    sources: tuple[Sourced, ...]
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
    records = holding.manifest.files
    total, count = sum(record.size for record in records), len(records)
    directory = NewDirectory(target)
    if directory.has({record.path: record.size for record in records}):
        if any(_digest(target / record.path, context) != record.xxh3 for record in records):
            raise directory.other_files()
        context.notice(f"{target} holds these files already")
        return Pulled(target, (), total, 0, 0.0, count)
    with directory.making() as work:
        members, seconds = _fill(work, peering, context)
    moved = {member.name: member.bytes for member in members}
    return Pulled(target, sources_of(peering.group.peers, moved), total, sum(moved.values()), seconds, count)


def _fill(work: Path, peering: Peering, context: Context) -> tuple[list[Member], float]:
    """The sources, and the seconds from the first read until all is on disk."""
    assert peering.group is not None
    holding = peering.group.holding
    entries = [holding.entry(record) for record in holding.manifest.files]
    files = WholeFiles(entries, holding.manifest.weights, work, context)
    bell = Bell()
    members = peering.members(bell, [])

    def limits(source: Source) -> Limits:
        # Peers are watched by `Many`.
        most = width(context, source.caps.max_in_flight, ITEM)
        return Limits(context.settings.retry_for, float("inf"), most, most)

    start = time.monotonic()
    with watching(context, files):
        files.fetch(lambda: Many(members, bell, telling(context)), limits)
        peering.check_versions()
    files.make_durable()
    return members, time.monotonic() - start


def _digest(path: Path, context: Context) -> str:
    try:
        return digest_of(path, context.stop.check)
    except OSError as error:
        raise explain(error, f"looking at {path}") from None
