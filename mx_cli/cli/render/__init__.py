"""How events look on stderr: lines for people, JSON lines for machines, a bar on a terminal."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Mapping
from typing import Any

from mx_cli.base import redact
from mx_cli.base.config import Settings
from mx_cli.base.errors import MxError
from mx_cli.base.events import Event, Progress

MIN_GAP = 6.0
STEP = 0.05


def say_error(error: MxError, log_format: str, run: str) -> None:
    """The last lines of a command that failed."""
    said = error.to_json()
    what, hint = said["message"], said["hint"]
    if log_format == "json":
        _write(json_line(line("error", "error", what, run, said), sys.stderr.encoding))
        return
    _write(f"mx: error: {plain(what)}")
    if error.via:
        _write(f"via: {plain(error.via)}")
    if hint:
        _write(f"hint: {plain(hint)}")


def line(level: str, event: str, message: str, run: str, fields: dict[str, Any]) -> dict[str, Any]:
    """One JSON log line."""
    return {"ts": round(time.time(), 3), "level": level, "event": event, "msg": message, "run": run, "fields": fields}


def json_line(document: Mapping[str, Any], encoding: str) -> str:
    """JSON in one line; escaped where a terminal would take a letter for an order, or `encoding` has no such letter."""
    text = json.dumps(document, ensure_ascii=False)
    try:
        text.encode(encoding)
    except UnicodeError:
        return json.dumps(document)
    return text if text.isprintable() else json.dumps(document)


def plain(text: str, keep: str = "\n\t") -> str:
    """The text with control characters escaped: others wrote parts of it (origins, peers), who must not steer a terminal.

    `keep`: control characters that stay; none in a line of a table.
    """
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() or char in keep else ascii(char)[1:-1] for char in text)


def _write(text: str) -> None:
    try:
        sys.stderr.write(text + "\n")
        sys.stderr.flush()
    except (OSError, ValueError):
        # Nobody listens any more; the work is worth more than its log.
        return


class Renderer:
    """Shows events on stderr. Any thread may call `show`."""

    def __init__(self, settings: Settings, *, quiet: bool, verbose: int, run: str) -> None:
        self.run = run
        self._settings, self._quiet, self._verbose = settings, quiet, verbose
        self._json = settings.log_format == "json"
        self._lock = threading.RLock()
        self._last = 0.0
        self._share = -1.0
        self._done = 0
        self._bar: Any = None
        self._mode = self._progress_mode()

    def _progress_mode(self) -> str:
        settings = self._settings
        if self._quiet or settings.progress == "none":
            return "none"
        if self._json or settings.progress == "plain":
            return "plain"
        if settings.progress == "bar":
            return "bar"
        terminal = sys.stderr.isatty() and settings.term not in ("", "dumb") and not settings.ci
        return "bar" if terminal else "plain"

    def show(self, event: Event) -> None:
        with self._lock:
            if isinstance(event, Progress):
                self._progress(event)
            elif event.level == "warning" or (not self._quiet and self._verbose >= event.verbosity):
                self._line(event)

    def _line(self, event: Event) -> None:
        text = redact.text(event.text())
        if self._json:
            fields = line(event.level, event.event, text, self.run, event.to_json())
            text = json_line(fields, sys.stderr.encoding)
        else:
            text = plain(text)
        if self._bar:
            self._bar.line(text)
        else:
            _write(text)

    def _progress(self, event: Progress) -> None:
        if self._mode == "none":
            return
        if self._mode == "bar":
            if self._bar is None:
                from mx_cli.cli.render.bar import Bar

                self._bar = Bar(no_color=self._settings.no_color)
            self._bar.update(event)
            return
        now = time.monotonic()
        share = event.bytes_done / event.bytes_total if event.bytes_total else 0.0
        first = self._last == 0.0
        due = now - self._last >= self._settings.progress_every
        moved = share - self._share >= STEP and now - self._last >= MIN_GAP
        ends = event.broke_off and event.bytes_done != self._done
        if first or due or moved or ends:
            self._last, self._share, self._done = now, share, event.bytes_done
            self._line(event)

    def close(self) -> None:
        """Take the bar away; idempotent."""
        with self._lock:
            if self._bar:
                self._bar.close()
                self._bar = None
            self._mode = "none"
