"""The sink of a bounded stream: pieces land in a ring of reused memory, and leave it in the order of the files."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from mx_cli.base.errors import MxError
from mx_cli.engine.buffers import Pool
from mx_cli.engine.ports import Block, Memory, ReadItem
from mx_cli.model.holding import HOST
from mx_cli.model.manifest import Entry

ALIGN = 4096


@dataclass(eq=False, slots=True)
class Group:
    """Bytes [start, end) of a file that enter and leave the ring together: one large tensor, or several small ones."""

    file: str
    start: int
    end: int
    at: int = -1
    missing: int = 0

    @property
    def size(self) -> int:
        return self.end - self.start


class RingSink:
    """Groups of bytes, in the order given, through `size` bytes of memory. One thread fills, another one takes.

    A group gets its room when its first item is asked for; there is room again when the oldest group was given back, so a
    slow consumer holds up the source. A group larger than the ring cannot be: the caller makes the ring large enough.
    """

    def __init__(self, groups: Sequence[Group], size: int) -> None:
        """Raises NoSpace."""
        self.pool = Pool(size, fresh=True)
        self._groups = list(groups)
        self._changed = threading.Condition()
        self._next = 0
        self._head = 0
        self._spans: list[tuple[int, int]] = []
        self._failure: MxError | None = None
        self._by_file: dict[str, list[Group]] = {}
        for group in self._groups:
            group.missing = group.size
            self._by_file.setdefault(group.file, []).append(group)

    # -- the port ------------------------------------------------------------------------------------------------

    def has_room(self, item: ReadItem) -> bool:
        with self._changed:
            group = self._group_of(item)
            while group.at < 0 and self._next < len(self._groups):
                if not self._place(self._groups[self._next]):
                    return False
                self._next += 1
            return group.at >= 0

    def acquire(self, item: ReadItem) -> Memory:
        group = self._group_of(item)
        assert item.length is not None
        return Memory(((0, item.length, self.pool.address + group.at + item.offset - group.start),), HOST)

    def commit(self, item: ReadItem, block: Block) -> None:
        with self._changed:
            group = self._group_of(item)
            group.missing -= block.length
            if group.missing == 0:
                self._changed.notify_all()

    def reset(self, entry: Entry) -> None:
        """Nothing: ranges are read again one by one."""

    def end(self, entry: Entry, size: int) -> None:
        """Nothing."""

    def raise_failure(self) -> None:
        """Nothing happens behind the scenes."""

    # -- the other side ------------------------------------------------------------------------------------------

    def take(self) -> Iterator[tuple[Group, memoryview]]:
        """The groups in order; the bytes of one are good until the next is asked for. Blocks; raises what `fail` was told."""
        for group in self._groups:
            with self._changed:
                while group.missing and self._failure is None:
                    self._changed.wait()
                if group.missing and self._failure is not None:
                    raise self._failure
            yield group, self.pool.view[group.at : group.at + group.size]
            with self._changed:
                self._spans.pop(0)
                self._changed.notify_all()

    def fail(self, error: MxError) -> None:
        """Nothing more will come."""
        with self._changed:
            self._failure = error
            self._changed.notify_all()

    # -- the ring ------------------------------------------------------------------------------------------------

    def _group_of(self, item: ReadItem) -> Group:
        groups = self._by_file[item.entry.path]
        low, high = 0, len(groups) - 1
        while low < high:
            middle = (low + high + 1) // 2
            if groups[middle].start <= item.offset:
                low = middle
            else:
                high = middle - 1
        return groups[low]

    def _place(self, group: Group) -> bool:
        """Give the group its run of the ring, if there is one. Its first byte has the file's place within a page."""
        size = self.pool.size
        shift = group.start % ALIGN
        if not self._spans:
            self._head = 0
        begin = -(-self._head // ALIGN) * ALIGN + shift
        tail = self._spans[0][0] if self._spans else size
        if self._spans and self._head <= tail:
            fits = begin + group.size <= tail
        else:
            fits = begin + group.size <= size
            if not fits:
                begin = shift
                fits = bool(self._spans) and begin + group.size <= tail
        if not fits:
            return False
        group.at = begin
        self._spans.append((begin, begin + group.size))
        self._head = begin + group.size
        return True
