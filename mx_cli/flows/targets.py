"""Tensors that are there already as the target of a pull: which bytes go straight to them, and which by a copy."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mx_cli.base.errors import Incompatible, UsageError
from mx_cli.engine.buffers import Pool
from mx_cli.flows.pull_memory import place_of, table
from mx_cli.model.holding import HOST, Extent, Holding, joined
from mx_cli.plan.shared import Piece, Wanted, pieces
from mx_cli.sinks.torch_tensors import Described, alignment, bytes_of, copy_all, holds, reach, tensor_of

ALIGN = 64
PAGE = 4096
"""Bytes: memory that has a file's place within a page takes direct reads of a disk."""


@dataclass(frozen=True)
class Layout:
    """Where the bytes go, and the tensors that get them. `finish` is called when all are there.

    `kinds` of the tensors, where the target knows them and not only the source. `block`: the tensor of bytes that all of
    it lies in, where there is one. `keep`: what keeps the memory of the targets alive beside it.
    `own`: the memory was made with this layout, and nobody else has written to it.
    """

    targets: list[Extent]
    names: list[str]
    finish: Callable[[], None]
    kinds: Mapping[str, str] = field(default_factory=dict)
    block: Any = None
    keep: object = None
    own: bool = False


def check_names(names: Iterable[str] | None, known: Collection[str]) -> None:
    """Raises UsageError for tensors that are asked for by name (None: all are) and that nothing has."""
    if lacking := sorted(set(names or ()) - set(known)):
        raise UsageError(f"no such tensors: {', '.join(lacking[:5])}")


def check_begun(begun: Iterable[str], names: Iterable[str]) -> None:
    """Raises Incompatible where what another route `begun` to fill would stay as that one left it."""
    if left := sorted(set(begun) - set(names)):
        raise Incompatible(
            f"it lacks {left[0]}, which another route began to fill", hint="mx_cli.pull() gives new tensors"
        )


def pieces_of(holding: Holding, dtypes: Mapping[str, str]) -> list[Piece]:
    """What to fetch for these tensors (name -> dtype): all bytes once, and whole blocks, so that all can be verified."""
    places = ((name, place_of(holding, name), dtype) for name, dtype in dtypes.items())
    return pieces((Wanted(name, *place, alignment(dtype)) for name, place, dtype in places), holding.blocks)


def filled_by_twins(described: Sequence[Described], offered: Mapping[str, object]) -> set[str]:
    """Names that are not offered, of tensors that are the very same memory as one that is (tied weights)."""
    present = {one.memory for one in described if one.name in offered}
    return {one.name for one in described if one.name not in offered and one.memory in present}


def layout_of(holding: Holding, described: Sequence[Described]) -> Layout:
    """Where the bytes of these tensors go, all of which the holding has.

    A piece goes straight to where its tensors are, when they lie there as they do in the piece. Otherwise it gets memory
    for the time being, and they copies of it: tensors that are scattered, or tied at the source and not here. Raises
    Incompatible for tensors that are one memory here and differ at the source, NoSpace.
    """
    chosen, doubtful = _without_twins(holding, described)
    entangled = _entangled(chosen) | doubtful
    by_name = {one.name: one for one in chosen}
    extents: list[tuple[Extent, str]] = []
    indirect: list[Piece] = []
    for piece in pieces_of(holding, {one.name: one.dtype for one in chosen}):
        members = [by_name[name] for name in piece.offsets]
        if piece.covered and _lies_alike(piece, members) and not entangled & piece.offsets.keys():
            first = members[0]
            address = first.address - piece.offsets[first.name]
            extents.append((Extent(piece.file, piece.start, piece.length, address, first.device), first.name))
        else:
            indirect.append(piece)
    _refuse_overlaps(extents)
    copies: list[tuple[Described, Any]] = []
    for device in sorted({by_name[next(iter(piece.offsets))].device for piece in indirect}):
        mine = [piece for piece in indirect if by_name[next(iter(piece.offsets))].device == device]
        copies += _through_copies(mine, by_name, device, extents)

    def finish() -> None:
        copy_all(copies)
        for one, expected in copies:
            # A later copy has changed an earlier one.
            if one.name in entangled and not holds(one.tensor, expected):
                raise torn(one.name, "others")

    return Layout([extent for extent, _ in extents], [one.name for one in described], finish)


def _without_twins(holding: Holding, described: Iterable[Described]) -> tuple[list[Described], set[str]]:
    """One of each memory, and the names of several for one whose digests nobody knows: their bytes have to be compared.

    Raises Incompatible where the source has different bytes for one memory.
    """
    kept: dict[object, Described] = {}
    doubtful: dict[str, Described] = {}
    for one in described:
        twin = kept.setdefault(one.memory if one.size else one.name, one)
        if twin is one or place_of(holding, twin.name) == place_of(holding, one.name):
            continue
        blocks = [holding.by_name[name].blocks for name in (twin.name, one.name) if name not in holding.aliases]
        if len(blocks) < 2 or (any(blocks) and blocks[0] != blocks[1]):
            raise torn(twin.name, one.name)
        if not any(blocks):
            doubtful |= {twin.name: twin, one.name: one}
    first = {one.name for one in kept.values()}
    return [*kept.values(), *(one for name, one in doubtful.items() if name not in first)], set(doubtful)


