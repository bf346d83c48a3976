"""What test_doctor.py runs in a process of its own."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from typing import Any


def two(arguments: dict[str, Any]) -> Iterator[int]:
    yield arguments["first"]
    yield 2


def crash(arguments: dict[str, Any]) -> Iterator[int]:
    yield 1
    os.abort()


def fail(arguments: dict[str, Any]) -> Iterator[int]:
    yield 1
    raise RuntimeError("on purpose")


def noisy(arguments: dict[str, Any]) -> Iterator[str]:
    os.write(1, b"a library that prints\n")
    print("another one", flush=True)
    yield "quiet"


def hang(arguments: dict[str, Any]) -> Iterator[int]:
    yield 1
    threading.Event().wait()
