"""The bytes of an item beside the digests that its peer published, block by block, while they land."""

from __future__ import annotations

import bisect
from collections.abc import Sequence

import xxhash

from mx_cli.base.errors import IntegrityError
from mx_cli.engine.buffers import at_address
from mx_cli.engine.ports import Memory, ReadItem
from mx_cli.model.checks import Check
from mx_cli.model.holding import Holding

LEAST_PIECE = 1 << 20
"""Bytes of a block that is not whole yet from which its digest goes on: small blocks are waited for."""


class Verification:
    """Compares every block that lies whole in a part of an item, in host memory, with its digest. For one thread.

    `name`: the peer's, for the error.
    """

    def __init__(self, name: str, holding: Holding, item: ReadItem, memory: Memory) -> None:
        self._name, self._holding, self._path = name, holding, item.entry.path
        base = min((address for _, _, address in memory.parts), default=0)
        top = max((address + length for _, length, address in memory.parts), default=0)
        # Only what has a check is touched: a view of each part would cost more than the digest of a small block.
        self._whole = at_address(base, top - base)
        self._checks: list[Check] = []
        # Of each check: where it begins and ends in the view, and how many bytes of the parts have landed when it has.
        self._begins: list[int] = []
        self._ends: list[int] = []
        self._stops: list[int] = []
        before = 0
        for offset, length, address in memory.parts:
            start = item.offset + offset
            checks = holding.packed_within(self._path, start, start + length)
            self._cover(checks, address - base - start, before - start)
            before += length
        self._next = 0
        self._digest = xxhash.xxh3_128()
        self._digested = 0

    def _cover(self, checks: Sequence[Check], to_view: int, to_count: int) -> None:
        """Take up checks of one part; the shifts lead from offsets in the file."""
        ends = [check[0] + check[1] for check in checks]
        self._checks += checks
        self._begins += [check[0] + to_view for check in checks]
        self._ends += [end + to_view for end in ends]
        self._stops += [end + to_count for end in ends]

    def landed(self, count: int) -> None:
        """The first `count` bytes of the parts are in place, more than the last time. Raises IntegrityError.

        What is said in steps of a core's cache is read once from memory, not twice.
        """
        first, end = self._next, bisect.bisect_right(self._stops, count, self._next)
        if self._digested and first < end:
            self._go_on(first, self._ends[first])
            self._compare(first, self._digest.hexdigest())
            self._digest.reset()
            self._digested = 0
            first += 1
        # Maps instead of a loop: of small tensors there are tens of thousands.
        pieces = map(self._whole.__getitem__, map(slice, self._begins[first:end], self._ends[first:end]))
        for index, found in enumerate(map(xxhash.xxh3_128_hexdigest, pieces), first):
            if found != self._checks[index][2]:
                self._compare(index, found)
        self._next = end
        if end < len(self._stops):
            there = self._ends[end] - (self._stops[end] - count)
            if there - self._begins[end] - self._digested >= LEAST_PIECE:
                self._go_on(end, there)

    def _go_on(self, index: int, end: int) -> None:
        begin = self._begins[index]
        self._digest.update(self._whole[begin + self._digested : end])
        self._digested = end - begin

    def _compare(self, index: int, found: str) -> None:
        check = self._checks[index]
        if found != check.expected:
            if check.tensor:
                raise wrong(self._name, check, found)
            self._look_through(check, self._begins[index] - check.offset)

    def _look_through(self, pack: Check, shift: int) -> None:
        """Which tensor of a pack is wrong: that is what counts. `shift` leads from the file to the view."""
        for check in self._holding.checks_within(self._path, pack.offset, pack.end):
            found = xxhash.xxh3_128_hexdigest(self._whole[check.offset + shift : check.end + shift])
            if found != check.expected:
                raise wrong(self._name, check, found)


def wrong(name: str, check: Check, found: str) -> IntegrityError:
    """What peer `name` gave has the digest `found`."""
    return IntegrityError(
        f"wrong bytes from {name} (tensor {check.tensor}, block {check.block}: expected {check.expected}, observed {found})",
        hint="they changed after they were hashed: a peer has to serve them anew, mx cache verify looks through a cache",
    )
