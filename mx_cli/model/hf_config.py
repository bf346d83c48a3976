"""A Hugging Face config by its meaning: two that mean the same become equal, two that don't stay different.

The rules below are `mx1`: they are frozen, since an identity depends on each of them. A change is `mx2`.

| rule | applies to | what is equal afterwards |
|---|---|---|
| text | the file | key order, white space, line ends, byte order mark |
| numbers | everywhere | `10000` = `10000.0` = `1e4`; `1e-05` = `0.00001`; `-0.0` = `0`; whole numbers stay exact |
| non-finite | everywhere | `Infinity` = `{"__float__": "Infinity"}`; `1e400` is neither that nor a whole number |
| null | members of an object | `null` = missing; in a list it stays |
| bookkeeping | config objects | the keys of BOOKKEEPING = missing: who saved it, where it lay, how it is to be run |
| dtype | config objects | `torch_dtype` = `dtype` |
| dtype values | keys ending in `dtype` | `"torch.bfloat16"` = `"bfloat16"` (also inside an object of dtypes) |
| rope | config objects | `rope_scaling` = `rope_parameters`; in it `type` = `rope_type`, missing = `default`, and the old |
| | | names of ROPE_NAMES; `rope_theta` and `partial_rotary_factor` beside it = inside it; nothing but |
| | | the type `default` = missing |
| sets | lists of text under the keys of SETS | order and repetition |
| rest | everywhere | nothing: unknown keys and values count as they are |

A *config object* is the top level, a member whose name ends in `_config`, or any object with a `model_type`. A
`rope_parameters` that holds one object per layer type keeps that form, each of them by the rope rule, and
`rope_theta` stays outside. Two spellings of one thing that disagree are an error that names both.
"""

from __future__ import annotations

from typing import Any

from mx_cli.base import canonical
from mx_cli.base.errors import UsageError
from mx_cli.model import json_strict

BOOKKEEPING = frozenset(
    {
        "_attn_implementation",
        "_attn_implementation_autoset",
        "_attn_implementation_internal",
        "_commit_hash",
        "_diffusers_version",
        "_experts_implementation",
        "_experts_implementation_internal",
        "_name_or_path",
        "attn_implementation",
        "name_or_path",
        "transformers_version",
        "unsloth_version",
    }
)
SETS = frozenset(
    {
        "exclude",
        "exclude_modules",
        "ignore",
        "ignored_layers",
        "llm_int8_skip_modules",
        "modules_not_to_convert",
        "modules_to_not_convert",
    }
)
ROPE_NAMES = {"su": "longrope", "mrope": "default"}
_ROPE_MEMBERS = ("rope_theta", "partial_rotary_factor")


_NAMES_A_MODEL = ("model_type", "architectures", "_class_name")
"""A config of transformers has one of the first two, one of diffusers the last."""


def names_a_model(config: dict[str, Any]) -> bool:
    """Whether a normalised config says what it configures. Any JSON object is a config; most that don't are none."""
    return any(key in config for key in _NAMES_A_MODEL)


def load(data: bytes, name: str) -> dict[str, Any]:
    """The normalised config of a file's bytes. UsageError names the file and the offset or the key path."""
    return normalise(json_strict.parse(data, name), name)


def normalise(config: Any, name: str) -> dict[str, Any]:
    """Apply the table to a value of json_strict.parse. Idempotent."""
    if not isinstance(config, dict):
        kind = "a list" if isinstance(config, list) else "a single value"
        raise UsageError(f"not a model's config ({name}: {kind}, expected a JSON object)")
    return _object(config, name, [], is_config=True)


def _object(value: dict[str, Any], name: str, path: list[str | int], *, is_config: bool) -> dict[str, Any]:
    result = {}
    for key, member in value.items():
        if member is None or (is_config and key in BOOKKEEPING):
            continue
        result[key] = _member(key, member, name, [*path, key])
    if is_config:
        _one_spelling(result, "torch_dtype", "dtype", name, path)
        _rope(result, name, path)
    return result


