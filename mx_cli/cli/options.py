"""Options made from the table of settings, so that each has its variable in the help and one place to be read.

A command's own options get a variable of their name too: `--dry-run` is MX_DRY_RUN. The parser reads those, and what the
configuration file says of them.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Optional, get_args, get_origin, get_type_hints

import typer
from typer.models import OptionInfo

from mx_cli.base.config import FIELDS, option_key, own_variable, written_options
from mx_cli.base.errors import UsageError
from mx_cli.cli.help_text import EVERYWHERE
from mx_cli.cli.session import Session

COMMON = ("timeout", "log_format", "progress", "strict")
CACHE = ("cache_dir", "visibility")
ORIGIN = (
    "endpoint_url",
    "region",
    "anon",
    "requester_pays",
    "ca_bundle",
    "insecure",
    "hf_token_file",
    "offline",
    "connect_timeout",
    "stall_timeout",
    "retry_for",
)
TRANSFER = ("max_connections", "max_bandwidth", "range_size")
PEERS = ("discovery", "record_beat")
PEER = ("peer_token_file", "interface", "data_ports")
ELECTION = ("wait", "ttl", "beat", "node_name", "namespace")

GROUPS = {
    **dict.fromkeys((*CACHE, *ELECTION), "Shared cache"),
    **dict.fromkeys((*ORIGIN, *TRANSFER, "if_unreachable"), "Origin"),
    **dict.fromkeys((*PEERS, *PEER, "memory", "peer_stall_timeout", "grant_ttl"), "Peers"),
    **dict.fromkeys(COMMON, EVERYWHERE),
}
"""Where a setting stands in the help."""

CONSENT = ("--yes", "--force")
"""What a person has to say each time: a variable that is left set must not remove anything."""

_METAVARS = {"parse_size": "SIZE", "parse_duration": "DURATION", "_count": "N", "read_path": "PATH", "_text": "TEXT"}

Command = Callable[..., None]

VARIABLES: set[str] = set()
"""The variables of options that are not settings, of all commands that were declared."""


def _option(name: str) -> Any:
    spec = FIELDS[name]
    parse = spec.metadata["parse"]
    variable = own_variable(name)
    flag = "--" + name.replace("_", "-")
    text = spec.metadata["help"]
    shown = [f"env {variable}"] if variable else []
    if spec.default not in (None, False):
        shown.append(f"default {_typed(parse.__name__, spec.default)}")
    help_text = f"{text} [{'; '.join(shown)}]" if shown else text
    if parse.__name__ == "_flag":
        option = typer.Option(flag, help=help_text, rich_help_panel=GROUPS[name])
        return Annotated[Optional[bool], option]  # noqa: UP045 - typer reads the object
    metavar = parse.__doc__ if parse.__name__ == "parse" else _METAVARS[parse.__name__]
    option = typer.Option(flag, help=help_text, metavar=metavar, rich_help_panel=GROUPS[name])
    return Annotated[Optional[str], option]  # noqa: UP045


def words(text: str | None) -> list[str]:
    """The words of an option that takes a list with commas; none where it is not given."""
    return [word.strip() for word in (text or "").split(",") if word.strip()]


def _typed(parse: str, default: Any) -> str:
    """A default as one would type it."""
    if parse == "parse_duration":
        return f"{default:g}s"
    if parse == "parse_size" and default % (1 << 20) == 0:
        return f"{default >> 20}MiB"
    return str(default)


def with_variable(annotation: Any) -> Any:
    """The annotation of an option with its variable, also in the help: a list is separated by blanks. Arguments have none."""
    parts = getattr(annotation, "__metadata__", ())
    given = next((part for part in parts if isinstance(part, OptionInfo)), None)
    if given is None:
        return annotation
    kind = get_args(annotation)[0]
    several = any(get_origin(part) is list for part in (kind, *get_args(kind)))
    # typer takes the first name for a default until it sees that it is in an Annotated.
    names = [name.partition("/")[0] for name in (given.default, *(given.param_decls or ())) if isinstance(name, str)]
    longest = max(names, key=len)
    option = copy.copy(given)
    if longest in CONSENT:
        return annotation
    variable = str(option.envvar or "MX_" + longest.lstrip("-").replace("-", "_").upper())
    VARIABLES.add(variable)
    option.envvar, option.show_envvar = variable, False
    option.help = f"{option.help} [env {variable}{', separated by blanks' if several else ''}]"
    option.metavar = option.metavar or ("TEXT" if str in (kind, *get_args(kind)) else None)
    return Annotated[kind, option]


def command(*groups: tuple[str, ...]) -> Callable[[Command], Command]:
    """Adds the options of the groups, and those of every command, to a function whose first parameter is the Session."""

    def decorate(function: Command) -> Command:
        names = list(dict.fromkeys([*(name for group in groups for name in group), *COMMON]))
        hints = get_type_hints(function, include_extras=True)
        own = list(inspect.signature(function).parameters.values())[1:]

        def wrapper(**values: Any) -> None:
            session = Session(
                options={name: values.pop(name) for name in names},
                config=values.pop("config"),
                as_json=values.pop("json"),
                quiet=values.pop("quiet"),
                verbose=values.pop("verbose"),
                variables=VARIABLES,
            )
            session.run(lambda: function(session, **values))

        parameters = [
            parameter.replace(annotation=with_variable(hints[parameter.name]), kind=_KEYWORD) for parameter in own
        ]
        parameters += [inspect.Parameter(name, _KEYWORD, default=None, annotation=_option(name)) for name in names]
        parameters += _EVERYWHERE
        wrapper.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        wrapper.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        wrapper.__name__, wrapper.__doc__ = function.__name__, function.__doc__
        return wrapper

    return decorate


_KEYWORD = inspect.Parameter.KEYWORD_ONLY


def _hear_file(context: typer.Context, config: Optional[str]) -> Optional[str]:  # noqa: UP045 - typer reads the objects
    """What the file says of the command's own options stands in for their defaults. Called before they are parsed."""
    # What is wrong with the file is said where the settings are read.
    with contextlib.suppress(UsageError):
        written = written_options(Path(config) if config else None, VARIABLES)
        context.default_map = {
            str(param.name): _for_parser(param, written[key])
            for param in context.command.params
            if (key := option_key(str(param.envvar or ""))) in written
        }
    return config


def _for_parser(param: Any, value: str | list[str]) -> str | list[str]:
    if param.multiple:
        return value.split() if isinstance(value, str) else value
    if isinstance(value, list):
        raise typer.BadParameter(f"{param.opts[0]}: one value is expected, not a list")
    return value


def _everywhere(name: str, default: Any, kind: Any, option: Any) -> inspect.Parameter:
    option.rich_help_panel = EVERYWHERE
    return inspect.Parameter(name, _KEYWORD, default=default, annotation=with_variable(Annotated[kind, option]))


_EVERYWHERE = [
    _everywhere(
        "config",
        None,
        Optional[str],  # noqa: UP045
        typer.Option("--config", help="TOML file of settings", metavar="FILE", callback=_hear_file, is_eager=True),
    ),
    _everywhere("json", False, bool, typer.Option("--json", help="one JSON document on stdout, errors too")),
    _everywhere("quiet", False, bool, typer.Option("-q", "--quiet", help="only warnings and errors on stderr")),
    _everywhere(
        "verbose",
        0,
        int,
        typer.Option(
            "-v", "--verbose", count=True, show_default=False, help="decisions on stderr; -vv each request too"
        ),
    ),
]
