"""How many items are in flight: what brings throughput stays, what brings none is taken back."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from mx_cli.engine import run
from mx_cli.engine.run import PAUSE, WIDEN_EVERY, _Width


class Transfer:
    """A transfer whose rate at a width is `rate(width)` bytes a second, in a time of its own."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, start: int, most: int) -> None:
        self.now, self.fetched = 0.0, 0
        monkeypatch.setattr(run, "time", SimpleNamespace(monotonic=lambda: self.now))
        self.width = _Width(start, most)
        self.rate = [0] * (most + 1)

    def tick(self, *, used: int | None = None) -> int:
        self.now += WIDEN_EVERY
        self.fetched += int(self.rate[self.width.now] * WIDEN_EVERY)
        self.width.adapt(self.fetched, self.width.now if used is None else used)
        return self.width.now


def test_it_grows_while_that_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    one = Transfer(monkeypatch, 3, 32)
    one.rate = [100 * width for width in range(33)]
    assert [one.tick() for _ in range(5)] == [6, 12, 24, 32, 32]


def test_what_brought_nothing_is_taken_back_and_tried_again_later(monkeypatch: pytest.MonkeyPatch) -> None:
    one = Transfer(monkeypatch, 3, 32)
    one.rate = [1000] * 33
    assert [one.tick(), one.tick()] == [6, 3]
    assert [one.tick() for _ in range(PAUSE)] == [3] * PAUSE
    assert [one.tick(), one.tick()] == [6, 3]
    one.rate = [1000 * width for width in range(33)]
    assert [one.tick(), one.tick()] == [6, 12]


def test_it_does_not_grow_where_there_is_too_little_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    one = Transfer(monkeypatch, 3, 32)
    one.rate = [100] * 33
    assert [one.tick(used=2) for _ in range(20)] == [3] * 20


def test_who_asks_for_less_gets_less_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    one = Transfer(monkeypatch, 8, 32)
    one.rate = [100 * width for width in range(33)]
    one.width.halve()
    assert [one.tick() for _ in range(PAUSE)] == [4] * PAUSE
    assert one.tick() == 8
    for _ in range(9):
        one.width.halve()
    assert one.width.now == 1
