"""Where a cache may stand: owners and modes, small and read-only volumes, links, case, memory (P-47 to P-52, P-54, P-56 to P-58, P-61)."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import stat
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.rig import cachecheck, limits, servers
from tests.support import MIB, Mx, capability, checkpoint_files, need, noise, tree

Faults = Callable[..., dict[str, str]]
FILES = checkpoint_files(shards=3, size=3 * MIB)


def user(uid: int, gid: int, umask: str = "0022") -> tuple[str, ...]:
    """Runs mx as somebody who may read everything (the interpreter is root's), and write only what is his."""
    read = ("--inh-caps", "+dac_read_search", "--ambient-caps", "+dac_read_search")
    who = ("setpriv", "--reuid", str(uid), "--regid", str(gid), "--clear-groups", *read)
    return (*who, "sh", "-c", f'umask {umask}; exec "$@"', "sh")


def modes(root: Path) -> set[str]:
    """Each kind and mode below the root."""
    found = set()
    for path in root.rglob("*"):
        info = path.lstat()
        found.add(("d" if stat.S_ISDIR(info.st_mode) else "f") + f"{stat.S_IMODE(info.st_mode):04o}")
    return found


@pytest.fixture
def volume(tmp_path: Path) -> Path:
    """As Kubernetes gives it with fsGroup 3000: root:3000, group-writable, setgid."""
    place = tmp_path / "volume"
    place.mkdir()
    os.chown(place, 0, 3000)
    place.chmod(0o2775)
    return place


# --- P-47, P-48: owners and modes ------------------------------------------------------------------------------------


@capability("root", "setpriv")
@pytest.mark.parametrize("umask", ["0002", "0022", "0077"])
@pytest.mark.parametrize("inside", ["", "cache"])
def test_a_volume_for_a_group(umask: str, inside: str, volume: Path, mx: Mx, hub: servers.Hub) -> None:
    """P-47 umask-0600: all is group-writable, with the group and setgid kept, whatever the umask."""
    hub.commit(FILES)
    env = hub.env | {"MX_CACHE_DIR": str(volume / inside), "HOME": "/nonexistent"}
    mx("prefetch", hub.uri, env=env, prefix=user(1000, 3000, umask)).ok()
    others = {"0002": "4", "0022": "4", "0077": "0"}[umask]
    directories = {"4": "5", "0": "0"}[others]
    assert modes(volume) == {f"d277{directories}", f"f066{others}"}
    assert {path.stat().st_gid for path in volume.rglob("*")} == {3000}
    # Another user of the group goes on with it.
    more = FILES | {"extra.json": b"{}"}
    hub.commit(more)
    result = mx("prefetch", hub.uri, "--all", env=env, prefix=user(2000, 3000, umask)).ok()
    assert tree(Path(result.out.strip())) == cachecheck.sums(more)


@capability("root", "setpriv")
def test_another_user_of_the_group_goes_on(volume: Path, mx: Mx, hub: servers.Hub) -> None:
    """Where the first one was killed."""
    files = checkpoint_files(shards=2, size=16 * MIB)
    hub.commit(files)
    hub.flags("slow=3000000")
    env = hub.env | {"MX_CACHE_DIR": str(volume), "MX_PROGRESS_EVERY": "0.1s"}
    running = mx.start("prefetch", hub.uri, env=env, prefix=user(1000, 3000))
    running.wait_err("transfer +[4-8][0-9] %", 40)
    running.kill()
    hub.flags("ok")
    result = mx("prefetch", hub.uri, "--json", env=env, prefix=user(2000, 3000)).ok().json()
    assert tree(Path(result["dir"])) == cachecheck.sums(files)
    assert result["bytes_fetched"] < 0.8 * result["bytes_total"]


@capability("root", "setpriv")
@pytest.mark.parametrize(("umask", "expected"), [("0022", {"d0755", "f0644"}), ("0027", {"d0750", "f0640"})])
def test_elsewhere_the_umask_rules(umask: str, expected: set[str], tmp_path: Path, mx: Mx, hub: servers.Hub) -> None:
    hub.commit(FILES)
    place = tmp_path / "own"
    place.mkdir(mode=0o755)
    os.chown(place, 1000, 1000)
    mx("prefetch", hub.uri, env=hub.env | {"MX_CACHE_DIR": str(place)}, prefix=user(1000, 1000, umask)).ok()
    assert modes(place) == expected


@capability("root", "setpriv")
def test_the_command_gets_the_umask_of_its_caller(volume: Path, mx: Mx, hub: servers.Hub) -> None:
    hub.commit(FILES)
    env = hub.env | {"MX_CACHE_DIR": str(volume)}
    result = mx("prefetch", hub.uri, "--", "sh", "-c", "umask", env=env, prefix=user(1000, 3000, "0027")).ok()
    assert result.out.strip() == "0027"


@capability("root", "setpriv")
def test_each_user_remembers_digests(
    volume: Path, mx: Mx, tmp_path: Path, fault_env: Callable[..., dict[str, str]]
) -> None:
    (tmp_path / "model").mkdir(mode=0o755)
    for name, data in FILES.items():
        (tmp_path / "model" / name).write_bytes(data)
    # What changed within the last two seconds is not remembered.
    env = {"MX_CACHE_DIR": str(volume), "HOME": "/nonexistent"} | fault_env(tmp_path / "none", CLOCK=10)
    for uid in (1000, 2000):
        read = [
            mx("hash", tmp_path / "model", "--json", env=env, prefix=user(uid, 3000)).ok().json()["bytes_read"]
            for _ in range(2)
        ]
        assert read[0] > 0
        assert read[1] == 0


@capability("root", "setpriv")
def test_a_volume_that_is_not_ours(tmp_path: Path, mx: Mx, hub: servers.Hub) -> None:
    """P-48 fsgroup-ignored: named before anything is asked of the origin."""
    hub.commit(FILES)
    place = tmp_path / "root-owned"
    place.mkdir(mode=0o755)
    for directory in (place, place / "cache"):
        result = mx("prefetch", hub.uri, env=hub.env | {"MX_CACHE_DIR": str(directory)}, prefix=user(1000, 1000))
        result.exits(21)
        for words in (str(place), "0:0", "0755", "uid 1000", "fsGroup"):
            assert words in result.err, (words, result.err)
    assert not hub.log()
    assert not list(place.iterdir())


# --- P-49, P-50, P-51: other file systems, links, case ---------------------------------------------------------------


def test_nothing_of_the_payload_passes_elsewhere(tmpfs: Callable[..., Path], mx: Mx, hub: servers.Hub) -> None:
    """P-49 EXDEV-and-tmp: TMPDIR and the home are too small for it."""
    files = checkpoint_files(shards=1, size=12 * MIB)
    hub.commit(files)
    small = tmpfs("2m")
    env = {name: str(small) for name in ("TMPDIR", "HOME", "XDG_CACHE_HOME", "HF_HOME")}
    result = mx("prefetch", hub.uri, env=hub.env | env).ok()
    assert tree(Path(result.out.strip())) == cachecheck.sums(files)
    assert not list(small.iterdir())


@capability("gcc")
def test_no_links(mx: Mx, hub: servers.Hub, fault_env: Faults) -> None:
    """P-50 no-links: plain files in the same layout, no warnings, no second copy."""
    hub.commit(FILES)
    result = mx("prefetch", hub.uri, env=hub.env | fault_env(mx.cache, SYMLINK="EPERM", LINK="EPERM")).ok()
    check_plain(Path(result.out.strip()), mx.cache)
    assert "warning" not in result.err


def check_plain(snapshot: Path, cache: Path) -> None:
    assert tree(snapshot) == cachecheck.sums(FILES)
    assert not any(path.is_symlink() for path in cache.rglob("*"))
    payload = sum(map(len, FILES.values()))
    assert sum(path.stat().st_size for path in cache.rglob("*") if path.is_file()) <= 1.05 * payload


@capability("fuse")
def test_no_links_on_a_mount(mx: Mx, hub: servers.Hub, cifuse: Callable[..., Path]) -> None:
    hub.commit(FILES)
    root = cifuse(NOAPPEND="1") / "cache"
    result = mx("prefetch", hub.uri, env=hub.env | {"MX_CACHE_DIR": str(root)}).ok()
    check_plain(Path(result.out.strip()), root)
    assert "warning" not in result.err


@capability("fuse")
def test_names_that_differ_in_case(mx: Mx, hub: servers.Hub, cifuse: Callable[..., Path]) -> None:
    """P-51 case-collision."""
    both = FILES | {"Config.json": b'{"other": 1}'}
    hub.commit(both)
    result = mx("prefetch", hub.uri, "--all", env=hub.env | {"MX_CACHE_DIR": str(cifuse() / "cache")}).exits(21)
    assert "Config.json" in result.err
    assert "config.json" in result.err
    assert not hub.bytes_served("model-0")
    there = mx("prefetch", hub.uri, "--all", env=hub.env).ok()
    assert tree(Path(there.out.strip())) == cachecheck.sums(both)


@capability("fuse")
def test_a_mount_that_cannot_rename(mx: Mx, hub: servers.Hub, cifuse: Callable[..., Path]) -> None:
    hub.commit(FILES)
    result = mx("prefetch", hub.uri, env=hub.env | {"MX_CACHE_DIR": str(cifuse(NORENAME="1") / "cache")}).exits(21)
    assert "rename" in result.err
    assert not hub.bytes_served("model-0")


# --- P-52: no room ---------------------------------------------------------------------------------------------------


def test_no_room_for_the_bytes(tmpfs: Callable[..., Path], mx: Mx, faultd: servers.Faultd) -> None:
    """P-52 ENOSPC: a known size is refused before the transfer, each time, and other models stay."""
    env = {"MX_CACHE_DIR": str(tmpfs("8m"))}
    other = mx("prefetch", faultd.file("etag=mp", MIB, "other.bin"), env=env).ok().out
    url = faultd.file("", 20 * MIB, "big.bin")
    for _ in range(2):
        result = mx("prefetch", url, env=env).exits(15)
        assert re.search(r"need 20.0 MiB, free [67]\.\d MiB", result.err), result.err
    assert not faultd.bytes_served("big.bin")
    assert (Path(other.strip()) / "other.bin").stat().st_size == MIB


def test_no_room_for_the_names(tmpfs: Callable[..., Path], mx: Mx, hub: servers.Hub) -> None:
    hub.commit({"config.json": b"{}"} | {f"notes/{n}.txt": b"x" for n in range(80)})
    env = hub.env | {"MX_CACHE_DIR": str(tmpfs("8m", nr_inodes=60))}
    for _ in range(2):
        result = mx("prefetch", hub.uri, "--all", env=env).exits(15)
        assert "inodes" in result.err


def test_no_room_for_what_has_no_size(tmpfs: Callable[..., Path], mx: Mx, faultd: servers.Faultd) -> None:
    """Found at the write: nothing stays that fills the volume, and the second run says the same."""
    root = tmpfs("8m")
    env = {"MX_CACHE_DIR": str(root)}
    url = faultd.file("nolen", 20 * MIB, "big.bin")
    for _ in range(2):
        result = mx("prefetch", url, env=env).exits(15)
        assert "No space left" in result.err
        assert not cachecheck.parts(root)
    assert mx("prefetch", faultd.file("", MIB, "small.bin"), env=env).ok()


# --- P-54, P-57, P-58: what is there already -------------------------------------------------------------------------


@capability("root", "setpriv")
def test_a_read_only_cache(mx: Mx, hub: servers.Hub, read_only: Callable[[Path], Path]) -> None:
    """P-54 read-only-cache: complete is enough; what is missing is named."""
    sha = hub.commit(FILES)
    mx("prefetch", hub.uri, env=hub.env).ok()
    mounted = read_only(mx.cache)
    env = hub.env | {"MX_CACHE_DIR": str(mounted)}
    before = sorted((str(path), path.lstat().st_mtime_ns) for path in mx.cache.rglob("*"))
    for prefix in ((), user(1000, 1000)):
        for words in ((), ("--offline",), ("--revision", sha)):
            result = mx("prefetch", hub.uri, *words, "--json", env=env, prefix=prefix).ok()
            assert result.json()["role"] == "hit"
            assert result.json()["dir"].startswith(str(mounted))
    assert before == sorted((str(path), path.lstat().st_mtime_ns) for path in mx.cache.rglob("*"))
    next(mx.cache.glob("models/*/snapshots/*/model-00002*")).unlink()
    for prefix in ((), user(1000, 1000)):
        result = mx("prefetch", hub.uri, env=env, prefix=prefix).exits(21)
        assert "model-00002-of-00003.safetensors" in result.err
        assert "ead-only" in result.err
        assert "Traceback" not in result.err


def test_a_directory_alone_proves_nothing(mx: Mx, hub: servers.Hub) -> None:
    """P-57 wrong-trust-of-directory."""
    hub.commit(FILES)
    snapshot = Path(mx("prefetch", hub.uri, env=hub.env).ok().out.strip())
    hub.reset()
    again = mx("prefetch", hub.uri, "--json", env=hub.env).ok()
    assert "revalidated, not transferred" in again.err
    assert (again.json()["role"], again.json()["bytes_fetched"], hub.bytes_served("model-0")) == ("hit", 0, 0)
    # A foreign file stays; a file that is gone is fetched, and only that one.
    (snapshot / "mine.txt").write_text("mine")
    (snapshot / "model-00002-of-00003.safetensors").unlink()
    mx("prefetch", hub.uri, env=hub.env).ok()
    assert tree(snapshot) == cachecheck.sums(FILES | {"mine.txt": b"mine"})
    assert hub.bytes_served("model-0") == len(FILES["model-00002-of-00003.safetensors"])
    # Without a manifest nothing is believed.
    for manifest in mx.cache.glob("models/*/manifests/*/*.json"):
        manifest.unlink()
    (snapshot / "model-00001-of-00003.safetensors").write_bytes(b"\0" * len(FILES["model-00001-of-00003.safetensors"]))
    mx("prefetch", hub.uri, env=hub.env).ok()
    assert tree(snapshot) == cachecheck.sums(FILES | {"mine.txt": b"mine"})


def test_never_more_space_than_the_payload(mx: Mx, hub: servers.Hub, tmp_path: Path) -> None:
    """P-58 double-space: sampled while it works."""
    files = checkpoint_files(shards=2, size=24 * MIB)
    hub.commit(files)
    payload = sum(map(len, files.values()))
    elsewhere = tmp_path / "tmp"
    elsewhere.mkdir()
    running = mx.start("prefetch", hub.uri, env=hub.env | {"TMPDIR": str(elsewhere)})
    most = 0
    while running.process.poll() is None:
        most = max(most, used(mx.cache))
        assert used(mx.home) + used(elsewhere) < MIB
        time.sleep(0.005)
    running.wait().ok()
    assert max(most, used(mx.cache)) <= 1.05 * payload


def used(place: Path) -> int:
    """Bytes of disk under a directory, each file once."""
    seen: dict[int, int] = {}
    for directory, _, names in os.walk(place):
        for name in names:
            try:
                info = os.lstat(os.path.join(directory, name))
            except FileNotFoundError:
                continue
            seen[info.st_ino] = info.st_blocks * 512
    return sum(seen.values())


# --- P-56: memory ----------------------------------------------------------------------------------------------------

REPORT = (
    "import resource, subprocess, sys; code = subprocess.call(sys.argv[1:]); "
    "print('peak', resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss, file=sys.stderr); sys.exit(code)"
)


@pytest.fixture
def limited() -> Iterator[Callable[[int], tuple[str, ...]]]:
    """limited(bytes) -> a prefix that runs mx in a memory cgroup of that size, and tells its peak."""
    need("memory-cgroup")
    with contextlib.ExitStack() as stack:
        yield lambda size: (*stack.enter_context(limits.memory(size)), sys.executable, "-c", REPORT)


def fill(path: Path, size: int, data: bytes) -> None:
    """A file of `size` MiB, never in memory as a whole: `data` again and again."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        if path.suffix == ".safetensors":
            row = {"dtype": "U8", "shape": [size * MIB], "data_offsets": [0, size * MIB]}
            text = json.dumps({"t": row}).encode()
            text += b" " * (-len(text) % 8)
            file.write(len(text).to_bytes(8, "little") + text)
        for at in range(0, size * MIB, len(data)):
            file.write(data[: size * MIB - at])


def test_memory_does_not_follow_the_size(
    mx: Mx, nginx_s3: servers.NginxS3, limited: Callable[[int], tuple[str, ...]]
) -> None:
    """P-56 memory: one object of 1 GiB and 40 of 25 MiB, in a fraction of their size."""
    data, peaks = noise("memory", 25 * MIB), []
    for name, files in {
        "small": {"model.safetensors": 16},
        "large": {"model.safetensors": 1024},
        "many": {f"part-{n}.bin": 25 for n in range(40)},
    }.items():
        for path, size in files.items():
            fill(nginx_s3.path(f"{name}/{path}"), size, data)
        nginx_s3.write_lists()
        env = nginx_s3.env | {"MX_ANON": "1"}
        result = mx("prefetch", nginx_s3.uri(name), "--all", env=env, prefix=limited(256 * MIB)).ok()
        peaks.append(int(re.findall(r"peak (\d+)", result.err)[0]) // 1024)
        subprocess.run(["rm", "-r", result.out.strip()], check=True)
    assert max(peaks) - min(peaks) < 48, peaks
    assert max(peaks) < 150, peaks


def test_a_cache_in_memory_has_no_more_room_than_the_group_of_its_process(
    mx: Mx, nginx_s3: servers.NginxS3, limited: Callable[[int], tuple[str, ...]]
) -> None:
    """P-56: files of a tmpfs count against the memory of the group below which they were written, not the machine's."""
    fill(nginx_s3.path("large/model.safetensors"), 200, noise("memory", 25 * MIB))
    nginx_s3.write_lists()
    with tempfile.TemporaryDirectory(prefix="mx-", dir="/dev/shm") as place:
        command = ("prefetch", nginx_s3.uri("large"), "--cache-dir", place)
        result = mx(*command, env=nginx_s3.env | {"MX_ANON": "1"}, prefix=limited(128 * MIB))
        assert result.code == 15, result.err
        assert "need 200 MiB" in result.err
        assert used(Path(place)) < MIB


# --- P-61: archives --------------------------------------------------------------------------------------------------


def hostile_archive() -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for name in ("../x", "/abs", "ok.txt"):
            member = tarfile.TarInfo(name)
            member.size = 4
            archive.addfile(member, io.BytesIO(b"evil"))
        link = tarfile.TarInfo("link")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc"
        archive.addfile(link)
    return buffer.getvalue()


def test_archives_are_kept_as_they_are(mx: Mx, hub: servers.Hub) -> None:
    """P-61 archives: nothing is taken out of them, so nothing gets out."""
    files = {"config.json": b"{}", "model.tar.gz": hostile_archive()}
    hub.commit(files)
    result = mx("prefetch", hub.uri, "--all", env=hub.env).ok()
    assert tree(Path(result.out.strip())) == cachecheck.sums(files)
