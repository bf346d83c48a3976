"""Which secrets this process offers and accepts, and on which addresses it may be found without one."""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Callable
from pathlib import Path

from mx_cli.base.address import split_address
from mx_cli.base.errors import UsageError
from mx_cli.flows.context import Context
from mx_cli.transport.secret import read_secrets, runtime_secret

NO_SECRET = b"mx: no secret was wanted (--insecure)"
"""What both sides use for a secret under --insecure: it proves nothing."""

MAKE_ONE = "make a secret, and give it to both sides: head -c 32 /dev/urandom | base64 > FILE; --peer-token-file FILE"


def is_loopback(address: str) -> bool:
    """Whether HOST:PORT is this host alone."""
    host, _ = split_address(address)
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def accepted(context: Context, listen: str) -> Callable[[], list[bytes]]:
    """What a peer that listens on `listen` accepts: read afresh at each handshake, so that secrets can be rotated.

    Raises UsageError for a listener that others can reach without a secret, or with two opposite wishes.
    """
    file, insecure = context.settings.peer_token_file, context.settings.insecure
    if file and insecure:
        raise UsageError("--peer-token-file and --insecure contradict each other", hint="leave one of them out")
    if file:
        read_secrets(file)
        return _telling(context, lambda: read_secrets(file))
    if insecure:
        context.warn(f"{listen}: everybody who can connect may read the weights (--insecure)")
        return lambda: [NO_SECRET]
    if not is_loopback(listen):
        raise UsageError(f"--listen {listen}: other hosts could connect, and there is no secret", hint=MAKE_ONE)
    own = _own(context)
    return _telling(context, lambda: read_secrets(own))


def _telling(context: Context, read: Callable[[], list[bytes]]) -> Callable[[], list[bytes]]:
    """`read`, with a warning for the operator once for each reason that it fails: readers are not told the reason."""
    told: set[str] = set()

    def known() -> list[bytes]:
        try:
            return read()
        except UsageError as error:
            if error.what not in told:
                told.add(error.what)
                context.warn(f"nobody is let in: {error.what}")
            raise

    return known


def offered(context: Context, address: str) -> list[bytes]:
    """What a reader offers to a peer. Raises UsageError when there is nothing to offer to another host."""
    if context.settings.peer_token_file:
        return read_secrets(context.settings.peer_token_file)
    if context.settings.insecure:
        return [NO_SECRET]
    if not is_loopback(address):
        raise UsageError(f"{address}: on another host, and there is no secret to offer", hint=MAKE_ONE)
    return read_secrets(_own(context))


def _own(context: Context) -> Path:
    runtime = context.settings.xdg_runtime_dir or ""
    return runtime_secret(Path(runtime) if os.path.isabs(runtime) else None)
