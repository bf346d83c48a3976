"""What a peer offers of a checkpoint on this machine's disk: the snapshot's manifest, or one made of a plain directory."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from mx_cli.base.errors import IntegrityError
from mx_cli.engine.run import cores
from mx_cli.engine.together import side_by_side
from mx_cli.flows.context import Context
from mx_cli.flows.hash_anything import known_rows, snapshot_manifest
from mx_cli.flows.identify import content_table, records, records_of
from mx_cli.flows.inspect import Verdict, inspect_file
from mx_cli.flows.local_files import LocalFiles, refuse_caches
from mx_cli.flows.request import Request, Wanted
from mx_cli.flows.select import usual_of, wanted_of
from mx_cli.model.digest import FILE_DTYPE, TensorDigest
from mx_cli.model.holding import Holding
from mx_cli.model.identity import Identity
from mx_cli.model.manifest import Entry, FileRecord, Listing, Manifest, selection_digest
from mx_cli.model.selection import RULES_VERSION, index_files
from mx_cli.model.tables import Table, locate, rows_of, starts_of

CONFIG = "config.json"


def local_holding(path: Path, context: Context) -> Holding:
    """What a directory, or a single weight file, holds. Of a snapshot in the cache all digests are known; a plain directory is read once, whole.

    Blocks. Raises NotFound, IntegrityError (damage, a file that is no model's, an index of other shards), UsageError for a
    cache's root, FilesystemRefused, the stop's reason.
    """
    files = LocalFiles(path if path.is_dir() else path.parent)
    manifest = snapshot_manifest(context.cache(), str(path), context)
    if manifest is None:
        return _read_plain(path, files, context)
    return dataclasses.replace(placed(manifest, files), identities=_published(manifest, files))


def placed(manifest: Manifest, files: LocalFiles) -> Holding:
    """A manifest with the places of its tensors, which the files' headers tell; without identities. Reads headers and indexes."""
    tables = {
        path: _located(path, [TensorDigest._make(row) for row in rows], files) for path, rows in manifest.tables.items()
    }
    return Holding(manifest, (), starts_of(tables), texts=_texts(manifest, files))


def _located(path: str, rows: Sequence[TensorDigest], files: LocalFiles) -> Table:
    if any(row.dtype == FILE_DTYPE for row in rows):
        return Table(rows, [0] * len(rows))
    try:
        return locate(rows, files.header(path))
    except IntegrityError as error:
        raise IntegrityError(f"{files.folder / path}: {error.what}", hint="mx cache verify finds damage") from None


def _published(manifest: Manifest, files: LocalFiles) -> tuple[Identity, ...]:
    """What was published counts: a selection of today's rules may choose other weights."""
    listing = Listing(manifest.uri, manifest.revision, tuple(Entry(r.path, r.size) for r in manifest.files))
    wanted = wanted_of(listing, Request(manifest.uri), lambda path, _: files.read(path))
    config = files.read(CONFIG) if manifest.record(CONFIG) else None
    known, _ = records(manifest.uri, manifest.revision, known_rows(manifest), wanted, config)
    return tuple(one for one in known if one.kind == "config" or manifest.identity.get(one.kind) == one.id)


def _read_plain(path: Path, files: LocalFiles, context: Context) -> Holding:
    """Of a directory that no cache vouches for: every file is read once."""
    if path.is_dir():
        refuse_caches(path, "mx serve")
    origin = context.origin(str(path))
    try:
        listing = origin.listing(None, context.stop)
        wanted = usual_of(listing, origin)
    finally:
        origin.close()
    entries = [entry for entry in listing.files if entry.path in wanted.files]
    found = side_by_side(lambda entry: _inspect(files, entry, wanted, context), entries, cores(), context.stop)
    verdicts = dict(zip(entries, found, strict=True))
    tables = {entry.path: Table(v.rows, v.starts) for entry, v in verdicts.items() if v.rows is not None}
    whole = content_table({path: table.rows for path, table in tables.items()}, wanted)
    config = files.read(CONFIG) if CONFIG in wanted.files else None
    known, lacking = records_of(listing.uri, listing.revision, whole, config)
    if wanted.prefixes and lacking:
        context.warn(f"no content identity: {lacking}")
    manifest = Manifest(
        uri=listing.uri,
        revision=listing.revision,
        selection=selection_digest(wanted.files),
        rules=RULES_VERSION,
        directory="",
        files=tuple(FileRecord(e.path, e.size or 0, v.xxh3, e.validator, v.digests) for e, v in verdicts.items()),
        weights=tuple(sorted(wanted.weights)),
        tensors=rows_of(tables),
        identity={one.kind: one.id for one in known if one.kind != "config"},
        listing=tuple((entry.path, entry.size) for entry in listing.files),
    )
    return Holding(manifest, tuple(known), starts_of(tables), texts=_texts(manifest, files))


def _inspect(files: LocalFiles, entry: Entry, wanted: Wanted, context: Context) -> Verdict:
    verdict = inspect_file(files.folder / entry.path, entry, is_weight=entry.path in wanted.weights, stop=context.stop)
    if verdict.warning:
        context.warn(verdict.warning)
    return verdict


def _texts(manifest: Manifest, files: LocalFiles) -> dict[str, str]:
    return {path: files.read(path).decode() for path in index_files([record.path for record in manifest.files])}
