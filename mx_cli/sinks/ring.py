"""The sink of a bounded stream: pieces land in a few reused runs of memory, and leave them in the order of the files."""

from __future__ import annotations

import bisect
import ctypes
import os
import queue
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from mx_cli.base.errors import IntegrityError, MxError, UsageError
from mx_cli.engine.buffers import HUGE, Pool
from mx_cli.engine.ports import Block, Memory, ReadItem
from mx_cli.model.holding import HOST
from mx_cli.model.manifest import Entry

ALIGN = 4096
"""Bytes: a group has its file's place within a page, so that a disk's direct reads go straight into place."""


@dataclass(eq=False, slots=True)
class Group:
    """Bytes [start, end) of a file that come and go together: one large tensor, or several small ones.

    `address` is 0 until there is room.
    """

    file: str
    start: int
    end: int
    address: int = 0
    missing: int = 0

    @property
    def size(self) -> int:
        return self.end - self.start

    @property
    def shift(self) -> int:
        return self.start % ALIGN


class Room(Protocol):
    """Where groups lie. Called under the sink's lock, by whoever fills and whoever takes."""

    def place(self, group: Group) -> bool:
        """Give the group its address, if there is room now."""

    def buffer(self, group: Group) -> Any:
        """The group's bytes, for whoever takes it: an object with the buffer interface."""

    def release(self, group: Group) -> None:
        """Whoever took the group has asked for the next one. In order."""


class Run(Protocol):
    """A run of memory, of the host or of a GPU: `view[first:last]` are bytes of it."""

    size: int
    address: int
    view: Any


class RingSink:
    """Groups of bytes, in the order given, through bounded memory. One thread fills, another one takes.

    A group gets its room when its first item is asked for; there is room again when an older group was released, so a
    slow consumer holds up the source. A group for which the empty room is too small cannot be: the caller sees to that.
    """

    def __init__(
        self,
        groups: Sequence[Group],
        room: Room,
        device: int = HOST,
        put: Callable[[int, memoryview], None] | None = None,
    ) -> None:
        """`device`: whose memory the room is; `put(address, view)` copies host bytes there, if it is a GPU's."""
        self._room, self._device, self._put = room, device, put
        self._groups = list(groups)
        self._changed = threading.Condition()
        self._process = os.getpid()
        self._next = 0
        self._failure: MxError | None = None
        self._by_file: dict[str, list[Group]] = {}
        for group in self._groups:
            group.missing = group.size
            self._by_file.setdefault(group.file, []).append(group)

    # -- the port ------------------------------------------------------------------------------------------------

    def has_room(self, item: ReadItem) -> bool:
        with self._changed:
            group = self._group_of(item)
            while not group.address:
                if not self._room.place(self._groups[self._next]):
                    return False
                self._next += 1
            return True

    def acquire(self, item: ReadItem) -> Memory:
        group = self._group_of(item)
        assert item.length is not None
        return Memory(((0, item.length, group.address + item.offset - group.start),), self._device, self._put)

    def commit(self, item: ReadItem, block: Block) -> None:
        with self._changed:
            group = self._group_of(item)
            group.missing -= block.length
            if group.missing == 0:
                self._changed.notify_all()

    def reset(self, entry: Entry) -> None:
        # Only what comes in one piece is begun again, and there is no room for that.
        raise IntegrityError(
            f"{entry.path}: the origin serves no ranges, so its tensors cannot be streamed",
            hint="load() takes all of them, and mx prefetch brings the files",
        )

    def end(self, entry: Entry, size: int) -> None:
        """Nothing."""

    def raise_failure(self) -> None:
        """Nothing happens behind the scenes."""

    # -- the other side ------------------------------------------------------------------------------------------

    def take(self) -> Iterator[tuple[Group, Any]]:
        """The groups in order, each with its bytes. Blocks; raises what `fail` was told, and UsageError after a fork."""
        for group in self._groups:
            if os.getpid() != self._process:
                raise UsageError("this stream is of the process that this one was forked from", hint="stream in each")
            with self._changed:
                while group.missing and self._failure is None:
                    self._changed.wait()
                if group.missing and self._failure is not None:
                    raise self._last_word()
                buffer = self._room.buffer(group)
            yield group, buffer
            del buffer
            with self._changed:
                self._room.release(group)

    def fail(self, error: MxError) -> None:
        """Nothing more will come."""
        with self._changed:
            self._failure = error
            self._changed.notify_all()

    def _last_word(self) -> MxError:
        """The failure, which is forgotten: its traceback leads to who takes, and would keep all memory in a circle."""
        failure, self._failure = self._failure, None
        assert failure is not None
        return failure

    def _group_of(self, item: ReadItem) -> Group:
        groups = self._by_file[item.entry.path]
        return groups[bisect.bisect_right(groups, item.offset, key=lambda group: group.start) - 1]


