"""What is asked of a server and what its answer means: targets, refusals, and the checks before a byte is used."""

from __future__ import annotations

import base64
import binascii
import contextlib
import email.utils
import http
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from urllib.parse import unquote_to_bytes, urlsplit

from mx_cli.base.errors import AccessDenied, IntegrityError, MxError, NotFound, OriginChanged, Unreachable
from mx_cli.engine.ports import NoRanges, ReadItem
from mx_cli.sources.wire import Head, number

GOOD_STATUS = frozenset({200, 203, 206})
"""Where the answer is what was asked for. 202 is a promise, 204 is nothing."""
AGAIN_STATUS = frozenset({408, 425, 429, *range(500, 600)}) - {501, 505, 511}
"""What may be otherwise in a while."""
_SPENT = re.compile(r";\s*r=0\s*;\s*t=(\d{1,6})\b")
MOVED_STATUS = frozenset({301, 302, 303, 307, 308})
_FORBIDDEN = frozenset({402, 451, 511})
HEADLESS_STATUS = frozenset({400, 403, 405, 501})
"""What servers say to HEAD when they only do GET; a link signed for GET answers 403."""
RANGELESS_STATUS = frozenset({400, 405, 406, 416, 417, 501, 505})
"""How servers refuse a Range that they would give whole."""

Sign = Callable[[str, str, dict[str, str]], dict[str, str]]
"""(method, url, headers) -> all headers to send; called for each request, so that credentials stay fresh."""


def unsigned(method: str, url: str, headers: dict[str, str]) -> dict[str, str]:
    return headers


Explain = Callable[[str, Head, bytes], MxError | None]
"""(what was asked for, head, up to 64 KiB of the body) -> the error that a refusal means, None for the usual one."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where redirects lead to; `trusted` = credentials for the first host may be sent there."""

    url: str
    trusted: bool


Follow = Callable[[Head, str, str], Place | None]
"""(head of a redirect, where it came from, where it leads) -> where to ask next; None: the redirect is the answer."""


def same_place(home: str, moved: str) -> bool:
    """Whether credentials for `home` may go to `moved`: the same scheme, host and port, or the same host's https."""
    old, new = urlsplit(home), urlsplit(moved)
    if old.hostname != new.hostname:
        return False
    if old.scheme == "http" and new.scheme == "https":
        return old.port in (None, 80) and new.port in (None, 443)
    return (old.scheme, old.port) == (new.scheme, new.port)


def anywhere(head: Head, home: str, moved: str) -> Place | None:
    """Follows every redirect; credentials go no further than to the host that they were given for."""
    return Place(moved, same_place(home, moved))


def nowhere(head: Head, home: str, moved: str) -> Place | None:
    """Follows none."""
    return None


@dataclass(frozen=True, slots=True)
class Target:
    """How to fetch one file: its URL, how to sign for it, and the answer headers that must equal what was pinned."""

    url: str
    what: str
    sign: Sign = unsigned
    headers: Mapping[str, str] = field(default_factory=dict)
    pinned: Mapping[str, str] = field(default_factory=dict)
    explain: Explain = lambda what, head, body: None
    follow: Follow = anywhere


class OtherTag(OriginChanged):
    """The answer's own headers say that it is of another object."""


class Unmatched(OriginChanged):
    """If-Match was refused."""


def refusal(what: str, head: Head, body: bytes = b"") -> MxError:
    """What a status outside GOOD_STATUS means."""
    status = head.status
    seen = f"{what}: HTTP {status}"
    if status < 300:
        return IntegrityError(f"{seen}, and not the file")
    if status in MOVED_STATUS and not head.get("location"):
        return Unreachable(f"{seen}, a redirect that does not say where to", permanent=True)
    if status in (401, 407):
        return AccessDenied(f"{seen}, credentials are missing or refused")
    if status == 403:
        return AccessDenied(f"{seen}, access denied")
    if status in (404, 410):
        return NotFound(f"{seen}, not found")
    if status == 412:
        return Unmatched(f"{seen}, the object is not the one that was listed")
    if status == 416:
        return OriginChanged(f"{seen}, the object is shorter than it was when listed")
    if status in _FORBIDDEN:
        return AccessDenied(seen + _phrase(status))
    if status in AGAIN_STATUS:
        return Unreachable(seen, retry_after=retry_after(head))
    return Unreachable(seen + _phrase(status), permanent=True)


def _phrase(status: int) -> str:
    """What the standard calls a status that is seldom met."""
    with contextlib.suppress(ValueError):
        return f", {http.HTTPStatus(status).phrase.lower()}"
    return ""


def retry_after(head: Head) -> float | None:
    """Seconds that a server asks to be left alone for."""
    text = head.get("retry-after")
    if not text:
        # The hub's way: `"api";r=0;t=55`.
        spent = _SPENT.search(head.get("ratelimit"))
        return float(spent[1]) if spent else None
    if (seconds := number(text)) is not None:
        return float(seconds)
    moment = email.utils.parsedate_tz(text)
    try:
        return max(0.0, email.utils.mktime_tz(moment) - time.time()) if moment else None
    except (ValueError, OverflowError):
        return None


