"""A directory of peers in memory, with a clock and faults on command: the port's other adapter, for fast tests."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

from mx_cli.base.cancel import Stop
from mx_cli.base.errors import MxError, UsageError
from mx_cli.base.process import is_gone, start_time
from mx_cli.model.record import Record, Sighting

LISTED, KEPT = 3, 10


@dataclass
class MemoryDirectory:
    """See the port `Directory`. `now` moves only when the test moves it; `fault` is raised by whatever is asked."""

    beat_every: float = 15.0
    now: float = 1000.0
    fault: MxError | None = None
    kept: dict[str, tuple[Record, float, str]] = field(default_factory=dict)
    calls: list[tuple[str, Record]] = field(default_factory=list)
    changed: threading.Condition = field(default_factory=threading.Condition)

    def __str__(self) -> str:
        return "memory:"

    def publish(self, record: Record) -> None:
        self._put("publish", record)

    def beat(self, record: Record) -> None:
        self._put("beat", record)

    def remove(self, record: Record) -> None:
        with self.changed:
            self._called("remove", record)
            if record.name in self.kept and self.kept[record.name][0].generation == record.generation:
                del self.kept[record.name]

    def sightings(self, stop: Stop) -> list[Sighting]:
        stop.check()
        with self.changed:
            ages = {name: self.now - written for name, (_, written, _) in self.kept.items()}
            for name, age in ages.items():
                if age > KEPT * self.beat_every:
                    del self.kept[name]
            return [
                Sighting(record, ages[name], ages[name] > LISTED * self.beat_every)
                for name, (record, _, _) in self.kept.items()
            ]

    def records(self, stop: Stop) -> list[Record]:
        return [sighting.record for sighting in self.sightings(stop) if not sighting.stale]

    def reason(self) -> str:
        return "" if self.records(Stop()) else "no living peer in memory"

    def _put(self, what: str, record: Record) -> None:
        with self.changed:
            self._called(what, record)
            if record.name in self.kept:
                other, written, start = self.kept[record.name]
                stale = self.now - written > LISTED * self.beat_every
                predecessor = what == "publish" and other.host == record.host and is_gone(other.pid, start)
                if other.generation != record.generation and not stale and not predecessor:
                    raise UsageError(f"another peer has this name and lives ({other.generation}, {record.generation})")
            self.kept[record.name] = record, self.now, start_time(record.pid)

    def _called(self, what: str, record: Record) -> None:
        self.calls.append((what, record))
        self.changed.notify_all()
        if self.fault:
            raise self.fault
