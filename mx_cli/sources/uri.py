"""What people write for an origin, and its one canonical spelling without secrets.

hf://org/name[@revision][/folder]   org/name where no such path exists; a slash in a revision is %2F
s3://bucket/key   gs://bucket/key   `?`, `#` and `%` are part of the key
s3+https://endpoint/bucket/key      the canonical form for an endpoint that is not the default (gs+… alike)
https://host/path?query             secrets and signatures are not part of the canonical form
file:///path   file:/path   ./path   /path   ~   an existing path
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from urllib.parse import quote, unquote_to_bytes, urlsplit, urlunsplit

from mx_cli.base import redact
from mx_cli.base.errors import NotFound, UsageError
from mx_cli.model.identity import kind_of

KNOWN = ("hf://", "s3://", "gs://", "https://", "http://", "file://")
_ALIASES = {"gcs": "gs", "s3a": "s3", "s3n": "s3", "huggingface": "hf"}
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
_HUB_NAME = r"(?![-.])(?![A-Za-z0-9._-]*(?:--|\.\.))[A-Za-z0-9._-]{1,96}(?<![-.])"
_HUB_ID = re.compile(rf"{_HUB_NAME}/{_HUB_NAME}")
_HUB_URI = re.compile(
    rf"(?P<repository>{_HUB_NAME}(?:/{_HUB_NAME})?)"
    r"(?:@(?P<revision>refs/(?:pr|convert)/[^/]+|[^/]+))?(?:/(?P<folder>.*))?"
)
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_PORTS = {"http": 80, "https": 443}

# Query parameters that sign a link or are a secret: two links that differ in them alone name the same bytes.
_SIGNATURE = re.compile(
    r"x-amz-.*|x-goog-(?!generation).*|signature|expires|awsaccesskeyid|googleaccessid|key-pair-id|policy"
    r"|token|access_token|auth|apikey|api_key|password",
    re.IGNORECASE,
)
_AZURE = frozenset(
    [
        "sig",
        "se",
        "sp",
        "sv",
        "st",
        "sr",
        "ss",
        "srt",
        "spr",
        "sip",
        "si",
        "sdd",
        "skoid",
        "sktid",
        "skt",
        "ske",
        "sks",
        "skv",
    ]
)


@dataclass(frozen=True, slots=True)
class Uri:
    """`text` is canonical and without secrets; `shown` is as it was written, also without them.

    `place` is the bucket, the hub's repository, or the host; `path` the key, the folder in the repository, or the local
    path. `folder` = it was written with a slash at its end, so it can't be one object. `url` is what http asks for,
    with its secrets.
    """

    scheme: str
    text: str
    shown: str
    place: str = ""
    path: str = ""
    revision: str = ""
    folder: bool = False
    endpoint: str = ""
    url: str = field(default="", repr=False)


def parse(
    text: str, *, endpoint: Callable[[str], str] = lambda scheme: "", exists: Callable[[str], bool] = os.path.lexists
) -> Uri:
    """Read what was written; `endpoint` gives a scheme's endpoint when it is not the default. Opens no connection.

    Raises UsageError (no such scheme, no bucket …) and NotFound (a name that is neither a path nor a hub repository).
    """
    if not text.strip():
        raise UsageError("an empty URI", hint=f"write one of {', '.join(KNOWN)} or a path")
    if _CONTROL.search(text):
        raise UsageError(f"a URI with a control character: {redact.text(repr(text))}")
    match = _SCHEME.match(text)
    if not match:
        return _path_or_hub(text, exists)
    scheme, rest = match[1].lower(), text[match.end() :]
    scheme = _ALIASES.get(scheme, scheme)
    base, _, transport = scheme.partition("+")
    if scheme == "file":
        return _file_uri(text, rest)
    if any("\ud800" <= letter <= "\udfff" for letter in text):
        raise UsageError(f"not a URI: {redact.text(repr(text))} is not UTF-8")
    if scheme == "hf":
        return _hub(rest, text)
    if scheme in ("http", "https"):
        return _http(text)
    if base in ("s3", "gs") and (not transport or transport in _PORTS):
        if transport:
            server, _, rest = rest.partition("/")
            _no_credentials(server, text)
            return _object(base, rest, f"{transport}://{server}", text)
        return _object(base, rest, endpoint(base), text)
    raise UsageError(f"unknown scheme {scheme}:// in {redact.url(text)}", hint=f"known: {', '.join(KNOWN)} and paths")


def looks_like_hub(text: str) -> bool:
    """Whether `text` has the form org/name or org/name@revision."""
    return bool(_HUB_ID.fullmatch(text.partition("@")[0]))


def _path_or_hub(text: str, exists: Callable[[str], bool]) -> Uri:
    path = os.path.expanduser(text)
    if text.startswith(("/", "./", "../", "~")) or text in (".", "..") or exists(path):
        return _path(path, text)
    if looks_like_hub(text):
        return _hub(text, text)
    scheme, colon, rest = text.partition(":")
    if scheme.lower() == "file":
        if rest.startswith("/"):
            return _file_uri(text, rest)
        raise UsageError(f"{text}: a file URI names an absolute path", hint=f"write ./{rest.removeprefix('./')}")
    if colon and (start := f"{_ALIASES.get(scheme.lower(), scheme.lower())}://") in KNOWN:
        meant = redact.url(start + rest.lstrip("/"))
        raise UsageError(f"not a URI: no :// after {scheme}", hint=f"write {meant}")
    if kind_of(text):
        raise UsageError(f"{text} is an identity, and a model is wanted", hint=f"mx pull {text} brings the weights")
    raise NotFound(
        f"{text}: neither an existing path (looked in {os.getcwd()}) nor a hub repository (that would be org/name)",
        hint=f"write ./{text} for a path, hf://org/name for the hub, or one of {', '.join(KNOWN[1:])}",
    )


def _path(path: str, shown: str) -> Uri:
    absolute = os.path.abspath(path)
    text = "file://" + quote(os.fsencode(absolute))
    return Uri("file", text, shown, path=absolute, folder=path.endswith("/"))


def _file_uri(text: str, rest: str) -> Uri:
    """`rest` is what follows `file://`, or the one slash of `file:/path`."""
    host, slash, path = rest.partition("/")
    if host not in ("", "localhost") or not slash:
        raise UsageError(f"{text}: a file URI names a path on this machine", hint="write file:///absolute/path")
    path = os.fsdecode(unquote_to_bytes("/" + path))
    if "\0" in path:
        raise UsageError(f"{text}: no path holds a zero byte")
    return _path(path, text)


def _hub(rest: str, shown: str) -> Uri:
    match = _HUB_URI.fullmatch(rest.rstrip("/"))
    if not match:
        raise UsageError(f"{shown}: not a hub repository: {rest!r}", hint="write hf://org/name[@revision]")
    if match["repository"].partition("/")[0] in ("datasets", "spaces"):
        raise UsageError(f"{shown}: not a model repository", hint="write hf://org/name[@revision]")
    repository, folder = match["repository"], (match["folder"] or "").strip("/")
    # A branch may have slashes in its name; encoded they do not begin a folder.
    revision = (match["revision"] or "").replace("%2F", "/").replace("%2f", "/")
    text = f"hf://{repository}" + (f"/{folder}" if folder else "")
    return Uri("hf", text, shown, place=repository, path=folder, revision=revision)


def _object(scheme: str, rest: str, endpoint: str, shown: str) -> Uri:
    bucket, _, key = rest.partition("/")
    _no_credentials(bucket, shown)
    if not bucket:
        raise UsageError(f"{shown}: no bucket", hint=f"write {scheme}://bucket/key")
    if endpoint:
        endpoint = _server(endpoint)
    prefix = f"{scheme}://" if not endpoint else f"{scheme}+{endpoint}/"
    path = key.rstrip("/")
    text = f"{prefix}{bucket}" + (f"/{path}" if path else "")
    return Uri(scheme, text, shown, place=bucket, path=path, folder=not path or key != path, endpoint=endpoint)


def _no_credentials(server: str, shown: str) -> None:
    if "@" in server:
        raise UsageError(
            f"{redact.url(shown)}: credentials do not belong into a URI",
            hint="use the provider's own variables and files",
        )


def _server(endpoint: str) -> str:
    """An endpoint's canonical form: scheme://host[:port][/path] without user info; http where no scheme is given."""
    try:
        parts = urlsplit(endpoint if "://" in endpoint else f"http://{endpoint}")
        port = parts.port
    except ValueError:
        raise UsageError(f"not an endpoint: {redact.url(endpoint)}") from None
    if parts.scheme not in _PORTS or not parts.hostname:
        raise UsageError(f"not an endpoint: {redact.url(endpoint)}", hint="write http://host:port or https://host")
    return f"{parts.scheme}://{_netloc(parts.scheme, parts.hostname, port)}{parts.path.rstrip('/')}"


