"""S3's credentials and region: where they come from, and new ones when they have expired."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

from mx_cli.base.errors import AccessDenied, MissingCapability, MxError, Unreachable, UsageError
from mx_cli.sources import aws_config
from mx_cli.sources.answers import Sign, unsigned
from mx_cli.sources.origin import Context
from mx_cli.sources.provider import PATIENCE, Late, in_time, said
from mx_cli.sources.sigv4 import Keys, Signer

DEFAULT_REGION = "us-east-1"
# The instance metadata service: two requests of one try each. Off EC2 the address leads nowhere, and that must not cost minutes.
_METADATA_SECONDS = 1
_FRESH_FOR = 30.0
_ANON_HINT = "for a public bucket use --anon; else set AWS_PROFILE, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
_BUSY = frozenset({"Throttling", "ThrottlingException", "RequestLimitExceeded", "TooManyRequestsException", "SlowDown"})

T = TypeVar("T")


class Expired(AccessDenied):
    """The credentials of a request have run out; new ones may exist."""


class WrongRegion(AccessDenied):
    """The bucket lives in another region, which the answer names."""

    def __init__(self, what: str, region: str) -> None:
        super().__init__(what, hint=f"set --region {region} or AWS_REGION={region}")
        self.region = region


class Credentials:
    """Signers for one bucket. Thread-safe. Looks for credentials at the first use, within 5 s."""

    def __init__(self, context: Context, shown: str) -> None:
        self._context = context
        self._shown = shown
        self._lock = threading.Lock()
        self._region = context.settings.region or ""
        self._signer: Signer | None = None
        self._chain: Any = None
        self._session: Any = None
        self._looked = 0.0

    @property
    def region(self) -> str:
        """The bucket's region, as far as is known."""
        with self._lock:
            return self._known_region()

    def signer(self) -> Signer | None:
        """What to sign with now; None for anonymous requests. May block; raises AccessDenied when there is nothing."""
        if self._context.settings.anon:
            return None
        with self._lock:
            if self._signer is None or (self._chain and time.monotonic() - self._looked > _FRESH_FOR):
                self._use(self._look() if self._signer is None else self._frozen())
            return self._signer

    def renew(self, used: Signer | None) -> bool:
        """Look for newer credentials than those of `used`; whether there are any. One look for all threads."""
        with self._lock:
            if self._signer is not used:
                return True
            if used is None:
                return False
            self._session = self._chain = None
            found = self._look()
            self._use(found)
            return found != used.keys

    def move(self, region: str, used: str) -> bool:
        """Sign for `region` from now on; whether that is news to a request that was signed for `used`."""
        with self._lock:
            known = self._known_region()
            if known != used:
                return True
            if region == known:
                return False
            self._context.notice(f"{self._shown}: the bucket is in {region}, going on with that region")
            self._region = region
            if self._signer:
                self._signer = Signer(self._signer.keys, region)
            return True

    def _use(self, keys: Keys) -> None:
        for name, value in (("access key", keys.access), ("session token", keys.token)):
            if not value.isascii() or not value.isprintable() or " " in value:
                raise UsageError(
                    f"{self._shown}: the AWS {name} holds characters that none has (spaces, line ends or others inside)",
                    hint="write it alone on one line",
                )
        self._looked = time.monotonic()
        region = self._known_region()
        if self._signer is None or self._signer.keys != keys or self._signer.region != region:
            self._signer = Signer(keys, region)

    def _known_region(self) -> str:
        if not self._region:
            self._region = self._configured_region() or DEFAULT_REGION
        return self._region

    def _configured_region(self) -> str:
        if self._session is not None:
            return str(self._session.get_config_variable("region") or "")
        return aws_config.region(self._context.environ, self._context.settings.home)

    def _look(self) -> Keys:
        environ = self._context.environ
        access, secret = environ.get("AWS_ACCESS_KEY_ID"), environ.get("AWS_SECRET_ACCESS_KEY")
        if access and secret:
            token = environ.get("AWS_SESSION_TOKEN") or environ.get("AWS_SECURITY_TOKEN") or ""
            return Keys(access.strip(), secret.strip(), token.strip())
        self._chain = self._botocore_chain()
        return self._frozen()

    def _botocore_chain(self) -> Any:
        try:
            import botocore.config
            import botocore.session
        except ImportError as error:
            raise MissingCapability(
                f"{self._shown}: looking for AWS credentials needs the package {error.name}",
                hint="pip install botocore",
            ) from None
        session = self._session = botocore.session.Session()
        session.set_config_variable("metadata_service_timeout", _METADATA_SECONDS)
        session.set_config_variable("metadata_service_num_attempts", 1)
        settings = self._context.settings
        if settings.ca_bundle:
            session.set_config_variable("ca_bundle", str(settings.ca_bundle))
        # Retries are ours.
        config = botocore.config.Config(
            connect_timeout=settings.connect_timeout, read_timeout=PATIENCE, retries={"total_max_attempts": 1}
        )
        session.set_default_client_config(config)
        chain = self._asked(session.get_credentials)
        if chain is None:
            raise AccessDenied(f"{self._shown}: no AWS credentials found", hint=_ANON_HINT)
        return chain

    def _frozen(self) -> Keys:
        frozen = self._asked(self._chain.get_frozen_credentials)
        if not frozen.access_key or not frozen.secret_key:
            raise AccessDenied(f"{self._shown}: the AWS credentials found are incomplete", hint=_ANON_HINT)
        return Keys(frozen.access_key, frozen.secret_key, frozen.token or "")

    def _asked(self, call: Callable[[], T]) -> T:
        from botocore.exceptions import ProfileNotFound

        try:
            return in_time(call, PATIENCE, self._context.stop)
        except MxError:
            raise
        except ProfileNotFound as error:
            raise UsageError(f"{self._shown}: {error}") from None
        except Exception as error:  # noqa: BLE001 - botocore stumbles in many ways over what programs and services say
            what = f"{self._shown}: no usable AWS credentials: {said(error)}"
            raise Unreachable(what) if _may_pass(error) else AccessDenied(what, hint=_ANON_HINT) from None


def _may_pass(error: Exception) -> bool:
    """Whether it was a service that gives credentials that did not answer, or was busy."""
    from botocore.exceptions import ClientError, ConnectionError, HTTPClientError
    from botocore.parsers import ResponseParserError

    if isinstance(error, ClientError):
        told = error.response
        status = told.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
        return bool(status >= 500 or told.get("Error", {}).get("Code") in _BUSY)
    return isinstance(error, (ConnectionError, HTTPClientError, ResponseParserError, Late))


def signing(signer: Signer | None) -> Sign:
    """The Sign of a signer, or of none."""
    return signer.sign if signer else unsigned
