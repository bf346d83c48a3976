"""Models of transformers for `load_model`: made on the device without initial weights, and filled under the names there.

Everything of transformers is imported inside the functions.
"""

from __future__ import annotations

import contextlib
import copy
import re
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from mx_cli.base.errors import MissingCapability, UsageError
from mx_cli.flows.new_model import Allow
from mx_cli.flows.pull_memory import refuse
from mx_cli.sinks.torch_tensors import torch_dtype

CONFIG, GENERATION = "config.json", "generation_config.json"
_MAKING = threading.RLock()
"""transformers sets a process's default dtype, and switches torch's initial values off, while it makes a model."""


def require_transformers() -> None:
    """Raises MissingCapability without transformers 5."""
    try:
        import transformers.initialization  # noqa: F401
    except (ImportError, OSError) as error:
        raise MissingCapability.package("transformers (5 or newer)", error, "pip install 'transformers>=5'") from None


def read_config(place: Path) -> Any:
    """The config of a directory, or of its config.json. Raises UsageError for one that transformers cannot use."""
    from transformers import AutoConfig

    file = place / CONFIG if place.is_dir() else place
    if not file.is_file():
        raise UsageError(f"no config.json ({file})", hint="mx prefetch URI --include '*.json' brings a model's")
    try:
        return AutoConfig.from_pretrained(str(file), local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        raise UsageError(f"transformers cannot use {file}: {str(error).splitlines()[0][:300]}") from None


class Transformers:
    """Makes the models of one config; see `flows.new_model.Maker`.

    `dtype`: a dtype of torch, or None for the config's, or that of the source's first float where the config has none.
    `initialise`: give the weights initial values, for those that the source may lack. `generation`: where
    generation_config.json is, if anywhere.
    """

    def __init__(
        self, config: Any, model_class: Any, device: str, dtype: Any, initialise: bool, generation: Path | None
    ) -> None:
        self._config, self._device, self._dtype = config, device, _dtype_of(dtype)
        self._initialise, self._generation = initialise, generation
        if getattr(config, "quantization_config", None):
            raise UsageError(
                "the model is quantised: its modules are made while transformers loads it",
                hint="mx prefetch brings the files for from_pretrained",
            )
        self._class = model_class or _class_of(config)

    def make(self, dtype: str) -> Any:
        import torch
        from transformers.initialization import no_init_weights

        with _MAKING:
            with torch.device(self._device), contextlib.nullcontext() if self._initialise else no_init_weights():
                model = self._class._from_config(copy.deepcopy(self._config), dtype=self._dtype_or(dtype))
            model.tie_weights()
            _keep_precise(model, self._dtype_or(dtype))
            _initialise_the_rest(model)
        return self._finished(model)

    def ignores(self, module: Any, name: str) -> bool:
        patterns = set(module._keys_to_ignore_on_load_unexpected or ())
        buffers = [one for one, _ in module.named_buffers()]
        # Buffers that earlier releases saved, and that are computed now.
        for end in ("rotary_emb.inv_freq", "position_ids"):
            if any(one.endswith(end) for one in buffers):
                patterns.add(rf"(^|\.){re.escape(end)}$")
        own = name in module.state_dict(keep_vars=True)
        return not own and any(re.search(pattern, name) for pattern in patterns)

    def names(self, module: Any, offered: Iterable[str]) -> dict[str, str] | None:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

        own = module.state_dict(keep_vars=True)
        found = {name: name for name in offered if name in own}
        others = [name for name in offered if name not in own]
        if not others:
            return found
        mapping = get_model_conversion_mapping(module)
        renamings = [one for one in mapping if isinstance(one, WeightRenaming)]
        converters = [one for one in mapping if isinstance(one, WeightConverter)]
        for name in others:
            now, pattern = rename_source_key(name, renamings, converters, module.base_model_prefix, own)
            if pattern is not None or now in found.values():
                return None
            found[name] = now
        return found

    def convert(self, tensors: Mapping[str, Any], dtype: str, allow: Allow) -> Any:
        with _MAKING:
            model, info = self._class.from_pretrained(
                None,
                config=copy.deepcopy(self._config),
                state_dict=dict(tensors),
                dtype=self._dtype_or(dtype),
                output_loading_info=True,
            )
        refuse(
            sorted(str(row[0] if isinstance(row, tuple) else row) for row in info["mismatched_keys"]),
            () if allow.missing else sorted(info["missing_keys"]),
            () if allow.extra else sorted(info["unexpected_keys"]),
        )
        return self._finished(model.to(self._device))

    def _dtype_or(self, dtype: str) -> Any:
        return self._dtype or _dtype_of(self._config.dtype) or torch_dtype(dtype)

    def _finished(self, model: Any) -> Any:
        from transformers import GenerationConfig

        if self._generation is not None and model.can_generate() and (self._generation / GENERATION).is_file():
            model.generation_config = GenerationConfig.from_pretrained(str(self._generation), local_files_only=True)
        return model.eval()


def _dtype_of(wish: Any) -> Any:
    """torch's dtype of a name (`bfloat16`) or of itself; None for None and `auto`. Raises UsageError."""
    import torch

    if wish is None or wish == "auto":
        return None
    found = getattr(torch, wish.removeprefix("torch."), None) if isinstance(wish, str) else wish
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise UsageError(f"not a dtype of weights: {wish!r}", hint="float32, bfloat16, float16, or one of torch's")
    return found


def _class_of(config: Any) -> Any:
    """The class that the config names. Raises UsageError unless it names one of transformers' own."""
    import transformers

    names = config.architectures or []
    found = getattr(transformers, names[0], None) if len(names) == 1 else None
    if found is None or not hasattr(found, "_from_config"):
        said = ", ".join(names) or "none"
        raise UsageError(
            f"the config names no class of transformers (architectures: {said})",
            hint="model_class=… says which, such as transformers.LlamaForCausalLM",
        )
    return found


def _keep_precise(model: Any, dtype: Any) -> None:
    """Weights that the model's class wants in float32, whatever the rest has."""
    import torch

    plan = model._get_dtype_plan(dtype)
    for name, parameter in model.named_parameters():
        for pattern, precise in plan.items():
            if re.search(pattern.replace("*", ".*"), name):
                parameter.data = torch.empty_like(parameter.data, dtype=precise)


def _initialise_the_rest(model: Any) -> None:
    """Buffers that no checkpoint has, as from_pretrained does it: by the class's own rules, all else marked as there."""
    for tensor in model.state_dict(keep_vars=True).values():
        tensor._is_hf_initialized = True
    model.initialize_weights()
