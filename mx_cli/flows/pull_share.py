"""`mx pull --rank R/N --to DIR`: one rank's part of every tensor as files of its own, by the best route."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mx_cli.base.errors import StillLanding, UsageError
from mx_cli.base.oserrors import explain
from mx_cli.cache.files import make_dirs, sync_directory
from mx_cli.cache.reserve import check_space, reserve
from mx_cli.engine.buffers import write_at
from mx_cli.engine.meter import Meter
from mx_cli.flows import deliver
from mx_cli.flows.context import Context
from mx_cli.flows.cuts import parse_rank
from mx_cli.flows.group import sources_of
from mx_cli.flows.new_directory import NewDirectory
from mx_cli.flows.progress import watching
from mx_cli.flows.pull import PullOutcome, PullRequest
from mx_cli.flows.pull_memory import Shape
from mx_cli.flows.pull_ranks import RankPull
from mx_cli.flows.ranks import Memory, Place
from mx_cli.flows.request import Request
from mx_cli.model.part_files import part_files
from mx_cli.model.share import Share


def pull_share(request: PullRequest, rank: str, rules: str | None, context: Context) -> PullOutcome:
    """Only what the rank needs is read. `rules`: a family's name or a rule file, None for the family of config.json.

    The directory, which appears in one step, has the part in `model-rank-R-part-P.safetensors`, and the checkpoint's small
    files where the source has them. Blocks until it is there. Idempotent: the same files stay. Raises UsageError for a
    target with other files, for a tensor that no rule covers and for parts that do not come out even, what the routes
    raise, NoSpace, FilesystemRefused.
    """
    number, _ = parse_rank(rank)
    if request.to is None:
        raise UsageError("--rank: a part has no place in the cache, which keeps whole files", hint="--to DIR")
    deliver.check(Request(request.model, to=request.to), request.model, context.cache().root)
    start = time.monotonic()
    target, metadata = NewDirectory(request.to), {"format": "pt", "rank": rank}
    with target.making() as work, _Files(target, work, number, metadata) as files:
        pull = RankPull(request, context, rank, rules, sorted, files.make, files.keep)
        with watching(context, files):
            received = pull.run()
            files.make_durable()
        total, count = files.total()
    return PullOutcome(
        directory=request.to,
        route=received.route,
        identity=pull.identity,
        attempts=received.attempts,
        sources=sources_of(pull.peers, received.sources),
        bytes_total=total,
        bytes_moved=received.bytes,
        seconds=time.monotonic() - start,
        files=count,
        rank=rank,
    )


class _Files:
    """The files of one rank in a directory of one's own. A route that begins makes them afresh."""

    def __init__(self, target: NewDirectory, directory: Path, rank: int, metadata: Mapping[str, str]) -> None:
        """`directory` is to become `target`."""
        self._target, self._directory, self._rank, self._metadata = target, directory, rank, metadata
        self._fds: tuple[int, ...] = ()
        self.meter = Meter()

    def make(self, shapes: Mapping[str, Shape], shares: Mapping[str, Share], twins: Mapping[str, str]) -> Memory:
        """See `Make`: places in files. Tied weights are there under each name: a file has no other way to say it.

        Raises UsageError where other files are in the place of these.
        """
        self._discard()
        self.meter = Meter()
        tensors = {name: (shapes[name][0], share.local_shape) for name, share in shares.items()}
        parts = part_files(tensors, self._rank, self._metadata)
        # Others that are there are said before anything is read.
        self._target.has({part.name: part.size for part in parts}, among_others=True)
        check_space(self._directory, sum(part.size for part in parts), len(parts), chosen=True)
        places: dict[str, Place] = {}
        for index, part in enumerate(parts):
            path = self._directory / part.name
            try:
                fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
                self._fds += (fd,)
                reserve(fd, part.size, str(path))
                os.ftruncate(fd, part.size)
                write_at(fd, memoryview(part.header), 0)
            except OSError as error:
                raise explain(error, f"making {path}") from None
            places |= {name: Place(start, index) for name, start in part.starts.items()}
        self.meter.files_total = len(parts)
        return Memory(places, [], dict, self, self._fds, self.meter, own=True)

    def keep(self, name: str, data: bytes) -> None:
        """See `Keep`."""
        path = self._directory / name
        make_dirs(path.parent)
        try:
            with open(path, "xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise explain(error, f"writing {path}") from None

    def make_durable(self) -> None:
        """Raises NoSpace, FilesystemRefused."""
        try:
            for fd in self._fds:
                os.fsync(fd)
                self.meter.file_done()
            for place, _, _ in os.walk(self._directory):
                sync_directory(Path(place))
        except OSError as error:
            raise explain(error, f"syncing {self._directory}") from None

    def total(self) -> tuple[int, int]:
        """Bytes, and files."""
        sizes = [path.stat().st_size for path in self._directory.rglob("*") if path.is_file()]
        return sum(sizes), len(sizes)

    def _discard(self) -> None:
        """What another route began."""
        self._close()
        try:
            for path in sorted(self._directory.rglob("*"), reverse=True):
                path.rmdir() if path.is_dir() else path.unlink()
        except OSError as error:
            raise explain(error, f"emptying {self._directory}") from None

    def _close(self) -> None:
        for fd in self._fds:
            os.close(fd)
        self._fds = ()

    def __enter__(self) -> _Files:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        # Where bytes may still land, the number of a closed descriptor would be another file's.
        if not isinstance(error, StillLanding):
            self._close()
