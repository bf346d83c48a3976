from __future__ import annotations


class ModelConfig:
    def __init__(self, model_path: str, revision: str | None = None, is_draft_model: bool = False) -> None:
        self.model_path = model_path
        self.revision = revision
        self.is_draft_model = is_draft_model
