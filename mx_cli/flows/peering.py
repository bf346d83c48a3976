"""Finding peers that hold what is wanted: dialled in parallel, compared, and asked for a grant."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from mx_cli.base import units
from mx_cli.base.address import peer_address
from mx_cli.base.errors import (
    AccessDenied,
    FilesystemRefused,
    Incompatible,
    IntegrityError,
    MissingCapability,
    MxError,
    NoPeer,
    TransportFailed,
    UsageError,
)
from mx_cli.discovery.static import only_address
from mx_cli.engine.many import Bell, Member
from mx_cli.engine.together import side_by_side
from mx_cli.flows import trust
from mx_cli.flows.context import Context
from mx_cli.flows.data_path import Wish, open_path
from mx_cli.flows.group import Group, Peer, announced_holding, by_manifest, leave
from mx_cli.flows.refusals import SHOWN, Refusals, said
from mx_cli.flows.serving import own_generations
from mx_cli.model.holding import HOST
from mx_cli.model.identity import KINDS, kind_of
from mx_cli.model.record import SERVING, UNKNOWN, Record
from mx_cli.transport.host import host_facts, share_memory
from mx_cli.transport.peer import PeerSource
from mx_cli.transport.session import Queued, Session, dial

DIALS = 64
DIAL_TIMEOUT = 1.0
MOST_SOURCES = 4
LOOK_EVERY = 1.0
MORE_PEERS = (
    "--wait DURATION waits longer for a slot; mx serve --max-readers N, or mx pull --then-serve, makes more of them"
)

T = TypeVar("T")


class Peering:
    """The search for peers with one of the identities `wanted` (id strings). `close` always.

    `own` is the generation of this process's own peer, which is never a source for itself.
    """

    def __init__(self, context: Context, wanted: Sequence[str], wish: Wish, own: str = "") -> None:
        self._context, self._wish, self._own = context, wish, own
        self._wanted = [one for one in wanted if kind_of(one) not in (None, "config")]
        self._directory = context.directory()
        self._sessions: dict[str, Session] = {}
        self._changing = threading.Lock()
        self._closed = False
        self._lacking: MissingCapability | None = None
        self._compared = True
        self.refusals = Refusals()
        # Those that were found last, whose peers are read.
        self.groups: tuple[Group, ...] = ()
        # A peer that is silent must not hold up a command that was told to stop.
        self._hooks = contextlib.ExitStack()
        self._hooks.enter_context(context.stop.calling(self._interrupt))

    def _interrupt(self) -> None:
        for session in list(self._sessions.values()):
            session.interrupt()

    @property
    def group(self) -> Group | None:
        """What `find` found."""
        return self.groups[0] if self.groups else None

    def find(self, wait: float, wanted: Sequence[str] = ()) -> Group:
        """The largest group of peers that match, the least loaded and nearest first. Looks again for `wait` seconds.

        Blocks. Raises NoPeer when nobody matches in time, Incompatible when there are peers and all hold other weights,
        AccessDenied when nobody else is there than peers that refuse the secret, UsageError when there is no secret for a
        peer that was named.
        """
        self._wanted += [one for one in wanted if one not in self._wanted]
        return self._look_for(wait, self._largest)

    def _look_for(
        self, wait: float, choose: Callable[[list[Peer]], T | None], again: tuple[type[MxError], ...] = ()
    ) -> T:
        """What `choose` makes of the peers; while it is None, or `choose` raises one of `again`, look again for `wait` seconds.

        Blocks. Raises the last of `again`, what else `choose` raises, and what `find` raises when nobody matches.
        """
        end = time.monotonic() + wait
        while True:
            fault: MxError | None = None
            if peers := self._look():
                try:
                    if (found := choose(peers)) is not None:
                        return found
                except again as error:
                    fault = error
            left = end - time.monotonic()
            if left <= 0:
                raise fault or self._nobody(wait)
            self._context.stop.wait(min(LOOK_EVERY, left))

    def close(self, serving: str = "", verified: int = 0) -> None:
        """Give grants back and hang up. `serving`: where this process offers the `verified` bytes itself now. Idempotent."""
        if isinstance(sys.exception(), KeyboardInterrupt):
            # Who pressed Ctrl-C in Python waits for no farewell of a peer that is silent.
            self._interrupt()
        self._hooks.close()
        try:
            leave([peer for group in self.groups for peer in group.peers], serving, verified)
        finally:
            with self._changing:
                self._closed = True
                for session in self._sessions.values():
                    session.close()
                self._sessions.clear()

    # -- looking -------------------------------------------------------------------------------------------------

    def _look(self) -> list[Peer]:
        self.refusals = Refusals()
        found = self._dial_all(self._candidates())
        mine = host_facts()
        return sorted(found, key=lambda peer: (peer.load, not share_memory(mine, peer.facts), peer.address))

    def _candidates(self) -> list[Record]:
        named = [only_address(*peer_address(address)) for address in self._wish.peers]
        if named:
            return named
        try:
            known = self._directory.records(self._context.stop)
        except FilesystemRefused as error:
            # What the directory says is a hint, and there are other routes.
            self.refusals.unlisted = error.what
            return []
        records = [record for record in known if record.generation not in own_generations()]
        usable = []
        for record in records:
            why = self._left_out(record)
            if why:
                self.refusals.reasons[record.address] = why
            else:
                usable.append(record)
        return usable

    def _left_out(self, record: Record) -> str:
        """Why a record alone says that dialling is no use; empty when it may be."""
        if record.state not in (SERVING, UNKNOWN):
            return record.state
        if record.identities and not set(record.identities) & set(self._wanted):
            self.refusals.others |= set(record.identities)
            return "other weights"
        return ""

    def _dial_all(self, records: Iterable[Record]) -> list[Peer]:
        todo = {record.address: record for record in records}
        answers = side_by_side(self._dial, list(todo.values()), DIALS, self._context.stop)
        return [peer for peer in answers if peer is not None]

    def _dial(self, record: Record) -> Peer | None:
        try:
            session = self._session(record.address)
            facts = session.source()
            return self._compare(record, session, facts)
        except UsageError:
            if self._wish.peers:
                raise
            self.refusals.reasons[record.address] = "no secret to offer (--peer-token-file)"
        except MxError as error:
            if broken := self._sessions.pop(record.address, None):
                broken.close()
            self.refusals.reasons[record.address] = error.what
            if isinstance(error, AccessDenied):
                self.refusals.denied = error
        return None

    def _session(self, address: str) -> Session:
        session = self._sessions.get(address)
        if session is None:
            settings = self._context.settings
            secrets = trust.offered(self._context, address)
            timeout = settings.connect_timeout if self._wish.peers else DIAL_TIMEOUT
            session = dial(address, secrets, timeout, settings.peer_stall_timeout)
            with self._changing:
                if self._closed:
                    session.close()
                    raise TransportFailed(f"{address}: given up")
                self._sessions[address] = session
        return session

    def _compare(self, record: Record, session: Session, facts: Mapping[str, Any]) -> Peer | None:
        # Who names this process itself, in a notebook for instance, means it.
        if session.generation == self._own or (session.generation in own_generations() and not self._wish.peers):
            self.refusals.reasons[record.address] = "this process itself"
            return None
        identities = [str(one) for one in facts.get("identities", ())]
        matched = next((one for one in _strongest_first(self._wanted) if one in identities), "")
        if not matched:
            self.refusals.others |= set(identities)
            why = "other weights"
            if record.generation and record.generation != session.generation:
                why = f"another life than its record's ({session.generation}), with other weights"
            self.refusals.reasons[record.address] = why
            return None
        if facts.get("state") != SERVING:
            self.refusals.reasons[record.address] = str(facts.get("state"))
            return None
        return Peer(session, facts, matched)

    def _largest(self, peers: Sequence[Peer]) -> Group:
        """Peers of one manifest; others hold the same weights in other files."""
        errors: list[MxError] = []
        for members in sorted(by_manifest(peers).values(), key=lambda members: -len(members)):
            for peer in members:
                try:
                    holding = announced_holding(peer)
                    if holding.rank and kind_of(peer.matched) != "content":
                        # The identity is that of the set of all ranks, of which this one has a part.
                        raise Incompatible(
                            f"{peer.address} has only the part of rank {holding.rank}",
                            hint='mx_cli.pull(…, rank="0/1") reads a set of ranks',
                        )
                    self.groups = (Group(holding, members),)
                    return self.groups[0]
                except MxError as error:
                    errors.append(error)
                    self.refusals.reasons[peer.address] = error.what
        raise errors[0]

    def _nobody(self, wait: float) -> MxError:
        within = f" within {wait:g} s" if wait else ""
        wanted = " or ".join(self._wanted) or "nothing that identifies weights"
        if self.refusals.others and all("other weights" in why for why in self.refusals.reasons.values()):
            nearest = ", ".join(sorted(self.refusals.others)[:SHOWN])
            return Incompatible(
                f"no peer holds {wanted}{within} ({self.refusals.text()}; they hold {nearest})",
                hint="mx peers shows who holds what; mx hash MODEL --diff OTHER names the differing fields",
            )
        if self.refusals.denied:
            return AccessDenied(
                f"no peer lets this one in{within} ({self.refusals.text()})", hint=self.refusals.denied.hint
            )
        why = (
            self.refusals.text() or self.refusals.unlisted or self._directory.reason() or f"nobody in {self._directory}"
        )
        return NoPeer(f"no peer holds {wanted}{within} ({why})", hint="mx peers; mx serve MODEL makes one")

    # -- grants --------------------------------------------------------------------------------------------------

    def members(self, bell: Bell, regions: Sequence[tuple[int, int, int]], group: Group | None = None) -> list[Member]:
        """Sources of a group (None: of the one that `find` found), one for each grant that could be had, MOST_SOURCES at most. Waits in their queues.

        A queue moves, so it is waited in for --wait, or for as long as a failing origin is tried. `regions`: own memory
        that bytes will land in, (address, length, device). Raises NoPeer when no slot comes free, or no path can be had,
        MissingCapability when that is for want of what --require or --path asks for.
        """
        group = group or self.group
        assert group is not None, "find comes first"
        self._compared = all(device == HOST for _, _, device in regions)
        settings = self._context.settings
        end = time.monotonic() + (settings.wait or settings.retry_for)
        asked: set[str] = set()
        queued = False
        while True:
            pause = self._ask(group, asked)
            granted = [peer for peer in group.peers if peer.grant][:MOST_SOURCES]
            members = [member for peer in granted if (member := self._member(group, peer, bell, regions))]
            if members:
                for peer in group.peers:
                    if peer.path:
                        self._context.notice(f"from peer {peer.address} by {peer.path} ({peer.reason})")
                return members
            if pause == 0:
                continue
            left = end - time.monotonic()
            if left <= 0 or all(peer.reason for peer in group.peers):
                raise self._unreadable(group)
            if not queued:
                queued = True
                self._context.notice(f"no slot is free at {units.count(len(group.peers), 'peer')}; waiting for one")
            self._context.stop.wait(min(pause, left))

    def try_paths(self) -> None:
        """Ask once for slots and open paths: each peer's `path` and `reason` tell. Keeps nothing; blocks for seconds."""
        assert self.group is not None, "find comes first"
        self._ask(self.group, set())
        for peer in self.group.peers:
            if peer.grant and (member := self._member(self.group, peer, Bell(), [])):
                member.source.close()
            peer.reason = peer.reason or "no slot is free"

    def _unreadable(self, group: Group) -> MxError:
        why = "; ".join(said(peer.address, peer.reason or "no slot is free") for peer in group.peers[:SHOWN])
        what = f"no peer could be read ({why})"
        return MissingCapability(what, hint=self._lacking.hint) if self._lacking else NoPeer(what, hint=MORE_PEERS)

    def _ask(self, group: Group, asked: set[str]) -> float:
        """Ask those without a grant; meet the better peers that they name. Seconds until it is worth asking again."""
        pause = LOOK_EVERY
        reader = {"host": socket.gethostname(), "pid": os.getpid(), **host_facts()}
        better: list[str] = []
        crowded = False
        for peer in list(group.peers):
            # While others wait for a slot, a second one would make a third reader wait longer than it saves here.
            enough = 1 if crowded else MOST_SOURCES
            if peer.grant or peer.reason or sum(1 for one in group.peers if one.grant) >= enough:
                continue
            try:
                answer = peer.session.grant(reader)
            except MxError as error:
                peer.reason = error.what
                continue
            if isinstance(answer, Queued):
                crowded = True
                pause = min(pause, answer.retry_after)
                better += answer.better
            else:
                crowded = crowded or answer.queue > 0
                peer.grant = answer
        if any(peer.grant for peer in group.peers):
            for peer in group.peers:
                peer.session.leave_queue()
            return pause
        known = {peer.address for peer in group.peers} | asked
        fresh = [address for address in dict.fromkeys(better) if address not in known]
        asked.update(fresh)
        records = []
        for address in fresh:
            with contextlib.suppress(UsageError):
                records.append(only_address(*peer_address(address)))
        met = [peer for peer in self._dial_all(records) if peer.facts.get("manifest") == group.holding.digest]
        group.peers += met
        return 0.0 if met else pause

    def _member(self, group: Group, peer: Peer, bell: Bell, regions: Sequence[tuple[int, int, int]]) -> Member | None:
        assert peer.grant is not None
        grant = peer.grant
        try:
            path, peer.path, peer.reason = open_path(
                self._context, peer.session, grant, peer.facts, self._wish, regions
            )
        except UsageError:
            # The reader's own options are wrong, whoever the peer is.
            raise
        except MxError as error:
            # A probe that is told to stop is no failure of the peer.
            self._context.stop.check()
            peer.grant, peer.reason = None, error.what
            if isinstance(error, MissingCapability):
                self._lacking = error
            grant.release()
            return None
        source = PeerSource(peer.address, group.holding, path, bell.ring, lambda: grant.failure)
        peer.member = Member(peer.address, source, silence=self._context.settings.peer_stall_timeout)
        return peer.member

    def check_versions(self) -> None:
        """After the last byte: the weights are those of the manifest still. Raises IntegrityError for a torn read.

        A peer that failed on the way is not asked, and one that does not answer is passed over: what came from it was
        compared with the manifest block by block. Where bytes went into a GPU, every peer must answer, or its error is
        raised.
        """
        for group in self.groups:
            for peer in group.peers:
                if peer.member is None or (peer.member.failure and self._compared):
                    continue
                try:
                    facts = peer.session.source()
                except MxError:
                    if self._compared:
                        continue
                    raise
                if facts.get("version") != group.holding.version or facts.get("manifest") != group.holding.digest:
                    raise IntegrityError(f"{peer.address}: the weights changed while they were read")


def _strongest_first(identities: Iterable[str]) -> list[str]:
    order = list(KINDS)
    return sorted(identities, key=lambda one: order.index(kind_of(one) or order[-1]))
