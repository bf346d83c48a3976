#!/usr/bin/env python3
"""An S3 with faults: moto on a free port behind a proxy (path style) that injects S3's own errors.

  s3stub.py PORT [rule=value …]       needs moto[server]; prints the URL; /__log is the request log, /__reset clears it
No rule applies to a request with the header x-test-setup.

expire=KEY:N      access key KEY gets 400 ExpiredToken from its N-th request on
region=R          400 AuthorizationHeaderMalformed + x-amz-bucket-region unless signed for R
r301=R            301 PermanentRedirect + x-amz-bucket-region: R unless signed for R
requester=1       403 unless x-amz-request-payer: requester
skew=SECS         403 RequestTimeTooSkewed beyond SECS
denyget=SUB       403 AccessDenied on GET of keys containing SUB
get404=SUB        404 NoSuchKey on GET of keys containing SUB (listed all the same)
anon=1            403 if the request is signed by an unknown key ("bad…")
private=1         403 AccessDenied unless the request is signed
slow503=N         the first N object GETs -> 503 SlowDown
html=SUB          GET of keys containing SUB -> 200 with an HTML page
mutate=SUB:K      the object is overwritten (same size, new bytes) after K GETs
imds=SECS         /latest/… hangs SECS (point AWS_EC2_METADATA_SERVICE_ENDPOINT here)
"""

from __future__ import annotations

import calendar
import http.client
import json
import re
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

RULES: dict[str, str] = {}
LOG: list[dict[str, Any]] = []
COUNTS: dict[str, int] = {}
LOCK = threading.Lock()
MOTO = ("127.0.0.1", 0)
DROPPED = ("transfer-encoding", "connection", "content-length", "server", "date")


def upstream(
    method: str, path: str, body: bytes = b"", headers: dict[str, str] | None = None
) -> tuple[http.client.HTTPResponse, bytes]:
    connection = http.client.HTTPConnection(*MOTO)
    try:
        connection.request(method, path, body, headers or {})
        response = connection.getresponse()
        return response, response.read()
    finally:
        connection.close()


