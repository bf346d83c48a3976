"""s3:// against moto with S3's own troubles, and against stores that check signatures."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mx_cli.base.cancel import Stop
from mx_cli.base.errors import AccessDenied, IntegrityError, MxError, NotFound, OriginChanged, Unreachable, UsageError
from mx_cli.engine.ports import NoRanges, ReadItem
from mx_cli.model.manifest import Entry, Listing
from mx_cli.sources.registry import OpenOrigin
from tests.rig import servers
from tests.rig.checkpoints import noise
from tests.rig.origins import opened
from tests.rig.scripted import Asked, scripted
from tests.rig.servers import request
from tests.support import ROOT

Stubs = Callable[..., servers.S3Stub]


def listed(store: servers.S3, key: str = "m", **options: Any) -> tuple[OpenOrigin, Listing]:
    env = {**store.env, **options.pop("env", {})}
    origin = opened(store.uri(key), {name: value for name, value in env.items() if value}, **options)
    return origin, origin.listing(None, Stop())


def read(origin: OpenOrigin, entry: Entry) -> bytes:
    stream = origin.open(ReadItem(entry, 0, entry.size))
    found, view = bytearray(), memoryview(bytearray(100_000))
    while count := stream.read_into(view):
        found += view[:count]
    return bytes(found)


@pytest.fixture
def aws(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A home without AWS settings, for this process: botocore reads the real environment."""
    for name in list(os.environ):
        if name.startswith("AWS_"):
            monkeypatch.delenv(name)
    (tmp_path / ".aws").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    return tmp_path / ".aws"


NO_KEYS = {"AWS_ACCESS_KEY_ID": "", "AWS_SECRET_ACCESS_KEY": ""}


def test_p15_p23_an_object_wins_and_markers_are_no_files(s3: servers.S3) -> None:
    for key in ("m/", "m/sub/", "m/sub/a.json", "m/lonely/", "m-hf/extra.bin", "m.json"):
        s3.put(key, b"" if key.endswith("/") else b"{}")
    assert [entry.path for entry in listed(s3)[1].files] == ["sub/a.json"]
    s3.put("m", b"the object")
    assert [entry.path for entry in listed(s3)[1].files] == ["m"]
    assert [entry.path for entry in listed(s3, "m/")[1].files] == ["sub/a.json"]
    s3.put("m", b"", {"Content-Type": "application/x-directory"})
    assert [entry.path for entry in listed(s3)[1].files] == ["sub/a.json"]


def test_p14_nothing_there_repeats_what_was_looked_for(s3: servers.S3) -> None:
    with pytest.raises(NotFound) as caught:
        listed(s3, "nope")
    for part in (s3.uri("nope"), "key nope", "nope/", s3.bucket):
        assert part in caught.value.what
    s3.bucket = "no-such-bucket-here"
    with pytest.raises(NotFound, match="no such bucket"):
        listed(s3, "nope/")


def test_pages_of_a_listing_are_followed(s3: servers.S3, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mx_cli.sources.s3._PAGE", "3")
    names = [f"{number} +%.json" for number in range(8)]
    for name in names:
        s3.put(f"m/{name}", b"x")
    assert [entry.path for entry in listed(s3)[1].files] == names
    assert isinstance(s3, servers.S3Stub)
    assert sum("list-type" in entry["path"] for entry in s3.log()) == 3


def test_keys_in_the_environment_need_no_botocore(s3: servers.S3) -> None:
    s3.put("m/x", b"abc")
    script = (
        "import sys, os; from tests.rig.origins import opened; from mx_cli.base.cancel import Stop\n"
        f"origin = opened({s3.uri('m')!r}, dict(os.environ)); entry = origin.listing(None, Stop()).files[0]\n"
        "assert origin.read(entry, 9) == b'abc'\n"
        "print([name for name in ('botocore', 'requests', 'google.auth', 'asyncio', 's3fs') if name in sys.modules])"
    )
    env = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), **s3.env}
    done = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_p28_the_etag_of_many_parts_is_no_md5(s3: servers.S3) -> None:
    s3.put("m/small", b"abc")
    listing = listed(s3)[1]
    assert listing.files[0].digests["etag-md5"] == "900150983cd24fb0d6963f7d28e17f72"
    upload_in_parts(s3, "m/large", [noise("a", 5 << 20), noise("b", 100)])
    entry = next(entry for entry in listed(s3)[1].files if entry.path == "large")
    assert entry.validator.endswith("-2")
    assert "etag-md5" not in entry.digests
    assert entry.resumable


