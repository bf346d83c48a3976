"""The loader that stands in for SGLang's own. Imported only where SGLang is."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from typing import Any

from sglang.srt.model_loader.loader import DefaultModelLoader

from mx_cli.base.errors import UsageError
from mx_cli.engines.loading import Loading, Rank, Started, Tensors, of_first_rank
from mx_cli.engines.offering import Offering
from mx_cli.engines.options import Options, options_of
from mx_cli.flows.from_python import process_context

STAGE = "checkpoint"
logger = logging.getLogger("sglang.mx")


def options_of_sglang(given: Any) -> Options:
    """The options of the key `mx`. Raises UsageError for a stage whose tensors change without mx hearing of it."""
    options = options_of({"stage": STAGE, **given} if isinstance(given, dict) else given)
    if options.stage != STAGE:
        raise UsageError(
            f"stage {options.stage}: nothing tells mx when SGLang changes its tensors",
            hint=f"stage {STAGE} exchanges files",
        )
    return options


class MxLoader(DefaultModelLoader):  # type: ignore[misc]
    """See `mx_cli.engines.loading`. Of SGLang's own loader it keeps how a model is made, filled and post-processed."""

    def __init__(self, load_config: Any, options: Options) -> None:
        super().__init__(load_config)
        self._options = options
        self._fill: Callable[[Any], None] | None = None
        self._filled = False

    @staticmethod
    def stands_in_for(loader: Any) -> bool:
        return type(loader) is DefaultModelLoader

    def load_model(self, *, model_config: Any, device_config: Any) -> Any:
        """The model of one rank. Raises what the last route raised."""
        from sglang.srt.distributed import get_world_group

        group = get_world_group()
        rank = Rank(group.rank_in_group, group.world_size, first_here=group.local_rank == 0)
        options = self._options.of_rank(rank.number)
        context = process_context(options.settings)
        offering = Offering(options, context, str(rank), _say)
        started = Started(str(model_config.model_path), model_config.revision, {})
        load = _Load(self, group, model_config, device_config)
        module = Loading(load, options, context, rank, started, offering, _say).run()
        offering.begin()
        return module

    def build(self, model_config: Any, device_config: Any, fill: Callable[[Any], None]) -> Any:
        """As SGLang builds a model, with its weights from `fill`. Raises UsageError where SGLang goes around it."""
        self._fill, self._filled = fill, False
        try:
            module = super().load_model(model_config=model_config, device_config=device_config)
        finally:
            self._fill = None
        if not self._filled:
            raise UsageError("SGLang loaded this model without asking for its weights: mx cannot stand in for that")
        return module

    def load_weights_and_postprocess(self, model: Any, weights: Any, target_device: Any) -> None:
        if self._fill is None:
            super().load_weights_and_postprocess(model, weights, target_device)
            return
        self._fill(model)
        self._filled = True
        self.postprocess_weights(model, target_device)

    def load_tensors(self, model: Any, model_config: Any, device_config: Any, tensors: Tensors | None) -> None:
        """A checkpoint's tensors into the model's; None: as SGLang's own loader finds them."""
        import torch

        found = self._get_all_weights(model_config, model) if tensors is None else tensors
        self.load_weights_only(model, found, torch.device(device_config.device))


class _Load:
    """One load, as `loading.Engine` wants it."""

    def __init__(self, loader: MxLoader, group: Any, model_config: Any, device_config: Any) -> None:
        self._loader, self._group = loader, group
        self._model, self._device = model_config, device_config

    def agree(self, find: Callable[[], Any]) -> Any:
        return of_first_rank(self._group, find)

    def build(self, fill: Callable[[Any], None]) -> Any:
        gc.collect()
        return self._loader.build(self._model, self._device, fill)

    def load(self, module: Any, tensors: Tensors | None) -> None:
        self._loader.load_tensors(module, self._model, self._device, tensors)

    def fill_anyhow(self, module: Any) -> None:
        raise AssertionError("no stage needs it")


def _say(line: str) -> None:
    logger.info("mx: %s", line)
