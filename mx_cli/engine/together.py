"""Blocking calls, several at a time: a stop or Ctrl-C reaches whoever waits for them at once."""

from __future__ import annotations

import queue
import signal
import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

from mx_cli.base.cancel import Stop
from mx_cli.base.errors import Interrupted
from mx_cli.base.threads import begin_some

T = TypeVar("T")
R = TypeVar("R")


def side_by_side(call: Callable[[T], R], things: Sequence[T], width: int, stop: Stop) -> list[R]:
    """`call` for each, `width` at a time in threads; results in order. Blocks.

    The first error is raised when those that had begun have ended. The stop's reason is raised at once, as is Ctrl-C in
    the thread that waits, which stops what `stop` stops: threads that still wait for an answer then are left alone.
    """
    if not things:
        return []
    todo: queue.SimpleQueue[int] = queue.SimpleQueue()
    for index in range(len(things)):
        todo.put(index)
    news: queue.SimpleQueue[tuple[int, list[R], BaseException | None] | None] = queue.SimpleQueue()
    over = threading.Event()

    def work() -> None:
        while not over.is_set():
            try:
                index = todo.get_nowait()
            except queue.Empty:
                break
            try:
                news.put((index, [call(things[index])], None))
            except BaseException as error:  # noqa: BLE001 - it is raised in the thread that waits
                news.put((index, [], error))
        news.put(None)

    found: dict[int, R] = {}
    errors: dict[int, BaseException] = {}
    numbers = range(min(width, len(things)))
    running = len(begin_some([threading.Thread(target=work, name=f"side-{n}", daemon=True) for n in numbers]))
    try:
        with stop.calling(lambda: news.put(None)):
            while running:
                told = news.get()
                stop.check()
                if told is None:
                    running -= 1
                    continue
                index, result, error = told
                if error is not None:
                    errors[index] = error
                    over.set()
                else:
                    found[index] = result[0]
    except KeyboardInterrupt:
        stop.request(Interrupted(signal.SIGINT))
        raise
    finally:
        over.set()
    if errors:
        raise errors[min(errors)]
    return [found[index] for index in range(len(things))]
