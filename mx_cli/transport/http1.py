"""Requests and answers of HTTP/1.1 (RFC 9112) as the control channel has them: bodies have a length, nothing is chunked."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any
from urllib.parse import parse_qsl, unquote

HEAD_LIMIT = 64 << 10
END = b"\r\n\r\n"


class Refused(Exception):
    """A request that is answered with a status and the end of the connection."""

    def __init__(self, status: int) -> None:
        super().__init__(status)
        self.status = status


@dataclass(slots=True)
class Request:
    """A whole request. `headers` have lower-case names; `path` and `query` are decoded; `client` is the other side's IP."""

    method: str
    path: str
    query: Mapping[str, str]
    headers: Mapping[str, str]
    keep: bool
    length: int
    body: bytes = b""
    client: str = ""

    def header(self, name: str) -> str:
        return self.headers.get(name, "")


@dataclass(slots=True)
class Response:
    """An answer: `body`, or `length` bytes that `stream` gives in pieces.

    `trusted` says that the request proved to know a secret: its connection may stay.
    """

    status: int = 200
    body: bytes = b""
    headers: Mapping[str, str] = field(default_factory=dict)
    stream: Iterator[memoryview] | None = None
    length: int = 0
    trusted: bool = False

    def head(self, keep: bool) -> bytes:
        length = self.length if self.stream is not None else len(self.body)
        lines = [
            f"HTTP/1.1 {self.status} {HTTPStatus(self.status).phrase}",
            f"Content-Length: {length}",
            "Connection: " + ("keep-alive" if keep else "close"),
            *(f"{name}: {value}" for name, value in self.headers.items()),
        ]
        return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")


def answer(value: Mapping[str, Any], status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """A JSON answer."""
    # Escaped, so that whatever somebody has said can be passed on.
    body = json.dumps(value).encode() + b"\n"
    return Response(status, body, {"Content-Type": "application/json", **(headers or {})})


def parse_head(head: bytes) -> Request:
    """A request without its body, from everything before the empty line. Raises Refused."""
    lines = head.decode("latin-1").split("\r\n")
    words = lines[0].split(" ")
    if len(words) != 3 or not words[0].isalpha() or not words[1].startswith("/"):
        raise Refused(400)
    if words[2] not in ("HTTP/1.1", "HTTP/1.0"):
        raise Refused(505)
    headers = _headers(lines[1:])
    if "transfer-encoding" in headers:
        raise Refused(411)
    length = headers.get("content-length", "0")
    if not (length.isascii() and length.isdecimal() and len(length) < 20):
        raise Refused(400)
    connection = headers.get("connection", "").lower()
    keep = "close" not in connection and (words[2] == "HTTP/1.1" or "keep-alive" in connection)
    path, _, query = words[1].partition("?")
    try:
        pairs = dict(parse_qsl(query, keep_blank_values=True, max_num_fields=16))
    except ValueError:
        raise Refused(400) from None
    return Request(words[0], unquote(path, errors="surrogateescape"), pairs, headers, keep, int(length))


def _headers(lines: list[str]) -> dict[str, str]:
    headers: dict[str, str] = {}
    for line in lines:
        name, colon, value = line.partition(":")
        name = name.lower()
        # A header that stands twice, or is folded, is how one request is passed off as two.
        if not colon or not name or name != name.strip() or (name in headers and name == "content-length"):
            raise Refused(400)
        headers[name] = value.strip()
    return headers