def torn(name: str, other: str) -> Incompatible:
    """The error for two tensors that share memory here and differ at the source."""
    return Incompatible(
        f"tensors do not agree: {name} and {other} share memory here, and differ at the source",
        hint="untie them, or mx_cli.pull() gives new tensors",
    )


def _entangled(described: Iterable[Described]) -> set[str]:
    """Tensors whose memory overlaps another's in ways that addresses alone do not tell: scattered ones take part."""
    found: set[str] = set()
    group: list[Described] = []
    end = 0
    for one in sorted(described, key=lambda one: (one.device, one.tensor.data_ptr())):
        if group and one.device == group[0].device and one.tensor.data_ptr() < end:
            group.append(one)
        else:
            found |= _if_entangled(group)
            group, end = [one], 0
        end = max(end, one.tensor.data_ptr() + reach(one.tensor))
    return found | _if_entangled(group)


def _if_entangled(group: Sequence[Described]) -> set[str]:
    return {one.name for one in group} if len(group) > 1 and any(one.scattered for one in group) else set()


def _lies_alike(piece: Piece, members: Sequence[Described]) -> bool:
    if len(members) == 1:
        return not members[0].scattered
    origins = {(one.device, one.address - piece.offsets[one.name]) for one in members}
    return len(origins) == 1 and not any(one.scattered for one in members)


def _refuse_overlaps(extents: Iterable[tuple[Extent, str]]) -> None:
    """Raises Incompatible where bytes of two places in the file would go to one in memory."""
    rows = sorted(extents, key=lambda row: (row[0].device, row[0].address))
    for (one, name), (other, other_name) in itertools.pairwise(rows):
        if one.device == other.device and other.address < one.address + one.length:
            raise torn(name, other_name)


def _through_copies(
    indirect: Sequence[Piece], by_name: Mapping[str, Described], device: int, extents: list[tuple[Extent, str]]
) -> list[tuple[Described, Any]]:
    """Memory for pieces that cannot go straight, and what to copy to which tensor afterwards."""
    offsets, size = in_one_block(indirect)
    block = byte_block(device, size)
    copies = []
    for piece, at in zip(indirect, offsets, strict=True):
        extents.append((Extent(piece.file, piece.start, piece.length, block.data_ptr() + at, device), ""))
        for name, offset in piece.offsets.items():
            one = by_name[name]
            copies.append((one, tensor_of(block, at + offset, one.dtype, one.shape)))
    return copies


def own_tensors(
    holding: Holding, names: Sequence[str] | None, device: int, tensors: dict[str, Any], *, fresh: bool = False
) -> Layout:
    """Memory for the tensors `names` (None: all), which `finish` puts into `tensors`. Raises UsageError, NoSpace.

    `fresh`: see Pool.
    """
    every = table(holding)
    check_names(names, every.keys())
    chosen = sorted(every if names is None else names)
    wanted = pieces_of(holding, {name: every[name][0] for name in chosen})
    starts, size = in_one_block(wanted)
    block = byte_block(device, size, fresh=fresh)
    base = block.data_ptr()
    targets = [
        Extent(one.file, one.start, one.length, base + at, device) for one, at in zip(wanted, starts, strict=True)
    ]
    offsets = {
        name: at + inside for one, at in zip(wanted, starts, strict=True) for name, inside in one.offsets.items()
    }

    def finish() -> None:
        for name in chosen:
            tensors[name] = tensor_of(block, offsets.get(name, 0), *every[name])

    return Layout(joined(targets), chosen, finish, block=block, own=True)


def in_one_block(wanted: Sequence[Piece]) -> tuple[list[int], int]:
    """Where each piece begins in one block of memory, and the bytes in all. Neighbours in a file are neighbours in it.

    The first of them has the file's place within a page, where that suits its tensors.
    """
    found: list[int] = []
    size = 0
    last: Piece | None = None
    for piece in wanted:
        follows = last is not None and last.file == piece.file and last.end == piece.start
        if not (follows and size % piece.alignment == piece.shift):
            place = piece.start % PAGE
            if place % piece.alignment == piece.shift:
                size += (place - size) % PAGE
            else:
                size = -(-size // ALIGN) * ALIGN + piece.shift
        found.append(size)
        size += piece.length
        last = piece
    return found, size


def byte_block(device: int, size: int, *, fresh: bool = False) -> Any:
    """A tensor of bytes: a pool of huge pages, touched (`fresh`: from now on), or a block of a GPU's memory. Raises NoSpace."""
    if device != HOST:
        from mx_cli.transport.on_gpu import allocate

        return allocate(device, size)
    pool = Pool(max(size, 1), fresh=fresh)
    if fresh:
        pool.touch_ahead()
    return bytes_of(pool.view)
