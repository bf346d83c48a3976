"""`mx serve`: weights of this machine for other processes, from disk, host memory or GPU memory."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mx_cli.base import units
from mx_cli.base.errors import IntegrityError, MxError, UsageError
from mx_cli.base.oserrors import explain
from mx_cli.engine.buffers import Pool
from mx_cli.engine.verify import WholeDigest, read_through
from mx_cli.flows.context import Context
from mx_cli.flows.hash import is_local
from mx_cli.flows.holdings import local_holding
from mx_cli.flows.open_memory import network, new_agent, opened
from mx_cli.flows.prefetch import prefetch
from mx_cli.flows.pull import Pull, PullOutcome, PullRequest
from mx_cli.flows.request import Request
from mx_cli.flows.serving import Offer, Serving
from mx_cli.model.holding import HOST, Extent, Holding
from mx_cli.transport.held import Held, InMemory, OnDisk

ALIGN = 4096


@dataclass(frozen=True)
class ServeRequest:
    """`model`: a directory, a weight file or a URI; `device`: file, cpu, cuda or cuda:N; `drain`: seconds for readers."""

    model: str
    offer: Offer
    revision: str | None = None
    device: str = "file"
    drain: float = 25.0


@dataclass(frozen=True)
class Ready:
    """What a peer says once it can be read."""

    address: str
    generation: str
    identities: dict[str, str]
    device: str
    uri: str
    revision: str
    paths: tuple[str, ...]
    files: int
    bytes: int

    def to_json(self) -> dict[str, Any]:
        return {
            "schema": 1,
            "address": self.address,
            "generation": self.generation,
            "pid": os.getpid(),
            "identity": self.identities,
            "device": self.device,
            "paths": list(self.paths),
            "uri": self.uri,
            "revision": self.revision,
            "files": self.files,
            "bytes": self.bytes,
        }


def serve(request: ServeRequest, context: Context, on_ready: Callable[[Ready], None]) -> None:
    """Blocks until it is told to stop; then drains and raises the stop's reason.

    The listener answers before the weights are loaded, so that a taken port is found at once and /livez works. Raises the
    MxErrors of what it loads, UsageError for what cannot be offered.
    """
    kind, index = _device(request.device)
    if kind == "cuda":
        # Before anything is fetched or hashed.
        from mx_cli.transport.on_gpu import require

        require(index)
    serving = Serving(context, request.offer)
    try:
        path = _local(request, context)
        holding = local_holding(path, context)
        held = _hold(kind, index, path, holding, serving, context)
        serving.offer(holding, held)
        on_ready(_ready(serving, holding, held))
        serve_until_stopped(serving, request.drain, context)
    finally:
        serving.close()


def serve_until_stopped(serving: Serving, drain: float, context: Context) -> None:
    """Blocks until told to stop, gives readers `drain` seconds to finish, and raises the stop's reason."""
    try:
        while True:
            context.stop.wait(3600.0)
    except MxError:
        late = serving.drain(drain)
        if late:
            context.warn(f"ended while {units.count(len(late), 'reader')} still read: {', '.join(late[:5])}")
        raise


def pull_then_serve(
    request: PullRequest, offer: Offer, drain: float, context: Context, on_done: Callable[[PullOutcome], None]
) -> None:
    """Pull, report the outcome, then serve the weights until told to stop. The sources are told of the new peer.

    The listener is there from the start, so a taken port is found before anything is pulled.
    """
    serving = Serving(context, offer)
    puller = Pull(request, context, serving.generation)
    try:
        outcome = puller.run()
        # The snapshot knows the origin of a directory that was filled from it.
        place = puller.snapshot_taken or outcome.directory
        holding = puller.holding or local_holding(place, context)
        serving.offer(holding, OnDisk(place, holding))
        puller.leave(serving.address, outcome.bytes_total)
        on_done(outcome)
        context.notice(f"serving at {serving.address} until stopped")
        serve_until_stopped(serving, drain, context)
    finally:
        puller.leave()
        serving.close()


