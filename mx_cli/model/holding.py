"""What a peer holds: files of a checkpoint, real or synthetic, and where their bytes lie in its memory.

Weights that were never files (a module in a running process) are described as one safetensors file whose header is made
on the spot. So every holding is read in the same way: a piece of a file, in one or more runs of somebody's memory.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

from mx_cli.base import canonical
from mx_cli.base.errors import IntegrityError
from mx_cli.model.header import BITS
from mx_cli.model.identity import Identity
from mx_cli.model.manifest import BLOCK, Entry, FileRecord, Listing, Manifest

HOST = -1
"""The device number of host memory; GPUs count from 0."""


def size_of(dtype: str, shape: Iterable[int]) -> int:
    """Bytes of a tensor; of a whole file for the dtype `file`."""
    count = BITS.get(dtype, 8)
    for dimension in shape:
        count *= dimension
    return count // 8


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


class Tensor(NamedTuple):
    """A tensor of a holding. `start` is its first byte in the file; `blocks` are hex xxh3-128 of each 4 MiB from there."""

    name: str
    file: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    blocks: tuple[str, ...]

    @property
    def size(self) -> int:
        """Bytes."""
        return size_of(self.dtype, self.shape)

    @property
    def end(self) -> int:
        return self.start + self.size


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


class Check(NamedTuple):
    """`length` bytes at `offset` of a file have the digest `expected`; they are the tensor's `block`-th."""

    offset: int
    length: int
    expected: str
    tensor: str
    block: int

    @property
    def end(self) -> int:
        return self.offset + self.length


@dataclass(frozen=True)
class Holding:
    """A manifest, the full records of its identities, and what only a peer knows.

    `starts`: first byte of each tensor in its file, by `start_key`. `aliases`: tensors that share the bytes of another.
    `kinds`: `buffer` for what is no parameter. `texts`: small files that decide what is wanted (shard indexes), whole, so
    that nobody needs a grant to find out. `version` counts changes of the weights within one generation.
    """

    manifest: Manifest
    identities: tuple[Identity, ...]
    starts: Mapping[str, int]
    aliases: Mapping[str, Alias] = field(default_factory=dict)
    kinds: Mapping[str, str] = field(default_factory=dict)
    texts: Mapping[str, str] = field(default_factory=dict)
    version: int = 0

    @cached_property
    def tensors(self) -> tuple[Tensor, ...]:
        """By file and place: the order in which a reader lays out its own memory. Files without a table have none."""
        rows = [
            Tensor(name, file, dtype, shape, self.starts[start_key(file, name)], blocks)
            for file, name, dtype, shape, blocks in self.manifest.tensors
            if start_key(file, name) in self.starts
        ]
        return tuple(sorted(rows, key=lambda row: (row.file, row.start, row.name)))

    @cached_property
    def by_name(self) -> Mapping[str, Tensor]:
        """The tensors by name. Of a pipeline, whose parts share names, the last one: its files are what to pull."""
        return {tensor.name: tensor for tensor in self.tensors}

    @cached_property
    def digest(self) -> str:
        """Hex SHA-256 over files and tensors, without addresses and identities: sources with the same one may be mixed."""
        files = sorted([record.path, record.size, record.xxh3] for record in self.manifest.files)
        rows = sorted([t.name, t.file, t.dtype, list(t.shape), t.start, list(t.blocks)] for t in self.tensors)
        ties = sorted([name, *alias[:3], list(alias.shape)] for name, alias in self.aliases.items())
        return canonical.sha256([files, rows, ties])

    @cached_property
    def _checks(self) -> Mapping[str, tuple[Check, ...]]:
        found: dict[str, list[Check]] = {}
        for tensor in self.tensors:
            size = tensor.size
            for index, expected in enumerate(tensor.blocks):
                at = index * BLOCK
                check = Check(tensor.start + at, min(BLOCK, size - at), expected, tensor.name, index)
                found.setdefault(tensor.file, []).append(check)
        return {file: tuple(checks) for file, checks in found.items()}

    def checks(self, file: str) -> Sequence[Check]:
        """The blocks of a file whose digests are known, in the order of their bytes."""
        return self._checks.get(file, ())

    def blocks(self, file: str) -> Sequence[tuple[int, int]]:
        """The spans of `checks`."""
        return [(check.offset, check.end) for check in self.checks(file)]

    def checks_within(self, file: str, start: int, end: int) -> Sequence[Check]:
        """The blocks that lie whole in [start, end) of a file."""
        checks = self.checks(file)
        first = bisect.bisect_left(checks, start, key=lambda check: check.offset)
        last = bisect.bisect_right(checks, end, key=lambda check: check.end)
        return checks[first:last]

    def with_version(self, version: int) -> Holding:
        return replace(self, version=version)

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
        }

    @classmethod
    def from_json(cls, data: Any, where: str) -> Holding:
        """Raises IntegrityError for anything but a holding whose blocks lie inside its files."""
        try:
            holding = cls(
                Manifest.from_json(data["manifest"], where),
                tuple(Identity.from_json(record) for record in data["identities"]),
                {str(name): int(start) for name, start in data["starts"].items()},
                {str(name): _alias(*row) for name, row in data["aliases"].items()},
                {str(name): str(kind) for name, kind in data["kinds"].items()},
                {str(name): str(text) for name, text in data["texts"].items()},
                int(data["version"]),
            )
            _check_places(holding, where)
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
        for file, rows in self._of.items():
            rows.sort(key=lambda row: row.offset)
            for one, other in itertools.pairwise(rows):
                if one.end > other.offset:
                    raise IntegrityError(f"{file}: two places for byte {other.offset}")

    @property
    def largest(self) -> Extent:
        """Raises IntegrityError when there is none."""
        rows = [row for rows in self._of.values() for row in rows]
        if not rows:
            raise IntegrityError("the peer does not say where any byte lies")
        return max(rows, key=lambda row: row.length)

    def within(self, file: str, start: int, end: int) -> list[Extent]:
        """What of [start, end) of a file lies anywhere, in order."""
        rows = self._of.get(file, [])
        found: list[Extent] = []
        for row in rows[max(0, bisect.bisect_right(rows, start, key=lambda row: row.offset) - 1) :]:
            if row.offset >= end:
                break
            low, high = max(start, row.offset), min(end, row.end)
            if low < high:
                found.append(Extent(file, low, high - low, row.address + low - row.offset, row.device))
        return found

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


