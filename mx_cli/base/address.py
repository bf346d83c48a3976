"""HOST:PORT, as people write it and as records keep it."""

from __future__ import annotations

import ipaddress
import re

from mx_cli.base.errors import UsageError

_NAME = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9._-]{0,252}[A-Za-z0-9_.])?", re.ASCII)
_LONGEST_LABEL = 63


def split_address(text: str, default: int | None = None, *, option: str = "") -> tuple[str, int]:
    """("host", 8000) of "host:8000", ("::1", 8000) of "[::1]:8000"; `default`: the port of a text that has none.

    Raises UsageError, which names the `option` that the text was given to; port 0 is for who listens.
    """
    if "://" in text:
        raise _refusal(option, text, "a URL")
    if "," in text:
        raise _refusal(option, text, "several", "one HOST:PORT each: an option that takes several is repeated")
    host, colon, port = text.rpartition(":")
    if default is not None and (not colon or text.endswith("]")):
        host, colon, port = text, ":", str(default)
    if not colon or not (port.isascii() and port.isdecimal() and len(port) <= 5 and int(port) <= 65535):
        raise _refusal(option, text, "no port from 0 to 65535 after a colon")
    if host.startswith("[") and host.endswith("]"):
        try:
            ipaddress.IPv6Address(host[1:-1])
        except ValueError as error:
            raise _refusal(option, text, str(error)) from None
        return host[1:-1], int(port)
    if ":" in host:
        raise _refusal(option, text, "IPv6 addresses stand in brackets")
    if not _NAME.fullmatch(host) or any(not 0 < len(part) <= _LONGEST_LABEL for part in host.rstrip(".").split(".")):
        raise _refusal(option, text, "no host name or address before the port")
    return host, int(port)


def peer_address(text: str, *, option: str = "") -> tuple[str, int]:
    """The same for somebody who listens there already. Raises UsageError, also for port 0."""
    host, port = split_address(text, option=option)
    if port == 0:
        raise _refusal(option, text, "port 0")
    return host, port


def join_address(host: str, port: int) -> str:
    """HOST:PORT of a host and a port: the reverse of `split_address`."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _refusal(option: str, text: str, why: str, hint: str = "write HOST:PORT, or [IPV6]:PORT") -> UsageError:
    given = f"{option}: " if option else ""
    return UsageError(f"{given}not an address ({text!r}: {why})", hint=hint)
