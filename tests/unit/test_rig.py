"""The rig itself works, so that other tests can lean on it."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.rig import servers
from tests.support import Mx, capability, make_checkpoint, make_safetensors, tree

SIZE = 100_000


def get(url: str, **headers: str) -> tuple[int, dict[str, str], bytes]:
    return servers.request("GET", url, headers={key.replace("_", "-"): value for key, value in headers.items()})


def python(code: str, *args: str | Path, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Runs a few lines of Python in a process of their own."""
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, args)],
        env=dict(os.environ, **(env or {})),
        capture_output=True,
        text=True,
        timeout=30,
    )


# --- faultd ------------------------------------------------------------------------------------------------------


def test_faultd_serves_ranges_and_logs_them(faultd: servers.Faultd) -> None:
    url = faultd.file("ok", SIZE, "a.bin")
    status, headers, data = get(url)
    assert (status, len(data), headers["content-length"]) == (200, SIZE, str(SIZE))
    assert hashlib.sha256(data).hexdigest() == faultd.sum(SIZE, "a.bin")
    status, headers, part = get(url, Range="bytes=10-19", If_Match=headers["etag"])
    assert (status, headers["content-range"], part) == (206, f"bytes 10-19/{SIZE}", data[10:20])
    assert [(entry["range"], entry["sent"]) for entry in faultd.log()] == [(None, SIZE), ("bytes=10-19", 10)]
    assert faultd.bytes_served("a.bin") == SIZE + 10


@pytest.mark.parametrize(
    ("flags", "status"),
    [("auth=T", 401), ("fail=503:1", 503), ("failrange=500:1", 500), ("to=%2Fx", 302), ("html", 200), ("sign=9", 302)],
)
def test_faultd_refuses(faultd: servers.Faultd, flags: str, status: int) -> None:
    assert get(faultd.file(flags, SIZE, "a.bin"), Range="bytes=0-9")[0] == status


def test_faultd_cuts_once_and_changes_the_object(faultd: servers.Faultd) -> None:
    url = faultd.file("cutonce=5000,flip=1", SIZE, "a.bin")
    with pytest.raises(Exception, match="IncompleteRead"):
        get(url)
    assert hashlib.sha256(get(url)[2]).hexdigest() == faultd.sum(SIZE, "a.bin", 1)
    assert faultd.bytes_served() == 5000 + SIZE


def test_faultd_says_retry_after_and_forgets_on_reset(faultd: servers.Faultd) -> None:
    url = faultd.file("fail=429:1:2", 10, "a.bin")
    assert get(url)[1]["retry-after"] == "2"
    assert get(url)[0] == 200
    faultd.reset()
    assert get(url)[0] == 429
    assert get(faultd.file("fail=429:1:date+5", 10, "a.bin"))[1]["retry-after"].endswith("GMT")


@pytest.mark.parametrize("host", ["127.0.0.1", pytest.param("::1", marks=capability("ipv6"))])
def test_faultd_speaks_tls(start_faultd: Callable[..., servers.Faultd], tls: servers.Tls, host: str) -> None:
    import ssl
    import urllib.error
    import urllib.request

    url = start_faultd(host=host, tls=tls).file("ok", 10, "a.bin")
    with urllib.request.urlopen(url, context=ssl.create_default_context(cafile=tls.ca)) as response:
        assert len(response.read()) == 10
    with pytest.raises(urllib.error.URLError, match="CERTIFICATE_VERIFY_FAILED"):
        urllib.request.urlopen(url, context=ssl.create_default_context())


def test_hub_serves_commits_links_and_refusals(hub: servers.Hub, tmp_path: Path) -> None:
    files = make_checkpoint(tmp_path / "model", size=8192)
    first = hub.commit(files)
    second = hub.commit({"config.json": b"{}", "sub/a.bin": b"abc"})
    info = json.loads(get(f"{hub.url}/api/models/{hub.repo}/revision/main")[2])
    assert (info["sha"], [file["rfilename"] for file in info["siblings"]]) == (second, ["config.json", "sub/a.bin"])
    entries = json.loads(get(f"{hub.url}/api/models/{hub.repo}/tree/{first}")[2])
    shard = next(entry for entry in entries if entry["path"] == "model-00001-of-00002.safetensors")
    assert shard["lfs"]["oid"] == tree(files)[shard["path"]]

    url = f"{hub.url}/{hub.repo}/resolve/{first}/{shard['path']}"
    hub.flags("links=30")
    status, headers, _ = get(url)
    assert (status, headers["x-linked-size"], headers["x-repo-commit"]) == (302, str(shard["size"]), first)
    assert hashlib.sha256(get(hub.url + headers["location"])[2]).hexdigest() == shard["lfs"]["oid"]
    hub.flags("gated")
    assert get(url)[1]["x-error-code"] == "GatedRepo"
    hub.flags("ok")
    assert len(get(url)[2]) == shard["size"]


