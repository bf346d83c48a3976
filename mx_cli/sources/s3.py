"""Objects of an S3 bucket, or of a store that speaks S3: one object, or all below a prefix."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar
from urllib.parse import urlsplit

from mx_cli.base.cancel import Stop
from mx_cli.base.errors import AccessDenied, IntegrityError, UsageError
from mx_cli.engine.ports import ReadItem, Stream
from mx_cli.engine.together import side_by_side
from mx_cli.model.manifest import Entry
from mx_cli.sources import s3_endpoint
from mx_cli.sources.answers import Place, Target, bare_tag, size_of
from mx_cli.sources.origin import SMALL_WORKERS, Context
from mx_cli.sources.s3_answers import Asked, Found, Page, entry, is_error, parse_page, region_of, stored_digests
from mx_cli.sources.s3_keys import Credentials, Expired, WrongRegion, signing
from mx_cli.sources.sigv4 import Signer, encode_key, encode_query
from mx_cli.sources.store import Store, markers
from mx_cli.sources.uri import Uri, is_signed
from mx_cli.sources.web import Reply
from mx_cli.sources.wire import Head

# Small objects have an ETag that is their MD5; asking each for more would take longer than fetching it.
_CHECKSUM_FROM = 1 << 20
_PAGE = "1000"

T = TypeVar("T")


class S3(Store):
    """Reads are pinned to the listed ETag, and to the version id that was asked for."""

    KEY, VERSION = "key", "version id"

    def __init__(self, uri: Uri, context: Context) -> None:
        super().__init__(uri, context)
        self._credentials = Credentials(context, uri.shown)
        self._bucket = bucket = uri.place
        if ":" in bucket:
            raise UsageError(f"{uri.shown}: {bucket} is no bucket", hint="of an access point, write its alias")
        if bucket.endswith("--x-s3") and not uri.endpoint:
            raise UsageError(
                f"{uri.shown}: directory buckets (S3 Express) are not supported", hint="use a plain bucket"
            )
        self._endpoint = s3_endpoint.Endpoint(bucket, uri.endpoint, context.environ, context.settings.home)

    def _authenticate(self) -> None:
        self._credentials.signer()

    # -- one object ------------------------------------------------------------------------------------------------

    def _object(self) -> tuple[Entry, ...]:
        key = self._uri.path
        reply = self._head(key, self._version)
        head = reply.head
        if head.status in (404, 405):
            return ()
        if head.get("content-type").startswith("application/x-directory") and not size_of(head):
            return ()
        found = entry(key.rpartition("/")[2], key, size_of(head), head.get("etag"), head.get("last-modified"))
        digests = stored_digests(head, dict(found.digests))
        return (replace(found, digests=digests, version=self._version),)

    def _head(self, key: str, version: str = "") -> Reply:
        checksum = {"x-amz-checksum-mode": "ENABLED"}
        reply = self._ask("HEAD", "HeadObject", key, version, headers=checksum, allow=(400, 404, 405))
        if reply.status == 400:
            # An answer to HEAD has no body, so it doesn't say what was wrong; an answer to GET does.
            first = {"Range": "bytes=0-0"}
            reply = self._ask("GET", "GetObject", key, version, headers=first, allow=(404, 405, 416))
        return reply

    # -- a prefix --------------------------------------------------------------------------------------------------

    def _below(self, stop: Stop) -> tuple[Entry, ...]:
        prefix = f"{self._uri.path}/" if self._uri.path else ""
        objects: list[Found] = []
        after: dict[str, str] | None = {}
        starts: list[dict[str, str]] = []
        while after is not None:
            stop.check()
            if after in starts:
                raise IntegrityError(f"{self._uri.shown}: the listing does not advance")
            starts.append(after)
            page = self._page(prefix, after)
            objects += page.objects
            after = page.after
        folders = markers({found.key: found.size for found in objects})
        wanted = [found for found in objects if found.key.startswith(prefix) and found.key not in folders]
        asked = [found for found in wanted if found.announced and found.size >= _CHECKSUM_FROM]
        stored = dict(zip(asked, side_by_side(self._stored, asked, SMALL_WORKERS, self._context.stop), strict=True))
        entries = [self._listed(found, prefix, stored.get(found)) for found in wanted]
        return tuple(sorted(entries, key=lambda item: item.path.encode("utf-8", "surrogatepass")))

    def _page(self, prefix: str, after: dict[str, str]) -> Page:
        query = encode_query({"list-type": "2", "prefix": prefix, "encoding-type": "url", "max-keys": _PAGE, **after})
        reply = self._ask("GET", "ListObjectsV2", "", query=query, check=self._check_listing)
        return parse_page(reply.body, self._uri.shown)

    def _check_listing(self, reply: Reply) -> None:
        """Some stores begin to answer before they know whether they can."""
        if is_error(reply.body):
            raise self._asked("ListObjectsV2", "").failure(self._uri.shown, reply.head, reply.body)

    def _stored(self, found: Found) -> Head | None:
        """What the store keeps beside the object that the listing only announced; None when it may not be asked."""
        try:
            return self._head(found.key).head
        except AccessDenied:
            return None

    @staticmethod
    def _listed(found: Found, prefix: str, head: Head | None) -> Entry:
        listed = entry(found.key.removeprefix(prefix), found.key, found.size, found.etag, found.modified)
        if head is None or head.status >= 300 or bare_tag(head.get("etag")) != listed.validator:
            return listed
        return replace(listed, digests=stored_digests(head, dict(listed.digests)))

    # -- requests --------------------------------------------------------------------------------------------------

    def open(self, item: ReadItem) -> Stream:
        """See `Reader.open`."""
        return self._signed(lambda signer: self._read(self._pinned(item.entry, signer), item))

    def _pinned(self, item: Entry, signer: Signer | None) -> Target:
        headers = self._payer()
        pinned: dict[str, str] = {}
        if item.strong:
            headers |= self._if_match(item)
            pinned["etag"] = item.validator
        if item.version:
            pinned["x-amz-version-id"] = item.version
        return Target(
            self._url(item.key, item.version),
            f"s3://{self._bucket}/{item.key}",
            signing(signer),
            headers,
            pinned,
            self._asked("GetObject", item.key).explain,
            self._follow,
        )

    def _ask(
        self,
        method: str,
        operation: str,
        key: str,
        version: str = "",
        *,
        query: str = "",
        headers: dict[str, str] | None = None,
        allow: tuple[int, ...] = (),
        check: Callable[[Reply], None] | None = None,
    ) -> Reply:
        def call(signer: Signer | None) -> Reply:
            asked = self._asked(operation, key)
            url = self._list_url(query) if query else self._url(key, version)
            what = f"s3://{self._bucket}/{key}" if key else self._uri.shown
            reply = self._web.request(
                method,
                url,
                what,
                sign=signing(signer),
                headers={**self._payer(), **(headers or {})},
                explain=asked.explain,
                allow=allow,
                follow=self._follow_asking,
                head_only=operation == "GetObject",
                check=check,
            )
            moved = asked.explain(what, reply.head, reply.body) if reply.status == 400 else None
            if isinstance(moved, WrongRegion):
                raise moved
            return reply

        return self._signed(call)

    def _signed(self, call: Callable[[Signer | None], T]) -> T:
        """`call`, once more for each of: the bucket is in another region, the credentials have expired."""
        moved = renewed = False
        while True:
            region = self._credentials.region
            signer = self._credentials.signer()
            try:
                return call(signer)
            except WrongRegion as error:
                if moved or not self._credentials.move(error.region, region):
                    raise
                moved = True
            except Expired:
                if renewed or not self._credentials.renew(signer):
                    raise
                renewed = True

    def _asked(self, operation: str, key: str) -> Asked:
        settings = self._context.settings
        return Asked(operation, self._bucket, key, self._credentials.region, settings.anon, settings.requester_pays)

    def _payer(self) -> dict[str, str]:
        return {"x-amz-request-payer": "requester"} if self._context.settings.requester_pays else {}

    def _follow(self, head: Head, asked: str, moved: str) -> Place | None:
        """See `Follow`. Another region is no place to follow to, but one to sign for from now on."""
        region = self._credentials.region
        if (head.get("x-amz-bucket-region") or region_of(moved)) not in ("", region):
            return None
        return self._endpoint.follow(asked, moved, region)

    def _follow_asking(self, head: Head, asked: str, moved: str) -> Place | None:
        """The same for what the store itself has to say. Of an object it may say it by a signed link."""
        place = self._follow(head, asked, moved)
        return place if place and (place.trusted or is_signed(urlsplit(moved).query)) else None

    def _server(self) -> str:
        """The bucket's URL without a slash at its end."""
        return self._endpoint.server(self._credentials.region)

    def _list_url(self, query: str) -> str:
        server = self._server()
        return f"{server}?{query}" if server.endswith(f"/{self._bucket}") else f"{server}/?{query}"

    def _url(self, key: str, version: str = "") -> str:
        query = f"?{encode_query({'versionId': version})}" if version else ""
        return f"{self._server()}/{encode_key(key)}{query}"
