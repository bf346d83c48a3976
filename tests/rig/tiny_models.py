"""Tiny models of transformers, made on the spot, and a pipeline of plain modules whose parts share names.

torch and transformers are imported inside the functions.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

VOCAB = 96
BASE = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 64,
    "bos_token_id": 0,
    "eos_token_id": 1,
}


def config(kind: str) -> Any:
    """The config of a kind of model, with the dtype that it is saved in."""
    import transformers as t

    dtype = {"dtype": "bfloat16"}
    if kind == "untied":
        return t.LlamaConfig(**BASE, tie_word_embeddings=False, **dtype)
    if kind == "tied":
        return t.LlamaConfig(**BASE, tie_word_embeddings=True, **dtype)
    if kind == "grouped":
        return t.Qwen2Config(**{**BASE, "num_key_value_heads": 1}, **dtype)
    if kind == "float32":
        return t.LlamaConfig(**BASE, dtype="float32")
    if kind == "experts":
        # Its checkpoint has each expert alone, the model all of them in one tensor.
        return t.MixtralConfig(**BASE, num_local_experts=4, **dtype)
    if kind == "precise":
        # In float16 a part of its weights stays in float32, and three names are tied.
        sizes = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
        return t.T5Config(
            vocab_size=VOCAB, **sizes, decoder_start_token_id=0, feed_forward_proj="gated-gelu", dtype="float16"
        )
    if kind == "buffers":
        # Running means and counters are buffers that a checkpoint has.
        return t.ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic", **dtype)
    raise KeyError(kind)


KINDS = ("untied", "tied", "grouped", "float32", "experts", "precise", "buffers")
_CLASSES = {
    "untied": "LlamaForCausalLM",
    "tied": "LlamaForCausalLM",
    "grouped": "Qwen2ForCausalLM",
    "float32": "LlamaForCausalLM",
    "experts": "MixtralForCausalLM",
    "precise": "T5ForConditionalGeneration",
    "buffers": "ResNetForImageClassification",
}


def make(directory: Path, kind: str, *, seed: int = 1) -> Path:
    """A checkpoint of a kind of model, as save_pretrained writes it."""
    import torch
    import transformers

    torch.manual_seed(seed)
    wanted = config(kind)
    model = getattr(transformers, _CLASSES[kind])(wanted)
    with torch.no_grad():
        for buffer in model.buffers():
            if buffer.is_floating_point() and kind == "buffers":
                buffer.uniform_(0.5, 1.5)
    model.to(wanted.dtype).save_pretrained(directory)
    return directory


def pretrained(directory: str | Path) -> Any:
    """As transformers itself loads it."""
    import transformers

    names = json.loads((Path(directory) / "config.json").read_bytes())["architectures"]
    return getattr(transformers, names[0]).from_pretrained(directory)


def logits(model: Any) -> Any:
    """What the model computes of one input."""
    import torch

    with torch.no_grad():
        if model.config.model_type == "resnet":
            pixels = torch.arange(3 * 32 * 32, dtype=torch.float32).reshape(1, 3, 32, 32) / 3072
            return model(pixel_values=pixels.to(model.dtype)).logits
        words = torch.arange(3, 19)[None]
        more = {"decoder_input_ids": words[:, :5]} if model.config.is_encoder_decoder else {}
        return model(input_ids=words, **more).logits


# --- a pipeline ------------------------------------------------------------------------------------------------------


def part(size: int, value: float) -> Any:
    """A module; every one of them has the same names."""
    import torch

    made = torch.nn.Sequential(torch.nn.Linear(size, size), torch.nn.BatchNorm1d(size))
    with torch.no_grad():
        for tensor in (*made.parameters(), *made.buffers()):
            tensor.fill_(value)
    return made.eval()


PARTS = {"transformer": (8, 1.5), "vae": (4, 2.5)}


def pipeline() -> dict[str, Any]:
    """The parts by name, filled."""
    return {name: part(*sizes) for name, sizes in PARTS.items()}


def save_pipeline(directory: Path) -> Path:
    """The layout of diffusers: a folder for each part, and model_index.json."""
    from safetensors.torch import save_file

    for name, module in pipeline().items():
        (directory / name).mkdir(parents=True)
        (directory / name / "config.json").write_text(json.dumps({"size": PARTS[name][0]}))
        save_file(module.state_dict(), directory / name / "diffusion_pytorch_model.safetensors")
    index = {"_class_name": "Pipeline", **{name: ["diffusers", name.title()] for name in PARTS}}
    (directory / "model_index.json").write_text(json.dumps(index))
    return directory
