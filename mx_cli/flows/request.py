"""What a prefetch is asked for, and what it answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from mx_cli.base import units
from mx_cli.model.manifest import Manifest
from mx_cli.model.selection import is_weight
from mx_cli.model.shard_index import Index


@dataclass(frozen=True)
class Request:
    """`uri` as the user wrote it; `include` and `exclude` are globs, `everything` switches the default selection off.

    `sources`: peer, origin, or both; empty for peers only where discovery is set, and the origin.
    """

    uri: str
    revision: str | None = None
    version_id: str | None = None
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    everything: bool = False
    verify: bool = False
    pin: str | None = None
    to: Path | None = None
    link: Path | None = None
    result: Path | None = None
    hf_cache: Path | None = None
    sources: tuple[str, ...] = ()


@dataclass
class Clock:
    """Seconds of each phase. `fsync` is what threads waited for the disk, side by side with other phases."""

    resolve: float = 0.0
    wait: float = 0.0
    transfer: float = 0.0
    verify: float = 0.0
    publish: float = 0.0
    fsync: float = 0.0

    def to_json(self) -> dict[str, float]:
        return {name: round(value, 3) for name, value in self.phases().items()}

    def phases(self) -> dict[str, float]:
        """The phases that follow one another; their sum is the time of the whole."""
        return {name: value for name, value in vars(self).items() if name != "fsync"}


@dataclass(frozen=True)
class Outcome:
    """The answer of `mx prefetch`. `role` is leader, follower or hit; bytes and seconds as plain numbers."""

    uri: str
    revision: str
    identity: dict[str, str | None]
    directory: Path
    role: str
    bytes_total: int
    bytes_fetched: int
    bytes_reused: int
    files: int
    clock: Clock
    retries: int = 0

    def to_json(self) -> dict[str, Any]:
        return {
            "schema": 1,
            "uri": self.uri,
            "revision": self.revision,
            "identity": self.identity,
            "dir": str(self.directory),
            "role": self.role,
            "bytes_total": self.bytes_total,
            "bytes_fetched": self.bytes_fetched,
            "bytes_reused": self.bytes_reused,
            "files": self.files,
            "seconds": self.clock.to_json(),
            "fsync_seconds": round(self.clock.fsync, 3),
            "retries": self.retries,
        }

    def summary(self) -> str:
        """One line with bytes and seconds of each phase."""
        clock = self.clock
        phases = ", ".join(f"{name} {units.duration(value)}" for name, value in clock.phases().items() if value >= 0.05)
        moved = f"{units.size(self.bytes_fetched)} fetched, {units.size(self.bytes_reused)} reused"
        rate = f" at {units.rate(self.bytes_fetched / clock.transfer)}" if self.bytes_fetched and clock.transfer else ""
        again = f"; {self.retries} {'retry' if self.retries == 1 else 'retries'}" if self.retries else ""
        return (
            f"{self.role}: {units.count(self.files, 'file')}, {moved}{rate}" + (f"; {phases}" if phases else "") + again
        )


@dataclass(frozen=True)
class Preview:
    """The answer of a dry run: `files` holds (path, size, whether it is there)."""

    uri: str
    revision: str
    directory: Path
    files: tuple[tuple[str, int | None, bool], ...]
    skipped: str

    @property
    def missing(self) -> int:
        """Bytes that would be fetched."""
        return sum(size or 0 for _, size, there in self.files if not there)

    def to_json(self) -> dict[str, Any]:
        return {
            "schema": 1,
            "uri": self.uri,
            "revision": self.revision,
            "dir": str(self.directory),
            "bytes_total": sum(size or 0 for _, size, _ in self.files),
            "bytes_missing": self.missing,
            "files": [{"path": path, "size": size, "cached": there} for path, size, there in self.files],
            "skipped": self.skipped,
        }

    def text(self) -> str:
        rows = [
            f"{'there' if there else 'fetch'}  {'?' if size is None else units.size(size):>10}  {path}"
            for path, size, there in self.files
        ]
        total = units.size(sum(size or 0 for _, size, _ in self.files))
        head = [f"uri       {self.uri}", f"revision  {self.revision or 'unknown'}"]
        return "\n".join([*head, *rows, f"total {total}, to fetch {units.size(self.missing)}"])


@dataclass(frozen=True)
class Wanted:
    """A resolved selection: the files that make one usable model, or more when more was asked for.

    `prefixes` has the weight files of the model, each with the prefix of its tensors' names; `indexes` are the shard
    indexes that decided. `skipped` says in one line what was left out; empty when nothing was.
    """

    files: frozenset[str]
    prefixes: Mapping[str, str]
    indexes: tuple[Index, ...] = ()
    skipped: str = ""

    @cached_property
    def weights(self) -> frozenset[str]:
        """Every weight file among `files`, also those that the model does not need: an engine's glob would meet them."""
        return frozenset(self.prefixes) | {path for path in self.files if is_weight(path)}


@dataclass(frozen=True)
class Led:
    """What leading a term produced."""

    manifest: Manifest
    fetched: int
