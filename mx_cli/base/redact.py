"""Secrets never reach a log, an error, a file or a process title."""

from __future__ import annotations

import re

_URL = re.compile(r"[a-z][a-z0-9+.-]*://(?:(?:[^\s'\"<>)\]\[/@]*@)?\[[0-9a-f:.%]+\])?[^\s'\"<>)\]]+", re.IGNORECASE)
_TOKEN = re.compile(
    r"\b((?-i:hf_)(?!(?:token|home|hub|endpoint|cache)(?![A-Za-z0-9]))[A-Za-z0-9]{4,}|AKIA[A-Z0-9]{12,}|ya29\.[\w-]+|Bearer\s+\S+|AWS4-HMAC-SHA256\s.*)",
    re.IGNORECASE,
)
_QUERY_SECRET = re.compile(
    r"(?<![\w-])((?:X-Amz-[\w-]*|X-Goog-[\w-]*|[\w-]*(?:token|signature|password|secret|accesskeyid|api_?key)|sig|se|sp)=)"
    r"[^&\s'\"]+",
    re.IGNORECASE,
)
_USER = re.compile(r"(?<![\w/:])([\w.+-]+):[^\s/@'\"]+@(?=[\w\[])")


def url(text: str) -> str:
    """The URL without user info, query and fragment. Object stores' URIs keep `?` and `#`: there they belong to the key."""
    from urllib.parse import urlsplit, urlunsplit

    try:
        parts = urlsplit(text)
    except ValueError:
        return "(unprintable URL)"
    try:
        _ = parts.port
    except ValueError:
        # Not a port: a password with a slash, a ? or a # that is not escaped ends what looks like the host.
        _, at, after = text.partition("://")[2].rpartition("@")
        if at:
            return url(f"{parts.scheme}://{after}")
    host = parts.netloc.rpartition("@")[2]
    if parts.scheme in ("http", "https"):
        return urlunsplit((parts.scheme, host, parts.path, "", ""))
    return text.replace(parts.netloc, host, 1) if "@" in parts.netloc else text


def text(message: str) -> str:
    """`message` with every URL reduced and every known form of token replaced. Idempotent."""
    cleaned = _URL.sub(lambda found: url(found[0]), message)
    cleaned = _QUERY_SECRET.sub(r"\1***", cleaned)
    cleaned = _USER.sub(r"\1:***@", cleaned)
    return _TOKEN.sub("***", cleaned)
