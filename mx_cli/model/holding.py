"""What a peer holds: files of a checkpoint, real or synthetic, and where their bytes lie in its memory.

Weights that were never files (a module in a running process) are described as one safetensors file whose header is made
on the spot. So every holding is read in the same way: a piece of a file, in one or more runs of somebody's memory.
"""

from __future__ import annotations

import bisect
import itertools
import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from mx_cli.base import canonical
from mx_cli.base.errors import IntegrityError
from mx_cli.model.checks import Check, Checks, packed
from mx_cli.model.header import BITS
from mx_cli.model.identity import Identity
from mx_cli.model.manifest import BLOCK, Entry, FileRecord, Listing, Manifest
from mx_cli.model.paths import check_paths
from mx_cli.model.share import Share

HOST = -1
"""The device number of host memory; GPUs count from 0."""


def size_of(dtype: str, shape: Iterable[int]) -> int:
    """Bytes of a tensor; of a whole file for the dtype `file`."""
    return BITS.get(dtype, 8) * math.prod(shape) // 8


class Extent(NamedTuple):
    """`length` bytes of the file from `offset` lie at `address` of the peer's memory, on GPU `device` or in HOST memory."""

    file: str
    offset: int
    length: int
    address: int
    device: int = HOST

    @property
    def end(self) -> int:
        return self.offset + self.length


NONE = Checks(())
_OFFSET = operator.itemgetter(1)


class Tensor(NamedTuple):
    """A tensor of a holding. `start` is its first byte in the file; `blocks` are hex xxh3-128 of each 4 MiB from there.

    `size` in bytes.
    """

    name: str
    file: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    blocks: tuple[str, ...]
    size: int

    @property
    def end(self) -> int:
        return self.start + self.size


_PLACE = operator.itemgetter(1, 4, 0)
"""Of a tensor's fields: file, start, name."""
_SIZE = 6
"""Of a tensor's fields those before it are what its peer says; it follows from them."""


