"""One run of one command: settings, signals, where output goes, and how it ends."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from mx_cli.base import redact
from mx_cli.base.cancel import STOPPING, Stop
from mx_cli.base.config import Resolved, Settings, asks_for_json, outlets, resolve
from mx_cli.base.errors import FinishedWithWarnings, Interrupted, MissingCapability, MxError, UsageError
from mx_cli.base.events import Event, Warned
from mx_cli.base.threads import begin

if TYPE_CHECKING:
    from mx_cli.cli.render import Renderer
    from mx_cli.flows.context import Context

TERMINATION_LOG = Path("/dev/termination-log")
TERMINATION_LIMIT = 4096
GRACE = 1.9


class Session:
    """What a command gets: `context` for the flows, `answer` for its result. stdout is the answer, stderr all else.

    `grace`: seconds that a command may take to end once it was told to stop; then the process ends all the same.
    """

    def __init__(
        self,
        *,
        options: Mapping[str, Any],
        config: str | None,
        as_json: bool,
        quiet: bool,
        verbose: int,
        variables: Collection[str] = (),
    ) -> None:
        self.as_json = as_json
        self._options, self._config, self._variables = options, config, variables
        self._quiet, self._verbose = quiet, verbose
        self.resolved: Resolved
        self.stop: Stop
        self._renderer: Renderer | None = None
        self._found: dict[signal.Signals, Any] = {}
        self._warnings = 0
        self.grace = GRACE
        self._answered = ""
        self._documented = False
        self._ending = threading.RLock()
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
            code = self._fail(self._reason(error))
        except BrokenPipeError:
            code = 128 + signal.SIGPIPE
        except ImportError as error:
            code = self._fail(_missing(error), error if (error.name or "mx_cli").startswith("mx_cli") else None)
        except FileNotFoundError as error:
            lost = _lost(error)
            code = self._fail(lost, None if isinstance(lost, UsageError) else error)
        except Exception as error:  # noqa: BLE001 - the last place where a bug can still be explained
            code = self._fail(MxError(f"a bug in mx: {type(error).__name__}: {error}"), error)
        finish(code)

    def _reason(self, error: MxError) -> MxError:
        """The stop's reason, where there is one: the error of what a stop broke off does not say why the command ends."""
        stop = getattr(self, "stop", None)
        return (stop.reason if stop else None) or error

    def _begin(self) -> None:
        from mx_cli.cli.render import Renderer

        self.resolved = resolve(
            self._options, config=Path(self._config) if self._config else None, known=self._variables
        )
        self._renderer = Renderer(self.settings, quiet=self._quiet, verbose=self._verbose, run=os.urandom(4).hex())
        self.stop = Stop(self.settings.timeout)
        for signum in STOPPING:
            self._found[signum] = signal.getsignal(signum)
            if signum != signal.SIGHUP or self._found[signum] != signal.SIG_IGN:
                signal.signal(signum, self._on_signal)
        begin(threading.Thread(target=self._watch, name="stop", daemon=True))
        for notice in self.resolved.notices:
            self.emit(Warned(notice))

    def _watch(self) -> None:
        """End the process soon after a stop, whatever it is blocked in: a look-up of a name, a server that is silent."""
        try:
            while True:
                self.stop.wait(3600.0)
        except MxError as reason:
            time.sleep(self.grace)
            finish(self._fail(reason))

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        if self.stop.requested:
            os._exit(128 + signum)
        self.stop.request(Interrupted(signum))

    def context(self) -> Context:
        """The flows' surroundings."""
        from mx_cli.flows.context import Context

        return Context(self.resolved, self.stop, self.emit, verbose=self._verbose)

    def cache_line(self, root: Path) -> None:
        """The first line of a command that uses the cache: root, file system, free space."""
        from mx_cli.base import units
        from mx_cli.base.events import Notice
        from mx_cli.cache.reserve import filesystem

        place = filesystem(root)
        self.emit(Notice(f"cache {root} ({place.kind}, {units.size(place.free)} free)"))

    def existing_cache_line(self, root: Path) -> None:
        """The same for a command that only looks: where there is no cache, its empty answer is not one about a cache."""
        from mx_cli.base.events import Notice

        self.cache_line(root)
        if _is_missing(root):
            self.emit(
                Notice(f"{root} is not there, so nothing is in it (--cache-dir, or MX_CACHE_DIR, names the cache)")
            )

    def emit(self, event: Event) -> None:
        if event.level == "warning" and event.event == "warned":
            self._warnings += 1
        if self._renderer:
            self._renderer.show(event)

    def answer(self, text: str, document: Mapping[str, Any], *, final: str = "") -> None:
        """The result: `document` with --json, else `text` (nothing when empty). `final` also goes to the termination log."""
        self.conclude(final or text)
        out = _json(document) if self.as_json else text
        self._documented = self.as_json
        if out:
            try:
                _print(out)
            except BrokenPipeError:
                raise
            except OSError as error:
                raise unwritten(error) from None

    def conclude(self, final: str) -> None:
        """The work is done: `final` is what the termination log will say."""
        if self._renderer:
            self._renderer.close()
        self._answered = final

    def prepare_exec(self) -> None:
        """Before another program takes this process over. Raises FinishedWithWarnings when --strict refuses them."""
        self._check_warnings()
        _leave_peers()
        self._termination(self._answered)
        # What the caller ignored stays ignored. Python ignores the last two by itself, and programs would inherit that.
        for signum, found in (self._found | dict.fromkeys((signal.SIGPIPE, signal.SIGXFSZ))).items():
            signal.signal(signum, signal.SIG_IGN if found == signal.SIG_IGN else signal.SIG_DFL)

    # -- ends ----------------------------------------------------------------------------------------------------

    def _end(self) -> int:
        # For good: the thread that comes first ends the process.
        self._ending.acquire()
        if self._renderer:
            self._renderer.close()
        self._termination(self._answered)
        try:
            self._check_warnings()
        except FinishedWithWarnings as error:
            self._say(error)
            return error.exit_code
        return 0

    def _check_warnings(self) -> None:
        if self._warnings and self.settings.strict:
            raise FinishedWithWarnings(f"{self._warnings} warnings, and --strict")

    def _fail(self, error: MxError, bug: BaseException | None = None) -> int:
        self._ending.acquire()
        if self._renderer:
            self._renderer.close()
        self._say(error)
        if bug is not None or self._debug():
            import traceback

            traceback.print_exception(bug or error, file=_Redacting())
        # A peer that is told to stop has said already what a script waits for.
        if self.as_json and not self._documented:
            document = {"schema": 1, **self.failed_document, "error": error.to_json()}
            with contextlib.suppress(OSError):
                sys.stdout.write(_json(document) + "\n")
        self._termination(f"mx: error: {redact.text(error.what)}")
        return error.exit_code

    def _debug(self) -> bool:
        return self._outlets.debug

    @property
    def _outlets(self) -> Settings:
        """Where an error goes, also when it is about the settings."""
        return self.settings if getattr(self, "resolved", None) is not None else outlets(self._options)

    def refuse(self, error: MxError) -> int:
        """For a command that never began: say why, and return the exit code."""
        return self._fail(error)

    def _say(self, error: MxError) -> None:
        from mx_cli.cli.render import say_error

        say_error(error, self._outlets.log_format, self._renderer.run if self._renderer else "")

    def _termination(self, sentence: str) -> None:
        path = self._outlets.termination_log or (TERMINATION_LOG if TERMINATION_LOG.exists() else None)
        if path and sentence:
            with contextlib.suppress(OSError):
                path.write_bytes(sentence.encode(errors="backslashreplace")[:TERMINATION_LIMIT])


