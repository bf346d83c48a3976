"""What two shares of a tensor have in common, and which ranges are read for it."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mx_cli.base.errors import UsageError
from mx_cli.model.share import Share
from mx_cli.plan.boxes import overlap
from mx_cli.plan.cover import Uncovered, cover
from mx_cli.plan.ranges import Span, merge, total
from mx_cli.plan.rows import READ_ALONG, Rows, near, spans_to_read, wanted_within

SHAPES = st.lists(st.integers(1, 5), min_size=1, max_size=4).map(tuple)


@st.composite
def shares(draw: st.DrawFn, shape: tuple[int, ...]) -> Share:
    dim = draw(st.none() | st.integers(0, len(shape) - 1))
    if dim is None:
        return Share(shape)
    edges = sorted(draw(st.lists(st.integers(0, shape[dim]), min_size=2, max_size=4)))
    edges = edges[: len(edges) // 2 * 2]
    return Share(shape, dim, tuple(zip(edges[::2], edges[1::2], strict=True)))


@st.composite
def pairs(draw: st.DrawFn) -> tuple[Share, Share]:
    shape = draw(SHAPES)
    return draw(shares(shape)), draw(shares(shape))


def elements(share: Share) -> list[int]:
    """The indices, in the whole tensor, of a share's elements, in their order."""
    return [at + n for at, length in share.runs(8) for n in range(length)]


@settings(deadline=None)
@given(pairs(), st.sampled_from([8, 16]))
def test_boxes_are_all_that_is_in_common(pair: tuple[Share, Share], bits: int) -> None:
    source, target = pair
    step = bits // 8
    theirs, own = elements(source), elements(target)
    moved = {}
    for box in overlap(source, target, bits):
        for run in range(box.runs):
            for n in range(box.length):
                to, at = box.to + run * box.step + n, box.at + run * box.pitch + n
                assert to not in moved
                assert to % step == at % step
                moved[to] = at
    assert {to // step: theirs[at // step] for to, at in moved.items()} == {
        place: element for place, element in enumerate(own) if element in set(theirs)
    }


def doubled(share: Share) -> Share:
    """With two elements along the last dimension for each one."""
    last = len(share.shape) - 1
    spans = tuple((2 * start, 2 * end) for start, end in share.spans) if share.dim == last else share.spans
    return Share((*share.shape[:last], 2 * share.shape[last]), share.dim, spans)


@given(pairs())
def test_two_elements_of_half_a_byte_are_one_of_a_byte(pair: tuple[Share, Share]) -> None:
    source, target = pair
    assert list(overlap(doubled(source), doubled(target), 4)) == list(overlap(source, target, 8))


def test_half_a_byte_is_no_place_to_split() -> None:
    with pytest.raises(UsageError, match="middle of a byte"):
        list(overlap(Share((4, 2)), Share((4, 2), 1, ((0, 1),)), 4))


@given(pairs(), st.data())
def test_a_part_of_the_source_alone(pair: tuple[Share, Share], data: st.DataObject) -> None:
    source, target = pair
    if source.dim is None:
        return
    low = data.draw(st.integers(0, source.shape[source.dim]))
    parts: list[Span] = [(0, low), (low, source.shape[source.dim])]
    several = sum(box.length * box.runs for part in parts for box in overlap(source, target, 8, part))
    assert several == sum(box.length * box.runs for box in overlap(source, target, 8))


ROWS = st.builds(
    lambda offset, length, gap, count: Rows("f", offset, length, count, length + gap, 1000, length, -1),
    st.integers(0, 50), st.integers(1, 9), st.integers(0, 9), st.integers(1, 6),
)  # fmt: skip