class Ring:
    """One run of memory, written and read round and round: the bytes of a group are good until the next is asked for."""

    def __init__(self, size: int, pool: Run | None = None) -> None:
        """`pool`: memory to use, of another kind than the host's. Raises NoSpace."""
        self.pool: Run = pool or Pool(size, fresh=True)
        self._head = 0
        self._spans: list[tuple[int, int]] = []

    def place(self, group: Group) -> bool:
        size = self.pool.size
        if not self._spans:
            self._head = 0
        begin = -(-self._head // ALIGN) * ALIGN + group.shift
        tail = self._spans[0][0] if self._spans else size
        if self._spans and self._head <= tail:
            fits = begin + group.size <= tail
        else:
            fits = begin + group.size <= size
            if not fits:
                begin = group.shift
                fits = bool(self._spans) and begin + group.size <= tail
        if fits:
            group.address = self.pool.address + begin
            self._head = begin + group.size
            self._spans.append((begin, self._head))
        return fits

    def buffer(self, group: Group) -> Any:
        at = group.address - self.pool.address
        return self.pool.view[at : at + group.size]

    def release(self, group: Group) -> None:
        self._spans.pop(0)


class Buffers:
    """Memory of its own for each group, `size` bytes at once: it is whose who takes the group, for as long as he wants.

    What he has dropped is used again. What he keeps no longer counts as soon as he asks for the next group.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._used = 0
        self._of: dict[Group, Pool] = {}
        self._free: dict[int, list[Pool]] = {}
        # A finalizer may run in any thread at any moment, also in one that holds the sink's lock.
        self._dropped: queue.SimpleQueue[Pool] = queue.SimpleQueue()

    @staticmethod
    def needed(group: Group) -> int:
        """Bytes of memory for a group."""
        return -(-(group.shift + group.size) // HUGE) * HUGE

    def place(self, group: Group) -> bool:
        self._collect()
        need = self.needed(group)
        fitting = self._free.get(need)
        if fitting:
            pool = fitting.pop()
        else:
            while self._used + need > self._size and self._forget_one():
                pass
            if self._used + need > self._size:
                return False
            pool = Pool(need, fresh=True)
            self._used += need
        self._of[group] = pool
        group.address = pool.address + group.shift
        return True

    def buffer(self, group: Group) -> ctypes.Array[ctypes.c_char]:
        pool = self._of[group]
        array = (ctypes.c_char * group.size).from_address(group.address)
        weakref.finalize(array, self._dropped.put, pool).atexit = False
        return array

    def release(self, group: Group) -> None:
        self._used -= self._of.pop(group).size

    def _collect(self) -> None:
        while not self._dropped.empty():
            pool = self._dropped.get()
            if self._used + pool.size <= self._size:
                self._used += pool.size
                self._free.setdefault(pool.size, []).append(pool)

    def _forget_one(self) -> bool:
        for pools in self._free.values():
            if pools:
                self._used -= pools.pop().size
                return True
        return False
