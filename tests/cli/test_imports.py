"""X-05: help and the plain commands load nothing heavy, and a package that is missing is named."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.rig import servers
from tests.rig.serving import Hosts
from tests.support import Mx, capability, clean_env, make_checkpoint, tree

HEAVY = [
    "torch",
    "transformers",
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
EXTRA = ("torch", "nixl", "nixl_cu12", "nixl_cu13", "safetensors", "numpy")
"""What only the optional extra [peer] brings."""


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


HELP = [["--help"], ["-h"], ["prefetch", "--help"], ["serve", "--help"], ["pull", "--help"], ["--version"]]


@pytest.mark.parametrize("arguments", HELP, ids=" ".join)
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
from importlib.machinery import PathFinder
class Blind(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in {blocked!r} else super().find_spec(name, path, target)
sys.meta_path[:] = [Blind if finder is PathFinder else finder for finder in sys.meta_path]
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
    # The way through a proxy is what needs urllib3.
    env = {"MX_RETRY_FOR": "1s"} | ({"https_proxy": "http://127.0.0.1:9"} if package == "urllib3" else {})
    result = mx("prefetch", uri, env=without(tmp_path, package) | env)
    assert result.code == 20, result.err
    assert package in result.err
    assert "pip install" in result.err
    assert "Traceback" not in result.err


def test_x05_peers_without_the_extra(mx: Mx, tmp_path: Path) -> None:
    """From disk, to another host's cache and to a directory; whoever looks needs the extra even less."""
    hosts, env = Hosts(mx, tmp_path), without(tmp_path, *EXTRA)
    model = make_checkpoint(tmp_path / "model", shards=2, size=100_000)
    served = hosts.serve(model, "--device", "file", host="a", env=env)
    assert served.ready["paths"] == ["socket"]
    arguments = ["--revision", served.ready["revision"], "--from", "peer"]
    fetched = hosts("prefetch", model, *arguments, "--json", host="b", env=env).ok().json()
    assert fetched["bytes_fetched"] == sum(path.stat().st_size for path in model.rglob("*") if path.is_file())
    hosts("pull", served.content, "--to", tmp_path / "pulled", host="c", env=env).ok()
    assert tree(Path(fetched["dir"])) == tree(tmp_path / "pulled") == tree(model)
    for looking in (
        ["hash", model],
        ["cache", "ls"],
        ["cache", "verify"],
        ["status"],
        ["peers", "--probe"],
        ["doctor"],
    ):
        assert "Traceback" not in hosts(*looking, host="b", env=env).ok().err
    stopped = served.stop()
    assert (stopped.code, "warning" in stopped.err) == (143, False)


def test_x05_memory_is_served_by_sockets_without_nixl_and_says_so(mx: Mx, tmp_path: Path) -> None:
    hosts, env = Hosts(mx, tmp_path), without(tmp_path, *EXTRA)
    model = make_checkpoint(tmp_path / "model", shards=1, size=100_000)
    served = hosts.serve(model, "--device", "cpu", env=env)
    assert served.ready["paths"] == ["socket"]
    warning = served.running.wait_err(r"^warning: .*").group()
    assert "nixl" in warning
    assert "pip install 'mx-cli[peer]'" in warning
    hosts("pull", served.content, "--to", tmp_path / "pulled", env=env).ok()
    assert tree(tmp_path / "pulled") == tree(model)
    wanted = hosts("pull", served.content, "--to", tmp_path / "no", "--path", "nixl-read", env=env).exits(20)
    assert "path nixl-read is wanted, and cannot be had" in wanted.err


def test_x05_a_gpu_without_torch_is_20(mx: Mx, tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path / "model", shards=1, size=100_000)
    refused = mx("serve", model, "--device", "cuda", env=without(tmp_path, *EXTRA)).exits(20)
    assert "the package torch is missing" in refused.err
    assert "mx-cli[peer]" in refused.err


@capability("openssl")
def test_x05_a_certificate_needs_cryptography_or_openssl(mx: Mx, tmp_path: Path) -> None:
    hosts, env = Hosts(mx, tmp_path), without(tmp_path, *EXTRA, "cryptography")
    model = make_checkpoint(tmp_path / "model", shards=1, size=100_000)
    served = hosts.serve(model, env=env)
    hosts("pull", served.content, "--to", tmp_path / "pulled", env=env).ok()
    assert tree(tmp_path / "pulled") == tree(model)
    nothing = hosts("serve", model, env={**env, "PATH": tmp_path / "empty"}).exits(20)
    assert "cryptography" in nothing.err
    assert "mx-cli[peer]" in nothing.err
    assert "--tls-cert" in nothing.err


@pytest.mark.parametrize("call", ["serve({})", "pull('mx1c-' + 32 * '0')", "pull_into({}, 'mx1c-' + 32 * '0')"])
def test_x05_python_without_torch_names_it(mx: Mx, tmp_path: Path, call: str) -> None:
    program = (
        "import json, mx_cli\n"
        f"try:\n    mx_cli.{call}\n"
        "except Exception as error:\n    print(json.dumps([type(error).__name__, str(error), error.hint]))\n"
    )
    env = clean_env(mx.home, mx.cache, without(tmp_path, *EXTRA))
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, timeout=60)
    name, what, hint = json.loads(done.stdout)
    assert (name, "torch" in what, hint) == ("MissingCapability", True, "pip install 'mx-cli[peer]'")