def _device(text: str) -> tuple[str, int]:
    kind, colon, number = text.partition(":")
    if kind in ("file", "cpu") and not colon:
        return kind, HOST
    if kind == "cuda" and (not colon or number.isdecimal()):
        return kind, int(number or 0)
    raise UsageError(f"not a device (--device {text}: expected file, cpu, cuda or cuda:N)")


def _local(request: ServeRequest, context: Context) -> Path:
    if is_local(request.model):
        if request.revision is not None:
            raise UsageError(f"--revision is for a URI ({request.model} is a path)")
        return Path(request.model).expanduser().absolute()
    return prefetch(Request(request.model, revision=request.revision), context).directory


def _hold(kind: str, index: int, path: Path, holding: Holding, serving: Serving, context: Context) -> Held:
    directory = path if path.is_dir() else path.parent
    if kind == "file":
        return OnDisk(directory, holding)
    if kind == "cpu":
        return _in_pool(directory, holding, serving, context)
    return _on_gpu(index, directory, holding, serving, context)


def _in_pool(directory: Path, holding: Holding, serving: Serving, context: Context) -> Held:
    """All files in one run of huge pages, one extent each."""
    # Before the weights are read: it says what is wrong with the network's options.
    agent = new_agent(serving.generation, network(context, serving.address), context)
    extents, size = _in_one_block(holding, HOST)
    pool = Pool(size)
    extents = [extent._replace(address=pool.address + extent.address) for extent in extents]

    def place(at: int, view: memoryview) -> None:
        pool.view[at : at + len(view)] = view

    _load(directory, holding, place, context)
    agent = opened(agent, [(pool.address, pool.size, HOST)], context)
    return InMemory("cpu", extents, pool, agent)


def _on_gpu(index: int, directory: Path, holding: Holding, serving: Serving, context: Context) -> Held:
    """All files in one block of the GPU's memory, one extent each."""
    from mx_cli.transport import cuda, on_gpu

    extents, size = _in_one_block(holding, index)
    block = on_gpu.allocate(index, size)
    start = block.data_ptr()
    extents = [extent._replace(address=start + extent.address) for extent in extents]
    agent = new_agent(serving.generation, network(context, serving.address), context, gpu=True)
    _load(directory, holding, lambda at, view: on_gpu.copy_in(block, at, view), context)
    whole = cuda.allocation_of(start)
    agent = opened(agent, [(whole.address, whole.length, index)], context)
    return InMemory(f"cuda:{index}", extents, block, agent, on_gpu.copy_out(index))


def _in_one_block(holding: Holding, device: int) -> tuple[list[Extent], int]:
    """The files one after the other, each on a page of its own; addresses count from 0. And the bytes in all."""
    extents: list[Extent] = []
    size = 0
    for record in holding.manifest.files:
        extents.append(Extent(record.path, 0, record.size, size, device))
        size += -(-record.size // ALIGN) * ALIGN
    return extents, size


def _load(directory: Path, holding: Holding, place: Callable[[int, memoryview], None], context: Context) -> None:
    """Read every file once into its place, and compare it with the manifest. Raises IntegrityError."""
    for extent in _in_one_block(holding, HOST)[0]:
        record = holding.manifest.record(extent.file)
        whole, at = WholeDigest(), extent.address

        def take(view: memoryview, whole: WholeDigest = whole) -> None:
            nonlocal at
            context.stop.check()
            whole.update(view)
            place(at, view)
            at += len(view)

        path = directory / extent.file
        try:
            with open(path, "rb") as file:
                read_through(file.fileno(), take, 0, extent.length)
        except OSError as error:
            raise explain(error, f"reading {path}") from None
        whole.finish()
        if record is None or whole.value != record.xxh3:
            raise IntegrityError(f"{path} is not what its manifest says", hint="mx cache verify finds damage")


def _ready(serving: Serving, holding: Holding, held: Held) -> Ready:
    return Ready(
        address=serving.address,
        generation=serving.generation,
        identities={identity.kind: identity.id for identity in holding.identities},
        device=held.device,
        uri=holding.manifest.uri,
        revision=holding.manifest.revision,
        paths=tuple(held.access()["paths"]),
        files=len(holding.manifest.files),
        bytes=sum(record.size for record in holding.manifest.files),
    )
