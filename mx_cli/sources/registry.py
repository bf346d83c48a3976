"""Which class serves which scheme, and the one way to open an origin."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from mx_cli.base.cancel import Stop
from mx_cli.base.config import Settings
from mx_cli.base.errors import MissingCapability
from mx_cli.base.events import Requested
from mx_cli.engine.ports import OnRetry, Origin
from mx_cli.engine.retry import Gates
from mx_cli.model.manifest import Entry
from mx_cli.sources import aws_config
from mx_cli.sources import uri as uris

if TYPE_CHECKING:
    from mx_cli.sources.uri import Uri

# scheme -> (module:Class, the command that installs what it needs)
ORIGINS = {
    "hf": ("mx_cli.sources.hub:Hub", "pip install urllib3"),
    "s3": ("mx_cli.sources.s3:S3", "pip install urllib3 botocore"),
    "gs": ("mx_cli.sources.gcs:Gcs", "pip install urllib3 google-auth requests"),
    "http": ("mx_cli.sources.http:Http", "pip install urllib3"),
    "https": ("mx_cli.sources.http:Http", "pip install urllib3"),
    "file": ("mx_cli.sources.files:Files", ""),
}


class OpenOrigin(Origin, Protocol):
    """An origin with its names, known before any connection, and the reading of small files."""

    @property
    def uri(self) -> str: ...

    @property
    def revision(self) -> str: ...

    def read(self, entry: Entry, limit: int) -> bytes: ...


def parse(uri: str, settings: Settings, environ: Mapping[str, str]) -> Uri:
    """The URI with the endpoint that the settings name, or AWS's own; see `uri.parse`. Opens no connection."""

    def endpoint(scheme: str) -> str:
        if settings.endpoint_url:
            return settings.endpoint_url
        if scheme == "s3":
            return settings.s3_endpoint or aws_config.endpoint(environ, settings.home)
        return settings.gcs_endpoint or ""

    return uris.parse(uri, endpoint=endpoint)


def open_origin(
    uri: str,
    *,
    settings: Settings,
    environ: Mapping[str, str],
    stop: Stop,
    on_retry: OnRetry,
    notice: Callable[[str], None],
    version_id: str = "",
    gates: Gates | None = None,
    on_request: Callable[[Requested], None] | None = None,
) -> OpenOrigin:
    """The origin that `uri` names; opens no connection. `origin.uri` is canonical, `origin.revision` from the suffix.

    `on_request` hears of each request; it may be called from several threads.

    Raises UsageError, NotFound (neither path nor repository), MissingCapability (a package is not installed).
    """
    from mx_cli.sources.origin import Context

    found = parse(uri, settings, environ)
    if found.scheme == "file" and uris.looks_like_hub(uri):
        notice(f"{uri} is an existing path and is taken as one; write hf://{uri} for the hub")
    context = Context(settings, environ, stop, on_retry, notice, gates or Gates(), version_id, on_request)
    target, install = ORIGINS[found.scheme]
    module, _, name = target.partition(":")
    try:
        make: Any = getattr(importlib.import_module(module), name)
    except ImportError as error:
        raise MissingCapability(f"{found.scheme}:// needs the package {error.name} ({error})", hint=install) from None
    origin: OpenOrigin = make(found, context)
    return origin
