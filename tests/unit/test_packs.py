"""Digests of many small tensors together: made of what is right, and only there."""

from __future__ import annotations

from collections.abc import Iterator

import xxhash

from mx_cli.flows.packs import with_packs
from mx_cli.model.checks import Check
from mx_cli.model.holding import Holding, start_key
from mx_cli.model.manifest import FileRecord, Manifest

FILE = "model.safetensors"
EACH, COUNT = 60_000, 150
DATA = bytes(index * 7 % 251 for index in range(EACH)) * COUNT


class Memory:
    """Held bytes that can be damaged."""

    def __init__(self, device: str = "cpu") -> None:
        self.device, self.data = device, bytearray(DATA)

    def access(self) -> dict[str, object]:
        return {}

    def read(self, file: str, offset: int, length: int) -> Iterator[memoryview]:
        for at in range(offset, offset + length, 10_000):
            yield memoryview(self.data)[at : min(at + 10_000, offset + length)]

    def close(self) -> None:
        """Nothing."""


def holding() -> Holding:
    digest = xxhash.xxh3_128_hexdigest(DATA[:EACH])
    rows = tuple((FILE, f"t{index:03}", "U8", (EACH,), (digest,)) for index in range(COUNT))
    starts = {start_key(FILE, f"t{index:03}"): index * EACH for index in range(COUNT)}
    manifest = Manifest("", "", "s", 1, "", (FileRecord(FILE, len(DATA), "0" * 32),), tensors=rows)
    return Holding(manifest, (), starts)


def pack(first: int, last: int) -> Check:
    start, end = first * EACH, last * EACH
    return Check(start, end - start, xxhash.xxh3_128_hexdigest(DATA[start:end]))


def test_packs_are_of_four_mebibytes_at_most() -> None:
    found = with_packs(holding(), Memory())
    assert found.packs == {FILE: (pack(0, 69), pack(69, 138), pack(138, 150))}
    assert found.digest == holding().digest
    assert found.seams(FILE) == [(0, 69 * EACH), (69 * EACH, 138 * EACH), (138 * EACH, 150 * EACH)]


def test_what_is_not_as_its_digest_says_is_in_no_pack() -> None:
    """It would vouch for the damage: readers could not see it any more."""
    memory = Memory()
    memory.data[70 * EACH + 5] ^= 1
    found = with_packs(holding(), memory)
    assert found.packs == {FILE: (pack(0, 69), pack(138, 150))}
    assert len(found.packed_within(FILE, 0, len(DATA))) == 1 + 69 + 1


def test_files_on_disk_have_none() -> None:
    assert with_packs(holding(), Memory("file")) == holding()
    assert with_packs(holding(), None) == holding()
