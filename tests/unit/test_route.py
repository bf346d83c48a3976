"""Routes in order, with a reason each."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import pytest

from mx_cli.base.errors import (
    Incompatible,
    IntegrityError,
    Interrupted,
    MxError,
    NoPeer,
    NoSpace,
    NotFound,
    TransportFailed,
    UsageError,
)
from mx_cli.engine import route
from mx_cli.engine.route import Attempt, Taken


def fails(error: BaseException) -> Callable[[], Taken[str]]:
    def take() -> Taken[str]:
        raise error

    return take


def gives(result: str) -> Callable[[], Taken[str]]:
    return lambda: Taken(result, f"{result} was there")


def test_the_first_that_works_is_taken_and_later_ones_are_not_tried() -> None:
    said: list[Attempt] = []
    result, attempts = route.first(
        [("peer", fails(NoPeer("nobody"))), ("cache", gives("snapshot")), ("origin", fails(AssertionError()))],
        said.append,
    )
    assert result == "snapshot"
    assert attempts == said == [Attempt("peer", False, "nobody"), Attempt("cache", True, "snapshot was there")]
    assert said[0].to_json() == {"route": "peer", "taken": False, "reason": "nobody"}


@pytest.mark.parametrize(
    "error", [UsageError("no"), NoSpace("no"), Interrupted(2), ZeroDivisionError(), KeyboardInterrupt()]
)
def test_what_is_no_matter_of_the_route_ends_it_all(error: BaseException) -> None:
    with pytest.raises(type(error)):
        route.first([("peer", fails(error)), ("cache", gives("snapshot"))], lambda attempt: None)


@pytest.mark.parametrize("error", [kind("no") for kind in route.FALLS_THROUGH])
def test_everything_that_another_route_may_do_better(error: MxError) -> None:
    assert route.first([("peer", fails(error)), ("cache", gives("it"))], lambda attempt: None)[0] == "it"


def raised(*errors: MxError) -> MxError:
    names = route.NAMES[: len(errors)]
    with pytest.raises(MxError) as caught:
        route.first([(name, fails(error)) for name, error in zip(names, errors, strict=True)], lambda attempt: None)
    return caught.value


def test_the_error_says_most_and_names_every_route() -> None:
    error = raised(NoPeer("nobody"), NotFound("no snapshot"), IntegrityError("broken", hint="try again"))
    assert type(error) is IntegrityError
    assert error.what == "peer: nobody; cache: no snapshot; origin: broken"
    assert error.hint == "try again"
    assert type(raised(Incompatible("other"), NotFound("no"), TransportFailed("cut"))) is Incompatible
    assert type(raised(NoPeer("nobody"), NotFound("no snapshot"))) is NoPeer


def test_one_reason_for_several_routes_is_said_once() -> None:
    assert raised(NoPeer("unknown revision"), NotFound("unknown revision")).what == "peer, cache: unknown revision"


def test_a_single_route_fails_as_it_is() -> None:
    error = Incompatible("other weights", hint="mx hash")
    assert raised(error) is error


def test_no_route() -> None:
    with pytest.raises(NoPeer):
        route.first([], lambda attempt: None)


def test_a_route_that_failed_keeps_no_memory() -> None:
    class Memory:
        pass

    kept: list[weakref.ref[Memory]] = []

    def take() -> Taken[str]:
        memory = Memory()
        kept.append(weakref.ref(memory))
        raise TransportFailed("cut")

    def next_one() -> Taken[str]:
        assert kept[0]() is None
        return Taken("it", "there")

    assert route.first([("peer", take), ("cache", next_one)], lambda attempt: None)[0] == "it"
