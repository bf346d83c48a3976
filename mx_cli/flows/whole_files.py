"""Files of one listing into a directory: each verified as it comes, and durable."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from mx_cli.base.errors import IntegrityError, OriginChanged
from mx_cli.base.oserrors import explain
from mx_cli.cache.files import make_dirs, sync_directory
from mx_cli.cache.reserve import allocated, check_space, reserve
from mx_cli.engine.meter import Meter
from mx_cli.engine.ports import Block, Source
from mx_cli.engine.run import Limits, Transfer, cores
from mx_cli.engine.verify import Consumer
from mx_cli.flows.context import Context
from mx_cli.flows.inspect import Inspection
from mx_cli.flows.lead import items_of
from mx_cli.model.digest import TensorDigest
from mx_cli.model.manifest import Entry
from mx_cli.plan.ranges import interleave
from mx_cli.sinks.files import FileSink, Opened

FILES_AT_ONCE = 4


class WholeFiles:
    """Fills `directory`, which is this process's own. `rows` has the tensor table of each weight file that has one."""

    def __init__(self, entries: Sequence[Entry], weights: Collection[str], directory: Path, context: Context) -> None:
        self._entries, self._weights = entries, frozenset(weights)
        self._directory, self._context = directory, context
        self.meter = Meter(sum(entry.size or 0 for entry in entries))
        self.meter.files_total = len(entries)
        self.rows: dict[str, Sequence[TensorDigest]] = {}
        self._lock = threading.Lock()
        self._directories = {directory}
        self._done: dict[str, int] = {}

    def fetch(self, open_source: Callable[[], Source], limits_for: Callable[[Source], Limits], tries: int = 1) -> None:
        """Everything. Files with wrong bytes are fetched again, by `tries` in all, each from a source of its own. Blocks.

        Raises OriginChanged, IntegrityError, NoSpace, FilesystemRefused, and what the source raises.
        """
        for attempt in range(1, tries + 1):
            suspects: list[Entry] = []
            try:
                source = open_source()
                return self._transfer(source, limits_for(source), suspects)
            except OriginChanged:
                raise
            except IntegrityError as error:
                if attempt == tries or not suspects:
                    raise
                self._context.on_retry(suspects[0].path, error, 0.0, attempt)
                self.meter.lose(self.meter.done - sum(self._done.values()))
        return None

    def _transfer(self, source: Source, limits: Limits, suspects: list[Entry]) -> None:
        todo = [entry for entry in self._entries if entry.path not in self._done]
        # After a first try they have their room.
        need = sum(max(0, (entry.size or 0) - allocated(self._directory / entry.path)) for entry in todo)
        check_space(self._directory, need, len(todo), chosen=True)
        sink = FileSink(self._open, self._consumers, _claim_nothing, self._complete, self.meter, max(2, cores()))
        context = self._context
        gate = context.gates[source.caps.host]
        transfer = Transfer(source, sink, limits, gate, self.meter, context.stop, context.on_retry)
        size = min(context.settings.range_size, source.caps.item_size)
        rows = (items_of(entry, [], size, source.caps) for entry in todo)
        try:
            transfer.run(interleave(rows, FILES_AT_ONCE))
            sink.wait(context.stop)
        finally:
            suspects += sink.suspects
            source.close()
            sink.close(transfer.in_flight)

    def make_durable(self) -> None:
        """The directories; the files are. Raises FilesystemRefused."""
        try:
            for directory in self._directories:
                sync_directory(directory)
        except OSError as error:
            raise explain(error, f"syncing {self._directory}") from None

    def _consumers(self, entry: Entry) -> Sequence[Consumer]:
        return [Inspection(entry, is_weight=entry.path in self._weights)]

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
        verdict = inspection.verdict(fd, size)
        if verdict.warning:
            self._context.warn(verdict.warning)
        try:
            if os.fstat(fd).st_size != size:
                os.ftruncate(fd, size)
            os.fsync(fd)
        except OSError as error:
            raise explain(error, f"syncing {entry.path}") from None
        with self._lock:
            self._done[entry.path] = size
            if verdict.rows is not None:
                self.rows[entry.path] = verdict.rows
        self.meter.file_done()


def _claim_nothing(entry: Entry, block: Block) -> None:
    """What is fetched here is not resumed: an unfinished directory is removed."""
