"""Objects of a Google Cloud Storage bucket, through its JSON API."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, TypeVar
from urllib.parse import quote, urlencode

from mx_cli.base import redact
from mx_cli.base.cancel import Stop
from mx_cli.base.errors import AccessDenied, IntegrityError, MxError, NotFound, OriginChanged, UsageError
from mx_cli.engine.ports import ReadItem, Stream
from mx_cli.model.manifest import Entry
from mx_cli.sources.answers import Sign, Target, hex_of, nowhere, unsigned
from mx_cli.sources.gcs_token import Token
from mx_cli.sources.origin import Context
from mx_cli.sources.store import Store, markers
from mx_cli.sources.uri import Uri
from mx_cli.sources.wire import Head, number

_GOOGLE = "https://storage.googleapis.com"
_PAGE = "1000"
_FIELDS = "name,size,generation,crc32c,md5Hash,contentType,contentEncoding"

T = TypeVar("T")


class _Refused(AccessDenied):
    """HTTP 401: a new token may do."""


class Gcs(Store):
    """Reads are pinned to the listed generation."""

    KEY, VERSION = "name", "generation"

    def __init__(self, uri: Uri, context: Context) -> None:
        super().__init__(uri, context)
        settings = context.settings
        # An emulator takes no credentials, and none may be sent in the clear.
        anon = settings.anon or uri.endpoint.startswith("http://")
        self._token = None if anon else Token(context, uri.shown)
        if self._version and not self._version.isdigit():
            raise UsageError(f"{uri.shown}: a version in gs:// is a generation, a number: {self._version!r}")

    def _authenticate(self) -> None:
        if self._token:
            self._token.value()

    def _object(self) -> tuple[Entry, ...]:
        key = self._uri.path
        query = {"fields": _FIELDS, **({"generation": self._version} if self._version else {})}
        row = self._json(f"/{quote(key, safe='')}", query, key, missing=True)
        return (_entry(key.rpartition("/")[2], row, self._uri.shown),) if row else ()

    def _below(self, stop: Stop) -> tuple[Entry, ...]:
        prefix = f"{self._uri.path}/" if self._uri.path else ""
        rows: list[dict[str, Any]] = []
        asked: set[str] = set()
        token = ""
        while token not in asked:
            stop.check()
            asked.add(token)
            query = {"prefix": prefix, "maxResults": _PAGE, "fields": f"nextPageToken,items({_FIELDS})"}
            page = self._json("", {**query, "pageToken": token} if token else query, "")
            rows += self._rows(page)
            token = str(page.get("nextPageToken") or "")
            if not token:
                break
        else:
            raise IntegrityError(f"{self._uri.shown}: the listing does not advance")
        folders = markers({_name(row): number(str(row.get("size", ""))) or 0 for row in rows})
        wanted = [row for row in rows if _name(row).startswith(prefix) and _name(row) not in folders]
        found = [_entry(_name(row).removeprefix(prefix), row, self._uri.shown) for row in wanted]
        return tuple(sorted(found, key=lambda item: item.path.encode("utf-8", "surrogatepass")))

    def _rows(self, page: dict[str, Any]) -> list[dict[str, Any]]:
        rows = page.get("items") or []
        if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
            raise IntegrityError(f"{self._uri.shown}: the listing holds a row that is no object")
        return rows

    # -- requests --------------------------------------------------------------------------------------------------

    def _json(self, rest: str, query: dict[str, str], key: str, *, missing: bool = False) -> dict[str, Any]:
        """The answer's object; an empty one for 404 when `missing` is allowed."""
        what = f"gs://{self._uri.place}/{key}" if key else self._uri.shown

        def call(sign: Sign) -> dict[str, Any]:
            url = f"{self._server()}/storage/v1/b/{quote(self._uri.place)}/o{rest}?{self._query(query)}"
            explain = self._explainer("objects.get" if key else "objects.list", key, pinned=False)
            reply = self._web.request(
                "GET", url, what, sign=sign, explain=explain, allow=(404,) if missing else (), follow=nowhere
            )
            if reply.status == 404:
                self._check_bucket(what, reply.body)
                return {}
            return _parsed(reply.body, what)

        return self._signed(call)

    def open(self, item: ReadItem) -> Stream:
        """See `Reader.open`."""
        return self._signed(lambda sign: self._read(self._pinned(item.entry, sign), item))

    def _pinned(self, entry: Entry, sign: Sign) -> Target:
        query = self._query({"alt": "media", "generation": entry.version})
        url = f"{self._server()}/download/storage/v1/b/{quote(self._uri.place)}/o/{quote(entry.key, safe='')}?{query}"
        what = f"gs://{self._uri.place}/{entry.key}"
        explain = self._explainer("objects.get", entry.key, pinned=True)
        return Target(url, what, sign, pinned={"x-goog-generation": entry.version}, explain=explain)

    def _signed(self, call: Callable[[Sign], T]) -> T:
        """`call`, once more with a new token when the first is refused."""
        if self._token is None:
            return call(unsigned)
        used = self._token.value()
        try:
            return call(_bearer(used))
        except _Refused:
            if not self._token.renew(used):
                raise
        return call(_bearer(self._token.value()))

    def _query(self, query: dict[str, str]) -> str:
        if self._context.settings.requester_pays:
            project = self._token.project if self._token else ""
            if not project:
                raise UsageError(
                    f"{self._uri.shown}: --requester-pays needs to know who pays", hint="set GOOGLE_CLOUD_PROJECT"
                )
            query = {**query, "userProject": project}
        return urlencode(query, quote_via=quote, safe="")

    def _server(self) -> str:
        return self._uri.endpoint or _GOOGLE

    # -- refusals --------------------------------------------------------------------------------------------------

    def _explainer(self, operation: str, key: str, *, pinned: bool) -> Callable[[str, Head, bytes], MxError | None]:
        where = f"bucket {self._uri.place}" + (f", object {key}" if key else "")

        def explain(what: str, head: Head, body: bytes) -> MxError | None:
            seen = f"{operation} of {where}: HTTP {head.status}"
            if head.status == 401:
                return _Refused(f"{what}: access denied ({seen})", hint=self._hint())
            if head.status in (400, 403):
                said = _message(body)
                return AccessDenied(f"{what}: access denied ({seen}{', ' + said if said else ''})", hint=self._hint())
            if head.status == 404 and pinned:
                # Without versioning the old generation is gone as soon as there is a new one: list again, and see.
                return OriginChanged(f"{what}: the listed generation is gone ({seen})")
            if head.status == 404:
                return NotFound(f"{what}: not found ({seen}{', ' + _message(body) if body else ''})")
            return None

        return explain

    def _check_bucket(self, what: str, body: bytes) -> None:
        if "bucket" in _message(body).lower():
            raise NotFound(f"{what}: no such bucket: {self._uri.place}")

    def _hint(self) -> str:
        if self._token is None:
            return "the bucket may not be public: leave --anon out to use credentials"
        payer = "" if self._context.settings.requester_pays else ", or --requester-pays if the bucket asks for it"
        return f"the account needs storage.objects.get and storage.objects.list{payer}; for a public bucket use --anon"


