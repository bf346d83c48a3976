"""Tensors out of an object store, beside run:ai's streamer: one loopback S3, with and without 30 ms before each answer.

Seconds are from the call until every tensor was touched and dropped; CPU is the reader's own.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

from scripts.benchmarks.load import MEMORY, SPARE, Contender, Race, Sample, make, median
from scripts.benchmarks.plain_s3 import plain_s3
from scripts.benchmarks.rows import Row

SIZE = 1_000_000_000
LATENCY = 0.030
TUNED = {
    "RUNAI_STREAMER_MEMORY_LIMIT": str(MEMORY),
    "RUNAI_STREAMER_CONCURRENCY": "1",
    "RUNAI_STREAMER_S3_TARGET_GBPS": "1",
    "RUNAI_STREAMER_S3_MAX_INFLIGHT_MIB": "32",
}
"""What its own documentation offers to use less; the best found on this machine."""
RUNAI = {
    "RUNAI_STREAMER_S3_USE_VIRTUAL_ADDRESSING": "0",
    "AWS_EC2_METADATA_DISABLED": "true",
}
CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "reader",
    "AWS_SECRET_ACCESS_KEY": "secret",
    "AWS_REGION": "us-east-1",
    "AWS_DEFAULT_REGION": "us-east-1",
}


def measure(place: Path, *, scale: float, runs: int) -> list[Row]:
    """All rows."""
    bucket = place / "s3" / "models"
    race = Race(place, make(bucket / "model", int(SIZE * scale)))
    rows: list[Row] = []
    for label, latency in (("S3", 0.0), ("S3, 30 ms", LATENCY)):
        with plain_s3(place / "s3", latency) as endpoint:
            found = _race(race, endpoint).rounds(_contenders(endpoint), runs, cold=False)
        rows += _rows(label, race.size, found)
    return rows


def _race(race: Race, endpoint: str) -> Race:
    race.env |= {**CREDENTIALS, "AWS_ENDPOINT_URL": endpoint, "MX_ENDPOINT_URL": endpoint}
    race.models = ["s3://models/model/"]
    race.urls = [f"s3://models/model/{Path(file).name}" for file in race.files]
    return race


def _contenders(endpoint: str) -> dict[str, Contender]:
    mine = Contender("mx_stream", False, {"memory": MEMORY})
    theirs = Contender("runai", False, {"owned": True}, RUNAI)
    return {
        "mx stream": mine,
        "run:ai": theirs,
        "run:ai, tuned": dataclasses.replace(theirs, env={**RUNAI, **TUNED}),
    }


def _rows(label: str, size: int, found: dict[str, list[Sample]]) -> list[Row]:
    rate = {name: size / 1e6 / median(samples, "seconds") for name, samples in found.items()}
    cpu = {name: median(samples, "cpu") / size * 1e9 for name, samples in found.items()}
    most = (MEMORY + SPARE) / 1e6
    rows = [Row(label, rate["mx stream"], "MB/s")]
    for name, fast, frugal in (("run:ai", 2.0, 0.5), ("run:ai, tuned", None, None)):
        if name in found:
            rows.append(Row(label, rate["mx stream"], "MB/s", name, rate["mx stream"] / rate[name], fast))
            rows.append(
                Row(f"{label}, CPU", cpu["mx stream"], "s/GB", name, cpu["mx stream"] / cpu[name], frugal, True)
            )
    rows.append(Row(f"{label}, first tensor", median(found["mx stream"], "first"), "s"))
    for name, samples in found.items():
        memory = max(one.rss for one in samples) / 1e6
        bar = most if name == "mx stream" else None
        rows.append(Row(f"{label}, memory of {name}", memory, "MB", None, None, bar, True))
    return rows