class Alias(NamedTuple):
    """A tensor whose bytes are those of the tensor `of`, from its byte `offset` (tied weights: 0, and equal shapes)."""

    of: str
    offset: int
    dtype: str
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Bytes."""
        return size_of(self.dtype, self.shape)


@dataclass(frozen=True)
class Holding:
    """A manifest, the full records of its identities, and what only a peer knows.

    `starts`: first byte of each tensor in its file, by `start_key`. `aliases`: tensors that share the bytes of another.
    `kinds`: `buffer` for what is no parameter. `texts`: small files that decide what is wanted (shard indexes), whole, so
    that nobody needs a grant to find out. `version` counts changes of the weights within one generation.

    `rank` (r/n) is of a peer that holds one rank's part of the tensors; `shares` says which part of which whole tensor,
    for those that it does not have whole. `packs`, by file, save its readers work.
    """

    manifest: Manifest
    identities: tuple[Identity, ...]
    starts: Mapping[str, int]
    aliases: Mapping[str, Alias] = field(default_factory=dict)
    kinds: Mapping[str, str] = field(default_factory=dict)
    texts: Mapping[str, str] = field(default_factory=dict)
    version: int = 0
    rank: str = ""
    shares: Mapping[str, Share] = field(default_factory=dict)
    packs: Mapping[str, tuple[Check, ...]] = field(default_factory=dict)

    @cached_property
    def tensors(self) -> tuple[Tensor, ...]:
        """By file and place: the order in which a reader lays out its own memory. Files without a table have none."""
        starts = self.starts
        rows = [
            (name, file, dtype, shape, start, blocks, size_of(dtype, shape))
            for file, name, dtype, shape, blocks in self.manifest.tensors
            if (start := starts.get(start_key(file, name))) is not None
        ]
        rows.sort(key=_PLACE)
        return tuple(map(Tensor._make, rows))

    @cached_property
    def by_name(self) -> Mapping[str, Tensor]:
        """The tensors by name. Of a pipeline, whose parts share names, the last one: its files are what to pull."""
        return {tensor.name: tensor for tensor in self.tensors}

    @cached_property
    def digest(self) -> str:
        """Hex SHA-256 over files and tensors, without addresses and identities: sources with the same one may be mixed."""
        files = sorted([record.path, record.size, record.xxh3] for record in self.manifest.files)
        rows = sorted(tensor[:_SIZE] for tensor in self.tensors)
        ties = sorted([name, *alias[:3], list(alias.shape)] for name, alias in self.aliases.items())
        parts = (
            [[self.rank, sorted([name, share.to_json()] for name, share in self.shares.items())]] if self.rank else []
        )
        return canonical.sha256([files, rows, ties, *parts])

    @cached_property
    def _checks(self) -> Mapping[str, Checks]:
        found: dict[str, list[tuple[int, int, str, str, int]]] = {}
        for name, file, _, _, start, blocks, size in self.tensors:
            rows = found.setdefault(file, [])
            if len(blocks) == 1:
                rows.append((start, size, blocks[0], name, 0))
                continue
            for index, expected in enumerate(blocks):
                at = index * BLOCK
                rows.append((start + at, min(BLOCK, size - at), expected, name, index))
        return {file: Checks(map(Check._make, rows)) for file, rows in found.items()}

    @cached_property
    def _packed(self) -> Mapping[str, Checks]:
        return {file: packed(checks, self.packs.get(file, ())) for file, checks in self._checks.items()}

    def checks(self, file: str) -> Sequence[Check]:
        """The blocks of a file whose digests are known, in the order of their bytes."""
        return self._checks.get(file, NONE).rows

    def blocks(self, file: str) -> Sequence[tuple[int, int]]:
        """The spans of `checks`."""
        return self._checks.get(file, NONE).spans()

    def checks_within(self, file: str, start: int, end: int) -> Sequence[Check]:
        """The blocks that lie whole in [start, end) of a file."""
        return self._checks.get(file, NONE).within(start, end)

    def seams(self, file: str) -> Sequence[tuple[int, int]]:
        """Like `blocks`, a pack of small tensors in one: pieces that split none of these are verified with least work."""
        return self._packed.get(file, NONE).spans()

    def packed_within(self, file: str, start: int, end: int) -> Sequence[Check]:
        """Like `checks_within`, whole packs as one check without a tensor's name."""
        whole = self._packed.get(file, NONE).within(start, end)
        if not whole:
            return self.checks_within(file, start, end)
        before, after = (start, whole[0].offset), (whole[-1].end, end)
        return (*self.checks_within(file, *before), *whole, *self.checks_within(file, *after))

    def entry(self, record: FileRecord) -> Entry:
        """A file of the manifest as an origin would list it, with the digests that the peer vouches for."""
        digests = {**record.digests, "xxh3": record.xxh3}
        return Entry(record.path, record.size, record.validator or record.xxh3, digests=digests, key=record.path)

    def listing(self) -> Listing:
        """All that the origin held, as the manifest remembers it. What the peer does not have has no key."""
        manifest = self.manifest
        records = {record.path: record for record in manifest.files}
        rest = [Entry(path, size) for path, size in manifest.listing if path not in records]
        return Listing(manifest.uri, manifest.revision, (*map(self.entry, manifest.files), *rest))

    def to_json(self) -> dict[str, Any]:
        return {
            "manifest": self.manifest.to_json(),
            "identities": [identity.to_json() for identity in self.identities],
            "starts": dict(self.starts),
            "aliases": {name: list(alias) for name, alias in self.aliases.items()},
            "kinds": dict(self.kinds),
            "texts": dict(self.texts),
            "version": self.version,
            "rank": self.rank,
            "shares": {name: share.to_json() for name, share in self.shares.items()},
            "packs": {file: [list(pack[:3]) for pack in packs] for file, packs in self.packs.items()},
        }

    @classmethod
    def from_json(cls, data: Any, where: str) -> Holding:
        """Raises IntegrityError for anything but a holding of files that can be, whose blocks lie inside of them."""
        try:
            holding = cls(
                Manifest.from_json(data["manifest"], where),
                tuple(Identity.from_json(record) for record in data["identities"]),
                {str(name): int(start) for name, start in data["starts"].items()},
                {str(name): _alias(*row) for name, row in data["aliases"].items()},
                {str(name): str(kind) for name, kind in data["kinds"].items()},
                {str(name): str(text) for name, text in data["texts"].items()},
                int(data["version"]),
                str(data.get("rank", "")),
                {str(name): Share.from_json(row) for name, row in data.get("shares", {}).items()},
                {str(file): tuple(_pack(*row) for row in rows) for file, rows in data.get("packs", {}).items()},
            )
            _check_places(holding, where)
            _check_packs(holding, where)
            _check_shares(holding, where)
            return holding
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise IntegrityError(f"not a holding: {where} ({error!r})") from None


