"""`mx status`: downloads in progress on this cache, and what earlier ones left; why a slow one is slow."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mx_cli.base import units
from mx_cli.cache.files import names, number_in
from mx_cli.cache.follow import Watch
from mx_cli.cache.inventory import resumable
from mx_cli.cache.layout import Model
from mx_cli.cache.lease import Lease, View
from mx_cli.flows.context import Context

LOOK_EVERY = 0.1
SHORTEST = 0.5
RECENT = 60.0


@dataclass(frozen=True, slots=True)
class Download:
    """One revision's download. Bytes, bytes a second, seconds; None = not known.

    `state`: leading; silent = no sign of life while we looked; dead = its process is gone; left = stopped, and
    `resumable` bytes are there; failed. `alive`: seconds since the last sign of life that this process saw.
    """

    uri: str
    revision: str
    leader: str
    term: int
    state: str
    phase: str = ""
    bytes_done: int = 0
    bytes_total: int | None = None
    rate: float | None = None
    eta: float | None = None
    alive: float | None = None
    resumable: int = 0
    retries: int = 0
    error: str = ""
    why: str = ""


class _Look:
    """One lease, looked at until it shows a sign of life."""

    def __init__(self, context: Context, model: Model, revision: str) -> None:
        self.model, self.revision = model, revision
        self.lease: Lease = context.lease(model, revision)
        self.watch = Watch(self.lease, context.settings.ttl)
        self.first: View = self.watch.look()
        self._beat = context.settings.beat
        self._began = time.monotonic()
        self.note: Mapping[str, Any] = {}
        self.dead = self.led and self.lease.surely_dead(self.first.term)
        self._read_note()

    @property
    def view(self) -> View:
        return self.watch.view

    @property
    def led(self) -> bool:
        view = self.view
        return bool(view.term) and not view.left and not view.failed

    @property
    def changed(self) -> bool:
        return self.view.sign != self.first.sign

    @property
    def interval(self) -> float:
        """Seconds between two beats, as the leader says."""
        return number_in(self.note, "interval") or self._beat

    @property
    def decided(self) -> bool:
        """Whether looking longer would tell nothing new: a living leader beats within its interval."""
        waited = time.monotonic() - self._began
        limit = SHORTEST if self.changed else 1.5 * self.interval + SHORTEST
        return not self.led or self.dead or waited > limit

    def again(self) -> None:
        self.watch.look()
        self._read_note()

    def _read_note(self) -> None:
        # Between the listing and the reading a newer note may have taken its place.
        self.note = self.lease.note(self.view.note) or self.note


def downloads(context: Context) -> list[Download]:
    """Looks at every lease until each leader showed a sign of life or should have: about two beats. Writes nothing."""
    looks = [
        _Look(context, model, revision)
        for model in context.cache().all_models()
        for revision in sorted(names(model.path / "lease"))
    ]
    while not all(look.decided for look in looks):
        context.stop.wait(LOOK_EVERY)
        for look in looks:
            if not look.decided:
                look.again()
    found = (_describe(look, context.settings.ttl) for look in looks if look.view.term)
    return [download for download in found if download]


def _describe(look: _Look, ttl: float) -> Download | None:
    view, lease = look.view, look.lease
    kept = 0 if look.led and not look.dead else resumable(look.model, look.revision)
    if view.left and not kept:
        return None
    common: dict[str, Any] = {
        "uri": look.model.uri,
        "revision": look.revision,
        "leader": lease.leader(view.term),
        "term": view.term,
        "bytes_done": view.bytes_done,
        "bytes_total": int(number_in(look.note, "total")) if look.note.get("total") is not None else None,
        "retries": int(number_in(look.note, "retries")),
        "resumable": kept,
    }
    if view.failed:
        failure = lease.failure(view.term)
        at = lease.failed_at(view.term)
        ago = f"{units.duration(max(0.0, time.time() - at))} ago, " if at else ""
        return Download(**common, state="failed", error=failure.name, why=f"{ago}{failure.name}: {failure.what}")
    if view.left:
        why = f"stopped; mx prefetch {look.model.uri} goes on from {units.size(kept)}"
        return Download(**common, state="left", why=why)
    return _active(look, ttl, common)


def _active(look: _Look, ttl: float, common: dict[str, Any]) -> Download:
    view, note = look.view, look.note
    state = "dead" if look.dead else "leading" if look.changed else "silent"
    rate = _rate(look) if state == "leading" else None
    total = common["bytes_total"]
    return Download(
        **common,
        state=state,
        phase=str(note.get("phase", "start")),
        rate=rate,
        eta=(total - view.bytes_done) / rate if rate and total is not None else None,
        alive=None if look.dead else round(look.watch.silent_for, 1),
        error=str(note.get("error", "")),
        why=_why(look, state, rate, ttl),
    )


def _rate(look: _Look) -> float | None:
    """Bytes a second: measured over the beats that were seen, else between two by the leader's own interval."""
    if look.watch.rate:
        return look.watch.rate
    beats = look.view.seq - look.first.seq
    if look.view.term != look.first.term or beats <= 0 or look.first.seq < 0:
        return None
    return max(0, look.view.bytes_done - look.first.bytes_done) / (beats * look.interval)


def _why(look: _Look, state: str, rate: float | None, ttl: float) -> str:
    """One line about what is slow or stopped; empty when nothing is."""
    note, now = look.note, time.time()
    if state == "dead":
        return "its process is gone; the next mx prefetch goes on at once"
    if (left := number_in(note, "throttled_until") - now) > 0:
        return f"throttled: the origin asked to be left alone for {units.duration(left)} more{_said(note)}"
    if state == "silent":
        seen = units.duration(look.watch.silent_for)
        return f"no sign of life for {seen} of looking; after {units.duration(ttl)} another may lead{_said(note)}"
    if note.get("retries") and now - number_in(note, "error_at") < RECENT:
        return f"retrying ({note['retries']} times so far){_said(note)}"
    if rate == 0 and note.get("phase") == "transfer":
        return "bytes come too slowly: no block was finished while we looked"
    return ""


def _said(note: Mapping[str, Any]) -> str:
    return f"; last: {note.get('error')}: {note.get('message')}" if note.get("error") else ""
