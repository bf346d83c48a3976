"""`mx prefetch`."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Optional

import typer

from mx_cli.base.config import read_path
from mx_cli.cli.options import CACHE, ELECTION, ORIGIN, TRANSFER, command
from mx_cli.cli.session import Session

if TYPE_CHECKING:
    from mx_cli.flows.request import Outcome

MANY = Optional[list[str]]  # noqa: UP045 - typer reads the object
PATH = Optional[str]  # noqa: UP045


@command(CACHE, ORIGIN, TRANSFER, ELECTION, ("if_unreachable",))
def prefetch(
    session: Session,
    uri: Annotated[str, typer.Argument(metavar="URI", help="s3:// gs:// hf://org/name http(s):// file:// or a path")],
    cmd: Annotated[MANY, typer.Argument(metavar="[-- CMD ...]", help="run CMD then; {} is the directory")] = None,
    revision: Annotated[
        PATH, typer.Option("--revision", help="commit, branch, tag, or a revision that mx printed")
    ] = None,
    version_id: Annotated[PATH, typer.Option("--version-id", help="version of a single object")] = None,
    include: Annotated[
        MANY, typer.Option("--include", metavar="GLOB", help="only these files; may be repeated")
    ] = None,
    exclude: Annotated[MANY, typer.Option("--exclude", metavar="GLOB", help="not these files; may be repeated")] = None,
    everything: Annotated[bool, typer.Option("--all", help="all files, not one usable set")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="say what would be fetched, fetch nothing")] = False,
    verify: Annotated[bool, typer.Option("--verify", help="hash what is there again")] = False,
    pin: Annotated[PATH, typer.Option("--pin", metavar="NAME", help="keep the snapshot from gc")] = None,
    to: Annotated[PATH, typer.Option("--to", metavar="DIR", help="also fill this directory")] = None,
    link: Annotated[PATH, typer.Option("--link", metavar="PATH", help="also make a symlink to the snapshot")] = None,
    result: Annotated[PATH, typer.Option("--result", metavar="FILE", help="also write the JSON result here")] = None,
    hf_cache: Annotated[
        PATH,
        typer.Option("--hf-cache", metavar="DIR", help="also show it in a Hugging Face cache ('' = the default one)"),
    ] = None,
) -> None:
    """Bring a checkpoint into the shared cache, once; print its directory."""
    from mx_cli.base.errors import UsageError
    from mx_cli.flows import prefetch as flow
    from mx_cli.flows.request import Request

    if pin is not None and not (pin and pin.isprintable()):
        raise UsageError(f"--pin {pin!r}: not a name that can be shown")
    _check_stray(cmd or [])
    context = session.context()
    session.cache_line(context.cache().root)
    request = Request(
        uri=uri,
        revision=revision or None,
        version_id=version_id or None,
        include=tuple(include or ()),
        exclude=tuple(exclude or ()),
        everything=everything,
        verify=verify,
        pin=pin,
        to=read_path(to) if to else None,
        link=read_path(link) if link else None,
        hf_cache=None if hf_cache is None else Path(hf_cache),
    )
    if dry_run:
        preview = flow.preview(request, context)
        session.answer(preview.text(), preview.to_json())
        return
    if cmd:
        _check_program(cmd[0], session.resolved.environ)
    outcome = flow.prefetch(request, context)
    _report(session, outcome, result, bool(cmd))
    if cmd:
        _become(session, cmd, outcome)


def _report(session: Session, outcome: Outcome, result: str | None, has_command: bool) -> None:
    from mx_cli.base.events import Notice
    from mx_cli.flows.deliver import write_result

    session.emit(Notice(outcome.summary()))
    document = outcome.to_json()
    if result:
        write_result(read_path(result), document)
    if has_command:
        # Whoever takes this process over owns its stdout.
        session.conclude(str(outcome.directory))
    else:
        session.answer(str(outcome.directory), document)


def _check_stray(cmd: list[str]) -> None:
    """A command to run comes after `--`; a second argument before it is a slip, not a program."""
    from mx_cli.base.errors import UsageError

    words = sys.argv[1:]
    given = words[words.index("--") + 1 :] if "--" in words else []
    if cmd and cmd != given:
        raise UsageError(f"unexpected argument {cmd[0]!r}", hint="one URI; a command to run afterwards comes after --")


def _check_program(name: str, environ: Mapping[str, str]) -> None:
    """A misspelt program is found before the download, unless it is to come with it."""
    from mx_cli.base.errors import UsageError

    if not name:
        raise UsageError("cannot run '': the name of a program is missing after --")
    if "{}" in name:
        return
    places = [""] if "/" in name else os.get_exec_path(environ)
    if not any(os.access(os.path.join(place, name), os.X_OK) for place in places):
        raise UsageError(f"cannot run {name}: no such program", hint="check the name after --, and PATH")


def _given(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment as the caller made it: without a locale, Python adds LC_CTYPE for itself (PEP 538)."""
    try:
        first = Path("/proc/self/environ").read_bytes().split(b"\0")
    except OSError:
        return dict(environ)
    added = not any(pair.startswith(b"LC_CTYPE=") for pair in first)
    return {name: value for name, value in environ.items() if not (added and name == "LC_CTYPE")}


def _become(session: Session, cmd: list[str], outcome: Outcome) -> None:
    from mx_cli.base.errors import UsageError
    from mx_cli.cache.layout import restore_umask

    directory = str(outcome.directory)
    identity = outcome.identity.get("content") or outcome.identity.get("origin") or ""
    environ = {**_given(session.resolved.environ), "MX_DIR": directory, "MX_IDENTITY": identity}
    program = [word.replace("{}", directory) for word in cmd]
    session.prepare_exec()
    restore_umask()
    try:
        os.execvpe(program[0], program, environ)
    except OSError as error:
        raise UsageError(f"cannot run {program[0]}: {error.strerror}") from None
