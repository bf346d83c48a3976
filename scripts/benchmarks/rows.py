"""Rows of a benchmark, and running a command while measuring it."""

from __future__ import annotations

import dataclasses
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

LIMIT = 60.0


@dataclasses.dataclass(frozen=True)
class Row:
    """One figure. `bar` is what `ratio` (or `value`, when there is no peer) has to reach; `at_most` turns it round."""

    name: str
    value: float
    unit: str
    peer: str | None = None
    ratio: float | None = None
    bar: float | None = None
    at_most: bool = False

    @property
    def ok(self) -> bool | None:
        if self.bar is None:
            return None
        figure = self.value if self.ratio is None else self.ratio
        return figure <= self.bar if self.at_most else figure >= self.bar

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "value": round(self.value, 4),
            "unit": self.unit,
            "peer": self.peer,
            "ratio": None if self.ratio is None else round(self.ratio, 3),
            "bar": self.bar,
            "ok": self.ok,
        }


def table(rows: Sequence[Row]) -> str:
    lines = [f"{'name':<44} {'value':>10} {'unit':<8} {'peer':<12} {'ratio':>7} {'bar':>7}  ok"]
    for row in rows:
        bar = "" if row.bar is None else f"{'<=' if row.at_most else '>='}{row.bar:g}"
        ratio = "" if row.ratio is None else f"{row.ratio:.2f}"
        ok = {None: "", True: "yes", False: "NO"}[row.ok]
        lines.append(f"{row.name:<44} {row.value:>10.3f} {row.unit:<8} {row.peer or '':<12} {ratio:>7} {bar:>7}  {ok}")
    return "\n".join(lines)


@dataclasses.dataclass(frozen=True)
class Run:
    """A measured command: wall and CPU seconds (children included), peak RSS in MB over all its processes."""

    wall: float
    cpu: float
    rss: float
    out: str


def run(command: Sequence[str | Path], env: Mapping[str, str], cwd: Path | None = None) -> Run:
    """Run to the end; raises CalledProcessError with the output when it fails."""
    before = os.times()
    start = time.monotonic()
    with subprocess.Popen(
        [str(word) for word in command],
        env=dict(env),
        cwd=cwd,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        peak = _Peak(process.pid)
        try:
            out, err = process.communicate(timeout=LIMIT)
        except subprocess.TimeoutExpired:
            process.kill()
            out, err = process.communicate()
        wall = time.monotonic() - start
        rss = peak.end()
    after = os.times()
    if process.returncode:
        print(err[-4000:], file=sys.stderr)
        raise subprocess.CalledProcessError(process.returncode, process.args, out, err)
    cpu = after.children_user + after.children_system - before.children_user - before.children_system
    return Run(wall, cpu, rss, out)


class _Peak:
    """Watches the resident memory of a process and its descendants."""

    def __init__(self, pid: int) -> None:
        self._pid, self._peak = pid, 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while not self._ended.wait(0.05):
            self._peak = max(self._peak, sum(map(_rss, _family(self._pid))))

    def end(self) -> float:
        self._ended.set()
        self._thread.join()
        return self._peak / 1e6


def _family(pid: int) -> list[int]:
    found = [pid]
    for parent in found:
        try:
            for task in os.listdir(f"/proc/{parent}/task"):
                found += map(int, Path(f"/proc/{parent}/task/{task}/children").read_text().split())
        except OSError:
            continue
    return found


def _rss(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError):
        return 0


def again(job: Callable[[], Run]) -> Run:
    """The job, once more when it failed or hung: a peer's bad luck is not our gain."""
    try:
        return job()
    except subprocess.CalledProcessError:
        return job()


def in_turn(runs: int, jobs: Mapping[str, Callable[[], Run]]) -> dict[str, list[Run]]:
    """Each job once, then each again: slow minutes of the machine hit all alike."""
    found: dict[str, list[Run]] = {name: [] for name in jobs}
    for _ in range(runs):
        for name, job in jobs.items():
            found[name].append(again(job))
            print(f"  {name}: {found[name][-1].wall:.2f} s, CPU {found[name][-1].cpu:.2f} s", file=sys.stderr)
    return found


def median(runs: Sequence[Run], figure: Callable[[Run], float]) -> float:
    return statistics.median(map(figure, runs))


def clean_env(home: Path, **extra: str) -> dict[str, str]:
    """What a command gets: nothing of the caller's settings and credentials."""
    keep = {name: os.environ[name] for name in ("PATH", "LANG", "PYTHONPATH", "LD_LIBRARY_PATH") if name in os.environ}
    return {**keep, "HOME": str(home), "PYTHONUNBUFFERED": "1", **extra}


def mx(*words: str | Path) -> list[str | Path]:
    """The mx of this checkout."""
    return [sys.executable, "-m", "mx_cli", *words]
