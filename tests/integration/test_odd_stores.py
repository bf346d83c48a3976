"""S3-compatible stores that page, redirect, refuse and mark folders in their own way; packed objects of Google's."""

from __future__ import annotations

import gzip
from collections.abc import Callable

import pytest

from mx_cli.base.errors import UsageError
from mx_cli.sources.s3_endpoint import Endpoint
from mx_cli.sources.sigv4 import Keys, Signer
from tests.rig import cachecheck
from tests.rig.origins import opened
from tests.rig.scripted import Asked, published, scripted
from tests.rig.scripted_origins import Bucket, GoogleBucket, error
from tests.rig.servers import Tls
from tests.support import Mx, Result, safetensors_bytes

WEIGHTS = safetensors_bytes({"w": ("U8", (100_000,), None)})
FILES = {"config.json": b'{"model_type": "x"}', "model.safetensors": WEIGHTS}
OBJECTS = {f"m/{name}": data for name, data in FILES.items()}


def fetched(mx: Mx, bucket: Bucket, uri: str = "s3://b/m") -> Result:
    with scripted(bucket) as server:
        env = {**bucket.env, "AWS_ENDPOINT_URL_S3": server.url, "MX_RETRY_FOR": "1s"}
        return mx("prefetch", uri, env=env)


# --- P-22, P-23, P-59: keys and folders --------------------------------------------------------------------------


def test_pages_with_tokens_of_any_characters(mx: Mx) -> None:
    more = {f"{number}.txt": b"%d" % number for number in range(7)}
    fetched(mx, Bucket(OBJECTS | {f"m/{name}": data for name, data in more.items()}, page=2)).ok()
    assert published(mx.cache) == cachecheck.sums(FILES | more)


def test_pages_of_a_store_that_goes_on_from_a_marker(mx: Mx) -> None:
    """The first version of the API has no tokens."""
    bucket = Bucket(OBJECTS | {"m/x.txt": b"x"})

    def hook(asked: Asked) -> bool:
        if "list-type" not in asked.path:
            return False
        from urllib.parse import parse_qs, urlsplit

        marker = parse_qs(urlsplit(asked.path).query).get("marker", [""])[0]
        left = [key for key in sorted(bucket.objects) if key > marker]
        rows = "".join(map(bucket.row, left[:1]))
        more = str(len(left) > 1).lower()
        asked.say(200, f"<ListBucketResult><IsTruncated>{more}</IsTruncated>{rows}</ListBucketResult>".encode())
        return True

    bucket.hook = hook
    fetched(mx, bucket).ok()
    assert published(mx.cache) == cachecheck.sums(FILES | {"x.txt": b"x"})


@pytest.mark.parametrize("marker", ["m", "m/sub", "m/sub_$folder$", "m_$folder$"])
def test_p23_empty_objects_that_stand_for_folders(mx: Mx, marker: str) -> None:
    """Also where the folder's name has no slash at its end; one for the whole checkpoint is not taken for it."""
    fetched(mx, Bucket({**OBJECTS, "m/sub/a.json": b"{}", marker: b""})).ok()
    assert published(mx.cache) == cachecheck.sums(FILES | {"sub/a.json": b"{}"})


def test_p09_an_empty_object_alone_is_a_file(mx: Mx) -> None:
    fetched(mx, Bucket({"m/empty.txt": b"", "m/other": b"x"}), "s3://b/m/empty.txt").ok()
    assert published(mx.cache) == cachecheck.sums({"empty.txt": b""})


def test_p23_a_file_with_bytes_is_no_marker(mx: Mx) -> None:
    assert "both a file and a folder" in fetched(mx, Bucket({"m/sub": b"x", "m/sub/a": b"y"})).exits(16).err


