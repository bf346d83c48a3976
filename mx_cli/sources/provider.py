"""Asking a provider's own library: it runs programs and waits for services, and neither may hold a command up."""

from __future__ import annotations

import contextlib
import glob
import json
import os
import queue
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from mx_cli.base import redact
from mx_cli.base.cancel import Stop
from mx_cli.base.threads import begin

PATIENCE = 60.0
"""Seconds for a program or a service to give credentials."""

T = TypeVar("T")


class Late(Exception):
    """There was no answer in time."""


def in_time(call: Callable[[], T], seconds: float, stop: Stop) -> T:
    """`call()`, in a thread that is left alone when it takes longer; the programs that it runs are ended then.

    Raises what it raises, Late, and the stop's reason.
    """
    news: queue.SimpleQueue[tuple[list[T], BaseException | None] | None] = queue.SimpleQueue()

    def ask() -> None:
        try:
            news.put(([call()], None))
        except BaseException as error:  # noqa: BLE001 - it is raised in the thread that waits
            news.put(([], error))

    asking = threading.Thread(target=ask, name="credentials", daemon=True)
    begin(asking)
    told = None

    def give_up() -> None:
        # At once: a second signal ends this process on the spot.
        _end_programs_of(asking)
        news.put(None)

    try:
        with stop.calling(give_up):
            told = news.get(timeout=seconds)
    except queue.Empty:
        raise Late(f"no answer in {seconds:g} s") from None
    finally:
        if told is None:
            _end_programs_of(asking)
    stop.check()
    assert told is not None, "None is put for a stop only"
    found, error = told
    if error is not None:
        raise error
    return found[0]


def _end_programs_of(thread: threading.Thread) -> None:
    """Kill what a thread has started, and what that has: all of it would outlive this process.

    They share our process group, so that they may ask for a password on the terminal: it is no handle to end them by.
    """
    stopped: set[int] = set()
    while started := set(_started_by(f"/proc/self/task/{thread.native_id}")) - stopped:
        for pid in started:
            # What is stopped starts nothing more.
            _signal(pid, signal.SIGSTOP)
        stopped |= started
    for pid in stopped:
        _signal(pid, signal.SIGKILL)


def _started_by(tasks: str) -> Iterator[int]:
    for path in glob.glob(f"{tasks}/children"):
        with contextlib.suppress(OSError):
            for pid in map(int, Path(path).read_text().split()):
                yield pid
                yield from _started_by(f"/proc/{pid}/task/*")


def _signal(pid: int, signum: signal.Signals) -> None:
    with contextlib.suppress(OSError):
        os.kill(pid, signum)


def said(error: BaseException) -> str:
    """What an error says, on one line, cut and without secrets."""
    if isinstance(error, EOFError):
        return "it asks for a code (mfa_serial), and there is no terminal to type it"
    words = redact.text(" ".join(str(error).split()))[:300] or type(error).__name__
    if isinstance(error, KeyError):
        return f"{words} is not in what it was given"
    if isinstance(error, (TypeError, AttributeError, json.JSONDecodeError)):
        return f"what it was given makes no sense ({words})"
    return words
