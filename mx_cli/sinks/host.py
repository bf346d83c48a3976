"""The sink of memory: bytes of a peer's files land where the reader's tensors are."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from mx_cli.engine.ports import Block, Memory, ReadItem
from mx_cli.model.holding import HOST, Extent, Extents
from mx_cli.model.manifest import Entry


class MemorySink:
    """Places bytes by a table of runs: `extents` say where each wanted piece of a file goes.

    An item holds memory of one device only. `put(device, address, view)` copies host bytes to a GPU's memory.
    """

    def __init__(self, extents: Iterable[Extent], put: Callable[[int, int, memoryview], None] | None = None) -> None:
        self._extents = Extents(extents)
        self._put = put

    def has_room(self, item: ReadItem) -> bool:
        return True

    def acquire(self, item: ReadItem) -> Memory:
        assert item.end is not None, "a peer's files have a size"
        runs = self._extents.within(item.entry.path, item.offset, item.end)
        device = runs[0].device if runs else HOST
        parts = tuple((run.offset - item.offset, run.length, run.address) for run in runs)
        put = self._put
        if device == HOST or put is None:
            return Memory(parts, device)
        return Memory(parts, device, lambda address, view: put(device, address, view))

    def commit(self, item: ReadItem, block: Block) -> None:
        """Nothing: what is in place is in place."""

    def reset(self, entry: Entry) -> None:
        """Nothing: it is read over what is there."""

    def end(self, entry: Entry, size: int) -> None:
        """Nothing."""

    def raise_failure(self) -> None:
        """Nothing happens behind the scenes."""
