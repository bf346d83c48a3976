"""What a peer offers of a checkpoint on this machine's disk: the snapshot's manifest, or one made of a plain directory."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from mx_cli.base.errors import IntegrityError
from mx_cli.base.oserrors import explain
from mx_cli.engine.run import cores
from mx_cli.engine.together import side_by_side
from mx_cli.flows.context import Context
from mx_cli.flows.hash_anything import snapshot_manifest
from mx_cli.flows.identify import identity_records
from mx_cli.flows.inspect import inspect_file
from mx_cli.flows.request import Request, Wanted
from mx_cli.flows.select import wanted_of
from mx_cli.model import header
from mx_cli.model.digest import FILE_DTYPE, TensorDigest
from mx_cli.model.holding import Holding, start_key
from mx_cli.model.manifest import Entry, FileRecord, Listing, Manifest, selection_digest
from mx_cli.model.selection import RULES_VERSION, index_files


def local_holding(path: Path, context: Context) -> Holding:
    """What a directory, or a single weight file, holds. Of a snapshot in the cache all digests are known; a plain directory is read once, whole.

    Blocks. Raises NotFound, IntegrityError (damage, or a file that is no model's), FilesystemRefused, the stop's reason.
    """
    manifest = snapshot_manifest(context.cache(), str(path), context)
    directory = path if path.is_dir() else path.parent
    return holding_of(manifest or _read_plain(path, directory, context), directory)


def holding_of(manifest: Manifest, directory: Path) -> Holding:
    """A manifest with the places of its tensors, which the files' headers tell. Reads headers only."""
    starts: dict[str, int] = {}
    for path in sorted({row[0] for row in manifest.tensors}):
        starts |= _starts(directory, path, [row[1:3] for row in manifest.tensors if row[0] == path])
    rows = {path: [TensorDigest(*row[1:]) for row in manifest.tensors if row[0] == path] for path in manifest.weights}
    listing = Listing(manifest.uri, manifest.revision, tuple(Entry(r.path, r.size) for r in manifest.files))
    wanted = wanted_of(listing, Request(manifest.uri), lambda path, _: (directory / path).read_bytes())
    data = (directory / "config.json").read_bytes() if manifest.record("config.json") else None
    known, _ = identity_records(manifest.uri, manifest.revision, rows, wanted, data)
    # What was published counts: a selection of today's rules may choose other weights.
    agreed = [one for one in known if one.kind == "config" or manifest.identity.get(one.kind) == one.id]
    texts = {path: (directory / path).read_text("utf-8") for path in index_files([r.path for r in manifest.files])}
    return Holding(manifest, tuple(agreed), starts, texts=texts)


def _starts(directory: Path, path: str, tensors: Sequence[tuple[str, str]]) -> dict[str, int]:
    if any(dtype == FILE_DTYPE for _, dtype in tensors):
        return {start_key(path, name): 0 for name, _ in tensors}
    found = read_header(directory / path)
    places = {tensor.name: tensor.start for tensor in found.tensors}
    missing = [name for name, _ in tensors if name not in places]
    if missing:
        raise IntegrityError(
            f"{directory / path}: its header lacks {missing[0]!r}", hint="mx cache verify finds damage"
        )
    return {start_key(path, name): places[name] for name, _ in tensors}


def read_header(path: Path) -> header.Header:
    """The header of a safetensors file. Two small reads; raises IntegrityError, FilesystemRefused, NotFound."""
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            first = file.read(header.SNIFF_BYTES)
            length = header.header_length(first, size, str(path))
            return header.parse_header(first + file.read(max(0, length - len(first))), size, str(path))
    except OSError as error:
        raise explain(error, f"reading {path}") from None


def _read_plain(path: Path, directory: Path, context: Context) -> Manifest:
    """A manifest of a directory that no cache vouches for: every file is read once."""
    origin = context.origin(str(path))
    try:
        listing = origin.listing(None, context.stop)
        wanted = wanted_of(listing, Request(str(path)), lambda name, _: (directory / name).read_bytes())
    finally:
        origin.close()
    entries = [entry for entry in listing.files if entry.path in wanted.files]
    found = side_by_side(lambda entry: _inspect(directory, entry, wanted, context), entries, cores(), context.stop)
    rows = {record.path: table for record, table in found if table is not None}
    return _manifest_of(listing, wanted, [record for record, _ in found], rows, directory)


def _inspect(
    directory: Path, entry: Entry, wanted: Wanted, context: Context
) -> tuple[FileRecord, Sequence[TensorDigest] | None]:
    path = directory / entry.path
    verdict = inspect_file(path, entry, is_weight=entry.path in wanted.weights, stop=context.stop)
    if verdict.warning:
        context.warn(verdict.warning)
    return FileRecord(entry.path, entry.size or 0, verdict.xxh3, entry.validator, verdict.digests), verdict.rows


def _manifest_of(
    listing: Listing,
    wanted: Wanted,
    records: Sequence[FileRecord],
    rows: Mapping[str, Sequence[TensorDigest]],
    directory: Path,
) -> Manifest:
    data = (directory / "config.json").read_bytes() if "config.json" in wanted.files else None
    known, _ = identity_records(listing.uri, listing.revision, rows, wanted, data)
    return Manifest(
        uri=listing.uri,
        revision=listing.revision,
        selection=selection_digest(wanted.files),
        rules=RULES_VERSION,
        directory="",
        files=tuple(records),
        weights=tuple(sorted(wanted.weights)),
        tensors=tuple((path, *row) for path in sorted(rows) for row in rows[path]),
        identity={one.kind: one.id for one in known if one.kind != "config"},
        listing=tuple((entry.path, entry.size) for entry in listing.files),
    )
