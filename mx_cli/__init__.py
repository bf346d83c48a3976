"""mx: model weights where they are needed, once, by the fastest path that exists, verified.

From Python: `serve` offers a module's tensors to other processes, `pull_into` fills a module's tensors from them, `pull`
gives tensors of one's own; `load` and `stream` read them straight from a store or a disk; `load_model` makes a model and fills
it. All are loaded when they are first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mx_cli.base.version import VERSION as __version__

if TYPE_CHECKING:
    from mx_cli.engines.load_model import load_model
    from mx_cli.flows.in_process import Handle, serve
    from mx_cli.flows.load import load
    from mx_cli.flows.pull_routes import Received
    from mx_cli.flows.pull_tensors import pull, pull_into
    from mx_cli.flows.stream import stream

__all__ = ["Handle", "Received", "__version__", "load", "load_model", "pull", "pull_into", "serve", "stream"]

_HOMES = {
    "Handle": "mx_cli.flows.in_process",
    "serve": "mx_cli.flows.in_process",
    "load": "mx_cli.flows.load",
    "load_model": "mx_cli.engines.load_model",
    "stream": "mx_cli.flows.stream",
    "Received": "mx_cli.flows.pull_routes",
    "pull": "mx_cli.flows.pull_tensors",
    "pull_into": "mx_cli.flows.pull_tensors",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOMES[name]), name)
