"""The ports: what the engine asks of a source and of a sink, and what it tells them. Knows no HTTP, no files, no GPUs.

Two kinds of source exist. One that can have many reads in flight by itself implements `Source`. One that blocks
implements `Reader`, and `threads.Lifted` makes a Source of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from mx_cli.base.cancel import Stop
from mx_cli.base.errors import MxError
from mx_cli.model.holding import HOST
from mx_cli.model.manifest import Entry, Listing
from mx_cli.model.record import Record, Sighting
from mx_cli.plan.ranges import Span


@dataclass(frozen=True, slots=True)
class ReadItem:
    """A contiguous piece of one file: `length` bytes from `offset`; None = to the end, whose place is not known.

    `whole` asks for the file from its beginning in one piece, for an origin that does not serve ranges.
    """

    entry: Entry
    offset: int
    length: int | None
    whole: bool = False

    @property
    def end(self) -> int | None:
        return None if self.length is None else self.offset + self.length

    def __hash__(self) -> int:
        # Looked up a dozen times on its way: an entry's own hash is over all of its fields.
        return hash((self.entry.path, self.offset, self.length))


@dataclass(frozen=True, slots=True)
class Host:
    """Destination in host memory: the view is exactly as long as the item."""

    view: memoryview


@dataclass(frozen=True, slots=True)
class File:
    """Destination in a file: byte 0 of the item goes to `offset` of `fd`.

    `seen(offset, view)`, where there is one, is shown the bytes while they are in the cache of the core that placed them.
    """

    fd: int
    offset: int
    seen: Callable[[int, memoryview], None] | None = None


@dataclass(frozen=True, slots=True)
class Memory:
    """Destination in runs of memory: `parts` are (byte of the item, length, address), in order and disjoint.

    Bytes of the item outside of the parts are not wanted. `device` is HOST or a GPU's number; `put(address, view)`
    copies host bytes to a GPU's memory and is there only for one.
    """

    parts: tuple[tuple[int, int, int], ...]
    device: int = HOST
    put: Callable[[int, memoryview], None] | None = None


@dataclass(frozen=True, slots=True)
class Through:
    """Destination by way of a buffer: `place(offset, view)` copies what is wanted of the item's bytes from `offset`.

    The threads that read call it, for several items at once. It must not keep the view.
    """

    place: Callable[[int, memoryview], None]


Dest = Host | File | Memory | Through


@dataclass(frozen=True, slots=True)
class Block:
    """`length` bytes at `offset` of the item's file are in place; `digest` is their xxh3-128, taken before they left the cache."""

    offset: int
    length: int
    digest: bytes


@dataclass(frozen=True, slots=True)
class Done:
    """News of an item: blocks that are in place since the last news; `finished` = nothing more will come.

    A finished item with `error` has `received` bytes in place, counted from its offset, all of them in reported blocks.
    """

    item: ReadItem
    blocks: tuple[Block, ...] = ()
    finished: bool = False
    error: MxError | NoRanges | None = None
    received: int = 0


@dataclass(frozen=True, slots=True)
class SourceCaps:
    """`max_in_flight`: items at once. `item_size`: bytes it likes per item. `host`: what shares a rate limit.

    `blocks(path)`: the spans of a file that the source has digests of; an item that splits none is verified by itself.
    """

    max_in_flight: int
    item_size: int
    host: str
    blocks: Callable[[str], Sequence[Span]] | None = None


class Source(Protocol):
    """Reads items into destinations."""

    @property
    def caps(self) -> SourceCaps: ...

    def widen(self, width: int) -> None:
        """Serve up to `width` items at once from now on; more may be started and wait for their turn."""

    def start(self, item: ReadItem, dest: Dest) -> None:
        """Begin to read; does not block. Several items may be in flight; idempotent per item."""

    def poll(self, timeout: float) -> list[Done]:
        """News since the last call; waits for at most `timeout` seconds when there is none."""

    def moved(self, item: ReadItem) -> int | None:
        """Bytes of an item that arrived so far, also those not yet reported; None while it waits for its turn."""

    def abort(self, item: ReadItem) -> None:
        """Give the item up: its last Done comes soon, with an error; after that nothing more lands in the destination."""

    def close(self) -> None:
        """Abort all and release everything. Idempotent."""


