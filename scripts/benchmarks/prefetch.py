"""mx beside s5cmd and rclone: one server, fresh destinations, page cache; transfer phase, CPU, memory."""

from __future__ import annotations

import json
import os
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from scripts.benchmarks.rows import Row, Run, clean_env, in_turn, median, mx, run
from tests.rig import capabilities
from tests.rig.servers import S3, Gcs, fake_gcs, make_tls, nginx, rclone_s3

FILES = 4
LARGE = 1_000_000_000
SMALL_FILES, SMALL = 3500, 1024
TENSORS = 16


def measure(place: Path, *, scale: float, runs: int) -> list[Row]:
    """All rows. The server is nginx where it is installed, else rclone's."""
    rows: list[Row] = []
    home = place / "home"
    home.mkdir()
    tls = make_tls(place)
    checkpoint = make_large(place / "large", int(LARGE * scale))
    small = make_small(place / "small", max(10, int(SMALL_FILES * scale)))
    if capabilities.program("nginx"):
        with nginx(place, tls, workers=2, log=False) as server:
            for name, s3, bar in (("http", server.s3, 1.5), ("tls", server.s3_tls, 1.1)):
                if name == "http":
                    s3.put_tree("large", checkpoint)
                    s3.put_tree("many", small)
                rows += _large(
                    name, s3, place, runs, bar, {"MX_CA_BUNDLE": str(tls.ca)} if name == "tls" else {}, tls.ca
                )
            rows += _small(server.s3, place, runs)
    else:
        with rclone_s3(place) as server:
            server.put_tree("large", checkpoint)
            rows += _large("http", server, place, runs, 1.5, {}, tls.ca)
    if capabilities.have("fake-gcs-server"):
        with fake_gcs(place) as gcs:
            gcs.put_tree("large", checkpoint)
            rows += _gcs(gcs, place, max(1, runs - 1))
    return rows


def make_large(directory: Path, size: int) -> Path:
    """FILES safetensors of about `size` bytes each; random tensors, so that nothing compresses."""
    directory.mkdir(parents=True)
    noise = os.urandom(32 << 20)
    length = size // TENSORS
    for number in range(1, FILES + 1):
        table = {
            f"layer.{number}.{i}": {"dtype": "U8", "shape": [length], "data_offsets": [i * length, (i + 1) * length]}
            for i in range(TENSORS)
        }
        header = json.dumps(table).encode()
        with open(directory / f"model-{number:05d}-of-{FILES:05d}.safetensors", "wb") as file:
            file.write(struct.pack("<Q", len(header)) + header)
            left = TENSORS * length
            while left:
                left -= file.write(noise[: min(left, len(noise))])
    return directory


def make_small(directory: Path, count: int) -> Path:
    directory.mkdir(parents=True)
    for number in range(count):
        (directory / f"part-{number:05d}.bin").write_bytes(os.urandom(SMALL))
    return directory


class _Jobs:
    """The same download by each tool, into a fresh directory that is removed again."""

    def __init__(self, s3: S3, prefix: str, place: Path, extra: dict[str, str], ca: Path) -> None:
        self.s3, self.prefix, self.place, self.ca = s3, prefix, place, ca
        self.env = clean_env(place / "home", **{**s3.env, **extra, "AWS_REGION": "us-east-1"})

    def fresh(self) -> Path:
        target = self.place / "target"
        shutil.rmtree(target, ignore_errors=True)
        os.sync()
        target.mkdir()
        return target

    def mx(self) -> Run:
        cache = self.fresh()
        return run(
            mx("prefetch", self.s3.uri(self.prefix + "/"), "--cache-dir", cache, "--json", "--progress", "none"),
            self.env,
        )

    def s5cmd(self) -> Run:
        command = ["s5cmd", "--endpoint-url", self.s3.endpoint]
        if self.s3.endpoint.startswith("https"):
            command.append("--no-verify-ssl")
        return run([*command, "cp", f"{self.s3.uri(self.prefix)}/*", f"{self.fresh()}/"], self._with_path())

    def rclone(self) -> Run:
        options = [
            "--s3-provider",
            "Other",
            "--s3-endpoint",
            self.s3.endpoint,
            "--s3-env-auth",
            "--config",
            "/dev/null",
        ]
        if self.s3.endpoint.startswith("https"):
            options.append("--no-check-certificate")
        source = f":s3:{self.s3.uri(self.prefix).removeprefix('s3://')}"
        return run(["rclone", "copy", *options, source, self.fresh()], self._with_path())

    def _with_path(self) -> dict[str, str]:
        return {**self.env, "PATH": f"{Path(sys.executable).parent}:{self.env.get('PATH', '')}"}


