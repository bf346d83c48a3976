"""S3's credentials and region: where they come from, and new ones when they have expired."""

from __future__ import annotations

import threading
import time
from typing import Any

from mx_cli.base import redact
from mx_cli.base.errors import AccessDenied, MissingCapability, UsageError
from mx_cli.sources import aws_config
from mx_cli.sources.answers import Sign, unsigned
from mx_cli.sources.origin import Context
from mx_cli.sources.sigv4 import Keys, Signer

DEFAULT_REGION = "us-east-1"
# The instance metadata service: two requests of one try each. Off EC2 the address leads nowhere, and that must not cost minutes.
_METADATA_SECONDS = 1
_FRESH_FOR = 30.0
_ANON_HINT = "for a public bucket use --anon; else set AWS_PROFILE, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"


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
            import botocore.session
            from botocore.exceptions import BotoCoreError, ProfileNotFound
        except ImportError as error:
            raise MissingCapability(
                f"{self._shown}: looking for AWS credentials needs the package {error.name}",
                hint="pip install botocore",
            ) from None
        session = self._session = botocore.session.Session()
        session.set_config_variable("metadata_service_timeout", _METADATA_SECONDS)
        session.set_config_variable("metadata_service_num_attempts", 1)
        try:
            chain = session.get_credentials()
        except ProfileNotFound as error:
            raise UsageError(f"{self._shown}: {error}") from None
        except (BotoCoreError, OSError) as error:
            raise self._failed(error) from None
        if chain is None:
            raise AccessDenied(f"{self._shown}: no AWS credentials found", hint=_ANON_HINT)
        return chain

    def _frozen(self) -> Keys:
        from botocore.exceptions import BotoCoreError, ClientError

        try:
            frozen = self._chain.get_frozen_credentials()
        except (BotoCoreError, ClientError, OSError) as error:
            raise self._failed(error) from None
        if not frozen.access_key or not frozen.secret_key:
            raise AccessDenied(f"{self._shown}: the AWS credentials found are incomplete", hint=_ANON_HINT)
        return Keys(frozen.access_key, frozen.secret_key, frozen.token or "")

    def _failed(self, error: Exception) -> AccessDenied:
        return AccessDenied(f"{self._shown}: no usable AWS credentials: {redact.text(str(error))}", hint=_ANON_HINT)


def signing(signer: Signer | None) -> Sign:
    """The Sign of a signer, or of none."""
    return signer.sign if signer else unsigned