def upload_in_parts(store: servers.S3, key: str, parts: list[bytes]) -> None:
    url = f"{store.endpoint}/{store.bucket}/{key}"
    upload = request("POST", f"{url}?uploads", b"", servers.PUBLIC)[2].decode().split("<UploadId>")[1].split("<")[0]
    rows = ""
    for number, data in enumerate(parts, 1):
        tag = request("PUT", f"{url}?partNumber={number}&uploadId={upload}", data, servers.PUBLIC)[1]["etag"]
        rows += f"<Part><PartNumber>{number}</PartNumber><ETag>{tag}</ETag></Part>"
    body = f"<CompleteMultipartUpload>{rows}</CompleteMultipartUpload>".encode()
    assert request("POST", f"{url}?uploadId={upload}", body, servers.PUBLIC)[0] == 200


def test_stored_checksums_are_taken(s3: servers.S3) -> None:
    data = noise("weights", 2 << 20)
    encoded = base64.b64encode(hashlib.sha256(data).digest()).decode()
    s3.put("m/w.safetensors", data, {"x-amz-checksum-sha256": encoded, "x-amz-sdk-checksum-algorithm": "SHA256"})
    for key in ("m", "m/w.safetensors"):
        assert listed(s3, key)[1].files[0].digests["sha256"] == hashlib.sha256(data).hexdigest()


def test_p04_an_object_that_is_overwritten_between_two_reads(s3stub: Stubs) -> None:
    stub = s3stub(mutate="shard:1")
    stub.put("m/shard", noise("shard", 100_000))
    origin, listing = listed(stub)
    assert read(origin, listing.files[0]) == noise("shard", 100_000)
    with pytest.raises(OriginChanged):
        read(origin, listing.files[0])
    assert all(entry["if_match"] for entry in stub.log() if entry["range"])


def test_p06_a_page_with_status_200(s3stub: Stubs) -> None:
    stub = s3stub(html="shard")
    stub.put("m/shard", noise("shard", 100_000))
    origin, listing = listed(stub)
    with pytest.raises((IntegrityError, NoRanges)):
        read(origin, listing.files[0])
    with pytest.raises(IntegrityError, match="text/html"):
        origin.read(listing.files[0], 1 << 20)


def test_p13_an_object_that_is_gone(s3stub: Stubs) -> None:
    stub = s3stub(get404="shard-2")
    stub.put("m/shard-2", b"x")
    origin, listing = listed(stub)
    with pytest.raises(NotFound, match=r"m/shard-2.*NoSuchKey"):
        read(origin, listing.files[0])


def test_p12_slow_down_is_retried_by_the_caller(s3stub: Stubs) -> None:
    stub = s3stub(slow503=1)
    stub.put("m/x", b"abc")
    retries: list[MxError] = []
    origin, listing = listed(stub, retries=retries)
    with pytest.raises(Unreachable):
        read(origin, listing.files[0])
    assert origin.read(listing.files[0], 9) == b"abc"


@pytest.mark.parametrize("rule", ["region", "r301"])
@pytest.mark.parametrize("key", ["m", "m/x"])
def test_p25_the_region_is_taken_from_the_answer_once(s3stub: Stubs, rule: str, key: str) -> None:
    stub = s3stub(**{rule: "eu-west-1"})
    stub.put("m/x", b"abc")
    stub.reset()
    notices: list[str] = []
    origin, listing = listed(stub, key, notices=notices)
    assert origin.read(listing.files[0], 9) == b"abc"
    assert read(origin, listing.files[0]) == b"abc"
    assert len(notices) == 1
    assert "eu-west-1" in notices[0]
    assert sum(entry["region"] == "us-east-1" for entry in stub.log()) <= 2


def test_p25_a_region_that_the_store_does_not_take_is_no_loop(s3stub: Stubs) -> None:
    stub = s3stub(region="eu-west-1", r301="ap-south-1")
    stub.put("m/x", b"abc")
    stub.reset()
    with pytest.raises(AccessDenied) as caught:
        listed(stub)
    assert "AWS_REGION=" in caught.value.hint
    assert len(stub.log()) < 8


