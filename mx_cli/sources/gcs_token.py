"""Google's default credentials, as a bearer token that is fresh when it is used."""

from __future__ import annotations

import threading
from typing import Any

from mx_cli.base import redact
from mx_cli.base.errors import AccessDenied, MissingCapability, Unreachable
from mx_cli.base.threads import begin
from mx_cli.sources.origin import Context

_SCOPE = "https://www.googleapis.com/auth/devstorage.read_only"
# Off Google's machines the metadata address leads nowhere, and looking for it must not cost minutes.
_SEARCH_SECONDS = 5.0
_ANON_HINT = (
    "for a public bucket use --anon; else GOOGLE_APPLICATION_CREDENTIALS, or gcloud auth application-default login"
)


class Token:
    """The token of one command. Thread-safe. Looks for credentials at the first use."""

    def __init__(self, context: Context, shown: str) -> None:
        self._context = context
        self._shown = shown
        self._lock = threading.Lock()
        self._credentials: Any = None
        self._request: Any = None
        self.project = context.environ.get("GOOGLE_CLOUD_PROJECT", "")

    def value(self) -> str:
        """A token that is valid now. Blocks; raises AccessDenied, MissingCapability, Unreachable."""
        with self._lock:
            if self._credentials is None:
                self._find()
            if not self._credentials.valid:
                self._refresh()
            return str(self._credentials.token)

    def renew(self, used: str) -> bool:
        """Get a token other than `used`, which was refused; whether there is one now."""
        with self._lock:
            if self._credentials.token == used:
                self._refresh()
            return bool(self._credentials.token != used)

    def _find(self) -> None:
        try:
            import google.auth
            from google.auth.exceptions import GoogleAuthError
            from google.auth.transport.requests import Request
        except ImportError as error:
            raise MissingCapability(
                f"{self._shown}: credentials for gs:// need the package {error.name}",
                hint="pip install google-auth requests",
            ) from None
        found: list[Any] = []

        def search() -> None:
            try:
                found.append(google.auth.default(scopes=[_SCOPE]))
            except (GoogleAuthError, OSError, ValueError) as error:
                found.append(error)

        thread = threading.Thread(target=search, name="google-credentials", daemon=True)
        begin(thread)
        thread.join(_SEARCH_SECONDS)
        if not found:
            raise AccessDenied(f"{self._shown}: no Google credentials found in {_SEARCH_SECONDS:g} s", hint=_ANON_HINT)
        if isinstance(found[0], Exception):
            said = redact.text(str(found[0])).partition("\n")[0]
            raise AccessDenied(f"{self._shown}: no usable Google credentials: {said}", hint=_ANON_HINT)
        self._credentials, project = found[0]
        self.project = self.project or project or ""
        self._request = Request()

    def _refresh(self) -> None:
        from google.auth.exceptions import GoogleAuthError, TransportError

        try:
            self._credentials.refresh(self._request)
        except TransportError as error:
            raise Unreachable(f"{self._shown}: the token service: {redact.text(str(error))}") from None
        except GoogleAuthError as error:
            said = redact.text(str(error)).partition("\n")[0]
            raise AccessDenied(f"{self._shown}: Google's token service refused: {said}", hint=_ANON_HINT) from None
