"""`mx peers`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer

from mx_cli.base import units
from mx_cli.cli.options import CACHE, ORIGIN, PEERS, command
from mx_cli.cli.render import plain
from mx_cli.cli.render.table import table
from mx_cli.cli.session import Session

if TYPE_CHECKING:
    from mx_cli.flows.peers import Peer

HEADS = ("PEER", "ADDRESS", "AGE", "DEVICE", "SIZE", "READERS", "STATE", "IDENTITIES")
LONGEST = 200


@command(CACHE, PEERS, ("peer_token_file",), ORIGIN)
def peers(
    session: Session,
    identity: Annotated[
        Optional[str],  # noqa: UP045 - typer reads the object
        typer.Argument(metavar="IDENTITY", help="identity, URI or directory: only who serves these weights"),
    ] = None,
    probe: Annotated[
        bool, typer.Option("--probe", help="ask each peer whether it is there, and what it holds")
    ] = False,
) -> None:
    """List the peers that serve weights. Who, where, what, and when each last showed that it lives."""
    from mx_cli.base.events import Notice
    from mx_cli.flows.peers import find_peers

    found = find_peers(session.context(), identity, probe=probe)
    session.emit(Notice(f"peers of {found.directory}"))
    if found.reason:
        session.emit(Notice(found.reason))
    shown = [peer for peer in found.peers if peer.matches or identity is None]
    head, *rows = table(HEADS, [_row(peer) for peer in shown], right=frozenset({"AGE", "SIZE"})).split("\n")
    lines = [head]
    for row, peer in zip(rows, shown, strict=True):
        lines += [row, f"  why: {_cell(peer.fault)}"] if peer.fault else [row]
    others = [] if identity is None else [peer for peer in found.peers if not peer.matches]
    lines += [f"other: {_name(peer)} at {_cell(peer.record.address)}: {_cell(peer.differs)}" for peer in others]
    document = {
        "schema": 1,
        "discovery": found.directory,
        "wanted": list(found.wanted),
        "peers": [_document(peer) for peer in found.peers],
        "reason": found.reason,
    }
    living = sum(not peer.sighting.stale if peer.answers is None else peer.answers for peer in shown)
    session.answer("\n".join(lines), document, final=units.count(living, "peer"))


def _row(peer: Peer) -> tuple[str, ...]:
    from mx_cli.flows.peers import short

    record, sighting = peer.record, peer.sighting
    known = bool(record.generation)
    return (
        _name(peer),
        _cell(record.address),
        "-" if sighting.age is None else units.duration(sighting.age),
        _cell(record.device) or "-",
        units.size(record.size) if known else "-",
        f"{record.readers}/{record.slots}" if known else "-",
        _state(peer),
        " ".join(_cell(short(identity)) for identity in record.identities) or "-",
    )


def _state(peer: Peer) -> str:
    if peer.answers is not None:
        return _cell(peer.record.state) if peer.answers else "no answer"
    return f"stale ({_cell(peer.record.state)})" if peer.sighting.stale else _cell(peer.record.state)


def _name(peer: Peer) -> str:
    name, generation = _cell(peer.record.name), _cell(peer.record.generation)
    return name if generation in ("", name) else f"{name} ({generation})"


def _cell(text: str) -> str:
    """What others wrote, in a line of a table."""
    shown = plain(text, "")
    return shown if len(shown) <= LONGEST else shown[: LONGEST - 1] + "…"


def _document(peer: Peer) -> dict[str, Any]:
    age = peer.sighting.age
    return {
        **peer.record.to_json(),
        "age": None if age is None else round(age, 1),
        "stale": peer.sighting.stale,
        "matches": peer.matches or None,
        "differs": peer.differs,
        "answers": peer.answers,
        "fault": peer.fault,
    }
