"""The bytes of an item beside the digests that its peer published, block by block, while they land."""

from __future__ import annotations

import bisect
import itertools
import operator
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
    """Compares every block that lies whole in an item, in host memory, with its digest. For one thread.

    `name`: the peer's, for the error.
    """

    def __init__(self, name: str, holding: Holding, item: ReadItem, memory: Memory) -> None:
        assert item.end is not None
        self._name, self._holding, self._path = name, holding, item.entry.path
        # Tensors lie side by side as in the file only where all of it is one run.
        in_one = len(memory.parts) == 1 and memory.parts[0][:2] == (0, item.length)
        known = holding.packed_within if in_one else holding.checks_within
        self._checks, self._whole, self._begins, self._ends, self._stops = _covered(
            known(item.entry.path, item.offset, item.end), item, memory
        )
        self._next = 0
        self._digest = xxhash.xxh3_128()
        self._digested = 0

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


Covered = tuple[Sequence[Check], memoryview, Sequence[int], Sequence[int], Sequence[int]]
"""Checks, a view of all parts with what lies between, and of each check where it begins and ends in the view, and how many
bytes of the parts have landed when it has."""


def _covered(checks: Sequence[Check], item: ReadItem, memory: Memory) -> Covered:
    """The checks whose bytes lie whole in one part."""
    base = min((address for _, _, address in memory.parts), default=0)
    top = max((address + length for _, length, address in memory.parts), default=0)
    # Only what has a check is touched: a view of each part would cost more than the digest of a small block.
    whole = at_address(base, top - base)
    if len(checks) == len(memory.parts):
        offsets, lengths, addresses = zip(*memory.parts, strict=True) if checks else ((), (), ())
        alike = all(map(operator.eq, offsets, (check.offset - item.offset for check in checks)))
        if alike and all(map(operator.eq, lengths, (check.length for check in checks))):
            begins = [address - base for address in addresses]
            ends = list(map(operator.add, begins, lengths))
            return checks, whole, begins, ends, list(itertools.accumulate(lengths))
    if len(memory.parts) == 1 and memory.parts[0][:2] == (0, item.length):
        begins = [check[0] - item.offset for check in checks]
        ends = [begin + check[1] for begin, check in zip(begins, checks, strict=True)]
        return checks, whole, begins, ends, ends
    return _covered_in_parts(checks, item, memory, whole, base)


def _covered_in_parts(checks: Sequence[Check], item: ReadItem, memory: Memory, whole: memoryview, base: int) -> Covered:
    found: list[Check] = []
    begins, ends, stops = [], [], []
    at, before = 0, 0
    for offset, length, address in memory.parts:
        start = item.offset + offset
        end, shift = start + length, address - start - base
        while at < len(checks) and checks[at].offset < end:
            check = checks[at]
            at += 1
            if check.offset >= start and check.end <= end:
                found.append(check)
                begins.append(check.offset + shift)
                ends.append(check.end + shift)
                stops.append(before + check.end - start)
        before += length
    return found, whole, begins, ends, stops
