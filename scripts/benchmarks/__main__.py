"""scripts/bench NAME [--json] [--scale N] [--runs N]: one module of this package for each name."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import tempfile
from pathlib import Path

from scripts.benchmarks.rows import Row, table

NAMES = ("prefetch", "election", "peer", "fanout", "load", "stream", "torture", "help")


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/bench")
    parser.add_argument("name", nargs="?", choices=NAMES)
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
    parser.add_argument("--scale", type=float, default=1.0, help="factor on the sizes; bars hold at 1")
    parser.add_argument("--runs", type=int, default=3, help="runs of each, taken in turn; the median counts")
    parser.add_argument("--work", type=Path, help="directory for the data (default: a temporary one)")
    parser.add_argument("--list", action="store_true", help="print the names")
    given = parser.parse_args()
    if given.list or given.name is None:
        print("\n".join(NAMES))
        return 0 if given.list else 2
    module = importlib.import_module(f"scripts.benchmarks.{given.name}")
    with tempfile.TemporaryDirectory(dir=given.work, prefix="mx-bench-") as place:
        rows: list[Row] = module.measure(Path(place), scale=given.scale, runs=given.runs)
    if given.json:
        print(json.dumps({"schema": 1, "rows": [row.to_json() for row in rows]}))
    else:
        print(table(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
