"""What S3 and the stores that speak like it answer: pages of listings, stored checksums, refusals."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from urllib.parse import unquote_plus
from xml.etree import ElementTree

from mx_cli.base import redact
from mx_cli.base.errors import AccessDenied, IntegrityError, MxError, NotFound, Unreachable
from mx_cli.model.manifest import Entry
from mx_cli.sources.answers import MOVED_STATUS, bare_tag, hex_of, retry_after
from mx_cli.sources.s3_keys import Expired, WrongRegion
from mx_cli.sources.wire import Head, number

_MD5 = re.compile(r"[0-9a-f]{32}")
_CHECKSUMS = {"sha256": 32, "crc64nvme": 8, "crc32c": 4}
"""The whole object's, by their lengths in bytes."""
_WRONG_KEYS = frozenset({"InvalidAccessKeyId", "SignatureDoesNotMatch", "InvalidToken"})
_DENIED = frozenset({"AccessDenied", "AllAccessDisabled"})
_ENDPOINT_HINT = "give that one with --endpoint-url, or AWS_ENDPOINT_URL_S3"
_MOVED = frozenset({"AuthorizationHeaderMalformed", "PermanentRedirect", "TemporaryRedirect", "Redirect"})
_BUSY = frozenset(
    {"SlowDown", "InternalError", "ServiceUnavailable", "RequestTimeout", "RequestLimitExceeded", "Throttling"}
    | {"ThrottlingException", "ThrottledException", "RequestThrottled", "TooManyRequests", "BandwidthLimitExceeded"}
)
_VIRTUAL_ONLY = frozenset({"SecondLevelDomainForbidden", "PathStyleDomainForbidden", "InvalidPathAccess"})
# It becomes part of a host's name, to which a signed request goes.
_REGION = re.compile(r"[a-z0-9-]{1,40}")
_AWS_REGION = re.compile(r"\bs3[.-](?:dualstack\.)?([a-z]{2}(?:-[a-z]+)+-\d)\.amazonaws\.")
_ERROR = re.compile(rb"\s*(?:<\?xml[^>]*>)?\s*<Error[\s>]")
_EXPIRED = frozenset({"ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired", "RequestExpired"})


@dataclass(frozen=True, slots=True)
class Found:
    """An object of a listing; `announced` = a checksum of the whole object is stored with it."""

    key: str
    size: int
    etag: str
    modified: str
    announced: bool


@dataclass(frozen=True, slots=True)
class Page:
    """A page of a listing; `after` says how to ask for the next one, None at the end."""

    objects: tuple[Found, ...]
    after: dict[str, str] | None


def parse_page(body: bytes, what: str) -> Page:
    """Raises IntegrityError for anything but a ListObjectsV2 answer."""
    try:
        root = ElementTree.fromstring(body)
    except ElementTree.ParseError:
        root = None
    if root is None or _tag(root) != "ListBucketResult":
        raise IntegrityError(f"{what}: the answer is not a listing ({len(body)} bytes, starting with {body[:40]!r})")
    encoded = _text(root, "EncodingType").lower() == "url"
    objects = tuple(_found(child, encoded, what) for child in root if _tag(child) == "Contents")
    after: dict[str, str] | None = None
    if _text(root, "IsTruncated").lower() == "true":
        token = _text(root, "NextContinuationToken")
        if not token and not objects:
            raise IntegrityError(f"{what}: the listing goes on, but the answer does not say from where")
        # Stores of the first version of the API go on from a marker.
        last = objects[-1].key if objects else ""
        after = {"continuation-token": token} if token else {"start-after": last, "marker": last}
    return Page(objects, after)


def is_error(body: bytes) -> bool:
    """Whether an answer is an error, whatever its status says."""
    return _ERROR.match(body) is not None


def _found(item: ElementTree.Element, encoded: bool, what: str) -> Found:
    key = _text(item, "Key")
    size = number(_text(item, "Size"))
    if size is None:
        raise IntegrityError(f"{what}: the listing names {key!r} without a size")
    return Found(
        unquote_plus(key) if encoded else key,
        size,
        _text(item, "ETag"),
        _text(item, "LastModified"),
        bool(_text(item, "ChecksumAlgorithm")) and _text(item, "ChecksumType").upper() != "COMPOSITE",
    )


def _tag(element: ElementTree.Element) -> str:
    return element.tag.rpartition("}")[2]


def _text(element: ElementTree.Element, name: str) -> str:
    return next((child.text or "" for child in element if _tag(child) == name), "")


def entry(path: str, key: str, size: int | None, etag: str, modified: str) -> Entry:
    """An Entry whose validator is the ETag; without one, the time of the last change, which is not to be relied on."""
    tag = bare_tag(etag)
    if not tag or etag.startswith("W/"):
        return Entry(path, size, f"weak:{tag or modified}", strong=False, key=key)
    digests = {"etag-md5": tag.lower()} if _MD5.fullmatch(tag.lower()) else {}
    return Entry(path, size, tag, digests=digests, key=key)


