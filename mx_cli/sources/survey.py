"""Where this process would take its credentials from, store by store: names of places, never values, and no network."""

from __future__ import annotations

import configparser
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from mx_cli.base.cancel import Stop
from mx_cli.base.capability import FAIL, OK, Capability
from mx_cli.base.config import Resolved, resolve
from mx_cli.base.errors import UsageError
from mx_cli.sources.hub_token import find_token
from mx_cli.sources.origin import Context

ROWS = ("credentials s3", "credentials gs", "credentials hf")
_NONE = "none found"


def probe(arguments: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """ROWS in order. Reads files of the user's home. `settings`: those that were chosen, as text."""
    resolved = resolve(arguments["settings"])
    yield _s3(resolved).to_json()
    yield _gs(resolved).to_json()
    yield _hf(resolved).to_json()


def _s3(resolved: Resolved) -> Capability:
    environ, home = resolved.environ, resolved.settings.home or Path("/")
    if resolved.settings.anon:
        return Capability(ROWS[0], OK, "none wanted (--anon)")
    if environ.get("AWS_ACCESS_KEY_ID") and environ.get("AWS_SECRET_ACCESS_KEY"):
        return Capability(ROWS[0], OK, "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY")
    if environ.get("AWS_WEB_IDENTITY_TOKEN_FILE"):
        return _file(ROWS[0], "AWS_WEB_IDENTITY_TOKEN_FILE", Path(environ["AWS_WEB_IDENTITY_TOKEN_FILE"]))
    profile = environ.get("AWS_PROFILE") or "default"
    places = [
        (Path(environ.get("AWS_SHARED_CREDENTIALS_FILE") or home / ".aws" / "credentials"), profile),
        (Path(environ.get("AWS_CONFIG_FILE") or home / ".aws" / "config"), f"profile {profile}"),
    ]
    for path, section in places:
        if _has_section(path, section):
            return Capability(ROWS[0], OK, f"profile {profile} in {path}")
    if environ.get("AWS_PROFILE"):
        files = " or ".join(str(path) for path, _ in places)
        return Capability(ROWS[0], FAIL, f"AWS_PROFILE={profile} is not in {files}", "aws configure list-profiles")
    for name in ("AWS_CONTAINER_CREDENTIALS_RELATIVE_URI", "AWS_CONTAINER_CREDENTIALS_FULL_URI"):
        if environ.get(name):
            return Capability(ROWS[0], OK, name)
    return Capability(ROWS[0], OK, f"{_NONE}; an instance's role is asked for when it is needed")


def _has_section(path: Path, section: str) -> bool:
    parser = configparser.RawConfigParser(strict=False)
    try:
        parser.read(path.expanduser())
    except (configparser.Error, UnicodeDecodeError, OSError):
        return False
    return parser.has_section(section)


def _gs(resolved: Resolved) -> Capability:
    environ, home = resolved.environ, resolved.settings.home or Path("/")
    if resolved.settings.anon:
        return Capability(ROWS[1], OK, "none wanted (--anon)")
    if environ.get("GOOGLE_APPLICATION_CREDENTIALS"):
        return _file(ROWS[1], "GOOGLE_APPLICATION_CREDENTIALS", Path(environ["GOOGLE_APPLICATION_CREDENTIALS"]))
    config = Path(environ.get("CLOUDSDK_CONFIG") or home / ".config" / "gcloud")
    path = config / "application_default_credentials.json"
    if os.path.isfile(path):
        return Capability(ROWS[1], OK, str(path))
    return Capability(ROWS[1], OK, f"{_NONE}; a machine of Google's is asked for when it is needed")


def _file(name: str, variable: str, path: Path) -> Capability:
    """A file that a variable names, and which must be readable then."""
    try:
        path.open("rb").close()
    except OSError as error:
        return Capability(name, FAIL, f"{variable}: {path}: {error.strerror}", f"unset {variable}, or make the file")
    return Capability(name, OK, f"{variable}: {path}")


def _hf(resolved: Resolved) -> Capability:
    context = Context(
        resolved.settings, resolved.environ, Stop(), lambda what, error, delay, attempt: None, lambda text: None
    )
    try:
        token, where = find_token(context)
    except UsageError as error:
        return Capability(ROWS[2], FAIL, error.what, error.hint or "hf auth login writes one")
    if resolved.settings.anon:
        return Capability(ROWS[2], OK, "none wanted (--anon)")
    return Capability(ROWS[2], OK, where if token else f"{_NONE}; public repositories need none")
