"""P-22 to P-29, P-59, P-60: what stores call their objects, who may read them, and which version it is."""

from __future__ import annotations

import hashlib
import json
import re
import socket
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from urllib.parse import quote, urlsplit

import pytest

from tests.rig import cachecheck, servers
from tests.rig.capabilities import PATH
from tests.rig.checkpoints import safetensors_bytes
from tests.rig.origins import FilePlace, HttpPlace, HubPlace, Place, StorePlace
from tests.rig.scripted import Asked, manifests, published, scripted
from tests.support import Mx, Result, capability, noise, tree

Stubs = Callable[..., servers.S3Stub]
# Every character that some client encodes twice or not at all; the last two differ in normalisation alone.
SPECIAL = {
    name: json.dumps(name).encode()
    for name in (
        "a b.json", "a+b.json", "a%20b.json", "x#y.json", "q?z.json", "m&n=o;p.json", "模型.json",
        "caf\u00e9.json", "cafe\u0301.json",
    )
}  # fmt: skip
SINGLE = ("a b+c%20d.json", "x#y?z&é模.json", "cafe\u0301.json")
NO_KEYS = {"AWS_ACCESS_KEY_ID": "", "AWS_SECRET_ACCESS_KEY": ""}


@pytest.fixture
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    kind = request.param
    if kind == "file":
        return FilePlace(tmp_path / "checkpoint")
    if kind == "hub":
        return HubPlace(request.getfixturevalue("hub"))
    if kind == "http":
        return HttpPlace(request.getfixturevalue("nginx"), f"stores-{tmp_path.name}")
    return StorePlace(request.getfixturevalue(kind))


stores = pytest.mark.parametrize("place", ["s3", "gcs"], indirect=True)
trees = pytest.mark.parametrize("place", ["s3", "gcs", "file"], indirect=True)


def has(result: Result, files: dict[str, bytes]) -> Path:
    """The result holds exactly these files. Its directory."""
    directory = Path(result.ok().out.strip())
    assert tree(directory) == cachecheck.sums(files)
    return directory


# --- P-22: special keys ------------------------------------------------------------------------------------------


@trees
def test_p22_special_keys_by_prefix(mx: Mx, place: Place) -> None:
    files = SPECIAL | {"sub dir+%41/ü#?.txt": b"below"}
    place.put(files)
    has(mx("prefetch", place.tree, env=place.env), files)


@pytest.mark.parametrize("place", ["s3", "gcs", "file", "http"], indirect=True)
def test_p22_special_keys_one_by_one(mx: Mx, place: Place) -> None:
    """In keys of stores and in paths nothing is encoded; URLs are decoded once. What is near is not taken."""
    near = dict.fromkeys(("a b c d.json", "a b+c d.json", "x", "x#y", "café.json"), b"[]")
    files = {name: json.dumps(name).encode() for name in SINGLE}
    place.put(near | files)
    runs = [mx.start("prefetch", place.one(name), env=place.env) for name in SINGLE]
    for run, name in zip(runs, SINGLE, strict=True):
        has(run.wait(), {name: files[name]})


def test_p22_a_file_uri_is_decoded_once(mx: Mx, tmp_path: Path) -> None:
    FilePlace(tmp_path / "c d").put({"a%20b.json": b"1"})
    has(mx("prefetch", f"file://{quote(str(tmp_path))}/c%20d/a%2520b.json"), {"a%20b.json": b"1"})


# --- P-23: markers -----------------------------------------------------------------------------------------------


@stores
def test_p23_directory_markers_are_no_files(mx: Mx, place: Place) -> None:
    place.put({"sub/a.json": b"{}", "sub/": b"", "lonely/": b"", "": b""})
    result = mx("prefetch", place.tree, "--all", "--json", env=place.env).ok().json()
    assert result["files"] == 1
    directory = Path(result["dir"])
    assert tree(directory) == cachecheck.sums({"sub/a.json": b"{}"})


