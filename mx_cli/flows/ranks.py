"""The share of one rank: which part of each tensor it needs, memory for it, and only its bytes read."""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mx_cli.base import units
from mx_cli.base.errors import IntegrityError, UsageError
from mx_cli.engine.many import Bell, Member
from mx_cli.engine.ports import ReadItem
from mx_cli.flows.context import Context
from mx_cli.flows.pull_memory import Moved, Put, Shape, carry, place_of, table
from mx_cli.flows.targets import ALIGN, byte_block
from mx_cli.model import hf_config
from mx_cli.model.header import BITS
from mx_cli.model.holding import Holding
from mx_cli.model.manifest import Entry
from mx_cli.model.share import Share
from mx_cli.plan.blocks import aligned
from mx_cli.plan.boxes import overlap
from mx_cli.plan.families import NAMES, built_in, family_of
from mx_cli.plan.rows import COPY_ALONG, READ_ALONG, Rows, spans_to_read, wanted_within
from mx_cli.plan.shards import Rules
from mx_cli.sinks.rows import RowsSink
from mx_cli.transport.peer import ITEM

Config = Callable[[], Mapping[str, Any] | None]
"""The model's config.json, None where there is none."""
_RANK = re.compile(r"(\d{1,6})/(\d{1,6})")


@dataclass(frozen=True)
class Cut:
    """The part of rank `rank` of `ranks`."""

    rank: int
    ranks: int
    rules: Rules

    @property
    def text(self) -> str:
        return f"{self.rank}/{self.ranks}"

    def shares(self, shapes: Mapping[str, Shape]) -> dict[str, Share]:
        """The rank's part of each whole tensor. Raises UsageError naming the tensor and the rule that does not fit."""
        return {name: self.rules.share(name, shape, self.rank, self.ranks) for name, (_, shape) in shapes.items()}


def parse_rank(text: str) -> tuple[int, int]:
    """(rank, ranks) of `r/n`, ranks counted from 0. Raises UsageError."""
    found = _RANK.fullmatch(text)
    rank, ranks = (int(found[1]), int(found[2])) if found else (0, 0)
    if not rank < ranks:
        raise UsageError(f"not a rank: {text!r}", hint="r/n, counted from 0: the second of four is 1/4")
    return rank, ranks


def cut_of(rank: str, rules: Any, config: Config) -> Cut:
    """The cut of `rank` (r/n) by `rules`: a family's name, a rule file, what one holds, or None for the config's family.

    Raises UsageError for rules that are none, and for a family that the config lacks what is needed for.
    """
    number, ranks = parse_rank(rank)
    if isinstance(rules, Rules):
        return Cut(number, ranks, rules)
    if isinstance(rules, Mapping):
        return Cut(number, ranks, Rules.from_json(dict(rules)))
    if ranks == 1:
        # The whole is the same by all rules.
        return Cut(number, ranks, Rules((), replicate_rest=True))
    if rules is not None and str(rules).lower() not in NAMES:
        return Cut(number, ranks, _rule_file(rules))
    found = config()
    if found is None:
        raise UsageError("there is no config.json that says how many heads there are", hint="give a rule file")
    family = str(rules) if rules is not None else family_of(found)
    if not family:
        raise UsageError(
            f"no built-in rules for {found.get('model_type')!r}",
            hint=f"there are {', '.join(NAMES)}; or give a rule file",
        )
    return Cut(number, ranks, built_in(family, found))


def _rule_file(rules: Any) -> Rules:
    if not isinstance(rules, (str, os.PathLike)):
        raise UsageError(f"not rules: {rules!r}", hint=f"{', '.join(NAMES)}, a file, or what one holds")
    path = Path(rules)
    try:
        return Rules.from_json(json.loads(path.read_bytes()))
    except (OSError, ValueError) as error:
        hint = f"families: {', '.join(NAMES)}; else a JSON file of rules"
        raise UsageError(f"not a rule file: {path} ({error})", hint=hint) from None


def chosen(holding: Holding, names: Sequence[str] | None) -> dict[str, Shape]:
    """dtype and shape of the tensors `names` (None: all). Raises UsageError for a name that is none."""
    every = table(holding)
    if names is None:
        return every
    if lacking := sorted(set(names) - every.keys()):
        raise UsageError(f"no such tensors: {', '.join(lacking[:5])}")
    return {name: every[name] for name in sorted(names)}


