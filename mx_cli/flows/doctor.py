"""`mx doctor`: one table of what this machine can do for mx, and what is wrong with it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mx_cli.base import machine, threads, units
from mx_cli.base.aside import Aside
from mx_cli.base.capability import FAIL, OK, WARN, Capability, judged
from mx_cli.base.config import FIELDS, SECRET
from mx_cli.cache import place
from mx_cli.discovery import survey as discovery
from mx_cli.engine.run import cores
from mx_cli.flows.context import Context
from mx_cli.sources import survey as sources
from mx_cli.transport import survey as transport

PATIENCE = 4.0
"""Seconds for a file system to answer."""
NIXL_PATIENCE = 15.0
ORIGIN_PATIENCE = 20.0


@dataclass(frozen=True)
class Report:
    """The rows, in the order in which they are shown."""

    rows: Sequence[Capability]

    def named(self, state: str) -> list[str]:
        """The rows in a state."""
        return [row.name for row in self.rows if row.state == state]

    def to_json(self) -> dict[str, Any]:
        return {
            "schema": 1,
            "failed": self.named(FAIL),
            "warned": self.named(WARN),
            "rows": [row.to_json() for row in self.rows],
        }


@dataclass(frozen=True)
class _Probe:
    """Rows that come from a process of their own. `hang`: what it means when they don't come."""

    aside: Aside
    names: Sequence[str]
    hang: str

    def rows(self, context: Context) -> list[Capability]:
        answers, why = self.aside.answers(context.stop.check)
        rows = [Capability.from_json(answer) for answer in answers]
        missing = self.names[len(rows) :] if why else ()
        for number, name in enumerate(missing):
            if number == 0:
                rows.append(Capability(name, FAIL, why, self.hang if self.aside.began else threads.HINT))
            else:
                rows.append(Capability(name, WARN, "not tried", f"first mend {missing[0]}"))
        return rows


def examine(context: Context, model: str | None, ranks: int) -> Report:
    """Every row, those of the `model` too where one is named: `ranks` processes of this machine share it.

    Blocks for a second or two, and no longer than a probe's patience whatever hangs. Writes nothing that it does not
    remove. Raises the stop's reason, UsageError without a place for the cache.
    """
    settings, root = context.settings, context.cache_root()
    chosen = {"settings": _as_text(context)}
    asked = {"text": settings.discovery, "root": str(root), "beat": settings.record_beat, "timeout": 2.0}
    mount = "the file system does not answer: look at its mount (findmnt) and at its server"
    library = "mx works without it: bytes of peers come by path socket"
    # The slowest first; all run at the same time.
    nixl = _Probe(Aside("mx_cli.transport.survey:nixl", {}, NIXL_PATIENCE), transport.NIXL_ROWS, library)
    gpus = _Probe(Aside("mx_cli.transport.survey:gpus", {}, NIXL_PATIENCE), transport.GPU_ROWS, library)
    disk = _Probe(Aside("mx_cli.cache.place:probe", {"root": str(root)}, PATIENCE), place.ROWS, mount)
    keys = _Probe(Aside("mx_cli.sources.survey:probe", chosen, PATIENCE), sources.ROWS, mount)
    peers = _Probe(Aside("mx_cli.discovery.survey:probe", asked, PATIENCE), discovery.ROWS, mount)
    wanted = _model_probe(model, chosen)
    rows = [*machine.versions(), transport.torch(), *gpus.rows(context), *nixl.rows(context)]
    rdma = transport.rdma()
    rows += [rdma, machine.network(), machine.shared_memory(), machine.locked_memory(bool(rdma.facts["ports"]))]
    rows += [*machine.memory_and_cpus(cores()), machine.huge_pages(), machine.open_files(), machine.io_uring()]
    rows += [*disk.rows(context), *keys.rows(context), *peers.rows(context), machine.clock()]
    if wanted:
        rows = _with_model(rows, wanted.rows(context), ranks)
    return Report(_without_nixl_failing(rows))


def _as_text(context: Context) -> dict[str, str]:
    """The settings for a process that has the same environment: no secret among them."""
    found: dict[str, str] = {}
    for name in FIELDS:
        value = getattr(context.settings, name)
        if value is not None and name not in SECRET and context.resolved.origins[name] != "default":
            found[name] = str(value).lower() if isinstance(value, bool) else str(value)
    return found


def _model_probe(model: str | None, chosen: Mapping[str, Any]) -> _Probe | None:
    if model is None:
        return None
    patience = PATIENCE if model.startswith(("/", ".", "~")) else ORIGIN_PATIENCE
    aside = Aside("mx_cli.flows.measure_model:probe", {"model": model, **chosen}, patience)
    return _Probe(aside, ("model",), "its origin, or the file system that it is on, does not answer")


def _without_nixl_failing(rows: Iterable[Capability]) -> list[Capability]:
    """What NIXL and GPUs lack, mx can do without: a library that crashes is a warning."""
    optional = (*transport.NIXL_ROWS, *transport.GPU_ROWS)
    return [dataclasses.replace(row, state=WARN) if row.name in optional and row.state == FAIL else row for row in rows]


def _with_model(rows: Sequence[Capability], found: Sequence[Capability], ranks: int) -> list[Capability]:
    """What the model needs, beside what there is: room in the cache, and memory for each rank."""
    by_name = {row.name: row for row in rows}
    size, missing = (int(found[0].facts.get(name, 0)) for name in ("bytes", "missing"))
    free = by_name["free space"].facts.get("free")
    if free is not None and missing > free:
        value = f"{units.size(free)}, {units.size(missing)} are to come"
        by_name["free space"] = by_name["free space"].failing(
            value, "mx cache gc, a larger volume, or another --cache-dir"
        )
    more = [_per_rank(size, ranks, by_name)] if size else []
    return [*(by_name[row.name] for row in rows), *found, *more]


def _per_rank(size: int, ranks: int, by_name: Mapping[str, Capability]) -> Capability:
    share = -(-size // ranks)
    gpus = by_name["gpus"].facts.get("gpus") or []
    host = int(by_name["memory"].facts["free"])
    room = min(one["bytes"] for one in gpus) if gpus else host // ranks
    place_of = f"each of {units.count(len(gpus), 'GPU')} has" if gpus else "free for each:"
    value = f"{units.size(share)} a rank ({units.count(ranks, 'rank')}); {place_of} {units.size(room)}"
    facts = {"bytes": share, "ranks": ranks, "room": room}
    fix = "more ranks (--ranks N), a smaller dtype, or a machine with more memory"
    if gpus and ranks > len(gpus):
        return Capability(
            "memory per rank", WARN, f"{value}; more ranks than GPUs", "--ranks is for this machine", facts
        )
    return judged("memory per rank", share <= room, value, fix, otherwise=FAIL, facts=facts)


def summary(report: Report) -> str:
    """One line."""
    failed, warned = report.named(FAIL), report.named(WARN)
    good = sum(row.state == OK for row in report.rows)
    parts = [f"{good} ok", f"{len(warned)} warn", f"{len(failed)} fail" + (f" ({', '.join(failed)})" if failed else "")]
    return ", ".join(parts)
