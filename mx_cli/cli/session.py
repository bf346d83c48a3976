"""One run of one command: settings, signals, where output goes, and how it ends."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from mx_cli.base import redact
from mx_cli.base.cancel import Stop
from mx_cli.base.config import Resolved, Settings, resolve
from mx_cli.base.errors import FinishedWithWarnings, Interrupted, MxError
from mx_cli.base.events import Event

if TYPE_CHECKING:
    from mx_cli.cli.render import Renderer
    from mx_cli.flows.context import Context

TERMINATION_LOG = Path("/dev/termination-log")
TERMINATION_LIMIT = 4096


class Session:
    """What a command gets: `context` for the flows, `answer` for its result. stdout is the answer, stderr all else."""

    def __init__(
        self,
        *,
        command: str,
        options: Mapping[str, Any],
        config: str | None,
        as_json: bool,
        quiet: bool,
        verbose: int,
        variables: Collection[str] = (),
    ) -> None:
        self.command = command
        self.as_json = as_json
        self._options, self._config, self._variables = options, config, variables
        self._quiet, self._verbose = quiet, verbose
        self.resolved: Resolved
        self.stop: Stop
        self._renderer: Renderer | None = None
        self._warnings = 0
        self._answered = ""
        self.failed_document: Mapping[str, Any] = {}

    @property
    def settings(self) -> Settings:
        return self.resolved.settings

    def run(self, body: Callable[[], None]) -> None:
        """Run the command and end the process with its exit code."""
        code = 1
        try:
            self._begin()
            body()
            code = self._end()
        except MxError as error:
            code = self._fail(error)
        except BrokenPipeError:
            code = 128 + signal.SIGPIPE
        except Exception as error:  # noqa: BLE001 - the last place where a bug can still be explained
            code = self._fail(MxError(f"a bug in mx: {type(error).__name__}: {error}"), error)
        finish(code)

    def _begin(self) -> None:
        from mx_cli.cli.render import Renderer

        self.resolved = resolve(
            self._options, config=Path(self._config) if self._config else None, known=self._variables
        )
        self._renderer = Renderer(self.settings, quiet=self._quiet, verbose=self._verbose, run=os.urandom(4).hex())
        self.stop = Stop(self.settings.timeout)
        for signum in (signal.SIGINT, signal.SIGTERM):
            signal.signal(signum, self._on_signal)
        for notice in self.resolved.notices:
            self._renderer.warning(notice)

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        if self.stop.requested:
            os._exit(128 + signum)
        self.stop.request(Interrupted(signum))

    def context(self) -> Context:
        """The flows' surroundings."""
        from mx_cli.flows.context import Context

        return Context(self.resolved, self.stop, self.emit)

    def cache_line(self, root: Path) -> None:
        """The first line of a command that uses the cache: root, file system, free space."""
        from mx_cli.base import units
        from mx_cli.base.events import Notice
        from mx_cli.cache.reserve import filesystem

        place = filesystem(root)
        self.emit(Notice(f"cache {root} ({place.kind}, {units.size(place.free)} free)"))

    def emit(self, event: Event) -> None:
        if event.level == "warning" and event.event == "warned":
            self._warnings += 1
        if self._renderer:
            self._renderer.show(event)

    def answer(self, text: str, document: Mapping[str, Any], *, final: str = "") -> None:
        """The result: `document` with --json, else `text` (nothing when empty). `final` also goes to the termination log."""
        if self._renderer:
            self._renderer.close()
        self._answered = final or text
        out = json.dumps(document, ensure_ascii=False) if self.as_json else text
        if out:
            sys.stdout.write(out + "\n")
            sys.stdout.flush()

    def prepare_exec(self) -> None:
        """Before another program takes this process over."""
        self._termination(self._answered)
        for signum in (signal.SIGINT, signal.SIGTERM):
            signal.signal(signum, signal.SIG_DFL)

    # -- ends ----------------------------------------------------------------------------------------------------

    def _end(self) -> int:
        if self._renderer:
            self._renderer.close()
        self._termination(self._answered)
        if self._warnings and self.settings.strict:
            error = FinishedWithWarnings(f"{self._warnings} warnings, and --strict")
            self._say(error)
            return error.exit_code
        return 0

    def _fail(self, error: MxError, bug: BaseException | None = None) -> int:
        if self._renderer:
            self._renderer.close()
        self._say(error)
        if bug is not None or self._debug():
            import traceback

            traceback.print_exception(bug or error, file=_Redacting())
        if self.as_json:
            document = {
                "schema": 1,
                **self.failed_document,
                "error": {**error.to_json(), "message": redact.text(error.what)},
            }
            with contextlib.suppress(OSError):
                sys.stdout.write(json.dumps(document, ensure_ascii=False) + "\n")
        self._termination(f"mx: error: {redact.text(error.what)}")
        return error.exit_code

    def _debug(self) -> bool:
        return getattr(self, "resolved", None) is not None and self.settings.debug

    def _say(self, error: MxError) -> None:
        from mx_cli.cli.render import say_error

        say_error(error, self._log_format(), self._renderer.run if self._renderer else "")

    def _log_format(self) -> str:
        if getattr(self, "resolved", None) is not None:
            return self.settings.log_format
        return str(self._options.get("log_format") or "text")

    def _termination(self, sentence: str) -> None:
        chosen = self.settings.termination_log if getattr(self, "resolved", None) is not None else None
        path = chosen or (TERMINATION_LOG if TERMINATION_LOG.exists() else None)
        if path and sentence:
            with contextlib.suppress(OSError):
                path.write_bytes(sentence.encode()[:TERMINATION_LIMIT])


class _Redacting:
    """A traceback shows values; secrets must not be among them."""

    def write(self, text: str) -> int:
        return sys.stderr.write(redact.text(text))

    def flush(self) -> None:
        sys.stderr.flush()


def finish(code: int) -> None:
    """End the process now: threads that wait for a connection that hangs must not hold it up."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            code = code or 128 + signal.SIGPIPE
    os._exit(code)
