from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import nn

from sglang.srt.configs.device_config import DeviceConfig
from sglang.srt.configs.load_config import LoadConfig, LoadFormat
from sglang.srt.configs.model_config import ModelConfig


class ToyModel(nn.Module):
    """A rank's parameters are not a checkpoint's: two of its tensors are one here."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up = nn.Parameter(torch.zeros(4, 2))
        self.processed = False

    def load_weights(self, weights) -> None:
        for name, tensor in weights:
            start = {"gate": 0, "up": 2}[name]
            self.gate_up.data[start : start + 2].copy_(tensor)


class BaseModelLoader(ABC):
    def __init__(self, load_config: LoadConfig):
        self.load_config = load_config

    @abstractmethod
    def download_model(self, model_config: ModelConfig) -> None: ...

    @abstractmethod
    def load_model(self, *, model_config: ModelConfig, device_config: DeviceConfig) -> nn.Module: ...


class DefaultModelLoader(BaseModelLoader):
    def __init__(self, load_config: LoadConfig):
        super().__init__(load_config)
        assert not load_config.model_loader_extra_config, "unexpected keys"

    def download_model(self, model_config: ModelConfig) -> None:
        return

    def _get_all_weights(self, model_config: ModelConfig, model: nn.Module):
        for file in sorted(Path(model_config.model_path).glob("*.safetensors")):
            yield from load_file(file).items()

    def load_model(self, *, model_config: ModelConfig, device_config: DeviceConfig) -> nn.Module:
        device = torch.device(device_config.device)
        with device:
            model = ToyModel()
        self.load_weights_and_postprocess(model, self._get_all_weights(model_config, model), device)
        return model.eval()

    @staticmethod
    def load_weights_and_postprocess(model, weights, target_device):
        DefaultModelLoader.load_weights_only(model, weights, target_device)
        DefaultModelLoader.postprocess_weights(model, target_device)

    @staticmethod
    def load_weights_only(model, weights, target_device):
        model.load_weights(weights)

    @staticmethod
    def postprocess_weights(model, target_device):
        model.processed = True


class DummyModelLoader(BaseModelLoader):
    def download_model(self, model_config: ModelConfig) -> None:
        return

    def load_model(self, *, model_config: ModelConfig, device_config: DeviceConfig) -> nn.Module:
        return ToyModel()


class GGUFModelLoader(DummyModelLoader):
    pass


def get_model_loader(load_config: LoadConfig, model_config: ModelConfig | None = None) -> BaseModelLoader:
    if load_config.load_format == LoadFormat.DUMMY:
        return DummyModelLoader(load_config)
    if load_config.load_format == LoadFormat.GGUF:
        return GGUFModelLoader(load_config)
    return DefaultModelLoader(load_config)
