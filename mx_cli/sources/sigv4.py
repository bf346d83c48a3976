"""AWS Signature Version 4 for requests without a body, as S3 wants it.

Written here since botocore takes a third of a second for 3,500 small objects; tested to sign as it does. The recipe is
"Signature Calculations for the Authorization Header" of the Amazon S3 API Reference.
"""

from __future__ import annotations

import hashlib
import hmac
import time
from dataclasses import dataclass, field
from urllib.parse import quote, unquote_to_bytes

KEY_SAFE = "/-_.~"
EMPTY = hashlib.sha256(b"").hexdigest()


@dataclass(frozen=True, slots=True)
class Keys:
    """Frozen credentials. Not shown in any repr."""

    access: str = field(repr=False)
    secret: str = field(repr=False)
    token: str = field(default="", repr=False)


def encode_key(key: str) -> str:
    """An object's key as S3 wants it in a URL and in a signature: all but A-Z a-z 0-9 - _ . ~ / percent-encoded once."""
    return quote(key, safe=KEY_SAFE)


def encode_query(pairs: dict[str, str]) -> str:
    """Parameters sorted and encoded as the signature wants them."""
    return "&".join(f"{quote(name, safe='-_.~')}={quote(value, safe='-_.~')}" for name, value in sorted(pairs.items()))


class Signer:
    """Signs for one region with one set of keys. Thread-safe; the day's signing key is computed once."""

    def __init__(self, keys: Keys, region: str, service: str = "s3") -> None:
        self.keys = keys
        self.region = region
        self._service = service
        self._day: tuple[str, bytes] = ("", b"")
        self._second: tuple[int, str] = (0, "")

    def sign(self, method: str, url: str, headers: dict[str, str]) -> dict[str, str]:
        """`headers` and the signature. `url` has its path and query encoded by `encode_key` and `encode_query`.

        Signed are the host and all x-amz headers; Range and If-Match are not, so that a proxy may rewrite them.
        """
        stamp = self._stamp()
        rest = url[url.index("//") + 2 :]
        host, _, target = rest.partition("/")
        path, _, query = target.partition("?")
        signed = {name.lower(): value for name, value in headers.items() if name.lower().startswith("x-amz-")}
        signed["host"] = host
        signed["x-amz-content-sha256"] = EMPTY
        signed["x-amz-date"] = stamp
        if self.keys.token:
            signed["x-amz-security-token"] = self.keys.token
        names = sorted(signed)
        lines = "".join(f"{name}:{signed[name]}\n" for name in names)
        listed = ";".join(names)
        request = f"{method}\n/{path}\n{_canonical(query)}\n{lines}\n{listed}\n{EMPTY}"
        scope = f"{stamp[:8]}/{self.region}/{self._service}/aws4_request"
        digest = hashlib.sha256(request.encode()).hexdigest()
        text = f"AWS4-HMAC-SHA256\n{stamp}\n{scope}\n{digest}"
        signature = hmac.digest(self._key(stamp[:8]), text.encode(), "sha256").hex()
        del signed["host"]
        signed["Authorization"] = (
            f"AWS4-HMAC-SHA256 Credential={self.keys.access}/{scope}, SignedHeaders={listed}, Signature={signature}"
        )
        kept = {name: value for name, value in headers.items() if not name.lower().startswith("x-amz-")}
        return {**kept, **signed}

    def _stamp(self) -> str:
        now = int(time.time())
        second = self._second
        if second[0] != now:
            second = self._second = (now, time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(now)))
        return second[1]

    def _key(self, day: str) -> bytes:
        known = self._day
        if known[0] != day:
            key = ("AWS4" + self.keys.secret).encode()
            for part in (day, self.region, self._service, "aws4_request"):
                key = hmac.digest(key, part.encode(), "sha256")
            known = self._day = (day, key)
        return known[1]


def _canonical(query: str) -> str:
    if not query:
        return ""
    pairs = sorted(pair.partition("=")[::2] for pair in query.split("&"))
    return "&".join(
        f"{quote(unquote_to_bytes(name), safe='-_.~')}={quote(unquote_to_bytes(value), safe='-_.~')}"
        for name, value in pairs
    )
