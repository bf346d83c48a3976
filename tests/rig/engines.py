"""Real engines as processes: `.venv-engine` has vLLM, and mx as an installed wheel."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.rig.capabilities import PATH
from tests.support import Result, Running

ROOT = Path(__file__).parents[2]
BIN = ROOT / ".venv-engine" / "bin"
PROGRAM = str(Path(__file__).parent / "vllm_engine.py")
PYTHON = (str(BIN / "python"), "-P", PROGRAM)
START = 240.0


class Engines:
    """Starts engines below `place`, and counts them. Ends all of them with `close`."""

    def __init__(self, place: Path) -> None:
        self._place = place
        (place / "run").mkdir(mode=0o700)
        self.started = 0
        self._running: list[Running] = []

    def env(self, cache: str) -> dict[str, str]:
        """Of a host with that cache. mx is that of the wheel: this repository is on no path."""
        place = self._place
        return {
            "PATH": f"{BIN}{os.pathsep}{PATH}",
            "HOME": str(place),
            "XDG_RUNTIME_DIR": str(place / "run"),
            "MX_CACHE_DIR": str(place / cache),
            "MX_DISCOVERY": f"dir:{place / 'peers'}",
            "LANG": "C.UTF-8",
            "PYTHONUNBUFFERED": "1",
            "HF_HUB_OFFLINE": "1",
            # The engine is not to ask the hub; mx may ask its origins.
            "MX_OFFLINE": "0",
            "VLLM_NO_USAGE_STATS": "1",
            "DO_NOT_TRACK": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_HOST_IP": "127.0.0.1",
        }

    def make(self, name: str, seed: int) -> Path:
        """A small checkpoint."""
        directory = self._place / name
        self.run([*PYTHON, "make", str(directory), str(seed)], "none")
        return directory

    def run(self, command: list[str], cache: str) -> Result:
        """A command to its end, which has to be a good one."""
        done = subprocess.run(command, env=self.env(cache), capture_output=True, text=True, timeout=START)
        return Result(tuple(command), done.returncode, done.stdout, done.stderr, 0.0).ok()

    def start(self, command: list[str], cache: str, env: Mapping[str, str] | None = None) -> Running:
        process = subprocess.Popen(
            command,
            env={**self.env(cache), **(env or {})},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=self._place,
            start_new_session=True,
        )
        running = Running(tuple(command), process, time.monotonic())
        self._running.append(running)
        return running

    def engine(self, command: list[str], cache: str) -> Engine:
        """`command` runs vllm_engine.py in the end. Returns at once."""
        self.started += 1
        return Engine(self.start(command, cache))

    def close(self) -> None:
        for running in self._running:
            kill_all(running)


class Engine:
    """An engine of vllm_engine.py."""

    def __init__(self, running: Running) -> None:
        self.running = running

    def tokens(self) -> Any:
        """Its greedy tokens, once it is ready."""
        return json.loads(self.running.wait_out(r"^TOKENS (.*)$", START).group(1))

    def log(self) -> list[str]:
        """What mx said, without what vLLM puts before it."""
        return [found.group(1) for line in self.running.out if (found := re.search(r" mx: (.*)$", line))]

    def wait_log(self, pattern: str, timeout: float = 60.0) -> re.Match[str]:
        return self.running.wait_out(r" mx: " + pattern, timeout)

    def tell(self, word: str) -> None:
        assert self.running.process.stdin is not None
        self.running.process.stdin.write(word + "\n")
        self.running.process.stdin.flush()
        self.running.wait_out(f"^DONE {word}$", 60)

    def kill(self) -> None:
        """SIGKILL to all of its processes at once."""
        kill_all(self.running)


def kill_all(running: Running) -> None:
    """The process and its children, which are of its session. Idempotent."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(running.pid, signal.SIGKILL)
    running.process.wait()


def engine_options(extra: Mapping[str, Any] | None = None, **more: Any) -> str:
    """JSON for vllm_engine.py: the load format mx with this extra configuration."""
    return json.dumps({"load_format": "mx", "model_loader_extra_config": dict(extra or {}), **more})