# --- object stores -----------------------------------------------------------------------------------------------


def botocore_client(store: servers.S3) -> object:
    import botocore.session

    return botocore.session.Session().create_client(
        "s3",
        endpoint_url=store.endpoint,
        region_name=servers.REGION,
        aws_access_key_id=servers.ACCESS_KEY,
        aws_secret_access_key=servers.SECRET_KEY,
    )


@pytest.mark.parametrize("name", ["s3", "hadro", "rclone_s3", "nginx_s3"])
def test_stores_list_and_give_what_was_put(name: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    store: servers.S3 = request.getfixturevalue(name)
    store.put_tree("ckpt", make_checkpoint(tmp_path / "model", size=8192))
    store.put("other/a b+c.json", b"{}")
    client = botocore_client(store)
    listed = client.list_objects_v2(Bucket=store.bucket, Prefix="ckpt/")["Contents"]  # type: ignore[attr-defined]
    assert {entry["Key"] for entry in listed} == {f"ckpt/{path}" for path in tree(tmp_path / "model")}
    key = "ckpt/model-00001-of-00002.safetensors"
    answer = client.get_object(Bucket=store.bucket, Key=key, Range="bytes=8-15")  # type: ignore[attr-defined]
    assert answer["ETag"]
    assert answer["Body"].read() == (tmp_path / "model" / key[5:]).read_bytes()[8:16]
    other = client.get_object(Bucket=store.bucket, Key="other/a b+c.json")  # type: ignore[attr-defined]
    assert other["Body"].read() == b"{}"
    empty = client.list_objects_v2(Bucket=store.bucket, Prefix="nope/")  # type: ignore[attr-defined]
    assert not empty.get("Contents")


@capability("moto")
def test_s3stub_applies_its_rules(s3stub: Callable[..., servers.S3Stub]) -> None:
    stub = s3stub(slow503=1, denyget="secret", mutate="shard:1")
    for key in ("shard", "secret", "plain"):
        stub.put(key, b"a" * 100)
    base = f"{stub.endpoint}/{stub.bucket}"
    assert get(f"{base}/plain")[0] == 503
    assert get(f"{base}/plain")[2] == b"a" * 100
    assert get(f"{base}/secret")[0] == 403
    first, second = get(f"{base}/shard"), get(f"{base}/shard")
    assert first[2] != second[2]
    assert first[1]["etag"] != second[1]["etag"]
    assert stub.bytes_served("shard") == 200


def test_fake_gcs_gives_what_was_put(gcs: servers.Gcs) -> None:
    gcs.put("ckpt/a b.bin", b"abcdef")
    url = f"{gcs.endpoint}/storage/v1/b/{gcs.bucket}/o?prefix=ckpt/"
    (entry,) = json.loads(get(url)[2])["items"]
    assert (entry["name"], entry["size"], bool(entry["crc32c"])) == ("ckpt/a b.bin", "6", True)
    media = f"{gcs.endpoint}/download/storage/v1/b/{gcs.bucket}/o/ckpt%2Fa%20b.bin?alt=media"
    assert get(media, Range="bytes=2-3")[2] == b"cd"


def test_nginx_serves_files_and_tls(nginx: servers.Nginx) -> None:
    (nginx.root / "plain.txt").write_text("abc")
    for url in (nginx.url, nginx.tls_url):
        status, headers, data = get(f"{url}/plain.txt", Range="bytes=1-1")
        assert (status, data) == (206, b"b")
        assert headers["etag"]


# --- faults ------------------------------------------------------------------------------------------------------

WRITE = """
import os, sys
place = sys.argv[1]
for number in range(3):
    with open(f"{place}/part", "wb") as file:
        file.write(b"x" * 1000)
    os.replace(f"{place}/part", f"{place}/file-{number}")
"""


def test_fault_so_kills_at_each_point(fault_env: Callable[..., dict[str, str]], tmp_path: Path) -> None:
    place, count = tmp_path / "place", tmp_path / "count"
    place.mkdir()
    assert python(WRITE, place, env=fault_env(place, COUNT_FILE=count)).returncode == 0
    calls = [line.split()[2] for line in count.read_text().splitlines()]
    assert calls == ["open", "write", "rename"] * 3
    for path in place.iterdir():
        path.unlink()
    assert python(WRITE, place, env=fault_env(place, KILL_AT=6)).returncode == -signal.SIGKILL
    assert sorted(path.name for path in place.iterdir()) == ["file-0", "part"]


def test_fault_so_stops_before_a_rename(mx: Mx, fault_env: Callable[..., dict[str, str]], tmp_path: Path) -> None:
    place = tmp_path / "place"
    place.mkdir()
    running = mx.start(prefix=(sys.executable, "-c", WRITE, str(place)), env=fault_env(place, STOP_RENAME=2))
    running.wait_stopped()
    assert sorted(path.name for path in place.iterdir()) == ["file-0", "part"]
    running.send(signal.SIGCONT)
    running.wait().ok()


@pytest.mark.parametrize(
    ("fault", "code"),
    [
        ("RENAME=EXDEV", "os.replace(p + '/a', p + '/b')"),
        ("LINK=EPERM", "os.link(p + '/a', p + '/b')"),
        ("FSYNC=EIO", "os.fsync(fd)"),
        ("WRITE=ENOSPC", "os.pwrite(fd, b'x', 0)"),
        ("FALLOC=EOPNOTSUPP", "os.posix_fallocate(fd, 0, 10)"),
        ("FLOCK=ENOLCK", "fcntl.flock(fd, fcntl.LOCK_EX)"),
        ("COPY=EXDEV", "os.copy_file_range(fd, fd, 1, 0, 10)"),
        ("CHMOD=EPERM", "os.chmod(p + '/a', 0o600)"),
    ],
)
def test_fault_so_fails_only_below_its_directory(
    fault_env: Callable[..., dict[str, str]], tmp_path: Path, fault: str, code: str
) -> None:
    name, _, error = fault.partition("=")
    start = "import os, sys, fcntl; p = sys.argv[1]; fd = os.open(p + '/a', os.O_RDWR | os.O_CREAT)\n"
    for place, hit in ((tmp_path / "in", True), (tmp_path / "out", False)):
        place.mkdir()
        done = python(start + code, place, env=fault_env(tmp_path / "in", **{name: error}))
        assert (done.returncode != 0) == hit, done.stderr
        assert not hit or f"[Errno {getattr(errno, error)}]" in done.stderr


def test_fault_so_shifts_the_clock(fault_env: Callable[..., dict[str, str]], tmp_path: Path) -> None:
    done = python("import time; print(time.time())", env=fault_env(tmp_path, CLOCK=-86400))
    assert time.time() - float(done.stdout) > 86000


# --- mounts ------------------------------------------------------------------------------------------------------


def test_tmpfs_is_small(tmpfs: Callable[..., Path]) -> None:
    place = tmpfs("64k", nr_inodes=3)
    with pytest.raises(OSError, match="No space"):
        (place / "big").write_bytes(b"x" * 100_000)
    (place / "small").touch()
    with pytest.raises(OSError, match="No space"):
        (place / "third").touch()


def test_read_only_refuses(read_only: Callable[[Path], Path], tmp_path: Path) -> None:
    (tmp_path / "dir").mkdir()
    (tmp_path / "dir" / "a").write_text("a")
    place = read_only(tmp_path / "dir")
    assert (place / "a").read_text() == "a"
    with pytest.raises(OSError, match="Read-only"):
        (place / "b").touch()


def test_bindfs_shows_one_directory_twice(bindfs_pair: tuple[Path, Path]) -> None:
    one, two = bindfs_pair
    (one / "a").write_text("a")
    os.link(one / "a", one / "b")
    assert (two / "b").read_text() == "a"
    assert one.stat().st_dev != two.stat().st_dev


def test_cifuse_ignores_case_and_refuses_links(cifuse: Callable[..., Path]) -> None:
    place = cifuse(name_max=20)
    (place / "A").write_text("a")
    assert (place / "a").read_text() == "a"
    os.replace(place / "A", place / "b")
    with pytest.raises(PermissionError):
        os.link(place / "b", place / "c")
    with pytest.raises(PermissionError):
        os.symlink("b", place / "c")
    with pytest.raises(OSError, match="too long"):
        (place / ("n" * 21)).touch()


def test_cifuse_hides_new_names_from_others(cifuse: Callable[..., Path]) -> None:
    place = cifuse(HIDE="30")
    (place / "new").touch()
    seen = python("import os, sys; print(os.listdir(sys.argv[1])); os.stat(sys.argv[1] + '/new')", place)
    assert "new" in seen.stdout
    assert "FileNotFoundError" in seen.stderr


# --- mx as a process, checkpoints --------------------------------------------------------------------------------


def test_mx_runs_with_a_clean_environment(mx: Mx, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret")
    script = "import os; print('HF_TOKEN' in os.environ, os.environ['MX_CACHE_DIR'])"
    running = mx.start(prefix=(sys.executable, "-c", script))
    assert running.wait_out(r"^(\w+) (.*)$").groups() == ("False", str(mx.cache))
    assert running.wait().ok().err == ""


def test_checkpoints_are_deterministic(tmp_path: Path) -> None:
    one, two = (tree(make_checkpoint(tmp_path / name, shards=3, size=30_000)) for name in ("a", "b"))
    assert one == two
    path = make_safetensors(tmp_path / "t.safetensors", {"w": ("F16", (2, 2), b"12345678"), "v": ("U8", (3,), None)})
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    assert header["w"] == {"dtype": "F16", "shape": [2, 2], "data_offsets": [0, 8]}
    assert data[8 + length : 16 + length] == b"12345678"
    assert (len(data) - 8 - length, length % 8) == (11, 0)
