"""mx beside a raw NIXL READ, memcpy, one plain connection, ModelExpress' own client and Mooncake: one host, in turn.

ModelExpress and Mooncake run where `.bench-venv` has them (they are never installed by this), in a network namespace of
their own, since they listen on all addresses:

    python3 -m venv .bench-venv && .bench-venv/bin/pip install torch nixl grpcio google-crc32c 'protobuf<7' pydantic \\
        boto3 zstandard mooncake-transfer-engine-non-cuda && .bench-venv/bin/pip install --no-deps --pre modelexpress
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import statistics
import struct
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scripts.benchmarks.peer_reader import cpu_of
from scripts.benchmarks.rows import Row, clean_env, in_turn, median, mx, run
from tests.rig import capabilities

ROOT = Path(__file__).resolve().parents[2]
OTHERS = ROOT / ".bench-venv" / "bin" / "python"

GIB = 1 << 30
FILES, TENSORS = 4, 16
SMALL, SMALL_SIZE = 20_000, 4096
PREPARED, PREPARED_SIZE = 5000, 4096
LISTED, LISTED_SIZE = 50_000, 1024
IDLE_FOR = 6.0
START_LIMIT = 60.0

VERIFIED, ENCRYPTED, EMULATED, MANY, SOON, IDLE = 0.9, 1.0, 1.0, 0.5, 0.1, 0.03


@dataclass(frozen=True)
class Source:
    """A running `mx serve`."""

    address: str
    identity: str
    pid: int


def measure(place: Path, *, scale: float, runs: int) -> list[Row]:
    """Needs NIXL."""
    (place / "home").mkdir()
    (place / "run").mkdir(mode=0o700)
    env = clean_env(place / "home", XDG_RUNTIME_DIR=str(place / "run"))
    large = _make_large(place / "large", int(GIB * scale))
    small = _make_many(place / "small", max(16, int(SMALL * scale)), SMALL_SIZE)
    rows: list[Row] = []
    for name, transport in (("CMA", {}), ("TCP", {"UCX_TLS": "tcp"})):
        rows += _large(name, large, {**env, **transport}, place, runs)
        rows += _small(name, small, {**env, **transport}, place, runs)
    rows += _command(large, env, place, runs)
    rows += _before(place, env, runs)
    return rows


# -- what is compared ------------------------------------------------------------------------------------------------


def _large(name: str, model: Path, env: Mapping[str, str], place: Path, runs: int) -> list[Row]:
    with _serving(model, env, place) as source:
        samples, size = _compare(source, env, runs, scattered=False, others=_others(name, model))
    rate = {who: size / 1e6 / _seconds(rounds) for who, rounds in samples.items()}
    is_near = name == "CMA"
    rows = [
        _against(f"{name} verified nixl-read", rate, "nixl-read", "raw READ", VERIFIED if is_near else None),
        _against(f"{name} verified nixl-read", rate, "nixl-read", "plain TCP", None if is_near else EMULATED),
        _against(f"{name} raw READ", rate, "raw READ", "plain TCP"),
        _against(f"{name} verified nixl-read", rate, "nixl-read", "memcpy"),
    ]
    for other in ("ModelExpress", "Mooncake"):
        if other in rate:
            rows.append(_against(f"{name} verified nixl-read", rate, "nixl-read", other))
        elif other == "ModelExpress" or not is_near:
            rows.append(Row(f"{name} {other} (not in .bench-venv, or no namespace): left out", 0.0, "MB/s"))
    if is_near:
        rows.append(_against("verified path socket", rate, "socket", "plain TLS", ENCRYPTED))
        rows += _cpu("path socket", samples, "socket", "plain TLS", size)
    return rows + _cpu(f"{name} nixl-read", samples, "nixl-read", "raw READ" if is_near else "plain TCP", size)


def _small(name: str, model: Path, env: Mapping[str, str], place: Path, runs: int) -> list[Row]:
    rows: list[Row] = []
    with _serving(model, env, place) as source:
        for scattered in (True, False):
            samples, size = _compare(source, env, max(5, runs), scattered=scattered)
            where = "each somewhere" if scattered else "in order"
            rate = {who: size / 1e6 / _seconds(rounds) for who, rounds in samples.items()}
            rows.append(_against(f"{name} small tensors, {where}", rate, "nixl-read", "raw READ", MANY))
    return rows


def _command(model: Path, env: Mapping[str, str], place: Path, runs: int) -> list[Row]:
    """The whole of `mx pull --to` into memory, beside `cp`; the source's share, and what it costs to be there."""
    memory = Path("/dev/shm") if Path("/dev/shm").is_dir() else place
    target = memory / f"mx-bench-{os.getpid()}"
    size = sum(path.stat().st_size for path in model.iterdir())
    rows: list[Row] = []
    with _serving(model, env, place) as source:
        command = mx("pull", source.identity, "--peer", source.address, "--to", target, "--json", "-q")
        there: dict[str, list[float]] = {"auto": [], "socket": []}

        def pull(path: str) -> Any:
            shutil.rmtree(target, ignore_errors=True)
            before = cpu_of(source.pid)
            done = run([*command, "--path", path], env)
            there[path].append(cpu_of(source.pid) - before)
            return done

        def copy() -> Any:
            shutil.rmtree(target, ignore_errors=True)
            return run(["cp", "-r", model, target], env)

        try:
            found = in_turn(runs, {"auto": lambda: pull("auto"), "socket": lambda: pull("socket"), "cp": copy})
        finally:
            shutil.rmtree(target, ignore_errors=True)
        wall = {name: median(rounds, lambda one: one.wall) for name, rounds in found.items()}
        for path, label in (("auto", "mx pull --to"), ("socket", "mx pull --to --path socket")):
            mine = median(found[path], lambda one: one.cpu)
            rows += [
                Row(f"{label}, whole command", wall[path], "s", "cp", wall[path] / wall["cp"]),
                Row(f"{label}, CPU of the reader", mine / size * 1e9, "s/GB"),
                Row(f"{label}, CPU of the source", statistics.median(there[path]) / size * 1e9, "s/GB"),
                Row(f"{label}, peak RSS", max(one.rss for one in found[path]), "MB"),
            ]
        rows.append(Row("mx serve --device cpu, RSS beside the weights", _rss(source.pid) - size / 1e6, "MB"))
        before, start = cpu_of(source.pid), time.monotonic()
        time.sleep(IDLE_FOR)
        share = (cpu_of(source.pid) - before) / (time.monotonic() - start)
        rows.append(Row("mx serve, idle, of a core", share, "x", None, None, IDLE, True))
    return rows


