"""Asking a provider's own library: it runs programs and waits for services, and neither may hold a command up."""

from __future__ import annotations

import json
import queue
import threading
from collections.abc import Callable
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
    """`call()`, in a thread that is left alone when it takes longer. Raises what it raises, Late, and the stop's reason."""
    news: queue.SimpleQueue[tuple[list[T], BaseException | None] | None] = queue.SimpleQueue()

    def ask() -> None:
        try:
            news.put(([call()], None))
        except BaseException as error:  # noqa: BLE001 - it is raised in the thread that waits
            news.put(([], error))

    begin(threading.Thread(target=ask, name="credentials", daemon=True))
    with stop.calling(lambda: news.put(None)):
        try:
            told = news.get(timeout=seconds)
        except queue.Empty:
            raise Late(f"no answer in {seconds:g} s") from None
    stop.check()
    assert told is not None, "None is put for a stop only"
    found, error = told
    if error is not None:
        raise error
    return found[0]


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
