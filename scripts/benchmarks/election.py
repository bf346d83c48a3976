"""Eight prefetchers of one checkpoint: what the origin serves, when they end, how fast a dead leader is replaced."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import signal
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from scripts.benchmarks.prefetch import FILES, make_large
from scripts.benchmarks.rows import Row, clean_env, mx
from tests.rig.servers import Nginx, nginx

TOGETHER = 8
TOTAL = 1_000_000_000
KILL_AT = 0.4
BANDWIDTH = 400 << 20
TTL, BEAT = 5.0, 0.5
LIMIT = 300.0
ANSWER = re.compile(r'HTTP/1\.1" 20[06] (\d+) ')

T = TypeVar("T")


def measure(place: Path, *, scale: float, runs: int) -> list[Row]:
    """Needs nginx: its access log counts the bytes."""
    (place / "home").mkdir()
    checkpoint = make_large(place / "large", int(TOTAL * scale / FILES))
    with nginx(place, workers=2) as server:
        server.s3.put_tree("large", checkpoint)
        bench = _Bench(server, place, sum(path.stat().st_size for path in checkpoint.iterdir()))
        plain = [bench.round(f"plain{n}", end=None) for n in range(runs)]
        killed = [bench.round(f"kill{n}", end=signal.SIGKILL) for n in range(runs)]
        frozen = [bench.round(f"stop{n}", end=signal.SIGSTOP) for n in range(runs)]
    return [
        *_rows("8 at once", plain, 1.02),
        *_rows("leader killed at 40 %", killed, 1.10),
        Row("takeover on one host", statistics.median(r.takeover for r in killed), "s", None, None, 1.0, True),
        *_rows("leader frozen at 40 %", frozen, None),
        Row(
            "takeover of a frozen one", statistics.median(r.takeover for r in frozen), "s", None, None, TTL + BEAT, True
        ),
    ]


@dataclasses.dataclass(frozen=True)
class _Round:
    """`served`: bytes from the origin over the size; `late`: last exit after the publish, `takeover`: end to next term (s)."""

    served: float
    late: float
    takeover: float


def _rows(name: str, rounds: list[_Round], bar: float | None) -> list[Row]:
    served, late = max(one.served for one in rounds), max(one.late for one in rounds)
    return [
        Row(f"{name}: bytes served / size", served, "x", None, None, bar, True),
        Row(f"{name}: last exit after the publish", late, "s", None, None, 2.0, True),
    ]


class _Bench:
    def __init__(self, server: Nginx, place: Path, size: int) -> None:
        self._server, self._place, self._size = server, place, size
        self._log = place / "nginx" / "access.log"
        self._env = clean_env(
            place / "home", **server.s3.env, MX_MAX_BANDWIDTH=str(BANDWIDTH), MX_TTL=str(TTL), MX_BEAT=str(BEAT)
        )

    def round(self, name: str, end: signal.Signals | None) -> _Round:
        """One race into a fresh cache; `end` is sent to the leader at 40 %."""
        cache = self._place / name
        self._log.write_bytes(b"")
        os.kill(int((self._place / "nginx" / "pid").read_text()), signal.SIGUSR1)
        command = [str(w) for w in mx("prefetch", self._server.s3.uri("large/"), "--cache-dir", cache, "--json", "-q")]
        exits: dict[int, float] = {}
        gone, takeover = 0, 0.0
        with _together(command, self._env) as racers:
            if end is not None:
                gone, takeover = self._strike(cache, end)
            deadline = time.monotonic() + LIMIT
            waiting = {process.pid: process for process in racers if process.pid != gone}
            while waiting and time.monotonic() < deadline:
                for pid, process in list(waiting.items()):
                    if process.poll() is not None:
                        exits[pid] = time.time()
                        if process.returncode:
                            raise RuntimeError(f"a prefetcher exited with {process.returncode}")
                        del waiting[pid]
                time.sleep(0.01)
            if waiting:
                raise RuntimeError("prefetchers did not end")
        manifest = next(cache.glob("models/*/manifests/*/*.json"))
        late = max(exits.values()) - manifest.stat().st_mtime
        return _Round(self._served() / self._size, late, takeover)

    def _strike(self, cache: Path, end: signal.Signals) -> tuple[int, float]:
        """Wait for 40 %, send the signal; (pid, seconds until the next term)."""
        lease = _wait_for(lambda: next(cache.glob("models/*/lease/*/lead.1"), None)).parent
        leader = int(json.loads((lease / "lead.1").read_text())["pid"])
        _wait_for(lambda: self._fetched(lease) >= KILL_AT * self._size or None)
        os.kill(leader, end)
        struck = time.time()
        second = _wait_for(lambda: lease / "lead.2" if (lease / "lead.2").exists() else None)
        return leader, second.stat().st_mtime - struck

    @staticmethod
    def _fetched(lease: Path) -> int:
        return max(
            (int(name.rpartition(".")[2]) for name in os.listdir(lease) if name.startswith("beat.1.")), default=0
        )

    def _served(self) -> int:
        time.sleep(0.2)
        lines = self._log.read_text().splitlines()
        found = [ANSWER.search(line) for line in lines if "/large/model-" in line]
        return sum(int(answer[1]) for answer in found if answer)


def _wait_for(look: Callable[[], T | None]) -> T:
    """Look again and again until there is something."""
    end = time.monotonic() + LIMIT
    while time.monotonic() < end:
        found = look()
        if found is not None:
            return found
        time.sleep(0.005)
    raise RuntimeError("waited in vain")


@contextmanager
def _together(command: list[str], env: dict[str, str]) -> Iterator[list[subprocess.Popen[bytes]]]:
    """TOGETHER processes of one command; those that are left at the end are killed."""
    racers = [
        subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        for _ in range(TOGETHER)
    ]
    try:
        yield racers
    finally:
        for process in racers:
            process.kill()
            process.wait()
