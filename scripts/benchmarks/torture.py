"""The races of the test suite, many times: an exit code other than 0 of pytest is a row that is not ok."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from scripts.benchmarks.rows import Row

ROUNDS = 50


def measure(place: Path, *, scale: float, runs: int) -> list[Row]:
    """Runs the tests marked `race` with MX_TEST_ROUNDS rounds each."""
    rounds = max(1, int(ROUNDS * scale))
    env = {**os.environ, "MX_TEST_ROUNDS": str(rounds), "TMPDIR": str(place)}
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-m",
        "race",
        "-p",
        "no:cacheprovider",
        "--timeout",
        "3600",
        "tests",
    ]
    done = subprocess.run(command, env=env, stdout=sys.stderr, check=False)
    return [Row(f"races with {rounds} rounds each: failures", float(done.returncode != 0), "", None, None, 0.0, True)]
