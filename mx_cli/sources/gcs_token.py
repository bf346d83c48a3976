"""Google's default credentials, as a bearer token that is fresh when it is used."""

from __future__ import annotations

import functools
import threading
from typing import Any

from mx_cli.base.errors import AccessDenied, MissingCapability, MxError, Unreachable
from mx_cli.sources.connect import tls_context
from mx_cli.sources.origin import Context
from mx_cli.sources.provider import PATIENCE, Late, in_time, said

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
            from google.auth.transport.requests import Request
        except ImportError as error:
            raise MissingCapability(
                f"{self._shown}: credentials for gs:// need the package {error.name}",
                hint="pip install google-auth requests",
            ) from None
        search = functools.partial(google.auth.default, scopes=[_SCOPE])
        try:
            self._credentials, project = in_time(search, _SEARCH_SECONDS, self._context.stop)
        except MxError:
            raise
        except Late:
            none = f"{self._shown}: no Google credentials found in {_SEARCH_SECONDS:g} s"
            raise AccessDenied(none, hint=_ANON_HINT) from None
        except Exception as error:  # noqa: BLE001 - google-auth stumbles in many ways over the files that it is given
            raise AccessDenied(f"{self._shown}: no usable Google credentials: {said(error)}", hint=_ANON_HINT) from None
        self.project = self.project or project or ""
        self._request = Request(_session(self._context))

    def _refresh(self) -> None:
        from google.auth.exceptions import TransportError

        def refresh() -> None:
            self._credentials.refresh(self._request)

        try:
            in_time(refresh, PATIENCE, self._context.stop)
        except MxError:
            raise
        except (TransportError, Late) as error:
            raise Unreachable(f"{self._shown}: the token service: {said(error)}") from None
        except Exception as error:  # noqa: BLE001 - and over what token services say
            what = f"{self._shown}: Google's token service refused: {said(error)}"
            if getattr(error, "retryable", False):
                raise Unreachable(what) from None
            raise AccessDenied(what, hint=_ANON_HINT) from None


def _session(context: Context) -> Any:
    """What token services are asked through: it trusts what mx trusts."""
    import requests
    from requests.adapters import HTTPAdapter

    trust = tls_context(context.settings)

    class Trusting(HTTPAdapter):
        def init_poolmanager(self, *args: Any, **options: Any) -> None:
            super().init_poolmanager(*args, **options, ssl_context=trust)

        def proxy_manager_for(self, proxy: str, **options: Any) -> Any:
            return super().proxy_manager_for(proxy, **options, ssl_context=trust)

    session = requests.Session()
    session.mount("https://", Trusting())
    session.verify = not context.settings.insecure
    return session
