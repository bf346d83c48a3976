"""The bytes of extents, wherever they lie."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from mx_cli.model.holding import HOST, Extent


def views(extents: Iterable[Extent]) -> Iterator[memoryview]:
    """The bytes of extents in host memory, in their order; those of a GPU are copied piece by piece."""
    from mx_cli.engine.buffers import STEP, at_address

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