def count(kind: str) -> int:
    with LOCK:
        COUNTS[kind] = COUNTS.get(kind, 0) + 1
        return COUNTS[kind]


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *args: object) -> None:
        pass

    def send(self, code: int, data: bytes, headers: list[tuple[str, str]], length: str = "") -> None:
        self.send_response(code)
        for key, value in headers:
            self.send_header(key, value)
        self.send_header("Content-Length", length or str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def error(self, code: int, name: str, message: str = "", region: str = "") -> None:
        extra = f"<Region>{region}</Region>" if region else ""
        text = f'<?xml version="1.0"?><Error><Code>{name}</Code><Message>{message}</Message>{extra}</Error>'
        headers = [("Content-Type", "application/xml")]
        if region:
            headers.append(("x-amz-bucket-region", region))
        self.send(code, text.encode(), headers)

    def answer(self) -> None:
        authorization = self.headers.get("Authorization", "")
        match = re.search(r"Credential=([^/]+)/\d+/([^/]+)/", authorization)
        key, region = match.groups() if match else ("", "")
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.path == "/__log":
            self.send(200, json.dumps(LOG).encode(), [])
            return
        if self.path == "/__reset":
            with LOCK:
                LOG.clear()
                COUNTS.clear()
            self.send(200, b"", [])
            return
        entry = self.note_request(key, region)
        try:
            if self.headers.get("x-test-setup") or not self.refused(key, region):
                self.forward(body, authorization, entry)
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True

    def note_request(self, key: str, region: str) -> dict[str, Any]:
        get = self.headers.get
        entry: dict[str, Any] = {
            "t": round(time.time(), 3),
            "m": self.command,
            "setup": bool(get("x-test-setup")),
            "path": self.path,
            "key": key or None,
            "region": region or None,
            "range": get("Range"),
            "if_match": get("If-Match"),
            "payer": get("x-amz-request-payer"),
            "host": get("Host"),
            "sent": 0,
        }
        with LOCK:
            LOG.append(entry)
        return entry

    def is_object_get(self) -> bool:
        query = re.search(r"[?&](list-type|location|versions|prefix)", self.path)
        return self.command == "GET" and self.path.split("?")[0].count("/") > 1 and not query

    def refused(self, key: str, region: str) -> bool:
        """Answers with the refusal that the rules ask for, if they do."""
        if self.path.startswith("/latest/"):
            time.sleep(float(RULES.get("imds", 0)))
            self.error(404, "NotFound")
        elif "expire" in RULES and self.expired(key):
            self.error(400, "ExpiredToken", "The provided token has expired.")
        elif "private" in RULES and not key:
            self.error(403, "AccessDenied", "Access Denied")
        elif self.wrong_region(region):
            pass
        elif "requester" in RULES and self.headers.get("x-amz-request-payer") != "requester":
            self.error(403, "AccessDenied", "Access Denied")
        elif "anon" in RULES and key.startswith("bad"):
            self.error(403, "InvalidAccessKeyId")
        elif "skew" in RULES and self.skewed():
            text = "The difference between the request time and the current time is too large."
            self.error(403, "RequestTimeTooSkewed", text)
        else:
            return self.is_object_get() and self.object_refused()
        return True

    def expired(self, key: str) -> bool:
        name, _, limit = RULES["expire"].partition(":")
        return key == name and count("expire") >= int(limit)

    def wrong_region(self, region: str) -> bool:
        for rule, code, name in (("region", 400, "AuthorizationHeaderMalformed"), ("r301", 301, "PermanentRedirect")):
            right = RULES.get(rule)
            if right and region and region != right:
                self.error(code, name, f"the region '{region}' is wrong; expecting '{right}'", right)
                return True
        return False

    def skewed(self) -> bool:
        stamp = self.headers.get("x-amz-date")
        if not stamp:
            return False
        return abs(time.time() - calendar.timegm(time.strptime(stamp, "%Y%m%dT%H%M%SZ"))) > float(RULES["skew"])

    def object_refused(self) -> bool:
        def hits(rule: str) -> bool:
            return rule in RULES and RULES[rule] in self.path

        if hits("denyget"):
            self.error(403, "AccessDenied", "Access Denied")
        elif hits("get404"):
            self.error(404, "NoSuchKey", "The specified key does not exist.")
        elif hits("html"):
            self.send(200, b"<html>Please log in</html>", [("Content-Type", "text/html")])
        elif "slow503" in RULES and count("slow503") <= int(RULES["slow503"]):
            self.error(503, "SlowDown", "Please reduce your request rate.")
        else:
            return False
        return True

    def mutate(self, authorization: str) -> None:
        part, _, after = RULES["mutate"].partition(":")
        if part in self.path and self.is_object_get() and count("mutate") == int(after) + 1:
            path = self.path.split("?")[0]
            _, old = upstream("GET", path, headers={"Authorization": authorization})
            new = bytes(byte ^ 255 for byte in old[:64]) + old[64:]
            upstream("PUT", path, new, {"Authorization": authorization})

    def forward(self, body: bytes, authorization: str, entry: dict[str, Any]) -> None:
        if "mutate" in RULES:
            self.mutate(authorization)
        skip = ("connection", "accept-encoding", "content-length", "expect")
        headers = {key: value for key, value in self.headers.items() if key.lower() not in skip}
        response, data = upstream(self.command, self.path, body, headers)
        length = response.getheader("Content-Length") or "" if self.command == "HEAD" else ""
        kept = [(key, value) for key, value in response.getheaders() if key.lower() not in DROPPED]
        entry["sent"] = len(data)
        self.send(response.status, data, kept, length)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = answer


def main() -> None:
    global MOTO
    from moto.server import ThreadedMotoServer

    RULES.update(rule.split("=", 1) for rule in sys.argv[2:])
    moto = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    moto.start()
    MOTO = moto.get_host_and_port()
    server = ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler)
    server.daemon_threads = True
    print(f"http://127.0.0.1:{server.server_address[1]}", flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