def _is_missing(path: Path) -> bool:
    """Not so what cannot be looked at."""
    try:
        os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return True
    except OSError:
        return False
    return False


def _print(out: str) -> None:
    """The answer and a newline on stdout; a name as the file system has it, where stdout's encoding has no such letter."""
    try:
        out.encode(sys.stdout.encoding)
    except UnicodeError:
        sys.stdout.buffer.write(os.fsencode(out) + b"\n")
    else:
        sys.stdout.write(out + "\n")
    sys.stdout.flush()


def _json(document: Mapping[str, Any]) -> str:
    from mx_cli.cli.render import json_line

    return json_line(document, sys.stdout.encoding)


def unwritten(error: OSError) -> MxError:
    """Why the answer did not reach stdout."""
    from mx_cli.base.oserrors import explain

    return explain(error, "writing to stdout")


def _lost(error: FileNotFoundError) -> MxError:
    """Relative paths mean nothing once the current directory is removed; anything else is a bug."""
    try:
        os.getcwd()
    except FileNotFoundError:
        return UsageError("the current directory is gone", hint="cd to one that exists, or give absolute paths")
    return MxError(f"a bug in mx: {type(error).__name__}: {error}")


class _Redacting:
    """A traceback shows values; secrets must not be among them."""

    def write(self, text: str) -> int:
        return sys.stderr.write(redact.text(text))

    def flush(self) -> None:
        sys.stderr.flush()


def _missing(error: ImportError) -> MxError:
    """A package that is not installed, or cannot be loaded; one of mx's own is a bug."""
    name = (error.name or "mx_cli").partition(".")[0]
    if name == "mx_cli":
        return MxError(f"a bug in mx: {type(error).__name__}: {error}")
    return MissingCapability(
        f"the package {name} is missing or broken ({error})",
        hint=f"pip install mx-cli installs what mx needs; try python -c 'import {name}'",
    )


def refuse(error: MxError, arguments: Sequence[str]) -> int:
    """An error of a command line that cannot be parsed: as JSON, and to wherever else what can be read of it says."""
    log_format = None
    for argument, following in itertools.pairwise([*arguments, ""]):
        name, equal, value = argument.partition("=")
        if name == "--log-format":
            log_format = value if equal else following
    session = Session(
        options={"log_format": log_format},
        config=None,
        as_json=asks_for_json(arguments),
        quiet=False,
        verbose=0,
    )
    return session.refuse(error)


def open_streams() -> None:
    """/dev/null for each standard stream that the caller closed: no file of the cache may get its number."""
    for fd, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(fd)
        except OSError:
            other = os.open(os.devnull, os.O_RDWR)
            if other != fd:
                os.dup2(other, fd)
                os.close(other)
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(fd, mode, closefd=False))


def _leave_peers() -> None:
    """A reader that vanishes can leave a peer useless for others. Who never met one does not load what leaves."""
    transport = sys.modules.get("mx_cli.transport.nixl")
    if transport is not None:
        transport.leave()


def finish(code: int) -> None:
    """End the process now: threads that wait for a connection that hangs must not hold it up."""
    _leave_peers()
    try:
        sys.stdout.flush()
    except (OSError, ValueError):
        code = code or 128 + signal.SIGPIPE
    # Nobody may listen to stderr any more; the work is done all the same.
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.flush()
    os._exit(code)
