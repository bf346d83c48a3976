"""mx_source_id: vectors of ModelExpress and what is refused."""

from __future__ import annotations

import pytest

from mx_cli.base import canonical
from mx_cli.base.errors import UsageError
from mx_cli.model import modelexpress

BASE = [
    "mx_version=0.5.0",
    "mx_source_type=0",
    "model_name=deepseek-ai/DeepSeek-V3",
    "backend_framework=1",
    "tensor_parallel_size=8",
    "pipeline_parallel_size=1",
    "expert_parallel_size=0",
    "dtype=bfloat16",
]
COMPILE = [
    "backend_framework_version=0.10.0",
    "torch_version=2.8.0+cu128",
    "cuda_version=12.8",
    "triton_version=3.4.0",
    "gpu_arch=SM90",
    "compile_config_digest=abc123",
]


def source_id(*settings: str) -> str:
    return modelexpress.source_id(modelexpress.read_fields(settings))


def without(name: str) -> list[str]:
    return [setting for setting in BASE if not setting.startswith(name)]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (BASE, "5a5f555570065064"),
        ([*BASE, "revision=abc123def4567890"], "d0c184b2a9a34c82"),
        ([*BASE, "extra_parameters.Foo=a", "extra_parameters.foo=b"], "bf71fb9340cd940a"),
        ([*BASE, "extra_parameters.foo=b", "extra_parameters.Foo=a"], "bf71fb9340cd940a"),
        ([*without("mx_source_type"), "mx_source_type=3", *COMPILE], "f0035d384a5c251e"),
        ([*without("mx_source_type"), "mx_source_type=torch_compile", *COMPILE], "f0035d384a5c251e"),
        ([*without("model_name"), "model_name=org/modèle-模型"], "13f72a8a8e92e22a"),
    ],
)
def test_vectors(settings: list[str], expected: str) -> None:
    assert source_id(*settings) == expected


def test_canonical_text() -> None:
    fields = modelexpress.canonical_fields(modelexpress.read_fields(BASE))
    assert canonical.dumps(fields).decode() == (
        '{"backend_framework":1,"dtype":"bfloat16","expert_parallel_size":0,"extra_parameters":{},'
        '"model_name":"deepseek-ai/deepseek-v3","mx_source_type":0,"mx_version":"0.5.0","pipeline_parallel_size":1,'
        '"quantization":"","revision":"","tensor_parallel_size":8}'
    )


def test_frameworks_have_names() -> None:
    assert source_id(*without("backend_framework"), "backend_framework=vllm") == source_id(*BASE)


@pytest.mark.parametrize(
    "setting",
    ["tp=8", "dtype", "=x", "tensor_parallel_size=-1", "tensor_parallel_size=8.0", "mx_source_type=weight", "extra_parameters.=1",
     "tensor_parallel_size=4294967296", "tensor_parallel_size=٣"],
)  # fmt: skip
def test_refused(setting: str) -> None:
    with pytest.raises(UsageError):
        source_id(setting)


def test_a_field_twice_is_refused() -> None:
    with pytest.raises(UsageError, match="twice"):
        source_id("dtype=a", "dtype=b")
