"""The command tree, and the way in."""

from __future__ import annotations

import signal
import sys
from itertools import takewhile
from typing import Annotated, Any

import typer

from mx_cli.base.errors import UsageError
from mx_cli.base.version import VERSION
from mx_cli.cli import cache, config, doctor, hash_, peers, prefetch, pull, serve, status
from mx_cli.cli.help_text import Command, examples, exit_codes_text
from mx_cli.cli.session import finish, open_streams, refuse, unwritten

app = typer.Typer(
    name="mx",
    help="Model weights where they are needed: once, by the fastest path that exists, verified.",
    epilog=exit_codes_text(),
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
COMMANDS = (
    ("hash", hash_.hash_),
    ("prefetch", prefetch.prefetch),
    ("serve", serve.serve),
    ("pull", pull.pull),
    ("peers", peers.peers),
    ("status", status.status),
    ("doctor", doctor.doctor),
    ("config", config.config),
)
for name, function in COMMANDS:
    app.command(name, cls=Command, epilog=examples(name))(function)
app.add_typer(cache.app, name="cache")
NAMES = {name for name, _ in COMMANDS} | {"cache"} | {str(one.name) for one in cache.app.registered_commands}


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
    where = context.command_path if context else " ".join(["mx", *takewhile(NAMES.__contains__, sys.argv[1:])])
    return refuse(UsageError(error.format_message().rstrip("."), hint=f"{where} --help"), sys.argv[1:])
