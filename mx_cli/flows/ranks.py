"""The share of one rank: which part of each tensor it needs, memory for it, and only its bytes read."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mx_cli.base import units
from mx_cli.base.errors import UsageError
from mx_cli.engine.many import Bell, Member
from mx_cli.engine.meter import Meter
from mx_cli.engine.ports import ReadItem
from mx_cli.flows.context import Context
from mx_cli.flows.pull_memory import Moved, Shape, carry, place_of, read_items, table
from mx_cli.flows.targets import ALIGN, byte_block, check_names
from mx_cli.model.header import BITS
from mx_cli.model.holding import Holding
from mx_cli.model.manifest import Entry
from mx_cli.model.share import Share
from mx_cli.plan.blocks import aligned
from mx_cli.plan.boxes import overlap
from mx_cli.plan.rows import COPY_ALONG, READ_ALONG, Rows, spans_to_read, wanted_within
from mx_cli.sinks.part_files import PartFilesSink
from mx_cli.sinks.rows import RowsSink
from mx_cli.sinks.torch_tensors import tensor_of
from mx_cli.transport.on_gpu import copy_to
from mx_cli.transport.peer import ITEM


def chosen(holding: Holding, names: Sequence[str] | None) -> dict[str, Shape]:
    """dtype and shape of the tensors `names` (None: all). Raises UsageError for a name that is none."""
    every = table(holding)
    check_names(names, every.keys())
    return every if names is None else {name: every[name] for name in sorted(names)}


# --- memory ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Place:
    """Where a tensor's own bytes begin."""

    address: int
    device: int


@dataclass(frozen=True)
class Memory:
    """Memory for a rank's tensors, by name; `regions` of it are (address, length, device), and `keep` keeps it alive.

    `tensors`, called when the bytes are there, hands them out. With `fds` the places are in these files: a place's `device`
    is an index of them, its `address` a byte of that file. `meter` counts what comes for it, from all sources. `own`: it was
    made for one route, and no other has written to it.
    """

    places: dict[str, Place]
    regions: list[tuple[int, int, int]]
    tensors: Callable[[], dict[str, Any]]
    keep: object
    fds: tuple[int, ...] = ()
    meter: Meter = field(default_factory=Meter)
    own: bool = False

    def sink(self, rows: Sequence[Rows], copy_along: int) -> RowsSink:
        """Takes the rows to their places."""
        return PartFilesSink(rows, self.fds) if self.fds else RowsSink(rows, copy_along, copy_to)


