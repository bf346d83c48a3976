"""A safetensors file that was never written: how tensors in memory are described as one."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from mx_cli.model.holding import HOST, Alias, Extent, size_of

FILE = "model.safetensors"
ALIGN = 64
METADATA = "__metadata__"


@dataclass(frozen=True, slots=True)
class Run:
    """A tensor's bytes in memory."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    address: int
    device: int = HOST

    @property
    def size(self) -> int:
        return size_of(self.dtype, self.shape)

    @property
    def end(self) -> int:
        return self.address + self.size


@dataclass(frozen=True)
class Synthetic:
    """`header` are the file's first bytes; `runs` follow in this order, each at its place in `starts` (bytes of the file)."""

    header: bytes
    runs: tuple[Run, ...]
    starts: Mapping[str, int]
    aliases: Mapping[str, Alias]
    size: int

    def extents(self, header_address: int) -> list[Extent]:
        """Where the file's bytes lie, its header at `header_address`."""
        rows = [Extent(FILE, self.starts[run.name], run.size, run.address, run.device) for run in self.runs if run.size]
        return [Extent(FILE, 0, len(self.header), header_address), *rows]


def synthesize(tensors: Iterable[Run]) -> Synthetic:
    """One file of these tensors, in the order of their addresses, so that neighbours in memory are neighbours in it.

    Tensors whose bytes another one holds too become its aliases; of equal ones the first keeps its name, which is also the
    one that a checkpoint keeps. Those that overlap without one holding the other are put into a tensor of bytes of its own,
    under a name that no tensor has. Names must differ.
    """
    runs, aliases = _untie(sorted(tensors, key=lambda run: (run.device, run.address, -run.size)))
    header = header_of((run.name, run.dtype, run.shape, run.size) for run in runs)
    starts, at = {}, len(header)
    for run in runs:
        starts[run.name] = at
        at += run.size
    return Synthetic(header, tuple(runs), starts, aliases, at)


def header_of(
    tensors: Iterable[tuple[str, str, tuple[int, ...], int]], metadata: Mapping[str, str] | None = None
) -> bytes:
    """The first bytes of a safetensors file of (name, dtype, shape, bytes) rows, one behind the other: whatever lies aligned
    in memory does so in the file."""
    entries: dict[str, object] = {METADATA: dict(metadata)} if metadata else {}
    at = 0
    for name, dtype, shape, size in tensors:
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(entries, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % ALIGN)
    return len(text).to_bytes(8, "little") + text


def _untie(runs: Sequence[Run]) -> tuple[list[Run], dict[str, Alias]]:
    """Those that hold bytes of their own, and the aliases of the rest."""
    own = [run for run in runs if not run.size]
    aliases: dict[str, Alias] = {}
    names = {run.name for run in runs}
    for group in _overlapping([run for run in runs if run.size]):
        holder = group[0]
        end = max(run.end for run in group)
        if holder.end < end:
            name = f"{holder.name}+{len(group) - 1}"
            while name in names:
                name += "+"
            names.add(name)
            holder = Run(name, "U8", (end - holder.address,), holder.address, holder.device)
        own.append(holder)
        aliases |= {
            run.name: Alias(holder.name, run.address - holder.address, run.dtype, run.shape)
            for run in group
            if run is not holder
        }
    return own, aliases


def _overlapping(runs: Sequence[Run]) -> Iterable[list[Run]]:
    """Groups of runs, none empty, that share bytes; the first of each starts first, and of those that do is the longest."""
    group: list[Run] = []
    end = 0
    for run in runs:
        if group and run.device == group[0].device and run.address < end:
            group.append(run)
            end = max(end, run.end)
        else:
            if group:
                yield group
            group, end = [run], run.end
    if group:
        yield group
