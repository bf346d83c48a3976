"""`mx prefetch`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Optional

import typer

from mx_cli.base.errors import UsageError
from mx_cli.cli.become import become, check_program, check_stray
from mx_cli.cli.options import CACHE, ELECTION, ORIGIN, PEER, PEERS, TRANSFER, command, words
from mx_cli.cli.places import apart, place
from mx_cli.cli.session import Session

if TYPE_CHECKING:
    from mx_cli.flows.request import Outcome

MANY = Optional[list[str]]  # noqa: UP045 - typer reads the object
PATH = Optional[str]  # noqa: UP045


@command(CACHE, ORIGIN, TRANSFER, ELECTION, PEER, PEERS, ("if_unreachable",))
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
    from_: Annotated[
        PATH,
        typer.Option(
            "--from", metavar="LIST", help="peer, origin: whom to ask [default origin; peer,origin with --discovery]"
        ),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="say what would be fetched, fetch nothing")] = False,
    verify: Annotated[bool, typer.Option("--verify", help="hash what is there again")] = False,
    pin: Annotated[PATH, typer.Option("--pin", metavar="NAME", help="keep the snapshot from gc")] = None,
    to: Annotated[PATH, typer.Option("--to", metavar="DIR", help="also fill this directory")] = None,
    link: Annotated[PATH, typer.Option("--link", metavar="PATH", help="also make a symlink to the snapshot")] = None,
    result: Annotated[
        PATH, typer.Option("--result", metavar="FILE", help="also write the JSON result here; absent after a failure")
    ] = None,
    hf_cache: Annotated[
        PATH,
        typer.Option("--hf-cache", metavar="DIR", help="also show it in a Hugging Face cache ('' = the default one)"),
    ] = None,
) -> None:
    """Bring a checkpoint into the shared cache, once. Prints its directory."""
    from mx_cli.flows import prefetch as flow
    from mx_cli.flows.deliver import prepare_result
    from mx_cli.flows.request import Request

    if pin is not None and not (pin and pin.isprintable()):
        raise UsageError(f"--pin {pin!r}: not a name that can be shown")
    check_stray(cmd or [])
    context = session.context()
    session.cache_line(context.cache().root)
    result_file = place("--result", result)
    request = Request(
        uri=uri,
        revision=revision or None,
        version_id=version_id or None,
        include=tuple(include or ()),
        exclude=tuple(exclude or ()),
        everything=everything,
        verify=verify,
        pin=pin,
        to=place("--to", to),
        link=place("--link", link),
        result=result_file,
        sources=tuple(words(from_)),
        hf_cache=None if hf_cache is None else Path(hf_cache),
    )
    apart({"--result": result_file, "--to": request.to, "--link": request.link})
    if dry_run:
        preview = flow.preview(request, context)
        session.answer(preview.text(), preview.to_json())
        return
    if cmd:
        check_program(cmd[0], session.resolved.environ)
    if result_file:
        prepare_result("--result", result_file, context.cache().root)
    outcome = flow.prefetch(request, context)
    _report(session, outcome, result_file, bool(cmd))
    if cmd:
        identity = outcome.identity.get("content") or outcome.identity.get("origin") or ""
        become(session, cmd, outcome.directory, identity)


def _report(session: Session, outcome: Outcome, result: Path | None, has_command: bool) -> None:
    from mx_cli.base.events import Notice
    from mx_cli.flows.deliver import write_result

    session.emit(Notice(outcome.summary()))
    document = outcome.to_json()
    if result:
        write_result(result, document)
    if has_command:
        # Whoever takes this process over owns its stdout.
        session.conclude(str(outcome.directory))
    else:
        session.answer(str(outcome.directory), document)
