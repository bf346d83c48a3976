"""Loading from disk beside safetensors, run:ai's streamer and fastsafetensors, and beside what O_DIRECT gives.

Each contender in a process of its own, in turn, over the same 1 GB in 4 shards with 1,000 tensors. Seconds are from the
call until every tensor was touched; imports come before. Peers are those of `.bench-venv`, where that exists:
`pip install runai-model-streamer runai-model-streamer-s3 fastsafetensors` beside this package.
"""

from __future__ import annotations

import dataclasses
import json
import os
import random
import statistics
import struct
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from scripts.benchmarks.rows import Row, clean_env

ROOT = Path(__file__).parents[2]
PEERS = ROOT / ".bench-venv" / "bin" / "python"
SIZE = 1_000_000_000
SHARDS, TENSORS = 4, 1000
LARGEST = 60 << 20
MEMORY = 256 << 20
SPARE = 64 << 20
LIMIT = 120.0


@dataclasses.dataclass(frozen=True)
class Contender:
    """Who reads how: what `load_reader` is told. `keep`: tensors are kept until the end, not dropped one by one."""

    who: str
    keep: bool
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    env: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @property
    def module(self) -> str:
        names = {"runai": "runai_model_streamer", "fastsafetensors": "fastsafetensors"}
        return names.get(self.who, "safetensors")


@dataclasses.dataclass(frozen=True)
class Sample:
    seconds: float
    first: float | None
    cpu: float
    rss: int
    bytes: int
    seen: int


DIRECT = Contender("direct", False)
RUNAI_LIMIT = {"RUNAI_STREAMER_MEMORY_LIMIT": str(MEMORY)}
KEPT = {
    "mx load": Contender("mx_load", True),
    "mx load, mapped": Contender("mx_load", True, {"mapped": True}),
    "safetensors mmap": Contender("safetensors_load", True),
    "safetensors pread": Contender("safetensors_load", True, {"backend": "pread"}),
    "run:ai": Contender("runai", True, {"owned": True}),
    "fastsafetensors": Contender("fastsafetensors", True),
}
STREAMED = {
    "mx stream": Contender("mx_stream", False, {"memory": MEMORY}),
    "mx stream, not owned": Contender("mx_stream", False, {"memory": MEMORY, "owned": False}),
    "safetensors safe_open": Contender("safetensors_open", False),
    "run:ai 256 MiB": Contender("runai", False, {"owned": True}, RUNAI_LIMIT),
    "run:ai 256 MiB, not owned": Contender("runai", False, {"owned": False}, RUNAI_LIMIT),
    "run:ai": Contender("runai", False, {"owned": True}),
}


class Race:
    """The contenders over one checkpoint."""

    def __init__(self, place: Path, model: Path) -> None:
        self.files = sorted(str(path) for path in model.glob("*.safetensors"))
        self.models, self.urls = [str(model)], self.files
        self.size = sum(os.path.getsize(file) for file in self.files)
        self.env = clean_env(place, MX_CACHE_DIR=str(place / "cache"))
        self.python = str(PEERS) if PEERS.exists() else sys.executable
        self.tiny = place / "tiny"
        if not self.tiny.exists():
            make(self.tiny, 1 << 20)

    def has(self, contender: Contender) -> bool:
        test = [self.python, "-c", f"import {contender.module}"]
        return subprocess.run(test, capture_output=True, cwd="/", env=self.env).returncode == 0

    def run(self, contender: Contender, *, cold: bool) -> Sample:
        given = {
            "cold": cold,
            "who": contender.who,
            "keep": contender.keep,
            "options": contender.options,
            "files": self.files,
            "urls": self.urls,
            "models": self.models,
            "warm_up": str(self.tiny),
        }
        command = [self.python, "-m", "scripts.benchmarks.load_reader", json.dumps(given)]
        done = subprocess.run(
            command,
            env={**self.env, "PYTHONPATH": str(ROOT), **contender.env},
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=LIMIT,
        )
        if done.returncode:
            print(done.stderr[-3000:], file=sys.stderr)
            raise subprocess.CalledProcessError(done.returncode, command)
        return Sample(**json.loads(done.stdout.strip().splitlines()[-1]))

    def rounds(self, contenders: Mapping[str, Contender], runs: int, *, cold: bool) -> dict[str, list[Sample]]:
        """Each once, then each again: slow minutes of the machine hit all alike. Who is not installed is left out, by name."""
        able = {name: one for name, one in contenders.items() if self.has(one)}
        for name in contenders.keys() - able.keys():
            print(f"  {name}: not installed, left out", file=sys.stderr)
        found: dict[str, list[Sample]] = {name: [] for name in able}
        for _ in range(runs):
            for name, one in able.items():
                sample = self.run(one, cold=cold)
                found[name].append(sample)
                print(
                    f"  {'cold' if cold else 'warm'} {name}: {sample.seconds:.3f} s, CPU {sample.cpu:.2f} s, "
                    f"{sample.rss / 1e6:.0f} MB, first {sample.first or 0:.3f} s",
                    file=sys.stderr,
                )
        sums = {sample.seen for samples in found.values() for sample in samples if sample.bytes}
        if len(sums) > 1:
            raise RuntimeError(f"the contenders read different bytes: {sums}")
        return found


