"""What tests call directly: the real command line as a process, capabilities, checkpoints."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import pytest

from tests.rig import capabilities
from tests.rig.checkpoints import (  # noqa: F401  (offered to the tests from here)
    MIB,
    checkpoint_files,
    make_checkpoint,
    make_safetensors,
    noise,
    safetensors_bytes,
    tree,
)

ROOT = Path(__file__).resolve().parent.parent


def capability(*names: str) -> pytest.MarkDecorator:
    """A mark that skips the test as `missing: NAME` unless the machine has all of them."""
    lacking = [name for name in names if not capabilities.have(name)]
    return pytest.mark.skipif(bool(lacking), reason=f"missing: {', '.join(lacking)}")


def need(*names: str) -> None:
    """The same, from inside a test or a fixture."""
    lacking = [name for name in names if not capabilities.have(name)]
    if lacking:
        pytest.skip(f"missing: {', '.join(lacking)}")


def clean_env(home: Path, cache: Path, extra: Mapping[str, str | Path] | None = None) -> dict[str, str]:
    """Nothing of the caller's environment but PATH; a cache that was chosen; the protocol's times made short."""
    env = {
        "PATH": capabilities.PATH,
        "HOME": str(home),
        "TMPDIR": tempfile.gettempdir(),
        "LANG": "C.UTF-8",
        "PYTHONPATH": str(ROOT),
        "PYTHONSAFEPATH": "1",
        "MX_CACHE_DIR": str(cache),
        "MX_TTL": "2s",
        "MX_BEAT": "200ms",
        "MX_STALL_TIMEOUT": "3s",
        # Without these, looking for credentials asks link-local addresses and waits for them.
        "AWS_EC2_METADATA_DISABLED": "true",
        "NO_GCE_CHECK": "true",
    }
    for key, value in (extra or {}).items():
        env[key] = str(value)
    return env


@dataclass(frozen=True)
class Result:
    """How a finished mx left."""

    args: tuple[str, ...]
    code: int
    out: str
    err: str
    seconds: float

    def json(self) -> Any:
        return json.loads(self.out)

    def ok(self) -> Result:
        """Itself, when the exit code is 0; else the test fails and shows what mx said."""
        return self.exits(0)

    def exits(self, code: int) -> Result:
        assert self.code == code, (
            f"{self.args} exited {self.code}, not {code}\n--- out\n{self.out}\n--- err\n{self.err}"
        )
        return self


@dataclass
class Running:
    """A running mx. Its output is read by threads, so that it never blocks on a full pipe."""

    args: tuple[str, ...]
    process: subprocess.Popen[str]
    started: float
    out: list[str] = field(default_factory=list)
    err: list[str] = field(default_factory=list)
    _changed: threading.Condition = field(default_factory=threading.Condition)
    _readers: list[threading.Thread] = field(default_factory=list)
    _open: int = 2

    def __post_init__(self) -> None:
        for stream, lines in ((self.process.stdout, self.out), (self.process.stderr, self.err)):
            reader = threading.Thread(target=self._read, args=(stream, lines), daemon=True)
            reader.start()
            self._readers.append(reader)

    def _read(self, stream: IO[str], lines: list[str]) -> None:
        for line in stream:
            with self._changed:
                lines.append(line)
                self._changed.notify_all()
        with self._changed:
            self._open -= 1
            self._changed.notify_all()

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def stderr(self) -> str:
        return "".join(self.err)

    @property
    def stdout(self) -> str:
        return "".join(self.out)

    def wait_err(self, pattern: str, timeout: float = 20) -> re.Match[str]:
        """Blocks until a line of stderr matches (re.search); fails at the deadline or when mx ends without it."""
        return self._wait_line(self.err, pattern, timeout)

    def wait_out(self, pattern: str, timeout: float = 20) -> re.Match[str]:
        return self._wait_line(self.out, pattern, timeout)

    def _wait_line(self, lines: list[str], pattern: str, timeout: float) -> re.Match[str]:
        deadline, seen = time.monotonic() + timeout, 0
        with self._changed:
            while True:
                for line in lines[seen:]:
                    if found := re.search(pattern, line):
                        return found
                seen = len(lines)
                left = deadline - time.monotonic()
                if left <= 0 or self._open == 0:
                    why = "the deadline" if self._open else f"the end (rc {self.process.poll()})"
                    pytest.fail(f"{self.args}: no line {pattern!r} before {why}\n{self.stdout}\n{self.stderr}")
                self._changed.wait(left)

    def send(self, signum: signal.Signals) -> None:
        self.process.send_signal(signum)

    def wait_stopped(self, timeout: float = 20) -> None:
        """Blocks until mx is stopped (SIGSTOP, also by fault.c's STOP_AT); go on with send(signal.SIGCONT)."""
        deadline = time.monotonic() + timeout
        while Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
            if time.monotonic() > deadline or self.process.poll() is not None:
                pytest.fail(f"{self.args} is not stopped (rc {self.process.poll()})\n{self.stderr}")
            time.sleep(0.01)

    def kill(self) -> Result:
        """SIGKILL, to mx alone; waits for its end."""
        self.process.kill()
        return self.wait()

    def wait(self, timeout: float = 60) -> Result:
        """Blocks until mx has ended; fails at the deadline, with what mx said."""
        try:
            code = self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            pytest.fail(f"{self.args} still runs after {timeout} s\n{self.stdout}\n{self.stderr}")
        for reader in self._readers:
            reader.join(5)
        return Result(self.args, code, self.stdout, self.stderr, time.monotonic() - self.started)

    def close(self) -> None:
        """Ends mx and whatever it started (its process group), at once."""
        try:
            os.killpg(self.pid, signal.SIGKILL)
        except ProcessLookupError:
            return
        finally:
            self.process.wait()


class Mx:
    """Runs the command line from this tree, each time with clean_env() and this fixture's home and cache."""

    def __init__(self, place: Path) -> None:
        self.home = place / "home"
        self.cache = place / "cache"
        self.home.mkdir(parents=True, exist_ok=True)
        self._running: list[Running] = []

    def start(
        self,
        *args: str | Path,
        env: Mapping[str, str | Path] | None = None,
        cwd: Path | None = None,
        prefix: tuple[str, ...] = (),
    ) -> Running:
        """Starts `mx ARGS…`; `prefix` goes before it (strace, unshare …). Ended at the test's end."""
        words = tuple(str(arg) for arg in args)
        process = subprocess.Popen(
            [*prefix, sys.executable, "-m", "mx_cli", *words],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="surrogateescape",
            env=clean_env(self.home, self.cache, env),
            cwd=cwd or self.home,
            start_new_session=True,
        )
        running = Running(("mx", *words), process, time.monotonic())
        self._running.append(running)
        return running

    def __call__(
        self,
        *args: str | Path,
        env: Mapping[str, str | Path] | None = None,
        cwd: Path | None = None,
        timeout: float = 60,
        prefix: tuple[str, ...] = (),
    ) -> Result:
        """Runs `mx ARGS…` to its end."""
        return self.start(*args, env=env, cwd=cwd, prefix=prefix).wait(timeout)

    def close(self) -> None:
        for running in self._running:
            running.close()
