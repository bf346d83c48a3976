"""Which path a peer's bytes take: `nixl-read` where memory can be read directly, else `socket`; and why."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mx_cli.base.address import peer_address
from mx_cli.base.errors import IntegrityError, MissingCapability, StillLanding, TransportFailed, UsageError
from mx_cli.engine.run import cores
from mx_cli.flows.context import Context
from mx_cli.flows.serving import new_generation
from mx_cli.model.holding import HOST
from mx_cli.transport.host import host_facts, share_memory
from mx_cli.transport.nixl_env import RDMA_DEVICES
from mx_cli.transport.paths import NixlRead, Socket, extents_of
from mx_cli.transport.peer import Path
from mx_cli.transport.session import Grant, Session

PATHS = ("auto", "nixl-read", "socket")
REQUIREMENTS = ("rdma", "encrypted")
LEAST_SOCKETS, MOST_SOCKETS = 2, 8
MOST_AGENTS = 4
WORTH_AN_AGENT = 512 << 20
"""Bytes of a peer from which another agent (50 ms) saves more time than it takes."""
PROBE_TIMEOUT = 5.0


@dataclass(frozen=True)
class Wish:
    """`peers`: addresses to use instead of discovery. `path`: one of PATHS. `require`: of REQUIREMENTS."""

    peers: tuple[str, ...] = ()
    path: str = "auto"
    require: frozenset[str] = frozenset()

    def check(self) -> None:
        """Raises UsageError for words that mean nothing, or contradict each other."""
        for address in self.peers:
            peer_address(str(address), option="--peer")
        if self.path not in PATHS:
            raise UsageError(f"not a path (--path {self.path}: expected {', '.join(PATHS)})")
        if unknown := sorted(self.require - set(REQUIREMENTS)):
            raise UsageError(f"not a requirement (--require {','.join(unknown)}: expected {', '.join(REQUIREMENTS)})")
        if "encrypted" in self.require and (self.path == "nixl-read" or "rdma" in self.require):
            raise UsageError("--require encrypted: only path socket is encrypted", hint="leave --path or rdma out")
        if "rdma" in self.require and self.path == "socket":
            raise UsageError("--require rdma: not by path socket", hint="leave --path out")


def open_path(
    context: Context,
    session: Session,
    grant: Grant,
    facts: Mapping[str, Any],
    wish: Wish,
    regions: Sequence[tuple[int, int, int]],
) -> tuple[Path, str, str]:
    """(the path, its name, why this one). Blocks for a probe of some seconds at most.

    Raises MissingCapability when --require or --path wants what cannot be had, TransportFailed.
    """
    why_not = _why_not_nixl(session, grant, facts, wish)
    if not why_not:
        try:
            return _nixl(context, session, grant, wish, regions)
        except StillLanding:
            raise
        except (TransportFailed, MissingCapability, IntegrityError) as error:
            why_not = error.what
    if wish.path == "nixl-read" or "rdma" in wish.require:
        raise MissingCapability(
            f"{session.address}: path nixl-read is wanted, and cannot be had ({why_not})",
            hint="without --path and --require, mx takes the best path that there is",
        )
    if "socket" not in grant.access.get("paths", ()):
        raise TransportFailed(f"{session.address}: it offers no path that can be used here ({why_not})")

    def opens(file: str, offset: int, length: int) -> Any:
        return session.open(file, offset, length, grant)

    return Socket(opens, sockets()), "socket", why_not


def sockets() -> int:
    """TLS is work for a core: more connections than cores only get in each other's way."""
    return max(LEAST_SOCKETS, min(MOST_SOCKETS, cores()))


def agents_at_once() -> int:
    """Agents that read at once, where the kernel copies."""
    return min(MOST_AGENTS, cores())


def reads() -> int:
    """READs at once, of one peer, at most: while some are made, what has landed is verified."""
    return agents_at_once() + 1


def _why_not_nixl(session: Session, grant: Grant, facts: Mapping[str, Any], wish: Wish) -> str:
    """Empty when the path nixl-read is worth trying."""
    if "encrypted" in wish.require:
        return "NIXL's bytes are not encrypted (--require encrypted)"
    if wish.path == "socket":
        return "--path socket"
    if "nixl-read" not in grant.access.get("paths", ()):
        if facts.get("device") == "file":
            return "the peer serves from disk"
        return f"the peer offers only {', '.join(grant.access.get('paths', ())) or 'nothing'}"
    from mx_cli.transport.nixl import missing, ucx_version

    if reason := missing():
        return reason
    capability = grant.access.get("nixl")
    if not isinstance(capability, dict):
        return "the peer does not say how its memory is reached"
    theirs = str(capability.get("ucx", ""))
    if theirs != ucx_version():
        return f"UCX here is {ucx_version() or 'unknown'}, there {theirs or 'unknown'}"
    near = share_memory(host_facts(), facts)
    has_rdma = RDMA_DEVICES.is_dir() and bool(facts.get("rdma"))
    if "rdma" in wish.require and not has_rdma:
        return "no RDMA device on both sides (--require rdma)"
    if not near and not has_rdma and wish.path != "nixl-read":
        return "another host, and no RDMA: READs over TCP are emulated, and can end the source"
    return ""


def _nixl(
    context: Context,
    session: Session,
    grant: Grant,
    wish: Wish,
    regions: Sequence[tuple[int, int, int]],
) -> tuple[Path, str, str]:
    from mx_cli.flows.open_memory import network
    from mx_cli.transport.nixl import Agent

    wanted = network(context, session.address)
    capability = grant.access["nixl"]
    gpu = any(row[2] != HOST for row in regions) or any(row.device != HOST for row in extents_of(capability))

    def make() -> Agent:
        return Agent(new_generation(), wanted, gpu=gpu, trace=True)

    first = make()
    try:
        path = NixlRead(first, capability, regions, reads())
    except BaseException:
        first.destroy()
        raise
    try:
        found = path.probe(PROBE_TIMEOUT, context.stop.wait)
        if "rdma" in wish.require and not found.rdma:
            raise TransportFailed(f"the READ went by {found.path or 'another way'}, not by RDMA")
        if found.emulated and wish.path != "nixl-read":
            raise TransportFailed(f"READs are emulated ({found.path}): they can end the source")
        if found.copied_by_kernel:
            path.use_agents([make() for _ in range(1, agents_at_once() if path.size >= WORTH_AN_AGENT else 1)])
    except BaseException:
        path.close()
        raise
    return path, "nixl-read", f"{found.path or 'by UCX'}, {found.bytes_per_second / 1e9:.1f} GB/s probed"
