"""AWS's own configuration file, as far as it says where a bucket is: its region, and another store's address.

Format: https://docs.aws.amazon.com/sdkref/latest/guide/file-format.html and feature-ss-endpoints.html.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

S3_SECTION = "s3"


def region(environ: Mapping[str, str], home: Path | None) -> str:
    """The region of the profile in use; empty when nothing says it. Reads a small file; raises nothing."""
    return _profile(environ, home).get("region", "")


def endpoint(environ: Mapping[str, str], home: Path | None) -> str:
    """The address of the S3-compatible store that the profile names; empty for AWS itself. Raises nothing.

    A `services` section that the profile names goes before its own `endpoint_url`, as it does for AWS's tools.
    """
    if environ.get("AWS_IGNORE_CONFIGURED_ENDPOINT_URLS", "").lower() == "true":
        return ""
    profile = _profile(environ, home)
    services = _section(environ, home, f"services {profile['services']}") if "services" in profile else {}
    return _nested(services.get(S3_SECTION, "")).get("endpoint_url") or profile.get("endpoint_url", "")


def addressing_style(environ: Mapping[str, str], home: Path | None) -> str:
    """`virtual`, `path`, or what else the profile says under `s3`; empty when nothing says it. Raises nothing."""
    return _nested(_profile(environ, home).get(S3_SECTION, "")).get("addressing_style", "")


def use_of(kind: str, environ: Mapping[str, str], home: Path | None) -> bool:
    """Whether endpoints of a kind (`fips`, `dualstack`) are asked for. Raises nothing."""
    written = environ.get(f"AWS_USE_{kind.upper()}_ENDPOINT") or _profile(environ, home).get(f"use_{kind}_endpoint", "")
    return written.lower() == "true"


def _profile(environ: Mapping[str, str], home: Path | None) -> dict[str, str]:
    name = environ.get("AWS_PROFILE") or environ.get("AWS_DEFAULT_PROFILE") or "default"
    return _section(environ, home, name if name == "default" else f"profile {name}")


def _section(environ: Mapping[str, str], home: Path | None, name: str) -> dict[str, str]:
    path = Path(environ.get("AWS_CONFIG_FILE") or (home or Path("/")) / ".aws" / "config").expanduser()
    # os.path: Path.is_file raises where the directory is another user's.
    if not os.path.isfile(path):
        return {}
    import configparser

    parser = configparser.RawConfigParser(strict=False)
    try:
        parser.read(path)
    except (configparser.Error, UnicodeDecodeError, OSError):
        return {}
    return {key: value.strip() for key, value in parser.items(name)} if parser.has_section(name) else {}


def _nested(text: str) -> dict[str, str]:
    """The indented `key = value` lines under a service's name."""
    rows = (line.partition("=") for line in text.splitlines())
    return {key.strip(): value.strip() for key, equals, value in rows if equals}