# --- P-12, P-14, P-25, P-29: what refusals mean ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("status", "code", "exit_code", "words"),
    [
        (200, "InternalError", 12, "InternalError (gave up"),
        (200, "SlowDown", 12, "SlowDown (gave up"),
        (200, "AccessDenied", 11, "access denied"),
        (200, "NoSuchBucket", 10, "no such bucket"),
        (200, "Whatever", 16, "an error in place of the answer"),
        (400, "ThrottlingException", 12, "gave up"),
        (403, "RequestLimitExceeded", 12, "gave up"),
        (400, "InvalidBucketName", 10, "no such bucket"),
        (403, "SecondLevelDomainForbidden", 11, "addressing_style = virtual"),
        (307, "TemporaryRedirect", 11, "--endpoint-url"),
        (301, "PermanentRedirect", 11, "--endpoint-url"),
    ],
)
def test_what_a_store_means(mx: Mx, status: int, code: str, exit_code: int, words: str) -> None:
    result = fetched(mx, Bucket(OBJECTS, lambda asked: "list-type" in asked.path and error(asked, status, code)))
    assert words in result.exits(exit_code).err
    assert not published(mx.cache)


@pytest.mark.parametrize(("status", "code"), [(400, "InvalidArgument"), (501, "NotImplemented")])
def test_what_is_no_matter_of_rights_has_no_hint_at_them(mx: Mx, status: int, code: str) -> None:
    result = fetched(mx, Bucket(OBJECTS, lambda asked: "list-type" in asked.path and error(asked, status, code)))
    assert result.code in (11, 12)
    assert "the credentials need" not in result.err


def test_p12_an_error_with_the_status_of_a_success_passes(mx: Mx) -> None:
    bucket = Bucket(OBJECTS)
    once = [True]

    def hook(asked: Asked) -> bool:
        return "list-type" in asked.path and bool(once) and once.pop() and error(asked, 200, "InternalError")

    bucket.hook = hook
    assert "1 retry" in fetched(mx, bucket).ok().err
    assert published(mx.cache) == cachecheck.sums(FILES)


def test_p25_a_region_that_only_the_endpoints_name_tells(mx: Mx) -> None:
    bucket = Bucket(OBJECTS)

    def hook(asked: Asked) -> bool:
        moved = "<Endpoint>b.s3-eu-west-1.amazonaws.com</Endpoint>"
        right = "/eu-west-1/s3/" in asked.headers["Authorization"]
        return not right and error(asked, 301, "PermanentRedirect", moved)

    bucket.hook = hook
    assert "the bucket is in eu-west-1" in fetched(mx, bucket).ok().err


@pytest.mark.parametrize("region", ["evil.example/", "a@evil.example", "x" * 100, "eu west"])
def test_p25_what_cannot_be_a_region_is_no_part_of_a_host(mx: Mx, region: str) -> None:
    """A signed request would go to it."""
    moved = {"x-amz-bucket-region": region}
    bucket = Bucket(OBJECTS, lambda asked: error(asked, 301, "PermanentRedirect", f"<Region>{region}</Region>", moved))
    result = fetched(mx, bucket).exits(11)
    assert "going on with that region" not in result.err


@pytest.mark.parametrize("digest", ["AAAA", "!!!", "AAAAAA==-3", ""])
def test_a_checksum_that_is_none_proves_nothing(mx: Mx, digest: str) -> None:
    bucket = Bucket(OBJECTS)
    bucket.headers = {"x-amz-checksum-sha256": digest, "x-amz-checksum-crc32c": digest}
    fetched(mx, bucket, "s3://b/m/model.safetensors").ok()


@pytest.mark.parametrize("listing", [b'{"items":"abc"}', b'{"items":[null]}', b"[" * 300_000, b"[]", b'{"items":{}'])
def test_a_listing_of_googles_that_is_none(mx: Mx, listing: bytes) -> None:
    with scripted(lambda asked: asked.say(200, listing) if "/o?" in asked.path else asked.say(404, b"{}")) as server:
        result = mx("prefetch", f"gs+{server.url}/b/m", env={"MX_RETRY_FOR": "1s"}).exits(16)
    assert "bug" not in result.err


# --- redirects ---------------------------------------------------------------------------------------------------

