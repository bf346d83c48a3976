"""What shapes weights in memory, for identities of the stages `loaded` and `processed`.

`checkpoint`: the files as published; no layout, any engine and any tensor-parallel size may use them.
`loaded`: an engine's parameters before its post-processing. `processed`: after it; engine and version are required.

Sizes default to 1, so `--tp 8` and `--tp 8 --pp 1` are one layout. Nothing unknown is left out: every `--set k=v`
counts. For `processed`, name with --set whatever else changes bytes there: torch, gpu_arch, kv_cache_dtype,
attention_backend, moe_backend, linear_backend, rope.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mx_cli.base.errors import UsageError

STAGES = ("checkpoint", "loaded", "processed")
SIZES = ("tp", "pp", "ep", "dp")
FIELDS = (*SIZES, "rank", "dtype", "quantization", "engine", "engine_version")
_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32", "float": "float32"}


def layout(
    stage: str | None, options: Mapping[str, str | int | None], settings: Sequence[str] = ()
) -> tuple[str, dict[str, Any]]:
    """(stage, layout) of the command's options (names as in FIELDS, None = not given) and `k=v` settings.

    Raises UsageError for an unknown stage, a wrong value, a factor given twice with different values, factors beside an
    explicit stage `checkpoint`, and a stage that lacks the factors it needs.
    """
    given: dict[str, Any] = {}
    for name, value in options.items():
        if value is not None:
            _add(given, name, value)
    for setting in settings:
        name, equals, text = setting.partition("=")
        if not equals or not name:
            raise UsageError(f"not a setting (--set {setting!r}: expected name=value)")
        _add(given, name, text)
    stage = stage or ("loaded" if given else "checkpoint")
    if stage not in STAGES:
        raise UsageError(f"unknown stage (--stage {stage!r}: expected {', '.join(STAGES)})")
    if stage == "checkpoint":
        if given:
            names = ", ".join(_option(name) for name in sorted(given))
            raise UsageError(
                f"stage checkpoint has no layout ({names} given)", hint="use --stage loaded, or leave them out"
            )
        return stage, {}
    _check_needed(stage, given)
    return stage, {**dict.fromkeys(SIZES, 1), **given}


def _add(given: dict[str, Any], name: str, value: str | int) -> None:
    name = name.strip()
    read = _read(name.replace("-", "_"), value)
    name = name.replace("-", "_") if name.replace("-", "_") in FIELDS else name
    if name in given and given[name] != read:
        raise UsageError(f"{_option(name)} is given twice ({given[name]!r} and {read!r})")
    given[name] = read


def _read(name: str, value: str | int) -> Any:
    if name in (*SIZES, "rank"):
        least = 0 if name == "rank" else 1
        try:
            number = int(value)
        except ValueError:
            number = -1
        if not least <= number < 1 << 31:
            raise UsageError(f"wrong number ({_option(name)} {value!r}: expected {least} or more)")
        return number
    text = str(value)
    if not text:
        raise UsageError(f"empty value ({_option(name)})")
    if name == "dtype":
        text = text.removeprefix("torch.")
        return _DTYPES.get(text, text)
    return text


def _check_needed(stage: str, given: Mapping[str, Any]) -> None:
    if not given:
        raise UsageError(f"stage {stage} needs a layout", hint="give --tp, --rank, --dtype …, or --set name=value")
    missing = [name for name in ("engine", "engine_version") if stage == "processed" and name not in given]
    if missing:
        names = " and ".join(_option(name) for name in missing)
        raise UsageError(f"stage processed needs {names}: post-processing differs between engines and their versions")


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}" if name in FIELDS else f"--set {name}"
