"""The options of what is a peer: `mx serve`, and `mx pull --then-serve`."""

from __future__ import annotations

from typing import Annotated, Optional

import typer

TEXT = Optional[str]  # noqa: UP045 - typer reads the object

LISTEN, MAX_READERS, DRAIN_TIMEOUT = "127.0.0.1:0", 4, "25s"
"""Their defaults."""
ABOVE_DRAIN = 5.0
"""Seconds for the end of a peer beside those that its readers have."""
Listen = Annotated[
    str,
    typer.Option(
        "--listen",
        metavar="ADDR:PORT",
        help="where a peer listens; port 0 takes a free one, 0.0.0.0 is for other hosts too",
    ),
]
Advertise = Annotated[
    TEXT, typer.Option("--advertise", metavar="ADDR[:PORT]", help="the address that a peer tells others")
]
MaxReaders = Annotated[
    int, typer.Option("--max-readers", min=1, metavar="N", help="readers of a peer at once; others wait")
]
DrainTimeout = Annotated[
    str, typer.Option("--drain-timeout", metavar="DURATION", help="time for readers to finish after SIGTERM")
]
