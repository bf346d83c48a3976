"""`mx peers`: who serves what, as far as the directory knows, or as the peers themselves say."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from mx_cli.base.errors import MxError, UsageError
from mx_cli.engine.together import side_by_side
from mx_cli.flows.context import Context
from mx_cli.flows.hash_anything import hash_anything
from mx_cli.model.identity import KINDS, Identity, kind_of, refuse_part
from mx_cli.model.record import Record, Sighting

SHORT = 8
REVISION = 12
PROBES = 64
PROBE_TIMEOUT = 3.0
TOLD = ("generation", "version", "state", "identities", "uri", "revision", "size", "readers", "slots", "device", "host")
"""What a peer tells of itself that its record has too."""


@dataclass(frozen=True, slots=True)
class Peer:
    """A record. `matches`: the strongest kind of identity that is the wanted one, empty when none is or none is wanted;
    `differs` says what is another, where one is wanted. `answers`: whether the peer was there when it was asked, None
    when it was not asked; `fault` says what is wrong with its answer.
    """

    sighting: Sighting
    matches: str = ""
    differs: str = ""
    answers: bool | None = None
    fault: str = ""

    @property
    def record(self) -> Record:
        return self.sighting.record


@dataclass(frozen=True, slots=True)
class Peers:
    """What `directory` says; those that match come first, the living before the stale. `wanted`: identities, if any.

    `reason`: why nobody is there, or what was left out.
    """

    directory: str
    wanted: tuple[str, ...]
    peers: tuple[Peer, ...]
    reason: str


def find_peers(context: Context, wanted: str | None, *, probe: bool = False) -> Peers:
    """All records, the stale too, compared with `wanted`: an identity, a URI, or a directory.

    `probe`: ask each peer, and believe it rather than its record; else no peer is asked.

    Blocks: a URI is resolved at its origin, a directory's weights are read unless their digests are known. Raises
    UsageError, what `hash_anything` raises, and FilesystemRefused or Unreachable for a directory that cannot be read.
    """
    directory = context.directory()
    ids, origin = _wanted(context, wanted) if wanted is not None else ({}, None)
    found = [Peer(sighting) for sighting in directory.sightings(context.stop)]
    if probe and found:
        found = side_by_side(lambda peer: _ask(context, peer), found, PROBES, context.stop)
    peers = [_compare(peer, ids, origin) for peer in found]
    peers.sort(key=lambda peer: (not peer.matches, peer.sighting.stale, peer.record.name))
    return Peers(str(directory), tuple(ids.values()), tuple(peers), directory.reason())


def short(identity: str) -> str:
    """`mx1c-0a1b2c3d`: enough to tell identities apart by eye."""
    kind, dash, digits = identity.partition("-")
    return f"{kind}{dash}{digits[:SHORT]}"


def _wanted(context: Context, wanted: str) -> tuple[dict[str, str], Identity | None]:
    """(kind -> identity, the full origin identity where it is known) of weights."""
    refuse_part(wanted)
    if kind := kind_of(wanted):
        ids, origin = {kind: wanted}, None
    else:
        found = hash_anything(wanted, context).identities
        ids = {known.kind: known.id for known in found}
        origin = next((known for known in found if known.kind == "origin"), None)
    ids.pop("config", None)
    if not ids:
        raise UsageError(
            f"a configuration identifies no weights ({wanted})",
            hint="give a content (mx1c-…) or origin (mx1o-…) identity, a URI, or a directory with weights",
        )
    return ids, origin


def _ask(context: Context, peer: Peer) -> Peer:
    # TLS is loaded only where somebody is asked.
    from mx_cli.flows.trust import offered
    from mx_cli.transport.session import dial

    record = peer.record
    patience = min(PROBE_TIMEOUT, context.settings.connect_timeout)
    try:
        session = dial(record.address, offered(context, record.address), patience, patience)
        try:
            told = session.source()
        finally:
            session.close()
        fields = {name: told[name] for name in TOLD if name in told}
        living = Record.from_json({**record.to_json(), **fields}, record.address)
    except MxError as error:
        return replace(peer, answers=False, fault=error.what)
    if record.generation and living.generation != record.generation:
        fault = f"the record is of an earlier life ({record.generation}; {living.generation} answers there)"
        return replace(peer, answers=False, fault=fault)
    return replace(peer, sighting=replace(peer.sighting, record=living), answers=True)


def _compare(peer: Peer, wanted: Mapping[str, str], origin: Identity | None) -> Peer:
    offered = _by_kind(peer.record.identities)
    equal = next((kind for kind in KINDS if kind in wanted and wanted[kind] == offered.get(kind)), "")
    differs = "" if equal or not wanted else _difference(peer.record, offered, wanted, origin)
    return replace(peer, matches=equal, differs=differs)


def _by_kind(identities: Sequence[str]) -> dict[str, str]:
    return {kind: identity for identity in identities if (kind := kind_of(identity))}


def _difference(record: Record, offered: Mapping[str, str], wanted: Mapping[str, str], origin: Identity | None) -> str:
    if not offered:
        return "its identities are not known before it is asked"
    here = (origin and origin.weights) or {}
    if here and record.uri == here["uri"] and record.revision != here["revision"]:
        return f"revision differs ({record.revision[:REVISION]}, wanted {here['revision'][:REVISION]})"
    for kind in KINDS:
        if kind in offered and kind in wanted:
            return f"{kind} differs ({short(offered[kind])}, wanted {short(wanted[kind])})"
    return f"not comparable (it tells {' and '.join(offered)}, wanted {' and '.join(wanted)})"
