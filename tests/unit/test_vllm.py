"""The parts of the vLLM adapter that need no vLLM: the layout of a rank, and what a worker tells its offering."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from mx_cli.engines import vllm, vllm_hooks, vllm_layout
from mx_cli.engines.vllm_layout import Build, Coordinates
from mx_cli.model import identity
from mx_cli.model import layout as model_layout

BUILD = Build("0.32.0", "2.13.0", "sm90", {"VLLM_USE_DEEP_GEMM": True})


def model(**other: Any) -> SimpleNamespace:
    hf_config = SimpleNamespace(architectures=["LlamaForCausalLM"], quantization_config=other.pop("quantized", None))
    known = {"dtype": "torch.bfloat16", "quantization": None, "hf_config": hf_config, "hf_text_config": hf_config}
    return SimpleNamespace(**{**known, "model": "/models/a", "max_model_len": 4096, **other})


def config(**parallel: Any) -> SimpleNamespace:
    sizes = {
        "tensor_parallel_size": 2,
        "pipeline_parallel_size": 1,
        "prefill_context_parallel_size": 1,
        "decode_context_parallel_size": 1,
        "data_parallel_size": 1,
        "enable_expert_parallel": False,
        "enable_eplb": False,
        "expert_placement_strategy": "linear",
        "master_port": 29501,
        **parallel,
    }
    return SimpleNamespace(
        parallel_config=SimpleNamespace(**sizes),
        cache_config=SimpleNamespace(cache_dtype="auto", kv_cache_dtype_skip_layers=[]),
        kernel_config=None,
        attention_config=SimpleNamespace(backend=None),
    )


def id_of(config: Any, model: Any, stage: str = "loaded", build: Build = BUILD, at: Coordinates | None = None) -> str:
    factors = vllm_layout.layout(config, model, stage, build, at or Coordinates())
    return identity.of_origin("s3://b/m", "r1", *model_layout.layout(stage, factors)).id


def test_what_does_not_shape_tensors_does_not_count() -> None:
    assert id_of(config(), model()) == id_of(config(master_port=1), model(model="/models/b", max_model_len=128))


@pytest.mark.parametrize(
    "other",
    [
        {"config": config(tensor_parallel_size=4)},
        {"config": config(pipeline_parallel_size=2)},
        {"config": config(prefill_context_parallel_size=2)},
        {"config": config(decode_context_parallel_size=2)},
        {"config": config(enable_expert_parallel=True)},
        {"config": config(enable_expert_parallel=True, data_parallel_size=2)},
        {"config": config(enable_expert_parallel=True, expert_placement_strategy="round_robin")},
        {"model": model(dtype="torch.float16")},
        {"model": model(quantization="fp8")},
        {"model": model(quantized={"quant_method": "fp8", "ignore": ["a"]})},
        {"build": Build("0.33.0")},
        {"at": Coordinates(tp=1)},
        {"at": Coordinates(pp=1)},
    ],
)
def test_what_shapes_tensors_counts(other: dict[str, Any]) -> None:
    assert id_of(**{"config": config(), "model": model(), **other}) != id_of(config(), model())


def test_replicas_differ_only_where_they_share_experts() -> None:
    replicas, sharing = config(data_parallel_size=2), config(data_parallel_size=2, enable_expert_parallel=True)
    assert id_of(replicas, model(), at=Coordinates(dp=1)) == id_of(replicas, model()) == id_of(config(), model())
    assert id_of(sharing, model(), at=Coordinates(dp=1)) != id_of(sharing, model())


def test_ranks_are_numbered_through_all_directions() -> None:
    wide = config(pipeline_parallel_size=2, prefill_context_parallel_size=2)
    at = [Coordinates(tp=tp, pp=pp, pcp=pcp) for pp in range(2) for pcp in range(2) for tp in range(2)]
    ranks = [vllm_layout.layout(wide, model(), "loaded", BUILD, one)["rank"] for one in at]
    assert ranks == list(range(8))


@pytest.mark.parametrize(
    "change",
    [
        lambda config, model: setattr(config.cache_config, "cache_dtype", "fp8"),
        lambda config, model: setattr(config.attention_config, "backend", "FLASH_ATTN"),
        lambda config, model: setattr(config, "kernel_config", SimpleNamespace(moe_backend="triton")),
        lambda config, model: setattr(model.hf_config, "rope_theta", 1e6),
        lambda config, model: setattr(model, "max_model_len", 1),
    ],
)
def test_after_post_processing_more_counts(change: Any) -> None:
    changed, its_model = config(), model()
    change(changed, its_model)
    assert id_of(changed, its_model) == id_of(config(), model())
    assert id_of(changed, its_model, "processed") != id_of(config(), model(), "processed")


@pytest.mark.parametrize(
    "other", [Build("0.32.0", "2.13.1", "sm90", BUILD.variables), Build("0.32.0", "2.13.0", "sm80")]
)
def test_after_post_processing_what_runs_counts(other: Build) -> None:
    assert id_of(config(), model(), build=other) == id_of(config(), model())
    assert id_of(config(), model(), "processed", other) != id_of(config(), model(), "processed")


def test_what_moves_or_hides_weights_is_refused() -> None:
    assert vllm_layout.refusal(config(), model(), "loaded") == ""
    assert "EPLB" in vllm_layout.refusal(config(enable_eplb=True), model(), "loaded")
    assert vllm_layout.refusal(config(), model(quantization="fp8"), "loaded") == ""
    assert "quantised" in vllm_layout.refusal(config(), model(quantization="fp8"), "processed")


# --- what a worker tells ---------------------------------------------------------------------------------------------


class Told:
    """An offering that only remembers what it was told."""

    def __init__(self, log: list[str]) -> None:
        self._log = log

    def begin(self) -> None:
        self._log.append("begin")

    def withdraw(self, why: str) -> None:
        self._log.append(f"withdraw: {why}")

    def drop(self, why: str) -> None:
        self._log.append(f"drop: {why}")

    def close(self) -> None:
        self._log.append("close")


def worker_class(log: list[str]) -> Any:
    class Worker:
        def __init__(self, vllm_config: object) -> None:
            self.vllm_config = vllm_config

        def compile_or_warm_up_model(self) -> float:
            log.append("warmed up")
            return 1.5

        def sleep(self, level: int = 1) -> None:
            log.append(f"asleep {level}")

        def wake_up(self, tags: list[str] | None = None) -> None:
            log.append("awake")

        def update_weights(self, info: object) -> None:
            log.append("updated")

        def shutdown(self) -> None:
            log.append("down")

    return Worker


def test_weights_are_withdrawn_before_they_change_and_offered_after_the_engine_is_ready() -> None:
    log: list[str] = []
    worker, engine = worker_class(log), object()
    assert vllm_hooks.attach(worker, engine, Told(log))  # type: ignore[arg-type]
    one = worker(engine)
    assert one.compile_or_warm_up_model() == 1.5
    one.sleep(level=2)
    one.wake_up(tags=["weights"])
    one.update_weights({})
    one.shutdown()
    assert log == [
        "warmed up",
        "begin",
        "withdraw: the engine sleeps",
        "asleep 2",
        "awake",
        "begin",
        "drop: the engine gets other weights",
        "updated",
        "close",
        "down",
    ]


def test_a_worker_of_another_engine_in_the_same_process_tells_nothing() -> None:
    log: list[str] = []
    worker, engine, other = worker_class(log), object(), object()
    vllm_hooks.attach(worker, engine, Told(log))  # type: ignore[arg-type]
    vllm_hooks.attach(worker, engine, Told(log))  # type: ignore[arg-type]
    worker(other).sleep()
    assert log == ["asleep 1"]
    worker(engine).sleep()
    assert log == ["asleep 1", "withdraw: the engine sleeps", "asleep 1"]


def test_a_worker_that_does_not_say_when_it_is_ready_is_found_out() -> None:
    class Bare:
        pass

    assert not vllm_hooks.attach(Bare, object(), Told([]))  # type: ignore[arg-type]


def test_without_the_parts_it_needs_the_plugin_only_says_so(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        vllm.register()
    assert "load format mx is not available" in caplog.text