def config_of(data: bytes | None) -> Mapping[str, Any] | None:
    """What a config.json says, None for none. Raises what reading one raises."""
    return None if data is None else hf_config.load(data, "config.json")


# --- memory ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Place:
    """Where a tensor's own bytes begin."""

    address: int
    device: int


@dataclass(frozen=True)
class Memory:
    """Memory for a rank's tensors, by name; `regions` of it are (address, length, device).

    `tensors`, called when the bytes are there, hands them out.
    """

    places: dict[str, Place]
    regions: list[tuple[int, int, int]]
    tensors: Callable[[], dict[str, Any]]


def own_memory(
    shapes: Mapping[str, Shape], shares: Mapping[str, Share], twins: Mapping[str, str], device: int
) -> Memory:
    """One block of memory for the shares. `twins`: name -> whose memory it has, too.

    Raises NoSpace, UsageError for a split in the middle of a byte.
    """
    from mx_cli.sinks import torch_tensors

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
            name: torch_tensors.tensor_of(block, offsets[twins.get(name, name)], shapes[name][0], share.local_shape)
            for name, share in shares.items()
        }

    return Memory(places, [(base, size, device)], tensors)


def _bytes(name: str, dtype: str, share: Share) -> int:
    bits = BITS.get(dtype, 8)
    for length in share.local_shape:
        bits *= length
    if bits % 8:
        raise UsageError(f"{name}: a split falls into the middle of a byte")
    return bits // 8


def twins_of(holding: Holding, shapes: Mapping[str, Shape], shares: Mapping[str, Share]) -> dict[str, str]:
    """Names whose bytes are all those of an earlier one: tied weights stay tied."""
    first: dict[object, str] = {}
    found = {}
    for name, share in shares.items():
        key = (place_of(holding, name), shapes[name], share)
        owner = first.setdefault(key, name)
        if owner != name:
            found[name] = owner
    return found


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
    put: Put | None,
    entries: Mapping[str, Entry] | None = None,
    *,
    many_runs: bool = False,
) -> Moved:
    """Read what the rows want, and little else, into their places. Blocks; raises as `move` does.

    Gaps of READ_ALONG bytes and less are read along; `many_runs`: the members take many runs in one request, so that only
    gaps of COPY_ALONG are. `extra` of the answer counts the bytes that were read and not wanted.
    """
    copy_along = COPY_ALONG if many_runs else READ_ALONG
    sink = RowsSink(rows, copy_along, put)
    items = items_of(holding, rows, sink, entries or {})
    extra = sum(_extra(sink, item, many_runs) for item in items)
    moved = carry(items, sink, members, bell, context)
    wanted = sum(one.size for one in rows)
    if extra:
        context.notice(f"{units.size(wanted)} are this rank's, and {units.size(extra)} between them were read along")
    return dataclasses.replace(moved, bytes=wanted + extra, extra=extra)


def items_of(holding: Holding, rows: Sequence[Rows], sink: RowsSink, entries: Mapping[str, Entry]) -> list[ReadItem]:
    """Pieces that hold the rows, and split no block of digests that they hold whole."""
    groups: dict[tuple[str, int], list[Rows]] = {}
    for one in rows:
        if one.size:
            groups.setdefault((one.file, one.device), []).append(one)
    found = []
    for (file, _), mine in sorted(groups.items()):
        record = holding.manifest.record(file)
        if record is None:
            raise IntegrityError(f"{file}: no such file in the manifest")
        entry = entries.get(file) or holding.entry(record)
        blocks = holding.blocks(file)
        spans = aligned(spans_to_read(mine, blocks), blocks, ITEM)
        found += [
            ReadItem(entry, start, end - start)
            for start, end in spans
            if wanted_within(sink.within(file, start, end), start, end)
        ]
    return found


def _extra(sink: RowsSink, item: ReadItem, many_runs: bool) -> int:
    from mx_cli.engine.ports import Memory as Runs

    assert item.end is not None
    rows = sink.within(item.entry.path, item.offset, item.end)
    if many_runs and isinstance(sink.acquire(item), Runs):
        return 0
    return item.end - item.offset - min(item.end - item.offset, wanted_within(rows, item.offset, item.end))