@stores
def test_p23_only_markers_is_nothing(mx: Mx, place: Place) -> None:
    place.put({"": b"", "sub/": b""})
    mx("prefetch", place.tree, env=place.env).exits(10)
    assert not published(mx.cache)


# --- P-24: listings are fresh ------------------------------------------------------------------------------------


class Bucket:
    """A small S3 whose objects the test changes between two requests of one process."""

    def __init__(self, objects: dict[str, bytes], on_get: Callable[[Bucket, str], None]) -> None:
        self.objects, self.on_get = objects, on_get

    def __call__(self, asked: Asked) -> None:
        parts = urlsplit(asked.path)
        key = parts.path.removeprefix("/bkt").lstrip("/")
        if "list-type" in parts.query:
            asked.say(200, self.listing(), {"Content-Type": "application/xml"})
            return
        if asked.method == "GET":
            self.on_get(self, key)
        data = self.objects.get(key)
        wanted = asked.headers.get("If-Match")
        if data is None:
            asked.say(404)
        elif wanted and wanted != tag(data):
            asked.say(412)
        else:
            asked.serve(data)

    def listing(self) -> bytes:
        rows = "".join(
            f"<Contents><Key>{key}</Key><Size>{len(data)}</Size><ETag>{tag(data)}</ETag>"
            "<LastModified>2026-01-01T00:00:00.000Z</LastModified></Contents>"
            for key, data in sorted(self.objects.items())
        )
        return f"<ListBucketResult><IsTruncated>false</IsTruncated>{rows}</ListBucketResult>".encode()


def tag(data: bytes) -> str:
    return f'"{hashlib.md5(data).hexdigest()}"'


def test_p24_the_second_listing_of_a_process_sees_what_is_new(mx: Mx) -> None:
    def overwritten(bucket: Bucket, key: str) -> None:
        if key == "m/a.bin" and "m/new.txt" not in bucket.objects:
            bucket.objects |= {"m/a.bin": b"second", "m/new.txt": b"new"}
            del bucket.objects["m/old.txt"]

    with scripted(Bucket({"m/a.bin": b"first!", "m/old.txt": b"old"}, overwritten)) as server:
        env = servers.S3(server.url, "bkt").env
        result = mx("prefetch", "s3://bkt/m", env=env)
        has(result, {"a.bin": b"second", "new.txt": b"new"})
        assert "listing the origin again" in result.err
        assert len([line for line in server.lines("GET") if "list-type" in line]) == 2


def test_p24_a_stream_lists_an_origin_that_changes_again(mx: Mx, tmp_path: Path) -> None:
    """What came of the first listing is no part of the directory."""

    def overwritten(bucket: Bucket, key: str) -> None:
        if key == "m/a.bin" and "m/new.txt" not in bucket.objects:
            bucket.objects |= {"m/a.bin": b"second", "m/new.txt": b"new"}
            del bucket.objects["m/old.txt"]

    with scripted(Bucket({"m/a.bin": b"first!", "m/old.txt": b"old"}, overwritten)) as server:
        env = servers.S3(server.url, "bkt").env
        to = tmp_path / "out"
        result = mx("pull", "s3://bkt/m", "--route", "stream", "--to", to, env=env).ok()
        assert {path.name: path.read_bytes() for path in to.iterdir()} == {"a.bin": b"second", "new.txt": b"new"}
        assert "listing the origin again" in result.err


SHARED = """
import json, sys, mx_cli
how = json.loads(sys.argv[1])
rank = {"rank": "1/2", "rules": {"rules": [["*", "col"]]}} if how["rank"] else {}
if how["by"] == "load":
    tensors = mx_cli.load("s3://bkt/m", **rank)
else:
    tensors = mx_cli.pull("s3://bkt/m", routes=["stream"], **rank)
print({name: bytes(tensor.flatten().numpy()).decode() for name, tensor in tensors.items()})
"""