@given(ROWS, st.integers(0, 80), st.integers(0, 80))
def test_what_of_rows_lies_in_a_range(rows: Rows, one: int, other: int) -> None:
    start, end = min(one, other), max(one, other)
    wanted = {
        rows.offset + run * rows.pitch + n: rows.address + run * rows.step + n
        for run in range(rows.runs)
        for n in range(rows.length)
    }
    inside = {at + n: address + n for at, length, address in rows.inside(start, end) for n in range(length)}
    assert inside == {at: address for at, address in wanted.items() if start <= at < end}
    assert wanted_within([rows], start, end) == len(inside)


def test_small_gaps_are_read_along_and_large_ones_are_not() -> None:
    small = Rows("f", 100, 10, 3, 10 + READ_ALONG, 0, 10, -1)
    assert spans_to_read([small]) == [(100, small.end)]
    large = small._replace(pitch=11 + READ_ALONG)
    assert spans_to_read([large]) == [(100 + n * large.pitch, 110 + n * large.pitch) for n in range(3)]


@pytest.mark.parametrize("gap", [0, 3])
@given(spans=st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)).map(lambda pair: (min(pair), max(pair)))))
def test_near_spans_are_joined(gap: int, spans: list[Span]) -> None:
    found = near(spans, gap)
    assert all(after[0] - before[1] > gap for before, after in itertools.pairwise(found))
    assert total(merge([*found, *spans])) == total(found)
    assert math.prod(0 if start == end else 1 for start, end in found) == 1


def test_what_a_block_lacks_at_its_ends_is_read_along() -> None:
    rows = Rows("f", 130, 10, 4, 40, 0, 10, -1)
    assert spans_to_read([rows]) == [(130, 260)]
    assert spans_to_read([rows], [(0, 100), (100, 200), (200, 280), (280, 400)]) == [(100, 280)]
    assert spans_to_read([rows], [(90, 400)]) == [(130, 260)]
    assert spans_to_read([rows._replace(runs=1, pitch=10)], [(100, 200)]) == [(130, 140)]


# --- several sources --------------------------------------------------------------------------------------------------


@st.composite
def sets(draw: st.DrawFn) -> tuple[Share, dict[int, Share]]:
    shape = draw(SHAPES)
    return draw(shares(shape)), dict(enumerate(draw(st.lists(shares(shape), max_size=5))))


@settings(deadline=None)
@given(sets())
def test_a_target_is_covered_once_or_what_lacks_is_named(case: tuple[Share, dict[int, Share]]) -> None:
    target, sources = case
    wanted = elements(target)
    found = cover(target, sources, {})
    if isinstance(found, Uncovered):
        # No set of sources that are split along one dimension has everything.
        for dim in range(len(target.shape)):
            held = {e for s in sources.values() if s.whole or s.dim == dim for e in elements(s)}
            assert set(wanted) - held
        return
    moved: dict[int, int] = {}
    for part in found:
        theirs = elements(sources[part.source])
        for box in overlap(part.share, target, 8, part.only):
            for run in range(box.runs):
                for n in range(box.length):
                    to = box.to + run * box.step + n
                    assert to not in moved
                    moved[to] = theirs[box.at + run * box.pitch + n]
    assert moved == dict(enumerate(wanted))


def test_replicas_share_the_work() -> None:
    half = Share((8, 4), 0, ((0, 4),))
    other = Share((8, 4), 0, ((4, 8),))
    load: dict[str, int] = {}
    for _ in range(4):
        assert not isinstance(
            cover(Share((8, 4)), {"a": half, "b": half, "c": other, "d": Share((8, 4))}, load), Uncovered
        )
    assert max(load.values()) - min(load.values()) <= 16
    assert sum(load.values()) == 4 * 32


def test_missing_rows_are_named() -> None:
    lacking = cover(Share((8, 4), 0, ((2, 6),)), {"a": Share((8, 4), 0, ((0, 3),))}, {})
    assert lacking == Uncovered(0, ((3, 6),))
    assert str(lacking) == "rows 3 to 5 of dimension 0"
    assert str(cover(Share((8, 4)), {}, {})) == "all of it"
