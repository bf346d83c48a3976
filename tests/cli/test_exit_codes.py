"""X-03: each class of outcome has its own exit code, and says whether to run the command again."""

from __future__ import annotations

import os
import signal
import subprocess
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest

from mx_cli.base import errors
from tests.rig import servers
from tests.support import MIB, Mx, Result, capability, make_checkpoint

RETRY = {0: None, 12: True, 13: True, 18: True, 19: True, 124: True, 130: True, 143: True}
TABLE = {0, 1, 2, 3, 10, 11, 12, 13, 15, 16, 17, 18, 19, 20, 21, 124, 130}


def ends(result: Result, code: int, name: str) -> Result:
    """The run ended in this class, on stderr and in its JSON."""
    result.exits(code)
    error = result.json()["error"]
    assert (error["code"], error["name"]) == (code, name)
    assert error["retryable"] is bool(RETRY.get(code))
    assert "Traceback" not in result.err
    assert "mx: error: " in result.err
    return result


def test_x03_the_table_is_one_code_a_class() -> None:
    codes = [cls.code for cls in errors.CLASSES]
    assert sorted({*codes, 0}) == sorted(TABLE)
    assert len(codes) == len(set(codes))
    assert len({cls.name for cls in errors.CLASSES}) == len(errors.CLASSES)
    shown = [row[0] for row in errors.exit_codes()]
    assert shown == [*(str(code) for code in sorted(TABLE - {130})), "130, 143, 129"]


def test_a_traceback_of_python_shows_the_hint() -> None:
    shown = traceback.format_exception(errors.NotFound("no such thing", hint="look elsewhere"))
    assert shown[-2:] == ["mx_cli.base.errors.NotFound: no such thing\n", "hint: look elsewhere\n"]


def test_x03_a_limit_of_sizes_is_no_full_disk(mx: Mx, faultd: servers.Faultd) -> None:
    limited = ("sh", "-c", 'ulimit -f 100; exec "$@"', "sh")
    result = mx.start("prefetch", faultd.file("ok", MIB, "x.bin"), "--json", prefix=limited).wait()
    assert "ulimit -f" in ends(result, 15, "no-space").json()["error"]["hint"]


def test_x03_the_help_shows_the_table(mx: Mx) -> None:
    text = " ".join(mx("--help").ok().out.split())
    for code, meaning, _ in errors.exit_codes():
        assert f"{code} {meaning.replace('`', '')}" in text


def test_x03_0(mx: Mx, faultd: servers.Faultd) -> None:
    assert "error" not in mx("prefetch", faultd.file("ok", 9, "x"), "--json").ok().json()


@pytest.mark.parametrize(
    "arguments",
    [
        ["prefetch"],
        ["prefetch", "--nope", "x"],
        ["nope"],
        ["prefetch", "ftp://x/y"],
        ["prefetch", "x", "--ttl", "soon"],
        ["prefetch", "x", "--progress", "loud"],
        ["prefetch", "x", "--max-connections", "many"],
        ["prefetch", "x", "--max-connections", "0"],
        ["prefetch", "x", "--range-size", "0"],
        ["prefetch", ""],
        ["config", "--config", "/nope.toml"],
    ],
    ids=" ".join,
)
def test_x03_2_usage(mx: Mx, arguments: list[str]) -> None:
    ends(mx(*arguments, "--json"), 2, "usage")


def test_x03_3_warnings(mx: Mx, faultd: servers.Faultd) -> None:
    result = mx("prefetch", faultd.file("nolen", 9, "x"), "--strict").exits(3)
    assert "--strict" in result.err
    assert mx("config", "--strict", env={"MX_CACHE_DIRR": "x"}).exits(3).err.startswith("warning: MX_CACHE_DIRR ")


def test_x03_10_not_found(mx: Mx, faultd: servers.Faultd, hub: servers.Hub) -> None:
    ends(mx("prefetch", f"{faultd.url}/nope", "--json"), 10, "not-found")
    ends(mx("prefetch", "/nope", "--json"), 10, "not-found")
    ends(mx("prefetch", "org/nope", "--offline", "--json"), 10, "not-found")
    ends(mx("prefetch", f"{hub.uri}@nope", "--json", env=hub.env), 10, "not-found")
    by_option = ends(mx("prefetch", hub.uri, "--revision", "v9", "--json", env=hub.env), 10, "not-found")
    assert f"{hub.uri} at v9: " in by_option.err


def test_x03_11_access_denied(mx: Mx, faultd: servers.Faultd) -> None:
    ends(mx("prefetch", faultd.file("auth=x", 9, "x"), "--json"), 11, "access-denied")


def test_x03_12_unreachable(mx: Mx, faultd: servers.Faultd) -> None:
    ends(mx("prefetch", faultd.file("fail=503:99", 9, "x"), "--retry-for", "1s", "--json"), 12, "unreachable")


