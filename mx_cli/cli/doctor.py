"""`mx doctor`."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer

from mx_cli.base.errors import MissingCapability, UsageError
from mx_cli.cli.options import CACHE, ORIGIN, PEER, PEERS, command
from mx_cli.cli.render import plain
from mx_cli.cli.render.table import table
from mx_cli.cli.session import Session

if TYPE_CHECKING:
    from mx_cli.flows.doctor import Report

HEADS = ("CAPABILITY", "STATE", "VALUE")
TEXT = Optional[str]  # noqa: UP045 - typer reads the object


@command(CACHE, ORIGIN, PEER, PEERS)
def doctor(
    session: Session,
    model: Annotated[
        TEXT, typer.Argument(metavar="[MODEL]", help="a URI, a directory or an identity: is there room for it?")
    ] = None,
    ranks: Annotated[
        int, typer.Option("--ranks", min=1, metavar="N", help="processes of this machine that share the weights")
    ] = 1,
    listen: Annotated[
        TEXT,
        typer.Option(
            "--listen",
            metavar="ADDR:PORT",
            # In a pod that serves, MX_LISTEN is set, and a doctor there is to look at the machine.
            envvar="MX_DOCTOR_LISTEN",
            help="be the other side of a doctor --peer until stopped; with --peer: to be dialled back",
        ),
    ] = None,
    advertise: Annotated[
        TEXT,
        typer.Option(
            "--advertise",
            metavar="ADDR[:PORT]",
            envvar="MX_DOCTOR_ADVERTISE",
            help="the address that --listen tells others",
        ),
    ] = None,
    peer: Annotated[
        TEXT,
        typer.Option(
            "--peer",
            metavar="HOST:PORT",
            envvar="MX_DOCTOR_PEER",
            help="measure the way to a doctor --listen, or to a peer",
        ),
    ] = None,
) -> None:
    """Measure what this machine can do, or the way to another one. A fix for each row; exit 20 when a row fails."""
    context = session.context()
    if (listen or peer) and model is not None:
        raise UsageError("MODEL is not for --listen and --peer", hint="mx doctor MODEL by itself")
    if advertise and not listen:
        raise UsageError("--advertise without --listen")
    if peer:
        from mx_cli.flows.bring_up import measure

        _tell(session, measure(context, peer, listen, advertise))
    elif listen:
        from mx_cli.flows.bring_up import wait_for_readers

        def on_ready(document: dict[str, Any]) -> None:
            # One JSON line, also without --json: scripts read it.
            session.answer(json.dumps(document), document)

        wait_for_readers(context, listen, advertise, on_ready)
    else:
        from mx_cli.flows.doctor import examine

        _tell(session, examine(context, model, ranks))


def _tell(session: Session, report: Report) -> None:
    """Answer with the table, also when a row fails; then raises MissingCapability."""
    from mx_cli.base.capability import FAIL
    from mx_cli.base.events import Notice
    from mx_cli.flows.doctor import summary

    rows = [(row.name, row.state, plain(row.value, "")) for row in report.rows]
    head, *lines = table(HEADS, rows).split("\n")
    shown = [head]
    for line, row in zip(lines, report.rows, strict=True):
        shown += [line, f"  fix: {plain(row.fix, '')}"] if row.fix else [line]
    document, failed = report.to_json(), report.named(FAIL)
    session.emit(Notice(summary(report)))
    if not failed:
        session.answer("\n".join(shown), document, final=summary(report))
        return
    if session.as_json:
        session.failed_document = document
    else:
        session.answer("\n".join(shown), document, final=summary(report))
    raise MissingCapability(f"failing: {', '.join(failed)}", hint="each failing row has its fix")
