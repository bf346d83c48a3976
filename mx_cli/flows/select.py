"""From a listing and what was asked for to the files that are wanted."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

from mx_cli.base import units
from mx_cli.base.errors import NotFound
from mx_cli.flows.request import Request, Wanted
from mx_cli.model.manifest import Entry, Listing
from mx_cli.model.selection import Selection, check_paths, index_files, read_index, select

Read = Callable[[str, Listing], bytes]
SHOWN = 3
READ_LIMIT = 64 << 20
"""Bytes of a small file that decides what is wanted, at most."""


class Small(Protocol):
    """What reads small files whole."""

    def read(self, entry: Entry, limit: int) -> bytes:
        """Blocks; raises what reading raises, IntegrityError above `limit` bytes."""


def usual_of(listing: Listing, origin: Small) -> Wanted:
    """The one usable set of files of a listing of `origin`, which gives the shard indexes. Raises as `wanted_of` does."""
    entries = {entry.path: entry for entry in listing.files}
    return wanted_of(listing, Request(listing.uri), lambda path, _: origin.read(entries[path], READ_LIMIT))


def wanted_of(listing: Listing, request: Request, read: Read) -> Wanted:
    """Resolve the selection; `read(path, listing)` gives a small file (the shard indexes are needed to choose).

    Raises IntegrityError for hostile names and incomplete indexes, NotFound when nothing is selected, and the origin's refusal
    of a file that is.
    """
    paths = [entry.path for entry in listing.files]
    check_paths(paths)
    indexes = {}
    for path in index_files(paths, include=request.include, exclude=request.exclude):
        _refuse(listing, [path])
        try:
            indexes[path] = read_index(path, read(path, listing))
        except NotFound:
            # Chosen by pattern, the files do not depend on an index that was not chosen with them.
            if not request.include:
                raise
    selection = select(
        [(entry.path, entry.size or 0) for entry in listing.files],
        indexes,
        include=request.include,
        exclude=request.exclude,
        everything=request.everything,
    )
    _refuse(listing, selection.files)
    return Wanted(frozenset(selection.files), dict(selection.weights), selection.indexes, _skipped(selection))


def _refuse(listing: Listing, paths: Iterable[str]) -> None:
    """Raise for the first of the files that the origin cannot give."""
    refusals = {entry.path: entry.refusal for entry in listing.files if entry.refusal}
    for path in paths if refusals else ():
        if refusal := refusals.get(path):
            raise refusal


def amount(listing: Listing, wanted: Wanted) -> str:
    """How much is wanted, in words."""
    sizes = [entry.size for entry in listing.files if entry.path in wanted.files]
    unknown = " and what has no known size" if None in sizes else ""
    return f"{units.count(len(sizes), 'file')}, {units.size(sum(size or 0 for size in sizes))}{unknown}"


def _skipped(selection: Selection) -> str:
    if not selection.left_out:
        return ""
    shown = ", ".join(f"{path} ({reason})" for path, _, reason in selection.left_out[:SHOWN])
    more = len(selection.left_out) - SHOWN
    return (
        f"left out {units.count(len(selection.left_out), 'file')}, {units.size(selection.bytes_saved)} saved: {shown}"
        + (f", and {more} more" if more > 0 else "")
        + " (--all takes everything)"
    )
