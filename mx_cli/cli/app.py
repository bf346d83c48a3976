"""The command tree, and the way in."""

from __future__ import annotations

import signal
import sys
from typing import Annotated, Any

import typer

from mx_cli.base.errors import UsageError, exit_codes
from mx_cli.base.version import VERSION
from mx_cli.cli import cache, config, doctor, hash_, peers, prefetch, pull, serve, status
from mx_cli.cli.session import finish, open_streams, refuse, unwritten

EPILOG = "exit codes: " + "; ".join(f"{code} {meaning.replace('`', '')}" for code, meaning, _ in exit_codes())

app = typer.Typer(
    name="mx",
    help="Model weights where they are needed: once, by the fastest path that exists, verified.",
    epilog=EPILOG,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
app.command("hash")(hash_.hash_)
app.command("prefetch", context_settings={"allow_interspersed_args": True})(prefetch.prefetch)
app.command("serve")(serve.serve)
app.command("pull", context_settings={"allow_interspersed_args": True})(pull.pull)
app.command("peers")(peers.peers)
app.command("status")(status.status)
app.add_typer(cache.app, name="cache")
app.command("doctor")(doctor.doctor)
app.command("config")(config.config)


def _version(value: bool) -> None:
    if value:
        typer.echo(f"mx {VERSION}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="print the version")
    ] = False,
) -> None:
    """Model weights where they are needed: once, by the fastest path that exists, verified."""


def main() -> None:
    """Run `mx`. Ends the process with the exit code of the table."""
    open_streams()
    try:
        code = app(prog_name="mx", standalone_mode=False)
        finish(code if isinstance(code, int) else 0)
    except SystemExit:
        # So typer ends when nobody reads a help text any more.
        finish(128 + signal.SIGPIPE)
    except Exception as error:  # noqa: BLE001 - typer's own refusals have no public base class
        finish(_refuse(error))


def _refuse(error: Any) -> int:
    """A usage error of the parser, or a help text that cannot be written: same form as every other error of mx."""
    if isinstance(error, OSError) and error.filename is None:
        return refuse(unwritten(error), sys.argv[1:])
    if not hasattr(error, "format_message"):
        raise error
    context = getattr(error, "ctx", None)
    where = context.command_path if context else "mx"
    return refuse(UsageError(error.format_message().rstrip("."), hint=f"{where} --help"), sys.argv[1:])
