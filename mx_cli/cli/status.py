"""`mx status`."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from mx_cli.base import units
from mx_cli.cli.options import CACHE, command
from mx_cli.cli.render.table import table
from mx_cli.cli.session import Session

if TYPE_CHECKING:
    from mx_cli.flows.status import Download

HEADS = ("MODEL", "REVISION", "LEADER", "TERM", "STATE", "PHASE", "DONE", "RATE", "ETA", "ALIVE")
SHORT = 12


@command(CACHE, ("ttl", "beat"))
def status(session: Session) -> None:
    """Show the downloads in progress on this cache. Who leads, how far, how fast, and why a slow one is slow."""
    from mx_cli.flows.status import downloads

    context = session.context()
    session.existing_cache_line(context.cache().root)
    found = downloads(context)
    head, *rows = table(HEADS, [_row(one) for one in found], right=frozenset({"TERM"})).split("\n")
    lines = [head]
    for row, one in zip(rows, found, strict=True):
        lines += [row, f"  why: {one.why}"] if one.why else [row]
    documents = [{**dataclasses.asdict(one), "rate": _whole(one.rate), "eta": _whole(one.eta)} for one in found]
    session.answer("\n".join(lines), {"schema": 1, "downloads": documents}, final=units.count(len(found), "download"))


def _row(one: Download) -> tuple[str, ...]:
    return (
        one.uri,
        one.revision[:SHORT],
        one.leader,
        str(one.term),
        one.state,
        one.phase or "-",
        _done(one),
        "-" if one.rate is None else units.rate(one.rate),
        "-" if one.eta is None else units.duration(one.eta),
        "-" if one.alive is None else f"{one.alive:.0f} s ago",
    )


def _done(one: Download) -> str:
    if one.state in ("left", "failed"):
        return f"{units.size(one.resumable)} kept"
    if not one.bytes_total:
        return units.size(one.bytes_done)
    return f"{100 * one.bytes_done // one.bytes_total} % of {units.size(one.bytes_total)}"


def _whole(value: float | None) -> int | None:
    return None if value is None else round(value)