def measure(place: Path, *, scale: float, runs: int) -> list[Row]:
    """All rows."""
    race = Race(place, make(place / "model", int(SIZE * scale)))
    rows: list[Row] = []
    cold = race.rounds({"O_DIRECT": DIRECT, **KEPT}, runs, cold=True)
    del cold["mx load, mapped"]
    rows += _rates("cold load", race, cold, "mx load", {"O_DIRECT": 0.80, "run:ai": 1.1})
    hot = race.rounds(KEPT, runs, cold=False)
    rows += _rates("warm load", race, hot, "mx load", {"safetensors pread": None, "run:ai": None})
    rows += _rates("warm load, mapped", race, hot, "mx load, mapped", {"safetensors mmap": 0.9})
    cold = race.rounds({"O_DIRECT": DIRECT, **STREAMED}, runs, cold=True)
    bars = {"O_DIRECT": 0.80, "run:ai 256 MiB": 1.1, "run:ai": None, "safetensors safe_open": None}
    rows += _rates("cold stream", race, cold, "mx stream", bars)
    bars = {"O_DIRECT": None, "run:ai 256 MiB, not owned": 1.1}
    rows += _rates("cold stream, not owned", race, cold, "mx stream, not owned", bars)
    hot = race.rounds(STREAMED, runs, cold=False)
    rows += _rates("warm stream", race, hot, "mx stream", {"run:ai 256 MiB": None, "safetensors safe_open": None})
    return rows + _bounds(cold, hot)


def _rates(
    label: str,
    race: Race,
    found: Mapping[str, Sequence[Sample]],
    mine: str,
    bars: Mapping[str, float | None],
) -> list[Row]:
    """Our rate beside each peer's, and what it cost."""
    rate = {name: race.size / 1e6 / median(samples, "seconds") for name, samples in found.items()}
    rows = [
        Row(label, rate[mine], "MB/s", name, rate[mine] / rate[name], bar) for name, bar in bars.items() if name in rate
    ]
    cpu = {name: median(samples, "cpu") for name, samples in found.items()}
    rows += [Row(f"{label}, CPU", cpu[mine], "s", name, cpu[mine] / cpu[name]) for name in bars if name in cpu]
    return rows


def _bounds(cold: Mapping[str, Sequence[Sample]], hot: Mapping[str, Sequence[Sample]]) -> list[Row]:
    """Memory and the first tensor."""
    samples = [*cold["mx stream"], *hot["mx stream"], *cold["mx stream, not owned"]]
    first = max(median(one["mx stream"], "first") for one in (cold, hot))
    most = (MEMORY + SPARE) / 1e6
    rows = [
        Row("stream, memory beside imports", max(one.rss for one in samples) / 1e6, "MB", None, None, most, True),
        Row("stream, first tensor", first, "s", None, None, 0.1, True),
    ]
    if "run:ai 256 MiB" in cold:
        theirs = cold["run:ai 256 MiB"]
        rows.append(Row("run:ai 256 MiB, memory beside imports", max(one.rss for one in theirs) / 1e6, "MB"))
        rows.append(Row("run:ai 256 MiB, first tensor", median(theirs, "first"), "s"))
    return rows


def median(samples: Sequence[Sample], name: str) -> float:
    return statistics.median(getattr(one, name) or 0.0 for one in samples)


# -- the checkpoint --------------------------------------------------------------------------------------------------


def make(directory: Path, size: int) -> Path:
    """SHARDS safetensors of `size` bytes in all with TENSORS tensors: few large ones, many tiny ones of odd sizes."""
    directory.mkdir(parents=True)
    chance = random.Random(7)
    noise = chance.randbytes(min(32 << 20, max(size, 4096)))
    each = size // SHARDS
    tiny = max(1, (TENSORS // SHARDS) - 17)
    names = {}
    for number in range(1, SHARDS + 1):
        sizes = [2 * (256 + 37 * (index % 60)) for index in range(tiny)] if size >= SIZE // 100 else []
        left = each - sum(sizes)
        large = min(LARGEST, left // 4)
        rest = (left - large) // 16 // 64 * 64
        layer = [(f"layer.{number}.expert", large // 64 * 64)]
        layer += [(f"layer.{number}.block.{index}.weight", rest) for index in range(16)]
        layer += [(f"layer.{number}.norm.{index}", length) for index, length in enumerate(sizes)]
        file = f"model-{number:05d}-of-{SHARDS:05d}.safetensors"
        _write(directory / file, layer, noise)
        names |= {name: file for name, _ in layer}
    index = {"metadata": {"total_size": size}, "weight_map": names}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return directory


def _write(path: Path, tensors: Sequence[tuple[str, int]], noise: bytes) -> None:
    table: dict[str, Any] = {}
    at = 0
    for name, length in tensors:
        table[name] = {"dtype": "BF16", "shape": [length // 2], "data_offsets": [at, at + length]}
        at += length
    header = json.dumps(table, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        while at:
            at -= file.write(noise[: min(at, len(noise))])
