"""The one table of settings: option, variable, file key, default, and where each value came from.

Precedence: option > variable > TOML file > default. The file is `--config`, `MX_CONFIG`, else
`$XDG_CONFIG_HOME/mx/config.toml`; its keys are the field names below, and those of options that one command has. Nothing
else in mx reads the environment.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import re
import stat
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mx_cli.base import units
from mx_cli.base.errors import UsageError

Parse = Callable[[str], Any]


def _flag(text: str) -> bool:
    value = text.strip().lower()
    if value in ("1", "true", "yes", "on"):
        return True
    if value in ("0", "false", "no", "off", ""):
        return False
    raise UsageError(f"not a yes or no: {text!r}")


def _count(text: str) -> int:
    if not text.strip().isdecimal() or len(text) > 18:
        raise UsageError(f"not a whole number: {text!r}")
    return int(text)


def _some(parse: Parse) -> Parse:
    """`parse`, which refuses zero."""

    @functools.wraps(parse)
    def parse_some(text: str) -> Any:
        value = parse(text)
        if not value:
            raise UsageError(f"has to be more than nothing: {text!r}")
        return value

    return parse_some


def _text(text: str) -> str:
    return text


def read_path(text: str) -> Path:
    """An absolute path; `~` is a home. Raises UsageError when there is no such home, and for no path."""
    if not text:
        raise UsageError("an empty path")
    if "\0" in text:
        raise UsageError(f"not a path: {text!r} (no path holds a zero byte)")
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]*://", text):
        raise UsageError(f"not a path: {text!r} (a URI)", hint="a directory of this machine, or a mount")
    try:
        return Path(text).expanduser().absolute()
    except RuntimeError as error:
        raise UsageError(f"not a path: {text!r} ({error})") from None


def _choice(*values: str) -> Parse:
    def parse(text: str) -> str:
        if text not in values:
            raise UsageError(f"not one of {', '.join(values)}: {text!r}")
        return text

    parse.__doc__ = "|".join(values)
    return parse


def _set(env: str, parse: Parse, default: Any, text: str, *, also: tuple[str, ...] = ()) -> Any:
    """A field of Settings: its own variable first, then the variables of other tools that mean the same."""
    return field(default=default, metadata={"env": (env, *also) if env else also, "parse": parse, "help": text})


@dataclass(frozen=True)
class Settings:
    """All settings, typed. Sizes in bytes, durations in seconds. `--kebab-case` of the name is the option, where a command has it."""

    cache_dir: Path | None = _set("MX_CACHE_DIR", read_path, None, "root of the shared cache, else ~/.cache/mx")
    endpoint_url: str | None = _set("MX_ENDPOINT_URL", _text, None, "endpoint of an S3- or GCS-compatible store")
    anon: bool = _set("MX_ANON", _flag, False, "send no credentials")
    requester_pays: bool = _set("MX_REQUESTER_PAYS", _flag, False, "accept the requester's charges")
    region: str | None = _set(
        "MX_REGION", _text, None, "region of the bucket", also=("AWS_REGION", "AWS_DEFAULT_REGION")
    )
    ca_bundle: Path | None = _set(
        "MX_CA_BUNDLE",
        read_path,
        None,
        "file of CA certificates to trust",
        also=("AWS_CA_BUNDLE", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "SSL_CERT_FILE"),
    )
    insecure: bool = _set("MX_INSECURE", _flag, False, "verify no TLS certificate, and want no secret of peers")
    hf_token_file: Path | None = _set("MX_HF_TOKEN_FILE", read_path, None, "file with the Hugging Face token")
    offline: bool = _set(
        "MX_OFFLINE",
        _flag,
        False,
        "use the cache only, open no connection",
        also=("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"),
    )
    if_unreachable: str = _set(
        "MX_IF_UNREACHABLE",
        _choice("fail", "cached"),
        "fail",
        "when the origin cannot be asked: fail, or use what is cached",
    )
    max_connections: int = _set("MX_MAX_CONNECTIONS", _some(_count), 32, "connections to an origin at most")
    max_bandwidth: int | None = _set("MX_MAX_BANDWIDTH", _some(units.parse_size), None, "bytes a second at most")
    memory: int | None = _set(
        "MX_MEMORY",
        _some(units.parse_size),
        None,
        "what a transfer may hold in memory beside the weights' own: 256MiB, or half of what the cgroup leaves if that is less",
    )
    range_size: int = _set("MX_RANGE_SIZE", _some(units.parse_size), 16 << 20, "bytes of one request")
    connect_timeout: float = _set(
        "MX_CONNECT_TIMEOUT", _some(units.parse_duration), 10.0, "seconds to open a connection"
    )
    stall_timeout: float = _set(
        "MX_STALL_TIMEOUT", _some(units.parse_duration), 60.0, "no byte for this long is a failure"
    )
    retry_for: float = _set("MX_RETRY_FOR", units.parse_duration, 600.0, "how long to retry an origin without progress")
    timeout: float | None = _set("MX_TIMEOUT", units.parse_duration, None, "limit for the whole command")
    wait: float | None = _set(
        "MX_WAIT", units.parse_duration, None, "limit for waiting: on another downloader, for a peer"
    )
    ttl: float = _set(
        "MX_TTL", _some(units.parse_duration), 20.0, "a leader that shows no progress for this long is replaced"
    )
    beat: float = _set("MX_BEAT", _some(units.parse_duration), 2.0, "seconds between two signs of life of a leader")
    visibility: float = _set(
        "MX_VISIBILITY", units.parse_duration, 65.0, "how long a file system may hide a name that another host made"
    )
    peer_token_file: Path | None = _set(
        "MX_PEER_TOKEN_FILE",
        read_path,
        None,
        "file of secrets that peers share, one a line: the first is offered, all are accepted",
    )
    discovery: str | None = _set(
        "MX_DISCOVERY",
        _text,
        None,
        "where peers are found: dir:[PATH] (peers/ in the cache), static:HOST:PORT,... or dns:NAME:PORT",
    )
    interface: str | None = _set(
        "MX_INTERFACE", _text, None, "network interfaces of the NIXL data path, comma-separated"
    )
    data_ports: str | None = _set("MX_DATA_PORTS", _text, None, "ports of the NIXL data path: FIRST-LAST")
    peer_stall_timeout: float = _set(
        "MX_PEER_STALL_TIMEOUT",
        _some(units.parse_duration),
        15.0,
        "a peer without a verified byte for this long is left",
    )
    grant_ttl: float = _set(
        "MX_GRANT_TTL", _some(units.parse_duration), 30.0, "a reader that is silent for this long loses its grant"
    )
    record_beat: float = _set(
        "MX_RECORD_BEAT", _some(units.parse_duration), 15.0, "seconds between two signs of life of a peer's record"
    )
    node_name: str | None = _set("MX_NODE_NAME", _text, None, "this node's name, shown to others", also=("HOSTNAME",))
    namespace: str | None = _set(
        "MX_NAMESPACE", _text, None, "this pod's namespace, shown to others", also=("POD_NAMESPACE",)
    )
    progress: str = _set("MX_PROGRESS", _choice("auto", "bar", "plain", "none"), "auto", "how progress is shown")
    progress_every: float = _set(
        "MX_PROGRESS_EVERY", units.parse_duration, 10.0, "seconds between two plain progress lines"
    )
    log_format: str = _set("MX_LOG_FORMAT", _choice("text", "json"), "text", "format of stderr")
    termination_log: Path | None = _set("MX_TERMINATION_LOG", read_path, None, "file for the final sentence")
    debug: bool = _set("MX_DEBUG", _flag, False, "show tracebacks")
    strict: bool = _set("MX_STRICT", _flag, False, "exit 3 when there were warnings")
    no_color: bool = _set("", lambda text: text != "", False, "no colours", also=("NO_COLOR",))
    ci: bool = _set("", lambda text: text not in ("", "0", "false"), False, "a CI system: no bars", also=("CI",))
    term: str = _set("", _text, "", "kind of terminal", also=("TERM",))
    home: Path | None = _set("", read_path, None, "home directory", also=("HOME",))
    xdg_cache_home: Path | None = _set("", read_path, None, "where caches live", also=("XDG_CACHE_HOME",))
    xdg_runtime_dir: str | None = _set("", _text, None, "what the user's processes share", also=("XDG_RUNTIME_DIR",))
    hf_home: Path | None = _set("", read_path, None, "home of Hugging Face tools", also=("HF_HOME",))
    hf_hub_cache: Path | None = _set("", read_path, None, "hub cache of Hugging Face tools", also=("HF_HUB_CACHE",))
    hf_endpoint: str = _set("", _text, "https://huggingface.co", "the hub", also=("HF_ENDPOINT",))
    hf_token: str | None = _set("", _text, None, "token of the hub", also=("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"))
    hf_token_path: Path | None = _set("", read_path, None, "token file of Hugging Face tools", also=("HF_TOKEN_PATH",))
    s3_endpoint: str | None = _set("", _text, None, "S3 endpoint", also=("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"))
    gcs_endpoint: str | None = _set("", _text, None, "GCS emulator", also=("STORAGE_EMULATOR_HOST",))


SECRET = frozenset({"hf_token"})
CONFIG_LIMIT = 64 << 10
FIELDS: dict[str, dataclasses.Field[Any]] = {f.name: f for f in dataclasses.fields(Settings)}


def own_variable(name: str) -> str:
    """The MX_ variable of a setting, or an empty string."""
    variables = FIELDS[name].metadata["env"]
    return variables[0] if variables and variables[0].startswith("MX_") else ""


@dataclass(frozen=True)
class Resolved:
    """The settings, the origin of each value (`option`, `MX_TTL`, a file's path, `default`), and notices to show."""

    settings: Settings
    origins: Mapping[str, str]
    notices: tuple[str, ...]
    environ: Mapping[str, str]


def asks_for_json(arguments: Sequence[str], environ: Mapping[str, str] | None = None) -> bool:
    """Whether a command line that cannot be parsed wants its error as JSON."""
    own = arguments[: arguments.index("--")] if "--" in arguments else arguments
    wanted = (os.environ if environ is None else environ).get("MX_JSON", "").strip().lower()
    return "--json" in own or wanted in ("1", "true", "t", "yes", "y", "on")


def resolve(
    options: Mapping[str, Any],
    environ: Mapping[str, str] | None = None,
    config: Path | None = None,
    known: Collection[str] | None = None,
) -> Resolved:
    """Merge the four layers. `options` holds values as text (None = not given) or already parsed.

    `known` names the MX_ variables that are not settings but options of commands: they, and the file's keys for them, are
    not misspelt ones. Who does not know them takes no key for one.

    Raises UsageError naming the option, variable or file key at fault. Reads at most one file; idempotent.
    """
    env = dict(os.environ if environ is None else environ)
    file, path = _read_file(config, env, known)
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for name, spec in FIELDS.items():
        for origin, raw in _candidates(name, spec, options, env, file, path):
            if raw is not None:
                values[name] = _parse(spec, raw, f"{path}: {name}" if origin == path else origin)
                origins[name] = origin
                break
        else:
            origins[name] = "default"
    return Resolved(Settings(**values), origins, tuple(_misspelt(env, known or ())), env)


def option_key(variable: str) -> str:
    """The key in the file of an option that is no setting, by its MX_ variable; an empty string where there is none."""
    return "" if variable == "MX_CONFIG" else variable.removeprefix("MX_").lower()


def written_options(config: Path | None, known: Collection[str]) -> dict[str, str | list[str]]:
    """What the file says of options that are no settings, by key. `known` names their variables. Raises UsageError."""
    data, _ = _read_file(config, dict(os.environ), known)
    return {key: value for key, value in data.items() if key not in FIELDS}


def outlets(options: Mapping[str, Any], environ: Mapping[str, str] | None = None) -> Settings:
    """The settings that say where an error goes, for when the whole cannot be resolved; a wrong value is none."""
    env = os.environ if environ is None else environ
    values: dict[str, Any] = {}
    for name in ("log_format", "termination_log", "debug"):
        for origin, raw in reversed(_candidates(name, FIELDS[name], options, env, {}, "")):
            with contextlib.suppress(UsageError):
                values |= {name: _parse(FIELDS[name], raw, origin)} if raw is not None else {}
    return Settings(**values)


def _candidates(
    name: str,
    spec: dataclasses.Field[Any],
    options: Mapping[str, Any],
    env: Mapping[str, str],
    file: Mapping[str, Any],
    path: str,
) -> list[tuple[str, Any]]:
    found = [("--" + name.replace("_", "-"), options.get(name))]
    found += [(variable, env.get(variable) or None) for variable in spec.metadata["env"]]
    found.append((path, file.get(name)))
    return found


def _parse(spec: dataclasses.Field[Any], raw: Any, origin: str) -> Any:
    if not isinstance(raw, str):
        raw = str(raw).lower() if isinstance(raw, bool) else str(raw)
    try:
        return spec.metadata["parse"](raw)
    except UsageError as error:
        raise UsageError(f"{origin}: {error.what}", hint=error.hint) from None


def _read_file(
    config: Path | None, env: Mapping[str, str], known: Collection[str] | None
) -> tuple[dict[str, Any], str]:
    named = config or (Path(env["MX_CONFIG"]) if env.get("MX_CONFIG") else None)
    home = env.get("XDG_CONFIG_HOME") or (env.get("HOME", "") + "/.config" if env.get("HOME") else "")
    path = named or (Path(home) / "mx" / "config.toml" if home else None)
    if path is None:
        return {}, ""
    # A file is the exception: who has none does not pay for the parser.
    if not named and not os.path.exists(path):
        return {}, str(path)
    import tomllib

    try:
        data = tomllib.loads(_read_regular(path))
    except FileNotFoundError:
        if named:
            raise UsageError(f"no such configuration file: {path}") from None
        return {}, str(path)
    except OSError as error:
        if not named:
            return {}, str(path)
        raise UsageError(f"cannot read the configuration file {path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise UsageError(f"cannot read the configuration file {path}: {error}") from None
    unknown = sorted(set(data) - set(FIELDS) - {option_key(variable) for variable in known or ()})
    if unknown and known is not None:
        hint = "mx config lists all settings, and --help the options of a command"
        raise UsageError(f"{path}: unknown settings: {', '.join(unknown)}", hint=hint)
    secret = sorted(set(data) & SECRET)
    if secret:
        raise UsageError(
            f"{path}: secrets do not belong into this file: {', '.join(secret)}", hint="use --hf-token-file"
        )
    return {name: _read_value(name, value, f"{path}: {name}") for name, value in data.items()}, str(path)


def _read_value(name: str, value: Any, where: str) -> str | list[str]:
    """The value of a setting, or of an option of a command, which alone may be a list. Raises UsageError."""
    if name in FIELDS:
        return _written(value, where, FIELDS[name].default)
    if isinstance(value, list):
        return [_written(part, where, "") for part in value]
    return _written(value, where, False) or ("false" if value is False else "")


def _written(value: Any, where: str, default: Any) -> str:
    """A value of the file as the text that a variable would hold. Raises UsageError for what is none: a list, a date."""
    if isinstance(value, bool) and isinstance(default, bool):
        return "true" if value else ""
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        raise UsageError(f"{where}: not a text or a number: {value!r}")
    return str(value)


def _read_regular(path: Path) -> str:
    """The text of a small regular file: a pipe without a writer and a device without an end are no configuration.

    Raises ValueError for those, and OSError.
    """
    # Without O_NONBLOCK the open alone waits for the writer of a pipe.
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
        info = os.fstat(file.fileno())
        if not stat.S_ISREG(info.st_mode):
            raise ValueError("not a regular file")
        if info.st_size > CONFIG_LIMIT:
            raise ValueError(f"{info.st_size} bytes, expected at most {CONFIG_LIMIT}")
        return file.read(CONFIG_LIMIT).decode()


def _misspelt(env: Mapping[str, str], known: Collection[str]) -> list[str]:
    """Variables within two letters of one of ours, fewer of a short one: other MX_ names belong to ModelExpress."""
    ours = {own_variable(name) for name in FIELDS} - {""} | {"MX_CONFIG", *known}
    found = []
    for variable in sorted(env):
        if variable.startswith("MX_") and variable not in ours:
            near = [name for name in sorted(ours) if _distance(variable, name) <= min(2, (len(name) - 3) // 3)]
            if near:
                found.append(f"{variable} is not a setting of mx; did you mean {near[0]}?")
    return found


def _distance(left: str, right: str) -> int:
    """Levenshtein distance, cut off at 3 by the length difference."""
    if abs(len(left) - len(right)) > 2:
        return 3
    row = list(range(len(right) + 1))
    for i, a in enumerate(left, 1):
        previous, row[0] = row[0], i
        for j, b in enumerate(right, 1):
            previous, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, previous + (a != b))
    return row[-1]