SESSION = {"AWS_SESSION_TOKEN": "SESSIONTOKEN1"}
KEYS = Keys("mxaccess", "mxsecret12345", "SESSIONTOKEN1")


def moving(where: Callable[[Asked], str], status: int = 307) -> Bucket:
    """A store that sends every request away for which `where` gives a place."""

    def hook(asked: Asked) -> bool:
        if place := where(asked):
            asked.say(status, b"", {"Location": place})
        return bool(place)

    return Bucket(OBJECTS, hook)


def is_signed(asked: Asked, host: str) -> bool:
    """Whether the request has the signature that the store would compute for it."""
    signer = Signer(KEYS, "us-east-1")
    signer._stamp = lambda: asked.headers["x-amz-date"]  # type: ignore[method-assign]
    own = {name: value for name, value in asked.headers.items() if name.lower() == "x-amz-checksum-mode"}
    expected = signer.sign(asked.method, f"http://{host}{asked.path}", own)["Authorization"]
    return bool(asked.headers["Authorization"] == expected)


def from_moved(mx: Mx, bucket: Bucket, uri: str = "s3://b/m", *options: str) -> Result:
    with scripted(bucket) as server:
        env = {**bucket.env, **SESSION, "AWS_ENDPOINT_URL_S3": server.url, "MX_RETRY_FOR": "1s"}
        return mx("prefetch", uri, *options, env=env)


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
@pytest.mark.parametrize("uri", ["s3://b/m", "s3://b/m/model.safetensors"])
def test_an_object_behind_a_signed_link_is_fetched_without_credentials(mx: Mx, status: int, uri: str) -> None:
    """Stores before a CDN, or before another store, answer with links that are good by themselves."""
    with scripted(lambda asked: asked.serve(OBJECTS[asked.path.partition("?")[0].removeprefix("/far/")])) as far:

        def where(asked: Asked) -> str:
            key = asked.path.partition("?")[0].removeprefix("/b/")
            return f"{far.url}/far/{key}?X-Amz-Signature=SIGNATURE1" if key in OBJECTS else ""

        result = from_moved(mx, moving(where, status), uri, "--requester-pays", "--range-size", "64KiB")
    assert far.asked
    assert result.ok()
    for asked in far.asked:
        names = {name.lower() for name in asked.headers}
        assert not {"authorization", "cookie"} & names
        assert not [name for name in names if name.startswith("x-amz-")]
    assert published(mx.cache).items() <= cachecheck.sums(FILES).items()


def test_a_signed_link_that_expires_is_asked_for_again(mx: Mx) -> None:
    good: list[str] = []

    def answer(asked: Asked) -> None:
        if asked.path.rpartition("=")[2] not in good:
            asked.say(403, b"expired")
            return
        asked.serve(OBJECTS[asked.path.partition("?")[0].removeprefix("/")])
        if asked.span(1) != (0, 1):
            good.clear()

    with scripted(answer) as far:

        def where(asked: Asked) -> str:
            key = asked.path.partition("?")[0].removeprefix("/b/")
            if key not in OBJECTS:
                return ""
            good.append(str(asked.number))
            return f"{far.url}/{key}?X-Amz-Signature={asked.number}"

        from_moved(mx, moving(where), "s3://b/m", "--range-size", "64KiB", "--max-connections", "1").ok()
    assert published(mx.cache) == cachecheck.sums(FILES)


def test_a_redirect_within_the_store_is_signed_anew(mx: Mx) -> None:
    """Also of listings; the path is signed as S3 wants it, however the store writes it."""
    wrong: list[str] = []

    def where(asked: Asked) -> str:
        host = asked.headers["Host"]
        if not is_signed(asked, host):
            wrong.append(asked.path)
        if asked.path.startswith("/b/moved") or "moved" in asked.path.partition("?")[2]:
            return ""
        path, _, query = asked.path.partition("?")
        moved = path.replace("/b", "/b/moved", 1).replace("m/", "%6d/") if not query else path
        return f"http://{host}{moved}?moved{'&' if query else ''}{query}"

    bucket = moving(where)
    bucket.objects |= {f"moved/{key}": data for key, data in OBJECTS.items()}
    bucket.objects |= {"m/a b+c.json": b"{}", "moved/m/a b+c.json": b"{}"}
    from_moved(mx, bucket).ok()
    assert published(mx.cache) == cachecheck.sums(FILES | {"a b+c.json": b"{}"})
    assert not wrong


