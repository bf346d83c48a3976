"""Measures the connection between two hosts before weights depend on it: one side listens, the other one dials it."""

from __future__ import annotations

import dataclasses
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import xxhash

from mx_cli.base import machine, units
from mx_cli.base.address import peer_address, split_address
from mx_cli.base.capability import FAIL, OK, WARN, Capability, judged
from mx_cli.base.errors import AccessDenied, MissingCapability, MxError, TransportFailed
from mx_cli.base.interfaces import interface_of, source_address
from mx_cli.base.version import VERSION
from mx_cli.engine.buffers import Pool
from mx_cli.engine.many import Bell, Member
from mx_cli.flows import trust
from mx_cli.flows.context import Context
from mx_cli.flows.data_path import Wish, open_path
from mx_cli.flows.doctor import Report
from mx_cli.flows.open_memory import network, new_agent, opened
from mx_cli.flows.pull_memory import move
from mx_cli.flows.serve import serve_until_stopped
from mx_cli.flows.serving import Offer, Serving
from mx_cli.model.holding import HOST, Extent, Holding, start_key
from mx_cli.model.manifest import BLOCK, FileRecord, Manifest
from mx_cli.transport.held import InMemory
from mx_cli.transport.host import host_facts, share_memory
from mx_cli.transport.nixl_env import INSTALL, RDMA_DEVICES
from mx_cli.transport.peer import PeerSource
from mx_cli.transport.session import Grant, Queued, Session, dial

SIZE = 64 << 20
"""Bytes that the listening side offers."""
MOST = 256 << 20
"""Bytes that are read of a peer with real weights."""
FILE = "doctor.bin"
PATIENCE = 3.0
"""Seconds for a connection, here and back."""
ROUNDS = 5
SKEW = 2.0
DRAIN = 5.0


class Listening(Serving):
    """The listening side: a peer that serves test bytes, is listed in no directory, and dials its readers back."""

    def __init__(self, context: Context, offer: Offer) -> None:
        super().__init__(context, offer)
        self._pool = Pool(SIZE)
        held = _held(self._pool, self, context)
        self.offer(_holding(self._pool), held, publish=False)

    def facts(self) -> dict[str, Any]:
        host, _ = split_address(self.address)
        return {**super().facts(), **_own_versions(), "mtu": _mtu_of(host), "doctor": True}

    def access(self, reader: Mapping[str, Any]) -> dict[str, Any]:
        """Also dials the reader back where it says that it listens, which may block for some seconds."""
        address = str(reader.get("address", ""))
        host, version = (ascii(str(reader.get(name, "?"))[:64])[1:-1] for name in ("host", "mx"))
        self._context.notice(f"asked by {host}, which runs mx {version}")
        return {**super().access(reader), "back": _dialled(self._context, address) if address else None}


def wait_for_readers(
    context: Context, listen: str, advertise: str | None, on_ready: Callable[[dict[str, Any]], None]
) -> None:
    """Blocks until told to stop, and raises the stop's reason. Raises what a `mx serve` at this address would raise."""
    listening = Listening(context, Offer(listen=listen, advertise=advertise))
    try:
        context.notice(f"on the other host: mx doctor --peer {listening.address} --peer-token-file FILE")
        on_ready({"schema": 1, "address": listening.address, "generation": listening.generation, "bytes": SIZE})
        serve_until_stopped(listening, DRAIN, context)
    finally:
        listening.close()


def measure(context: Context, address: str, listen: str | None, advertise: str | None) -> Report:
    """Rows about the connection to the host at `address`. With `listen` the other side dials back.

    Blocks for some seconds: every step has its limit. Raises UsageError for an address or a secret that cannot be.
    """
    peer_address(address, option="--peer")
    listening = Listening(context, Offer(listen=listen, advertise=advertise)) if listen else None
    try:
        return Report(_measured(context, address, listening.address if listening else ""))
    finally:
        if listening:
            listening.close()


# --- what is offered ---------------------------------------------------------------------------------------------