@capability("torch")
@pytest.mark.parametrize(
    ("by", "rank"), [("load", False), ("load", True), ("pull", False), ("pull", True), ("mx", True)]
)
def test_p24_tensors_of_an_origin_that_changes_are_those_of_one_listing(
    by: str, rank: bool, mx: Mx, tmp_path: Path
) -> None:
    """Whole or a rank's part: what came of the first listing is overwritten, and tensors that went are not there."""

    def checkpoint(letter: bytes, *more: str) -> bytes:
        return safetensors_bytes(dict.fromkeys(("w", *more), ("U8", (4, 2), letter * 8)))

    def overwritten(bucket: Bucket, key: str) -> None:
        overwritten.asked += 1  # type: ignore[attr-defined]
        # The first two requests are for the header, and for config.json or the bytes.
        if overwritten.asked == 2:  # type: ignore[attr-defined]
            bucket.objects["m/model.safetensors"] = checkpoint(b"b")

    overwritten.asked = 0  # type: ignore[attr-defined]
    with scripted(Bucket({"m/model.safetensors": checkpoint(b"a", "gone")}, overwritten)) as server:
        env = servers.S3(server.url, "bkt").env | {"MX_CACHE_DIR": str(mx.cache), "HOME": str(tmp_path), "PATH": PATH}
        if by == "mx":
            rules, to = tmp_path / "rules.json", tmp_path / "out"
            rules.write_text(json.dumps({"rules": [["*", "col"]]}))
            part = ["--rank", "1/2", "--rules", rules]
            said = mx("pull", "s3://bkt/m", "--route", "stream", "--to", to, *part, env=env).ok().err
            (file,) = to.glob("*.safetensors")
            assert file.read_bytes().endswith(b"b" * 4)
            assert b"gone" not in file.read_bytes()
        else:
            how = json.dumps({"by": by, "rank": rank})
            done = subprocess.run(
                [sys.executable, "-c", SHARED, how], env=env, capture_output=True, text=True, timeout=60, check=False
            )
            said = done.stderr
            assert done.stdout == f"{{'w': '{'b' * (4 if rank else 8)}'}}\n", said
        assert "listing the origin again" in said


def test_p24_an_empty_prefix_that_is_filled_later(mx: Mx, s3: servers.S3) -> None:
    mx("prefetch", s3.uri("m"), env=s3.env).exits(10)
    s3.put("m/config.json", b"{}")
    has(mx("prefetch", s3.uri("m"), env=s3.env), {"config.json": b"{}"})


# --- P-25: regions -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", ["region", "r301"])
def test_p25_the_region_that_the_answer_names(mx: Mx, s3stub: Stubs, rule: str) -> None:
    stub = s3stub(**{rule: "eu-west-1"})
    stub.put("m/config.json", b"{}")
    stub.put("m/model.safetensors", noise("w", 300_000))
    result = mx("prefetch", stub.uri("m"), env=stub.env)
    assert len(published(mx.cache)) == 2, result.ok().err
    assert "is in eu-west-1, going on with that region" in result.err
    refused = [entry for entry in stub.log() if entry["region"] == "us-east-1"]
    assert len(refused) <= 2, "signed again once, not for each request"


# --- P-26: nobody's credentials ----------------------------------------------------------------------------------


def test_p26_anonymous_and_a_metadata_service_that_hangs(mx: Mx, s3stub: Stubs) -> None:
    stub = s3stub(imds=120)
    stub.put("m/config.json", b"{}")
    env = stub.env | NO_KEYS | {"AWS_EC2_METADATA_SERVICE_ENDPOINT": stub.endpoint}
    env["AWS_EC2_METADATA_DISABLED"] = ""
    has(mx("prefetch", stub.uri("m"), "--anon", env=env), {"config.json": b"{}"})
    assert not [entry for entry in stub.log() if entry["path"].startswith("/latest") or entry["key"]]
    result = mx("prefetch", stub.uri("m"), env=env, timeout=40).exits(11)
    assert "--anon" in result.err
    assert result.seconds < 20, "botocore alone would take minutes"
    asked = [entry for entry in stub.log() if entry["path"].startswith("/latest")]
    assert 1 <= len(asked) <= 2


