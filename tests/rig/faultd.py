#!/usr/bin/env python3
"""An HTTP origin (and a small hub) with faults. Standard library only.

  faultd.py PORT [--host H] [--hf DIR] [--tls CERT KEY]        prints the port it listens on

/f/<flags>/<size>/<name>   a deterministic body; flags are comma separated ("ok" for none):
  norange nolen head405 html gzip badcr noct
  etag=weak|none|mp|slash
  cut=N              every reply stops after N body bytes        cutonce=N   only the first GET
  cutat=N            the first GET stops at absolute offset N
  over=N / under=N   HEAD advertises size+N / size-N
  stall=N:SECS       pause once after N bytes of each reply      slow=BYTES_PER_S
  fail=CODE:K[:RETRY_AFTER]     the first K requests             failget=CODE:K   failrange=CODE:K (with Range only)
  flip=K             new bytes and new ETag after K GETs         rot=K   one byte differs after K GETs, same ETag
  sign=SECS          302 to a link that turns 403 after SECS     to=URLQUOTED   302 to it
  auth=TOKEN         401 without that bearer token
  RETRY_AFTER may be "date+S": an HTTP date S seconds from now
/sum/<size>/<name>[/v]     SHA-256 of that body (v=1: after flip)
/__log                     the request log: JSON; "auth" only as yes/no, "sent" = body bytes sent
/__reset                   forget the log, the counters and the hub's flags

--hf DIR: /api/models/<ns>/<n>[/revision/<rev>], /api/models/<ns>/<n>/tree/<rev>, /<ns>/<n>/resolve/<rev>/<path>
  DIR/<sha40>/… holds the files of a commit, DIR/refs/<branch> a sha40.
/__ref/<branch>/<sha40>    moves a branch
/__flags/<flags>           the flags of every later resolve body (those of /f, and:
                           links=SECS   LFS files are a 302 to a link that turns 403 after SECS
                           nocommit     no X-Repo-Commit header
                           gated        403 GatedRepo)
"""

from __future__ import annotations

import argparse
import email.utils
import functools
import gzip
import hashlib
import json
import socket
import ssl
import threading
import time
import urllib.parse
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

LOCK = threading.Lock()
LOG: list[dict[str, Any]] = []
COUNTS: dict[tuple[str, str], int] = {}
HUB_FLAGS: dict[str, str] = {}
HUB: Path | None = None
BINARY = "application/octet-stream"


