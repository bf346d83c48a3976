"""The `mx_source_id` of ModelExpress, for fleets that mix both.

16 hex digits of SHA-256 over canonical JSON (sorted keys, no spaces, raw UTF-8) of its SourceIdentity: eleven fields
always, six more only when they are not empty, text in lower case, extra parameters ordered by their original key and
the first of two that differ in case kept. Checked against vectors computed with ModelExpress' own code.

It folds case, takes a branch or nothing as a revision, and holds nothing of the content: use it to meet ModelExpress,
not to decide whether weights are the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from mx_cli.base import canonical
from mx_cli.base.errors import UsageError

SOURCE_TYPES = (
    "WEIGHTS", "LORA", "CUDA_GRAPH", "TORCH_COMPILE", "TRITON",
    "DEEP_GEMM", "TILELANG", "CUTE_DSL", "FLASHINFER", "TVM_FFI",
)  # fmt: skip
FRAMEWORKS = ("UNKNOWN", "VLLM", "SGLANG", "TRT_LLM")
_ENUMS = {"mx_source_type": SOURCE_TYPES, "backend_framework": FRAMEWORKS}
_NUMBERS = (*_ENUMS, "tensor_parallel_size", "pipeline_parallel_size", "expert_parallel_size")
_TEXTS = ("mx_version", "model_name", "dtype", "quantization", "revision")
_WHEN_GIVEN = (
    "backend_framework_version", "torch_version", "cuda_version", "triton_version", "gpu_arch", "compile_config_digest",
)  # fmt: skip
_EXTRA = "extra_parameters."
FIELDS = (*_NUMBERS, *_TEXTS, *_WHEN_GIVEN, f"{_EXTRA}NAME")


def read_fields(settings: Iterable[str]) -> dict[str, str]:
    """`name=value` texts of --field. UsageError for an unknown or repeated name."""
    fields: dict[str, str] = {}
    for setting in settings:
        name, equals, value = setting.partition("=")
        known = name in (*_NUMBERS, *_TEXTS, *_WHEN_GIVEN) or (name.startswith(_EXTRA) and name != _EXTRA)
        if not equals or not known:
            raise UsageError(f"not a field of ModelExpress (--field {setting!r}: expected one of {', '.join(FIELDS)})")
        if name in fields:
            raise UsageError(f"--field {name} is given twice")
        fields[name] = value
    return fields


def canonical_fields(fields: Mapping[str, str]) -> dict[str, Any]:
    """What the id is computed over; missing fields are 0 or empty. UsageError for a number that isn't one."""
    extra: dict[str, str] = {}
    for name in sorted(name for name in fields if name.startswith(_EXTRA)):
        extra.setdefault(name.removeprefix(_EXTRA).lower(), fields[name].lower())
    result: dict[str, Any] = {name: _number(name, fields.get(name, "0")) for name in _NUMBERS}
    result |= {name: fields.get(name, "").lower() for name in _TEXTS}
    result |= {name: fields[name].lower() for name in _WHEN_GIVEN if fields.get(name)}
    return {**result, "extra_parameters": extra}


def source_id(fields: Mapping[str, str]) -> str:
    """The mx_source_id of fields as given by read_fields."""
    return canonical.sha256(canonical_fields(fields))[:16]


def _number(name: str, text: str) -> int:
    names = _ENUMS.get(name, ())
    if text.upper() in names:
        return names.index(text.upper())
    if not (text.isascii() and text.isdigit()) or len(text) > 10 or int(text) >= 1 << 32:
        raise UsageError(f"not a number (--field {name}={text}{': or one of ' + ', '.join(names) if names else ''})")
    return int(text)
