"""Tells what a leader is doing, a few times a second, from a thread of its own."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from mx_cli.base.events import Progress
from mx_cli.base.threads import begin
from mx_cli.engine.meter import Meter
from mx_cli.flows.context import Context

INTERVAL = 0.25


class Metered(Protocol):
    @property
    def meter(self) -> Meter: ...


@contextmanager
def watching(context: Context, work: Metered) -> Iterator[None]:
    """While the block runs, emit a Progress every INTERVAL seconds, and a last one at its end: how far it came."""
    ended = threading.Event()

    def show(*, broke_off: bool = False) -> None:
        # Before the work knows how much it is, there is nothing to show.
        if work.meter.files_total:
            context.emit(dataclasses.replace(snapshot(work.meter), broke_off=broke_off))

    def tell() -> None:
        while not ended.wait(INTERVAL):
            show()

    thread = threading.Thread(target=tell, name="progress", daemon=True)
    begin(thread)
    broke_off = True
    try:
        yield
        broke_off = False
    finally:
        ended.set()
        thread.join()
        show(broke_off=broke_off)


def snapshot(meter: Meter) -> Progress:
    return Progress(
        meter.phase,
        meter.done,
        meter.total,
        meter.rate(),
        files_done=meter.files_done,
        files_total=meter.files_total,
        workers=meter.workers,
        current=meter.current,
    )
