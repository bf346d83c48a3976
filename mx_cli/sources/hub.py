"""A model repository of a Hugging Face hub, or of a mirror of one, at one commit."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any
from urllib.parse import quote, urljoin, urlsplit

from mx_cli.base import redact
from mx_cli.base.cancel import Stop
from mx_cli.base.errors import AccessDenied, IntegrityError, MxError, NotFound, UsageError
from mx_cli.engine.together import side_by_side
from mx_cli.model.manifest import Entry, Listing
from mx_cli.sources.answers import (
    HEADLESS_STATUS,
    MOVED_STATUS,
    Target,
    basic,
    nowhere,
    refusal,
    refuse_html,
    same_place,
    size_of,
)
from mx_cli.sources.hub_rows import entries
from mx_cli.sources.hub_token import find_token
from mx_cli.sources.origin import SMALL_WORKERS, Context, WebOrigin, no_versions, one_revision
from mx_cli.sources.uri import Uri
from mx_cli.sources.web import Reply
from mx_cli.sources.wire import Head, number

_SHA = re.compile(r"[0-9a-f]{40}")
_NEXT = re.compile(r"<([^>]+)>\s*;[^,]*rel=\"?next\"?")


class Hub(WebOrigin):
    """Resolves a branch or tag once; from then on all is asked for by commit, so a branch that moves changes nothing."""

    def __init__(self, uri: Uri, context: Context) -> None:
        no_versions(context, uri.shown)
        super().__init__(uri, context)
        self._endpoint, user = _endpoint(context.settings.hf_endpoint)
        self._token, self._token_source = find_token(context)
        self._authorization = f"Bearer {self._token}" if self._token else basic(user) if user else ""

    def listing(self, revision: str | None, stop: Stop) -> Listing:
        """See `Origin.listing`. The revision is the commit's SHA-1; `ref` the branch or tag it was resolved from."""
        wanted = one_revision(self.revision, revision, self._uri.shown) or "main"
        sha, siblings = self._resolve(wanted)
        files = self._in_folder(self._tree(sha, siblings))
        if not files:
            where = f" in {self._uri.path}" if self._uri.path else ""
            raise NotFound(f"{self._uri.shown}: no files{where} (looked at commit {sha})")
        files = side_by_side(lambda entry: self._sized(entry, sha), files, SMALL_WORKERS, self._context.stop)
        return Listing(self.uri, sha, tuple(sorted(files, key=_order)), "" if wanted == sha else wanted)

    # -- which commit ----------------------------------------------------------------------------------------------

    def _resolve(self, wanted: str) -> tuple[str, list[Any]]:
        """The commit, and the files that its description names (without sizes)."""
        pinned = bool(_SHA.fullmatch(wanted))
        url = self._api(f"/revision/{quote(wanted, safe='')}")
        # Without an error code it is not the hub that says 404: a mirror without this part of the API.
        shown = self._uri.shown if wanted == (self.revision or "main") else self._shown(wanted)
        reply = self._get(url, allow=(404,) if pinned else (), shown=shown)
        if reply.status == 404 and reply.get("x-error-code"):
            raise self._explain(self._shown(wanted), reply.head, reply.body) or NotFound(self._shown(wanted))
        described = _document(reply)
        sha = str(described.get("sha") or reply.get("x-repo-commit") or (wanted if pinned else ""))
        if not sha:
            sha = self._commit_of_a_file(wanted)
        if pinned and sha != wanted:
            raise IntegrityError(f"{self._shown(wanted)}: the origin answered for another commit (observed {sha})")
        if not _SHA.fullmatch(sha):
            raise NotFound(
                f"{self._shown(wanted)}: the origin does not say which commit this is"
                " (no `sha` in its answer, no X-Repo-Commit header; a mirror may strip it)",
                hint="pin the commit: --revision SHA (40 hex digits)",
            )
        siblings = described.get("siblings")
        return sha, siblings if isinstance(siblings, list) else []

    def _commit_of_a_file(self, wanted: str) -> str:
        url = f"{self._endpoint}/{self._uri.place}/resolve/{quote(wanted, safe='')}/config.json"
        reply = self._web.request("HEAD", url, self._shown(wanted), sign=self._sign, allow=(404,), follow=nowhere)
        return reply.get("x-repo-commit")

    # -- which files -----------------------------------------------------------------------------------------------

    def _tree(self, sha: str, siblings: list[Any]) -> list[Entry]:
        found: list[Any] = []
        asked: set[str] = set()
        url = self._api(f"/tree/{sha}?recursive=true")
        while url:
            if url in asked:
                raise IntegrityError(f"{self._shown(sha)}: the listing does not advance")
            asked.add(url)
            reply = self._get(url, allow=(404, 405, 501))
            rows = _rows(reply)
            if rows is None:
                return self._from_siblings(sha, siblings)
            found += rows
            following = _NEXT.search(reply.get("link"))
            url = urljoin(url, following[1]) if following else ""
        return entries(found, self._shown(sha))

    def _from_siblings(self, sha: str, siblings: list[Any]) -> list[Entry]:
        """For a mirror without the tree API: names, and sizes where it gives them."""
        described = _document(self._get(self._api(f"/revision/{sha}?blobs=true"), allow=(404,)))
        rows = described.get("siblings") or siblings
        if not isinstance(rows, list) or not rows:
            raise NotFound(f"{self._shown(sha)}: the origin lists no files (neither `tree` nor `siblings` in its API)")
        named = [row for row in rows if isinstance(row, dict) and isinstance(row.get("rfilename"), str)]
        return entries([{**row, "type": "file", "path": row["rfilename"]} for row in named], self._shown(sha))

    def _in_folder(self, files: list[Entry]) -> list[Entry]:
        folder = self._uri.path
        if not folder:
            return files
        exact = [replace(entry, path=entry.path.rpartition("/")[2]) for entry in files if entry.path == folder]
        prefix = folder + "/"
        below = [replace(e, path=e.path.removeprefix(prefix)) for e in files if e.path.startswith(prefix)]
        return exact or below

    def _sized(self, entry: Entry, sha: str) -> Entry:
        # The commit fixes the bytes, whatever validator a mirror sends or strips.
        entry = replace(entry, version=sha, validator=entry.validator or f"{sha}:{entry.key}")
        if entry.size is not None:
            return entry
        target = self._target(entry)
        moved = tuple(MOVED_STATUS | HEADLESS_STATUS)
        reply = self._web.request(
            "HEAD", target.url, target.what, sign=self._sign, explain=self._explain, follow=nowhere, allow=moved
        )
        size = number(reply.get("x-linked-size"))
        if size is None:
            if reply.status >= 300:
                reply = self._web.describe(target.url, target.what, sign=self._sign, explain=self._explain)
            size = size_of(reply.head)
        return replace(entry, size=size)

    # -- requests --------------------------------------------------------------------------------------------------

    def _api(self, rest: str) -> str:
        return f"{self._endpoint}/api/models/{self._uri.place}{rest}"

    def _shown(self, revision: str) -> str:
        return f"hf://{self._uri.place} at {revision}"

    def _get(self, url: str, allow: tuple[int, ...] = (), shown: str = "") -> Reply:
        shown = shown or self._uri.shown
        reply = self._web.request("GET", url, shown, sign=self._sign, explain=self._explain, allow=allow)
        if reply.status == 200:
            refuse_html(shown, url, reply.head)
        return reply

    def _server(self) -> str:
        return self._endpoint

    def _target(self, entry: Entry) -> Target:
        url = f"{self._endpoint}/{self._uri.place}/resolve/{entry.version}/{quote(entry.key)}"
        what = f"hf://{self._uri.place}/{entry.key}"
        return Target(url, what, self._sign, pinned={"x-repo-commit": entry.version}, explain=self._explain)

    def _sign(self, method: str, url: str, headers: dict[str, str]) -> dict[str, str]:
        # A listing may name its next page at another host: the token is not for that one.
        if not self._authorization or not same_place(self._endpoint, url):
            return headers
        return {**headers, "Authorization": self._authorization}

    def _explain(self, what: str, head: Head, body: bytes) -> MxError | None:
        """What the hub's own error codes mean. It says 401 also for what doesn't exist, to those it doesn't know."""
        code, told = head.get("x-error-code"), _told(head)
        if code == "GatedRepo" and head.status in (401, 403):
            return AccessDenied(f"{what}: HTTP {head.status}, the repository is gated{told}", hint=self._gate_hint())
        if head.status == 401 and self._token:
            said = f"{what}: HTTP 401, the token is present (from {self._token_source}) but refused{told}"
            return AccessDenied(said, hint="check that the token is valid and may read this repository")
        if head.status == 401:
            said = f"{what}: HTTP 401, no such repository, or it is private and no token is given{told}"
            return AccessDenied(said, hint="set HF_TOKEN or --hf-token-file, and check the name")
        if head.status == 403:
            said = f"the token (from {self._token_source})" if self._token else "a request without a token"
            hint = self._gate_hint() if code in ("", "GatedRepo") else ""
            return AccessDenied(f"{what}: HTTP 403, {said} may not read this{told}", hint=hint)
        missing = {"RepoNotFound": "repository", "RevisionNotFound": "revision", "EntryNotFound": "file"}
        if code in missing:
            hint = ""
            if code == "RepoNotFound" and not self._token:
                hint = "check the name; a private repository wants HF_TOKEN"
            elif code == "RevisionNotFound" and self.revision and self._uri.path:
                hint = "a branch with a slash in its name is written with %2F, or given as --revision"
            return NotFound(f"{what}: {missing[code]} not found (HTTP {head.status} {code})", hint=hint)
        return refusal(f"{what}{told}", head) if code and told else None

    def _gate_hint(self) -> str:
        page = redact.url(f"{self._endpoint}/{self._uri.place}")
        if self._token:
            return f"accept the terms at {page} with the account of this token"
        return f"accept the terms at {page}, then set HF_TOKEN or --hf-token-file"


def _endpoint(written: str) -> tuple[str, str]:
    """HF_ENDPOINT without the name and password that it may hold, and those. Raises UsageError."""
    try:
        parts = urlsplit(written.strip())
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        usable = False
    if not usable or parts.query or parts.fragment:
        raise UsageError(f"HF_ENDPOINT is not an http or https URL: {redact.url(written)}")
    user, _, host = parts.netloc.rpartition("@")
    return f"{parts.scheme}://{host}{parts.path.rstrip('/')}", user


def _told(head: Head) -> str:
    """The hub's own words about a refusal, to be added to ours."""
    words = redact.text(head.get("x-error-message"))[:300].strip()
    return f" ({words})" if words else ""


def _document(reply: Reply) -> dict[str, Any]:
    """The answer's JSON object; an empty one for anything else, which is what a mirror without the API sends."""
    try:
        value = json.loads(reply.body) if reply.status == 200 else {}
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _rows(reply: Reply) -> list[Any] | None:
    try:
        value = json.loads(reply.body) if reply.status == 200 else None
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, list) else None


def _order(entry: Entry) -> bytes:
    return entry.path.encode("utf-8", "surrogatepass")
