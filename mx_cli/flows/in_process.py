"""Weights of a running process, offered to peers from where they lie."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mx_cli.base.errors import UsageError
from mx_cli.flows.context import Context, is_immutable
from mx_cli.flows.cuts import cut_of
from mx_cli.flows.described import Described, Named, describe_holding
from mx_cli.flows.from_python import process_context
from mx_cli.flows.open_memory import network, new_agent, opened
from mx_cli.flows.serving import Offer, Serving
from mx_cli.model import hf_config
from mx_cli.model import layout as model_layout
from mx_cli.model.holding import HOST, Extent
from mx_cli.plan.ranges import merge_regions
from mx_cli.sinks.torch_tensors import require_torch
from mx_cli.transport.held import CopyOut, InMemory
from mx_cli.transport.nixl import Agent
from mx_cli.transport.nixl_env import RDMA_DEVICES

UPDATE_WAIT = 30.0
CLOSE_WAIT = 1.0


class Handle:
    """A peer made of this process's tensors; a context manager. References are held until it is closed.

    `address`, `generation`, `version` and `identities` (kind -> id) say how readers find it.
    """

    def __init__(
        self, source: Any, context: Context, offer: Offer, named: Named, all_buffers: bool, *, publish: bool = True
    ) -> None:
        self._source, self._context, self._named, self._all_buffers = source, context, named, all_buffers
        self._pid = os.getpid()
        self._changing = threading.RLock()
        self._updating = False
        self._agent: Agent | None = None
        self._regions: list[tuple[int, int, int]] = []
        self._serving = Serving(context, offer)
        try:
            described = describe_holding(source, named, 0, all_buffers)
            self._serving.offer(described.holding, self._held(described), publish=publish)
        except BaseException:
            self._release()
            raise

    @property
    def address(self) -> str:
        return self._serving.address

    @property
    def generation(self) -> str:
        return self._serving.generation

    @property
    def version(self) -> int:
        holding = self._serving.holding
        return holding.version if holding else 0

    @property
    def identities(self) -> dict[str, str]:
        holding = self._serving.holding
        return {one.kind: one.id for one in holding.identities} if holding else {}

    def publish(self) -> None:
        """List it in discovery, if it was made without. Blocks for a moment; idempotent."""
        self._serving.publish()

    @property
    def counts(self) -> dict[str, int]:
        """How many parameters, buffers and tied names are offered."""
        holding = self._serving.holding
        kinds = list(holding.kinds.values()) if holding else []
        tied = len(holding.aliases) if holding else 0
        return {"parameter": kinds.count("parameter"), "buffer": kinds.count("buffer"), "tied": tied}

    @contextlib.contextmanager
    def update(self, wait: float = UPDATE_WAIT) -> Iterator[None]:
        """The weights may change while the block runs: no reader is let in, and present ones get `wait` seconds to end.

        The grants of slower readers are ended: either they verify the bytes of the old version, or their pull fails.
        Afterwards everything is hashed again as the next version, also after an error in the block.
        Blocks, also while another thread updates. Raises UsageError for a handle that is closed, and for an update within
        an update; and what `serve` raises for tensors: then nobody reads until another update succeeds.
        """
        if os.getpid() != self._pid:
            raise UsageError("this handle is of the process that this one was forked from", hint="serve again")
        with self._changing:
            if self._source is None:
                raise UsageError("this handle is closed", hint="serve again")
            if self._updating:
                raise UsageError("an update within an update")
            self._updating = True
            control = self._serving.control
            control.pause()
            try:
                if late := control.grants.wait_empty(wait):
                    self._context.warn(f"{len(late)} readers were sent away for an update")
                    control.revoke()
                yield
            finally:
                self._updating = False
                if self._source is not None:
                    described = describe_holding(self._source, self._named, self.version + 1, self._all_buffers)
                    self._serving.renew(described.holding, self._held(described))
                    control.resume()

    def close(self) -> None:
        """Give present readers a moment, then stop serving and drop all references to the weights. Idempotent.

        In a forked child it does nothing: the process that serves goes on.
        """
        if os.getpid() != self._pid:
            return
        with self._changing:
            if self._source is not None:
                self._serving.drain(CLOSE_WAIT)
                self._release()

    def _release(self) -> None:
        self._source = None
        self._serving.close()
        self._close_agent()

    def __enter__(self) -> Handle:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _held(self, described: Described) -> InMemory:
        devices = sorted({extent.device for extent in described.extents})
        gpu = [device for device in devices if device != HOST]
        copies: dict[int, CopyOut] = {}
        if gpu:
            from mx_cli.transport.on_gpu import copy_out

            copies = {device: copy_out(device) for device in gpu}

        def copy(extent: Extent, view: memoryview) -> None:
            copies[extent.device](extent, view)

        name = f"cuda:{gpu[0]}" if gpu else "cpu"
        return InMemory(name, described.extents, described.keep, self._registered(described, gpu), copy, lent=True)

    def _registered(self, described: Described, gpu: list[int]) -> Agent | None:
        """An agent for these runs of memory: the same as before where they have not moved."""
        from mx_cli.transport import cuda

        host = [(row.address, row.length, HOST) for row in described.extents if row.device == HOST]
        regions = merge_regions(host)
        for device in gpu:
            # Neighbouring blocks of cudaMalloc are never one region.
            found = cuda.allocations_of(row.address for row in described.extents if row.device == device)
            regions += [(block.address, block.length, device) for block in found]
        if self._agent is None or regions != self._regions:
            self._close_agent()
            # Without RDMA the agent is for this host alone: a reader over TCP could end this process.
            wanted = network(self._context, self.address, this_host=not RDMA_DEVICES.is_dir())
            # A name of its own for each: NIXL refuses other memory under an old name.
            name = f"{self.generation}-{described.holding.version}"
            self._agent = opened(new_agent(name, wanted, self._context, gpu=bool(gpu)), regions, self._context)
            self._regions = regions
        return self._agent

    def _close_agent(self) -> None:
        if self._agent is not None:
            self._agent.destroy()
            self._agent = None


def serve(
    source: Any,
    *,
    config: Any = None,
    stage: str | None = None,
    layout: Mapping[str, Any] | None = None,
    origin: tuple[str, str] | None = None,
    rank: str | None = None,
    rules: Any = None,
    whole: Mapping[str, Sequence[int]] | None = None,
    all_buffers: bool = False,
    listen: str = "127.0.0.1:0",
    advertise: str | None = None,
    max_readers: int = 4,
    name: str | None = None,
    **settings: Any,
) -> Handle:
    """Offer the tensors of a module, or of a mapping of tensors, modules and mappings, to peers; a context manager.

    Parameters and persistent buffers are offered where they lie, tied ones once; tensors that are scattered over memory
    are copied first. Change weights only inside of the handle's `update()`: what changes otherwise fails its digest at the
    reader. `all_buffers`: also buffers that a state dict leaves out. Threads of this process answer; nothing is forked.

    `listen`, `advertise`, `max_readers`, `name`: as in `mx serve`; others than this host's processes get in only with
    `peer_token_file` (a setting). `config`: the model's config.json (bytes, or what it holds), part of the content
    identity. `origin`: (URI, revision) that the weights are of. `stage`, and `layout` (tp, rank, dtype, …): as the options
    of `mx hash`, and the same identities. `settings`: as in `mx config`.

    `rank` (r/n, from 0): the tensors are this rank's part of whole ones, by `rules` as in `load`. Readers of any parallel
    size find all ranks of the set by the `origin`, which is needed then, and must give `rank` too: `pull(URI, rank=...)`.
    `whole`: the shapes of whole tensors that the rules cannot tell from a rank's own (a vocabulary that does not divide).

    Blocks while the weights are hashed (0.1 s a GB). Raises UsageError for tensors without bytes of their own, for a part
    that no rank can have, and for addresses as `mx serve` does; MissingCapability without torch.
    """
    require_torch()
    context = process_context(settings)
    uri, revision = _origin(origin)
    if not isinstance(max_readers, int) or max_readers < 1:
        raise UsageError(f"not a number of readers: {max_readers!r}")
    known = _config(config)
    if rank is None and (rules is not None or whole):
        raise UsageError("rules without a rank")
    if rank is not None and not (uri and revision):
        raise UsageError(
            "a rank without an origin: nothing says which ranks belong together", hint="origin=(URI, revision)"
        )
    cut = None if rank is None else cut_of(rank, rules, lambda: known)
    shapes = {name: tuple(shape) for name, shape in (whole or {}).items()}
    stage, layout = model_layout.layout(stage, layout or {})
    uri = context.origin(uri).uri if uri else ""
    if revision and not is_immutable(uri, revision):
        raise UsageError(
            f"origin {uri}: {revision!r} is a moving name, and says of no weights which they are",
            hint="give the commit",
        )
    named = Named(known, stage, layout, uri, revision, cut, shapes)
    offer = Offer(listen, advertise, max_readers, name)
    return Handle(source, context, offer, named, all_buffers)


def _origin(origin: Any) -> tuple[str, str]:
    if origin is None:
        return "", ""
    if not (isinstance(origin, (tuple, list)) and len(origin) == 2 and all(isinstance(one, str) for one in origin)):
        raise UsageError(f"not an origin: {origin!r}", hint="origin=(URI, revision)")
    return origin[0], origin[1]


def _config(config: Any) -> dict[str, Any] | None:
    if config is None:
        return None
    if isinstance(config, Mapping):
        import json

        try:
            config = json.dumps(dict(config)).encode()
        except (TypeError, ValueError) as error:
            raise UsageError(f"config is not what a config.json can hold ({error})") from None
    if not isinstance(config, bytes):
        raise UsageError(
            f"config is neither bytes nor a mapping ({type(config).__name__})", hint="config.to_dict() makes one"
        )
    return hf_config.load(config, "config")
