"""`mx_cli.load_model`: a model made without initial weights, and filled in place by the best route."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mx_cli.base.errors import UsageError
from mx_cli.engine import route
from mx_cli.flows.from_python import device_number, model_text, process_context
from mx_cli.flows.hash import is_local
from mx_cli.flows.new_model import Allow, Maker, NewModel
from mx_cli.flows.pull_tensors import IntoMemory, request_of
from mx_cli.sinks.torch_tensors import require_torch


def load_model(
    config_or_dir: Any,
    source: str | os.PathLike[str],
    device: Any = "cpu",
    *,
    dtype: Any = None,
    model_class: Any = None,
    revision: str | None = None,
    origin: str | None = None,
    peers: Sequence[str] = (),
    path: str = "auto",
    require: Sequence[str] = (),
    routes: Sequence[str] = (),
    allow_missing: bool = False,
    allow_extra: bool = False,
    **settings: Any,
) -> Any:
    """A model with the weights of `source`: made on `device` without initialising them, then filled where they lie.

    `config_or_dir`: a directory with config.json (or that file), a config of transformers, or any callable that makes a
    module. `model_class`: of transformers, where the config names none. A mapping of these gives a mapping of models, whose
    tensors are those of `source` that begin with the same name: the parts of a pipeline (`unet/`), or modules that were
    served as a mapping.

    `source`: a directory, which is read as it is (the route stream), or a URI or an identity, for which the other arguments
    and `settings` are those of `pull_into`: routes are tried in order, and each says in the log (`mx`) why it was taken or
    not.

    The dtype is `dtype`, else what the config says, else that of the source's first float, as in from_pretrained. Floats
    that have another one at the source are converted on arrival, which takes memory for those tensors twice, and is
    logged. Tied weights stay tied; buffers that no checkpoint has are computed. Where transformers itself makes a model's
    tensors out of a checkpoint's (experts in one), it does so here too, from a copy of the weights in host memory.

    Tensors that are missing, or are more than wanted, are an error that names them; `allow_missing` gives the missing ones
    their initial values, `allow_extra` leaves the others. No model is returned whose weights are not all there. Blocks.
    Raises MissingCapability without torch or transformers, UsageError for a model that cannot be made so (quantised, code
    of its own), Incompatible, and what `pull_into` and `load` raise.
    """
    require_torch()
    device = str(device)
    device_number(device)
    if isinstance(config_or_dir, Mapping) and model_class is not None:
        raise UsageError("one model_class for several models", hint="give a callable for each")
    each = config_or_dir if isinstance(config_or_dir, Mapping) else {"": config_or_dir}
    makers = {
        str(name): _maker(one, device, dtype, model_class, initialise=allow_missing) for name, one in each.items()
    }
    context = process_context(settings)
    model = NewModel(makers, Allow(allow_missing, allow_extra), context.notice)
    text = model_text(source)
    chosen = routes or ((route.STREAM,) if is_local(text) else ())
    request = request_of(text, revision, origin, peers, path, require, chosen)
    IntoMemory(request, context, model.layout).run()
    return model.modules if isinstance(config_or_dir, Mapping) else model.modules[""]


def _maker(wish: Any, device: str, dtype: Any, model_class: Any, *, initialise: bool) -> Maker:
    import torch

    if isinstance(wish, torch.nn.Module):
        raise UsageError("a module that is there already", hint="mx_cli.pull_into fills it")
    if callable(wish):
        if dtype is not None or model_class is not None:
            raise UsageError("dtype and model_class are for a config: a callable makes what it makes")
        return Made(wish, device)
    from mx_cli.engines.transformers import Transformers, read_config, require_transformers

    require_transformers()
    from transformers import PretrainedConfig

    if isinstance(wish, PretrainedConfig):
        return Transformers(wish, model_class, device, dtype, initialise, None)
    if not isinstance(wish, (str, os.PathLike)):
        raise UsageError(f"neither a directory, a config, nor a callable: {type(wish).__name__}")
    place = Path(wish).expanduser()
    directory = place if place.is_dir() else place.parent
    return Transformers(read_config(place), model_class, device, dtype, initialise, directory)


class Made:
    """Makes whatever module a callable makes; see `flows.new_model.Maker`."""

    def __init__(self, make: Callable[[], Any], device: str) -> None:
        self._make, self._device = make, device

    def make(self, dtype: str) -> Any:
        import torch

        with torch.device(self._device):
            module = self._make()
        if not isinstance(module, torch.nn.Module):
            raise UsageError(f"it made a {type(module).__name__}, not a module")
        return module.eval()

    def ignores(self, module: Any, name: str) -> bool:
        return False

    def names(self, module: Any, offered: Iterable[str]) -> dict[str, str]:
        return {name: name for name in offered}

    def convert(self, tensors: Mapping[str, Any], dtype: str, allow: Allow) -> Any:
        raise AssertionError("its names are those of the source")
