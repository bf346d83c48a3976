"""What must hold in a cache at every moment, whoever was killed or frozen."""

from __future__ import annotations

import hashlib
import json
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.support import Running


def sums(files: Mapping[str, bytes]) -> dict[str, str]:
    """{path: SHA-256} of what an origin holds, to compare with tests.support.tree()."""
    return {path: hashlib.sha256(data).hexdigest() for path, data in files.items()}


def check_names(cache: Path, right: Mapping[str, str]) -> None:
    """Every file with a final name is whole and right, whether or not a manifest vouches for it."""
    for path in cache.glob("models/*/snapshots/*/**/*"):
        if path.is_file():
            name = str(path.relative_to(path.parents[len(path.parts) - path.parts.index("snapshots") - 3]))
            assert name in right, f"a foreign name in a snapshot: {path}"
            assert hashlib.sha256(path.read_bytes()).hexdigest() == right[name], f"wrong bytes: {path}"


def check_manifests(cache: Path) -> None:
    """Every file that a manifest vouches for is there, with its size."""
    for path in cache.glob("models/*/manifests/*/*.json"):
        manifest = json.loads(path.read_bytes())
        snapshot = path.parents[2] / "snapshots" / manifest["directory"]
        for record in manifest["files"]:
            assert (snapshot / record["path"]).stat().st_size == record["size"], f"{path}: {record['path']}"


def stops(running: Running, timeout: float = 30) -> bool:
    """Blocks until a process is stopped by fault.c. False when it ended before: no two runs make the same number of calls."""
    deadline = time.monotonic() + timeout
    while running.process.poll() is None:
        if Path(f"/proc/{running.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T":
            return True
        assert time.monotonic() < deadline, running.stderr
        time.sleep(0.01)
    return False


def parts(cache: Path) -> list[str]:
    """The names of all part files."""
    return sorted(path.name for path in cache.glob("models/*/staging/*/*.part.*"))


def check_parts(cache: Path) -> None:
    """At most one resumable part for each file."""
    count = Counter(name.partition(".")[0] for name in parts(cache))
    assert all(number == 1 for number in count.values()), parts(cache)


def check_clean(cache: Path) -> None:
    """After success: no parts, and no temporary names where readers look."""
    left = [path for path in cache.glob("models/*/staging/*/*") if not path.name.startswith("journal.")]
    left += [path for path in cache.rglob(".*.tmp") if "snapshots" in path.parts]
    assert not left, left
