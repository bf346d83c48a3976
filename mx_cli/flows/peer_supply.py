"""A prefetch from peers: their manifest is the listing, their bytes come first, and the origin stands in for them."""

from __future__ import annotations

from dataclasses import replace

from mx_cli.base.cancel import Stop
from mx_cli.base.errors import (
    AccessDenied,
    Incompatible,
    IntegrityError,
    NoPeer,
    NotFound,
    TransportFailed,
    Unreachable,
    UsageError,
)
from mx_cli.engine.many import Bell, Many, Member
from mx_cli.engine.ports import Source
from mx_cli.engine.verify import WholeDigest
from mx_cli.flows.context import Context, is_immutable
from mx_cli.flows.peering import Peering
from mx_cli.flows.refusals import telling
from mx_cli.flows.supply import FromOrigin
from mx_cli.model import identity
from mx_cli.model.holding import Holding
from mx_cli.model.manifest import Entry, Listing

NO_USE = (NoPeer, Incompatible, AccessDenied, TransportFailed, Unreachable, IntegrityError)
"""Errors after which peers are given up, and the origin is asked."""


class FromPeers:
    """See `Supply`. `origin` is None when only peers may be asked.

    With an immutable revision the peers are asked alone, so the origin may be away; a moving name is the origin's to
    resolve. `wait`: seconds to look for peers. `found` is a search that has succeeded already.
    """

    def __init__(
        self, context: Context, uri: str, revision: str, peering: Peering | None, origin: FromOrigin | None, wait: float
    ) -> None:
        self._context, self._origin, self._wait = context, origin, wait
        self.uri, self.revision = uri, revision
        self.peering = peering
        self._holding: Holding | None = None
        self._many: Many | None = None
        self._asked = False
        self._listed = revision
        self.reason = ""

    def listing(self, revision: str | None, stop: Stop) -> Listing:
        """The peers' where they can be asked, at first; the second time the origin's: the peers lack a part."""
        wanted = revision or self.revision
        if self._asked:
            self.reason = "they do not have all that is wanted"
            return self._vouched(self._from_origin(wanted or None, stop))
        if not is_immutable(self.uri, wanted):
            if self._origin is None:
                raise UsageError(
                    f"only the origin knows the newest revision ({self.uri}: peers are found by a revision that never moves)",
                    hint="--revision REVISION, as mx prefetch or mx serve printed it; or --from peer,origin",
                )
            listing = self._from_origin(wanted or None, stop)
            self._listed = listing.revision
            self._holding = self._search(listing.revision) if listing.revision else None
            return self._vouched(listing)
        self._asked = True
        self._holding = self._search(wanted)
        if self._holding is None:
            return self._from_origin(wanted, stop)
        self._listed = wanted
        return self._holding.listing()

    def read(self, entry: Entry, limit: int) -> bytes:
        text = self._holding.texts.get(entry.path) if self._holding else None
        record = self._holding.manifest.record(entry.path) if self._holding else None
        if text is not None and record is not None:
            data = text.encode()
            if WholeDigest.of(data) != record.xxh3:
                raise IntegrityError(f"{entry.path}: not what the peers' manifest says")
            return data
        if self._origin is None:
            raise NotFound(f"{entry.path}: no peer has it", hint="--from peer,origin")
        return self._origin.read(entry, limit)

    def open_source(self) -> Source:
        bell = Bell()
        members: list[Member] = []
        if self._holding is not None and self.peering is not None:
            try:
                members = self.peering.members(bell, [])
            except NO_USE as error:
                if self._origin is None:
                    raise
                self._leave_peers(error.what)
        if self._origin is not None:
            if not members:
                return self._origin.open_source()
            reader = self._origin.by_path(self._listed, self._context.stop)
            members.append(Member("origin", self._origin.lift(reader, bell.ring), reserve=True))
        self._many = Many(members, bell, telling(self._context))
        return self._many

    def close(self) -> None:
        """Closes the origin; the search for peers is its maker's, since grants may outlive the prefetch."""
        if self._origin:
            self._origin.close()

    def by_peer(self) -> dict[str, int]:
        """The bytes that each peer gave, by its address."""
        members = self._many.members if self._many else ()
        return {member.name: member.bytes for member in members if not member.reserve}

    def _from_origin(self, revision: str | None, stop: Stop) -> Listing:
        if self._origin is None:
            raise NoPeer(f"no peer holds {self.uri} ({self.reason or 'nobody was found'})", hint="--from peer,origin")
        return self._origin.listing(revision, stop)

    def _search(self, revision: str) -> Holding | None:
        """The holding of peers with this revision; None when there are none and the origin may be asked."""
        if self.peering is None:
            return None
        try:
            group = self.peering.group or self.peering.find(self._wait, [identity.of_origin(self.uri, revision).id])
            manifest = group.holding.manifest
            if (manifest.uri, manifest.revision) != (self.uri, revision):
                # A process that holds the tensors of a checkpoint has them in files of its own making.
                raise NoPeer(f"{group.peers[0].address} has these weights, but not in the files of {self.uri}")
            return group.holding
        except NO_USE as error:
            self.reason = error.what
            if self._origin is None:
                raise
            self._context.notice(f"{error.what}; asking the origin")
            return None

    def _leave_peers(self, why: str) -> None:
        self.reason = why
        self._holding = None
        self._context.notice(f"no peer is read: {why}; asking the origin")

    def _vouched(self, listing: Listing) -> Listing:
        """The origin's listing, with the peers' digests of the files that they have."""
        if self._holding is None:
            return listing
        records = {record.path: record for record in self._holding.manifest.files}
        files = []
        for entry in listing.files:
            record = records.get(entry.path)
            known = record is not None and record.size == entry.size
            files.append(replace(entry, digests={**entry.digests, "xxh3": record.xxh3}) if record and known else entry)
        return Listing(listing.uri, listing.revision, tuple(files), listing.ref)