def test_x03_13_wait_expired(mx: Mx, faultd: servers.Faultd) -> None:
    url = faultd.file("slow=400000", 8 * MIB, "x")
    mx.start("prefetch", url).wait_err("^leading")
    ends(mx("prefetch", url, "--wait", "1s", "--json"), 13, "wait-expired")


@capability("mount")
def test_x03_15_no_space(mx: Mx, faultd: servers.Faultd, tmpfs: Callable[..., Path]) -> None:
    url = faultd.file("ok", 20 * MIB, "x")
    ends(mx("prefetch", url, "--cache-dir", tmpfs("8m") / "cache", "--json"), 15, "no-space")


def test_x03_16_integrity(mx: Mx, faultd: servers.Faultd) -> None:
    ends(mx("prefetch", faultd.file("html", 9, "x"), "--json"), 16, "integrity")
    ends(mx("prefetch", faultd.file("over=5", 9, "x"), "--json"), 16, "integrity")


def test_x03_17_incompatible(mx: Mx, tmp_path: Path) -> None:
    one = make_checkpoint(tmp_path / "one", shards=1, size=10_000, seed="one")
    two = make_checkpoint(tmp_path / "two", shards=1, size=10_000, seed="two")
    mx("hash", one, "--diff", two).exits(17)
    mx("hash", one, "--diff", one).exits(0)


@capability("root")
def test_x03_21_filesystem(mx: Mx, faultd: servers.Faultd, tmp_path: Path) -> None:
    place = tmp_path / "closed"
    place.mkdir(mode=0o755)
    for path in (tmp_path, *tmp_path.parents):
        if path.stat().st_uid == os.getuid() and path != Path("/"):
            path.chmod(path.stat().st_mode | 0o055)
    prefix = ("setpriv", "--reuid", "1000", "--regid", "1000", "--clear-groups")
    url = faultd.file("ok", 9, "x")
    result = mx("prefetch", url, "--cache-dir", place / "cache", "--json", cwd=Path("/"), prefix=prefix)
    if "No module named" in result.err or "Permission denied: " in result.err.partition("mx: error")[0]:
        pytest.skip("missing: readable tree")
    ends(result, 21, "filesystem")
    assert "uid 1000" in result.err
    assert not [entry for entry in faultd.log() if entry["m"] == "GET"]


def test_x03_21_a_file_in_the_way(mx: Mx, faultd: servers.Faultd, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    result = mx("prefetch", faultd.file("ok", 9, "x"), "--cache-dir", tmp_path / "file", "--json")
    ends(result, 21, "filesystem")


def test_x03_124_timeout(mx: Mx, faultd: servers.Faultd) -> None:
    url = faultd.file("slow=400000", 8 * MIB, "x")
    result = ends(mx("prefetch", url, "--timeout", "1500ms", "--json"), 124, "timeout")
    assert result.seconds < 20


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_x03_130_143_signals(mx: Mx, faultd: servers.Faultd, signum: signal.Signals, code: int) -> None:
    run = mx.start("prefetch", faultd.file("slow=400000", 8 * MIB, "x"), "--json")
    run.wait_err("^leading")
    run.send(signum)
    ends(run.wait(), code, "interrupted")


@pytest.mark.parametrize("flags", ["failget=404:9,slow=300000", "over=4096,slow=300000"])
def test_x03_a_follower_takes_its_leaders_code(mx: Mx, faultd: servers.Faultd, flags: str) -> None:
    url = faultd.file(flags, 2 * MIB, "x")
    leader = mx.start("prefetch", url, prefix=("setsid", "-w"))
    leader.wait_err("^leading")
    follower = mx("prefetch", url, "--json")
    code = leader.wait().code
    assert code in (10, 16)
    follower.exits(code)
    if "following" in follower.err:
        assert follower.json()["error"]["via"] in ("leader", "")


def test_x03_the_command_that_follows_decides_then(mx: Mx, faultd: servers.Faultd) -> None:
    url = faultd.file("ok", 9, "x")
    mx("prefetch", url, "--", "sh", "-c", "exit 7").exits(7)
    result = mx("prefetch", url, "--", "sh", "-c", 'echo "$MX_DIR {}"; ls "$0"', "{}").ok()
    first, second = result.out.splitlines()
    assert first.split()[0] == first.split()[1]
    assert second == "x"
    ends(mx("prefetch", url, "--json", "--", "/no/such/program"), 2, "usage")


def test_x03_a_script_can_rely_on_empty_stdout(mx: Mx, faultd: servers.Faultd) -> None:
    for url in (faultd.file("html", 9, "x"), f"{faultd.url}/nope"):
        script = f'DIR=$("{os.sys.executable}" -m mx_cli prefetch "{url}") && echo "dir $DIR" || echo "code $?"'  # type: ignore[attr-defined]
        env = {
            "MX_CACHE_DIR": str(mx.cache),
            "HOME": str(mx.home),
            "PATH": os.environ["PATH"],
            "PYTHONPATH": os.getcwd(),
        }
        done = subprocess.run(["sh", "-c", script], capture_output=True, text=True, env=env, timeout=60, check=True)
        assert done.stdout.startswith("code 1")
