"""`mx pull`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Optional

import typer

from mx_cli.base import units
from mx_cli.base.config import read_path
from mx_cli.cli.become import become, check_program, check_stray
from mx_cli.cli.options import CACHE, ELECTION, ORIGIN, PEER, PEERS, TRANSFER, command
from mx_cli.cli.render.table import table
from mx_cli.cli.session import Session

if TYPE_CHECKING:
    from mx_cli.flows.pull_plan import Plan

MANY = Optional[list[str]]  # noqa: UP045 - typer reads the object
TEXT = Optional[str]  # noqa: UP045


@command(CACHE, ORIGIN, TRANSFER, ELECTION, PEER, PEERS, ("peer_stall_timeout", "grant_ttl"))
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
            "--to", metavar="DIR", help="make this directory, not a snapshot in the cache; must be absent or empty"
        ),
    ] = None,
    peer: Annotated[
        MANY, typer.Option("--peer", metavar="HOST:PORT", help="this peer, not those of discovery; may be repeated")
    ] = None,
    route: Annotated[
        TEXT,
        typer.Option("--route", metavar="LIST", help="where to take it from, in order [default peer,cache,origin]"),
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
    listen: Annotated[
        str, typer.Option("--listen", metavar="ADDR:PORT", help="where --then-serve listens")
    ] = "127.0.0.1:0",
    advertise: Annotated[
        TEXT, typer.Option("--advertise", metavar="ADDR[:PORT]", help="the address that --then-serve tells others")
    ] = None,
    max_readers: Annotated[
        int, typer.Option("--max-readers", min=1, metavar="N", help="readers of --then-serve at once")
    ] = 4,
    drain_timeout: Annotated[
        str, typer.Option("--drain-timeout", metavar="DURATION", help="time for readers to finish after SIGTERM")
    ] = "25s",
    result: Annotated[TEXT, typer.Option("--result", metavar="FILE", help="also write the JSON result here")] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="show the routes with reasons and what each would move; move nothing")
    ] = False,
) -> None:
    """Bring the weights here by the best route: a peer, the cache, the origin; print their directory."""
    from mx_cli.base.errors import UsageError
    from mx_cli.base.events import Notice
    from mx_cli.base.units import parse_duration
    from mx_cli.flows import pull as flow
    from mx_cli.flows.data_path import Wish
    from mx_cli.flows.deliver import withdraw_result, write_result
    from mx_cli.flows.serving import Offer

    check_stray(cmd or [])
    if cmd and then_serve:
        raise UsageError("--then-serve and a command exclude each other", hint="mx serve DIR beside the command")
    context = session.context()
    session.cache_line(context.cache().root)
    if cmd:
        check_program(cmd[0], session.resolved.environ)
    request = flow.PullRequest(
        model,
        Wish(tuple(peer or ()), path, frozenset(_words(require))),
        revision or None,
        origin,
        read_path(to) if to else None,
        tuple(_words(route)),
    )
    if dry_run:
        from mx_cli.flows.pull_plan import plan

        found = plan(request, context)
        session.answer(_planned(found), found.to_json(), final=f"route {found.taken.route}")
        return
    offer = Offer(listen=listen, advertise=advertise, slots=max_readers) if then_serve else None
    drain = parse_duration(drain_timeout)
    if result:
        withdraw_result(read_path(result))

    def on_done(outcome: flow.PullOutcome) -> None:
        session.emit(Notice(outcome.summary()))
        document = outcome.to_json()
        if result:
            write_result(read_path(result), document)
        if cmd:
            # Whoever takes this process over owns its stdout.
            session.conclude(str(outcome.directory))
            become(session, cmd, outcome.directory, outcome.identity)
        session.answer(str(outcome.directory), document)

    if offer:
        session.grace = drain + 5.0
        from mx_cli.flows.serve import pull_then_serve

        pull_then_serve(request, offer, drain, context, on_done)
    else:
        on_done(flow.pull(request, context))


def _planned(found: Plan) -> str:
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


def _words(text: str | None) -> list[str]:
    return [word.strip() for word in (text or "").split(",") if word.strip()]
