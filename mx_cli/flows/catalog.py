"""What a checkpoint holds, from its listing and the headers of its files: no weights are read."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from mx_cli.base.errors import IntegrityError, UsageError
from mx_cli.base.oserrors import explain
from mx_cli.engine.many import Bell, Member
from mx_cli.engine.ports import NoRanges, ReadItem
from mx_cli.engine.retry import patiently
from mx_cli.engine.threads import Lifted
from mx_cli.engine.together import side_by_side
from mx_cli.flows.context import Context, is_immutable
from mx_cli.flows.cuts import config_of
from mx_cli.flows.hash import is_local
from mx_cli.flows.hash_anything import snapshot_manifest
from mx_cli.flows.holdings import holding_of
from mx_cli.flows.parts import named_by_part
from mx_cli.flows.pull_memory import disk_member, locked, no_weights
from mx_cli.flows.request import Wanted
from mx_cli.flows.resolve import listing_anew
from mx_cli.flows.select import READ_LIMIT, usual_of
from mx_cli.model import header, identity
from mx_cli.model.header import Header
from mx_cli.model.holding import HOST, Holding, start_key
from mx_cli.model.manifest import Entry, FileRecord, Listing, Manifest, selection_digest
from mx_cli.model.selection import RULES_VERSION
from mx_cli.model.shard_index import check_homes
from mx_cli.sources.registry import OpenOrigin

FIRST_READ = 256 << 10
"""Bytes of a file's beginning that are asked for at once: most headers are smaller."""
HEADERS_AT_ONCE = 16
CONFIG = "config.json"
CONFIG_LIMIT = 16 << 20

T = TypeVar("T")


@dataclass(frozen=True)
class Catalog:
    """A checkpoint's tensors and their places. `directory`: where its files lie on this machine, None for a store.

    `entries`: the files as their origin lists them, by path, to read from. `beside`: the wanted files that hold no weights.
    """

    holding: Holding
    entries: dict[str, Entry]
    directory: Path | None
    beside: tuple[str, ...] = ()


def catalog(model: str, revision: str | None, context: Context) -> tuple[Catalog, OpenOrigin]:
    """The catalog of a directory, a file or a URI, and its origin, for the caller to close. Blocks.

    For a snapshot of the cache the digests of its tensors are known, for others they are not. Raises what listing raises,
    IntegrityError for headers and indexes that do not agree, UsageError for weights that are not safetensors.
    """
    origin = context.origin(model)
    try:
        if is_local(model):
            path = Path(model).expanduser().absolute()
            directory = path if path.is_dir() else path.parent
            manifest = snapshot_manifest(context.cache(), str(path), context)
            if manifest is not None:
                return Catalog(named_by_part(_only_tensors(holding_of(manifest, directory))), {}, directory), origin
        else:
            directory = None
        listing = origin.listing(revision or origin.revision or None, context.stop)
        return catalog_of(listing, origin, directory, context), origin
    except BaseException:
        origin.close()
        raise


def with_catalog(model: str, revision: str | None, context: Context, work: Callable[[Catalog, OpenOrigin], T]) -> T:
    """What `work` makes of the catalog and its origin; of a new one, when the origin changes meanwhile. See `catalog`."""
    opened: list[OpenOrigin] = []

    def once() -> T:
        found, origin = catalog(model, revision, context)
        opened.append(origin)
        try:
            return work(found, origin)
        finally:
            origin.close()

    def pinned() -> bool:
        return not opened or is_immutable(opened[-1].uri, revision or opened[-1].revision or "")

    return listing_anew(once, pinned, context.warn)


def catalog_of(listing: Listing, origin: OpenOrigin, directory: Path | None, context: Context) -> Catalog:
    """The catalog of a listing, from the headers of its files. Blocks; raises as `catalog` does."""
    entries = {entry.path: entry for entry in listing.files}
    wanted = usual_of(listing, origin)
    weights = sorted(wanted.prefixes)
    if not weights:
        raise no_weights(listing.uri)
    if other := [path for path in weights if not path.endswith(".safetensors")]:
        raise UsageError(
            f"{other[0]} is not safetensors: its tensors cannot be read one by one", hint="mx prefetch brings the files"
        )
    read = side_by_side(lambda path: _header(entries[path], origin, context), weights, HEADERS_AT_ONCE, context.stop)
    headers = dict(zip(weights, read, strict=True))
    for index in wanted.indexes:
        check_homes(index, [(shard, [t.name for t in headers[shard].tensors]) for shard in index.shards])
    beside = tuple(sorted(wanted.files - wanted.weights - {index.name for index in wanted.indexes}))
    return Catalog(_holding(listing, wanted, headers), entries, directory, beside)


