"""What shapes a rank's tensors in vLLM, for the identity that peers compare.

Reads attributes of vLLM's configuration objects, nothing else; what a version lacks counts as None.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mx_cli.base import canonical


@dataclass(frozen=True)
class Coordinates:
    """Where a rank stands in each direction, from 0."""

    tp: int = 0
    pp: int = 0
    pcp: int = 0
    dp: int = 0


@dataclass(frozen=True)
class Build:
    """What runs: vLLM's version, torch's, the GPU's architecture, and the variables that vLLM says change what it computes with."""

    version: str
    torch: str = ""
    gpu_arch: str = ""
    variables: Any = None


def refusal(config: Any, model: Any, stage: str) -> str:
    """Why no tensors are exchanged with this engine; empty when they may be."""
    if _get(config.parallel_config, "enable_eplb"):
        return "EPLB moves experts between ranks while the engine runs"
    if stage == "processed" and _get(model, "quantization") is not None:
        return "post-processing of quantised weights keeps results outside of tensors (stage loaded, or checkpoint)"
    return ""


def layout(config: Any, model: Any, stage: str, build: Build, at: Coordinates) -> dict[str, Any]:
    """The factors of one rank, as `model.layout` takes them. `config`: the engine's; `model`: its model's."""
    parallel = config.parallel_config
    tp, pp = parallel.tensor_parallel_size, parallel.pipeline_parallel_size
    pcp = _get(parallel, "prefill_context_parallel_size") or 1
    found: dict[str, Any] = {
        "engine": "vllm",
        "engine_version": build.version,
        "tp": tp,
        "pp": pp,
        "rank": (at.pp * pcp + at.pcp) * tp + at.tp,
        "pcp": pcp,
        "dcp": _get(parallel, "decode_context_parallel_size") or 1,
        "dcp_q_replicate": _get(parallel, "dcp_q_replicate"),
        "architecture": ",".join(_get(model.hf_config, "architectures") or ()),
        "dtype": str(model.dtype),
        "quantization": _get(model, "quantization") or "none",
        "quantization_config": _digest(_quantization(model)),
    }
    if _get(parallel, "enable_expert_parallel"):
        size = parallel.data_parallel_size * pcp * tp
        found["ep"] = size
        found["ep_rank"] = (at.dp * pcp + at.pcp) * tp + at.tp
        found["expert_placement"] = _get(parallel, "expert_placement_strategy")
    if stage == "processed":
        found |= _processed(config, model, build)
    return {name: value if isinstance(value, int) else str(value) for name, value in found.items()}


def _processed(config: Any, model: Any, build: Build) -> dict[str, Any]:
    """What post-processing depends on besides."""
    attention, kernel = _get(config, "attention_config"), _get(config, "kernel_config")
    cache = config.cache_config
    text = _get(model, "hf_text_config")
    rope = {
        name: _get(text, name) for name in ("rope_parameters", "rope_scaling", "rope_theta", "max_position_embeddings")
    }
    return {
        "torch": build.torch,
        "gpu_arch": build.gpu_arch,
        "attention_backend": _get(attention, "backend"),
        "moe_backend": _get(kernel, "moe_backend"),
        "linear_backend": _get(kernel, "linear_backend"),
        "kernels": _digest(kernel),
        "attention": _digest(attention),
        "kv_cache_dtype": _get(cache, "cache_dtype"),
        "kv_cache_skip_layers": _get(cache, "kv_cache_dtype_skip_layers"),
        "rope": _digest(rope),
        "max_model_len": _get(model, "max_model_len"),
        "variables": _digest(build.variables),
    }


def _quantization(model: Any) -> Any:
    from_checkpoint = _get(model.hf_config, "quantization_config")
    if hasattr(from_checkpoint, "to_dict"):
        from_checkpoint = from_checkpoint.to_dict()
    return {"checkpoint": from_checkpoint, "runtime": _get(model, "quantization_config")}


def _digest(value: Any) -> str:
    return canonical.sha256(_plain(value))[:16]


_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


def _plain(value: Any) -> Any:
    """As JSON; objects by what they say of themselves, without their address."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(one) for one in value]
    if isinstance(value, (set, frozenset)):
        return sorted(str(one) for one in value)
    return _ADDRESS.sub("", repr(value))


def _get(thing: Any, name: str) -> Any:
    return getattr(thing, name, None)
