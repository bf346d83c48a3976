"""`mx --help`, and `mx hash` of a config: CPU seconds, start of the interpreter included."""

from __future__ import annotations

import json
from pathlib import Path

from scripts.benchmarks.rows import Row, clean_env, in_turn, median, mx, run

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 8192,
    "num_hidden_layers": 80,
    "vocab_size": 128256,
    "torch_dtype": "bfloat16",
}


def measure(place: Path, *, scale: float, runs: int) -> list[Row]:
    env = clean_env(place)
    config = place / "config.json"
    config.write_text(json.dumps(CONFIG))
    commands = {
        "mx --help": lambda: run(mx("--help"), env),
        "mx hash config.json": lambda: run(mx("hash", config), env),
    }
    bars = {"mx --help": 150.0, "mx hash config.json": 300.0}
    rows = []
    for name, found in in_turn(max(5, runs), commands).items():
        rows.append(Row(f"{name} CPU", median(found, lambda one: one.cpu * 1000), "ms", None, None, bars[name], True))
        rows.append(Row(f"{name} wall", median(found, lambda one: one.wall * 1000), "ms"))
    return rows
