"""Tensors into memory by the best route: routes in order, each of which starts the target afresh."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from mx_cli.engine import route
from mx_cli.engine.route import Attempt, Taken
from mx_cli.flows.catalog import Catalog, catalog, with_catalog
from mx_cli.flows.context import Context
from mx_cli.flows.pull import Pull, PullOutcome, PullRequest
from mx_cli.flows.pull_memory import Moved
from mx_cli.sources.registry import OpenOrigin


@dataclass(frozen=True)
class Received:
    """What came into memory: how many tensors of each kind, bytes, from whom, and by which route with what reasons.

    `extra` of the bytes were read along between those of a rank.
    """

    tensors: int
    parameters: int
    buffers: int
    bytes: int
    seconds: float
    route: str
    attempts: tuple[Attempt, ...]
    sources: Mapping[str, int]
    version: int
    extra: int = 0


def received(
    name: str, names: Collection[str], kinds: Mapping[str, str], moved: Sequence[Moved], version: int
) -> Received:
    """What came by route `name` in transfers side by side: the tensors `names`, of these `kinds`."""
    buffers = sum(1 for one in names if kinds.get(one) == "buffer")
    sources: Counter[str] = Counter()
    for one in moved:
        sources.update(one.by_source)
    return Received(
        tensors=len(names),
        parameters=len(names) - buffers,
        buffers=buffers,
        bytes=sum(one.bytes for one in moved),
        seconds=max((one.seconds for one in moved), default=0.0),
        route=name,
        attempts=(),
        sources=dict(sources),
        version=version,
        extra=sum(one.extra for one in moved),
    )


class TensorPull(ABC):
    """One pull into memory. Subclasses know how it is made and filled: with whole tensors, or with a rank's shares of them."""

    usual: ClassVar[tuple[str, ...]] = route.NAMES

    def __init__(self, request: PullRequest, context: Context) -> None:
        self._request, self._context = request, context
        self._puller = Pull(request, context)
        self._begun: set[str] = set()
        # Of the weights that came, as far as it is known.
        self.identity = ""

    def run(self) -> Received:
        takers: dict[str, Callable[[], Taken[Received]]] = {
            "peer": self._from_peers,
            "cache": lambda: self._from_snapshot("cache", self._puller.from_cache()),
            "origin": lambda: self._from_snapshot("origin", self._puller.from_origin()),
            route.STREAM: self._from_stream,
        }
        names = self._puller.routes(self.usual)
        found, attempts = route.first([(name, takers[name]) for name in names], self._puller.say)
        return dataclasses.replace(found, attempts=tuple(attempts))

    @abstractmethod
    def _from_peers(self) -> Taken[Received]:
        """From those that match, which are searched for."""

    @abstractmethod
    def _fill(self, name: str, found: Catalog, origin: OpenOrigin) -> Received:
        """From a snapshot, a directory or an origin, for the route `name`."""

    def _from_snapshot(self, name: str, there: Taken[PullOutcome]) -> Taken[Received]:
        found, origin = catalog(str(there.result.directory), None, self._context)
        try:
            filled = self._fill(name, found, origin)
        finally:
            origin.close()
        self.identity = there.result.identity
        return Taken(filled, there.reason)

    def _from_stream(self) -> Taken[Received]:
        """From the origin past the cache, or from a directory as it is. Only a snapshot's digests are known."""
        self._puller.check_stream(of_a_part=self.usual == route.OF_A_PART)
        return with_catalog(self._puller.straight_from, self._request.revision, self._context, self._streamed)

    def _streamed(self, found: Catalog, origin: OpenOrigin) -> Taken[Received]:
        self._puller.accept_unread(found.holding)
        filled = self._fill(route.STREAM, found, origin)
        self.identity = next((one.id for one in found.holding.identities), "")
        return Taken(filled, f"{origin.uri}, past the cache")