def _phase(name: str) -> Callable[[Run], float]:
    return lambda one: float(json.loads(one.out)["seconds"][name])


def _large(name: str, s3: S3, place: Path, runs: int, bar: float, extra: dict[str, str], ca: Path) -> list[Row]:
    jobs = _Jobs(s3, "large", place, extra, ca)
    size = sum(path.stat().st_size for path in (place / "large").iterdir())
    found = in_turn(runs, {"mx": jobs.mx, "s5cmd": jobs.s5cmd, "rclone": jobs.rclone})
    ours = found["mx"]
    speed = {tool: size / 1e6 / median(rounds, lambda one: one.wall) for tool, rounds in found.items()}
    cpu = {tool: median(rounds, lambda one: one.cpu) / size * 1e9 for tool, rounds in found.items()}
    transfer = size / 1e6 / median(ours, _phase("transfer"))
    rows = [
        Row(f"{name} transfer", transfer, "MB/s", "s5cmd", transfer / speed["s5cmd"], bar),
        Row(
            f"{name} transfer", transfer, "MB/s", "rclone", transfer / speed["rclone"], 1.0 if name == "http" else None
        ),
        Row(f"{name} whole command", speed["mx"], "MB/s", "s5cmd", speed["mx"] / speed["s5cmd"]),
        Row(f"{name} CPU", cpu["mx"], "s/GB", "s5cmd", cpu["mx"] / cpu["s5cmd"], 0.8 if name == "http" else None, True),
        Row(f"{name} CPU", cpu["mx"], "s/GB", "rclone", cpu["mx"] / cpu["rclone"]),
        Row(f"{name} peak RSS", max(one.rss for one in ours), "MB", None, None, 200.0, True),
    ]
    for phase in ("resolve", "verify", "publish"):
        rows.append(Row(f"{name} {phase}", median(ours, _phase(phase)), "s"))
    rows.append(
        Row(f"{name} fsync, beside the rest", median(ours, lambda one: json.loads(one.out)["fsync_seconds"]), "s")
    )
    starting = median(ours, lambda one: one.wall - sum(json.loads(one.out)["seconds"].values()))
    return [*rows, Row(f"{name} start-up and the rest", starting, "s")]


def _small(s3: S3, place: Path, runs: int) -> list[Row]:
    jobs = _Jobs(s3, "many", place, {}, place)
    count = len(list((place / "small").iterdir()))
    found = in_turn(runs, {"mx": jobs.mx, "s5cmd": jobs.s5cmd, "rclone": jobs.rclone})
    ours = count / median(found["mx"], _phase("transfer"))
    theirs = {tool: count / median(found[tool], lambda one: one.wall) for tool in ("s5cmd", "rclone")}
    whole = count / median(found["mx"], lambda one: one.wall)
    return [
        Row("small files transfer", ours, "files/s", "s5cmd", ours / theirs["s5cmd"], 1.0),
        Row("small files transfer", ours, "files/s", "rclone", ours / theirs["rclone"]),
        Row("small files whole command", whole, "files/s", "s5cmd", whole / theirs["s5cmd"]),
        Row("small files verify", median(found["mx"], _phase("verify")), "s"),
        Row("small files publish", median(found["mx"], _phase("publish")), "s"),
    ]


GCSFS = """
import os, sys
os.environ["GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT"] = "false"
import gcsfs
gcsfs.GCSFileSystem(token="anon", endpoint_url=sys.argv[1]).get(sys.argv[2], sys.argv[3], recursive=True)
"""


def _gcs(gcs: Gcs, place: Path, runs: int) -> list[Row]:
    size = sum(path.stat().st_size for path in (place / "large").iterdir())
    env = clean_env(place / "home", **gcs.env)
    jobs = _Jobs.__new__(_Jobs)
    jobs.place = place

    def ours() -> Run:
        return run(mx("prefetch", gcs.uri("large/"), "--cache-dir", jobs.fresh(), "--json", "--progress", "none"), env)

    def theirs() -> Run:
        target = jobs.fresh()
        return run([sys.executable, "-c", GCSFS, gcs.env["STORAGE_EMULATOR_HOST"], gcs.uri("large/"), target], env)

    try:
        found = in_turn(runs, {"mx": ours, "gcsfs": theirs})
    except subprocess.CalledProcessError as error:
        if "No module named" in error.stderr:
            return [Row("gs transfer (gcsfs is not installed)", 0.0, "MB/s")]
        raise
    transfer = size / 1e6 / median(found["mx"], _phase("transfer"))
    peer = size / 1e6 / median(found["gcsfs"], lambda one: one.wall)
    return [Row("gs transfer", transfer, "MB/s", "gcsfs", transfer / peer, 2.0)]