def test_p26_anonymous_where_credentials_are_wanted(mx: Mx, s3stub: Stubs) -> None:
    stub = s3stub(private=1)
    stub.put("m/config.json", b"{}")
    assert "leave --anon out" in mx("prefetch", stub.uri("m"), "--anon", env=stub.env).exits(11).err


def test_p26_nothing_of_google_is_found_either(mx: Mx, tmp_path: Path) -> None:
    """A metadata server that accepts and says nothing is asked for a moment only."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        host = f"127.0.0.1:{silent.getsockname()[1]}"
        env = {"NO_GCE_CHECK": "", "GCE_METADATA_HOST": host, "GCE_METADATA_IP": host, "CLOUDSDK_CONFIG": tmp_path}
        result = mx("prefetch", "gs://bkt/m", env=env, timeout=60).exits(11)
    assert "--anon" in result.err
    assert result.seconds < 25


# --- P-27: credentials that expire -------------------------------------------------------------------------------


def credential_process(home: Path, keys: list[str], seconds: float) -> None:
    """A profile whose credentials come from a program: the keys one after the other, the last one for ever."""
    aws = home / ".aws"
    aws.mkdir()
    program = aws / "credentials.py"
    program.write_text(
        "import json, pathlib, datetime\n"
        f"keys, count = {keys!r}, pathlib.Path({str(aws / 'count')!r})\n"
        "calls = len(count.read_text()) if count.exists() else 0\n"
        "count.write_text('x' * (calls + 1))\n"
        "last = calls + 1 >= len(keys)\n"
        f"ends = datetime.datetime.now(datetime.timezone.utc) + datetime.timedelta(hours=2 if last else 0, seconds={seconds})\n"
        "print(json.dumps({'Version': 1, 'AccessKeyId': keys[min(calls, len(keys) - 1)], 'SecretAccessKey': 's3cr3t',"
        " 'SessionToken': 't', 'Expiration': ends.isoformat()}))\n"
    )
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    (aws / "config").write_text(f"[default]\ncredential_process = {sys.executable} {program}\n")


def many(stub: servers.S3Stub, count: int) -> dict[str, bytes]:
    files = {f"{number:02d}.bin": noise(str(number), 20_000) for number in range(count)}
    for name, data in files.items():
        stub.put(f"m/{name}", data)
    stub.reset()
    return files


def test_p27_credentials_that_expire_are_renewed(mx: Mx, s3stub: Stubs) -> None:
    stub = s3stub(expire="K1:20")
    files = many(stub, 50)
    credential_process(mx.home, ["K1", "K2"], 2)
    has(mx("prefetch", stub.uri("m"), env=stub.env | NO_KEYS), files)
    assert {entry["key"] for entry in stub.log()} >= {"K2"}
    assert stub.bytes_served("/m/") == sum(map(len, files.values())), "no file was begun again"
    assert len((mx.home / ".aws" / "count").read_text()) < 10, "not one look for each request"


def test_p27_credentials_that_stay_expired(mx: Mx, s3stub: Stubs) -> None:
    stub = s3stub(expire="K1:20")
    files = many(stub, 50)
    credential_process(mx.home, ["K1"], 7200)
    result = mx("prefetch", stub.uri("m"), env=stub.env | NO_KEYS).exits(11)
    assert "expired" in result.err
    assert "s3cr3t" not in result.err
    assert result.err.count("error:") == 1
    assert not manifests(mx.cache)
    stub.reset()
    has(mx("prefetch", stub.uri("m"), env=stub.env), files)
    assert stub.bytes_served("/m/") < sum(map(len, files.values())), "what was fetched before is kept"


# --- P-28: ETags of many parts -----------------------------------------------------------------------------------


def upload_in_parts(store: servers.S3, key: str, parts: list[bytes]) -> None:
    url = f"{store.endpoint}/{store.bucket}/{key}"
    answer = servers.request("POST", f"{url}?uploads", b"", servers.PUBLIC)[2].decode()
    upload = answer.split("<UploadId>")[1].split("<")[0]
    rows = ""
    for number, data in enumerate(parts, 1):
        answered = servers.request("PUT", f"{url}?partNumber={number}&uploadId={upload}", data, servers.PUBLIC)
        rows += f"<Part><PartNumber>{number}</PartNumber><ETag>{answered[1]['etag']}</ETag></Part>"
    body = f"<CompleteMultipartUpload>{rows}</CompleteMultipartUpload>".encode()
    assert servers.request("POST", f"{url}?uploadId={upload}", body, servers.PUBLIC)[0] == 200


def test_p28_the_etag_of_many_parts(mx: Mx, s3: servers.S3Stub) -> None:
    parts = [noise("a", 5 << 20), noise("b", 1000)]
    upload_in_parts(s3, "m/x.bin", parts)
    has(mx("prefetch", s3.uri("m"), env=s3.env), {"x.bin": b"".join(parts)})
    s3.reset()
    assert mx("prefetch", s3.uri("m"), "--verify", "--json", env=s3.env).ok().json()["role"] == "hit"
    assert not s3.bytes_served("x.bin")


# --- P-29: listing works, reading is denied ----------------------------------------------------------------------


def test_p29_reading_is_denied(mx: Mx, s3stub: Stubs) -> None:
    stub = s3stub(denyget="shard-2")
    for name in ("config.json", "shard-1.bin", "shard-2.bin"):
        stub.put(f"m/{name}", b"{}")
    result = mx("prefetch", stub.uri("m"), "--json", env=stub.env).exits(11)
    error = result.json()["error"]
    for part in (f"bucket {stub.bucket}", "key m/shard-2.bin", "GetObject"):
        assert part in error["message"]
    assert not error["retryable"]
    assert not re.search("corrupt|damage|integrity|retry", result.err)
    assert not manifests(mx.cache)
    denied = [entry for entry in stub.log() if "shard-2" in entry["path"] and entry["m"] == "GET"]
    assert len(denied) == 1


# --- P-59: an object, or what is below a prefix ------------------------------------------------------------------


@pytest.mark.parametrize("place", ["s3", "gcs", "file", "hub"], indirect=True)
def test_p59_an_object_or_a_prefix(mx: Mx, place: Place) -> None:
    """Never the path of the origin again, whatever was there before."""
    files = {"b/model.bin": b"weights", "b/c/d.json": b"{}"}
    place.put(files)
    below = {"model.bin": b"weights", "c/d.json": b"{}"}
    one = has(mx("prefetch", place.one("b/model.bin"), env=place.env), {"model.bin": b"weights"})
    for written in ("b", "b/", "b"):
        result = mx("prefetch", place.one(written), env=place.env)
        has(result, below)
        assert str(one) != result.out.strip()


def test_p59_a_url_is_one_file_without_its_path(mx: Mx, nginx: servers.Nginx, tmp_path: Path) -> None:
    place = HttpPlace(nginx, f"p59-{tmp_path.name}")
    place.put({"b/model.bin": b"weights", "b/c/d.json": b"{}"})
    has(mx("prefetch", place.one("b/model.bin") + "?download=true", env=place.env), {"model.bin": b"weights"})
    for written in ("b", "b/"):
        # nginx sends to the folder, and shows no listing of it.
        assert "HTTP 403" in mx("prefetch", f"{place.tree}/{written}", env=place.env).exits(11).err


# --- P-60: versions ----------------------------------------------------------------------------------------------


def versioned(s3: servers.S3Stub) -> Callable[[str, bytes | None], str]:
    """Switches versions on: put(key, data) -> the version's id; None puts a delete marker."""
    url = f"{s3.endpoint}/{s3.bucket}"
    body = b"<VersioningConfiguration><Status>Enabled</Status></VersioningConfiguration>"
    assert servers.request("PUT", f"{url}?versioning", body, servers.PUBLIC)[0] == 200

    def put(key: str, data: bytes | None) -> str:
        method = "DELETE" if data is None else "PUT"
        status, headers, _ = servers.request(method, f"{url}/{key}", data, servers.PUBLIC)
        assert status < 300
        return headers["x-amz-version-id"]

    return put


