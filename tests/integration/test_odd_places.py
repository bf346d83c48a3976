"""Places that are not like the others: case and length of names, readers without rights, copies of caches, holes of zeros."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.integration.cache_tools import model_dir
from tests.rig import cachecheck
from tests.rig.servers import Faultd, Hub
from tests.support import MIB, Mx, capability, checkpoint_files, safetensors_bytes, tree

FILES = checkpoint_files(size=MIB)
LONG = "n" * 200 + ".json"
Mount = Callable[..., Path]


OTHER = ("setpriv", "--reuid", "1000", "--regid", "1000", "--clear-groups")
"""Runs mx as somebody who may do what modes say, and no more."""


@pytest.fixture
def public() -> Iterator[Path]:
    """A directory that everybody may look into; pytest's own are its user's alone."""
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        place.chmod(0o755)
        yield place


# --- names -----------------------------------------------------------------------------------------------------------


@capability("fuse")
def test_names_that_differ_in_case_where_they_are_delivered(mx: Mx, hub: Hub, cifuse: Mount) -> None:
    """P-51: the cache can tell them apart, and --to cannot."""
    both = FILES | {"Config.json": b'{"other": 1}'}
    hub.commit(both)
    to = cifuse() / "model"
    for _ in range(2):
        result = mx("prefetch", hub.uri, "--to", to, env=hub.env).exits(21)
        assert "'Config.json' and 'config.json'" in result.err
        assert not to.exists()
        assert not hub.bytes_served("model-0")
        hub.reset()
    mx("prefetch", hub.uri, env=hub.env).ok()
    mx("prefetch", hub.uri, "--offline", "--to", to, env=hub.env).exits(21)
    mx("prefetch", hub.uri, "--offline", "--to", to, "--exclude", "Config.json", env=hub.env).ok()
    assert tree(to) == cachecheck.sums(FILES)


@capability("fuse")
@pytest.mark.parametrize("where", ["cache", "to"])
def test_a_name_that_is_too_long_for_a_volume_is_refused_before_the_download(
    mx: Mx, hub: Hub, cifuse: Mount, where: str
) -> None:
    hub.commit(FILES | {LONG: b"{}"})
    place = cifuse(name_max=143) / where
    result = mx("prefetch", hub.uri, f"--{where}".replace("--cache", "--cache-dir"), place, env=hub.env).exits(21)
    assert LONG in result.err
    assert "--exclude" in result.err
    assert not hub.bytes_served("model-0")


@capability("fuse")
def test_branches_and_pins_that_differ_in_case(mx: Mx, hub: Hub, cifuse: Mount) -> None:
    """What a cache remembers of `Main` is not said of `main` where file names do not tell them apart."""
    cache = {"MX_CACHE_DIR": str(cifuse() / "cache")}
    env = hub.env | cache
    lower = hub.commit(FILES)
    upper = hub.commit(FILES | {"config.json": b'{"other": 1}'}, branch="Main")
    for branch, pin in (("main", "prod"), ("Main", "Prod")):
        mx("prefetch", f"{hub.uri}@{branch}", "--pin", pin, env=env).ok()
    for branch, sha in (("main", lower), ("Main", upper)):
        assert mx("prefetch", f"{hub.uri}@{branch}", "--offline", env=env).ok().out.strip().endswith(sha)
    pins = {row["revision"]: row["pins"] for row in mx("cache", "ls", "--json", env=cache).ok().json()["snapshots"]}
    assert pins == {lower: ["prod"], upper: ["Prod"]}
    mx("cache", "unpin", "Prod", env=cache).ok()
    mx("cache", "unpin", "prod", env=cache).ok()


def test_a_branch_with_capitals_that_an_earlier_mx_wrote_down(mx: Mx, hub: Hub) -> None:
    sha = hub.commit(FILES, branch="Main")
    mx("prefetch", f"{hub.uri}@Main", env=hub.env).ok()
    (ref,) = model_dir(mx.cache).glob("refs/*.json")
    ref.rename(ref.with_name("Main.json"))
    assert mx("prefetch", f"{hub.uri}@Main", "--offline", env=hub.env).ok().out.strip().endswith(sha)


# --- other users -----------------------------------------------------------------------------------------------------


@capability("root", "setpriv")
def test_who_may_not_write_follows_a_leader(mx: Mx, faultd: Faultd, public: Path) -> None:
    """P-54: a pod with the volume read-only starts while another one fills it."""
    env = {"MX_CACHE_DIR": str(public / "cache")}
    url = faultd.file("slow=2000000", 4 * MIB, "x.bin")
    leader = mx.start("prefetch", url, env=env)
    leader.wait_err("leading term 1")
    result = mx("prefetch", url, "--json", env=env, prefix=OTHER, cwd=public).ok()
    assert result.json()["role"] == "follower"
    leader.wait().ok()
    assert faultd.bytes_served() == 4 * MIB
    alone = mx("prefetch", faultd.file("", 1000, "y.bin"), env=env, prefix=OTHER, cwd=public).exits(21)
    assert "y.bin" in alone.err or "models" in alone.err


@capability("root", "setpriv")
def test_who_may_not_write_is_refused_when_the_leader_dies(mx: Mx, faultd: Faultd, public: Path) -> None:
    env = {"MX_CACHE_DIR": str(public / "cache")}
    url = faultd.file("slow=1000000", 8 * MIB, "x.bin")
    leader = mx.start("prefetch", url, env=env)
    leader.wait_err("leading term 1")
    follower = mx.start("prefetch", url, env=env, prefix=OTHER, cwd=public)
    follower.wait_err("following")
    leader.kill()
    result = follower.wait(30).exits(21)
    assert "not in the cache: x.bin" in result.err


@capability("root", "setpriv")
def test_files_that_the_reader_may_not_read_are_no_hit(mx: Mx, hub: Hub, public: Path) -> None:
    """P-47: exit code 0 and a directory that the engine cannot open helps nobody."""
    env = {"MX_CACHE_DIR": str(public / "cache")}
    hub.commit(FILES)
    directory = Path(mx("prefetch", hub.uri, env=hub.env | env).ok().out.strip())
    for path in directory.glob("*.safetensors"):
        path.chmod(0o600)
    result = mx("prefetch", hub.uri, "--offline", env=hub.env | env, prefix=OTHER, cwd=public).exits(10)
    assert "model-00001-of-00002.safetensors" in result.err
    assert "unreadable" in mx("cache", "ls", env=env, prefix=OTHER, cwd=public).ok().out
    mx("prefetch", hub.uri, "--offline", env=hub.env | env).ok()


# --- caches that were copied, moved, damaged -------------------------------------------------------------------------


def test_zeros_that_a_copy_left_out_are_no_damage(mx: Mx, hub: Hub, tmp_path: Path) -> None:
    """P-57: ZFS writes no blocks of zeros either; such a model would be fetched again each time."""
    zeros = safetensors_bytes({"w": ("BF16", (1024, 512), bytes(MIB))})
    hub.commit({"config.json": b"{}", "model.safetensors": zeros})
    mx("prefetch", hub.uri, env=hub.env).ok()
    copy = {"MX_CACHE_DIR": str(tmp_path / "copy")}
    subprocess.run(["cp", "-r", "--sparse=always", mx.cache, copy["MX_CACHE_DIR"]], check=True, timeout=20)
    (file,) = Path(copy["MX_CACHE_DIR"]).rglob("model.safetensors")
    assert file.stat().st_blocks * 512 < MIB // 2, "the copy has holes"
    assert mx("prefetch", hub.uri, "--json", env=hub.env | copy).ok().json()["role"] == "hit"
    assert [row["state"] for row in mx("cache", "ls", "--json", env=copy).ok().json()["snapshots"]] == ["complete"]
    with open(file, "r+b") as other:
        other.write(bytes(4096))
    again = mx("prefetch", hub.uri, "--json", env=hub.env | copy).ok().json()
    assert again["bytes_fetched"] == len(zeros), "with holes and other bytes it is damaged"


def test_the_uri_of_a_model_is_lost(mx: Mx, hub: Hub) -> None:
    """A file that a power cut emptied: nothing goes out of sight of ls, du, gc and rm."""
    hub.commit(FILES)
    mx("prefetch", hub.uri, env=hub.env).ok()
    origin = model_dir(mx.cache) / "origin.json"
    for content in (b"", b"[]", b'{"uri": 3}'):
        origin.write_bytes(content)
        assert [row["uri"] for row in mx("cache", "ls", "--json").ok().json()["snapshots"]] == [hub.uri]
    origin.write_bytes(b"")
    mx("prefetch", hub.uri, "--all", env=hub.env).ok()
    hub.commit(FILES | {"new.json": b"{}"})
    mx("prefetch", hub.uri, env=hub.env).ok()
    assert json.loads(origin.read_bytes())["uri"] == hub.uri


def test_a_copy_of_a_models_directory_is_not_meant_by_its_uri(mx: Mx, hub: Hub) -> None:
    hub.commit(FILES)
    mx("prefetch", hub.uri, env=hub.env).ok()
    own = model_dir(mx.cache)
    copy = own.with_name(f"A-{own.name}")
    shutil.copytree(own, copy)
    mx("cache", "rm", hub.uri, "--yes").ok()
    assert not list(own.glob("snapshots/*/*.safetensors"))
    assert list(copy.glob("snapshots/*/*.safetensors"))


# --- memory and signals ----------------------------------------------------------------------------------------------


@capability("mount")
def test_a_stop_and_go_while_blocks_are_reserved(mx: Mx, tmpfs: Mount, faultd: Faultd) -> None:
    """tmpfs breaks a reservation off when a signal comes."""
    run = mx.start("prefetch", faultd.file("", 200 * MIB, "x.bin"), env={"MX_CACHE_DIR": str(tmpfs("256m"))})
    run.wait_err("leading term 1")
    while run.process.poll() is None:
        run.send(signal.SIGSTOP)
        run.send(signal.SIGCONT)
        try:
            run.process.wait(0.005)
        except subprocess.TimeoutExpired:
            continue
    run.wait().ok()


@pytest.mark.parametrize("number", ["EPERM", "EBUSY"])
def test_blocks_that_cannot_be_reserved(
    mx: Mx, hub: Hub, fault_env: Callable[..., dict[str, str]], number: str
) -> None:
    """Whatever keeps fallocate from working, a seccomp profile for one, writing decides."""
    hub.commit(FILES)
    directory = mx("prefetch", hub.uri, env=hub.env | fault_env(mx.cache, FALLOC=number)).ok().out.strip()
    assert tree(Path(directory)) == cachecheck.sums(FILES)


# --- options that get in each other's way ----------------------------------------------------------------------------


@pytest.mark.parametrize("option", ["--link", "--result"])
@pytest.mark.parametrize("name", ["config.json", "sub"])
def test_what_has_the_name_of_a_file_in_to_is_refused(mx: Mx, hub: Hub, tmp_path: Path, option: str, name: str) -> None:
    hub.commit(FILES | {"sub/more.json": b"{}"})
    to = tmp_path / "model"
    result = mx("prefetch", hub.uri, "--to", to, option, to / name, env=hub.env).exits(2)
    assert option in result.err
    assert not hub.bytes_served("model-0")
    mx("prefetch", hub.uri, "--to", to, option, to / "other", env=hub.env).ok()
    assert tree(to).keys() - {"other"} == (FILES | {"sub/more.json": b""}).keys()


def test_one_path_spelt_in_two_ways(mx: Mx, hub: Hub, tmp_path: Path) -> None:
    hub.commit(FILES)
    (tmp_path / "here").symlink_to(tmp_path)
    for other in (tmp_path / "model" / ".." / "model", tmp_path / "here" / "model"):
        words = ("prefetch", hub.uri, "--to", tmp_path / "model", "--link", other)
        assert "same path" in mx(*words, env=hub.env).exits(2).err
    assert not hub.log()


def test_what_is_no_program_is_found_before_the_download(mx: Mx, hub: Hub, tmp_path: Path) -> None:
    hub.commit(FILES)
    mx("prefetch", hub.uri, "--", tmp_path, env=hub.env).exits(2)
    assert not hub.bytes_served("model-0")
    script = tmp_path / "script"
    script.write_text("#!/no/such/interpreter\n")
    script.chmod(0o755)
    assert "interpreter" in mx("prefetch", hub.uri, "--", script, env=hub.env).exits(2).err


@pytest.mark.parametrize("option", ["--cache-dir", "--to", "--link", "--result"])
def test_a_uri_is_no_place(mx: Mx, hub: Hub, tmp_path: Path, option: str) -> None:
    """A directory `s3:` below the current one would take it."""
    hub.commit(FILES)
    result = mx("prefetch", hub.uri, option, "s3://bucket/place", env=hub.env, cwd=tmp_path).exits(2)
    assert "s3://bucket/place" in result.err
    assert not (tmp_path / "s3:").exists()
