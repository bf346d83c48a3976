"""Which directory a text means."""

from __future__ import annotations

from pathlib import Path

from mx_cli.base.address import peer_address
from mx_cli.base.config import Settings, read_path
from mx_cli.base.errors import UsageError
from mx_cli.discovery.directory import FileDirectory
from mx_cli.discovery.dns import DnsDirectory
from mx_cli.discovery.static import StaticDirectory
from mx_cli.engine.ports import Directory

FORMS = "dir:PATH, static:HOST:PORT,HOST:PORT,... or dns:NAME:PORT"


def open_directory(
    text: str | None,
    cache_root: Path,
    beat: float = Settings.record_beat,
    timeout: float = Settings.connect_timeout,
) -> Directory:
    """The directory that the setting `discovery` names; without one `dir:`, which is `peers` under the cache.

    `beat`: seconds between two beats of a record; `timeout`: seconds to wait for a resolver. Opens no connection, writes
    nothing. Raises UsageError for anything but the known forms.
    """
    kind, colon, rest = (text or "dir:").partition(":")
    if not colon or kind not in ("dir", "static", "dns"):
        raise UsageError(f"not a way to find peers ({text!r}: expected {FORMS})", hint="mx peers --discovery dir:PATH")
    if kind == "dir":
        return FileDirectory(read_path(rest) if rest else cache_root / "peers", beat)
    if kind == "static":
        return StaticDirectory(tuple(_address(part.strip(), text or "") for part in rest.split(",")))
    return DnsDirectory(*_address(rest, text or ""), timeout)


def _address(part: str, text: str) -> tuple[str, int]:
    try:
        return peer_address(part)
    except UsageError as error:
        raise UsageError(f"{error.what} in {text!r}: expected {FORMS}", hint=error.hint) from None
