"""Where weights are taken from: routes are tried in order, and each says why it was taken or not."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from mx_cli.base.errors import (
    AccessDenied,
    FilesystemRefused,
    Incompatible,
    IntegrityError,
    MissingCapability,
    MxError,
    NoPeer,
    NoSpace,
    NotFound,
    StillLanding,
    TransportFailed,
    Unreachable,
    WaitExpired,
)

STREAM = "stream"
NAMES = ("peer", "cache", "origin", STREAM)
"""All of them, in the usual order for a place of one's own: from the memory or disk of a peer, from a snapshot in the cache,
from the origin into the cache, from the origin past the cache. The last is for where the cache cannot take the weights: what
is fetched into it is there for all, what is streamed for nobody else."""
BY_CACHE = NAMES[:3]
"""The usual ones where the place is the cache itself."""
OF_A_PART = ("peer", "cache", STREAM)
"""The usual ones for a part of the weights: the cache keeps whole files, which are more than is wanted."""
WITHOUT_ORIGIN = frozenset({"peer", "cache"})
OF_THE_CACHE = (NoSpace, FilesystemRefused)
"""What also ends a route by way of the cache, where another one that goes past it comes later."""
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


@dataclass(frozen=True)
class Attempt:
    """One route: `taken`, or why not."""

    route: str
    taken: bool
    reason: str

    def text(self) -> str:
        return f"route {self.route} {'taken' if self.taken else 'not taken'}: {self.reason}"

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
    """The result of the first route that works. One that fails has left its target as it was, or the next begins it afresh.

    Raises what the last route raised, which names the reasons of all, or at once what is no matter of the route.
    """
    attempts: list[Attempt] = []
    errors: list[MxError] = []
    for index, (name, take) in enumerate(routes):
        past_cache = any(later == STREAM for later, _ in routes[index + 1 :])
        more = OF_THE_CACHE if past_cache and name in ("cache", "origin") else ()
        try:
            taken = take()
        except StillLanding:
            # Another route would write where bytes of this one may land.
            raise
        except (*FALLS_THROUGH, *more) as error:
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
    """The error that tells most: one of something wrong goes before one of something absent."""
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
