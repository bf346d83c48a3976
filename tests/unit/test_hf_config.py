"""Configs by meaning: H-01 to H-06 and H-10."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as some

from mx_cli.base import canonical
from mx_cli.base.errors import UsageError
from mx_cli.model import hf_config

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "rms_norm_eps": 1e-05,
    "rope_theta": 500000.0,
    "rope_scaling": {"factor": 8.0, "rope_type": "llama3", "low_freq_factor": 1.0},
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": False,
    "quantization_config": {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": 128,
        "ignore": ["lm_head", "re:.*gate"],
        "sub": {"bnb_4bit_compute_dtype": "torch.float16"},
    },
}


def digest(config: Any) -> str:
    text = config if isinstance(config, bytes) else json.dumps(config).encode()
    return canonical.sha256(hf_config.load(text, "config.json"))


def same(*configs: Any) -> bool:
    return len({digest(config) for config in configs}) == 1


def different(*configs: Any) -> bool:
    return len({digest(config) for config in configs}) == len(configs)


def refusal(config: Any) -> str:
    with pytest.raises(UsageError) as caught:
        digest(config)
    return caught.value.what


def test_H01_formatting() -> None:
    keys = list(LLAMA)
    random.Random(1).shuffle(keys)
    pretty = json.dumps(LLAMA, indent=2)
    assert same(
        LLAMA,
        {key: LLAMA[key] for key in keys},
        json.dumps(LLAMA, separators=(",", ":")).encode(),
        pretty.replace("\n", "\r\n").encode(),
        pretty.encode() + b"\n",
        json.dumps(LLAMA, indent="\t").encode(),
        b"\xef\xbb\xbf" + pretty.encode(),
    )


def test_bookkeeping_does_not_count_but_unknown_keys_do() -> None:
    noise = {"_name_or_path": "/data1/x", "transformers_version": "4.57.1", "_commit_hash": "abc"}
    nested = {"text_config": {"hidden_size": 1}}
    assert same(LLAMA, {**LLAMA, **noise})
    assert same(nested, {"text_config": {"hidden_size": 1, **noise}})
    assert different(LLAMA, {**LLAMA, "new_key": 1}, {**LLAMA, "id2label": {"_name_or_path": "x"}})


def test_H03_non_finite() -> None:
    def limit(text: str) -> bytes:
        return b'{"time_step_limit": [0.0, ' + text.encode() + b"]}"

    assert same(limit("Infinity"), limit('{"__float__": "Infinity"}'))
    assert different(*map(limit, ("Infinity", "-Infinity", "NaN", "1e400", "-1e400", '"Infinity"', "null")))
    json.loads(canonical.dumps(hf_config.load(limit("NaN"), "x")), parse_constant=lambda _: pytest.fail("not JSON"))


def test_H04_dtype() -> None:
    assert same(
        {"torch_dtype": "bfloat16"},
        {"dtype": "bfloat16"},
        {"torch_dtype": "torch.bfloat16"},
        {"torch_dtype": "bfloat16", "dtype": "torch.bfloat16"},
        {"torch_dtype": None, "dtype": "bfloat16"},
    )
    assert same({"text_config": {"torch_dtype": "float16"}}, {"text_config": {"dtype": "float16"}})
    assert same({"dtype": {"": "torch.float16", "vision": "float32"}}, {"dtype": {"": "float16", "vision": "float32"}})
    assert different({"dtype": "bfloat16"}, {"dtype": "float16"}, {})
    said = refusal({"text_config": {"torch_dtype": "bfloat16", "dtype": "float16"}})
    assert 'text_config.torch_dtype is "bfloat16", text_config.dtype is "float16"' in said


def test_H05_rope_spellings() -> None:
    old = {"rope_theta": 10000, "rope_scaling": {"type": "linear", "factor": 4}}
    assert same(
        old,
        {"rope_theta": 10000.0, "rope_scaling": {"rope_type": "linear", "factor": 4.0}},
        {"rope_theta": 10000.0, "rope_scaling": {"rope_type": "linear", "type": "linear", "factor": 4.0}},
        {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}},
        {"rope_theta": 10000, "rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}},
        {**old, "rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}},
    )
    assert same(
        {"text_config": old}, {"text_config": {"rope_parameters": {"rope_theta": 10000, "type": "linear", "factor": 4}}}
    )
    assert same(
        {"rope_theta": 1e6, "rope_scaling": None}, {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}
    )
    assert same({"rope_scaling": {"type": "su"}}, {"rope_scaling": {"rope_type": "longrope"}})
    assert same({}, {"rope_scaling": {"type": "default"}}, {"rope_parameters": {}}, {"rope_scaling": None})
    partial = {"partial_rotary_factor": 0.5, "rope_theta": 1e4}
    assert same(partial, {"rope_parameters": {"rope_type": "default", **partial}})


def test_H05_rope_meanings_stay_apart() -> None:
    assert different(
        {},
        {"rope_theta": 10000},
        {"rope_theta": 20000},
        {"rope_scaling": {"type": "linear", "factor": 4}},
        {"rope_scaling": {"type": "linear", "factor": 8}},
        {"rope_scaling": {"type": "yarn", "factor": 4}},
        {"rope_scaling": {"type": "my-own-kind", "factor": 4}},
        {"rope_scaling": "verbatim"},
    )
    assert hf_config.load(b'{"rope_scaling": {"type": "My-Own", "x": [1]}}', "c") == {
        "rope_parameters": {"rope_type": "My-Own", "x": [1]}
    }


def test_H05_rope_per_layer_type() -> None:
    layers = {"full": {"type": "linear", "factor": 8}, "sliding": {"rope_type": "default"}}
    assert hf_config.load(json.dumps({"rope_parameters": layers, "rope_theta": 7}).encode(), "c") == {
        "rope_parameters": {"full": {"rope_type": "linear", "factor": 8}, "sliding": {"rope_type": "default"}},
        "rope_theta": 7,
    }


@pytest.mark.parametrize(
    "config",
    [
        {"rope_scaling": {"type": "linear", "rope_type": "yarn"}},
        {"rope_scaling": {"type": "linear"}, "rope_parameters": {"rope_type": "yarn"}},
        {"rope_theta": 1, "rope_parameters": {"rope_theta": 2}},
        {"text_config": {"rope_scaling": {"type": "linear", "rope_type": "yarn"}}},
    ],
)
def test_H05_disagreement_is_named(config: dict[str, Any]) -> None:
    said = refusal(config)
    assert "config.json" in said
    assert "rope" in said


def test_H06_numbers() -> None:
    def theta(text: str) -> bytes:
        return b'{"x": ' + text.encode() + b"}"

    assert same(theta("10000"), theta("10000.0"), theta("1e4"), theta("1E+4"))
    assert same(theta("1e-05"), theta("0.00001"), theta("1E-5"))
    assert same(theta("-0.0"), theta("0"), theta("0.0"))
    assert different(theta("9007199254740992"), theta("9007199254740993"))
    assert different(theta("1"), theta("true"), theta('"1"'))


def test_H10_quantization() -> None:
    def changed(**values: Any) -> dict[str, Any]:
        return {**LLAMA, "quantization_config": {**LLAMA["quantization_config"], **values}}

    assert same(
        LLAMA,
        changed(ignore=["re:.*gate", "lm_head"]),
        changed(sym=None),
        changed(bits=4.0),
        changed(sub={"bnb_4bit_compute_dtype": "float16"}),
    )
    assert different(
        LLAMA, changed(bits=8), changed(group_size=64), changed(ignore=["lm_head"]), changed(desc_act=True)
    )


@pytest.mark.parametrize("text", [b"[]", b"1", b'"x"', b"null"])
def test_H13_not_an_object(text: bytes) -> None:
    assert "expected a JSON object" in refusal(text)


_values = some.recursive(
    some.none() | some.booleans() | some.integers() | some.floats() | some.text(max_size=5),
    lambda inner: (
        some.lists(inner, max_size=3)
        | some.dictionaries(
            some.sampled_from(
                ["a", "dtype", "torch_dtype", "rope_scaling", "type", "rope_type", "x_config", "rope_theta", "ignore"]
            ),
            inner,
            max_size=5,
        )
    ),
    max_leaves=15,
)


@settings(max_examples=300, deadline=None)
@given(
    some.dictionaries(
        some.sampled_from(["rope_parameters", "rope_scaling", "dtype", "b_config", "rope_theta"]), _values
    )
)
@example({"rope_parameters": {"a": False}, "rope_scaling": {"layer": {}}})
def test_normalisation_is_idempotent(config: dict[str, Any]) -> None:
    try:
        once = hf_config.load(json.dumps(config).encode(), "c")
    except UsageError:
        return
    assert hf_config.load(canonical.dumps(once), "c") == once
