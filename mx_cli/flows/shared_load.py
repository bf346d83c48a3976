"""`mx_cli.load` of a whole group: each rank reads its portion of the bytes, and all get all of them from each other."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from mx_cli.base import canonical
from mx_cli.base.cancel import Stop
from mx_cli.base.errors import MxError, TransportFailed
from mx_cli.base.threads import begin
from mx_cli.engine.many import Bell, Member
from mx_cli.engine.meter import Meter
from mx_cli.engine.ports import ReadItem, Sink
from mx_cli.flows.catalog import Catalog, catalog
from mx_cli.flows.context import Context
from mx_cli.flows.cuts import Cut
from mx_cli.flows.hash import is_local
from mx_cli.flows.pull_memory import carry, place_of, read_items
from mx_cli.flows.ranks import Memory, chosen, own_memory, rows_of, twins_of
from mx_cli.flows.targets import Layout, own_tensors
from mx_cli.model.holding import HOST, Extent, Extents, Holding
from mx_cli.model.manifest import BLOCK, Entry, Manifest
from mx_cli.plan.blocks import aligned
from mx_cli.plan.portions import portions
from mx_cli.plan.ranges import Span
from mx_cli.plan.rows import READ_ALONG, Rows
from mx_cli.sinks.portions import PortionSink, RingOfPieces
from mx_cli.sinks.rows import RowsSink, pick
from mx_cli.sources.registry import OpenOrigin
from mx_cli.transport import cuda
from mx_cli.transport.collective import BUCKET, Collective
from mx_cli.transport.on_gpu import copy_to
from mx_cli.transport.peer import ITEM

LEAST_PIECE = 64 << 10
PIECES = 8
"""Pieces of a portion at least, so that the portions are about equal."""
JOIN = 5.0


class SharedLoad:
    """One load by all ranks of a group. Each rank makes it with the same arguments."""

    def __init__(self, group: Any, device: int, context: Context, member: Any) -> None:
        """`member(catalog, origin, bell, context, device)` makes the source of the bytes. Raises UsageError."""
        self._context, self._device, self._member = context, device, member
        self._ranks = Collective(group, device, context.settings.stall_timeout)

    def run(self, model: str, revision: str | None, names: Sequence[str] | None) -> dict[str, Any]:
        """Blocks. Raises what `load` raises, and TransportFailed when another rank failed or is lost."""
        wish = canonical.sha256([model, revision, sorted(names) if names is not None else None])
        self._ranks.same(int(wish[:15], 16), "what they load")
        made: list[tuple[Catalog, Layout]] = []
        tensors: dict[str, Any] = {}
        with contextlib.ExitStack() as opened:
            catalog_of = self._catalog(model, revision, opened)

            def make(seconds: float) -> bool:
                found = catalog_of()
                made.append((found, own_tensors(found.holding, names, self._device, tensors, fresh=True)))
                return True

            self._ranks.agree(_once(make))
            found, layout = made[0]
            self._exchange(found, self._origin, layout)
            layout.finish()
            return tensors

    def run_share(
        self,
        model: str,
        revision: str | None,
        names: Sequence[str] | None,
        cut_of: Callable[[Catalog, OpenOrigin], Cut],
    ) -> dict[str, Any]:
        """The same, but each rank keeps only its part, by its own cut; what is exchanged passes through host memory."""
        wish = canonical.sha256([model, revision, sorted(names) if names is not None else None, "shares"])
        self._ranks.same(int(wish[:15], 16), "what they load")
        made: list[tuple[Catalog, Memory, list[Rows], list[Extent]]] = []
        with contextlib.ExitStack() as opened:
            catalog_of = self._catalog(model, revision, opened)

            def make(seconds: float) -> bool:
                found = catalog_of()
                holding = found.holding
                shapes = chosen(holding, names)
                shares = cut_of(found, self._origin).shares(shapes)
                memory = own_memory(shapes, shares, twins_of(holding, shapes, shares), self._device)
                whole = [Extent(*place_of(holding, name), 0) for name in shapes]
                made.append((found, memory, rows_of(holding, shapes, shares, memory.places), whole))
                return True

            self._ranks.agree(_once(make))
            found, memory, rows, whole = made[0]
            self._pass_through(found, rows, pieces_for(found, whole, self._ranks.size))
            return memory.tensors()

    def _pass_through(self, found: Catalog, rows: Sequence[Rows], items: Sequence[ReadItem]) -> None:
        """Piece by piece from the rank that reads it to all, each of which takes what it wants of it."""
        cuts = portions([item.length or 0 for item in items], self._ranks.size)
        first, last = cuts[self._ranks.rank]
        wanted = RowsSink(rows, READ_ALONG, copy_to)
        sink = RingOfPieces(items[first:last], BUCKET)
        task = _Task(
            lambda stop: self._read(found, self._origin, items[first:last], sink, sink, stop), self._context.stop
        )
        sink.tell = task.news.set
        at_once = max(1, BUCKET // ITEM)
        with task:
            for index in range(max(last - first for first, last in cuts)):
                there = functools.partial(sink.filled, index)
                self._ranks.agree(functools.partial(task.done, enough=there))
                turn = [(rank, items[first + index]) for rank, (first, last) in enumerate(cuts) if first + index < last]
                for at in range(0, len(turn), at_once):
                    self._pass(turn[at : at + at_once], index, sink, wanted)
                sink.give_back(index)
            self._ranks.agree(task.done)

    def _pass(self, turn: Sequence[tuple[int, ReadItem]], index: int, sink: RingOfPieces, wanted: RowsSink) -> None:
        pieces = []
        for rank, item in turn:
            own = sink.view(index) if rank == self._ranks.rank else None
            pieces.append((rank, self._ranks.piece(item.length or 0, own)))
        self._ranks.broadcast(pieces)
        for (_, item), (_, piece) in zip(turn, pieces, strict=True):
            view = self._ranks.view(piece)
            assert item.end is not None
            for one in wanted.within(item.entry.path, item.offset, item.end):
                pick(one, item.offset, view, wanted.put)

    # -- what there is -------------------------------------------------------------------------------------------

    def _catalog(self, model: str, revision: str | None, opened: contextlib.ExitStack) -> Callable[[], Catalog]:
        """Rank 0 lists and reads the headers, for all. Its files are then opened by each rank for itself."""
        if self._ranks.rank == 0:
            # The origin lives as long as the task: its stop is the origin's.
            task = opened.enter_context(
                _Task(lambda stop: catalog(model, revision, _with(self._context, stop)), self._context.stop)
            )
            self._ranks.agree(task.done)
            found, self._origin = task.result()
            opened.callback(self._origin.close)
            self._ranks.share(_as_bytes(found), 0)
            return lambda: found
        self._ranks.agree(lambda seconds: True)
        data = self._ranks.share(b"", 0)

        def open_here() -> Catalog:
            holding, entries = _from_bytes(data)
            self._origin = self._context.origin(model)
            opened.callback(self._origin.close)
            if not is_local(model):
                return Catalog(holding, entries, None)
            path = Path(model).expanduser().absolute()
            # A copy on another machine has other times: its size is what counts.
            return Catalog(holding, {}, path if path.is_dir() else path.parent)

        return open_here

    # -- the bytes -----------------------------------------------------------------------------------------------

    def _exchange(self, found: Catalog, origin: OpenOrigin, layout: Layout) -> None:
        items = pieces_for(found, layout.targets, self._ranks.size)
        cuts = portions([item.length or 0 for item in items], self._ranks.size)
        # The memory is in the order of the files: a portion of the pieces is a run of it.
        reach = [_reach(items[first:last], layout) for first, last in cuts]
        first, last = cuts[self._ranks.rank]
        sink = PortionSink(layout.targets, copy_to)
        task = _Task(
            lambda stop: self._read(found, origin, items[first:last], sink, layout, stop, self._device),
            self._context.stop,
        )
        sink.tell = task.news.set
        step = max(1, BUCKET // self._ranks.size)
        rounds = max((-(-(end - start) // step) for start, end in reach), default=0)
        base = layout.block.data_ptr()
        with task:
            for index in range(rounds):
                pieces = []
                for rank, (start, end) in enumerate(reach):
                    low, high = min(end, start + index * step), min(end, start + (index + 1) * step)
                    pieces.append((rank, layout.block[low - base : high - base]))
                    if rank == self._ranks.rank:
                        sink.expect(low, high)
                self._ranks.agree(lambda seconds: task.done(seconds, sink.filled))
                self._ranks.broadcast(pieces)
            self._ranks.agree(task.done)
        if self._device >= 0:
            cuda.synchronize(self._device)

    def _read(
        self,
        found: Catalog,
        origin: OpenOrigin,
        items: Sequence[ReadItem],
        sink: Sink,
        memory: object,
        stop: Stop,
        device: int = HOST,
    ) -> None:
        """`device`: where `sink` takes the bytes."""
        if items:
            context = _with(self._context, stop)
            bell = Bell()
            members: list[Member] = [self._member(found, origin, bell, context, device)]
            carry(items, sink, members, bell, context, memory, Meter())


def pieces_for(found: Catalog, targets: Sequence[Extent], ranks: int) -> list[ReadItem]:
    """Everything that is wanted, in the order of the files, in pieces that are small enough to be dealt out evenly."""
    spans: dict[str, list[Span]] = {}
    for row in targets:
        spans.setdefault(row.file, []).append((row.offset, row.end))
    even = sum(row.length for row in targets) // (ranks * PIECES)
    pieces = []
    for file in sorted(spans):
        blocks = found.holding.blocks(file)
        least = BLOCK if blocks else LEAST_PIECE
        piece = max(least, min(ITEM, even // LEAST_PIECE * LEAST_PIECE))
        pieces += read_items(found.holding, file, found.entries, aligned(spans[file], blocks, piece))
    return pieces


def _reach(items: Sequence[ReadItem], layout: Layout) -> Span:
    """The run of memory that the pieces fill."""
    if not items:
        base = layout.block.data_ptr()
        return base, base
    places = Extents(layout.targets)
    first, last = items[0], items[-1]
    assert first.end is not None
    assert last.end is not None
    start = places.within(first.entry.path, first.offset, first.end)[0].address
    end = places.within(last.entry.path, last.offset, last.end)[-1]
    return start, end.address + end.length


class _Task:
    """Work in a thread of its own, which stops with the block, or with the outer stop. `news` is set when it is over."""

    def __init__(self, work: Callable[[Stop], Any], outer: Stop) -> None:
        self._work, self._outer = work, outer
        self._stop = Stop()
        self._hooks = contextlib.ExitStack()
        self.news = threading.Event()
        self._over = False
        self._result: Any = None
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="shared-load", daemon=True)

    def _run(self) -> None:
        try:
            self._result = self._work(self._stop)
        except BaseException as error:  # noqa: BLE001 - it is raised in the thread that waits
            self._failure = error
        self._over = True
        self.news.set()

    def __enter__(self) -> _Task:
        self._hooks.enter_context(self._stop.following(self._outer))
        try:
            begin(self._thread)
        except MxError as error:
            # The other ranks hear of it when they ask.
            self._failure = error
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.request(TransportFailed("given up"))
        if self._thread.ident is not None:
            self._thread.join(JOIN)
        self._hooks.close()

    def done(self, seconds: float, enough: Callable[[], bool] = lambda: False) -> bool:
        """Whether it is over or `enough` holds, after so many seconds at most. Raises what it raised."""
        end = time.monotonic() + seconds
        while True:
            self.news.clear()
            if isinstance(self._failure, MxError):
                raise self._failure
            if self._failure:
                raise TransportFailed(f"{type(self._failure).__name__}: {self._failure}") from self._failure
            if self._over or enough():
                return True
            left = end - time.monotonic()
            if left <= 0:
                return False
            self.news.wait(left)

    def result(self) -> Any:
        return self._result


def _with(context: Context, stop: Stop) -> Context:
    return dataclasses.replace(context, stop=stop)


def _once(work: Callable[[float], bool]) -> Callable[[float], bool]:
    done: list[bool] = []

    def once(seconds: float) -> bool:
        if not done:
            done.append(work(seconds))
        return done[0]

    return once


def _as_bytes(found: Catalog) -> bytes:
    entries = {path: dataclasses.astuple(entry) for path, entry in found.entries.items()}
    holding = {"manifest": found.holding.manifest.to_json(), "starts": dict(found.holding.starts)}
    return json.dumps({**holding, "entries": entries}, ensure_ascii=False).encode("utf-8", "surrogateescape")


def _from_bytes(data: bytes) -> tuple[Holding, dict[str, Entry]]:
    read = json.loads(data.decode("utf-8", "surrogateescape"))
    holding = Holding(Manifest.from_json(read["manifest"], "rank 0 of the group"), (), read["starts"])
    return holding, {path: Entry(*row) for path, row in read["entries"].items()}
