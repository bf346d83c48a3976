"""What happens to a vLLM worker's weights while it lives, told to its offering.

The methods of the worker's class are wrapped, once, and only in a process whose loader asked for it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from mx_cli.engines.offering import Offering

READY = "compile_or_warm_up_model"
"""The last that a worker is asked before its engine takes requests."""
ASLEEP = {
    "sleep": "the engine sleeps",
    "discard": "the weights are discarded",
    "checkpoint_prepare": "a checkpoint is made",
}
AWAKE = ("wake_up", "checkpoint_restore")
CHANGED = (
    "start_weight_update",
    "update_weights",
    "reload_weights",
    "reset_weights",
    "elastic_ep_execute",
)

_offerings: dict[int, Offering] = {}


def attach(worker: type, config: Any, offering: Offering) -> bool:
    """From now on what is done to the worker of this configuration is told. Whether it will tell when it is ready."""
    _offerings[id(config)] = offering
    _wrap(worker, READY, after=lambda offering: offering.begin())
    for name, why in ASLEEP.items():
        _wrap(worker, name, before=functools.partial(_withdraw, why))
    for name in AWAKE:
        _wrap(worker, name, after=lambda offering: offering.begin())
    for name in CHANGED:
        _wrap(worker, name, before=lambda offering: offering.drop("the engine gets other weights"))
    _wrap(worker, "shutdown", before=lambda offering: offering.close())
    return callable(getattr(worker, READY, None))


def _withdraw(why: str, offering: Offering) -> None:
    offering.withdraw(why)


Tell = Callable[[Offering], None]


def _wrap(worker: type, name: str, before: Tell | None = None, after: Tell | None = None) -> None:
    method = getattr(worker, name, None)
    if method is None or getattr(method, "_tells_mx", False):
        return

    @functools.wraps(method)
    def told(self: Any, *args: Any, **kwargs: Any) -> Any:
        offering = _offerings.get(id(getattr(self, "vllm_config", None)))
        if offering and before:
            before(offering)
        result = method(self, *args, **kwargs)
        if offering and after:
            after(offering)
        return result

    told._tells_mx = True  # type: ignore[attr-defined]
    setattr(worker, name, told)
