"""A function in a process of its own: it may hang in the kernel or crash, and the caller goes on.

A thread would not do: a process with one that waits for a dead mount cannot end.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

_LOOK = 0.2
_LARGEST = 4 << 20
_TIDY = 0.3


class Aside:
    """Runs `module:function`, a generator of JSON values that takes one mapping. It begins at once.

    The function's stdout and stderr go nowhere. One that is late is told to stop, so that it can tidy up, and left alone.
    Where no process can be had, there are no answers, and that is why.
    """

    def __init__(self, target: str, arguments: Mapping[str, Any], deadline: float) -> None:
        """`deadline`: seconds from now."""
        self._end = time.monotonic() + deadline
        self._process: subprocess.Popen[bytes] | None = None
        self._refusal = ""
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, target],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        except OSError as error:
            self._refusal = f"no process can be started for it ({error.strerror})"
            return
        assert self._process.stdin
        with contextlib.suppress(BrokenPipeError), self._process.stdin as stdin:
            stdin.write(json.dumps(arguments).encode())

    @property
    def began(self) -> bool:
        return self._process is not None

    def answers(self, check: Callable[[], None] = lambda: None) -> tuple[list[Any], str]:
        """What it gave in time, and why it gave no more: empty when it came to its end. Blocks until the deadline.

        `check` is called now and then, and may raise.
        """
        if self._process is None:
            return [], self._refusal
        assert self._process.stdout
        fd, data, ended = self._process.stdout.fileno(), bytearray(), False
        try:
            while not ended and len(data) < _LARGEST:
                check()
                left = self._end - time.monotonic()
                if select.select([fd], [], [], min(max(0.0, left), _LOOK))[0]:
                    # What came in time counts, however late it is read.
                    part = os.read(fd, 1 << 16)
                    data += part
                    ended = not part
                elif left <= 0:
                    break
            why = _ending(self._process) if ended else "no answer in time"
        finally:
            self._process.stdout.close()
            _stop(self._process)
        lines = data.split(b"\n")[:-1]
        return [json.loads(line) for line in lines], why


def _stop(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_TIDY)
            return
        # What waits in the kernel hears of it when it comes back, and tidies up then.
        if not _waits_in_kernel(process.pid):
            process.kill()


def _ending(process: subprocess.Popen[bytes]) -> str:
    try:
        code = process.wait(1.0)
    except subprocess.TimeoutExpired:
        return "it does not end"
    if code < 0:
        return f"it crashed ({signal.Signals(-code).name})"
    return f"it failed (exit code {code})" if code else ""


def _waits_in_kernel(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "D"
    except OSError:
        return False


def _leave(signum: int, frame: FrameType | None) -> None:
    raise SystemExit(1)


def main(target: str) -> None:
    """The child's side. Ends the process without destructors: libraries crash in theirs."""
    signal.signal(signal.SIGTERM, _leave)
    out = os.dup(1)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    # Libraries write to stdout.
    os.dup2(nowhere, 1)
    arguments = json.load(sys.stdin)
    module, _, name = target.partition(":")
    for answer in getattr(importlib.import_module(module), name)(arguments):
        os.write(out, json.dumps(answer).encode() + b"\n")
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1])