def _before(place: Path, env: Mapping[str, str], runs: int) -> list[Row]:
    """What comes before the first byte."""
    rows: list[Row] = []
    with _serving(_make_many(place / "prepared", PREPARED, PREPARED_SIZE), env, place) as source:
        seconds = _reader("prepare", source, env, runs=max(5, runs))["seconds"]
    phase = {name: statistics.median(one[name] for one in seconds) for name in seconds[0]}
    parts = ("control", "plan", "registration")
    whole = statistics.median(sum(one[part] for part in parts) for one in seconds)
    rows.append(Row(f"{PREPARED} tensors: {' + '.join(parts)}", whole, "s", None, None, SOON, True))
    cpu = statistics.median(sum(one[f"CPU of {part}"] for part in parts) for one in seconds)
    rows.append(Row(f"{PREPARED} tensors: the same, CPU of the reader", cpu, "s"))
    rows += [Row(f"{PREPARED} tensors: {part}", phase[part], "s") for part in (*parts, "start")]
    with _serving(_make_many(place / "listed", LISTED, LISTED_SIZE), env, place) as source:
        found = _reader("manifest", source, env, runs=runs)
    rows.append(Row(f"manifest of {found['tensors']} tensors, the first time", found["first"], "s"))
    rows.append(Row(f"manifest of {found['tensors']} tensors", statistics.median(found["again"]), "s"))
    return rows


def _against(name: str, rate: Mapping[str, float], mine: str, other: str, bar: float | None = None) -> Row:
    return Row(name, rate[mine], "MB/s", other, rate[mine] / rate[other], bar)


def _cpu(name: str, samples: Mapping[str, Sequence[Sequence[float]]], mine: str, other: str, size: int) -> list[Row]:
    both = {who: statistics.median(one[1] + one[2] for one in samples[who]) / size * 1e9 for who in (mine, other)}
    here, there = (statistics.median(one[side] for one in samples[mine]) / size * 1e9 for side in (1, 2))
    return [
        Row(f"{name}, CPU of both ends", both[mine], "s/GB", other, both[mine] / both[other]),
        Row(f"{name}, CPU of the reader", here, "s/GB"),
        Row(f"{name}, CPU of the source", there, "s/GB"),
    ]


def _seconds(rounds: Sequence[Sequence[float]]) -> float:
    return statistics.median(one[0] for one in rounds)


# -- processes -------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _serving(model: Path, env: Mapping[str, str], place: Path) -> Iterator[Source]:
    """`mx serve --device cpu` until the block ends."""
    ready = place / "ready.json"
    ready.unlink(missing_ok=True)
    words = mx("serve", model, "--device", "cpu", "--ready-file", ready, "-q")
    log = place / "serve.log"
    with open(log, "wb") as file:
        process = subprocess.Popen([str(word) for word in words], env=dict(env), stdout=file, stderr=file)
    try:
        end = time.monotonic() + START_LIMIT
        while not ready.exists():
            if process.poll() is not None or time.monotonic() > end:
                raise RuntimeError(f"mx serve did not become ready: {log.read_text()}")
            time.sleep(0.02)
        said = json.loads(ready.read_text())
        yield Source(said["address"], said["identity"]["content"], said["pid"])
    finally:
        process.terminate()
        process.wait(30)