class Extents:
    """Where pieces of files lie. Built once; lookups are by bisection."""

    def __init__(self, extents: Iterable[Extent]) -> None:
        """Raises IntegrityError when two extents of a file overlap."""
        self._of: dict[str, list[Extent]] = {}
        for extent in extents:
            if extent.length > 0:
                self._of.setdefault(extent.file, []).append(extent)
        self._offsets: dict[str, list[int]] = {}
        for file, rows in self._of.items():
            rows.sort(key=_OFFSET)
            self._offsets[file] = [row.offset for row in rows]
            end = 0
            for _, offset, length, _, _ in rows:
                if offset < end:
                    raise IntegrityError(f"{file}: two places for byte {offset}")
                end = offset + length

    @property
    def size(self) -> int:
        """Bytes that lie somewhere."""
        return sum(row.length for rows in self._of.values() for row in rows)

    @property
    def largest(self) -> Extent:
        """Raises IntegrityError when there is none."""
        rows = [row for rows in self._of.values() for row in rows]
        if not rows:
            raise IntegrityError("the peer does not say where any byte lies")
        return max(rows, key=lambda row: row.length)

    def within(self, file: str, start: int, end: int) -> list[Extent]:
        """What of [start, end) of a file lies anywhere, in order."""
        offsets = self._offsets.get(file, [])
        first = max(0, bisect.bisect_right(offsets, start) - 1)
        found = self._of.get(file, [])[first : bisect.bisect_left(offsets, end)]
        # Only the outer ones may reach out of it.
        if found and found[0].offset < start:
            found[0] = _part(found[0], start, found[0].end)
        if found and found[-1].end > end:
            found[-1] = _part(found[-1], found[-1].offset, end)
        return [row for row in found[:1] if row.length > 0] + found[1:]

    def cut(self, file: str, start: int, end: int) -> list[Extent]:
        """The runs of memory that hold [start, end) of a file, in order. Raises IntegrityError when some is nowhere."""
        found = self.within(file, start, end)
        at = start
        for row in found:
            if row.offset != at:
                break
            at = row.end
        if at < end:
            raise IntegrityError(f"{file}: the peer does not say where byte {at} lies")
        return found


def _part(row: Extent, start: int, end: int) -> Extent:
    return Extent(row.file, start, end - start, row.address + start - row.offset, row.device)


def joined(extents: Iterable[Extent]) -> list[Extent]:
    """The same runs, by file and offset; those that touch both in the file and in memory are one."""
    found: list[Extent] = []
    now: tuple[str, int, int, int, int] | None = None
    for file, offset, length, address, device in sorted(extents):
        if now and now[0] == file and now[1] + now[2] == offset and now[3] + now[2] == address and now[4] == device:
            now = (file, now[1], now[2] + length, now[3], device)
        elif length:
            if now:
                found.append(Extent._make(now))
            now = (file, offset, length, address, device)
    if now:
        found.append(Extent._make(now))
    return found


def start_key(file: str, name: str) -> str:
    """Tensors of different files may share a name (the parts of a pipeline)."""
    return f"{file}\0{name}"


def _alias(of: Any, offset: Any, dtype: Any, shape: Any) -> Alias:
    return Alias(str(of), int(offset), str(dtype), tuple(map(int, shape)))


def _pack(offset: Any, length: Any, expected: Any) -> Check:
    return Check(int(offset), int(length), str(expected))


def _check_packs(holding: Holding, where: str) -> None:
    for file, packs in holding.packs.items():
        begins = {check.offset for check in holding.checks(file)}
        ends = {check.end for check in holding.checks(file)}
        at = 0
        for pack in packs:
            if pack.offset < at or pack.offset not in begins or pack.length <= 0 or pack.end not in ends:
                raise IntegrityError(
                    f"{where}: no tensors of {file} lie together in {pack.length} bytes at {pack.offset}"
                )
            at = pack.end


def _check_places(holding: Holding, where: str) -> None:
    try:
        check_paths(record.path for record in holding.manifest.files)
    except IntegrityError as error:
        raise IntegrityError(f"{where}: {error.what}") from None
    sizes = {record.path: record.size for record in holding.manifest.files}
    if wrong := [path for path, size in sizes.items() if not 0 <= size < 1 << 63]:
        raise IntegrityError(f"{where}: no file has {sizes[wrong[0]]} bytes ({wrong[0]!r})")
    for name, file, _, shape, start, blocks, size in holding.tensors:
        if not all(type(length) is int and length >= 0 for length in shape):
            raise IntegrityError(f"{where}: tensor {name!r} has a shape that cannot be ({list(shape)})")
        if start < 0 or size < 0 or start + size > sizes.get(file, -1) or len(blocks) != -(-size // BLOCK):
            raise IntegrityError(f"{where}: tensor {name!r} does not lie in {file}")
    for one, other in itertools.pairwise(tensor for tensor in holding.tensors if tensor.size):
        if one.file == other.file and one.start + one.size > other.start:
            raise IntegrityError(f"{where}: tensors {one.name!r} and {other.name!r} overlap in {one.file}")
    sizes_of = {tensor.name: tensor.size for tensor in holding.tensors}
    for name, alias in holding.aliases.items():
        if (
            min(alias.shape, default=0) < 0
            or alias.offset < 0
            or alias.offset + alias.size > sizes_of.get(alias.of, -1)
        ):
            raise IntegrityError(f"{where}: tensor {name!r} does not lie in {alias.of!r}")


def _check_shares(holding: Holding, where: str) -> None:
    for name, share in holding.shares.items():
        owner = holding.aliases.get(name) or holding.by_name.get(name)
        if owner is None or share.local_shape != owner.shape or not holding.rank:
            raise IntegrityError(f"{where}: tensor {name!r} is not the part that its share says")
