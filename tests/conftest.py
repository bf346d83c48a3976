"""Fixtures. tests/README.md is the short guide; what they give is documented in tests/support.py and tests/rig/."""

from __future__ import annotations

import contextlib
import itertools
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.rig import mounts, servers
from tests.rig.serving import Hosts
from tests.support import Mx, Running, need

HERE = Path(__file__).parent


# --- skips are counted: CI must not turn green by running less ---------------------------------------------------


def _missing(stats: dict[str, list[Any]]) -> dict[str, int]:
    """{capability: tests skipped for it}; another reason counts under its own words."""
    found: dict[str, int] = {}
    for report in stats.get("skipped", []):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        reason = reason.removeprefix("Skipped: ")
        names = reason.removeprefix("missing: ").split(", ") if reason.startswith("missing: ") else [reason]
        for name in names:
            found[name] = found.get(name, 0) + 1
    return found


def _allowed() -> set[str]:
    lines = (HERE / "allowed_skips.txt").read_text().splitlines()
    return {line.split("#")[0].strip() for line in lines} - {""}


def _reporter(config: pytest.Config) -> Any:
    return config.pluginmanager.getplugin("terminalreporter")


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    if hasattr(session.config, "workerinput") or os.environ.get("CI", "").lower() not in ("1", "true"):
        return
    refused = set(_missing(_reporter(session.config).stats)) - _allowed()
    if refused and exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: Any) -> None:
    missing = _missing(terminalreporter.stats)
    allowed = _allowed()
    for name, count in sorted(missing.items()):
        verdict = "" if name in allowed else "  (not in tests/allowed_skips.txt: fails with CI=true)"
        terminalreporter.write_line(f"skipped, missing: {name}: {count}{verdict}")


# --- mx as a process ---------------------------------------------------------------------------------------------


@pytest.fixture
def mx(tmp_path: Path) -> Iterator[Mx]:
    """mx("prefetch", uri, env=…, cwd=…, timeout=60) -> Result; mx.start(…) -> Running; mx.cache, mx.home."""
    runner = Mx(tmp_path / "mx")
    yield runner
    runner.close()


@pytest.fixture
def start_mx(mx: Mx) -> Callable[..., Running]:
    """mx.start."""
    return mx.start


@pytest.fixture
def hosts(mx: Mx, tmp_path: Path) -> Hosts:
    """hosts.serve(directory, "--device", "cpu", host="a") -> Served; hosts("pull", …, host="b") -> Result; hosts.start."""
    return Hosts(mx, tmp_path)


# --- origins -----------------------------------------------------------------------------------------------------


def _place(factory: pytest.TempPathFactory, name: str) -> Path:
    return factory.mktemp(name)


@pytest.fixture(scope="session")
def tls(tmp_path_factory: pytest.TempPathFactory) -> servers.Tls:
    """A private CA and a leaf for localhost, 127.0.0.1, ::1: .ca .cert .key."""
    return servers.make_tls(_place(tmp_path_factory, "tls"))


@pytest.fixture(scope="session")
def _faultd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[servers.Faultd]:
    with servers.faultd(_place(tmp_path_factory, "faultd")) as server:
        yield server


@pytest.fixture
def faultd(_faultd: servers.Faultd) -> servers.Faultd:
    """The HTTP origin with faults, its log and counters empty."""
    _faultd.reset()
    return _faultd


@pytest.fixture
def start_faultd(tmp_path: Path) -> Iterator[Callable[..., servers.Faultd]]:
    """start_faultd(host="::1", tls=tls, hub=directory): one more, for this test alone."""
    with contextlib.ExitStack() as stack:

        def start(**options: Any) -> servers.Faultd:
            return stack.enter_context(servers.faultd(tmp_path, **options))

        yield start


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[servers.Hub]:
    """An empty hub for this test: hub.commit(files) -> sha, hub.move(branch, sha), hub.flags(…), hub.env, hub.uri."""
    with servers.faultd(tmp_path, hub=tmp_path / "hub") as server:
        assert isinstance(server, servers.Hub)
        yield server


@pytest.fixture(scope="session")
def _s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[servers.S3Stub]:
    need("moto")
    with servers.s3stub(_place(tmp_path_factory, "s3")) as stub:
        yield stub


@pytest.fixture
def s3(_s3: servers.S3Stub) -> servers.S3:
    """An empty bucket of moto (without rules), the log empty."""
    bucket = _s3.new_bucket()
    _s3.reset()
    return bucket


@pytest.fixture
def s3stub(tmp_path: Path) -> Iterator[Callable[..., servers.S3Stub]]:
    """s3stub(slow503=6, mutate="shard:1"): moto with rules, for this test alone."""
    need("moto")
    with contextlib.ExitStack() as stack:
        yield lambda **rules: stack.enter_context(servers.s3stub(tmp_path, **rules))