def joined(extents: Iterable[Extent]) -> list[Extent]:
    """The same runs, by file and offset; those that touch both in the file and in memory are one."""
    found: list[Extent] = []
    for row in sorted(extents):
        last = found[-1] if found else None
        if last and (last.file, last.end, last.address + last.length, last.device) == (
            row.file,
            row.offset,
            row.address,
            row.device,
        ):
            found[-1] = last._replace(length=last.length + row.length)
        elif row.length:
            found.append(row)
    return found


def start_key(file: str, name: str) -> str:
    """Tensors of different files may share a name (the parts of a pipeline)."""
    return f"{file}\0{name}"


def _alias(of: Any, offset: Any, dtype: Any, shape: Any) -> Alias:
    return Alias(str(of), int(offset), str(dtype), tuple(map(int, shape)))


def _check_places(holding: Holding, where: str) -> None:
    sizes = {record.path: record.size for record in holding.manifest.files}
    for tensor in holding.tensors:
        count = -(-tensor.size // BLOCK)
        if tensor.start < 0 or tensor.end > sizes.get(tensor.file, -1) or len(tensor.blocks) != count:
            raise IntegrityError(f"{where}: tensor {tensor.name!r} does not lie in {tensor.file}")
    sizes_of = {tensor.name: tensor.size for tensor in holding.tensors}
    for name, alias in holding.aliases.items():
        if alias.offset < 0 or alias.offset + alias.size > sizes_of.get(alias.of, -1):
            raise IntegrityError(f"{where}: tensor {name!r} does not lie in {alias.of!r}")
