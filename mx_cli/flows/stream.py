"""`mx_cli.stream`: the tensors of a checkpoint one by one, in the order of its files, through bounded memory."""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from mx_cli.base import units
from mx_cli.base.cancel import Stop
from mx_cli.base.errors import IntegrityError, MxError, NoSpace, TransportFailed, UsageError
from mx_cli.base.threads import begin
from mx_cli.engine.buffers import Pool
from mx_cli.engine.many import Bell, Many, Member
from mx_cli.engine.meter import Meter
from mx_cli.engine.run import Limits, Transfer, cores
from mx_cli.flows.bounds import BESIDE, CONNECTION, memory_limit
from mx_cli.flows.catalog import Catalog, catalog, member
from mx_cli.flows.context import Context
from mx_cli.flows.from_python import device_number, model_text, process_context, wanted_names
from mx_cli.flows.load import chosen_tensors
from mx_cli.flows.pull_memory import close, locked, read_items
from mx_cli.model.holding import HOST, Tensor
from mx_cli.plan.blocks import aligned
from mx_cli.sinks.ring import ALIGN, Buffers, Group, Ring, RingSink, Room
from mx_cli.sinks.torch_tensors import alignment, bytes_of, copy_of, empty_of, require_torch, tensor_of
from mx_cli.transport.on_gpu import copy_to, finish
from mx_cli.transport.peer import ITEM

JOIN = 10.0
"""Seconds for the thread that reads to end: most of them pass only when a read hangs."""
NEIGHBOURS = ITEM - ALIGN
"""Bytes of neighbours that are read together: with its place within a page, that many fill whole huge pages."""
SHARE = 1 << 20
"""Bytes: owned tensors from this size on share the memory of their neighbours, at most NEIGHBOURS of it; smaller ones are copied."""


def stream(
    model: str,
    *,
    device: str = "cpu",
    memory: str | int | None = None,
    names: Sequence[str] | None = None,
    owned: bool = True,
    revision: str | None = None,
    fill_cache: bool = False,
    **settings: Any,
) -> Iterator[tuple[str, Any]]:
    """(name, tensor) of a checkpoint in the order of its files: `model` is a directory, a weight file or a URI.

    `memory` (bytes, or "256MiB") bounds all that is held at once; by default 256 MiB, and half of what the cgroup leaves.
    A slow consumer slows the reading. `owned`: each tensor is the caller's, and no longer of what `memory` bounds once the
    next one is asked for; the memory of dropped ones is used again. Otherwise it is good only until the next one is asked
    for. `names`: only these. `settings`: as in `mx config`.

    `fill_cache`: what a URI gives is also kept, see `load`: all of it, while the tensors come, so a slow consumer holds up
    only itself. What was handed out is verified when the iterator has ended, and not before.

    Blocks while it waits. Raises what `load` raises; NoSpace when the largest tensor does not fit into `memory`. Closing
    the iterator ends the reading.
    """
    require_torch()
    model = model_text(model)
    context = process_context(settings if memory is None else {**settings, "memory": memory})
    index = device_number(device)
    names = wanted_names(names)
    limit = memory_limit(context)
    if fill_cache:
        yield from _filling(model, revision, names, limit, index, owned, context)
        return
    found, origin = catalog(model, revision, context)
    with _at_the_end(origin.close):
        yield from _stream(found, origin, names, limit, index, owned, context)


@contextmanager
def _at_the_end(act: Callable[[], None]) -> Iterator[None]:
    """Call `act` after the block, unless this is a fork of the process that began it: threads and connections are that one's."""
    process = os.getpid()
    try:
        yield
    finally:
        if os.getpid() == process:
            act()


def _filling(
    model: str,
    revision: str | None,
    names: Sequence[str] | None,
    limit: int,
    device: int,
    owned: bool,
    context: Context,
) -> Iterator[tuple[str, Any]]:
    from mx_cli.flows.fill_cache import Fill

    with Fill(model, revision, context) as fill:
        found, origin = fill.catalog()
        yield from _stream(found, origin, names, limit, device, owned, fill.patient())
        directory = fill.finish()
        if fill.torn:
            raise IntegrityError(
                f"{model}: some tensors had other bytes than what was published in the end", hint=f"stream {directory}"
            )


def _stream(
    found: Catalog, origin: Any, names: Sequence[str] | None, limit: int, device: int, owned: bool, context: Context
) -> Iterator[tuple[str, Any]]:
    tensors = chosen_tensors(found, names)
    groups = _groups(tensors)
    owns = owned and device == HOST
    size = _ring_size(groups, limit, owns)
    straight = device if device != HOST and _goes_straight(found, device) else HOST
    sink = RingSink(groups, _room(size, owns, device, straight, context), straight, _put(straight))
    bell = Bell()
    source = Many([member(found, origin, bell, context, straight)], bell, _left)
    work = Stop()
    reading = threading.Thread(
        target=_read, args=(found, groups, source, sink, limit - size, work, context), name="stream", daemon=True
    )
    try:
        begin(reading)
    except MxError:
        source.close()
        raise

    def end() -> None:
        work.request(UsageError("the stream was closed"))
        bell.ring()
        reading.join(JOIN)

    with _at_the_end(end):
        yield from _in_order(tensors, sink, _HandOut(device, owned))


def _goes_straight(found: Catalog, device: int) -> bool:
    """Whether the bytes go into the GPU's memory past the host's."""
    from mx_cli.transport import gds

    return found.directory is not None and not gds.verdict(device)