def _netloc(scheme: str, host: str, port: int | None) -> str:
    if ":" in host:
        host = f"[{host}]"
    return host if port in (None, _PORTS[scheme]) else f"{host}:{port}"


def _http(text: str) -> Uri:
    try:
        parts = urlsplit(text)
        port = parts.port
        host = (parts.hostname or "").encode("idna").decode() if parts.hostname and ":" not in parts.hostname else None
    except (ValueError, UnicodeError):
        raise UsageError(f"not a URL: {redact.url(text)}") from None
    host = host or parts.hostname or ""
    if not host:
        raise UsageError(f"{redact.url(text)}: no host")
    scheme = parts.scheme.lower()
    netloc = _netloc(scheme, host, port)
    path = encode_path(parts.path)
    user = parts.netloc.rpartition("@")[0]
    url = urlunsplit((scheme, f"{user}@{netloc}" if user else netloc, path, parts.query, ""))
    kept = _without_signatures(parts.query)
    canonical = urlunsplit((scheme, netloc, path, kept, ""))
    return Uri(scheme, canonical, redact.url(text), place=netloc, path=parts.path, folder=path.endswith("/"), url=url)


def is_signed(query: str) -> bool:
    """Whether parameters of a URL sign it."""
    return _without_signatures(query) != encode_query("&".join(filter(None, query.split("&"))))


def _without_signatures(query: str) -> str:
    pairs = [pair for pair in query.split("&") if pair]
    names = {pair.partition("=")[0] for pair in pairs}
    drop = _AZURE if "sig" in names else frozenset({"sig"})
    kept = [p for p in pairs if not _SIGNATURE.fullmatch(p.partition("=")[0]) and p.partition("=")[0] not in drop]
    return encode_query("&".join(kept))


def encode_path(path: str) -> str:
    """A URL's path as it goes over the wire: what is encoded already stays so."""
    return quote(path or "/", safe="/%!$&'()*+,;=:@~-._")


def encode_query(query: str) -> str:
    """The same for what follows the question mark."""
    return quote(query, safe="/?%!$&'()*+,;=:@~-._[]{}|^`")


def last_component(path: str) -> str:
    """The file name of a URL's path: its last component, percent-decoded once, made safe."""
    raw = unquote_to_bytes(path.rstrip("/").rpartition("/")[2]).decode("utf-8", "replace")
    name = re.sub(r"[\x00-\x1f\x7f/\\]", "_", raw)
    if name in ("", ".", ".."):
        return "index" if not path.strip("/") else "download"
    return name