def check_answer(target: Target, item: ReadItem, head: Head, ranged: bool) -> None:
    """Raise unless the answer is the piece asked for of the object that was pinned. See `Reader.open`."""
    what, entry = target.what, item.entry
    check_codings(what, head)
    proved = False
    for name, value in target.pinned.items():
        seen = head.get(name)
        if seen and bare_tag(seen) != bare_tag(value):
            raise OtherTag(f"{what}: the object changed ({name}: expected {value}, observed {seen})")
        proved = proved or bool(seen)
    if not proved:
        refuse_html(what, entry.path, head)
    if not ranged:
        _check_total(what, entry.size, head.length, "Content-Length")
        return
    span = head.get("content-range")
    if not span:
        if (
            head.status == 200
            and item.offset == 0
            and item.length is not None
            and head.length == item.length == entry.size
        ):
            return
        raise NoRanges(f"{what}: the origin does not serve ranges (HTTP {head.status} without Content-Range)")
    first, last, total = parse_content_range(span)
    if entry.size is not None and total is not None:
        _check_total(what, entry.size, total, "Content-Range")
    if first != item.offset or (item.end is not None and last != item.end - 1):
        raise NoRanges(f"{what}: asked for {item.offset}-{(item.end or 0) - 1}, the origin answered {span!r}")
    if head.length is not None and item.length is not None and head.length != item.length:
        raise NoRanges(f"{what}: asked for {item.length} bytes, the origin sends {head.length}")


def packed_as(head: Head) -> str:
    """The coding of the bytes that an answer speaks of; empty for plain ones."""
    coding = head.get("content-encoding").lower()
    # aws-chunked is what some uploaders leave in an object's metadata; the bytes are plain.
    return "" if coding in ("identity", "aws-chunked") else coding


def check_codings(what: str, head: Head) -> None:
    """Raise IntegrityError where the bytes that follow are packed: what was asked for is the plain ones."""
    if packed := packed_as(head):
        raise IntegrityError(
            f"{what}: the origin sent Content-Encoding {packed}, though identity was asked for",
            hint="store the object unpacked, or switch off compression for it at the server or proxy",
        )
    transfer = head.get("transfer-encoding").lower()
    if transfer not in ("", "identity", "chunked"):
        raise IntegrityError(f"{what}: the origin sent Transfer-Encoding {transfer}, which was not asked for")


def refused_range(target: Target, item: ReadItem, head: Head) -> Exception:
    """What one of RANGELESS_STATUS means to a range within the listed size: the file is shorter, or ranges are not served."""
    total, size = number(head.get("content-range").rpartition("/")[2]), item.entry.size
    if total not in (None, size):
        return OriginChanged(
            f"{target.what}: wrong size (expected {size} bytes from the listing, observed {total} in Content-Range)"
        )
    return NoRanges(f"{target.what}: the origin refuses a range within the file (HTTP {head.status})")


def refuse_html(what: str, path: str, head: Head) -> None:
    """Raise IntegrityError for a page in place of a file: proxies and CDNs send log-in and error pages with status 200."""
    kind = head.get("content-type").split(";")[0].strip().lower()
    if kind == "text/html" and not path.lower().endswith((".html", ".htm")):
        raise IntegrityError(f"{what}: got text/html, {head.get('content-length') or 'unknown'} bytes, not the file")


def basic(user: str) -> str:
    """The Authorization for the `name:password` of a URL."""
    return "Basic " + base64.b64encode(unquote_to_bytes(user)).decode()


def bare_tag(text: str) -> str:
    """An entity tag without quotes and weakness mark; other values as they are."""
    return text.removeprefix("W/").strip('"')


def parse_content_range(text: str) -> tuple[int, int, int | None]:
    """(first, last, total) of `bytes 0-99/1234`; (-1, -1, None) for anything else."""
    unit, _, rest = text.partition(" ")
    span, _, total = rest.partition("/")
    first, last = (number(text) for text in span.partition("-")[::2])
    if unit.lower() != "bytes" or first is None or last is None:
        return -1, -1, None
    return first, last, number(total)


def size_of(head: Head) -> int | None:
    """The size of the file that an answer to HEAD, or to GET of its first byte, speaks of; None when it does not say."""
    if head.status == 416:
        # An empty file has no first byte.
        return number(head.get("content-range").rpartition("/")[2])
    if head.status == 206:
        return parse_content_range(head.get("content-range"))[2]
    return head.length


def hex_of(encoded: str, length: int) -> str:
    """Hex of a base64 digest of `length` bytes; empty for anything else: none, or a checksum of checksums (`…-7`)."""
    try:
        digest = base64.b64decode(encoded, validate=True)
        return digest.hex() if len(digest) == length else ""
    except (binascii.Error, ValueError):
        return ""


def _check_total(what: str, expected: int | None, observed: int | None, source: str) -> None:
    if expected is not None and observed is not None and expected != observed:
        raise IntegrityError(
            f"{what}: wrong size (expected {expected} bytes from the listing, observed {observed} in {source})"
        )
