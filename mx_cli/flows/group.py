"""Peers that answered, and groups of them that can be read together."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mx_cli.base.errors import IntegrityError, NoSpace
from mx_cli.base.threads import begin
from mx_cli.engine.many import Member
from mx_cli.model.holding import Holding
from mx_cli.transport.session import Grant, Session

FAREWELL = 0.5
"""Seconds to wait while a peer that failed is told that its grant ends: it may be dead or frozen."""


@dataclass
class Peer:
    """One life of a peer that answered: what it says of itself, and by which identity it matches."""

    session: Session
    facts: Mapping[str, Any]
    matched: str
    grant: Grant | None = None
    member: Member | None = None
    path: str = ""
    reason: str = ""

    @property
    def address(self) -> str:
        return self.session.address

    @property
    def load(self) -> float:
        return (int(self.facts.get("readers", 0)) + int(self.facts.get("queue", 0))) / max(
            1, int(self.facts.get("slots", 1))
        )


def announced_holding(peer: Peer) -> Holding:
    """What a peer holds. Blocks. Raises IntegrityError unless it is as announced, with the identity that matched."""
    holding = peer.session.holding()
    if holding.digest != peer.facts.get("manifest"):
        raise IntegrityError(f"{peer.address}: its manifest is not the one that it announced")
    if peer.matched not in [known.id for known in holding.identities]:
        raise IntegrityError(f"{peer.address}: its manifest has not the identity that it announced")
    return holding


def by_manifest(peers: Iterable[Peer]) -> dict[str, list[Peer]]:
    """The peers by the digest of the manifest that they announce: the others of one hold the very same files."""
    found: dict[str, list[Peer]] = {}
    for peer in peers:
        found.setdefault(str(peer.facts.get("manifest")), []).append(peer)
    return found


@dataclass
class Group:
    """Peers that hold the very same files: they can be read together."""

    holding: Holding
    peers: list[Peer]


@dataclass(frozen=True)
class Sourced:
    """One source of the bytes: its address, the path they came by, how many, and why by this path."""

    address: str
    path: str
    bytes: int
    reason: str

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def sources_of(peers: Iterable[Peer], moved: Mapping[str, int]) -> tuple[Sourced, ...]:
    """The peers that were read. `moved`: the bytes of each address."""
    return tuple(Sourced(one.address, one.path, moved.get(one.address, 0), one.reason) for one in peers if one.path)


def leave(peers: Sequence[Peer], serving: str = "", verified: int = 0) -> None:
    """Close the sources, then give all grants back side by side: each peer may be silent for seconds. Idempotent.

    `serving`: where this process offers the `verified` bytes itself now. Raises TransportFailed when a read does not
    end: see `PeerSource.close`.
    """
    with contextlib.ExitStack() as each:
        each.callback(_say_goodbye, peers, serving, verified)
        for peer in peers:
            if peer.member:
                each.callback(peer.member.source.close)


def _say_goodbye(peers: Iterable[Peer], serving: str, verified: int) -> None:
    leaving = []
    for peer in peers:
        if peer.grant:
            farewell = threading.Thread(target=peer.grant.release, args=(serving, verified), daemon=True)
            # An unheard grant expires by itself.
            with contextlib.suppress(NoSpace):
                begin(farewell)
                leaving.append((farewell, FAREWELL if peer.member and peer.member.failure else None))
    for farewell, limit in leaving:
        farewell.join(limit)