def test_p60_versions_and_delete_markers(mx: Mx, s3: servers.S3Stub) -> None:
    put = versioned(s3)
    first, second = put("m/x.bin", b"version one"), put("m/x.bin", b"version two")
    uri, env = s3.uri("m/x.bin"), s3.env
    newest = mx("prefetch", uri, "--json", env=env).ok().json()
    old = mx("prefetch", uri, "--version-id", first, "--json", env=env).ok().json()
    assert old["revision"] != newest["revision"]
    assert (Path(newest["dir"]) / "x.bin").read_bytes() == b"version two"
    assert (Path(old["dir"]) / "x.bin").read_bytes() == b"version one"
    assert mx("prefetch", uri, "--offline", "--json", env=env).ok().json()["revision"] == newest["revision"]

    marker = put("m/x.bin", None)
    for words in ([uri], [s3.uri("m")], [uri, "--version-id", marker], [uri, "--version-id", "no-such-version"]):
        mx("prefetch", *words, env=env).exits(10)
    s3.reset()
    for known in (newest, old):
        again = mx("prefetch", uri, "--revision", known["revision"], "--json", env=env).ok().json()
        assert (again["role"], again["dir"]) == ("hit", known["dir"])
    assert not s3.log(), "a finished run stays valid, and asks nobody"
    by_version = mx("prefetch", uri, "--version-id", first, "--offline", "--json", env=env).ok().json()
    assert by_version["dir"] == old["dir"]
    mx("prefetch", uri, "--version-id", second, "--offline", env=env).exits(10)
    fresh = mx("prefetch", uri, "--version-id", second, "--cache-dir", mx.home / "other", env=env)
    has(fresh, {"x.bin": b"version two"})