def _room(size: int, owns: bool, device: int, straight: int, context: Context) -> Room:
    if owns:
        return Buffers(size)
    if straight != HOST:
        from mx_cli.transport.on_gpu import GpuPool

        return Ring(size, GpuPool(straight, size))
    pool = Pool(size, fresh=True)
    locked(device, context)(pool)
    return Ring(size, pool)


def _put(device: int) -> Callable[[int, memoryview], None] | None:
    return None if device == HOST else functools.partial(copy_to, device)


def _in_order(tensors: Sequence[Tensor], sink: RingSink, hand_out: _HandOut) -> Iterator[tuple[str, Any]]:
    """Empty tensors have no bytes and no group: they come first of their file's tensors."""
    at = 0
    for group, buffer in sink.take():
        hand_out.begin(group, buffer)
        del buffer
        while at < len(tensors) and (tensors[at].size == 0 or _lies_in(tensors[at], group)):
            yield tensors[at].name, hand_out.tensor(tensors[at])
            at += 1
        hand_out.end()
    for tensor in tensors[at:]:
        yield tensor.name, hand_out.tensor(tensor)


def _lies_in(tensor: Tensor, group: Group) -> bool:
    return tensor.file == group.file and tensor.end <= group.end


def _left(failed: Member, error: MxError) -> None:
    """The only source: its error ends the stream."""


def _groups(tensors: Sequence[Tensor]) -> list[Group]:
    """Small neighbours in one group, a large tensor in one of its own."""
    groups: list[Group] = []
    for tensor in tensors:
        if tensor.size == 0:
            continue
        last = groups[-1] if groups else None
        if last and last.file == tensor.file and last.end == tensor.start and tensor.end - last.start <= NEIGHBOURS:
            last.end = tensor.end
        else:
            groups.append(Group(tensor.file, tensor.start, tensor.end))
    return groups


def _ring_size(groups: Sequence[Group], limit: int, owns: bool) -> int:
    largest = max(map(Buffers.needed, groups), default=0)
    if largest + BESIDE > limit:
        raise NoSpace(
            f"a stream of this checkpoint needs {units.size(largest + BESIDE)} (memory: {units.size(limit)})",
            hint="its largest tensor is held whole: give more memory",
        )
    most = limit - BESIDE
    if owns:
        # The consumer still has a tensor when it asks for the next one.
        most = max(largest, most - largest)
    return min(most, sum(map(Buffers.needed, groups)))


def _read(
    found: Catalog, groups: Sequence[Group], source: Many, sink: RingSink, beside: int, work: Stop, context: Context
) -> None:
    """The thread that fills the ring. It alone calls the source, and closes it."""
    settings = context.settings
    items = []
    for group in groups:
        spans = aligned([(group.start, group.end)], found.holding.blocks(group.file), ITEM)
        items += read_items(found.holding, group.file, found.entries, spans)
    most = max(1, min(source.caps.max_in_flight, settings.max_connections, beside // CONNECTION))
    limits = Limits(settings.retry_for, settings.stall_timeout, min(most, 4 * cores()), most, in_order=True)
    gate = context.gates[source.caps.host]
    transfer = Transfer(source, sink, limits, gate, Meter(), work, context.on_retry)
    try:
        transfer.run(items)
    except BaseException as error:
        landing = close(source, transfer, sink)
        if landing:
            # Who has closed the stream takes nothing any more, and no error.
            context.warn(landing.what)
        if isinstance(error, MxError):
            # What it was raised through holds the memory, and would with it lie in a circle.
            sink.fail(landing or error.with_traceback(None))
            return
        # Whoever waits for tensors must hear of a bug; the thread ends with it all the same.
        bug = f"reading {found.holding.manifest.uri}: {type(error).__name__}: {error}"
        sink.fail(landing or TransportFailed(bug))
        raise
    else:
        source.close()


class _HandOut:
    """Makes tensors of the bytes of a group."""

    def __init__(self, device: int, owned: bool) -> None:
        self._device, self._owned = device, owned
        self._group: Group | None = None
        self._bytes: Any = None

    def begin(self, group: Group, buffer: Any) -> None:
        self._group = group
        self._bytes = bytes_of(buffer) if self._device == HOST or isinstance(buffer, memoryview) else buffer

    def end(self) -> None:
        """From here on the bytes are only held by those who took tensors; where they lay, others may land."""
        if self._bytes is not None and self._bytes.is_cuda:
            finish(self._device)
        self._group = self._bytes = None

    def tensor(self, tensor: Tensor) -> Any:
        if self._group is None or tensor.size == 0:
            return empty_of(tensor.dtype, tensor.shape, self._device)
        at = tensor.start - self._group.start
        piece = self._bytes[at : at + tensor.size]
        if self._device != HOST and not piece.is_cuda:
            piece = piece.to(f"cuda:{self._device}")
        elif not _suits(piece, alignment(tensor.dtype)) or (self._owned and self._passes(tensor, self._group)):
            piece = copy_of(piece)
        return tensor_of(piece, 0, tensor.dtype, tensor.shape)

    def _passes(self, tensor: Tensor, group: Group) -> bool:
        """Whether the memory is used again, or too much of it for this tensor: a GPU's is always a ring."""
        return self._device != HOST or tensor.size < SHARE < group.size


def _suits(piece: Any, step: int) -> bool:
    """Whether these bytes can be seen as elements of `step` bytes where they are."""
    return bool(piece.data_ptr() % step == 0 and piece.storage_offset() % step == 0)
