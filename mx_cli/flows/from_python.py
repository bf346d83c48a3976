"""What all calls from Python begin with: their settings, and the words for a model and a device."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping
from typing import Any

from mx_cli.base.cancel import Stop
from mx_cli.base.config import FIELDS, resolve
from mx_cli.base.errors import UsageError
from mx_cli.base.events import Event
from mx_cli.flows.context import Context
from mx_cli.model.holding import HOST
from mx_cli.transport import on_gpu


def process_context(options: Mapping[str, Any]) -> Context:
    """The surroundings of a call from Python: settings from `options`, variables and the file; events go to `logging`.

    Raises UsageError for an option that is none.
    """
    if unknown := sorted(set(options) - set(FIELDS)):
        raise UsageError(f"not settings: {', '.join(unknown)}", hint="mx config lists them")
    log = logging.getLogger("mx")
    level = {"warning": logging.WARNING, "error": logging.ERROR}

    def emit(event: Event) -> None:
        log.log(level.get(event.level, logging.INFO), "%s", getattr(event, "message", None) or event.text())

    return Context(resolve({**options}), Stop(), emit)


def model_text(model: str | os.PathLike[str]) -> str:
    """A directory, a file, a URI or an identity as text. Raises UsageError for anything else."""
    text = os.fspath(model) if isinstance(model, (str, os.PathLike)) else None
    if not isinstance(text, str):
        raise UsageError(f"not a model: {model!r}", hint="a directory, a file, a URI or an identity")
    return text


def wanted_names(names: Any) -> tuple[str, ...] | None:
    """Names of tensors, each once; None for all. One word is as good as a list of one. Raises UsageError."""
    if names is None:
        return None
    # An iterator can be read once, and a load may begin again.
    found = (names,) if isinstance(names, str) else tuple(names) if isinstance(names, Iterable) else (names,)
    for name in found:
        if not isinstance(name, str):
            raise UsageError(f"not a tensor's name: {name!r}", hint="names: a list of texts")
    return tuple(dict.fromkeys(found))


def device_number(device: Any) -> int:
    """HOST, or the GPU's number, of a text or torch's own device: `cuda` is torch's current one. Raises UsageError."""
    text = str(device)
    kind, colon, number = text.partition(":")
    if kind == "cpu" and number in ("", "0"):
        return HOST
    if kind == "cuda" and not colon:
        return on_gpu.current()
    if kind == "cuda" and number.isascii() and number.isdecimal():
        return int(number)
    raise UsageError(f"not a device: {text!r}", hint="cpu, cuda or cuda:N")
