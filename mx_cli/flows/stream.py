"""`mx_cli.stream`: the tensors of a checkpoint one by one, in the order of its files, through bounded memory."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import Any

from mx_cli.base import units
from mx_cli.base.cancel import Stop
from mx_cli.base.errors import MxError, NoSpace, UsageError
from mx_cli.base.memory import available
from mx_cli.engine.many import Bell, Many, Member
from mx_cli.engine.meter import Meter
from mx_cli.engine.ports import ReadItem
from mx_cli.engine.run import Limits, Transfer, cores
from mx_cli.flows.catalog import Catalog, catalog
from mx_cli.flows.context import Context
from mx_cli.flows.in_process import process_context, require_torch
from mx_cli.flows.load import member
from mx_cli.flows.pull_tensors import device_number
from mx_cli.model.holding import HOST, Tensor
from mx_cli.plan.blocks import aligned, steps
from mx_cli.sinks.ring import ALIGN, Group, RingSink
from mx_cli.transport.peer import ITEM

MEMORY = 256 << 20
BESIDE = 32 << 20
"""Bytes of a stream's memory that are not its ring: connections, their buffers, the plan."""
CONNECTION = 1 << 20
JOIN = 5.0


def stream(
    model: str,
    *,
    device: str = "cpu",
    memory: str | int | None = None,
    names: Sequence[str] | None = None,
    owned: bool = True,
    revision: str | None = None,
    **settings: Any,
) -> Iterator[tuple[str, Any]]:
    """(name, tensor) of a checkpoint in the order of its files: `model` is a directory, a weight file or a URI.

    `memory` (bytes, or "256MiB") bounds all that is held at once; by default 256 MiB, and half of what the cgroup leaves.
    A slow consumer slows the reading. `owned`: each tensor is the caller's; otherwise it is good only until the next one
    is asked for, and nothing is copied. `names`: only these. `settings`: as in `mx config`.

    Blocks while it waits. Raises what `load` raises; NoSpace when the largest tensor does not fit into `memory`. Closing
    the iterator ends the reading.
    """
    require_torch()
    context = process_context(settings)
    index = device_number(device)
    limit = _limit(memory)
    found, origin = catalog(model, revision, context)
    try:
        yield from _stream(found, origin, names, limit, index, owned, context)
    finally:
        origin.close()


def _limit(memory: str | int | None) -> int:
    if memory is None:
        return min(MEMORY, available() // 2)
    return units.parse_size(memory) if isinstance(memory, str) else memory


def _stream(
    found: Catalog, origin: Any, names: Sequence[str] | None, limit: int, device: int, owned: bool, context: Context
) -> Iterator[tuple[str, Any]]:
    tensors = _chosen(found, names)
    groups = _groups(tensors)
    size = _ring_size(groups, limit)
    sink = RingSink(groups, size)
    bell = Bell()
    source = Many([member(found, origin, bell, context)], bell, _left)
    work = Stop()
    reading = threading.Thread(
        target=_read, args=(found, groups, source, sink, limit - size, work, context), name="stream", daemon=True
    )
    hand_out = _HandOut(sink, device, owned)
    reading.start()
    try:
        # Empty tensors have no bytes and no group: they come first of their file's tensors.
        at = 0
        for group, view in sink.take():
            while (
                at < len(tensors)
                and (tensors[at].size == 0 or tensors[at].file == group.file)
                and (tensors[at].size == 0 or tensors[at].end <= group.end)
            ):
                yield tensors[at].name, hand_out.tensor(tensors[at], group, view)
                at += 1
        for tensor in tensors[at:]:
            yield tensor.name, hand_out.tensor(tensor, None, memoryview(b""))
    finally:
        work.request(UsageError("the stream was closed"))
        source.close()
        reading.join(JOIN)


def _left(failed: Member, error: MxError) -> None:
    """The only source: its error ends the stream."""


def _chosen(found: Catalog, names: Sequence[str] | None) -> list[Tensor]:
    tensors = list(found.holding.tensors)
    if names is None:
        return tensors
    if lacking := sorted(set(names) - {tensor.name for tensor in tensors}):
        raise UsageError(f"no such tensors: {', '.join(lacking[:5])}")
    return [tensor for tensor in tensors if tensor.name in set(names)]


def _groups(tensors: Sequence[Tensor]) -> list[Group]:
    """Small neighbours in one group, a large tensor in one of its own."""
    groups: list[Group] = []
    for tensor in tensors:
        if tensor.size == 0:
            continue
        last = groups[-1] if groups else None
        if last and last.file == tensor.file and last.end == tensor.start and tensor.end - last.start <= ITEM:
            last.end = tensor.end
        else:
            groups.append(Group(tensor.file, tensor.start, tensor.end))
    return groups


def _ring_size(groups: Sequence[Group], limit: int) -> int:
    largest = max((group.size for group in groups), default=0) + 2 * ALIGN
    if largest + BESIDE > limit:
        raise NoSpace(
            f"a stream of this checkpoint needs {units.size(largest + BESIDE)} (memory: {units.size(limit)})",
            hint="its largest tensor is held whole: give more memory",
        )
    total = sum(group.size + 2 * ALIGN for group in groups)
    return min(limit - BESIDE, max(largest, total))


def _read(
    found: Catalog, groups: Sequence[Group], source: Many, sink: RingSink, beside: int, work: Stop, context: Context
) -> None:
    """The thread that fills the ring."""
    settings = context.settings
    items = []
    for group in groups:
        record = found.holding.manifest.record(group.file)
        assert record is not None, "groups are of the manifest's files"
        entry = found.entries.get(group.file) or found.holding.entry(record)
        wanted = [(group.start, group.end)]
        spans = aligned(wanted, found.holding.blocks(group.file) or steps(wanted, ITEM), ITEM)
        items += [ReadItem(entry, start, end - start) for start, end in spans]
    most = max(1, min(source.caps.max_in_flight, settings.max_connections, beside // (2 * CONNECTION)))
    limits = Limits(settings.retry_for, settings.stall_timeout, min(most, 4 * cores()), most)
    gate = context.gates[source.caps.host]
    transfer = Transfer(source, sink, limits, gate, Meter(), work, context.on_retry)
    try:
        transfer.run(items)
    except MxError as error:
        sink.fail(error)


class _HandOut:
    """Makes tensors of bytes in the ring."""

    def __init__(self, sink: RingSink, device: int, owned: bool) -> None:
        from mx_cli.sinks.torch_tensors import bytes_of

        self._device, self._owned = device, owned
        self._ring = bytes_of(sink.pool.view)
        if device != HOST:
            from mx_cli.transport.on_gpu import pin

            pin(sink.pool.address, len(sink.pool.view))

    def tensor(self, tensor: Tensor, group: Group | None, view: memoryview) -> Any:
        import torch

        from mx_cli.sinks.torch_tensors import alignment, tensor_of

        at = group.at + tensor.start - group.start if group else 0
        piece = self._ring[at : at + tensor.size]
        if self._device != HOST:
            piece = piece.to(f"cuda:{self._device}")
        elif self._owned or piece.data_ptr() % alignment(tensor.dtype):
            piece = piece.clone(memory_format=torch.contiguous_format)
        return tensor_of(piece, 0, tensor.dtype, tensor.shape)
