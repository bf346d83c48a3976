"""The tensors of a running process as what a peer holds: one file that was never written, with its digests."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import xxhash

from mx_cli.base.errors import UsageError
from mx_cli.engine.buffers import STEP, at_address
from mx_cli.flows.cuts import Cut
from mx_cli.model import identity
from mx_cli.model.digest import TensorDigester
from mx_cli.model.holding import HOST, Extent, Holding, start_key
from mx_cli.model.identity import Identity
from mx_cli.model.manifest import FileRecord, Manifest, selection_digest
from mx_cli.model.selection import RULES_VERSION
from mx_cli.model.share import Share
from mx_cli.model.synthetic import FILE, Run, synthesize
from mx_cli.sinks.torch_tensors import Described as TorchTensor


@dataclass(frozen=True)
class Described:
    """What a process offers: the holding, where its bytes lie, and what keeps them there."""

    holding: Holding
    extents: list[Extent]
    keep: object


@dataclass(frozen=True)
class Named:
    """What the caller says about the weights: the arguments of `mx_cli.serve`."""

    config: dict[str, Any] | None = None
    stage: str = "checkpoint"
    layout: Mapping[str, Any] | None = None
    uri: str = ""
    revision: str = ""
    cut: Cut | None = None
    whole: Mapping[str, tuple[int, ...]] = field(default_factory=dict)


def describe_holding(source: Any, named: Named, version: int, all_buffers: bool = False) -> Described:
    """Hash everything, and describe it as one file. Blocks."""
    from mx_cli.sinks.torch_tensors import describe

    tensors = describe(source, all_buffers=all_buffers)
    found = synthesize(Run(t.name, t.dtype, t.shape, t.address, t.device) for t in tensors)
    header = memoryview(bytearray(found.header))
    extents = found.extents(ctypes.addressof(ctypes.c_char.from_buffer(header)))
    digester, whole = TensorDigester(FILE, found.size), xxhash.xxh3_128()
    for view in _views(extents):
        digester.update(view)
        whole.update(view)
    rows = digester.finish()
    record = FileRecord(FILE, found.size, whole.hexdigest())
    identities = _identities(named, rows)
    manifest = Manifest(
        uri="",
        revision="",
        selection=selection_digest([FILE]),
        rules=RULES_VERSION,
        directory="",
        files=(record,),
        weights=(FILE,),
        tensors=tuple((FILE, *row) for row in rows),
        identity={one.kind: one.id for one in identities},
    )
    starts = {start_key(FILE, name): start for name, start in found.starts.items()}
    kinds = {tensor.name: tensor.kind for tensor in tensors}
    shares = _shares(named, tensors)
    rank = named.cut.text if named.cut else ""
    holding = Holding(
        manifest, tuple(identities), starts, found.aliases, kinds, version=version, rank=rank, shares=shares
    )
    return Described(holding, extents, (header, [tensor.tensor for tensor in tensors], source))


def _views(extents: Iterable[Extent]) -> Iterator[memoryview]:
    """The bytes of extents in host memory, in their order; those of a GPU are copied piece by piece."""
    for extent in extents:
        copy = None
        if extent.device != HOST:
            from mx_cli.transport.on_gpu import copy_out

            copy = copy_out(extent.device)
        for at in range(0, extent.length, STEP * 4):
            length = min(STEP * 4, extent.length - at)
            if copy is None:
                yield at_address(extent.address + at, length)
                continue
            buffer = memoryview(bytearray(length))
            copy(extent._replace(address=extent.address + at, length=length), buffer)
            yield buffer


def _identities(named: Named, rows: Any) -> list[Identity]:
    known = [identity.of_content(rows, named.config, named.stage, named.layout)]
    if named.uri:
        origin = identity.of_origin(named.uri, named.revision, named.stage, named.layout)
        known.append(identity.of_shares(origin) if named.cut else origin)
    if named.config is not None:
        known.append(identity.of_config(named.config, named.stage, named.layout))
    return known


def _shares(named: Named, tensors: Iterable[TorchTensor]) -> dict[str, Share]:
    """The share of each tensor that is only a part of a whole one. Raises UsageError for a shape that no part has."""
    cut = named.cut
    if cut is None:
        return {}
    found = {}
    for tensor in tensors:
        if tensor.name in named.whole:
            share = cut.rules.share(tensor.name, named.whole[tensor.name], cut.rank, cut.ranks)
            if share.local_shape != tensor.shape:
                raise UsageError(
                    f"{tensor.name} {list(tensor.shape)} is not what rank {cut.text} has of {list(share.shape)}"
                )
        else:
            share = cut.rules.share_of_local(tensor.name, tensor.shape, cut.rank, cut.ranks)
        if not share.whole:
            found[tensor.name] = share
    return found
