"""The sink of shares that are written into files: of what is read, the rows that a rank wants land in its own files."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from mx_cli.engine.buffers import write_at
from mx_cli.engine.ports import ReadItem, Through
from mx_cli.plan.rows import Rows
from mx_cli.sinks.rows import RowsSink


class PartFilesSink(RowsSink):
    """Places bytes by a table of rows, whose `device` is an index of `fds` here, and whose `address` a byte of that file.

    What a thread has read it writes at once, from the buffer of its read: nothing else is held.
    """

    def __init__(self, rows: Iterable[Rows], fds: Sequence[int]) -> None:
        super().__init__(rows, 0)
        self._fds = fds

    def acquire(self, item: ReadItem) -> Through:
        assert item.end is not None, "files whose tensors are known have a size"
        rows = self.within(item.entry.path, item.offset, item.end)
        return Through(lambda at, view: self._write(rows, item.offset + at, view))

    def _write(self, rows: Iterable[Rows], at: int, view: memoryview) -> None:
        for one in rows:
            fd = self._fds[one.device]
            pieces = [(view[low - at : low - at + size], to) for low, size, to in one.inside(at, at + len(view))]
            if len(pieces) > 1 and one.step == one.length:
                # Columns that lie apart in the source are neighbours in the file.
                pieces = [(memoryview(b"".join(piece for piece, _ in pieces)), pieces[0][1])]
            for piece, to in pieces:
                write_at(fd, piece, to)
