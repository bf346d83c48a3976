"""What a peer's answers mean to its reader."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from typing import Any

from mx_cli.base.errors import AccessDenied, Incompatible, MxError, NotFound, TransportFailed, Unreachable
from mx_cli.transport.channel import Channel
from mx_cli.transport.protocol import POLL

SECRET_HINT = "both sides need the same --peer-token-file; on one host without it, the same user and $XDG_RUNTIME_DIR"
_SHOWN = 500
LEAST, MOST = 0.01, 86400.0
"""Seconds that a peer may ask its reader to wait, or to beat within."""


def read_answer(channel: Channel, status: int, limit: int) -> dict[str, Any]:
    """The object that the peer answered, and the `status`. Raises what the peer says is wrong."""
    said = channel.body(limit)
    if status >= 300:
        raise explain(status, said, channel.place)
    return {**parse_json(said, channel.place), "status": status}


def explain(status: int, said: bytes, place: str) -> MxError:
    """The error that an answer with this status means. What the peer says is shown as plain text, and not without end."""
    try:
        told = parse_json(said, place).get("error")
    except TransportFailed:
        told = None
    text = str(told.get("message", "")) if isinstance(told, dict) else ""
    text = "".join(char if char.isprintable() else " " for char in text[:_SHOWN])
    what = f"{place}: {text or f'answered with status {status}'}"
    match status:
        case 401:
            return TransportFailed(f"{place}: the session has ended (the peer left, or was restarted)")
        case 403:
            return AccessDenied(
                f"{place} refuses the secret (another one there, or something between ends TLS)", hint=SECRET_HINT
            )
        case 404:
            return NotFound(what)
        case 426:
            return Incompatible(what, hint="use the same release of mx on both sides")
        case 503:
            return Unreachable(what, retry_after=POLL)
    return TransportFailed(what)


def parse_json(data: bytes, place: str) -> dict[str, Any]:
    """An answer's object. Raises TransportFailed."""
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise TransportFailed(f"{place}: the answer is not what a peer says")
    return value


def unzip(data: bytes, place: str, limit: int) -> bytes:
    """Raises TransportFailed for more than `limit` bytes."""
    unpack = zlib.decompressobj(31)
    try:
        plain = unpack.decompress(data, limit)
    except zlib.error as error:
        raise TransportFailed(f"{place}: the manifest does not unpack: {error}") from None
    if not unpack.eof:
        raise TransportFailed(f"{place}: a manifest of more than {limit} bytes, or half of one")
    return plain


def text_of(answer: Mapping[str, Any], name: str, place: str) -> str:
    """A field that has to be there. Raises TransportFailed."""
    value = answer.get(name)
    if not isinstance(value, str) or not value:
        raise TransportFailed(f"{place}: not a peer (the answer has no {name})")
    return value


def texts_of(answer: Mapping[str, Any], name: str, place: str) -> tuple[str, ...]:
    """A list of texts, empty when it is not there. Raises TransportFailed."""
    value = answer.get(name, [])
    if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
        raise TransportFailed(f"{place}: the answer is not what a peer says ({name} is no list of texts)")
    return tuple(value)


def count_of(answer: Mapping[str, Any], name: str, default: int, place: str) -> int:
    """A number of things. Raises TransportFailed."""
    value = answer.get(name, default)
    if type(value) is not int or not 0 <= value < 1 << 63:
        raise TransportFailed(f"{place}: the answer is not what a peer says ({name}: {str(value)[:80]})")
    return value


def seconds_of(answer: Mapping[str, Any], name: str, default: float, place: str) -> float:
    """A time that can be waited for. Raises TransportFailed."""
    value = answer.get(name, default)
    if not isinstance(value, (int, float)) or not LEAST <= value <= MOST:
        raise TransportFailed(f"{place}: the answer is not what a peer says ({name}: {str(value)[:80]})")
    return float(value)


def bytes_of(answer: Mapping[str, Any], name: str, place: str) -> bytes:
    """The same, of hexadecimal text."""
    try:
        return bytes.fromhex(text_of(answer, name, place))
    except ValueError:
        raise TransportFailed(f"{place}: not a peer ({name} is not hexadecimal)") from None
