"""Where weights are taken from: routes are tried in order, and each says why it was taken or not."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from mx_cli.base.errors import (
    AccessDenied,
    Incompatible,
    IntegrityError,
    MissingCapability,
    MxError,
    NoPeer,
    NotFound,
    StillLanding,
    TransportFailed,
    Unreachable,
    WaitExpired,
)

NAMES = ("peer", "cache", "origin")
FALLS_THROUGH = (
    NoPeer,
    Incompatible,
    TransportFailed,
    Unreachable,
    NotFound,
    AccessDenied,
    MissingCapability,
    IntegrityError,
    WaitExpired,
)
"""What ends a route, and not the command: another one may do better."""

T = TypeVar("T")

_KEPT: list[StillLanding] = []


@dataclass(frozen=True)
class Attempt:
    """One route: `taken`, or why not."""

    route: str
    taken: bool
    reason: str

    def to_json(self) -> dict[str, object]:
        return {"route": self.route, "taken": self.taken, "reason": self.reason}


@dataclass(frozen=True)
class Taken(Generic[T]):
    """What a route gave: a result, and why this route."""

    result: T
    reason: str


def first(
    routes: Sequence[tuple[str, Callable[[], Taken[T]]]], say: Callable[[Attempt], None]
) -> tuple[T, list[Attempt]]:
    """The result of the first route that works. A route that fails must have left its target as it was.

    Raises what the last route raised, which names the reasons of all, or at once what is no matter of the route.
    """
    attempts: list[Attempt] = []
    errors: list[MxError] = []
    for name, take in routes:
        try:
            taken = take()
        except StillLanding as error:
            # With its traceback it refers to the memory in question, which thus is never freed.
            _KEPT.append(error)
            raise
        except FALLS_THROUGH as error:
            attempts.append(Attempt(name, False, error.what))
            say(attempts[-1])
            errors.append(error)
            # It refers to the memory that was meant for weights, and the next route needs as much.
            traceback.clear_frames(error.__traceback__)
            continue
        attempts.append(Attempt(name, True, taken.reason))
        say(attempts[-1])
        return taken.result, attempts
    raise summed(attempts, errors)


def summed(attempts: Sequence[Attempt], errors: Sequence[MxError]) -> MxError:
    """The error that says most: what is wrong beats who is absent."""
    if not errors:
        return NoPeer("no route is left to try")
    chosen = next((error for error in errors if not isinstance(error, (NoPeer, NotFound))), errors[0])
    if len(errors) == 1:
        return chosen
    routes: dict[str, list[str]] = {}
    for attempt in attempts:
        routes.setdefault(attempt.reason, []).append(attempt.route)
    reasons = "; ".join(f"{', '.join(names)}: {reason}" for reason, names in routes.items())
    return type(chosen)(reasons, hint=chosen.hint, via=chosen.via)