@pytest.fixture(scope="session")
def _hadro(tmp_path_factory: pytest.TempPathFactory) -> Iterator[servers.S3]:
    need("hadro")
    with servers.hadro(_place(tmp_path_factory, "hadro")) as server:
        yield server


@pytest.fixture
def hadro(_hadro: servers.S3) -> servers.S3:
    """An empty bucket of hadro, which checks signatures."""
    return _hadro.new_bucket()


@pytest.fixture(scope="session")
def _rclone_s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[servers.S3]:
    need("rclone")
    with servers.rclone_s3(_place(tmp_path_factory, "rclone")) as server:
        yield server


@pytest.fixture
def rclone_s3(_rclone_s3: servers.S3) -> servers.S3:
    """An empty bucket of `rclone serve s3`, which checks signatures."""
    return _rclone_s3.new_bucket()


@pytest.fixture(scope="session")
def nginx(tmp_path_factory: pytest.TempPathFactory, tls: servers.Tls) -> Iterator[servers.Nginx]:
    """nginx: .root is served at .url and .tls_url; .s3 and .s3_tls are a static S3 (use .new_bucket())."""
    need("nginx")
    with servers.nginx(_place(tmp_path_factory, "nginx"), tls) as server:
        yield server


@pytest.fixture
def nginx_s3(nginx: servers.Nginx) -> servers.S3:
    """An empty bucket of the static S3: fast, anonymous, with an ETag and no checksums."""
    return nginx.s3.new_bucket()


@pytest.fixture(scope="session")
def _gcs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[servers.Gcs]:
    need("fake-gcs-server")
    with servers.fake_gcs(_place(tmp_path_factory, "gcs")) as server:
        yield server


@pytest.fixture
def gcs(_gcs: servers.Gcs) -> servers.Gcs:
    """An empty bucket of fake-gcs-server."""
    return _gcs.new_bucket()


# --- faults and mounts -------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def fault_so(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """tests/rig/fault.c, compiled: put it into LD_PRELOAD."""
    need("gcc")
    target = _place(tmp_path_factory, "fault") / "fault.so"
    source = HERE / "rig" / "fault.c"
    subprocess.run(["gcc", "-O1", "-Wall", "-shared", "-fPIC", "-o", target, source, "-ldl"], check=True)
    return target


@pytest.fixture
def fault_env(fault_so: Path) -> Callable[..., dict[str, str]]:
    """fault_env(directory, KILL_AT=3, FLOCK="NOOP") -> the variables for mx(…, env=…)."""

    def make(directory: Path, **faults: str | int | Path) -> dict[str, str]:
        env = {"LD_PRELOAD": str(fault_so), "MXF_DIR": str(directory)}
        return env | {f"MXF_{name}": str(value) for name, value in faults.items()}

    return make


@pytest.fixture
def tmpfs(tmp_path: Path) -> Iterator[Callable[..., Path]]:
    """tmpfs("8m", nr_inodes=64) -> a fresh file system of that size."""
    need("mount")
    numbers = itertools.count(1)
    with contextlib.ExitStack() as stack:

        def make(size: str = "16m", nr_inodes: int = 0) -> Path:
            return stack.enter_context(mounts.tmpfs(tmp_path / f"tmpfs-{next(numbers)}", size, nr_inodes))

        yield make


@pytest.fixture
def read_only(tmp_path: Path) -> Iterator[Callable[[Path], Path]]:
    """read_only(directory) -> the same files under a read-only mount."""
    need("mount")
    numbers = itertools.count(1)
    with contextlib.ExitStack() as stack:

        def make(directory: Path) -> Path:
            return stack.enter_context(mounts.bind(directory, tmp_path / f"ro-{next(numbers)}", read_only=True))

        yield make


@pytest.fixture
def bindfs_pair(tmp_path: Path) -> Iterator[tuple[Path, Path]]:
    """Two bindfs mounts of one directory: like two nodes, flock is not shared between them."""
    need("bindfs")
    source = tmp_path / "both"
    source.mkdir()
    with mounts.bindfs(source, tmp_path / "node-a") as one, mounts.bindfs(source, tmp_path / "node-b") as two:
        yield one, two


@pytest.fixture
def cifuse(tmp_path: Path) -> Iterator[Callable[..., Path]]:
    """cifuse(name_max=143, HIDE="2", NORENAME="1") -> a mount without links that ignores case."""
    need("fuse")
    numbers = itertools.count(1)
    with contextlib.ExitStack() as stack:

        def make(**options: Any) -> Path:
            number = next(numbers)
            backing, place = tmp_path / f"backing-{number}", tmp_path / f"fuse-{number}"
            return stack.enter_context(mounts.cifuse(backing, place, **options))

        yield make
