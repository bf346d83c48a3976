"""The loader of vLLM's load format `mx`. Imported only where vLLM is."""

from __future__ import annotations

import dataclasses
import gc
import logging
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

from mx_cli.base.errors import UsageError

if TYPE_CHECKING:
    from mx_cli.engines.loading import Rank, Tensors
    from mx_cli.engines.options import Options
    from mx_cli.engines.vllm_layout import Build, Coordinates

logger = init_logger("vllm.mx")


class MxLoader(DefaultModelLoader):  # type: ignore[misc]
    """See `mx_cli.engines.loading`. Of vLLM's own loader it keeps how tensors get into a model, and all checks."""

    def __init__(self, load_config: Any) -> None:
        from mx_cli.engines.options import options_of

        self._options = options_of(load_config.model_loader_extra_config)
        self._plain = dataclasses.replace(load_config, load_format="auto", model_loader_extra_config={})
        super().__init__(self._plain)
        self._fill: Callable[[Any], None] | None = None
        self._tensors: Tensors | None = None

    def load_model(self, vllm_config: Any, model_config: Any, prefix: str = "") -> Any:
        """The model of one rank. Raises what the last route raised."""
        if model_config is not vllm_config.model_config or prefix:
            logger.info("mx: %s is a draft model: vLLM's own loader", model_config.model)
            return DefaultModelLoader(self._plain).load_model(vllm_config, model_config, prefix)
        return _Load(self, self._options, vllm_config, model_config).run()

    def build(self, vllm_config: Any, model_config: Any, fill: Callable[[Any], None]) -> Any:
        """As vLLM builds a model, with its weights from `fill`."""
        self._fill = fill
        try:
            return super().load_model(vllm_config, model_config)
        finally:
            self._fill = None

    def load_weights(self, model: Any, model_config: Any) -> None:
        if self._fill is None:
            super().load_weights(model, model_config)
            return
        if list(getattr(model, "secondary_weights", ())):
            raise UsageError(
                f"{type(model).__name__} reads several checkpoints, and load format mx has one",
                hint="start this model with vLLM's own load format",
            )
        self._fill(model)

    def load_tensors(self, model: Any, model_config: Any, tensors: Tensors | None) -> None:
        """A checkpoint's tensors into the model's; None: as vLLM's own loader finds them."""
        self._tensors = tensors
        try:
            super().load_weights(model, model_config)
        finally:
            self._tensors = None

    def get_all_weights(self, model_config: Any, model: Any) -> Iterator[tuple[str, Any]]:
        if self._tensors is None:
            yield from super().get_all_weights(model_config, model)
        else:
            yield from self._tensors


class _Load:
    """One load, as `loading.Engine` wants it."""

    def __init__(self, loader: MxLoader, options: Options, vllm_config: Any, model_config: Any) -> None:
        self._loader, self._options = loader, options
        self._config, self._model = vllm_config, model_config
        compilation = vllm_config.compilation_config
        # Layers enter themselves here by name, and refuse a second one of that name.
        self._by_name: dict[str, Any] = getattr(compilation, "static_forward_context", {})
        self._in_order: list[str] = getattr(compilation, "static_all_moe_layers", [])
        self._before = dict(self._by_name), list(self._in_order)

    def run(self) -> Any:
        from vllm.utils.import_utils import resolve_obj_by_qualname

        from mx_cli.engines import vllm_layout
        from mx_cli.engines.loading import Loading, Started
        from mx_cli.engines.offering import Offering
        from mx_cli.engines.vllm_hooks import attach
        from mx_cli.flows.from_python import process_context

        _show_log()
        at = _coordinates(self._config.parallel_config)
        rank = _rank(self._config.parallel_config, at)
        options = self._options.of_rank(rank.number)
        context = process_context(options.settings)
        offering = Offering(options, context, str(rank), _say)
        started = Started(
            str(self._model.model),
            self._model.revision,
            vllm_layout.layout(self._config, self._model, options.stage, _build(), at),
            vllm_layout.refusal(self._config, self._model, options.stage),
        )
        module = Loading(self, options, context, rank, started, offering, _say).run()
        worker = resolve_obj_by_qualname(self._config.parallel_config.worker_cls)
        if options.serve and not attach(worker, self._config, offering):
            offering.begin()
        return module

    def agree(self, find: Callable[[], Any]) -> Any:
        from vllm.distributed.parallel_state import get_world_group

        from mx_cli.engines.loading import of_first_rank

        return of_first_rank(get_world_group(), find)

    def build(self, fill: Callable[[Any], None]) -> Any:
        import torch

        by_name, in_order = self._before
        self._by_name.clear()
        self._by_name.update(by_name)
        self._in_order[:] = in_order
        gc.collect()
        torch.accelerator.empty_cache()
        return self._loader.build(self._config, self._model, fill)

    def load(self, module: Any, tensors: Tensors | None) -> None:
        self._loader.load_tensors(module, self._model, tensors)

    def fill_anyhow(self, module: Any) -> None:
        DummyModelLoader(self._loader._plain).load_weights(module, self._model)


def _build() -> Build:
    import torch
    from vllm import __version__, envs

    from mx_cli.engines.vllm_layout import Build

    arch = "cpu"
    if torch.cuda.is_available():
        arch = "sm{}{}".format(*torch.cuda.get_device_capability())
    factors = getattr(envs, "compile_factors", None)
    return Build(__version__, torch.__version__, arch, factors() if factors else None)


def _coordinates(parallel: Any) -> Coordinates:
    from vllm.distributed import parallel_state

    from mx_cli.engines.vllm_layout import Coordinates

    def place(group: str, size: int) -> int:
        return int(getattr(parallel_state, group)().rank_in_group) if size > 1 else 0

    return Coordinates(
        tp=place("get_tp_group", parallel.tensor_parallel_size),
        pp=place("get_pp_group", parallel.pipeline_parallel_size),
        pcp=place("get_pcp_group", getattr(parallel, "prefill_context_parallel_size", 1)),
        dp=int(parallel.data_parallel_index),
    )


def _rank(parallel: Any, at: Coordinates) -> Rank:
    from mx_cli.engines.loading import Rank

    each = parallel.world_size
    number = at.dp * each + parallel.rank
    return Rank(number, each * parallel.data_parallel_size, parallel.rank % parallel.local_world_size == 0)


def _say(line: str) -> None:
    logger.info("mx: %s", line)


def _show_log() -> None:
    """What mx warns of belongs into vLLM's log; its notices only where somebody debugs."""
    log, theirs = logging.getLogger("mx"), logging.getLogger("vllm")
    if not log.handlers:
        log.handlers = list(theirs.handlers)
        log.propagate = False
        log.setLevel(logging.INFO if theirs.isEnabledFor(logging.DEBUG) else logging.WARNING)