def _reader(what: str, source: Source, env: Mapping[str, str], **more: Any) -> dict[str, Any]:
    given = {"what": what, "address": source.address, "identity": source.identity, "pid": source.pid, **more}
    command = [sys.executable, "-m", "scripts.benchmarks.peer_reader", json.dumps(given)]
    done = subprocess.run(command, env=dict(env), stdout=subprocess.PIPE, text=True, check=True)
    answer = json.loads(done.stdout)
    assert isinstance(answer, dict)
    return answer


def _compare(
    source: Source,
    env: Mapping[str, str],
    runs: int,
    *,
    scattered: bool,
    others: Mapping[str, Sequence[str | Path]] | None = None,
) -> tuple[dict[str, list[list[float]]], int]:
    """Samples of each contender by name, and the bytes of one."""
    samples: dict[str, list[list[float]]] = {}
    size = 0
    # The others start slowly, so each round of theirs stands between rounds of ours.
    rounds = runs if others else 1
    for _ in range(rounds):
        found = _reader("compare", source, env, runs=runs // rounds, scattered=scattered, baselines=others is not None)
        size = found["bytes"]
        for name, taken in found["samples"].items():
            samples.setdefault(name, []).extend(taken)
        for name, command in (others or {}).items():
            taken = _other(name, command, env)
            samples.setdefault(name, []).append(taken)
    return samples, size


def _others(name: str, model: Path) -> dict[str, Sequence[str | Path]]:
    """Commands of the tools to compare with that are here: they print [seconds, CPU here, CPU there]."""
    if not OTHERS.exists() or not capabilities.have("netns"):
        return {}
    size = sum(path.stat().st_size for path in model.iterdir()) >> 20
    found: dict[str, Sequence[str | Path]] = {}
    for who, module, part in (("ModelExpress", "modelexpress", "nixl_transfer"), ("Mooncake", "mooncake", "engine")):
        test = [str(OTHERS), "-c", f"import {module}.{part}"]
        has = subprocess.run(test, capture_output=True, cwd="/", env=_with_libraries(os.environ)).returncode == 0
        # Mooncake's wheel without CUDA has no transport within a host.
        if has and (who == "ModelExpress" or name == "TCP"):
            script = ROOT / "scripts" / "benchmarks" / f"{module}_pair.py"
            alone = ["unshare", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh"]
            found[who] = [*alone, OTHERS, script, str(size)]
    return found


def _other(name: str, command: Sequence[str | Path], env: Mapping[str, str]) -> list[float]:
    done = subprocess.run(
        [str(word) for word in command],
        env=_with_libraries(env),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    if done.returncode:
        raise RuntimeError(f"{name} failed ({done.returncode}): {done.stdout[-500:]}")
    taken = json.loads(done.stdout.strip().splitlines()[-1])
    print(f"  {name}: {taken[0]:.3f} s, CPU {taken[1]:.2f} + {taken[2]:.2f} s", file=sys.stderr)
    return [float(one) for one in taken]


def _with_libraries(env: Mapping[str, str]) -> dict[str, str]:
    """Mooncake's wheel wants libibverbs and libnuma, which may also lie beside it."""
    return {**env, "LD_LIBRARY_PATH": f"{ROOT}/.bench-venv/lib/shared:{env.get('LD_LIBRARY_PATH', '')}"}


def _rss(pid: int) -> float:
    """Resident memory in MB."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


# -- checkpoints -----------------------------------------------------------------------------------------------------


def _make_large(directory: Path, size: int) -> Path:
    directory.mkdir()
    each = size // FILES // TENSORS
    for number in range(1, FILES + 1):
        names = [f"layer.{number}.{index}.weight" for index in range(TENSORS)]
        write_safetensors(directory / f"model-{number:05d}-of-{FILES:05d}.safetensors", names, each)
    return directory


def _make_many(directory: Path, count: int, size: int) -> Path:
    directory.mkdir()
    write_safetensors(directory / "model.safetensors", [f"model.layer.{index}.weight" for index in range(count)], size)
    return directory


def write_safetensors(path: Path, names: Sequence[str], size: int) -> None:
    table = {
        name: {"dtype": "U8", "shape": [size], "data_offsets": [at * size, (at + 1) * size]}
        for at, name in enumerate(names)
    }
    header = json.dumps(table, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    noise = os.urandom(min(32 << 20, size * len(names)))
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        left = size * len(names)
        while left:
            left -= file.write(noise[: min(left, len(noise))])
