from __future__ import annotations

import enum
import json
from dataclasses import dataclass, field


class LoadFormat(enum.StrEnum):
    AUTO = "auto"
    SAFETENSORS = "safetensors"
    DUMMY = "dummy"
    GGUF = "gguf"


@dataclass
class LoadConfig:
    load_format: str | LoadFormat = LoadFormat.AUTO
    model_loader_extra_config: str | dict | None = field(default_factory=dict)

    def __post_init__(self):
        if isinstance(self.model_loader_extra_config, str):
            self.model_loader_extra_config = json.loads(self.model_loader_extra_config)
        self.load_format = LoadFormat(self.load_format)
