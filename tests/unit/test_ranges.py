"""P-10: the pieces of a file cover it exactly, whatever its size, and they are few."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mx_cli.plan.ranges import gaps, merge, pieces, total

MIB = 1 << 20
EDGES = [0, 1, 16 * MIB - 1, 16 * MIB, 16 * MIB + 1, 1 << 31, (1 << 32) - 1, 1 << 32, (1 << 32) + 1, 600 << 30]


@pytest.mark.parametrize("size", EDGES)
def test_p10_pieces_cover_a_file_exactly(size: int) -> None:
    found = pieces(size, [], 16 * MIB)
    assert merge(found) == ([(0, size)] if size else [])
    assert total(found) == size
    assert len(found) == -(-size // (16 * MIB))
    assert all(0 < end - start <= 16 * MIB for start, end in found)
    assert all(left[1] == right[0] for left, right in itertools.pairwise(found))


@pytest.mark.parametrize("size", [size for size in EDGES if size > 2])
def test_p10_what_is_there_is_left_out(size: int) -> None:
    have = [(0, 1), (size // 2, size // 2 + 1), (size - 1, size)]
    found = pieces(size, have, 16 * MIB)
    assert merge([*found, *have]) == [(0, size)]
    assert total(found) == size - total(merge(have))


spans = st.lists(st.tuples(st.integers(0, 300), st.integers(0, 300)), max_size=8)


@given(size=st.integers(0, 250), have=spans, piece=st.integers(1, 64))
def test_pieces_and_what_is_there_make_the_file(size: int, have: list[tuple[int, int]], piece: int) -> None:
    found = pieces(size, have, piece)
    there = {at for start, end in have for at in range(start, end)}
    fetched = [at for start, end in found for at in range(start, end)]
    assert len(fetched) == len(set(fetched))
    assert set(fetched) == set(range(size)) - there
    assert gaps(size, [*have, *found]) == []
    assert all(start // piece == (end - 1) // piece for start, end in found)
