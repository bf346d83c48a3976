"""Tensors that are the page cache's own pages: files that are in memory already are mapped, not copied."""

from __future__ import annotations

import itertools
import mmap
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import xxhash

from mx_cli.base import filesystem
from mx_cli.base.cancel import Stop
from mx_cli.base.errors import IntegrityError, OriginChanged
from mx_cli.base.oserrors import explain
from mx_cli.engine.run import cores
from mx_cli.engine.together import side_by_side
from mx_cli.flows.catalog import Catalog
from mx_cli.model.checks import Check
from mx_cli.model.holding import Holding, Tensor
from mx_cli.sinks.torch_tensors import alignment, bytes_of, tensor_of

WHOLE = 0.99
"""The part of a file that is in the page cache when it counts as being there."""


def mapped_tensors(found: Catalog, chosen: Sequence[Tensor], stop: Stop) -> dict[str, Any]:
    """The tensors of `chosen` (by file) that lie in cached files of this machine, at addresses that suit them.

    Pages are private: what is written to a tensor changes no file. What others write to the file may change a tensor, so
    this is for files that nobody writes to. Where digests are known they are compared. Blocks for that long. Raises
    IntegrityError, OriginChanged.
    """
    assert found.directory is not None, "a catalog of files on this machine"
    tensors: dict[str, Any] = {}
    for file, inside in itertools.groupby(chosen, key=lambda tensor: tensor.file):
        view = _map(found, file)
        if view is None:
            continue
        _verify(found.holding, file, view, stop)
        block = bytes_of(view)
        for tensor in inside:
            if tensor.start % alignment(tensor.dtype) == 0:
                tensors[tensor.name] = tensor_of(block, tensor.start, tensor.dtype, tensor.shape)
    return tensors


def _map(found: Catalog, file: str) -> memoryview | None:
    """The file's pages; None when some are not in memory."""
    assert found.directory is not None
    path: Path = found.directory / file
    record = found.holding.manifest.record(file)
    entry = found.entries.get(file)
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            status = os.fstat(fd)
            if entry and (status.st_size, filesystem.version(status)) != (entry.size, entry.validator):
                raise OriginChanged(f"{path}: the file changed since it was listed")
            if record is None or status.st_size != record.size:
                raise IntegrityError(f"{path}: {status.st_size} bytes, expected {record.size if record else 'no file'}")
            in_memory = filesystem.kind(fd) in filesystem.IN_MEMORY
            if not in_memory and filesystem.cached(fd, 0, status.st_size) < WHOLE * status.st_size:
                return None
            return memoryview(mmap.mmap(fd, 0, access=mmap.ACCESS_COPY))
        finally:
            os.close(fd)
    except OSError as error:
        raise explain(error, f"mapping {path}") from None


def _verify(holding: Holding, file: str, view: memoryview, stop: Stop) -> None:
    def compare(check: Check) -> None:
        observed = xxhash.xxh3_128_hexdigest(view[check.offset : check.end])
        if observed != check.expected:
            raise IntegrityError(
                f"wrong bytes in {file} (tensor {check.tensor}, block {check.block}: "
                f"expected {check.expected}, observed {observed})",
                hint="mx cache verify",
            )

    side_by_side(compare, holding.checks(file), cores(), stop)
