"""What every flow needs: settings, where the cache is, whom to tell, when to stop."""

from __future__ import annotations

import dataclasses
import re
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mx_cli.base import redact
from mx_cli.base.cancel import Stop
from mx_cli.base.config import Resolved, Settings
from mx_cli.base.errors import MxError, UsageError
from mx_cli.base.events import Detail, Emit, Notice, Requested, Retried, Warned
from mx_cli.cache.layout import Cache, Model
from mx_cli.cache.lease import Lease
from mx_cli.cache.snapshots import Snapshots
from mx_cli.engine.ports import Directory
from mx_cli.engine.retry import Gates
from mx_cli.model.manifest import store_ref
from mx_cli.sources.registry import OpenOrigin, open_origin


@dataclass
class Context:
    """One command's surroundings. `retries` counts what was announced through `on_retry`.

    `verbose`: how many -v were given; events that are costly to make are made only where they are shown.
    """

    resolved: Resolved
    stop: Stop
    emit: Emit
    gates: Gates = field(default_factory=Gates)
    retries: int = 0
    verbose: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def settings(self) -> Settings:
        return self.resolved.settings

    @property
    def environ(self) -> Mapping[str, str]:
        return self.resolved.environ

    def with_settings(self, **changes: Any) -> Context:
        """The same surroundings with other values of these settings."""
        settings = dataclasses.replace(self.settings, **changes)
        return dataclasses.replace(self, resolved=dataclasses.replace(self.resolved, settings=settings))

    def notice(self, message: str) -> None:
        self.emit(Notice(redact.text(message)))

    def warn(self, message: str) -> None:
        self.emit(Warned(redact.text(message)))

    def detail(self, message: str) -> None:
        """A decision and its reason, shown with -v."""
        if self.verbose >= Detail.verbosity:
            self.emit(Detail(redact.text(message)))

    def on_retry(self, what: str, error: MxError, delay: float, attempt: int) -> None:
        with self._lock:
            self.retries += 1
        self.emit(Retried(redact.text(what), redact.text(error.what), round(delay, 3), attempt))

    def cache(self) -> Cache:
        """The cache at `cache_root`. Writes nothing."""
        return Cache(self.cache_root(), chosen=self.settings.cache_dir is not None)

    def cache_root(self) -> Path:
        """Where the cache is: chosen, else `$XDG_CACHE_HOME/mx`, else `~/.cache/mx`. Does not look at it."""
        settings = self.settings
        if settings.cache_dir:
            return settings.cache_dir
        base = settings.xdg_cache_home or (settings.home / ".cache" if settings.home else None)
        if base is None:
            raise UsageError("no place for the cache: neither HOME nor XDG_CACHE_HOME is set", hint="give --cache-dir")
        return Path(base) / "mx"

    def lease(self, model: Model, revision: str) -> Lease:
        return self.lease_at(model.lease(revision))

    def lease_at(self, directory: Path) -> Lease:
        settings = self.settings
        return Lease(directory, settings.node_name or "", settings.namespace or "", settings.visibility, self.stop.wait)

    def snapshots(self, model: Model) -> Snapshots:
        return Snapshots(model, self.settings.visibility, self.stop.wait)

    def directory(self) -> Directory:
        """Where peers are found. Opens no connection, writes nothing. Raises UsageError for a setting that means nothing."""
        from mx_cli.discovery.registry import open_directory

        settings = self.settings
        return open_directory(settings.discovery, self.cache().root, settings.record_beat, settings.connect_timeout)

    def origin(self, uri: str, version_id: str | None = None) -> OpenOrigin:
        origin = open_origin(
            uri,
            settings=self.settings,
            environ=self.environ,
            stop=self.stop,
            on_retry=self.on_retry,
            notice=self.notice,
            version_id=version_id or "",
            gates=self.gates,
            on_request=self.emit if self.verbose >= Requested.verbosity else None,
        )
        if self.settings.insecure and not origin.uri.startswith("file://"):
            self.warn(
                f"{origin.uri}: certificates are not verified (--insecure): anybody on the way can change the bytes"
            )
        return origin


_COMMIT = re.compile(r"[0-9a-f]{40}")


def is_immutable(uri: str, revision: str) -> bool:
    """Whether a revision of an origin can only ever mean one thing: a hub's commit, or any of a store without branches."""
    return bool(revision) and (not uri.startswith("hf://") or bool(_COMMIT.fullmatch(revision)))


def moving_name(uri: str, revision: str, version_id: str = "") -> str:
    """The moving name that stands for `revision`, or for none given, in the cache's refs."""
    return revision or ("main" if uri.startswith("hf://") else store_ref(version_id))
