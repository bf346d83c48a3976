"""What a checkpoint holds, from its listing and the headers of its files: no weights are read."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from mx_cli.base.collector import resting
from mx_cli.base.errors import IntegrityError, UsageError
from mx_cli.engine.many import Bell, Member
from mx_cli.engine.ports import NoRanges, ReadItem
from mx_cli.engine.retry import patiently
from mx_cli.engine.threads import Lifted
from mx_cli.engine.together import side_by_side
from mx_cli.flows.context import Context, is_immutable
from mx_cli.flows.cuts import config_of
from mx_cli.flows.hash import is_local
from mx_cli.flows.hash_anything import snapshot_manifest
from mx_cli.flows.holdings import placed
from mx_cli.flows.identify import content_table
from mx_cli.flows.local_files import LocalFiles, refuse_caches
from mx_cli.flows.parts import named_by_part, with_prefixes
from mx_cli.flows.pull_memory import disk_member, locked, no_weights
from mx_cli.flows.resolve import listing_anew
from mx_cli.flows.select import READ_LIMIT, usual_of
from mx_cli.model import identity
from mx_cli.model.digest import FILE_DTYPE
from mx_cli.model.holding import HOST, Holding
from mx_cli.model.manifest import Entry, FileRecord, Listing, Manifest, selection_digest
from mx_cli.model.selection import RULES_VERSION, index_files
from mx_cli.model.tables import Table, read_header, rows_of, starts_of, table_of_header
from mx_cli.sources.registry import OpenOrigin

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
                return _of_snapshot(manifest, directory), origin
            if path.is_dir():
                refuse_caches(path, "give")
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


@resting()
def catalog_of(listing: Listing, origin: OpenOrigin, directory: Path | None, context: Context) -> Catalog:
    """The catalog of a listing, from the headers of its files. Blocks; raises as `catalog` does."""
    entries = {entry.path: entry for entry in listing.files}
    wanted = usual_of(listing, origin)
    weights = sorted(wanted.prefixes)
    if not weights:
        raise no_weights(listing.uri)
    if other := [path for path in weights if not path.endswith(".safetensors")]:
        raise _no_tensors(other[0])
    read = side_by_side(lambda path: _table(entries[path], origin, context), weights, HEADERS_AT_ONCE, context.stop)
    tables = dict(zip(weights, read, strict=True))
    content_table({path: table.rows for path, table in tables.items()}, wanted)
    beside = tuple(sorted(wanted.files - wanted.weights - {index.name for index in wanted.indexes}))
    return Catalog(with_prefixes(_holding(listing, entries, tables), wanted.prefixes), entries, directory, beside)


@resting()
def _of_snapshot(manifest: Manifest, directory: Path) -> Catalog:
    if not manifest.weights:
        raise no_weights(manifest.uri)
    if other := sorted({file for file, _, dtype, _, _ in manifest.tensors if dtype == FILE_DTYPE}):
        raise _no_tensors(other[0])
    holding = placed(manifest, LocalFiles(directory))
    if "origin" in manifest.identity:
        holding = dataclasses.replace(holding, identities=(identity.of_origin(manifest.uri, manifest.revision),))
    return Catalog(named_by_part(holding), {}, directory, tuple(beside(manifest)))


def _no_tensors(path: str) -> UsageError:
    return UsageError(
        f"{path} is not safetensors: its tensors cannot be read one by one", hint="mx prefetch brings the files"
    )


def _table(entry: Entry, origin: OpenOrigin, context: Context) -> Table:
    if entry.size is None:
        raise UsageError(f"{entry.path}: the origin does not say how large it is, so no piece of it can be read")

    def piece(offset: int, length: int) -> bytes:
        return _bytes(entry, offset, length, origin, context)

    return table_of_header(read_header(piece, entry.size, entry.path))


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


def _holding(listing: Listing, entries: Mapping[str, Entry], tables: Mapping[str, Table]) -> Holding:
    manifest = Manifest(
        uri=listing.uri,
        revision=listing.revision,
        selection=selection_digest(tables),
        rules=RULES_VERSION,
        directory="",
        files=tuple(FileRecord(path, entries[path].size or 0, "") for path in tables),
        weights=tuple(tables),
        tensors=rows_of(tables),
    )
    known = (identity.of_origin(listing.uri, listing.revision),) if listing.revision else ()
    return Holding(manifest, known, starts_of(tables))


def found_config(found: Catalog, origin: OpenOrigin) -> Mapping[str, Any] | None:
    """The checkpoint's config.json, None where there is none. A small read."""
    if found.directory is not None:
        there = (found.directory / CONFIG).is_file()
        return config_of(LocalFiles(found.directory).read(CONFIG) if there else None)
    entry = found.entries.get(CONFIG)
    return config_of(origin.read(entry, CONFIG_LIMIT) if entry else None)


def member(found: Catalog, origin: OpenOrigin, bell: Bell, context: Context, device: int = HOST) -> Member:
    """The source of a catalog's bytes: this machine's disk, or the origin. `device`: the GPU that they are for."""
    if found.directory is not None:
        return disk_member(found.directory, found.holding, bell, context, found.entries or None, device)
    made = locked(device, context) if device != HOST else None
    return Member("origin", Lifted(origin, context.settings.max_bandwidth, bell.ring, made), reserve=True)


def files_beside(found: Catalog, origin: OpenOrigin) -> dict[str, Callable[[], bytes]]:
    """What reads each file that is wanted beside the weights (configuration, tokenizer), by path. Small reads; they block."""
    if found.directory is not None:
        files = LocalFiles(found.directory)
        return {path: functools.partial(files.read, path) for path in found.beside}
    return {path: functools.partial(origin.read, found.entries[path], READ_LIMIT) for path in found.beside}


def beside(manifest: Manifest) -> list[str]:
    """The files beside the weights: configuration, tokenizer. What lists the weights' files says nothing of a part."""
    indexes = set(index_files([record.path for record in manifest.files]))
    return [record.path for record in manifest.files if record.path not in {*manifest.weights, *indexes}]
