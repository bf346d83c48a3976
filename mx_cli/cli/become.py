"""`-- CMD`: the program that takes this process over when its work is done."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

from mx_cli.base.errors import UsageError
from mx_cli.base.filesystem import may
from mx_cli.cli.session import Session


def check_stray(cmd: list[str]) -> None:
    """A command to run comes after `--`; a second argument before it is a slip, not a program. Raises UsageError."""
    words = sys.argv[1:]
    given = words[words.index("--") + 1 :] if "--" in words else []
    if cmd and cmd != given:
        raise UsageError(
            f"unexpected argument {cmd[0]!r}", hint="one model; a command to run afterwards comes after --"
        )


def check_program(name: str, environ: Mapping[str, str]) -> None:
    """Refuse a misspelt program before the download, unless it comes with the download. Raises UsageError."""
    if not name:
        raise UsageError("cannot run '': the name of a program is missing after --")
    if "{}" in name:
        return
    places = [""] if "/" in name else os.get_exec_path(environ)
    if not any(_is_program(os.path.join(place, name)) for place in places):
        raise UsageError(f"cannot run {name}: no such program", hint="check the name after --, and PATH")


def _is_program(path: str) -> bool:
    return os.path.isfile(path) and may(os.X_OK, Path(path))


def become(session: Session, cmd: list[str], directory: Path, identity: str) -> None:
    """Run `cmd` in this process's place, `{}` replaced. Does not return; raises UsageError when it cannot be run."""
    from mx_cli.cache import umask

    environ = {**_given(session.resolved.environ), "MX_DIR": str(directory), "MX_IDENTITY": identity}
    program = [word.replace("{}", str(directory)) for word in cmd]
    session.prepare_exec()
    umask.restore()
    try:
        os.execvpe(program[0], program, environ)
    except OSError as error:
        lost = isinstance(error, FileNotFoundError) and _is_program(program[0])
        why = "the interpreter that it names is missing" if lost else error.strerror
        raise UsageError(f"cannot run {program[0]}: {why}") from None


def _given(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment as the caller made it: without a locale, Python adds LC_CTYPE for itself (PEP 538)."""
    try:
        first = Path("/proc/self/environ").read_bytes().split(b"\0")
    except OSError:
        return dict(environ)
    added = not any(pair.startswith(b"LC_CTYPE=") for pair in first)
    return {name: value for name, value in environ.items() if not (added and name == "LC_CTYPE")}
