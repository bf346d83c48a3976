"""Tells what a leader is doing, a few times a second, from a thread of its own."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from mx_cli.base.events import Progress
from mx_cli.engine.meter import Meter
from mx_cli.flows.context import Context

INTERVAL = 0.25


class Metered(Protocol):
    @property
    def meter(self) -> Meter: ...


@contextmanager
def watching(context: Context, work: Metered) -> Iterator[None]:
    """While the block runs, emit a Progress every INTERVAL seconds, and a last one at its end."""
    ended = threading.Event()

    def show() -> None:
        # Before the work knows how much it is, there is nothing to show.
        if work.meter.files_total:
            context.emit(snapshot(work.meter))

    def tell() -> None:
        while not ended.wait(INTERVAL):
            show()

    thread = threading.Thread(target=tell, name="progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        show()


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