class Stream(Protocol):
    """The bytes of one piece of a file, in order."""

    def read_into(self, view: memoryview) -> int:
        """Fill the view as far as is convenient and return how much (0 = end of the piece). Blocks; raises MxError."""

    def close(self) -> None:
        """Give the stream up; wakes a thread that is blocked in `read_into`. Any thread may call it, more than once."""


class Reader(Protocol):
    """A source that blocks: opens one piece of one file at a time, in as many threads as are used."""

    @property
    def caps(self) -> SourceCaps: ...

    def open(self, item: ReadItem) -> Stream:
        """Start reading. Blocks until the origin answers and has proved that the answer is the piece that was asked for.

        Raises NoRanges when the origin cannot serve this piece but could serve the whole file, OriginChanged when the
        object is not the pinned one, Unreachable when trying again may help, another MxError when it will not.
        """

    def close(self) -> None:
        """Close idle connections. Idempotent."""


class Origin(Reader, Protocol):
    """Where checkpoints come from: lists, and reads."""

    def listing(self, revision: str | None, stop: Stop) -> Listing:
        """Everything under the URI at one revision. Asks the origin afresh at each call; blocks.

        Raises NotFound (no such thing, or nothing in it, or not at that revision), AccessDenied, Unreachable.
        """


class Directory(Protocol):
    """Where peers find one another. What it says is a hint: records may be stale, and new ones may not be seen yet.

    Safe to use from several threads. One that only lists (static, dns) accepts what is published and forgets it; its
    records have an address and nothing else.
    """

    def publish(self, record: Record) -> None:
        """Make a peer findable. Replaces an older record of the same name if that was this host's own or is dead.

        Blocks; idempotent. Raises UsageError when the name belongs to another peer that lives, FilesystemRefused,
        NoSpace or Unreachable when the directory cannot be written.
        """

    def beat(self, record: Record) -> None:
        """Show that the peer lives, and its present state; publishes again what was lost. Blocks; idempotent.

        Raises what `publish` raises; here only the same generation and the dead give way.
        """

    def sightings(self, stop: Stop) -> list[Sighting]:
        """All that is known, in no order, also the stale. Blocks for a bounded time. May remove what is long dead.

        Nobody there is an empty list, and so is a name that does not resolve. Raises FilesystemRefused or Unreachable
        when the directory cannot be read, and the reason of `stop`.
        """

    def records(self, stop: Stop) -> list[Record]:
        """Those of `sightings` that are not stale: who missed three beats in a row is not among them."""

    def reason(self) -> str:
        """Why the last look found nobody, and what it left out; empty when it found somebody and all was well."""

    def remove(self, record: Record) -> None:
        """The peer leaves. Removes only its own generation's record. Idempotent."""

    def __str__(self) -> str:
        """As in the setting `discovery`."""


class NoRanges(Exception):
    """The origin answers requests for a piece of this file with something else; the whole file is to be had."""


class Sink(Protocol):
    """Takes the bytes."""

    def has_room(self, item: ReadItem) -> bool:
        """Whether `acquire` may be called now: what is read must not run far ahead of what is verified.

        Does not block: only the engine can end the files that were begun, and for those there is always room.
        """

    def acquire(self, item: ReadItem) -> Dest:
        """Where the item's bytes go; call it where there is room. Raises NoSpace, FilesystemRefused."""

    def commit(self, item: ReadItem, block: Block) -> None:
        """The block is in place. Does not wait for the disk."""

    def reset(self, entry: Entry) -> None:
        """Forget what was committed of this file: it is read again from its beginning."""

    def end(self, entry: Entry, size: int) -> None:
        """All bytes of a file are in place; for files of unknown size this tells it."""

    def raise_failure(self) -> None:
        """Raise what went wrong behind the scenes (verification runs beside the transfer), if anything did."""


OnRetry = Callable[[str, MxError, float, int], None]