def test_p60_a_new_version_during_the_run_is_taken_whole(mx: Mx) -> None:
    """The reader is pinned: it gets one version of each file or starts again, and says which it has."""
    one, two = noise("one", 900_000), noise("two", 900_000)

    def overwritten(bucket: Bucket, key: str) -> None:
        gets.append(key)
        if len(gets) == 3:
            bucket.objects["m/x.bin"] = two

    gets: list[str] = []
    with scripted(Bucket({"m/x.bin": one}, overwritten)) as server:
        env = servers.S3(server.url, "bkt").env | {"MX_RANGE_SIZE": "100KiB", "MX_MAX_CONNECTIONS": "1"}
        result = mx("prefetch", "s3://bkt/m", "--json", env=env).ok()
    assert (Path(result.json()["dir"]) / "x.bin").read_bytes() == two
    assert list(published(mx.cache)) == ["x.bin"]


def test_p60_a_generation_in_gs(mx: Mx, gcs: servers.Gcs) -> None:
    gcs.put("m/x.bin", b"data")
    text = servers.request("GET", f"{gcs.endpoint}/storage/v1/b/{gcs.bucket}/o/m%2Fx.bin")[2]
    generation = json.loads(text)["generation"]
    has(mx("prefetch", gcs.uri("m/x.bin"), "--version-id", generation, env=gcs.env), {"x.bin": b"data"})
    gone = mx("prefetch", gcs.uri("m/x.bin"), "--version-id", "1", env=gcs.env).exits(10)
    assert "no object with generation 1" in gone.err
    mx("prefetch", gcs.uri("m/"), "--version-id", generation, env=gcs.env).exits(10)
