"""SGLang's plugin: weights by way of mx for engines that ask for it. Entry point of the group `sglang.srt.plugins`.

    python -m sglang.launch_server --model-path MODEL --model-loader-extra-config '{"mx": {"uri": "s3://…", "serve": true}}'

SGLang's load formats are a closed list, so the key `mx` of the extra configuration asks for it, beside the load formats
`auto` and `safetensors`. SGLang calls `register` in each of its processes.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

from mx_cli.base.errors import UsageError

KEY = "mx"
TARGET = "sglang.srt.model_loader.loader.get_model_loader"
FORMATS = ("auto", "safetensors")


def register() -> None:
    """Put `choose_loader` around SGLang's own choice. An engine that does not ask for mx is not changed."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(TARGET, choose_loader, HookType.AROUND)


def choose_loader(own_choice: Callable[..., Any], load_config: Any, model_config: Any = None) -> Any:
    """The loader of a load configuration: mx's where its extra configuration has the key `mx`, else SGLang's.

    Raises UsageError for unknown keys, and where SGLang loads the model in a way of its own: with another format, or while
    it quantises it.
    """
    extra = load_config.model_loader_extra_config
    if not isinstance(extra, Mapping) or KEY not in extra:
        return own_choice(load_config, model_config)
    from mx_cli.engines.sglang_loader import MxLoader, options_of_sglang

    if others := sorted(extra.keys() - {KEY}):
        raise UsageError(f"beside {KEY} in the loader's extra configuration: {', '.join(others)}")
    options = options_of_sglang(extra[KEY])
    plain = copy.copy(load_config)
    plain.model_loader_extra_config = {}
    loader = own_choice(plain, model_config)
    # A draft model has other weights than those that were named.
    if getattr(model_config, "is_draft_model", False):
        return loader
    named = str(getattr(load_config.load_format, "value", load_config.load_format))
    if named not in FORMATS or not MxLoader.stands_in_for(loader):
        raise UsageError(
            f"SGLang loads this model by {type(loader).__name__} (load format {named}), which mx cannot stand in for"
        )
    return MxLoader(plain, options)
