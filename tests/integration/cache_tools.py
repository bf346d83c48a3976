"""What the tests of `mx cache` and `mx status` share: looking into a cache, and making it older."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

from tests.support import Mx, checkpoint_files, noise, safetensors_bytes

DAY = 86400


def model_dir(cache: Path) -> Path:
    """The directory of the only model."""
    (found,) = (cache / "models").iterdir()
    return found


def weight_sets() -> tuple[dict[str, bytes], dict[str, bytes]]:
    """Two disjoint parts of a checkpoint: the files of the default selection, and weights that it leaves out."""
    files = checkpoint_files(shards=2, size=400_000) | {"README.md": b"# a model\n"}
    others = {
        "pytorch_model.bin": noise("bin", 200_000),
        "original/model.safetensors": safetensors_bytes({"o": ("BF16", (100, 256), None)}),
        "model.safetensors": safetensors_bytes({"w": ("BF16", (100, 256), None)}),
    }
    return files, others


def make_older(cache: Path, revision: str, days: float) -> None:
    """As if the revision had been published, and used last, so many days ago."""
    model = model_dir(cache)
    then = time.gmtime(time.time() - days * DAY)
    for path in (model / "manifests" / revision).glob("*.json"):
        document = json.loads(path.read_bytes())
        document["created"] = time.strftime("%Y-%m-%dT%H:%M:%SZ", then)
        path.write_text(json.dumps(document))
    for mark in (model / "used" / revision).iterdir():
        mark.rename(mark.with_name(time.strftime("%Y%m%d", then)))


def snapshots(mx: Mx, *names: str) -> dict[str, dict[str, Any]]:
    """The rows of `mx cache ls`, by revision."""
    return {row["revision"]: row for row in mx("cache", "ls", *names, "--json").ok().json()["snapshots"]}


def fates(document: dict[str, Any]) -> dict[str, str]:
    """What `mx cache gc --json` says happens, by revision."""
    return {row["revision"]: row["action"] for row in document["revisions"]}


def broken_promises(cache: Path) -> list[str]:
    """Files that a manifest vouches for and that are not there with their size."""
    model = model_dir(cache)
    wrong = []
    for path in (model / "manifests").glob("*/*.json"):
        manifest = json.loads(path.read_bytes())
        for record in manifest["files"]:
            file = model / "snapshots" / manifest["directory"] / record["path"]
            if not file.is_file() or os.path.getsize(file) != record["size"]:
                wrong.append(str(file))
    return wrong


def leftovers(cache: Path) -> list[str]:
    """Everything in staging, and temporary names among the files of snapshots."""
    model = model_dir(cache)
    found = list((model / "staging").glob("*/*"))
    found += [path for path in (model / "snapshots").rglob(".*") if path.name.endswith((".tmp", ".probe"))]
    return sorted(str(path.relative_to(model)) for path in found)
