"""One source and eight pullers that serve what they have pulled, each a host of its own with 200 Mbit/s both ways.

The hosts are network namespaces on a bridge, which lies in a namespace too: nothing leaves them.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from scripts.benchmarks.peer import write_safetensors
from scripts.benchmarks.rows import Row, clean_env, mx
from tests.rig import capabilities

PULLERS = 8
SIZE = 100_000_000
TENSORS = 100
RATE = "200mbit"
SLOTS = 2
PORT = 7000
LIMIT = 300.0
AT_MOST = 5.0


def measure(place: Path, *, scale: float, runs: int) -> list[Row]:
    """Skipped by name without CAP_NET_ADMIN."""
    if not capabilities.have("CAP_NET_ADMIN"):
        return [Row("fan-out (missing: CAP_NET_ADMIN): left out", 0.0, "s")]
    model = place / "model"
    model.mkdir()
    names = [f"layer.{index}.weight" for index in range(TENSORS)]
    write_safetensors(model / "model.safetensors", names, int(SIZE * scale) // TENSORS)
    with _hosts(PULLERS + 1) as hosts:
        bench = _Bench(place, hosts, model)
        alone, together, readers = [], [], [0]
        for _ in range(runs):
            alone.append(bench.one())
            seconds, most = bench.all()
            together.append(seconds)
            readers.append(most)
            print(f"  alone {alone[-1]:.2f} s, together {seconds:.2f} s, readers {most}", file=sys.stderr)
    one, every = statistics.median(alone), statistics.median(together)
    return [
        Row("one pull", one, "s"),
        Row(f"{PULLERS} pulls at once", every, "s", "one pull", every / one, AT_MOST, True),
        Row(f"most readers of one source at a time, of {SLOTS} slots", max(readers), "", None, None, SLOTS, True),
    ]


class _Bench:
    def __init__(self, place: Path, hosts: Sequence[str], model: Path) -> None:
        self._place, self._hosts, self._model = place, hosts, model
        (place / "home").mkdir()
        token = place / "token"
        token.write_text("what the hosts of this benchmark share\n")
        token.chmod(0o600)
        self._env = clean_env(place / "home", MX_PEER_TOKEN_FILE=str(token), MX_MAX_READERS=str(SLOTS))
        self._rounds = 0

    def one(self) -> float:
        """Seconds from the start of one puller until it has everything."""
        with self._source() as identity, contextlib.ExitStack() as stack:
            return self._pull([1], identity, stack)

    def all(self) -> tuple[float, int]:
        """The same for all of them at once, and the most readers that anybody had at a time."""
        everybody = list(range(1, PULLERS + 1))
        with self._source() as identity, contextlib.ExitStack() as stack:
            watch = subprocess.Popen(
                [*_inside(self._hosts[0]), sys.executable, "-m", "scripts.benchmarks.watch_slots"]
                + [f"{_address(number)}:{PORT}" for number in (0, *everybody)],
                env=self._env,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            try:
                seconds = self._pull(everybody, identity, stack)
                seen, _ = watch.communicate("\n", timeout=30)
            finally:
                watch.kill()
                watch.wait()
            return seconds, int(json.loads(seen))

    @contextlib.contextmanager
    def _source(self) -> Iterator[str]:
        """The first peer; its identity."""
        ready = self._place / "ready.json"
        ready.unlink(missing_ok=True)
        process = self._start(0, ["serve", self._model, "--ready-file", ready])
        try:
            _wait(ready, [process])
            yield json.loads(ready.read_text())["identity"]["content"]
        finally:
            _end([process])

    def _pull(self, numbers: Sequence[int], identity: str, stack: contextlib.ExitStack) -> float:
        self._rounds += 1
        place = self._place / f"round{self._rounds}"
        place.mkdir()
        stack.callback(shutil.rmtree, place, ignore_errors=True)
        source = f"{_address(0)}:{PORT}"
        processes: list[subprocess.Popen[bytes]] = []
        stack.callback(_end, processes)
        start = time.time()
        for number in numbers:
            to: list[str | Path] = ["--to", place / f"to{number}", "--result", place / f"result{number}"]
            processes.append(self._start(number, ["pull", identity, "--peer", source, "--then-serve", *to]))
        results = [place / f"result{number}" for number in numbers]
        for result in results:
            _wait(result, processes)
        ended = sorted(result.stat().st_mtime - start for result in results)
        print(f"  ended after {', '.join(f'{one:.1f}' for one in ended)} s", file=sys.stderr)
        return ended[-1]

    def _start(self, number: int, words: Sequence[str | Path]) -> subprocess.Popen[bytes]:
        command = [*_inside(self._hosts[number]), *mx(*words), "--listen", f"{_address(number)}:{PORT}", "-q"]
        log = self._place / f"log{number}"
        with open(log, "wb") as file:
            return subprocess.Popen([str(word) for word in command], env=self._env, stdout=file, stderr=file)


def _wait(path: Path, processes: Sequence[subprocess.Popen[bytes]]) -> None:
    end = time.monotonic() + LIMIT
    while not path.exists():
        if time.monotonic() > end or any(process.poll() is not None for process in processes):
            raise RuntimeError(f"{path.name} did not appear (see the logs of the processes)")
        time.sleep(0.02)


def _end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        process.terminate()
    for process in processes:
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


# -- hosts -----------------------------------------------------------------------------------------------------------


def _address(number: int) -> str:
    return f"10.88.0.{number + 1}"


def _inside(host: str) -> list[str]:
    """What goes before a command: the namespaces of a host, where nobody can read another's memory."""
    return ["ip", "netns", "exec", host, "unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]


@contextlib.contextmanager
def _hosts(count: int) -> Iterator[list[str]]:
    """Namespaces with one interface each, on a bridge in a namespace of its own."""
    made = [f"mxb{os.getpid()}-{number}" for number in range(count)]
    bridge = f"mxb{os.getpid()}-net"
    try:
        _ip(f"netns add {bridge}")
        _ip(f"-n {bridge} link add bridge type bridge")
        _ip(f"-n {bridge} link set bridge up")
        for number, host in enumerate(made):
            _ip(f"netns add {host}")
            _ip(f"-n {host} link set lo up")
            _ip(f"link add eth0 netns {host} type veth peer name port{number} netns {bridge}")
            _ip(f"-n {bridge} link set port{number} master bridge up")
            _ip(f"-n {host} addr add {_address(number)}/24 dev eth0")
            _ip(f"-n {host} link set eth0 up")
            for namespace, device in ((host, "eth0"), (bridge, f"port{number}")):
                limit = f"qdisc add dev {device} root tbf rate {RATE} burst 256k latency 50ms"
                subprocess.run(["tc", "-n", namespace, *limit.split()], check=True, capture_output=True, timeout=20)
        yield made
    finally:
        for name in (*made, bridge):
            subprocess.run(["ip", "netns", "del", name], capture_output=True, timeout=20)


def _ip(words: str) -> None:
    subprocess.run(["ip", *words.split()], check=True, capture_output=True, timeout=20)