def test_a_listing_is_not_followed_to_another_host(mx: Mx) -> None:
    with scripted(Bucket(OBJECTS)) as far:
        moved = moving(lambda asked: f"{far.url}{asked.path}" if "list-type" in asked.path else "")
        result = from_moved(mx, moved).exits(11)
    assert f"the bucket is at another endpoint, {far.url}" in result.err
    assert "--endpoint-url" in result.err
    assert not far.asked


def test_another_host_that_wants_credentials_is_named(mx: Mx) -> None:
    with scripted(lambda asked: asked.say(403)) as far:
        moved = moving(lambda asked: "" if "list-type" in asked.path else f"{far.url}{asked.path}")
        result = from_moved(mx, moved).exits(11)
    assert f"(at {far.url}/b/m/" in result.err
    assert "another host, which is sent no credentials" in result.err


def test_another_object_behind_a_redirect_is_not_taken(mx: Mx) -> None:
    with scripted(lambda asked: asked.serve(bytes(len(WEIGHTS)))) as far:
        moved = moving(lambda asked: "" if "list-type" in asked.path else f"{far.url}{asked.path}")
        assert "the object changed" in from_moved(mx, moved).exits(16).err


def test_redirects_in_a_circle(mx: Mx) -> None:
    moved = moving(lambda asked: "" if "list-type" in asked.path else f"http://{asked.headers['Host']}{asked.path}")
    assert "more than 8 redirects" in from_moved(mx, moved).exits(12).err


def test_nothing_is_followed_out_of_an_encrypted_connection(mx: Mx, tls: Tls) -> None:
    with scripted(Bucket(OBJECTS)) as far:
        moved = moving(lambda asked: "" if "list-type" in asked.path else f"{far.url}{asked.path}")
        with scripted(moved, tls) as server:
            env = {**moved.env, "AWS_ENDPOINT_URL_S3": server.url, "SSL_CERT_FILE": str(tls.ca)}
            result = mx("prefetch", "s3://b/m", env=env).exits(11)
    assert "at another endpoint" in result.err
    assert not far.asked


@pytest.mark.parametrize(
    ("endpoint", "moved", "trusted"),
    [
        ("", "https://b.s3.amazonaws.com/k", True),
        ("", "https://s3.us-east-1.amazonaws.com/b/k", True),
        ("", "https://b.s3.dualstack.us-east-1.amazonaws.com/k", True),
        ("", "https://b.s3-fips.us-east-1.amazonaws.com/k", True),
        ("", "http://b.s3.us-east-1.amazonaws.com/k", None),
        ("", "https://b.s3.us-east-1.amazonaws.com:444/k", False),
        ("", "https://b.s3.us-east-1.amazonaws.com.evil.example/k", False),
        ("", "https://s3.evil.example/b/k", False),
        ("", "https://d111.cloudfront.net/k", False),
        ("", "https://x.execute-api.us-east-1.amazonaws.com/k", False),
        ("", "https://evils3.us-east-1.amazonaws.com/k", False),
        ("http://store:9000", "http://b.store:9000/k", True),
        ("http://store:9000", "http://c.store:9000/k", False),
        ("http://store:9000", "http://store:9001/b/k", False),
        ("http://store:9000", "https://store:9000/b/k", False),
        ("http://store", "https://store/b/k", True),
        ("https://store", "http://store/b/k", None),
        ("http://store:9000", "http://store:9000@evil.example/b/k", False),
        ("https://store", "https://s3.us-east-1.amazonaws.com/b/k", False),
    ],
)
def test_who_is_the_same_store(endpoint: str, moved: str, trusted: bool | None) -> None:
    server = Endpoint("b", endpoint, {}, None)
    place = server.follow(server.server("us-east-1") + "/k", moved, "us-east-1")
    assert (None if place is None else place.trusted) is trusted


