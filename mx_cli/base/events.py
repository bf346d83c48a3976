"""Everything that can be observed while mx works, as data. `cli.render` turns it into text, bars or JSON lines."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar


@dataclass(frozen=True)
class Event:
    """Base class: `level` is debug, info or warning; fields are plain JSON values (bytes and seconds as numbers)."""

    level: ClassVar[str] = "info"
    verbosity: ClassVar[int] = 0
    """How many -v it takes to see it."""

    def text(self) -> str:
        """One line for people."""
        raise NotImplementedError

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @property
    def event(self) -> str:
        return type(self).__name__.lower()


Emit = Callable[[Event], None]


@dataclass(frozen=True)
class Notice(Event):
    """Something worth a line; nothing is wrong."""

    message: str

    def text(self) -> str:
        return self.message


@dataclass(frozen=True)
class Detail(Event):
    """A decision, and why: shown with -v."""

    level: ClassVar[str] = "debug"
    verbosity: ClassVar[int] = 1
    message: str

    def text(self) -> str:
        return self.message


@dataclass(frozen=True)
class Requested(Event):
    """One request and its answer: shown with -vv."""

    level: ClassVar[str] = "debug"
    verbosity: ClassVar[int] = 2
    method: str
    url: str
    piece: str
    status: int
    seconds: float

    def text(self) -> str:
        piece = f" {self.piece}" if self.piece else ""
        return f"{self.method} {self.url}{piece}: {self.status} in {self.seconds:.3f} s"


@dataclass(frozen=True)
class Warned(Event):
    """Something is wrong but the work goes on; `--strict` turns it into exit code 3."""

    level: ClassVar[str] = "warning"
    message: str

    def text(self) -> str:
        return f"warning: {self.message}"


@dataclass(frozen=True)
class Retried(Event):
    """A request failed and is tried again in `delay` seconds."""

    level: ClassVar[str] = "warning"
    what: str
    error: str
    delay: float
    attempt: int

    def text(self) -> str:
        return f"retry {self.attempt} of {self.what} in {self.delay:.1f} s: {self.error}"


@dataclass(frozen=True)
class Progress(Event):
    """A snapshot of the work: bytes done of total, by whom (`leader` empty = this process), how alive (seconds ago).

    More done than the total: some sizes are not known. `broke_off`: nothing more will come, and it is not all.
    """

    phase: str
    bytes_done: int
    bytes_total: int
    rate: float
    files_done: int = 0
    files_total: int = 0
    workers: int = 0
    leader: str = ""
    alive: float | None = None
    current: tuple[tuple[str, int, int], ...] = ()
    broke_off: bool = False

    def text(self) -> str:
        from mx_cli.base import units

        done, total = units.size(self.bytes_done), units.size(self.bytes_total)
        known = self.bytes_total and self.bytes_done <= self.bytes_total
        line = f"{100 * self.bytes_done // self.bytes_total:3d} %  {done} of {total}" if known else done
        # Where nothing moves over the network, no rate is no news.
        if self.rate or self.phase == "transfer":
            line += f"  {units.rate(self.rate)}"
        if self.leader:
            alive = "" if self.alive is None else f"  (alive {self.alive:.0f} s ago)"
            return f"following {self.leader}  {line}{alive}"
        # The first per cent says nothing about the rest.
        begun = known and self.bytes_done * 100 >= self.bytes_total
        left = (self.bytes_total - self.bytes_done) / self.rate if self.rate and begun else 0
        files = f"  {self.files_done}/{self.files_total} files" if self.files_total else ""
        return f"{self.phase}  {line}{files}" + (f"  {units.duration(left)} left" if left >= 1 else "")
