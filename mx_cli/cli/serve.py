"""`mx serve`."""

from __future__ import annotations

import contextlib
import json
from typing import TYPE_CHECKING, Annotated, Optional

import typer

from mx_cli.cli.listening import (
    ABOVE_DRAIN,
    DRAIN_TIMEOUT,
    LISTEN,
    MAX_READERS,
    Advertise,
    DrainTimeout,
    Listen,
    MaxReaders,
)
from mx_cli.cli.options import CACHE, ELECTION, ORIGIN, PEER, PEERS, TRANSFER, command
from mx_cli.cli.places import place, seconds
from mx_cli.cli.session import Session

if TYPE_CHECKING:
    from mx_cli.flows.serve import Ready

TEXT = Optional[str]  # noqa: UP045 - typer reads the object


@command(CACHE, ORIGIN, TRANSFER, ELECTION, PEER, PEERS, ("grant_ttl",))
def serve(
    session: Session,
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="a directory, a weight file, or a URI (prefetched first)")
    ],
    revision: Annotated[TEXT, typer.Option("--revision", metavar="REVISION", help="revision of a URI")] = None,
    device: Annotated[
        str, typer.Option("--device", metavar="file|cpu|cuda[:N]", help="where readers get the weights from")
    ] = "file",
    listen: Listen = LISTEN,
    advertise: Advertise = None,
    max_readers: MaxReaders = MAX_READERS,
    drain_timeout: DrainTimeout = DRAIN_TIMEOUT,
    ready_file: Annotated[
        TEXT, typer.Option("--ready-file", metavar="FILE", help="write the JSON line here too, when ready")
    ] = None,
    name: Annotated[
        TEXT, typer.Option("--name", metavar="NAME", help="a name in discovery that outlives a restart")
    ] = None,
    tls_cert: Annotated[
        TEXT, typer.Option("--tls-cert", metavar="FILE", help="own certificate (PEM); else one is made at each start")
    ] = None,
    tls_key: Annotated[TEXT, typer.Option("--tls-key", metavar="FILE", help="its key (PEM)")] = None,
) -> None:
    """Offer weights to peers: from disk, host memory or GPU memory. Runs until it is stopped."""
    from mx_cli.base.errors import FilesystemRefused
    from mx_cli.flows import serve as flow
    from mx_cli.flows.deliver import check_directory_of, prepare_result, withdraw_result, write_result
    from mx_cli.flows.serving import Offer

    drain = seconds("--drain-timeout", drain_timeout)
    session.grace = drain + ABOVE_DRAIN
    context = session.context()
    session.cache_line(context.cache().root)
    offer = Offer(
        listen=listen,
        advertise=advertise,
        slots=max_readers,
        name=name,
        tls_cert=place("--tls-cert", tls_cert),
        tls_key=place("--tls-key", tls_key),
    )
    file = place("--ready-file", ready_file)
    request = flow.ServeRequest(model, offer, revision, device, drain)

    def on_ready(ready: Ready) -> None:
        document = ready.to_json()
        if file:
            write_result(file, document)
        # One JSON line, also without --json: scripts read it.
        session.answer(json.dumps(document), document)

    if file:
        check_directory_of("--ready-file", file)
        # A life that was killed left it.
        prepare_result("--ready-file", file, context.cache().root)
    try:
        flow.serve(request, context, on_ready)
    finally:
        if file:
            with contextlib.suppress(FilesystemRefused):
                withdraw_result(file)