# --- where a bucket is -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("uri", "words"),
    [
        ("s3://arn:aws:s3:us-west-2:123456789012:accesspoint/ap/m", "alias"),
        ("s3://models--usw2-az1--x-s3/m", "directory buckets"),
    ],
)
def test_what_is_no_plain_bucket(uri: str, words: str) -> None:
    with pytest.raises(UsageError) as caught:
        opened(uri, Bucket.env)
    assert words in caught.value.what + caught.value.hint


@pytest.fixture
def server_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """The URL that a bucket's objects are asked for at."""

    def found(uri: str, written: str = "", **environ: str) -> str:
        config = tmp_path_factory.mktemp("aws") / "config"
        config.write_text(f"[default]\nregion = eu-west-1\n{written}\n")
        environ |= {"AWS_CONFIG_FILE": str(config)}
        origin = opened(uri, environ)
        return str(origin._server())  # type: ignore[attr-defined]

    return found


def test_p59_the_bucket_is_in_the_host_or_in_the_path(server_of: Callable[..., str]) -> None:
    virtual, path = "s3 =\n  addressing_style = virtual", "s3 =\n  addressing_style = path"
    elsewhere = {"AWS_ENDPOINT_URL_S3": "https://oss.example.com:8443/store"}
    assert server_of("s3://b-1/m") == "https://b-1.s3.eu-west-1.amazonaws.com"
    assert server_of("s3://b-1/m", path) == "https://s3.eu-west-1.amazonaws.com/b-1"
    assert server_of("s3://b.1/m", virtual) == "https://s3.eu-west-1.amazonaws.com/b.1"
    assert server_of("s3://b-1/m", **elsewhere) == "https://oss.example.com:8443/store/b-1"
    assert server_of("s3://b-1/m", virtual, **elsewhere) == "https://b-1.oss.example.com:8443/store"
    assert server_of("s3://b-1/m", virtual, AWS_ENDPOINT_URL="http://127.0.0.1:9000") == "http://127.0.0.1:9000/b-1"


def test_hosts_for_ipv6_and_fips(server_of: Callable[..., str]) -> None:
    assert server_of("s3://b-1/m", AWS_USE_DUALSTACK_ENDPOINT="true").startswith("https://b-1.s3.dualstack.eu-west-1.")
    assert server_of("s3://b-1/m", "use_fips_endpoint = true").startswith("https://b-1.s3-fips.eu-west-1.")


# --- Google ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("uri", ["gs://b/m", "gs://b/m/config.json"])
def test_what_google_holds_packed_comes_unpacked(mx: Mx, uri: str) -> None:
    """Its size and digests are those of the packed bytes, and pieces of it cannot be had."""
    config = b'{"model_type": "x", "text": "' + b"x" * 5000 + b'"}'
    objects = OBJECTS | {"m/config.json": config}
    with scripted(GoogleBucket(objects, {"m/config.json": gzip.compress(config)})) as server:
        mx("prefetch", uri, env={"STORAGE_EMULATOR_HOST": server.url}).ok()
    wanted = {"config.json": config} | ({} if uri.endswith(".json") else {"model.safetensors": WEIGHTS})
    assert published(mx.cache) == cachecheck.sums(wanted)


def test_p23_empty_objects_of_google_that_stand_for_folders(mx: Mx) -> None:
    with scripted(GoogleBucket({**OBJECTS, "m/sub": b"", "m/sub/a.json": b"{}", "m": b""})) as server:
        mx("prefetch", "gs://b/m", env={"STORAGE_EMULATOR_HOST": server.url}).ok()
    assert published(mx.cache) == cachecheck.sums(FILES | {"sub/a.json": b"{}"})
