"""What readers ask of a peer, taken with care: anybody may have written it."""

from __future__ import annotations

import binascii
import json
from collections.abc import Mapping
from typing import Any

from mx_cli.base.errors import Incompatible, UsageError
from mx_cli.transport.http1 import Request
from mx_cli.transport.protocol import NONCE, PROTO


def body_of(request: Request) -> Mapping[str, Any]:
    """The JSON object of a request. Raises UsageError."""
    try:
        body = json.loads(request.body or b"{}")
    except (ValueError, RecursionError):
        raise UsageError("the body is not JSON") from None
    if not isinstance(body, dict):
        raise UsageError("the body is not an object")
    return body


def mapping_in(body: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """A field that is an object; empty when it is not there. Raises UsageError."""
    value = body.get(name, {})
    if not isinstance(value, dict):
        raise UsageError(f"{name} is not an object")
    return value


def common_version(offered: Any) -> int:
    """The highest wire version that both sides speak. Raises UsageError, Incompatible when there is none."""
    try:
        low, high = map(int, offered)
    except (TypeError, ValueError, OverflowError):
        raise UsageError("proto is not a range of wire versions") from None
    best = min(high, PROTO[1])
    if best < max(low, PROTO[0]):
        raise Incompatible(f"this peer speaks wire versions {PROTO[0]} to {PROTO[1]}, the reader {low} to {high}")
    return best


def bytes_in(body: Mapping[str, Any], name: str) -> bytes:
    """A field in hexadecimal. Raises UsageError."""
    try:
        return binascii.unhexlify(str(body.get(name, "")))
    except ValueError:
        raise UsageError(f"{name} is not hexadecimal") from None


def nonce_in(body: Mapping[str, Any]) -> bytes:
    """The reader's nonce. Raises UsageError for one of another length."""
    nonce = bytes_in(body, "nonce")
    if len(nonce) != NONCE:
        raise UsageError(f"nonce has {len(nonce)} bytes, expected {NONCE}")
    return nonce


def number_in(request: Request, name: str, default: int) -> int:
    """A number of bytes after the question mark. Raises UsageError."""
    text = request.query.get(name, "")
    if text and not (text.isascii() and text.isdecimal() and len(text) < 20):
        raise UsageError(f"{name} is not a number of bytes")
    return int(text) if text else default


def reader_name(reader: Mapping[str, Any]) -> str:
    """A reader, for people."""
    return f"{reader.get('host', 'a reader')} pid {reader.get('pid', '?')}"
