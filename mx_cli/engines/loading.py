"""The order in which a rank of an engine gets its weights, whatever the engine.

    peer      another engine's same rank (or, at the stage checkpoint, whoever has the files)
    cache     a complete snapshot on this machine
    stream    the origin, tensor by tensor, without a disk
    engine    the engine's own loader

Each is tried once, and says in one line why it was taken or not. A route that fails before it has written leaves the module
for the next one; one that fails later has spoilt it, and the engine builds another.
"""

from __future__ import annotations

import itertools
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from mx_cli.base import units
from mx_cli.base.errors import Incompatible, MxError, NoPeer, NotFound, UsageError
from mx_cli.engine import route
from mx_cli.engine.route import Attempt, Taken
from mx_cli.engines.offering import Offering
from mx_cli.engines.options import Options
from mx_cli.engines.tensors import refuse_empty, refuse_hidden
from mx_cli.engines.weights import Weights, weights_of
from mx_cli.flows.context import Context
from mx_cli.flows.data_path import Wish
from mx_cli.flows.pull import Pull, PullRequest
from mx_cli.model import identity
from mx_cli.model import layout as model_layout

Tensors = Iterator[tuple[str, Any]]
Put = Callable[[Any], str]
"""Fills a module, and says from where. What it raises has spoilt the module."""


class Engine(Protocol):
    """What an adapter knows of its engine."""

    def agree(self, find: Callable[[], Any]) -> Any:
        """What `find` returned in one of the ranks, in all of them: all call this at the same place."""

    def build(self, fill: Callable[[Any], None]) -> Any:
        """A new module, handed to `fill` with all its tensors allocated, and post-processed then.

        Raises what `fill` raises. Called again, nothing of an earlier module is left.
        """

    def load(self, module: Any, tensors: Tensors | None) -> None:
        """Put the tensors of a checkpoint (None: as the engine's own loader finds them) into the module's.

        Raises the engine's own errors for a checkpoint that lacks some.
        """

    def fill_anyhow(self, module: Any) -> None:
        """Any numbers that post-processing can bear."""


def of_first_rank(group: Any, find: Callable[[], Any]) -> Any:
    """What `find` returned in the first rank of an engine's group of processes, in all of them. Blocks for that one."""
    found = find() if group.rank_in_group == 0 else None
    return group.broadcast_object(found, src=0) if group.world_size > 1 else found


@dataclass(frozen=True)
class Rank:
    """One of the processes of an engine: `number` of `ranks`. `first_here`: it speaks for its host."""

    number: int
    ranks: int
    first_here: bool

    def __str__(self) -> str:
        return f"rank {self.number} of {self.ranks}"


@dataclass(frozen=True)
class Started:
    """What the engine was started with: its model, and what shapes a rank's tensors.

    `layout`: names and values as in `model.layout`. `refusal`: why tensors of this engine are never exchanged, empty when
    they may be.
    """

    model: str
    revision: str | None
    layout: Mapping[str, Any]
    refusal: str = ""


class Spoilt(Exception):
    """A route failed after it had begun to write: the module is of no use any more."""