def test_p26_anonymous_touches_no_metadata_service(s3stub: Stubs, aws: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stub = s3stub(imds=120)
    stub.put("m/x", b"abc")
    monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", stub.endpoint)
    monkeypatch.delenv("AWS_EC2_METADATA_DISABLED")
    origin, listing = listed(stub, env=NO_KEYS, anon="true")
    assert origin.read(listing.files[0], 9) == b"abc"
    assert not [entry for entry in stub.log() if entry["path"].startswith("/latest")]
    assert not [entry for entry in stub.log() if entry["key"]]


def test_p26_the_search_for_credentials_ends(s3stub: Stubs, aws: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stub = s3stub(imds=120)
    monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", stub.endpoint)
    monkeypatch.delenv("AWS_EC2_METADATA_DISABLED")
    begun = time.monotonic()
    with pytest.raises(AccessDenied) as caught:
        listed(stub, env=NO_KEYS)
    assert time.monotonic() - begun < 5.5
    assert "--anon" in caught.value.hint


def credential_process(aws: Path, script: str) -> None:
    """A profile whose credentials a program gives."""
    program = aws / "credentials.py"
    program.write_text(script)
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    (aws / "config").write_text(f"[default]\ncredential_process = {sys.executable} {program}\n")


def test_p27_credentials_that_expire_are_renewed(s3stub: Stubs, aws: Path) -> None:
    stub = s3stub(expire="K1:20")
    for number in range(30):
        stub.put(f"m/{number:02d}", b"abc")
    stub.reset()
    credential_process(
        aws,
        "import json, pathlib, datetime\n"
        f"count = pathlib.Path({str(aws / 'count')!r})\n"
        "calls = len(count.read_text()) if count.exists() else 0\n"
        "count.write_text('x' * (calls + 1))\n"
        "ends = datetime.datetime.now(datetime.timezone.utc) + datetime.timedelta(hours=2)\n"
        "print(json.dumps({'Version': 1, 'AccessKeyId': 'K2' if calls else 'K1', 'SecretAccessKey': 's',"
        " 'SessionToken': 't', 'Expiration': ends.isoformat()}))\n",
    )
    origin, listing = listed(stub, env=NO_KEYS)
    assert [read(origin, entry) for entry in listing.files] == [b"abc"] * 30
    keys = [entry["key"] for entry in stub.log()]
    assert keys == sorted(keys)
    assert set(keys) == {"K1", "K2"}


def test_p27_when_there_are_no_newer_credentials(s3stub: Stubs, aws: Path) -> None:
    stub = s3stub(expire=f"{servers.ACCESS_KEY}:3")
    stub.put("m/x", b"abc")
    stub.reset()
    origin, listing = listed(stub)
    with pytest.raises(AccessDenied, match="expired"):
        [origin.read(listing.files[0], 9) for _ in range(3)]
    assert servers.SECRET_KEY not in json.dumps(stub.log())


def test_expired_from_the_first_request(s3stub: Stubs) -> None:
    stub = s3stub(expire=f"{servers.ACCESS_KEY}:1")
    stub.put("m/x", b"abc")
    stub.reset()
    with pytest.raises(AccessDenied, match="expired"):
        listed(stub)


def test_p29_listing_works_reading_is_denied(s3stub: Stubs) -> None:
    stub = s3stub(denyget="shard-2")
    stub.put("m/shard-2", b"x")
    origin, listing = listed(stub)
    with pytest.raises(AccessDenied) as caught:
        read(origin, listing.files[0])
    for part in (f"bucket {stub.bucket}", "key m/shard-2", "GetObject", "AccessDenied"):
        assert part in caught.value.what
    assert "s3:GetObject" in caught.value.hint


def test_requester_pays(s3stub: Stubs) -> None:
    stub = s3stub(requester=1)
    stub.put("m/x", b"abc")
    with pytest.raises(AccessDenied) as caught:
        listed(stub)
    assert "--requester-pays" in caught.value.hint
    origin, listing = listed(stub, requester_pays="true")
    assert origin.read(listing.files[0], 9) == b"abc"


def test_a_private_bucket_without_credentials(s3stub: Stubs) -> None:
    stub = s3stub(private=1)
    stub.put("m/x", b"abc")
    with pytest.raises(AccessDenied) as caught:
        listed(stub, env=NO_KEYS, anon="true")
    assert "leave --anon out" in caught.value.hint


def test_a_clock_that_is_wrong_is_named(s3stub: Stubs) -> None:
    stub = s3stub(skew=-1)
    stub.put("m/x", b"abc")
    with pytest.raises(AccessDenied, match="clock"):
        listed(stub, "m/")


@pytest.mark.parametrize("kind", ["hadro", "rclone_s3"])
def test_wrong_keys_are_refused_and_not_said(kind: str, request: pytest.FixtureRequest) -> None:
    store = request.getfixturevalue(kind)
    store.put("m/x", b"abc")
    with pytest.raises(AccessDenied) as caught:
        listed(store, env={"AWS_SECRET_ACCESS_KEY": "SECRETwrong"})
    assert "SECRETwrong" not in f"{caught.value} {caught.value.hint}"
    assert store.bucket in caught.value.what


@pytest.mark.parametrize(
    "env",
    [
        {"AWS_SESSION_TOKEN": "SECRET\r\nX-Other: y"},
        {"AWS_SESSION_TOKEN": "SECRET\n\nSECRET"},
        {"AWS_SESSION_TOKEN": "SECRET€"},
        {"AWS_ACCESS_KEY_ID": "SECRET\nSECRET"},
        {"AWS_ACCESS_KEY_ID": "SECRET key"},
    ],
)
def test_p38_keys_that_no_header_can_carry_are_not_echoed(env: dict[str, str], s3: servers.S3Stub) -> None:
    """Cut in two, one would be a header of its own."""
    s3.put("m/x", b"abc")
    with pytest.raises(UsageError, match="the AWS ") as caught:
        listed(s3, env=env)
    assert "SECRET" not in f"{caught.value} {caught.value.hint}"
    assert s3.log() == []


def test_p38_keys_with_a_line_end(s3: servers.S3) -> None:
    s3.put("m/x", b"abc")
    keys = {name: f" {s3.env[name]}\n" for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")}
    listed(s3, env={**keys, "AWS_SESSION_TOKEN": "token\n"})


def test_a_configuration_file_that_cannot_be_looked_up(s3: servers.S3) -> None:
    """A name that is too long, or a container whose HOME is root's, and whose user is not: keys and region do without."""
    s3.put("m/x", b"1")
    listed(s3, env={"AWS_REGION": "", "AWS_DEFAULT_REGION": "", "AWS_CONFIG_FILE": "/" + "x" * 300})


CONFIGURED = {
    "the profile's": "[default]\nregion = eu-west-1\nendpoint_url = {}\n",
    "another profile's": "[profile lab]\nendpoint_url = {}\n[default]\nendpoint_url = http://127.0.0.1:9\n",
    "the service's": "[default]\nservices = lab\nendpoint_url = http://127.0.0.1:9\n"
    "[services lab]\ns3 =\n  addressing_style = path\n  endpoint_url = {}\n",
}


@pytest.mark.parametrize("written", CONFIGURED)
def test_the_endpoint_of_awss_own_configuration(s3: servers.S3, aws: Path, written: str) -> None:
    """As AWS's own tools: after the variables, unless they are told to ignore it."""
    s3.put("m/x", b"1")
    (aws / "config").write_text(CONFIGURED[written].format(s3.endpoint))
    profile = {"AWS_PROFILE": "lab"} if "another" in written else {}
    env = {"MX_ENDPOINT_URL": "", "AWS_ENDPOINT_URL_S3": "", "HOME": str(aws.parent), **profile}
    origin, found = listed(s3, env=env)
    assert [entry.path for entry in found.files] == ["x"]
    assert origin.uri == listed(s3)[0].uri
    refused = {**env, "AWS_IGNORE_CONFIGURED_ENDPOINT_URLS": "true"}
    assert (
        opened(s3.uri("m"), {name: value for name, value in {**s3.env, **refused}.items() if value}).uri != origin.uri
    )


def test_p60_versions(s3: servers.S3) -> None:
    enable = b"<VersioningConfiguration><Status>Enabled</Status></VersioningConfiguration>"
    assert request("PUT", f"{s3.endpoint}/{s3.bucket}?versioning", enable, servers.PUBLIC)[0] == 200
    s3.put("m/x.bin", b"one")
    first = request("HEAD", f"{s3.endpoint}/{s3.bucket}/m/x.bin")[1]["x-amz-version-id"]
    s3.put("m/x.bin", b"two")
    origin, listing = listed(s3, "m/x.bin")
    assert read(origin, listing.files[0]) == b"two"
    s3.delete("m/x.bin")
    with pytest.raises(NotFound):
        listed(s3, "m/x.bin")
    with pytest.raises(NotFound):
        read(origin, listing.files[0])
    origin, listing = listed(s3, "m/x.bin", version_id=first)
    assert listing.files[0].version == first
    assert listing.ref == f"version {first}"
    assert read(origin, listing.files[0]) == b"one"
    with pytest.raises(NotFound, match="version id"):
        listed(s3, "m", version_id=first)


def test_the_region_of_the_configuration_file(s3: servers.S3, aws: Path) -> None:
    (aws / "config").write_text("[default]\nregion = eu-north-1\n[profile other]\nregion = sa-east-1\n")
    s3.put("m/x", b"1")
    env = {"AWS_REGION": "", "AWS_DEFAULT_REGION": "", "HOME": str(aws.parent)}
    for extra, region in (({}, "eu-north-1"), ({"AWS_PROFILE": "other"}, "sa-east-1")):
        s3.new_bucket()
        listed(s3, env={**env, **extra})
        assert isinstance(s3, servers.S3Stub)
        assert s3.log()[-1]["region"] == region


def test_pages_that_lead_in_a_circle() -> None:
    def answer(asked: Asked) -> None:
        token = "b" if "continuation-token=a" in asked.path else "a"
        row = f"<Contents><Key>m/{token}</Key><Size>1</Size></Contents><NextContinuationToken>{token}"
        asked.say(
            200,
            f"<ListBucketResult><IsTruncated>true</IsTruncated>{row}</NextContinuationToken></ListBucketResult>".encode(),
        )

    with scripted(answer) as server, pytest.raises(IntegrityError, match="does not advance"):
        opened("s3://b/m/", {}, endpoint_url=server.url, anon=True).listing(None, Stop())
    assert len(server.asked) == 3