def own_memory(
    shapes: Mapping[str, Shape], shares: Mapping[str, Share], twins: Mapping[str, str], device: int
) -> Memory:
    """One block of memory for the shares. `twins`: name -> whose memory it has, too.

    Raises NoSpace, UsageError for a split in the middle of a byte.
    """
    offsets: dict[str, int] = {}
    size = 0
    for name in shares:
        if name not in twins:
            offsets[name] = size
            size += -(-_bytes(name, shapes[name][0], shares[name]) // ALIGN) * ALIGN
    block = byte_block(device, size)
    base = block.data_ptr()
    places = {name: Place(base + at, device) for name, at in offsets.items()}

    def tensors() -> dict[str, Any]:
        return {
            name: tensor_of(block, offsets[twins.get(name, name)], shapes[name][0], share.local_shape)
            for name, share in shares.items()
        }

    return Memory(places, [(base, size, device)], tensors, block, own=True)


def _bytes(name: str, dtype: str, share: Share) -> int:
    bits = BITS.get(dtype, 8)
    for length in share.local_shape:
        bits *= length
    if bits % 8:
        raise UsageError(f"{name}: a split falls into the middle of a byte")
    return bits // 8


def twins_of(holding: Holding, shapes: Mapping[str, Shape], shares: Mapping[str, Share]) -> dict[str, str]:
    """Names whose bytes are all those of an earlier one: tied weights stay tied."""
    return tied(shapes, shares, functools.partial(place_of, holding))


def tied(shapes: Mapping[str, Shape], shares: Mapping[str, Share], place: Callable[[str], object]) -> dict[str, str]:
    """The same of tensors whose bytes lie at `place(name)`, wherever that is."""
    first: dict[object, str] = {}
    owners = {name: first.setdefault((place(name), shapes[name], share), name) for name, share in shares.items()}
    return {name: owner for name, owner in owners.items() if owner != name}


# --- from a source that has whole tensors -----------------------------------------------------------------------------


def rows_of(
    holding: Holding, shapes: Mapping[str, Shape], shares: Mapping[str, Share], places: Mapping[str, Place]
) -> list[Rows]:
    """The rows to read from whole tensors for the shares that have a place."""
    found = []
    for name, place in places.items():
        file, start, _ = place_of(holding, name)
        dtype, shape = shapes[name]
        found += rows_between(name, dtype, Share(shape), shares[name], file, start, place)
    return found


def rows_between(
    name: str,
    dtype: str,
    source: Share,
    target: Share,
    file: str,
    start: int,
    place: Place,
    only: tuple[int, int] | None = None,
) -> list[Rows]:
    """The rows of a source's share, which begins at `start` of a file, that belong into the target's. `only`: see `overlap`."""
    try:
        boxes = list(overlap(source, target, BITS.get(dtype, 8), only))
    except UsageError as error:
        raise UsageError(f"{name}: {error.what}") from None
    return [Rows.of(box, file, start, place.address, place.device) for box in boxes]


def bring(
    holding: Holding,
    rows: Sequence[Rows],
    members: Sequence[Member],
    bell: Bell,
    context: Context,
    memory: Memory,
    entries: Mapping[str, Entry] | None = None,
    *,
    many_runs: bool = False,
) -> Moved:
    """Read what the rows want, and little else, into their places. Blocks; raises as `move` does.

    Gaps of READ_ALONG bytes and less are read along; `many_runs`: the members take many runs in one request, so that only
    gaps of COPY_ALONG are. `extra` of the answer counts the bytes that were read and not wanted.
    """
    copy_along = COPY_ALONG if many_runs else READ_ALONG
    sink = memory.sink(rows, copy_along)
    items = _items_for(holding, rows, sink, entries or {})
    extra = sum(_extra(sink, item, many_runs) for item in items)
    size = sum(item.length or 0 for item in items)
    memory.meter.expect(size)
    try:
        moved = carry(items, sink, members, bell, context, memory, memory.meter)
    except BaseException:
        memory.meter.expect(-size)
        raise
    wanted = sum(one.size for one in rows)
    if extra:
        context.notice(f"{units.size(wanted)} are this rank's, and {units.size(extra)} between them were read along")
    return dataclasses.replace(moved, bytes=wanted + extra, extra=extra)


def items_to_read(holding: Holding, rows: Sequence[Rows], entries: Mapping[str, Entry]) -> list[ReadItem]:
    """The pieces that `bring` would read."""
    return _items_for(holding, rows, RowsSink(rows, READ_ALONG), entries)


def _items_for(holding: Holding, rows: Sequence[Rows], sink: RowsSink, entries: Mapping[str, Entry]) -> list[ReadItem]:
    """Pieces that hold the rows, and split no block of digests that they hold whole."""
    groups: dict[tuple[str, int], list[Rows]] = {}
    for one in rows:
        if one.size:
            groups.setdefault((one.file, one.device), []).append(one)
    found = []
    for (file, _), mine in sorted(groups.items()):
        blocks = holding.blocks(file)
        spans = aligned(spans_to_read(mine, blocks), blocks, ITEM)
        wanted = [span for span in spans if wanted_within(sink.within(file, *span), *span)]
        found += read_items(holding, file, entries, wanted)
    return found


def _extra(sink: RowsSink, item: ReadItem, many_runs: bool) -> int:
    from mx_cli.engine.ports import Memory as Runs

    assert item.end is not None
    rows = sink.within(item.entry.path, item.offset, item.end)
    if many_runs and isinstance(sink.acquire(item), Runs):
        return 0
    return item.end - item.offset - min(item.end - item.offset, wanted_within(rows, item.offset, item.end))