class Loading:
    """One rank's load. `say` takes a line for the engine's log."""

    def __init__(
        self,
        engine: Engine,
        options: Options,
        context: Context,
        rank: Rank,
        started: Started,
        offering: Offering,
        say: Callable[[str], None],
    ) -> None:
        self._engine, self._options, self._context = engine, options, context
        self._rank, self._started, self._offering, self._log = rank, started, offering, say
        self._routes = list(options.routes)
        self._found: Weights | MxError = NotFound("nobody has looked for the weights yet")
        self._taken = ""

    def run(self) -> Any:
        """The module, filled and post-processed. Blocks.

        Raises what the last route raised, UsageError for options that contradict each other, and the engine's own errors.
        """
        self._found = self._engine.agree(self._find)
        if isinstance(self._found, UsageError):
            raise self._found
        if self._options.stage == "processed" and "peer" in self._routes:
            self._routes.remove("peer")
            module = self._processed_from_peer()
            if module is not None:
                return module
        while True:
            try:
                module = self._engine.build(self._fill)
                break
            except Spoilt as spoilt:
                # Its frames refer to the module that is of no use.
                traceback.clear_frames(spoilt.__traceback__)
        if self._options.stage == "processed":
            self._hold(module)
        return module

    def _find(self) -> Weights | MxError:
        try:
            return weights_of(self._options, self._started.model, self._started.revision, self._context)
        except MxError as error:
            # Raised by all of them: who waits for what one rank found would wait for ever.
            return error

    def _weights(self) -> Weights:
        if isinstance(self._found, MxError):
            raise self._found
        return self._found

    def _say(self, attempt: Attempt) -> None:
        self._log(f"{self._rank}: {attempt.text()}")

    # -- the routes ----------------------------------------------------------------------------------------------

    def _fill(self, module: Any) -> None:
        finders: Mapping[str, Callable[[], Put]] = {
            "peer": self._files_of_peers if self._options.stage == "checkpoint" else self._tensors_of_peers,
            "cache": self._cached,
            "stream": self._streamed,
            "engine": self._own,
        }
        routes = list(self._routes)

        def take(name: str) -> Callable[[], Taken[str]]:
            return lambda: self._take(name, finders[name], module)

        self._taken, _ = route.first([(name, take(name)) for name in routes], self._say)
        if self._options.stage == "loaded":
            self._hold(module)

    def _take(self, name: str, find: Callable[[], Put], module: Any) -> Taken[str]:
        self._routes.remove(name)
        put = find()
        try:
            return Taken(name, put(module))
        except _Untouched as untouched:
            raise untouched.error from None
        except route.FALLS_THROUGH as error:
            if not self._routes:
                raise
            self._say(Attempt(name, False, f"{error.what}; the module is built anew"))
            raise Spoilt(name) from None

    def _tensors_of_peers(self) -> Put:
        wanted = self._identity(self._weights())
        if self._started.refusal:
            raise Incompatible(self._started.refusal)

        def put(module: Any) -> str:
            return self._pull_into(module, wanted)

        return put

    def _pull_into(self, module: Any, wanted: str) -> str:
        from mx_cli.flows.pull_tensors import pull_into

        options = self._options
        try:
            refuse_empty(module)
            received = pull_into(
                module,
                wanted,
                peers=options.peers,
                path=options.path,
                require=options.require,
                routes=("peer",),
                **options.settings,
            )
        except _BEFORE_WRITING as error:
            raise _Untouched(error) from None
        took = f"{units.size(received.bytes)} in {units.duration(received.seconds)}"
        return f"{units.count(received.tensors, 'tensor')}, {took}, {received.attempts[-1].reason}"

    def _files_of_peers(self) -> Put:
        weights = self._weights()
        wish = Wish(self._options.peers, self._options.path, frozenset(self._options.require))
        request = PullRequest(weights.uri, wish, weights.revision, routes=("peer",))
        puller = Pull(request, self._context)
        try:
            outcome = puller.run()
        except route.OF_THE_CACHE as error:
            raise NoPeer(f"the files of peers come by way of the cache ({error.what})") from None
        finally:
            puller.leave()
        who = ", ".join(f"{one.address} by {one.path}" for one in outcome.sources) or "another process had it fetched"
        return self._of_files(outcome.directory, f"files of {weights.uri}@{weights.revision}, {who}")

    def _cached(self) -> Put:
        weights = self._weights()
        request = PullRequest(weights.uri, revision=weights.revision, routes=("cache",))
        directory = Pull(request, self._context).from_cache().result.directory
        return self._of_files(directory, f"{weights.uri}@{weights.revision} in {directory}")

    def _of_files(self, directory: Path, reason: str) -> Put:
        from mx_cli.flows.load import load

        tensors = load(str(directory), **self._options.settings)

        def put(module: Any) -> str:
            self._engine.load(module, iter(tensors.items()))
            if self._options.stage == "checkpoint" and self._rank.first_here:
                self._offering.hold_files(directory)
            return reason

        return put

    def _streamed(self) -> Put:
        from mx_cli.flows.stream import stream

        weights = self._weights()
        tensors = stream(weights.uri, revision=weights.revision, **self._options.settings)
        # What is wrong with the origin shows before anything is written.
        first = next(tensors, None)
        if first is None:
            raise NotFound(f"{weights.uri} holds no tensors")

        def put(module: Any) -> str:
            self._engine.load(module, itertools.chain([first], tensors))
            return f"{weights.uri}@{weights.revision}"

        return put

    def _own(self) -> Put:
        model = self._started.model

        def put(module: Any) -> str:
            self._engine.load(module, None)
            if self._weights_are_own():
                return f"the engine's own loader, from {model}"
            return f"the engine's own loader, from {model}: whether those are the weights of {self._options.uri} is not known"

        return put

    def _weights_are_own(self) -> bool:
        return isinstance(self._found, Weights) and self._found.own

    # -- tensors as peers exchange them --------------------------------------------------------------------------

    def _identity(self, weights: Weights) -> str:
        stage, layout = model_layout.layout(self._options.stage, self._started.layout)
        return identity.of_origin(weights.uri, weights.revision, stage, layout).id

    def _hold(self, module: Any) -> None:
        """Hold what the module has, if it is known to be the weights that are wanted."""
        if isinstance(self._found, Weights) and (self._taken != "engine" or self._found.own):
            self._offering.hold(module, self._found, self._started.layout, self._started.refusal)

    def _processed_from_peer(self) -> Any:
        """The module as peers have it after post-processing; None when it cannot be had."""
        try:
            self._tensors_of_peers()
            self._look()
            module = self._engine.build(self._engine.fill_anyhow)
            refuse_hidden(module)
            reason = self._pull_into(module, self._identity(self._weights()))
        except _Untouched as untouched:
            error: MxError = untouched.error
        except route.FALLS_THROUGH as failure:
            error = failure
        else:
            self._say(Attempt("peer", True, reason))
            self._hold(module)
            return module
        self._say(Attempt("peer", False, error.what))
        traceback.clear_frames(error.__traceback__)
        if not self._routes:
            raise error
        return None

    def _look(self) -> None:
        """Raises what `Peering.find` raises: without a peer nothing is built for one."""
        from mx_cli.flows.peering import Peering

        wish = Wish(self._options.peers, self._options.path, frozenset(self._options.require))
        peering = Peering(self._context, [self._identity(self._weights())], wish)
        try:
            peering.find(self._context.settings.wait or 0.0)
        finally:
            peering.close()


class _Untouched(Exception):
    """What failed before anything was written."""

    def __init__(self, error: MxError) -> None:
        self.error = error


_BEFORE_WRITING = (NoPeer, Incompatible)
