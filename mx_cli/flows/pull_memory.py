"""Tensors from peers, or from a snapshot on disk, straight into memory: compared first, then moved by the one engine."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from mx_cli.base.errors import Incompatible, IntegrityError, NotFound, StillLanding, UsageError
from mx_cli.engine.buffers import Pool, never_free
from mx_cli.engine.many import Bell, Many, Member
from mx_cli.engine.meter import Meter
from mx_cli.engine.ports import ReadItem, Sink, Source
from mx_cli.engine.run import Limits, Transfer, cores
from mx_cli.flows.bounds import connections, width
from mx_cli.flows.context import Context
from mx_cli.flows.refusals import telling
from mx_cli.model.digest import FILE_DTYPE
from mx_cli.model.holding import HOST, Extent, Holding
from mx_cli.model.manifest import Entry
from mx_cli.plan.blocks import aligned
from mx_cli.plan.ranges import Span
from mx_cli.sinks.host import MemorySink
from mx_cli.transport.disk import Disk
from mx_cli.transport.on_gpu import copy_to
from mx_cli.transport.peer import ITEM, PeerSource, piece_size

if TYPE_CHECKING:
    from mx_cli.transport.gds import Gds

SHOWN = 5
START_WIDTH = 4
Shape = tuple[str, tuple[int, ...]]
"""dtype and shape."""


@dataclass(frozen=True)
class Moved:
    """What a transfer into memory did. `seconds`: from the first read to the last verified block. `extra` of the bytes
    were read along between those that are wanted."""

    bytes: int
    seconds: float
    by_source: Mapping[str, int]
    extra: int = 0


def compare(
    holding: Holding, wanted: Mapping[str, Shape], *, allow_missing: bool = False, allow_extra: bool = False
) -> list[str]:
    """The names to move, after names, dtypes and shapes were found to agree; nothing is written before.

    Missing: wanted and not offered. Extra: offered and not wanted. Raises Incompatible, which names them.
    """
    return compare_tables(table(holding), wanted, allow_missing=allow_missing, allow_extra=allow_extra)


def compare_tables(
    offered: Mapping[str, Shape], wanted: Mapping[str, Shape], *, allow_missing: bool, allow_extra: bool
) -> list[str]:
    """The same for tables, whoever has them."""
    if wanted == offered:
        return sorted(offered)
    missing = sorted(wanted.keys() - offered.keys())
    extra = sorted(offered.keys() - wanted.keys())
    wrong = [
        f"{name}: {_say(wanted[name])} here, {_say(offered[name])} there"
        for name in sorted(wanted.keys() & offered.keys())
        if wanted[name] != offered[name]
    ]
    refuse(wrong, () if allow_missing else missing, () if allow_extra else extra)
    return sorted(wanted.keys() & offered.keys())


def refuse(wrong: Sequence[str], missing: Sequence[str], extra: Sequence[str]) -> None:
    """Raises Incompatible naming the tensors that differ, that only the target has, and that only the source has, if any."""
    faults = []
    if wrong:
        faults.append(f"{len(wrong)} differ ({some(wrong)})")
    if missing:
        faults.append(f"the source lacks {len(missing)} ({some(missing)})")
    if extra:
        faults.append(f"the source has {len(extra)} more ({some(extra)})")
    if faults:
        raise Incompatible(
            f"tensors do not agree: {'; '.join(faults)}", hint="allow_missing and allow_extra accept a part"
        )


def table(holding: Holding) -> dict[str, Shape]:
    """dtype and shape of everything that a holding has a name for; what only holds overlapping tensors has no kind.

    Raises NotFound where there are no weights, UsageError where files hold no tensors, or two tensors of one name.
    """
    if not holding.manifest.weights:
        raise no_weights(holding.manifest.uri)
    for tensor in holding.tensors:
        if tensor.dtype == FILE_DTYPE:
            raise UsageError(
                f"{tensor.file} is not safetensors: its tensors cannot be read one by one", hint="mx pull --to DIR"
            )
        twin = holding.by_name[tensor.name].file
        if twin != tensor.file:
            raise UsageError(
                f"two tensors have the name {tensor.name!r} (in {tensor.file} and {twin})", hint="mx pull --to DIR"
            )
    found: dict[str, Shape] = {
        tensor.name: (tensor.dtype, tensor.shape)
        for tensor in holding.tensors
        if not holding.kinds or tensor.name in holding.kinds
    }
    return found | {name: (alias.dtype, alias.shape) for name, alias in holding.aliases.items()}


def no_weights(uri: str) -> NotFound:
    return NotFound(f"{uri}: no weights among its files", hint="mx prefetch brings what is there")


def place_of(holding: Holding, name: str) -> tuple[str, int, int]:
    """(file, first byte, bytes) of a tensor or an alias."""
    alias = holding.aliases.get(name)
    tensor = holding.by_name[alias.of if alias else name]
    if alias is None:
        return tensor.file, tensor.start, tensor.size
    return tensor.file, tensor.start + alias.offset, alias.size


def move(
    holding: Holding,
    targets: Sequence[Extent],
    members: Sequence[Member],
    bell: Bell,
    context: Context,
    memory: object,
    entries: Mapping[str, Entry] | None = None,
) -> Moved:
    """Fill `targets`, runs of `memory` of this process that the members' regions cover. Blocks.

    `entries`: the files as an origin among the members lists them, by path.

    Raises IntegrityError, TransportFailed, the stop's reason; then some of the bytes may have come, and nothing more will.
    Unless it is StillLanding: a read could not be ended (a mount that is dead), and `memory` is kept for ever.
    """
    items = pieces_to_read(holding, targets, entries or {})
    return carry(items, MemorySink(targets, copy_to), members, bell, context, memory, Meter())


def carry(
    items: Sequence[ReadItem],
    sink: Sink,
    members: Sequence[Member],
    bell: Bell,
    context: Context,
    memory: object,
    meter: Meter,
) -> Moved:
    """Bring the items into a sink of `memory` from the members, which are closed after it. Blocks; raises as `move` does."""
    source = Many(members, bell, telling(context))
    settings = context.settings
    # Peers and disks are watched by `Many`; an origin is the engine's to watch and to widen.
    most = width(context, source.caps.max_in_flight, ITEM)
    limits = Limits(settings.retry_for, float("inf"), most, most, in_order=True)
    if any(member.reserve for member in members):
        most = connections(context)
        limits = Limits(
            settings.retry_for, settings.stall_timeout, min(most, START_WIDTH * cores()), most, in_order=True
        )
    gate = context.gates[source.caps.host]
    transfer = Transfer(source, sink, limits, gate, meter, context.stop, context.on_retry)
    start = time.perf_counter()
    try:
        transfer.run(items)
    except BaseException as error:
        if landing := close(source, transfer, memory):
            if isinstance(error, Exception):
                raise landing from error
            context.warn(landing.what)
        raise
    seconds = time.perf_counter() - start
    if landing := close(source, transfer, memory):
        raise landing
    return Moved(sum(member.bytes for member in members), seconds, {member.name: member.bytes for member in members})


def close(source: Source, transfer: Transfer, memory: object) -> StillLanding | None:
    """Close the source of a transfer that is over. What it says when a read cannot be ended: then `memory` is kept for ever."""
    landing = None
    try:
        source.close()
    except StillLanding as error:
        landing = error
    if transfer.in_flight and landing is None:
        files = ", ".join(sorted(transfer.in_flight)[:SHOWN])
        landing = StillLanding(f"a read of {files} does not end: its bytes may land at any time")
    if landing:
        never_free((memory, source))
    return landing


def pieces_to_read(holding: Holding, targets: Sequence[Extent], entries: Mapping[str, Entry]) -> list[ReadItem]:
    """Pieces that split no block, of one device each."""
    found = []
    host_piece = piece_size(sum(row.length for row in targets))
    groups: dict[tuple[int, str], list[Span]] = {}
    for row in targets:
        groups.setdefault((row.device, row.file), []).append((row.offset, row.end))
    for (device, file), spans in sorted(groups.items()):
        piece = host_piece if device == HOST else ITEM
        found += read_items(holding, file, entries, aligned(spans, holding.seams(file), piece))
    return found


def read_items(holding: Holding, file: str, entries: Mapping[str, Entry], spans: Iterable[Span]) -> list[ReadItem]:
    """An item for each span of a file: as `entries` list it, else as the holding vouches for it. Raises IntegrityError."""
    entry = entries.get(file)
    if entry is None:
        record = holding.manifest.record(file)
        if record is None:
            raise IntegrityError(f"{file}: no such file in the manifest")
        entry = holding.entry(record)
    return [ReadItem(entry, start, end - start) for start, end in spans]


def disk_member(
    directory: Path,
    holding: Holding,
    bell: Bell,
    context: Context,
    entries: Mapping[str, Entry] | None = None,
    device: int = HOST,
) -> Member:
    """A directory on disk as a source: a snapshot, or files as they were listed. `device`: the GPU that they are for."""
    disk = Disk(directory, holding, entries, context.notice, locked(device, context))
    path: Disk | Gds = disk
    if device != HOST:
        from mx_cli.transport.gds import over

        path = over(disk, device, context.notice)
    name = "cache" if entries is None else "disk"
    return Member(name, PeerSource(name, holding, path, bell.ring, lambda: None), returns=True)


def locked(device: int, context: Context) -> Callable[[Pool], None]:
    """What is done with host memory that bytes go through on their way to GPU `device`: copies from locked memory are fast."""

    def lock(pool: Pool) -> None:
        from mx_cli.transport.on_gpu import pin

        if why := pin(pool):
            context.detail(why)

    return lock if device != HOST else lambda pool: None


def _say(shape: Shape) -> str:
    return f"{shape[0]}{list(shape[1])}"


def some(names: Sequence[str]) -> str:
    """The first few names, and how many more there are."""
    return ", ".join(names[:SHOWN]) + (f", and {len(names) - SHOWN} more" if len(names) > SHOWN else "")
