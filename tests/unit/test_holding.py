"""What a peer holds: places of tensors and bytes, as text and back, and what makes no sense."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Callable
from typing import Any

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from mx_cli.base.errors import IntegrityError
from mx_cli.model import identity
from mx_cli.model.checks import SMALL, Check, plan_packs
from mx_cli.model.holding import Alias, Extent, Extents, Holding, joined, size_of, start_key
from mx_cli.model.manifest import BLOCK, FileRecord, Manifest

FILE, OTHER = "model.safetensors", "part/two.safetensors"


def hexes(count: int, salt: str = "a") -> tuple[str, ...]:
    return tuple(f"{salt}{number:031x}" for number in range(count))


def holding(**changes: Any) -> Holding:
    rows = (
        (FILE, "b", "F32", (4,), hexes(1)),
        (FILE, "a", "U8", (2 * BLOCK + 5,), hexes(3)),
        (FILE, "none", "BF16", (0, 4), ()),
        (OTHER, "a", "F4", (2, 8), hexes(1, "c")),
    )
    manifest = Manifest(
        "hf://org/name",
        "r",
        "s",
        1,
        "d",
        (FileRecord(FILE, 2 * BLOCK + 121, "f" * 32), FileRecord(OTHER, 108, "e" * 32)),
        tensors=rows,
    )
    starts = {
        start_key(FILE, "b"): 100,
        start_key(FILE, "a"): 116,
        start_key(FILE, "none"): 116,
        start_key(OTHER, "a"): 100,
    }
    known: dict[str, Any] = {
        "manifest": manifest,
        "identities": (identity.of_origin("hf://org/name", "r"),),
        "starts": starts,
        "aliases": {"tied": Alias("b", 0, "F32", (4,)), "view": Alias("b", 8, "I16", (2,))},
        "kinds": {"b": "buffer", "a": "parameter"},
        "texts": {"index.json": "{}"},
        "version": 3,
    }
    return Holding(**{**known, **changes})


def test_sizes() -> None:
    assert size_of("F32", (2, 3)) == 24
    assert size_of("F4", (2, 8)) == 8
    assert size_of("BOOL", ()) == 1
    assert size_of("C64", (0, 5)) == 0
    assert size_of("file", (7,)) == 7


def test_tensors_are_in_the_order_of_their_bytes() -> None:
    found = [(one.file, one.name, one.start, one.end) for one in holding().tensors]
    assert found == [
        (FILE, "b", 100, 116),
        (FILE, "a", 116, 2 * BLOCK + 121),
        (FILE, "none", 116, 116),
        (OTHER, "a", 100, 108),
    ]


def test_blocks_are_counted_from_the_tensor() -> None:
    one = holding()
    assert one.blocks(FILE) == [
        (100, 116),
        (116, 116 + BLOCK),
        (116 + BLOCK, 116 + 2 * BLOCK),
        (116 + 2 * BLOCK, 2 * BLOCK + 121),
    ]
    assert one.blocks("nobody") == []
    assert one.checks_within(FILE, 100, 116) == (Check(100, 16, hexes(1)[0], "b", 0),)
    assert [check.block for check in one.checks_within(FILE, 101, 116 + 2 * BLOCK)] == [0, 1]
    assert one.checks_within(FILE, 101, 116 + BLOCK - 1) == ()
    assert one.checks_within(FILE, 100, 100) == ()


def test_a_holding_is_the_same_after_its_text() -> None:
    one = holding()
    again = Holding.from_json(json.loads(json.dumps(one.to_json())), "test")
    assert again == one
    assert again.digest == one.digest
    assert again.tensors == one.tensors
    assert again.version == 3


def test_the_digest_tells_content_and_places_but_not_who_or_when() -> None:
    one = holding()
    assert holding(version=4, identities=(), kinds={}, texts={}).digest == one.digest
    moved = dict(one.starts) | {start_key(FILE, "b"): 96}
    different = [
        holding(starts=moved),
        holding(aliases={}),
        holding(aliases=dict(one.aliases) | {"tied": Alias("b", 4, "F32", (3,))}),
    ]
    assert len({one.digest, *(other.digest for other in different)}) == 4


def without_a_digest(data: dict[str, Any]) -> None:
    row = next(row for row in data["manifest"]["tensors"] if row[:2] == [FILE, "a"])
    row[-1] = row[-1][:-1]


BROKEN: dict[str, Callable[[dict[str, Any]], object]] = {
    "starts outside": lambda data: data["starts"].update({start_key(FILE, "b"): -1}),
    "ends outside": lambda data: data["starts"].update({start_key(OTHER, "a"): 101}),
    "a digest is missing": without_a_digest,
    "tied to nobody": lambda data: data["aliases"].update(tied=["nobody", 0, "F32", [1]]),
    "reaches out of its holder": lambda data: data["aliases"].update(tied=["b", 4, "F32", [4]]),
    "begins before its holder": lambda data: data["aliases"].update(tied=["b", -4, "F32", [1]]),
    "half an alias": lambda data: data["aliases"].update(tied=["b", 0]),
    "kinds are no mapping": lambda data: data.update(kinds=[]),
    "no version": lambda data: data.update(version=None),
    "no starts": lambda data: data.pop("starts"),
    "a name that leads out": lambda data: data["manifest"]["files"][1].update(path="../two.safetensors"),
    "two files of one name": lambda data: data["manifest"]["files"].append(data["manifest"]["files"][0]),
    "less than nothing": lambda data: data["manifest"]["files"].append(
        {**data["manifest"]["files"][0], "path": "less", "size": -1}
    ),
    "more than a file can have": lambda data: data["manifest"]["files"].append(
        {**data["manifest"]["files"][0], "path": "more", "size": 2**63}
    ),
    "two lengths below nothing": lambda data: data["aliases"].update(tied=["b", 0, "F32", [-2, -2]]),
    "a length below nothing": lambda data: data["manifest"]["tensors"][0].__setitem__(3, [-2, -2]),
    "a length that is no whole number": lambda data: data["manifest"]["tensors"][0].__setitem__(3, [4.0]),
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_makes_no_sense_is_refused(name: str) -> None:
    data = json.loads(json.dumps(holding().to_json()))
    BROKEN[name](data)
    with pytest.raises(IntegrityError, match="peer"):
        Holding.from_json(data, "peer")


@pytest.mark.parametrize("data", [None, [], {}, "text", {"manifest": {}}])
def test_what_is_no_holding_is_refused(data: Any) -> None:
    with pytest.raises(IntegrityError, match="peer"):
        Holding.from_json(data, "peer")


# --- where bytes lie -------------------------------------------------------------------------------------------------


@st.composite
def runs(draw: st.DrawFn) -> list[Extent]:
    """Of two files, disjoint in each; in memory anywhere."""
    found: list[Extent] = []
    for file in ("f", "g"):
        at = 0
        rows = st.tuples(st.integers(0, 3), st.integers(0, 20), st.integers(0, 3), st.sampled_from([-1, 0]))
        last: Extent | None = None
        for gap, length, far, device in draw(st.lists(rows, max_size=8)):
            address = last.address + last.length + far if last else 1000
            last = Extent(file, at + gap, length, address, device)
            found.append(last)
            at += gap + length
    return draw(st.permutations(found))


def byte_by_byte(rows: list[Extent]) -> dict[tuple[str, int], tuple[int, int]]:
    return {
        (row.file, row.offset + number): (row.address + number, row.device)
        for row in rows
        for number in range(row.length)
    }


@given(rows=runs(), start=st.integers(0, 80), length=st.integers(0, 80))
def test_within_is_what_is_there_and_cut_is_all_or_nothing(rows: list[Extent], start: int, length: int) -> None:
    places, extents, end = byte_by_byte(rows), Extents(rows), start + length
    for file in ("f", "g", "nobody"):
        found = extents.within(file, start, end)
        expected = {key: place for key, place in places.items() if key[0] == file and start <= key[1] < end}
        assert byte_by_byte(found) == expected
        assert all(one.end <= other.offset for one, other in itertools.pairwise(found))
        assert all(row.length > 0 for row in found)
        if len(expected) == length:
            assert extents.cut(file, start, end) == found
        else:
            with pytest.raises(IntegrityError, match="does not say where byte"):
                extents.cut(file, start, end)


@given(rows=runs())
def test_joined_are_the_same_bytes_in_fewer_runs(rows: list[Extent]) -> None:
    found = joined(rows)
    assert byte_by_byte(found) == byte_by_byte(rows)
    assert found == sorted(found)
    for one, other in itertools.pairwise(found):
        assert (one.file, one.end, one.address + one.length, one.device) != (
            other.file,
            other.offset,
            other.address,
            other.device,
        )


def test_two_places_for_one_byte() -> None:
    with pytest.raises(IntegrityError, match="two places for byte 8"):
        Extents([Extent("f", 8, 4, 100), Extent("f", 0, 9, 200)])
    assert Extents([Extent("f", 0, 8, 100), Extent("f", 8, 1, 300)]).largest.address == 100
    with pytest.raises(IntegrityError):
        Extents([]).largest  # noqa: B018


def test_neighbours_that_are_small_share_a_pack() -> None:
    tensors = [(0, 10), (10, 20), (30, SMALL), (30 + SMALL, SMALL + 1), (31 + 2 * SMALL, 5), (40 + 2 * SMALL, 5)]
    assert list(plan_packs(tensors, BLOCK)) == [(0, 30 + SMALL)]
    assert list(plan_packs([(at * 10, 10) for at in range(7)], 30)) == [(0, 30), (30, 60)]
    assert list(plan_packs([(0, 10), (10, 0), (10, 10)], 30)) == [(0, 20)]
    assert list(plan_packs([], 30)) == []


def packed_holding() -> Holding:
    """Tensors of 10 bytes each from byte 8 on, the first six of them in packs of three; and a seventh."""
    names = "abcdefg"
    data = bytes(range(70))
    rows = [(FILE, n, "U8", (10,), (xxhash.xxh3_128_hexdigest(data[i * 10 :][:10]),)) for i, n in enumerate(names)]
    starts = {start_key(FILE, name): 8 + 10 * index for index, name in enumerate(names)}
    packs = (
        Check(8, 30, xxhash.xxh3_128_hexdigest(data[:30])),
        Check(38, 30, xxhash.xxh3_128_hexdigest(data[30:60])),
    )
    manifest = dataclasses.replace(holding().manifest, tensors=tuple(rows))
    return holding(manifest=manifest, starts=starts, aliases={}, kinds={}, packs={FILE: packs})


def test_a_pack_is_one_check_where_it_is_wanted_whole() -> None:
    one = packed_holding()
    assert one.seams(FILE) == [(8, 38), (38, 68), (68, 78)]
    assert [check.tensor for check in one.packed_within(FILE, 0, 100)] == ["", "", "g"]
    assert [check.tensor for check in one.packed_within(FILE, 18, 68)] == ["b", "c", ""]
    assert [check.tensor for check in one.packed_within(FILE, 8, 58)] == ["", "d", "e"]
    assert [check.tensor for check in one.packed_within(FILE, 20, 60)] == ["c", "d", "e"]
    assert [check.tensor for check in one.packed_within(FILE, 28, 38)] == ["c"]
    assert one.packed_within("nobody", 0, 100) == ()
    again = Holding.from_json(json.loads(json.dumps(one.to_json())), "test")
    assert again == one
    assert again.digest == dataclasses.replace(one, packs={}).digest


@pytest.mark.parametrize("pack", [(9, 29), (8, 31), (8, 0), (8, -10), (200, 10)])
def test_a_pack_that_cuts_tensors_is_refused(pack: tuple[int, int]) -> None:
    text = packed_holding().to_json()
    text["packs"] = {FILE: [[*pack, "00" * 16]]}
    with pytest.raises(IntegrityError, match="no tensors of"):
        Holding.from_json(json.loads(json.dumps(text)), "test")


def test_packs_that_overlap_are_refused() -> None:
    text = packed_holding().to_json()
    text["packs"] = {FILE: [[8, 30, "00" * 16], [28, 20, "00" * 16]]}
    with pytest.raises(IntegrityError, match="no tensors of"):
        Holding.from_json(json.loads(json.dumps(text)), "test")
