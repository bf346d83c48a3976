"""The tensor tables of a checkpoint's weight files, however they were read: with places, and held against the shard indexes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from mx_cli.base.errors import IntegrityError
from mx_cli.model.digest import FILE_DTYPE, TensorDigest
from mx_cli.model.header import Header, header_length, parse_header
from mx_cli.model.holding import start_key
from mx_cli.model.manifest import Manifest
from mx_cli.model.shard_index import Index, check_homes

FIRST_READ = 256 << 10
"""Bytes of a file's beginning that are read at once: most headers are smaller."""


def read_header(piece: Callable[[int, int], bytes], file_size: int, name: str) -> Header:
    """Like parse_header, of a file that `piece(offset, length)` reads: it is asked once or twice, for what is there."""
    first = piece(0, min(file_size, FIRST_READ))
    missing = header_length(first, file_size, name) - len(first)
    return parse_header(first + piece(len(first), missing) if missing > 0 else first, file_size, name)


class Table(NamedTuple):
    """Of one weight file, in the order of its bytes. `starts`: the first byte of each tensor in the file."""

    rows: Sequence[TensorDigest]
    starts: Sequence[int]


def table_of_header(header: Header) -> Table:
    """Without digests."""
    rows = [TensorDigest(name, dtype, shape, ()) for name, dtype, shape, _, _ in header.tensors]
    return Table(rows, [tensor.start for tensor in header.tensors])


def locate(rows: Sequence[TensorDigest], header: Header) -> Table:
    """Rows that are known, at the places that the file's header tells. Raises IntegrityError when it lacks one."""
    places = {tensor.name: tensor.start for tensor in header.tensors}
    missing = [row.name for row in rows if row.name not in places]
    if missing:
        raise IntegrityError(f"its header lacks {missing[0]!r}")
    return Table(rows, [places[row.name] for row in rows])


def rows_of(tables: Mapping[str, Table]) -> tuple[tuple[str, str, str, tuple[int, ...], tuple[str, ...]], ...]:
    """The rows of files as a manifest has them."""
    return tuple((path, *row) for path in sorted(tables) for row in tables[path].rows)


def starts_of(tables: Mapping[str, Table]) -> dict[str, int]:
    """The places of all tensors as a holding has them."""
    return {
        start_key(path, row.name): start
        for path, table in tables.items()
        for row, start in zip(table.rows, table.starts, strict=True)
    }


def rows_in(manifest: Manifest, path: str, name: str) -> list[TensorDigest] | None:
    """The rows of a manifest's file, for a file called `name` with the same bytes; None where it has none."""
    rows = [TensorDigest._make(row) for row in manifest.tables.get(path, ())]
    if not rows and "content" not in manifest.identity:
        return None
    return [row._replace(name=name) if row.dtype == FILE_DTYPE else row for row in rows]


def whole_table(
    rows: Mapping[str, Sequence[TensorDigest]], prefixes: Mapping[str, str], indexes: Iterable[Index] = ()
) -> tuple[TensorDigest, ...]:
    """The name-sorted table of a checkpoint of the weight files `prefixes`, each with its rows.

    The prefix (`unet/`, else empty) keeps the parts of a pipeline apart. Raises IntegrityError for a tensor that is not in
    the shard that its index names, and for a name that stands in two files: nobody could say which of the two is meant.
    """
    for index in indexes:
        # The row of a whole file names no tensors.
        tables = ((shard, rows[shard]) for shard in index.shards if shard in rows)
        check_homes(
            index, [(shard, [r.name for r in t]) for shard, t in tables if not any(r.dtype == FILE_DTYPE for r in t)]
        )
    table: dict[str, TensorDigest] = {}
    homes: dict[str, str] = {}
    twice: list[str] = []
    for path, prefix in sorted(prefixes.items()):
        for row in rows[path]:
            name = row.name
            # The row of a whole file has the file's path already.
            if prefix and row.dtype != FILE_DTYPE:
                name = prefix + name
                row = row._replace(name=name)
            if name in table:
                twice.append(f"{name!r} in {homes[name]} and {path}")
            table[name] = row
            homes[name] = path
    if twice:
        shown = "; ".join(twice[:3]) + (f"; and {len(twice) - 3} more" if len(twice) > 3 else "")
        raise IntegrityError(
            f"tensors that stand in two files ({shown})", hint="keep one set of weights: --include, --exclude"
        )
    return tuple(table[name] for name in sorted(table))
