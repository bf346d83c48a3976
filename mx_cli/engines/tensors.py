"""Whether all that a module computes with is in the tensors that peers exchange. Fails closed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from mx_cli.base.errors import Incompatible, UsageError
from mx_cli.sinks.torch_tensors import describe, named_tensors

SHOWN = 3


def refuse_empty(module: Any) -> None:
    """Raises Incompatible for tensors without elements or without bytes: their weights are somewhere else."""
    try:
        described = describe(module, copy=False)
    except UsageError as error:
        raise Incompatible(error.what, hint=error.hint) from None
    empty = [one.name for one in described if not one.size]
    if empty:
        raise Incompatible(
            f"{len(empty)} of {len(described)} tensors are empty here ({_some(empty)}): the engine keeps their weights elsewhere",
            hint="exchange them before post-processing (stage loaded), or as files (stage checkpoint)",
        )


def refuse_hidden(module: Any) -> None:
    """Raises Incompatible for tensors that are no parameters or buffers: a peer would not send them."""
    hidden = list(_hidden(module))
    if hidden:
        raise Incompatible(
            f"{len(hidden)} tensors are neither parameters nor buffers ({_some(hidden)})",
            hint="exchange the weights before post-processing (stage loaded), or as files (stage checkpoint)",
        )


def _hidden(module: Any) -> Iterator[str]:
    import torch

    known = {tensor.untyped_storage().data_ptr() for _, _, tensor in named_tensors(module, all_buffers=True)}
    for path, child in module.named_modules():
        for name, value in vars(child).items():
            if isinstance(value, torch.Tensor) and value.numel() and value.untyped_storage().data_ptr() not in known:
                yield f"{path}.{name}" if path else name


def _some(names: list[str]) -> str:
    return ", ".join(names[:SHOWN]) + (", …" if len(names) > SHOWN else "")
