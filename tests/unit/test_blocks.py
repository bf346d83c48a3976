"""Pieces that end where digests do, and tensors that share bytes."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from mx_cli.plan.blocks import aligned
from mx_cli.plan.ranges import Span, merge, total
from mx_cli.plan.shared import Wanted, pieces

spans = st.lists(st.tuples(st.integers(0, 300), st.integers(0, 300)), max_size=8)
sizes = st.integers(1, 64)


@st.composite
def blocks(draw: st.DrawFn) -> list[Span]:
    """Sorted and disjoint, some of which touch."""
    found: list[Span] = []
    at = 0
    for gap, length in draw(st.lists(st.tuples(st.integers(0, 20), st.integers(1, 40)), max_size=12)):
        found.append((at + gap, at + gap + length))
        at += gap + length
    return found


@given(wanted=spans, known=blocks(), piece=sizes)
def test_pieces_are_exactly_what_is_wanted(wanted: list[Span], known: list[Span], piece: int) -> None:
    found = aligned(wanted, known, piece)
    assert merge(found) == merge(wanted)
    assert total(found) == total(merge(wanted))
    assert found == sorted(found)
    assert all(0 < end - start <= piece for start, end in found)


@given(wanted=spans, known=blocks(), piece=sizes)
def test_no_block_is_split_that_fits(wanted: list[Span], known: list[Span], piece: int) -> None:
    found, asked = aligned(wanted, known, piece), merge(wanted)
    for first, last in known:
        if last - first <= piece and any(start <= first and last <= end for start, end in asked):
            assert any(start <= first and last <= end for start, end in found), (first, last)


@given(wanted=spans, known=blocks(), piece=sizes)
def test_small_neighbours_are_packed(wanted: list[Span], known: list[Span], piece: int) -> None:
    """Of two pieces that touch, the second begins with something that did not fit into the first any more."""
    found = aligned(wanted, known, piece)
    for one, other in itertools.pairwise(found):
        if one[1] == other[0]:
            ends = [last for _, last in known] + [first for first, _ in known] + [other[1]]
            first = min(end for end in ends if end > other[0])
            assert first - one[0] > piece


def test_blocks_of_four_go_by_two() -> None:
    known = [(8 + at * 4, 12 + at * 4) for at in range(5)]
    assert aligned([(0, 28)], known, 8) == [(0, 8), (8, 16), (16, 24), (24, 28)]
    assert aligned([(8, 28)], known, 8) == [(8, 16), (16, 24), (24, 28)]
    assert aligned([(0, 100)], [], 40) == [(0, 40), (40, 80), (80, 100)]


def test_a_block_that_reaches_into_the_next_span_ends_there() -> None:
    assert aligned([(0, 5), (7, 30)], [(0, 10), (10, 20), (20, 30)], 10) == [(0, 5), (7, 10), (10, 20), (20, 30)]


# --- tensors that share bytes ----------------------------------------------------------------------------------------

tensors = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 30), st.sampled_from([1, 2, 4, 8])), max_size=8)


@given(rows=tensors, known=blocks())
def test_pieces_hold_their_tensors_and_are_disjoint(rows: list[tuple[int, int, int]], known: list[Span]) -> None:
    # As views of one memory are: each a multiple of its alignment from where the memory begins, wherever in the file.
    wanted = [
        Wanted(str(number), "f", 5 + start * step, size * step, step) for number, (start, size, step) in enumerate(rows)
    ]
    found = pieces(wanted, lambda file: known)
    by_name = {one.name: one for one in wanted}
    assert sorted(name for piece in found for name in piece.offsets) == sorted(one.name for one in wanted if one.size)
    for one, other in itertools.pairwise(found):
        assert one.end <= other.start
    for piece in found:
        for name, offset in piece.offsets.items():
            one = by_name[name]
            assert piece.start + offset == one.start
            assert one.start + one.size <= piece.end
            assert (piece.shift + offset) % one.alignment == 0
            assert piece.alignment % one.alignment == 0
        for first, last in known:
            inside = max(first, piece.start) < min(last, piece.end)
            assert not inside or piece.start <= first < last <= piece.end, "a block is split"
        own = merge((by_name[n].start, by_name[n].start + by_name[n].size) for n in piece.offsets)
        assert piece.covered == (own == [(piece.start, piece.end)])


def test_neighbours_are_pieces_of_their_own() -> None:
    wanted = [Wanted("a", "f", 0, 8, 4), Wanted("b", "f", 8, 8, 4), Wanted("c", "g", 0, 8, 4)]
    known = {"f": [(0, 8), (8, 16)], "g": [(0, 8)]}
    found = pieces(wanted, known.__getitem__)
    assert [(one.file, one.start, one.end, one.covered) for one in found] == [
        ("f", 0, 8, True),
        ("f", 8, 16, True),
        ("g", 0, 8, True),
    ]
