"""Small checkpoints with deterministic bytes; the standard library only."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

BITS = {"F64": 64, "I64": 64, "F32": 32, "I32": 32, "F16": 16, "BF16": 16, "I16": 16, "U8": 8, "I8": 8, "BOOL": 8}
BITS |= {"F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "U16": 16, "U32": 32, "U64": 64, "C64": 64, "F4": 4}
MIB = 1 << 20

Tensor = tuple[str, tuple[int, ...], bytes | None]


def noise(seed: str, size: int) -> bytes:
    """Bytes that depend on the seed alone and don't compress."""
    block = b"".join(hashlib.sha256(f"{seed}|{i}".encode()).digest() for i in range(min(2048, size // 32 + 1)))
    return (block * (size // len(block) + 1))[:size]


def tensor_size(dtype: str, shape: tuple[int, ...]) -> int:
    return math.prod(shape) * BITS[dtype] // 8


def safetensors_bytes(
    tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None, seed: str = "seed"
) -> bytes:
    """A safetensors file of {name: (dtype, shape, bytes or None for noise)}, in that order."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    data, offset = [], 0
    for name, (dtype, shape, given) in tensors.items():
        content = noise(f"{seed}/{name}", tensor_size(dtype, shape)) if given is None else given
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, offset + len(content)]}
        offset += len(content)
        data.append(content)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + b"".join(data)


def make_safetensors(
    path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None, seed: str = "seed"
) -> Path:
    """Writes safetensors_bytes() there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(safetensors_bytes(tensors, metadata, seed))
    return path


CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "rms_norm_eps": 1e-05,
    "torch_dtype": "bfloat16",
}
TOKENIZER = {"version": "1.0", "model": {"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": []}}


def checkpoint_files(shards: int = 2, size: int = 2 * MIB, seed: str = "seed") -> dict[str, bytes]:
    """The files of a checkpoint whose weights are about `size` bytes in all: {relative path: bytes}."""
    files: dict[str, bytes] = {
        "config.json": json.dumps(CONFIG, indent=2).encode(),
        "generation_config.json": json.dumps({"eos_token_id": 2}).encode(),
        "tokenizer.json": json.dumps(TOKENIZER).encode(),
        "tokenizer_config.json": json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}).encode(),
    }
    rows = max(1, size // shards // 2 // 2 // 256)
    weight_map: dict[str, str] = {}
    total = 0
    for shard in range(shards):
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors" if shards > 1 else "model.safetensors"
        names = [f"model.layers.{shard}.{part}_proj.weight" for part in ("q", "o")]
        tensors: dict[str, Tensor] = dict.fromkeys(names, ("BF16", (rows, 256), None))
        files[file] = safetensors_bytes(tensors, {"format": "pt"}, seed)
        weight_map |= dict.fromkeys(names, file)
        total += len(names) * tensor_size("BF16", (rows, 256))
    if shards > 1:
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        files["model.safetensors.index.json"] = json.dumps(index, indent=2).encode()
    return files


def make_checkpoint(directory: Path, shards: int = 2, size: int = 2 * MIB, seed: str = "seed") -> Path:
    """Writes checkpoint_files() under the directory."""
    for name, data in checkpoint_files(shards, size, seed).items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return directory


def tree(directory: Path) -> dict[str, str]:
    """{relative path: SHA-256} of every file, to compare two directories."""
    return {
        str(path.relative_to(directory)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }
