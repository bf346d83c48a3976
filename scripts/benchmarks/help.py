"""`mx --help`: CPU seconds, start of the interpreter included."""

from __future__ import annotations

from pathlib import Path

from scripts.benchmarks.rows import Row, clean_env, in_turn, median, mx, run


def measure(place: Path, *, scale: float, runs: int) -> list[Row]:
    env = clean_env(place)
    found = in_turn(max(5, runs), {"mx": lambda: run(mx("--help"), env)})["mx"]
    cpu = median(found, lambda one: one.cpu * 1000)
    return [
        Row("mx --help CPU", cpu, "ms", None, None, 150.0, True),
        Row("mx --help wall", median(found, lambda one: one.wall * 1000), "ms"),
    ]