@functools.lru_cache(4)
def body(name: str, size: int, version: int = 0) -> bytes:
    block = b"".join(hashlib.sha256(f"{name}|{version}|{i}".encode()).digest() for i in range(2048))
    return (block * (size // len(block) + 1))[:size]


def rotten(data: bytes, flags: dict[str, str], gets: int) -> bytes:
    """The body, or one whose last byte differs."""
    return data[:-1] + bytes([data[-1] ^ 1]) if data and gets > int(flags.get("rot", gets)) else data


@functools.lru_cache(64)
def md5(name: str, size: int, version: int) -> str:
    return hashlib.md5(body(name, size, version)).hexdigest()


@functools.lru_cache(8)
def contents(path: str, size: int, mtime: int) -> bytes:
    """The bytes of a file; size and mtime only key the cache."""
    return Path(path).read_bytes()


@functools.lru_cache(256)
def digests(path: str, size: int, mtime: int) -> tuple[str, str]:
    """(SHA-256, git blob id) of a file; size and mtime only key the cache."""
    data = contents(path, size, mtime)
    return hashlib.sha256(data).hexdigest(), hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def file_digests(path: Path) -> tuple[str, str]:
    st = path.stat()
    return digests(str(path), st.st_size, st.st_mtime_ns)


def parse_flags(text: str) -> dict[str, str]:
    flags = {}
    for part in text.split(","):
        key, _, value = part.partition("=")
        flags[key] = value or "1"
    return flags


def parse_range(text: str, size: int) -> tuple[int, int]:
    """(start, end) of one `bytes=` range; start >= size means 416."""
    first, last = text.split("=")[1].split("-")
    start = int(first) if first else max(0, size - int(last))
    end = min(int(last) + 1, size) if first and last else size
    return start, end


def is_lfs(name: str) -> bool:
    return name.endswith((".safetensors", ".bin"))


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *args: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.answer()

    def do_GET(self) -> None:
        self.answer()

    def is_head(self) -> bool:
        return self.command == "HEAD"

    def count(self, kind: str) -> int:
        with LOCK:
            key = (kind, self.path)
            COUNTS[key] = COUNTS.get(key, 0) + 1
            return COUNTS[key]

    def simple(self, code: int, data: bytes = b"", headers: dict[str, str] | None = None) -> None:
        self.send_response(code)
        for key, value in (headers or {}).items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if not self.is_head():
            self.wfile.write(data)

    def send_json(self, value: object, headers: dict[str, str] | None = None) -> None:
        self.simple(200, json.dumps(value).encode(), {"Content-Type": "application/json", **(headers or {})})

    def note_request(self) -> None:
        get = self.headers.get
        self.entry: dict[str, Any] = {
            "t": round(time.time(), 3),
            "m": self.command,
            "path": self.path,
            "range": get("Range"),
            "if_range": get("If-Range"),
            "if_match": get("If-Match"),
            "auth": bool(get("Authorization")),
            "host": get("Host"),
            "ae": get("Accept-Encoding"),
            "ua": get("User-Agent"),
            "conn": self.client_address[1],
            "sent": 0,
        }
        with LOCK:
            LOG.append(self.entry)

    def answer(self) -> None:
        path = urllib.parse.urlsplit(self.path).path
        segments = path.split("/")[1:]
        try:
            if path.startswith("/__"):
                self.control(segments)
                return
            self.note_request()
            rest = urllib.parse.unquote("/".join(segments[3:]))
            if segments[0] == "sum":
                version = int(segments[3]) if len(segments) > 3 else 0
                data = body(urllib.parse.unquote(segments[2]), int(segments[1]), version)
                self.simple(200, hashlib.sha256(data).hexdigest().encode())
            elif segments[0] == "f":
                self.generated(parse_flags(segments[1]), int(segments[2]), rest)
            elif segments[0] == "s" and self.link_is_fresh(segments[1]):
                name = urllib.parse.unquote("/".join(segments[4:]))
                self.generated(parse_flags(segments[2]), int(segments[3]), name)
            elif segments[0] == "l" and self.link_is_fresh(segments[1]):
                self.hub_file(segments[2], rest, linked=True)
            elif segments[0] in ("s", "l"):
                text = b"<Error><Code>AccessDenied</Code><Message>Request has expired</Message></Error>"
                self.simple(403, text, {"Content-Type": "application/xml"})
            elif HUB is not None:
                self.hub(segments)
            else:
                self.simple(404, b"nope")
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True

    def control(self, segments: list[str]) -> None:
        if segments[0] == "__log":
            self.send_json(LOG)
            return
        if segments[0] == "__reset":
            with LOCK:
                LOG.clear()
                COUNTS.clear()
                HUB_FLAGS.clear()
        elif segments[0] == "__flags":
            HUB_FLAGS.clear()
            HUB_FLAGS.update(parse_flags(urllib.parse.unquote(segments[1])))
        elif segments[0] == "__ref" and HUB is not None:
            (HUB / "refs" / urllib.parse.unquote(segments[1])).write_text(segments[2])
        self.simple(200)

    def link_is_fresh(self, deadline: str) -> bool:
        return time.time() <= float(deadline)

    # --- replies with faults -------------------------------------------------------------------------------------

    def refused(self, flags: dict[str, str]) -> bool:
        """Answers with the refusal that the flags ask for, if they do."""
        head, ranged = self.is_head(), bool(self.headers.get("Range"))
        for key, applies in (("fail", True), ("failget", not head), ("failrange", ranged and not head)):
            if key not in flags or not applies:
                continue
            code, times, *after = flags[key].split(":")
            if self.count(key) <= int(times):
                wait = after[0] if after else ""
                if wait.startswith("date+"):
                    wait = email.utils.formatdate(time.time() + float(wait[5:]), usegmt=True)
                self.simple(int(code), b"busy", {"Retry-After": wait} if wait else None)
                return True
        if "auth" in flags and self.headers.get("Authorization") != "Bearer " + flags["auth"]:
            self.simple(401, b"no", {"WWW-Authenticate": "Bearer"})
        elif "to" in flags:
            self.simple(302, b"", {"Location": urllib.parse.unquote(flags["to"])})
        elif head and "head405" in flags:
            self.simple(405)
        elif "html" in flags:
            self.simple(200, b"<html>Please log in</html>", {"Content-Type": "text/html"})
        else:
            return False
        return True

    def generated(self, flags: dict[str, str], size: int, name: str) -> None:
        if "sign" in flags:
            rest = ",".join(f"{key}={value}" for key, value in flags.items() if key != "sign") or "ok"
            deadline = time.time() + float(flags["sign"])
            self.simple(302, b"", {"Location": f"/s/{deadline}/{rest}/{size}/{urllib.parse.quote(name)}"})
            return
        if self.refused(flags):
            return
        gets = COUNTS.get(("get", self.path), 0) if self.is_head() else self.count("get")
        version = 1 if "flip" in flags and gets > int(flags["flip"]) else 0
        data = body(name, size, version)
        data = rotten(data, flags, gets)
        if "gzip" in flags:
            data = gzip.compress(data, 1)
        tag = md5(name, size, version)
        shapes = {"weak": f'W/"{tag}"', "none": None, "mp": f'"{tag}-7"', "slash": f'"a/../{tag}"'}
        self.reply(data, shapes.get(flags.get("etag", ""), f'"{tag}"'), flags, gets)

    def reply(
        self, data: bytes, etag: str | None, flags: dict[str, str], gets: int, headers: dict[str, str] | None = None
    ) -> None:
        if_match, if_range, wanted = (self.headers.get(key) for key in ("If-Match", "If-Range", "Range"))
        if if_match and etag and if_match != etag:
            self.simple(412)
            return
        start, end, code = 0, len(data), 200
        if wanted and "norange" not in flags and not (if_range and if_range != etag):
            start, end = parse_range(wanted, len(data))
            if start >= len(data):
                self.simple(416, b"", {"Content-Range": f"bytes */{len(data)}"})
                return
            code = 206
        self.send_response(code)
        out = dict(headers or {})
        if etag:
            out["ETag"] = etag
        if "noct" not in flags:
            out.setdefault("Content-Type", BINARY)
        if "norange" not in flags:
            out["Accept-Ranges"] = "bytes"
        if "gzip" in flags:
            out["Content-Encoding"] = "gzip"
        if code == 206:
            out["Content-Range"] = f"bytes {start + ('badcr' in flags)}-{end - 1}/{len(data)}"
        if "nolen" in flags:
            out["Transfer-Encoding"] = "chunked"
        else:
            lie = int(flags.get("over", 0)) - int(flags.get("under", 0)) if self.is_head() else 0
            out["Content-Length"] = str(end - start + lie)
        for key, value in out.items():
            self.send_header(key, value)
        self.end_headers()
        if not self.is_head():
            self.send_body(data[start:end], start, flags, gets)

    def send_body(self, data: bytes, start: int, flags: dict[str, str], gets: int) -> None:
        limit = int(flags["cut"]) if "cut" in flags else None
        if "cutonce" in flags and gets == 1:
            limit = int(flags["cutonce"])
        if "cutat" in flags and gets == 1:
            limit = max(0, int(flags["cutat"]) - start)
        stall_at, _, stall_for = flags.get("stall", "").partition(":")
        rate, chunked, sent = float(flags.get("slow", 0)), "nolen" in flags, 0
        for offset in range(0, len(data), 16384):
            piece = data[offset : offset + 16384]
            if limit is not None and sent + len(piece) > limit:
                piece = piece[: limit - sent]
            if piece:
                sent += len(piece)
                # Counted first: who has read the last byte may look at the log at once.
                self.entry["sent"] = sent
                self.wfile.write(b"%x\r\n%b\r\n" % (len(piece), piece) if chunked else piece)
            if limit is not None and sent >= limit:
                self.wfile.flush()
                self.close_connection = True
                self.connection.shutdown(socket.SHUT_RDWR)
                return
            if stall_at and sent >= int(stall_at):
                self.wfile.flush()
                time.sleep(float(stall_for))
                stall_at = ""
            if rate:
                time.sleep(len(piece) / rate)
        if chunked:
            self.wfile.write(b"0\r\n\r\n")

    # --- the hub -------------------------------------------------------------------------------------------------

    def commit(self, name: str) -> str | None:
        assert HUB is not None
        name = urllib.parse.unquote(name)
        if len(name) == 40:
            return name if (HUB / name).is_dir() else None
        ref = HUB / "refs" / name
        return ref.read_text().strip() if ref.is_file() else None

    def hub(self, segments: list[str]) -> None:
        token = HUB_FLAGS.get("auth")
        if token and self.headers.get("Authorization") != "Bearer " + token:
            self.simple(401, b"", {"X-Error-Code": "RepoNotFound", "WWW-Authenticate": "Bearer"})
        elif segments[:2] == ["api", "models"] and len(segments) >= 4:
            self.hub_api(segments)
        elif len(segments) > 4 and segments[2] == "resolve":
            self.hub_resolve(segments)
        else:
            self.simple(404, b"", {"X-Error-Code": "RepoNotFound"})

    def hub_api(self, segments: list[str]) -> None:
        assert HUB is not None
        sha = self.commit(segments[5] if len(segments) > 5 else "main")
        if sha is None:
            self.simple(404, b"", {"X-Error-Code": "RevisionNotFound"})
            return
        base = HUB / sha
        names = sorted(str(path.relative_to(base)) for path in base.rglob("*") if path.is_file())
        repo = "/".join(segments[2:4])
        if segments[4:5] == ["tree"]:
            self.send_json([self.hub_entry(base / name, name) for name in names])
            return
        files = [{"rfilename": name} for name in names]
        self.send_json({"id": repo, "modelId": repo, "sha": sha, "siblings": files, "gated": False, "private": False})

    def hub_entry(self, path: Path, name: str) -> dict[str, Any]:
        sha256, blob = file_digests(path)
        size = path.stat().st_size
        entry: dict[str, Any] = {"type": "file", "path": name, "size": size, "oid": blob}
        if is_lfs(name):
            pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:%s\nsize %d\n" % (sha256.encode(), size)
            entry["oid"] = hashlib.sha1(b"blob %d\0" % len(pointer) + pointer).hexdigest()
            entry["lfs"] = {"oid": sha256, "size": size, "pointerSize": len(pointer)}
        return entry

    def hub_resolve(self, segments: list[str]) -> None:
        assert HUB is not None
        name = urllib.parse.unquote("/".join(segments[4:]))
        sha = self.commit(segments[3])
        if "gated" in HUB_FLAGS:
            self.simple(403, b"", {"X-Error-Code": "GatedRepo"})
        elif sha is None:
            self.simple(404, b"", {"X-Error-Code": "RevisionNotFound"})
        elif not (HUB / sha / name).is_file():
            self.simple(404, b"", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": sha})
        elif "links" in HUB_FLAGS and is_lfs(name):
            path = HUB / sha / name
            sha256, _ = file_digests(path)
            headers = {
                "Location": f"/l/{time.time() + float(HUB_FLAGS['links'])}/{sha}/{urllib.parse.quote(name)}",
                "X-Linked-Etag": f'"{sha256}"',
                "X-Linked-Size": str(path.stat().st_size),
            }
            self.simple(302, b"", headers | ({} if "nocommit" in HUB_FLAGS else {"X-Repo-Commit": sha}))
        else:
            self.hub_file(sha, name, linked=False)

    def hub_file(self, sha: str, name: str, *, linked: bool) -> None:
        assert HUB is not None
        flags = {key: value for key, value in HUB_FLAGS.items() if key != "auth"}
        if self.refused(flags):
            return
        path = HUB / sha / name
        sha256, blob = file_digests(path)
        gets = COUNTS.get(("get", self.path), 0) if self.is_head() else self.count("get")
        headers = {} if linked or "nocommit" in flags else {"X-Repo-Commit": sha}
        etag = None if flags.get("etag") == "none" else f'"{sha256 if is_lfs(name) else blob}"'
        st = path.stat()
        data = rotten(contents(str(path), st.st_size, st.st_mtime_ns), flags, gets)
        self.reply(data, etag, flags, gets, headers)


class Server6(ThreadingHTTPServer):
    address_family = socket.AF_INET6


def main() -> None:
    global HUB
    parser = argparse.ArgumentParser()
    parser.add_argument("port", type=int)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--hf", default="")
    parser.add_argument("--tls", nargs=2)
    args = parser.parse_args()
    HUB = Path(args.hf) if args.hf else None
    server = (Server6 if ":" in args.host else ThreadingHTTPServer)((args.host, args.port), Handler)
    server.daemon_threads = True
    if args.tls:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(*args.tls)
        # The handshake belongs into the connection's own thread: a client that refuses the certificate must not stop accept().
        server.socket = context.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
    print(server.server_address[1], flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