def _member(key: str, value: Any, name: str, path: list[str | int]) -> Any:
    if isinstance(value, dict):
        if key.endswith("dtype"):
            value = {inner: _dtype(member) for inner, member in value.items()}
        return _object(value, name, path, is_config=key.endswith("_config") or "model_type" in value)
    if isinstance(value, list):
        if key in SETS and all(isinstance(item, str) for item in value):
            return sorted(set(value))
        return [_member("", item, name, [*path, index]) for index, item in enumerate(value)]
    return _dtype(value) if key.endswith("dtype") else value


def _dtype(value: Any) -> Any:
    return value.removeprefix("torch.") if isinstance(value, str) else value


def _one_spelling(value: dict[str, Any], old: str, new: str, name: str, path: list[str | int]) -> None:
    """Rename `old` to `new` in place."""
    if old not in value:
        return
    said = value.pop(old)
    if new in value and _differ(value[new], said):
        raise _disagreement(name, [*path, old], said, [*path, new], value[new])
    value[new] = said


def _rope(config: dict[str, Any], name: str, path: list[str | int]) -> None:
    """Gather what is said about rotary embeddings in `rope_parameters`, in place."""
    for key in ("rope_scaling", "rope_parameters"):
        if not isinstance(config.get(key, {}), dict):
            return
    old, new = config.get("rope_scaling", {}), config.get("rope_parameters", {})
    if old and new and _is_per_layer(old) != _is_per_layer(new):
        raise _disagreement(name, [*path, "rope_scaling"], old, [*path, "rope_parameters"], new)
    merged: dict[str, Any] = {}
    for key in ("rope_scaling", "rope_parameters"):
        said = config.get(key, {})
        if _is_per_layer(said):
            said = {layer: _rope_kind(member, name, [*path, key, layer]) for layer, member in said.items()}
        elif said:
            said = _rope_kind(said, name, [*path, key])
        _merge(merged, said, name, [*path, "rope_scaling"], [*path, key])
    per_layer = _is_per_layer(merged)
    if not per_layer:
        beside = {key: config.pop(key) for key in _ROPE_MEMBERS if key in config}
        _merge(merged, beside, name, [*path, "rope_parameters"], path)
    config.pop("rope_scaling", None)
    config.pop("rope_parameters", None)
    if not per_layer and merged:
        merged = {"rope_type": "default", **merged}
    if merged and merged != {"rope_type": "default"}:
        config["rope_parameters"] = merged


def _is_per_layer(rope: dict[str, Any]) -> bool:
    return bool(rope) and all(isinstance(member, dict) for member in rope.values())


def _rope_kind(rope: dict[str, Any], name: str, path: list[str | int]) -> dict[str, Any]:
    rope = dict(rope)
    for key in ("type", "rope_type"):
        if isinstance(rope.get(key), str):
            rope[key] = ROPE_NAMES.get(rope[key], rope[key])
    _one_spelling(rope, "type", "rope_type", name, path)
    return {"rope_type": "default", **rope}


def _merge(
    into: dict[str, Any], said: dict[str, Any], name: str, left: list[str | int], right: list[str | int]
) -> None:
    for key, value in said.items():
        if key in into and _differ(into[key], value):
            raise _disagreement(name, [*left, key], into[key], [*right, key], value)
        into[key] = value


def _differ(one: Any, other: Any) -> bool:
    # In Python True == 1, in JSON not.
    return canonical.dumps(one) != canonical.dumps(other)


def _disagreement(name: str, left: list[str | int], one: Any, right: list[str | int], other: Any) -> UsageError:
    first, second = json_strict.key_path(left), json_strict.key_path(right)
    return UsageError(
        f"two spellings disagree ({name}: {first} is {_shown(one)}, {second} is {_shown(other)})",
        hint=f"remove one of the two from {name}",
    )


def _shown(value: Any) -> str:
    text = canonical.dumps(value).decode()
    return text if len(text) <= 80 else text[:77] + "..."
