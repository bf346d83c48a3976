"""A store, a hub and a bucket of Google's inside the test, each an `answer` for scripted(): for what real ones do seldom.

`hook(asked)` comes first, and says whether it has answered.
"""

from __future__ import annotations

import base64
import hashlib
import json
import urllib.parse
from collections.abc import Callable, Mapping
from xml.sax.saxutils import escape

from tests.rig.scripted import Asked

Hook = Callable[[Asked], bool]
SHA = "a" * 40


def no_hook(asked: Asked) -> bool:
    return False


def error(asked: Asked, status: int, code: str, more: str = "", headers: dict[str, str] | None = None) -> bool:
    """S3's way to say no."""
    text = f"<?xml version='1.0'?>\n<Error><Code>{code}</Code><Message>because</Message>{more}</Error>"
    asked.say(status, text.encode(), {"Content-Type": "application/xml"} | (headers or {}))
    return True


class Bucket:
    """An S3 bucket `b` in path style: HEAD, GET, and ListObjectsV2 by pages."""

    env: Mapping[str, str] = {
        "AWS_ACCESS_KEY_ID": "mxaccess",
        "AWS_SECRET_ACCESS_KEY": "mxsecret12345",
        "AWS_REGION": "us-east-1",
    }

    def __init__(self, objects: Mapping[str, bytes], hook: Hook = no_hook, page: int = 1000) -> None:
        self.objects, self.hook, self.page = dict(objects), hook, page
        self.headers: dict[str, str] = {}

    def token(self, start: int) -> str:
        return f"1/a+b c=&é\"'<{start}>/=="

    def __call__(self, asked: Asked) -> None:
        if self.hook(asked):
            return
        parts = urllib.parse.urlsplit(asked.path)
        query = dict(urllib.parse.parse_qsl(parts.query, keep_blank_values=True))
        key = urllib.parse.unquote(parts.path).removeprefix("/b").removeprefix("/")
        if "list-type" in query:
            self._list(asked, query)
        elif key in self.objects:
            asked.serve(self.objects[key], dict(self.headers))
        else:
            error(asked, 404, "NoSuchKey")

    def _list(self, asked: Asked, query: Mapping[str, str]) -> None:
        keys = sorted(key for key in self.objects if key.startswith(query["prefix"]))
        starts = {self.token(start): start for start in range(0, len(keys), self.page)}
        first = starts.get(query.get("continuation-token", ""), 0)
        rows = "".join(map(self.row, keys[first : first + self.page]))
        more = first + self.page < len(keys)
        token = (
            f"<NextContinuationToken>{escape(self.token(first + self.page))}</NextContinuationToken>" if more else ""
        )
        text = f"<ListBucketResult><IsTruncated>{str(more).lower()}</IsTruncated>{token}{rows}</ListBucketResult>"
        asked.say(200, text.encode())

    def row(self, key: str) -> str:
        data = self.objects[key]
        tag = hashlib.md5(data).hexdigest()
        return f"<Contents><Key>{escape(key)}</Key><Size>{len(data)}</Size><ETag>&quot;{tag}&quot;</ETag></Contents>"


class Repository:
    """The hub's repository `org/model` with one commit, SHA, and the names that lead to it."""

    def __init__(self, files: Mapping[str, bytes], *names: str, hook: Hook = no_hook) -> None:
        self.files, self.names, self.hook = dict(files), names or ("main",), hook
        self.name = "org/model"

    def __call__(self, asked: Asked) -> None:
        if self.hook(asked):
            return
        path = urllib.parse.urlsplit(asked.path).path
        api, resolve = f"/api/models/{self.name}/", f"/{self.name}/resolve/{SHA}/"
        if path.startswith(f"{api}revision/"):
            wanted = urllib.parse.unquote(path.removeprefix(f"{api}revision/"))
            if wanted in (SHA, *self.names):
                asked.say(200, json.dumps({"sha": SHA}).encode())
            else:
                asked.say(404, b"", {"X-Error-Code": "RevisionNotFound"})
        elif path == f"{api}tree/{SHA}":
            asked.say(200, json.dumps([self.row(name) for name in self.files]).encode())
        elif path.startswith(resolve) and (name := urllib.parse.unquote(path.removeprefix(resolve))) in self.files:
            asked.serve(self.files[name], {"X-Repo-Commit": SHA})
        else:
            asked.say(404, b"", {"X-Error-Code": "RepoNotFound"})

    def row(self, name: str) -> dict[str, object]:
        data = self.files[name]
        return {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}


class GoogleBucket:
    """A bucket of Google Cloud Storage by its JSON API. `packed`: the objects that were uploaded with gzip -Z."""

    def __init__(self, objects: Mapping[str, bytes], packed: Mapping[str, bytes] | None = None) -> None:
        self.objects, self.packed = dict(objects), dict(packed or {})

    def __call__(self, asked: Asked) -> None:
        parts = urllib.parse.urlsplit(asked.path)
        query = dict(urllib.parse.parse_qsl(parts.query))
        name = urllib.parse.unquote(parts.path.partition("/o/")[2])
        if parts.path.endswith("/o"):
            names = sorted(name for name in self.objects if name.startswith(query["prefix"]))
            asked.say(200, json.dumps({"items": [self.row(name) for name in names]}).encode())
        elif name not in self.objects:
            asked.say(404, b'{"error": {"message": "No such object"}}')
        elif query.get("alt") != "media":
            asked.say(200, json.dumps(self.row(name)).encode())
        elif name in self.packed:
            self._unpacked(asked, self.objects[name])
        else:
            asked.serve(self.objects[name], {"x-goog-generation": "7"})

    def row(self, name: str) -> dict[str, str]:
        data = self.packed.get(name, self.objects[name])
        md5 = base64.b64encode(hashlib.md5(data).digest()).decode()
        row = {"name": name, "size": str(len(data)), "generation": "7", "md5Hash": md5}
        return row | ({"contentEncoding": "gzip"} if name in self.packed else {})

    def _unpacked(self, asked: Asked, data: bytes) -> None:
        """Decompressive transcoding: no ranges, no length, and the digests are those of the packed bytes."""
        handler = asked.handler
        handler.send_response(200)
        for header in (("x-goog-generation", "7"), ("Transfer-Encoding", "chunked")):
            handler.send_header(*header)
        handler.end_headers()
        if asked.method != "HEAD":
            handler.wfile.write(b"%x\r\n%b\r\n0\r\n\r\n" % (len(data), data))
