"""A running peer: the control channel, what it holds, and its record in discovery."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import secrets
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mx_cli.base.address import join_address, split_address
from mx_cli.base.errors import MxError, NotFound, Unreachable, UsageError
from mx_cli.base.interfaces import reachable
from mx_cli.base.version import VERSION
from mx_cli.discovery.beating import Beating
from mx_cli.flows import trust
from mx_cli.flows.context import Context
from mx_cli.flows.packs import with_packs
from mx_cli.model.holding import Holding
from mx_cli.model.record import LOADING, SERVING, Record
from mx_cli.transport.control import Control, is_data
from mx_cli.transport.door import Door
from mx_cli.transport.held import Held
from mx_cli.transport.host import host_facts
from mx_cli.transport.listen import listen
from mx_cli.transport.nixl_env import RDMA_DEVICES
from mx_cli.transport.secret import load_certificate, make_certificate

SLOTS = 4


@dataclass(frozen=True)
class Offer:
    """How a peer shows itself. `listen` is HOST:PORT, `advertise` HOST[:PORT]; `slots` readers at once; `name` outlives a restart."""

    listen: str = "127.0.0.1:0"
    advertise: str | None = None
    slots: int = SLOTS
    name: str | None = None
    tls_cert: Path | None = None
    tls_key: Path | None = None


def new_generation() -> str:
    """The name of one life of a peer: unique, since NIXL refuses a restarted agent under an old name."""
    return f"mx-{socket.gethostname()[:40]}-{os.getpid()}-{secrets.token_hex(6)}"


_lives: dict[str, int] = {}


def own_generations() -> frozenset[str]:
    """The peers that live in this process, and not in one that it was forked from: nobody finds itself as a source."""
    return frozenset(generation for generation, pid in _lives.items() if pid == os.getpid())


class Serving:
    """One peer. It answers from the start; `offer` makes it ready, and shows it in discovery. `close` always.

    Raises UsageError for an address that is taken or that nobody may be let in by, MissingCapability without a way to
    make a certificate.
    """

    def __init__(self, context: Context, offer: Offer) -> None:
        self._context, self._offer = context, offer
        self.generation = new_generation()
        self.holding: Holding | None = None
        self._held: Held | None = None
        self._beating: Beating | None = None
        self._started = time.time()
        self._lost: set[str] = set()
        self._ending = threading.Lock()
        self._closed = False
        split_address(offer.listen, option="--listen")
        known = trust.accepted(context, offer.listen)
        if offer.tls_key and not offer.tls_cert:
            raise UsageError("--tls-key without --tls-cert")
        certificate = load_certificate(offer.tls_cert, offer.tls_key) if offer.tls_cert else make_certificate()
        listener = listen(offer.listen)
        try:
            self.address = self._advertised(listener)
            self.control = Control(
                self, known, certificate.sha256, offer.slots, context.settings.grant_ttl, lambda: bool(self._beating)
            )
            self._door = Door(listener, certificate.context, self.control.handle, is_data, self._report, self._break)
            self._door.start()
        except BaseException:
            listener.close()
            raise
        _lives[self.generation] = os.getpid()

    # -- what the control channel asks ---------------------------------------------------------------------------

    def facts(self) -> dict[str, Any]:
        return {
            "device": self._held.device if self._held else "",
            "host": self._context.settings.node_name or socket.gethostname(),
            "pid": os.getpid(),
            "mx": VERSION,
            "started": self._started,
            "rdma": RDMA_DEVICES.is_dir(),
            "clock": time.time(),
            **host_facts(),
        }

    def access(self, reader: Mapping[str, Any]) -> dict[str, Any]:
        if self._held is None:
            raise Unreachable("this peer is loading its weights", retry_after=1.0)
        return self._held.access()

    def read(self, file: str, offset: int, length: int) -> Iterator[memoryview]:
        if self._held is None:
            raise NotFound(f"no such file here: {file}")
        with self._telling():
            pieces = self._held.read(file, offset, length)
        return self._read(pieces)

    def _read(self, pieces: Iterator[memoryview]) -> Iterator[memoryview]:
        with self._telling():
            yield from pieces

    @contextlib.contextmanager
    def _telling(self) -> Iterator[None]:
        """Warn once of each thing that readers could not have: they go elsewhere, and nobody would hear of it here."""
        try:
            yield
        except NotFound as error:
            if error.what not in self._lost:
                self._lost.add(error.what)
                self._context.warn(f"readers cannot have what is offered here: {error.what}")
            raise

    # -- the peer's life -----------------------------------------------------------------------------------------

    def offer(self, holding: Holding, held: Held, *, publish: bool = True) -> None:
        """From now on readers are let in, and discovery knows unless it is not to. Blocks for a moment."""
        holding = with_packs(holding, held)
        self.control.prepare(holding)
        self._held = held
        self.holding = holding
        if publish:
            self.publish()

    def publish(self) -> None:
        """From now on discovery knows, where it does not yet. Blocks for a moment; idempotent. UsageError once it is closed."""
        with self._ending:
            if self._closed:
                raise UsageError("this peer is closed", hint="serve again")
            if self._beating:
                return
            context = self._context
            beating = Beating(context.directory(), self.record, context.settings.record_beat, context.warn, self._break)
            try:
                beating.start()
            except BaseException:
                beating.close()
                raise
            self._beating = beating

    def renew(self, holding: Holding, held: Held | None = None) -> None:
        """The weights have changed: another version from now on."""
        holding = with_packs(holding, held or self._held)
        self.control.prepare(holding)
        self._held = held or self._held
        self.holding = holding
        if self._beating:
            self._beating.beat_now()

    def record(self) -> Record:
        """What discovery is to say now."""
        holding = self.holding
        known = self._offer.name or self.generation
        base = Record(
            known,
            self.generation,
            self.address,
            state=LOADING,
            slots=self._offer.slots,
            host=self._context.settings.node_name or socket.gethostname(),
            pid=os.getpid(),
            started=round(self._started, 3),
            mx=VERSION,
        )
        if holding is None:
            return base
        stage, rank = _stage_and_rank(holding)
        return Record(
            **{
                **{name: getattr(base, name) for name in Record.__slots__},
                "identities": tuple(identity.id for identity in holding.identities),
                "uri": holding.manifest.uri,
                "revision": holding.manifest.revision,
                "stage": stage,
                "rank": rank,
                "device": self._held.device if self._held else "",
                "size": sum(file.size for file in holding.manifest.files),
                "version": holding.version,
                "state": self.control.state if self.control.state != LOADING else SERVING,
                "readers": self.control.grants.readers,
            }
        )

    def _report(self, bug: Exception) -> None:
        self._context.warn(f"a bug in mx, in the answer to a reader: {type(bug).__name__}: {bug}")

    def _break(self, bug: BaseException) -> None:
        """After a bug in one of its threads the whole peer ends, and so does the command that waits for its stop."""
        error = MxError(f"a bug in mx, this peer ends: {type(bug).__name__}: {bug}")
        self._context.warn(error.what)
        self._context.stop.request(error)
        # The thread that breaks is one of those that `close` waits for.
        threading.Thread(target=self.close, name="peer-ends", daemon=True).start()

    def drain(self, seconds: float) -> list[str]:
        """Stop being listed first, then wait for the readers that are there. Those that were still reading, by name."""
        beating = self._beating
        if beating:
            beating.drain()
        late = self.control.drain(seconds)
        if beating:
            beating.close()
            self._beating = None
        return late

    def close(self) -> None:
        """End everything at once. Idempotent, from any thread."""
        with self._ending:
            self._closed = True
            _lives.pop(self.generation, None)
            if self._beating:
                self._beating.close()
                self._beating = None
            self.control.drain(0.0)
            self._door.close()
            if self._held:
                self._held.close()
                self._held = None

    def _advertised(self, listener: socket.socket) -> str:
        """The address for others. Of a listener on all addresses, the one that other machines reach this one by."""
        host, port = listener.getsockname()[:2]
        if self._offer.advertise:
            given, fixed = split_address(self._offer.advertise, port, option="--advertise")
            if given in ("0.0.0.0", "::"):
                raise UsageError(
                    f"--advertise {self._offer.advertise}: nobody can connect to that",
                    hint="name one address of this host, or leave it out",
                )
            return join_address(given, fixed or port)
        if host not in ("0.0.0.0", "::"):
            self._doubt(host)
            return join_address(host, port)
        try:
            found = reachable()
        except OSError as error:
            raise UsageError(
                f"cannot list this host's addresses ({error})", hint="give --advertise HOST:PORT"
            ) from None
        found = [one for one in found if ":" not in one.address or host == "::"]
        if not found:
            self._context.warn("this host has no address that others could reach; --advertise HOST:PORT names one")
            return join_address("127.0.0.1", port)
        best = found[0]
        others = ", ".join(f"{one.address} on {one.name}" for one in found[1:4])
        self._context.notice(
            f"advertised: {best.address} on {best.name}" + (f"; not {others} (--advertise chooses)" if others else "")
        )
        return join_address(best.address, port)

    def _doubt(self, host: str) -> None:
        """Raises UsageError, or warns, for a --listen address that other hosts cannot use."""
        listen, address = self._offer.listen, ipaddress.ip_address(host.partition("%")[0])
        if address.version == 6 and address.is_link_local:
            raise UsageError(
                f"--listen {listen}: a link-local address means nothing on other hosts",
                hint="--advertise HOST:PORT names one that they can reach",
            )
        if address.is_loopback and not trust.is_loopback(listen):
            self._context.warn(
                f"--listen {listen} is {host} here, which other hosts cannot reach (--listen 0.0.0.0:PORT is all addresses)"
            )


def _stage_and_rank(holding: Holding) -> tuple[str, str]:
    if holding.rank:
        return "loaded", holding.rank
    for identity in holding.identities:
        rank = identity.layout.get("rank")
        return identity.stage, "" if rank is None else str(rank)
    return "checkpoint", ""
