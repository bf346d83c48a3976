"""`mx peers`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer

from mx_cli.base import units
from mx_cli.cli.options import CACHE, ORIGIN, PEERS, command
from mx_cli.cli.render.table import table
from mx_cli.cli.session import Session

if TYPE_CHECKING:
    from mx_cli.flows.peers import Peer

HEADS = ("PEER", "ADDRESS", "AGE", "DEVICE", "SIZE", "READERS", "STATE", "IDENTITIES")
LONGEST = 100


@command(CACHE, PEERS, ORIGIN)
def peers(
    session: Session,
    identity: Annotated[
        Optional[str],  # noqa: UP045 - typer reads the object
        typer.Argument(metavar="IDENTITY", help="identity, URI or directory: only who serves these weights"),
    ] = None,
) -> None:
    """Peers that serve weights: who, where, what, and when it last showed that it lives. Asks none of them."""
    from mx_cli.base.events import Notice
    from mx_cli.flows.peers import find_peers

    found = find_peers(session.context(), identity)
    session.emit(Notice(f"peers of {found.directory}"))
    if found.reason:
        session.emit(Notice(found.reason))
    shown = [peer for peer in found.peers if peer.matches or identity is None]
    lines = [table(HEADS, [_row(peer) for peer in shown], right=frozenset({"AGE", "SIZE"}))]
    for peer in found.peers:
        if peer not in shown:
            lines.append(f"other: {_name(peer)} at {_plain(peer.record.address)}: {_plain(peer.differs)}")
    document = {
        "schema": 1,
        "discovery": found.directory,
        "wanted": list(found.wanted),
        "peers": [_document(peer) for peer in found.peers],
        "reason": found.reason,
    }
    living = sum(not peer.sighting.stale for peer in shown)
    session.answer("\n".join(lines), document, final=units.count(living, "peer"))


def _row(peer: Peer) -> tuple[str, ...]:
    from mx_cli.flows.peers import short

    record, sighting = peer.record, peer.sighting
    known = bool(record.generation)
    return (
        _name(peer),
        _plain(record.address),
        "-" if sighting.age is None else units.duration(sighting.age),
        _plain(record.device) or "-",
        units.size(record.size) if known else "-",
        f"{record.readers}/{record.slots}" if known else "-",
        f"stale ({_plain(record.state)})" if sighting.stale else _plain(record.state),
        " ".join(_plain(short(identity)) for identity in record.identities) or "-",
    )


def _name(peer: Peer) -> str:
    name, generation = _plain(peer.record.name), _plain(peer.record.generation)
    return name if generation in ("", name) else f"{name} ({generation})"


def _plain(text: str) -> str:
    """What others wrote, so that a terminal takes no orders from it."""
    shown = text if text.isprintable() else ascii(text)[1:-1]
    return shown if len(shown) <= LONGEST else shown[: LONGEST - 1] + "…"


def _document(peer: Peer) -> dict[str, Any]:
    age = peer.sighting.age
    return {
        **peer.record.to_json(),
        "age": None if age is None else round(age, 1),
        "stale": peer.sighting.stale,
        "matches": peer.matches or None,
        "differs": peer.differs,
    }