def _holding(pool: Pool) -> Holding:
    """The pool as one file with one tensor, whose blocks differ."""
    whole, blocks = xxhash.xxh3_128(), []
    for at in range(0, SIZE, BLOCK):
        view = pool.view[at : at + BLOCK]
        view[:] = (at // BLOCK).to_bytes(8, "little") * (BLOCK // 8)
        whole.update(view)
        blocks.append(xxhash.xxh3_128_hexdigest(view))
    row = (FILE, "doctor", "U8", (SIZE,), tuple(blocks))
    record = FileRecord(FILE, SIZE, whole.hexdigest())
    manifest = Manifest("", "", "", 0, "", (record,), (FILE,), (row,))
    return Holding(manifest, (), {start_key(FILE, "doctor"): 0})


def _held(pool: Pool, serving: Serving, context: Context) -> InMemory:
    agent = new_agent(serving.generation, network(context, serving.address), context, trace=True)
    agent = opened(agent, [(pool.address, pool.size, HOST)], context)
    return InMemory("cpu", [Extent(FILE, 0, SIZE, pool.address)], pool, agent)


def _own_versions() -> dict[str, Any]:
    from mx_cli.transport.nixl import ucx_version, version

    return {"mx": VERSION, "nixl": version(), "ucx": ucx_version()}


def _dialled(context: Context, address: str) -> dict[str, Any]:
    """The result of dialling a reader back, which has to prove that it knows the secret too."""
    started = time.monotonic()
    try:
        session = dial(address, trust.offered(context, address), PATIENCE, PATIENCE)
        try:
            session.source()
        finally:
            session.close()
    except MxError as error:
        return {"address": address, "fault": error.what}
    return {"address": address, "fault": "", "seconds": round(time.monotonic() - started, 4)}


# --- what is measured --------------------------------------------------------------------------------------------


def _measured(context: Context, address: str, own: str) -> list[Capability]:
    offered = trust.offered(context, address)
    started = time.monotonic()
    try:
        session = dial(address, offered, min(PATIENCE, context.settings.connect_timeout), PATIENCE)
    except MxError as error:
        return [_unreachable(address, error)]
    try:
        rows = [
            Capability("reachable", OK, f"{address}, {_milliseconds(time.monotonic() - started)} with TLS and proof")
        ]
        try:
            rows += _of_session(context, session, own)
        except MxError as error:
            rows.append(Capability("peer", FAIL, error.what, error.hint or "try again"))
        return rows
    finally:
        session.close()


def _unreachable(address: str, error: MxError) -> Capability:
    if isinstance(error, AccessDenied):
        return Capability("reachable", FAIL, error.what, "give both sides the same --peer-token-file")
    fix = f"on the other host: mx doctor --listen {address}; open this port in firewalls and network policies"
    return Capability("reachable", FAIL, error.what, fix)


def _of_session(context: Context, session: Session, own: str) -> list[Capability]:
    facts, trip, difference = _facts(session)
    holding = session.holding()
    reader = {"host": socket.gethostname(), **host_facts(), **_own_versions(), "address": own}
    grant = session.grant(reader)
    if isinstance(grant, Queued):
        fault = f"{session.address}: all its slots are taken ({grant.position} wait before this one)"
        raise TransportFailed(fault, hint="wait, or mx serve --max-readers N")
    try:
        return [
            _back(grant.access.get("back"), own),
            _versions(facts),
            _clock(trip, difference),
            _route(session.address, facts),
            _mtu(session.address, facts),
            *_reads(context, session, grant, facts, holding),
        ]
    finally:
        grant.release()


def _facts(session: Session) -> tuple[dict[str, Any], float, float]:
    """What the peer says of itself; seconds for a round trip; seconds that its clock is ahead of this one's."""
    best: tuple[dict[str, Any], float, float] | None = None
    for _ in range(ROUNDS):
        before, started = time.time(), time.perf_counter()
        facts = session.source()
        trip = time.perf_counter() - started
        if best is None or trip < best[1]:
            best = facts, trip, float(facts.get("clock", before)) - before - trip / 2
    assert best is not None
    return best


def _back(back: Mapping[str, Any] | None, own: str) -> Capability:
    if not own:
        value = "not tried: only --then-serve and training jobs need it"
        return Capability("back", OK, value, facts={"tried": False})
    if back is None:
        return Capability("back", WARN, "the peer does not dial back", "mx doctor --listen on the other host does")
    if back["fault"]:
        fix = f"open {own} in this host's firewall, or name another address with --advertise"
        return Capability("back", FAIL, str(back["fault"]), fix, {"tried": True, **back})
    value = f"{own}, {_milliseconds(float(back['seconds']))} with TLS and proof"
    return Capability("back", OK, value, facts={"tried": True, **back})


def _versions(facts: Mapping[str, Any]) -> Capability:
    here = _own_versions()
    there = {name: str(facts.get(name, "?")) for name in here}
    differ = [name for name in here if there[name] not in ("?", here[name])]
    shown = ", ".join(f"{name} {here[name] or 'none'} here, {there[name] or 'none'} there" for name in here)
    fix = f"install the same on both sides ({INSTALL}): with another UCX memory is not read directly"
    return judged("versions", not differ, shown, fix, facts={"here": here, "there": there})


def _clock(trip: float, difference: float) -> Capability:
    value = f"{difference:+.3f} s there, round trip {_milliseconds(trip)}"
    facts = {"difference": round(difference, 4), "round_trip": round(trip, 6)}
    return judged("clock", abs(difference) <= SKEW, value, "run chrony or systemd-timesyncd on both hosts", facts=facts)


def _route(address: str, facts: Mapping[str, Any]) -> Capability:
    """From which address of this host packets leave, and whether both sides have RDMA."""
    here = source_address(*split_address(address))
    name = interface_of(here)
    rdma = RDMA_DEVICES.is_dir(), bool(facts.get("rdma"))
    near = share_memory(host_facts(), facts)
    sides = {(True, True): "RDMA on both sides", (False, False): "no RDMA on either side"}
    how = "the same host" if near else sides.get(rdma, "RDMA on one side only")
    told = {"interface": name, "address": here, "rdma": list(rdma), "same_host": near}
    value = f"{here} on {name or '?'} to {address}; {how}"
    return judged("route", near or rdma[0] == rdma[1], value, "give the other side its RDMA devices", facts=told)


def _mtu(address: str, facts: Mapping[str, Any]) -> Capability:
    here, there = machine.mtu(interface_of(source_address(*split_address(address)))), int(facts.get("mtu", 0))
    told = {"here": here, "there": there}
    if not there:
        return Capability("mtu", OK, f"{here} here, not told there", facts=told)
    fix = "set the same MTU on both sides, and on what lies between: large packets vanish otherwise"
    return judged("mtu", here == there, f"{here} here, {there} there", fix, facts=told)


def _reads(
    context: Context, session: Session, grant: Grant, facts: Mapping[str, Any], holding: Holding
) -> list[Capability]:
    """A row for each path, measured where it works, and a verdict that names the path that weights would take."""
    nixl, why = _read(context, session, grant, facts, holding, "nixl-read")
    plain, fault = _read(context, session, grant, facts, holding, "socket")
    if plain is None:
        return [Capability("socket", FAIL, fault, "see the rows above")]
    socket_row = Capability("socket", OK, f"{units.rate(plain)}, TLS, verified", facts={"rate": round(plain)})
    if nixl is not None:
        row = Capability("nixl-read", OK, f"{units.rate(nixl)}, verified ({why})", facts={"rate": round(nixl)})
        verdict = Capability("verdict", OK, f"memory is read directly, by nixl-read ({why})")
        return [row, socket_row, verdict]
    row = Capability("nixl-read", WARN, why, _remedy(facts), {"rate": None})
    value = f"TCP fallback: bytes come by path socket at {units.rate(plain)}, since {why}"
    return [row, socket_row, Capability("verdict", WARN, value, _remedy(facts), {"path": "socket"})]


def _remedy(facts: Mapping[str, Any]) -> str:
    from mx_cli.transport.nixl import missing, ucx_version

    if missing():
        return f"on this host: {INSTALL}"
    if facts.get("ucx") == "":
        return f"on the other host: {INSTALL}"
    if facts.get("device") == "file":
        return "mx serve --device cpu (or cuda) holds the weights in memory"
    if facts.get("ucx") not in (None, ucx_version()):
        return "install the same nixl on both sides"
    if not RDMA_DEVICES.is_dir() or not facts.get("rdma"):
        return "RDMA devices on both hosts (InfiniBand, RoCE, EFA); containers need /dev/infiniband and memlock"
    return "--interface names the network of the RDMA devices; UCX_LOG_LEVEL=info shows what UCX says"


def _read(
    context: Context, session: Session, grant: Grant, facts: Mapping[str, Any], holding: Holding, name: str
) -> tuple[float | None, str]:
    """(bytes a second, how) of one path; (None, why not). Every byte is compared with its digest."""
    size, targets = _targets(holding)
    pool = Pool(size)
    extents = [row._replace(address=pool.address + row.address) for row in targets]
    # `auto` knows when READs would be emulated, and does not try them then.
    wish = Wish(path="socket" if name == "socket" else "auto")
    try:
        path, taken, why = open_path(context, session, grant, facts, wish, [(pool.address, pool.size, HOST)])
    except (TransportFailed, MissingCapability) as error:
        return None, error.what
    if taken != name:
        path.close()
        return None, why
    bell = Bell()
    source = PeerSource(session.address, holding, path, bell.ring, lambda: grant.failure)
    quiet = dataclasses.replace(context, emit=lambda event: None)
    try:
        moved = move(holding, extents, [Member(session.address, source, silence=PATIENCE)], bell, quiet, pool)
    except MxError as error:
        return None, error.what
    return moved.bytes / max(moved.seconds, 1e-9), why


def _targets(holding: Holding) -> tuple[int, Sequence[Extent]]:
    """(bytes, where they go): the tensors of the holding, up to MOST bytes; whole blocks of the last one."""
    rows: list[Extent] = []
    at = 0
    for tensor in holding.tensors:
        length = min(tensor.size, (MOST - at) // BLOCK * BLOCK)
        if length <= 0:
            break
        rows.append(Extent(tensor.file, tensor.start, length, at))
        at += -(-length // BLOCK) * BLOCK
    if not rows:
        raise TransportFailed("the peer holds no tensors to read")
    return at, rows


def _mtu_of(host: str) -> int:
    try:
        known = socket.gethostbyname(host) if ":" not in host else host
    except OSError:
        return 0
    return machine.mtu(interface_of(known))


def _milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:.1f} ms"
