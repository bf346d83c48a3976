"""X-05: help and the plain commands load nothing heavy, and a package that is missing is named."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.rig import servers
from tests.support import Mx, clean_env, make_checkpoint

HEAVY = [
    "torch",
    "nixl",
    "rich",
    "fsspec",
    "s3fs",
    "gcsfs",
    "filelock",
    "asyncio",
    "pydantic",
    "botocore",
    "urllib3",
    "xxhash",
    "google",
    "requests",
    "awscrt",
    "numpy",
    "http.client",
    "ssl",
]
PEERS = {"torch", "nixl", "safetensors", "vllm"}


def loaded(mx: Mx, *arguments: str | Path, env: dict[str, str] | None = None) -> set[str]:
    """The modules that a run of mx loads, by Python's own account."""
    process = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "mx_cli", *map(str, arguments)],
        env=clean_env(mx.home, mx.cache, env),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert process.returncode == 0, process.stderr[-2000:]
    lines = [line for line in process.stderr.splitlines() if line.startswith("import time:")]
    return {line.rpartition("|")[2].strip() for line in lines}


def heavy(modules: set[str], names: list[str] | set[str]) -> set[str]:
    return {module for module in modules for name in names if module == name or module.startswith(name + ".")}


@pytest.mark.parametrize("arguments", [["--help"], ["-h"], ["prefetch", "--help"], ["--version"]], ids=" ".join)
def test_x05_help_is_light(mx: Mx, arguments: list[str]) -> None:
    modules = loaded(mx, *arguments)
    assert "mx_cli.cli.app" in modules
    assert heavy(modules, HEAVY) == set()


@pytest.mark.parametrize("arguments", [["config"], ["status"], ["peers"], ["cache", "ls"]], ids=" ".join)
def test_x05_looking_is_light(mx: Mx, arguments: list[str]) -> None:
    unloved = set(HEAVY) - {"xxhash"}
    assert heavy(loaded(mx, *arguments), unloved) == set()


def test_x05_hash_needs_no_network(mx: Mx, tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path / "model", shards=1, size=10_000)
    assert heavy(loaded(mx, "hash", model), set(HEAVY) - {"xxhash"}) == set()


def test_x05_prefetch_loads_what_its_origin_needs(
    mx: Mx, faultd: servers.Faultd, tmp_path: Path, s3: servers.S3
) -> None:
    make_checkpoint(tmp_path / "model", shards=1, size=10_000)
    assert (
        heavy(loaded(mx, "prefetch", tmp_path / "model"), PEERS | {"rich", "botocore", "google", "requests"}) == set()
    )
    assert heavy(loaded(mx, "prefetch", faultd.file("ok", 9, "x")), PEERS | {"rich", "botocore", "google"}) == set()
    s3.put("m/x.bin", b"x")
    assert heavy(loaded(mx, "prefetch", s3.uri("m"), env=s3.env), PEERS | {"rich", "google", "s3fs", "fsspec"}) == set()


BLOCKER = """
import sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {blocked!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Blocker())
"""


def without(tmp_path: Path, *names: str) -> dict[str, str]:
    """Variables with which Python doesn't find these packages."""
    place = tmp_path / "blocked"
    place.mkdir(exist_ok=True)
    (place / "sitecustomize.py").write_text(BLOCKER.format(blocked=set(names)))
    root = clean_env(tmp_path, tmp_path)["PYTHONPATH"]
    return {"PYTHONPATH": f"{place}:{root}"}


def test_x05_without_packages_for_gpus(mx: Mx, faultd: servers.Faultd, tmp_path: Path) -> None:
    env = without(tmp_path, "torch", "nixl", "safetensors", "numpy", "rich", "botocore", "google", "requests", "awscrt")
    directory = make_checkpoint(tmp_path / "model", shards=2, size=100_000)
    for arguments in (["--help"], ["prefetch", directory], ["prefetch", f"file://{directory}", "--all"]):
        assert "Traceback" not in mx(*arguments, env=env).ok().err
    mx("prefetch", faultd.file("ok", 1000, "x"), env=env).ok()


@pytest.mark.parametrize(
    ("package", "uri"),
    [("urllib3", "https://127.0.0.1:9/x"), ("botocore", "s3://bucket/key"), ("google", "gs://bucket/key")],
)
def test_x05_a_missing_package_is_named(mx: Mx, tmp_path: Path, package: str, uri: str) -> None:
    result = mx("prefetch", uri, env=without(tmp_path, package) | {"MX_RETRY_FOR": "1s"})
    assert result.code == 20, result.err
    assert package in result.err
    assert "pip install" in result.err
    assert "Traceback" not in result.err