def _bearer(token: str) -> Sign:
    def sign(method: str, url: str, headers: dict[str, str]) -> dict[str, str]:
        return {**headers, "Authorization": f"Bearer {token}"}

    return sign


def _parsed(body: bytes, what: str) -> dict[str, Any]:
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise IntegrityError(f"{what}: the answer is not that of a JSON API ({len(body)} bytes)")
    return value


def _name(row: dict[str, Any]) -> str:
    return str(row.get("name", ""))


def _entry(path: str, row: dict[str, Any], shown: str) -> Entry:
    size, generation = number(str(row.get("size", ""))), str(row.get("generation", ""))
    if size is None or not generation:
        raise IntegrityError(f"{shown}: the listing names {_name(row)!r} without size or generation")
    if str(row.get("contentEncoding", "")).lower() == "gzip":
        # What is told of it is told of the packed bytes; it comes unpacked, and whole.
        return Entry(path, None, generation, key=_name(row), version=generation)
    digests = {"crc32c": hex_of(str(row.get("crc32c", "")), 4), "md5": hex_of(str(row.get("md5Hash", "")), 16)}
    known = {kind: digest for kind, digest in digests.items() if digest}
    return Entry(path, size, generation, digests=known, key=_name(row), version=generation)


def _message(body: bytes) -> str:
    """What the API's error says, cut and without secrets."""
    try:
        said = json.loads(body)["error"]["message"]
    except (ValueError, KeyError, TypeError, RecursionError):
        said = body[:200].decode("utf-8", "replace")
    return redact.text(str(said)).partition("\n")[0][:300]
