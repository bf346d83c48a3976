"""`mx pull`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Optional

import typer

from mx_cli.base import units
from mx_cli.cli.become import become, check_program, check_stray
from mx_cli.cli.listening import (
    ABOVE_DRAIN,
    DRAIN_TIMEOUT,
    LISTEN,
    MAX_READERS,
    Advertise,
    DrainTimeout,
    Listen,
    MaxReaders,
)
from mx_cli.cli.options import CACHE, ELECTION, ORIGIN, PEER, PEERS, TRANSFER, command, words
from mx_cli.cli.places import apart, place, seconds
from mx_cli.cli.render.table import table
from mx_cli.cli.session import Session

if TYPE_CHECKING:
    from pathlib import Path

    from mx_cli.flows.context import Context
    from mx_cli.flows.pull import PullOutcome, PullRequest
    from mx_cli.flows.pull_plan import Plan

MANY = Optional[list[str]]  # noqa: UP045 - typer reads the object
TEXT = Optional[str]  # noqa: UP045


@command(CACHE, ORIGIN, TRANSFER, ELECTION, PEER, PEERS, ("memory", "peer_stall_timeout", "grant_ttl"))
def pull(
    session: Session,
    model: Annotated[
        str, typer.Argument(metavar="MODEL|IDENTITY", help="a URI, an identity of mx hash, or a directory")
    ],
    cmd: Annotated[MANY, typer.Argument(metavar="[-- CMD ...]", help="run CMD then; {} is the directory")] = None,
    revision: Annotated[TEXT, typer.Option("--revision", metavar="REVISION", help="revision of a URI")] = None,
    to: Annotated[
        TEXT,
        typer.Option(
            "--to", metavar="DIR", help="make this directory, not a snapshot in the cache; it must not hold other files"
        ),
    ] = None,
    rank: Annotated[
        TEXT,
        typer.Option("--rank", metavar="R/N", help="only this rank's part of each tensor, counted from 0; with --to"),
    ] = None,
    rules: Annotated[
        TEXT,
        typer.Option(
            "--rules",
            metavar="FILE|NAME",
            help="how tensors are split over ranks: llama, qwen, mistral, mixtral, deepseek, or a JSON file "
            "[default the family of config.json]",
        ),
    ] = None,
    peer: Annotated[
        MANY, typer.Option("--peer", metavar="HOST:PORT", help="this peer, not those of discovery; may be repeated")
    ] = None,
    route: Annotated[
        TEXT,
        typer.Option(
            "--route",
            metavar="LIST",
            help="where to take it from, in order: peer, cache, origin (into the cache), stream (past it) "
            "[default all, stream only with --to; with --rank peer,cache,stream]",
        ),
    ] = None,
    require: Annotated[
        TEXT,
        typer.Option(
            "--require", metavar="LIST", help="what the way from a peer must be: rdma, or encrypted (path socket)"
        ),
    ] = None,
    path: Annotated[
        str,
        typer.Option(
            "--path", metavar="auto|nixl-read|socket", help="the way from a peer: NIXL reads its memory, or TLS sockets"
        ),
    ] = "auto",
    origin: Annotated[
        TEXT,
        typer.Option(
            "--origin", metavar="URI", help="where an IDENTITY comes from when no peer and no snapshot has it"
        ),
    ] = None,
    then_serve: Annotated[bool, typer.Option("--then-serve", help="be a peer too afterwards, until stopped")] = False,
    listen: Listen = LISTEN,
    advertise: Advertise = None,
    max_readers: MaxReaders = MAX_READERS,
    drain_timeout: DrainTimeout = DRAIN_TIMEOUT,
    result: Annotated[TEXT, typer.Option("--result", metavar="FILE", help="also write the JSON result here")] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="show the routes with reasons and what each would move; move nothing")
    ] = False,
) -> None:
    """Bring weights here from a peer, the cache or the origin. Prints their directory."""
    from mx_cli.flows import pull as flow
    from mx_cli.flows.data_path import Wish
    from mx_cli.flows.serving import Offer

    check_stray(cmd or [])
    _check_together(cmd, then_serve, rank, rules, to)
    context = session.context()
    session.cache_line(context.cache().root)
    if cmd:
        check_program(cmd[0], session.resolved.environ)
    wish = Wish(tuple(peer or ()), path, frozenset(words(require)))
    directory, result_file = place("--to", to), place("--result", result)
    apart({"--result": result_file, "--to": directory})
    request = flow.PullRequest(model, wish, revision or None, origin, directory, tuple(words(route)))
    if dry_run:
        _plan(session, context, request, rank, rules)
        return
    answer = _Answer(session, cmd or [], result_file, context.cache().root)
    if then_serve:
        from mx_cli.flows.serve import pull_then_serve

        drain = seconds("--drain-timeout", drain_timeout)
        session.grace = drain + ABOVE_DRAIN
        offer = Offer(listen=listen, advertise=advertise, slots=max_readers)
        pull_then_serve(request, offer, drain, context, answer.give)
    elif rank is not None:
        from mx_cli.flows.pull_share import pull_share

        answer.give(pull_share(request, rank, rules, context))
    else:
        answer.give(flow.pull(request, context))


def _check_together(cmd: MANY, then_serve: bool, rank: TEXT, rules: TEXT, to: TEXT) -> None:
    """Raises UsageError for options that contradict each other."""
    from mx_cli.base.errors import UsageError

    if cmd and then_serve:
        raise UsageError("--then-serve and a command exclude each other", hint="mx serve DIR beside the command")
    if rules is not None and rank is None:
        raise UsageError("--rules without a rank", hint="--rank R/N")
    if rank is not None and to is None:
        raise UsageError("--rank: a part has no place in the cache, which keeps whole files", hint="--to DIR")
    if rank is not None and then_serve:
        raise UsageError("--then-serve offers whole weights, and --rank brings a part", hint="leave one of them out")


class _Answer:
    """What follows a pull that has succeeded: the result in a file and on stdout, or the command."""

    def __init__(self, session: Session, cmd: list[str], result: Path | None, root: Path) -> None:
        """Takes away the result of an earlier run."""
        from mx_cli.flows.deliver import prepare_result

        self._session, self._cmd, self._result = session, cmd, result
        if result:
            prepare_result("--result", result, root)

    def give(self, outcome: PullOutcome) -> None:
        from mx_cli.base.events import Notice
        from mx_cli.flows.deliver import write_result

        session, directory = self._session, outcome.directory
        session.emit(Notice(outcome.summary()))
        document = outcome.to_json()
        if self._result:
            write_result(self._result, document)
        if self._cmd:
            # Whoever takes this process over owns its stdout.
            session.conclude(str(directory))
            become(session, self._cmd, directory, outcome.identity)
        session.answer(str(directory), document)


def _plan(session: Session, context: Context, request: PullRequest, rank: str | None, rules: str | None) -> None:
    from mx_cli.flows.pull_plan import plan

    found = plan(request, context, rank, rules)
    session.answer(_table(found), found.to_json(), final=f"route {found.taken.route}")


def _table(found: Plan) -> str:
    states = {True: "usable", False: "no"}
    rows = [
        (
            choice.route,
            "first" if choice is found.taken else states[choice.usable],
            units.size(choice.bytes) if choice.usable else "-",
            units.size(choice.memory) if choice.usable else "-",
            choice.reason,
        )
        for choice in found.choices
    ]
    return table(("ROUTE", "STATE", "TO MOVE", "MEMORY", "WHY"), rows, right=frozenset({"TO MOVE", "MEMORY"}))