def _header(entry: Entry, origin: OpenOrigin, context: Context) -> Header:
    if entry.size is None:
        raise UsageError(f"{entry.path}: the origin does not say how large it is, so no piece of it can be read")
    first = _bytes(entry, 0, min(entry.size, FIRST_READ), origin, context)
    needed = header.header_length(first, entry.size, entry.path)
    if needed > len(first):
        first += _bytes(entry, len(first), needed - len(first), origin, context)
    return header.parse_header(first, entry.size, entry.path)


def _bytes(entry: Entry, offset: int, length: int, origin: OpenOrigin, context: Context) -> bytes:
    """A small piece near the beginning of a file, retried by the engine's policy."""

    def read(item: ReadItem) -> bytes:
        stream = origin.open(item)
        try:
            data = bytearray(offset + length - item.offset)
            view, filled = memoryview(data), 0
            while filled < len(data) and (count := stream.read_into(view[filled:])):
                filled += count
            if filled < len(data):
                raise IntegrityError(f"{entry.path}: ended {len(data) - filled} bytes early")
            return bytes(data[-length:])
        finally:
            stream.close()

    def once() -> bytes:
        try:
            return read(ReadItem(entry, offset, length))
        except NoRanges:
            return read(ReadItem(entry, 0, entry.size, whole=True))

    gate = context.gates[origin.caps.host]
    return patiently(entry.path, once, gate, context.stop, context.settings.retry_for, context.on_retry)


def _holding(listing: Listing, wanted: Wanted, headers: dict[str, Header]) -> Holding:
    rows: list[tuple[str, str, str, tuple[int, ...], tuple[str, ...]]] = []
    starts: dict[str, int] = {}
    homes: dict[str, str] = {}
    for path, found in headers.items():
        for tensor in found.tensors:
            name = wanted.prefixes[path] + tensor.name
            if name in homes:
                raise IntegrityError(f"tensor {name!r} stands in two files ({homes[name]}, {path})")
            homes[name] = path
            rows.append((path, name, tensor.dtype, tensor.shape, ()))
            starts[start_key(path, name)] = tensor.start
    manifest = Manifest(
        uri=listing.uri,
        revision=listing.revision,
        selection=selection_digest(headers),
        rules=RULES_VERSION,
        directory="",
        files=tuple(FileRecord(path, found.file_size, "") for path, found in headers.items()),
        weights=tuple(headers),
        tensors=tuple(rows),
    )
    known = (identity.of_origin(listing.uri, listing.revision),) if listing.revision else ()
    return Holding(manifest, known, starts)


def _only_tensors(holding: Holding) -> Holding:
    if not holding.manifest.weights:
        raise no_weights(holding.manifest.uri)
    others = sorted({tensor.file for tensor in holding.tensors if tensor.dtype == "file"})
    if others:
        raise UsageError(f"{others[0]} is not safetensors: its tensors cannot be read one by one")
    return holding


def found_config(found: Catalog, origin: OpenOrigin) -> Mapping[str, Any] | None:
    """The checkpoint's config.json, None where there is none. A small read."""
    if found.directory is not None:
        return local_config(found.directory)
    entry = found.entries.get(CONFIG)
    return config_of(origin.read(entry, CONFIG_LIMIT) if entry else None)


def local_config(directory: Path) -> Mapping[str, Any] | None:
    """The config.json of a directory, None where there is none. A small read."""
    path = directory / CONFIG
    return config_of(_content(path) if path.is_file() else None)


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise explain(error, f"reading {path}") from None


def member(found: Catalog, origin: OpenOrigin, bell: Bell, context: Context, device: int = HOST) -> Member:
    """The source of a catalog's bytes: this machine's disk, or the origin. `device`: the GPU that they are for."""
    if found.directory is not None:
        return disk_member(found.directory, found.holding, bell, context, found.entries or None, device)
    made = locked(device, context) if device != HOST else None
    return Member("origin", Lifted(origin, context.settings.max_bandwidth, bell.ring, made), reserve=True)


def files_beside(found: Catalog, origin: OpenOrigin) -> dict[str, Callable[[], bytes]]:
    """What reads each file that is wanted beside the weights (configuration, tokenizer), by path. Small reads; they block."""
    if found.directory is not None:
        place = found.directory
        return {path: functools.partial(_content, place / path) for path in found.beside if (place / path).is_file()}
    return {path: functools.partial(origin.read, found.entries[path], READ_LIMIT) for path in found.beside}
