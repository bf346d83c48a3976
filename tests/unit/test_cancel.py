"""Stopping, asked for by signal handlers and by threads."""

from __future__ import annotations

import signal
import threading
import time

import pytest

from mx_cli.base.cancel import Stop
from mx_cli.base.errors import Interrupted, UsageError


def _wait_for_ever(stop: Stop) -> None:
    while True:
        stop.wait(1e-5)


def test_a_handler_may_ask_at_any_step_of_a_wait() -> None:
    """An Event's lock is not re-entrant: a handler that came while the main thread held it waited for ever."""
    before = signal.getsignal(signal.SIGALRM)
    try:
        for moment in range(2000):
            stop = Stop()
            signal.signal(signal.SIGALRM, lambda signum, frame, stop=stop: stop.request(Interrupted(2)))
            signal.setitimer(signal.ITIMER_REAL, 2e-5 + moment % 400 * 1e-6)
            with pytest.raises(Interrupted):
                _wait_for_ever(stop)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_the_first_reason_stays_and_wakes_who_waits() -> None:
    stop = Stop()
    began = time.monotonic()
    threading.Timer(0.05, stop.request, [UsageError("first")]).start()
    with pytest.raises(UsageError, match="first"):
        stop.wait(30)
    assert time.monotonic() - began < 5
    stop.request(UsageError("second"))
    assert stop.requested
    assert str(stop.reason) == "first"


def test_hooks_are_called_once_asked_or_at_once() -> None:
    stop, called = Stop(), []
    with stop.calling(lambda: called.append("before")):
        stop.request(UsageError("now"))
    with stop.calling(lambda: called.append("after")):
        pass
    assert called == ["before", "after"]


@pytest.mark.parametrize("before", [True, False])
def test_a_stop_that_follows_another_stops_with_its_reason(before: bool) -> None:
    outer, work = Stop(), Stop()
    if before:
        outer.request(UsageError("outer"))
    with work.following(outer):
        outer.request(UsageError("outer"))
        with pytest.raises(UsageError, match="outer"):
            work.check()


def test_a_stop_follows_another_only_within_the_block_and_does_not_stop_it() -> None:
    outer, work = Stop(), Stop()
    with work.following(outer):
        pass
    outer.request(UsageError("outer"))
    assert not work.requested
    outer = Stop()
    with work.following(outer):
        work.request(UsageError("work"))
    assert not outer.requested
