"""A small model with grouped-query attention, and its shares by torch's own slicing: what a rank must get."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.rig.checkpoints import make_safetensors, noise, tensor_size

URI = "s3://weights/model"
REVISION = "first"
VOCAB = 1000
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 10240,
    "num_hidden_layers": 1,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": VOCAB,
}
LAYER = "model.layers.0"
SHAPES: dict[str, tuple[int, ...]] = {
    "model.embed_tokens.weight": (1000, 256),
    f"{LAYER}.input_layernorm.weight": (256,),
    f"{LAYER}.self_attn.q_proj.weight": (512, 256),
    f"{LAYER}.self_attn.k_proj.weight": (128, 256),
    f"{LAYER}.self_attn.v_proj.weight": (128, 256),
    f"{LAYER}.self_attn.v_proj.bias": (128,),
    f"{LAYER}.self_attn.o_proj.weight": (256, 512),
    f"{LAYER}.mlp.gate_proj.weight": (10240, 256),
    f"{LAYER}.mlp.up_proj.weight": (10240, 256),
    f"{LAYER}.mlp.down_proj.weight": (256, 10240),
    "model.norm.weight": (256,),
    "lm_head.weight": (1000, 256),
}
ROWS = ("o_proj.weight", "down_proj.weight")
KV = ("k_proj", "v_proj")
WHOLE = ("norm.weight", "layernorm.weight")
PADDED = 1024


def tensors() -> dict[str, Any]:
    """All of them, always the same."""
    import torch

    return {
        name: torch.frombuffer(bytearray(noise(name, tensor_size("BF16", shape))), dtype=torch.bfloat16).reshape(shape)
        for name, shape in SHAPES.items()
    }


def write(directory: Path, shards: int = 2) -> dict[str, Any]:
    """The checkpoint, and its tensors."""
    names = list(SHAPES)
    step = -(-len(names) // shards)
    homes = {}
    for shard in range(shards):
        mine = names[shard * step : (shard + 1) * step]
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        content = {name: noise(name, tensor_size("BF16", SHAPES[name])) for name in mine}
        make_safetensors(directory / file, {name: ("BF16", SHAPES[name], content[name]) for name in mine})
        homes |= dict.fromkeys(mine, file)
    (directory / "config.json").write_text(json.dumps(CONFIG))
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": homes}))
    return tensors()


def share(name: str, tensor: Any, rank: int, ranks: int) -> Any:
    """The part of one rank, as an engine slices it."""
    if ranks == 1 or name.endswith(WHOLE):
        return tensor
    if name.endswith(("embed_tokens.weight", "lm_head.weight")):
        each = PADDED // ranks
        return tensor[rank * each : (rank + 1) * each]
    if any(part in name for part in KV):
        heads = tensor.chunk(CONFIG["num_key_value_heads"])  # type: ignore[arg-type]
        if ranks >= len(heads):
            return heads[rank * len(heads) // ranks]
    return tensor.chunk(ranks, 1 if name.endswith(ROWS) else 0)[rank]


def shares(tensors: dict[str, Any], rank: int, ranks: int) -> dict[str, Any]:
    """Of every tensor; each in memory of its own."""
    return {name: share(name, tensor, rank, ranks).clone() for name, tensor in tensors.items()}


def size(tensors: dict[str, Any]) -> int:
    """Bytes."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def differing(found: dict[str, Any], expected: dict[str, Any]) -> list[str]:
    """Names that are missing, too many, or not byte for byte the same."""
    import torch

    names = found.keys() | expected.keys()
    return sorted(
        name
        for name in names
        if name not in found
        or name not in expected
        or found[name].shape != expected[name].shape
        or not torch.equal(found[name].contiguous().view(torch.uint8), expected[name].view(torch.uint8))
    )
