"""Places to put files so that an origin of mx can read them: one class a kind, all with the same face."""

from __future__ import annotations

import os
import urllib.parse
from collections.abc import Mapping
from pathlib import Path

from mx_cli.base import config
from mx_cli.base.cancel import Stop
from mx_cli.base.errors import MxError
from mx_cli.sources.registry import OpenOrigin, open_origin
from tests.rig import servers


def opened(
    uri: str,
    env: Mapping[str, str],
    *,
    stop: Stop | None = None,
    notices: list[str] | None = None,
    retries: list[MxError] | None = None,
    version_id: str = "",
    **options: object,
) -> OpenOrigin:
    """The origin as a command would open it, with short time limits. `notices` and `retries` collect what is said."""
    chosen = {"retry_for": "5", "stall_timeout": "2", "connect_timeout": "2", **options}
    settings = config.resolve(chosen, environ=env).settings
    return open_origin(
        uri,
        settings=settings,
        environ=dict(env),
        stop=stop or Stop(),
        on_retry=lambda what, error, delay, attempt: (retries if retries is not None else []).append(error),
        notice=(notices if notices is not None else []).append,
        version_id=version_id,
    )


class Place:
    """Files of one checkpoint. `tree` is the URI of all of them, `one` of a single one."""

    env: Mapping[str, str]
    tree: str

    def put(self, files: Mapping[str, bytes]) -> None:
        """Add these files, or overwrite them."""
        raise NotImplementedError

    def one(self, name: str) -> str:
        return f"{self.tree}/{name}"


class StorePlace(Place):
    """A prefix of an object store's bucket."""

    def __init__(self, store: servers.S3 | servers.Gcs) -> None:
        self._store = store
        self.env = store.env
        self.tree = store.uri("models/m")

    def put(self, files: Mapping[str, bytes]) -> None:
        for name, data in files.items():
            self._store.put(f"models/m/{name}", data)


class FilePlace(Place):
    """A directory."""

    env: Mapping[str, str] = {}

    def __init__(self, root: Path) -> None:
        self.root = root
        self.tree = str(root)

    def put(self, files: Mapping[str, bytes]) -> None:
        for name, data in files.items():
            path = self.root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
            # A file system's clock may tick more slowly than a test.
            before = path.stat().st_mtime_ns
            os.utime(path, ns=(before + 1_000_000, before + 1_000_000))


class HubPlace(Place):
    """A hub's repository; every put is a commit."""

    def __init__(self, hub: servers.Hub) -> None:
        self._hub = hub
        self._files: dict[str, bytes] = {}
        self.env = hub.env
        self.tree = hub.uri

    def put(self, files: Mapping[str, bytes]) -> None:
        self._files |= files
        self._hub.commit(self._files)


class HttpPlace(Place):
    """nginx over a directory: single files only; over TLS when there is a CA."""

    def __init__(self, nginx: servers.Nginx, name: str, ca: Path | None = None) -> None:
        self._files = FilePlace(nginx.root / name)
        self.tree = f"{nginx.tls_url if ca else nginx.url}/{name}"
        self.env = {"SSL_CERT_FILE": str(ca)} if ca else {}

    def put(self, files: Mapping[str, bytes]) -> None:
        self._files.put(files)

    def one(self, name: str) -> str:
        return f"{self.tree}/{urllib.parse.quote(name)}"