def stored_digests(head: Head, known: dict[str, str]) -> dict[str, str]:
    """`known` and the checksums of the whole object that an answer to HEAD carries, in hex."""
    found = dict(known)
    if head.get("x-amz-server-side-encryption").startswith("aws:kms") or head.get(
        "x-amz-server-side-encryption-customer-algorithm"
    ):
        # The ETag of an encrypted object has an MD5's form, but is none.
        found.pop("etag-md5", None)
    if head.get("x-amz-checksum-type").upper() != "COMPOSITE":
        for kind, length in _CHECKSUMS.items():
            digest = hex_of(head.get(f"x-amz-checksum-{kind}"), length)
            if digest:
                found[kind] = digest
    return found


@dataclass(frozen=True, slots=True)
class Asked:
    """What was asked of which bucket: for the sentence that explains a refusal."""

    operation: str
    bucket: str
    key: str
    region: str
    anon: bool
    payer: bool

    def explain(self, what: str, head: Head, body: bytes) -> MxError | None:
        """The error that a refusal means; None for what any server would mean by the status."""
        text = body.decode("utf-8", "replace")
        code, said = _element(text, "Code"), redact.text(_element(text, "Message"))[:300]
        place = _element(text, "Endpoint") or head.get("location")
        region = head.get("x-amz-bucket-region") or _element(text, "Region") or region_of(place)
        if (
            _REGION.fullmatch(region)
            and region != self.region
            and (head.status in {*MOVED_STATUS, 400} or code in _MOVED)
        ):
            return WrongRegion(f"{what}: the bucket {self.bucket} is in {region}, not in {self.region}", region)
        seen = f"{self.operation} of {self._object()}: HTTP {head.status} {code}".rstrip()
        if code in _EXPIRED:
            return Expired(
                f"{what}: the credentials have expired ({seen})", hint="renew them, and run the command again"
            )
        if code == "RequestTimeTooSkewed":
            return self._skewed(what, head)
        if code in _BUSY:
            return Unreachable(f"{what}: {seen}", retry_after=retry_after(head))
        if code in ("NoSuchBucket", "InvalidBucketName"):
            return NotFound(f"{what}: no such bucket: {self.bucket}")
        if head.status == 404 or head.get("x-amz-delete-marker") == "true":
            return NotFound(f"{what}: no such object ({seen})")
        if code == "InvalidObjectState":
            return AccessDenied(f"{what}: the object is archived ({seen})", hint="restore it in its bucket first")
        if said:
            seen += f", {said}"
        if head.status in (401, 403) or code in _DENIED:
            return AccessDenied(f"{what}: access denied ({seen})", hint=self._hint(code))
        if head.status in MOVED_STATUS:
            elsewhere = f", {redact.url(place)}" if place else ""
            return AccessDenied(f"{what}: the bucket is at another endpoint{elsewhere} ({seen})", hint=_ENDPOINT_HINT)
        if head.status == 400:
            return AccessDenied(f"{what}: refused ({seen})", hint=self._hint(code) if code in _WRONG_KEYS else "")
        return None

    def failure(self, what: str, head: Head, body: bytes) -> MxError:
        """What an error means that came with the status of a success."""
        return self.explain(what, head, body) or IntegrityError(
            f"{what}: an error in place of the answer: {body[:80]!r}"
        )

    def _object(self) -> str:
        return f"bucket {self.bucket}, key {self.key}" if self.key else f"bucket {self.bucket}"

    def _skewed(self, what: str, head: Head) -> AccessDenied:
        here = time.strftime("%a, %d %b %Y %H:%M:%S GMT", time.gmtime())
        there = head.get("date") or "unknown"
        return AccessDenied(
            f"{what}: this machine's clock is wrong (RequestTimeTooSkewed: here {here}, the store's {there})",
            hint="set the clock (chrony, ntp)",
        )

    def _hint(self, code: str) -> str:
        if code in _WRONG_KEYS:
            return "check the access key, the secret key and the session token"
        if code in _VIRTUAL_ONLY:
            return "this store wants the bucket in its host name: addressing_style = virtual under s3 in ~/.aws/config"
        if self.anon:
            return "the bucket may not be public: leave --anon out to use credentials"
        payer = "" if self.payer else ", or --requester-pays if the bucket asks for it"
        return f"the credentials need s3:{'ListBucket' if self.operation == 'ListObjectsV2' else 'GetObject'}{payer}"


def region_of(place: str) -> str:
    """The region in the name of one of AWS's endpoints."""
    match = _AWS_REGION.search(place)
    return match[1] if match else ""


def _element(text: str, name: str) -> str:
    match = re.search(rf"<{name}>([^<]*)</{name}>", text)
    return match[1] if match else ""
