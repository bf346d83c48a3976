"""P-14, P-15, P-17 to P-19, P-21, P-37, P-38: where requests go, what they carry, and what refusals mean."""

from __future__ import annotations

import hashlib
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import quote

import pytest

from tests.rig import servers
from tests.rig.scripted import Asked, Scripted, manifests, published, scripted
from tests.support import Mx, Result, capability, checkpoint_files, make_checkpoint, noise

QUICK = {"MX_RETRY_FOR": "1s"}
DATA = noise("origin", 300_000)


def sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def has(result: Result, files: dict[str, bytes]) -> None:
    directory = Path(result.ok().json()["dir"])
    found = {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}
    assert {name: sha(data) for name, data in found.items()} == {name: sha(data) for name, data in files.items()}


def refused(mx: Mx, result: Result, code: int, *says: str) -> Result:
    result.exits(code)
    assert "Traceback" not in result.err
    for text in says:
        assert text.lower() in result.err.lower(), result.err
    assert published(mx.cache) == {}
    assert manifests(mx.cache) == []
    return result


def closed_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


# --- P-14: nothing there -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["file:///nope", "/nope", "./nope", "~/nope"])
def test_p14_a_path_that_is_not_there(mx: Mx, place: str) -> None:
    refused(mx, mx("prefetch", place), 10, "nope")


@pytest.mark.parametrize("kind", ["empty", "only directories", "only hidden"])
def test_p14_a_directory_with_nothing_in_it(mx: Mx, tmp_path: Path, kind: str) -> None:
    place = tmp_path / "model"
    (place / "sub").mkdir(parents=True) if kind == "only directories" else place.mkdir()
    if kind == "only hidden":
        (place / ".git").mkdir()
    refused(mx, mx("prefetch", place), 10, str(place))


@pytest.mark.parametrize("key", ["nope/", "nope", "", "m/config.jso"])
@pytest.mark.parametrize("store", ["s3", "gcs"])
def test_p14_a_prefix_with_nothing_below(mx: Mx, request: pytest.FixtureRequest, store: str, key: str) -> None:
    origin = request.getfixturevalue(store)
    if key:
        origin.put("m/config.json", b"{}")
    result = mx("prefetch", origin.uri(key), env=origin.env)
    refused(mx, result, 10, origin.uri(key).rstrip("/"))
    assert "retry" not in result.err


@pytest.mark.parametrize("store", ["s3", "gcs"])
def test_p14_a_bucket_that_is_not_there(mx: Mx, request: pytest.FixtureRequest, store: str) -> None:
    origin = request.getfixturevalue(store)
    scheme = origin.uri().partition(":")[0]
    refused(mx, mx("prefetch", f"{scheme}://no-such-bucket-here/m", env=origin.env), 10, "no-such-bucket-here")


@pytest.mark.parametrize(
    "arguments", [["--include", "*.nope"], ["--exclude", "*"], ["--include", "a", "--exclude", "a"]]
)
def test_p14_patterns_that_match_nothing(mx: Mx, hub: servers.Hub, arguments: list[str]) -> None:
    hub.commit({"a": b"a", "config.json": b"{}"})
    refused(mx, mx("prefetch", hub.uri, *arguments, env=hub.env), 10)


@pytest.mark.parametrize("uri", ["hf://org/model@nope", "hf://org/model/nope", f"hf://org/model@{'0' * 40}"])
def test_p14_no_such_revision_or_folder(mx: Mx, hub: servers.Hub, uri: str) -> None:
    hub.commit({"config.json": b"{}"})
    refused(mx, mx("prefetch", uri, env=hub.env), 10, uri.rpartition("@")[2].rpartition("/")[2])


def test_p14_an_empty_repository(mx: Mx, hub: servers.Hub) -> None:
    hub.commit({})
    refused(mx, mx("prefetch", hub.uri, env=hub.env), 10, "hf://org/model")


# --- P-15: an object, a prefix, its siblings ---------------------------------------------------------------------


@pytest.mark.parametrize("store", ["s3", "gcs"])
@pytest.mark.parametrize("key", ["m", "m/"])
def test_p15_no_siblings(mx: Mx, request: pytest.FixtureRequest, store: str, key: str) -> None:
    origin = request.getfixturevalue(store)
    files = {"config.json": b"{}", "sub/m-hf/x.bin": b"mine"}
    for name, data in files.items():
        origin.put(f"m/{name}", data)
    for other in ("m-hf/extra.bin", "m.json", "mm/config.json", "m2", "M/config.json", "n/m/config.json"):
        origin.put(other, b"not mine")
    has(mx("prefetch", origin.uri(key), "--all", "--json", env=origin.env), files)


@pytest.mark.parametrize("store", ["s3", "gcs"])
def test_p15_p59_an_exact_object_wins_unless_a_slash_says_folder(
    mx: Mx, request: pytest.FixtureRequest, store: str
) -> None:
    origin = request.getfixturevalue(store)
    for key, data in {"a/b/model.bin": b"one", "a/b/c/d.json": b"{}", "a/b": b"object"}.items():
        origin.put(key, data)
    env = origin.env
    has(mx("prefetch", origin.uri("a/b/model.bin"), "--json", env=env), {"model.bin": b"one"})
    has(mx("prefetch", origin.uri("a/b"), "--json", env=env), {"b": b"object"})
    below = {"model.bin": b"one", "c/d.json": b"{}"}
    has(mx("prefetch", origin.uri("a/b/"), "--all", "--json", env=env), below)


# --- P-17: redirects ---------------------------------------------------------------------------------------------


def basic(url: str) -> str:
    return url.replace("://", "://someone:PASSWORD@")


@pytest.mark.parametrize(
    ("status", "location"),
    [
        (302, "/there?etag=1&x=%2F"),
        (301, "there?etag=1"),
        (303, "//{host}/there?q"),
        (307, "?only=query"),
        (308, "{url}/a%20b"),
    ],
)
def test_p17_locations(mx: Mx, status: int, location: str) -> None:
    def answer(asked: Asked) -> None:
        if asked.path == "/dir/model.bin":
            where = location.format(host=server.url.partition("//")[2], url=server.url)
            asked.say(status, b"", {"Location": where})
        else:
            asked.serve(DATA)

    with scripted(answer) as server:
        has(mx("prefetch", f"{server.url}/dir/model.bin", "--json"), {"model.bin": DATA})
    wanted = {
        "/there?etag=1&x=%2F": "/there?etag=1&x=%2F",
        "there?etag=1": "/dir/there?etag=1",
        "//{host}/there?q": "/there?q",
        "?only=query": "/dir/model.bin?only=query",
        "{url}/a%20b": "/a%20b",
    }[location]
    assert {line.partition(" ")[2] for line in server.lines()} == {"/dir/model.bin", wanted}


def test_p17_credentials_stay_at_their_host(mx: Mx, faultd: servers.Faultd) -> None:
    def answer(asked: Asked) -> None:
        if asked.path.startswith("/near"):
            asked.say(302, b"", {"Location": "/still-here"})
        elif asked.path == "/still-here":
            asked.say(307, b"", {"Location": faultd.file("ok", 1000, "x").replace("127.0.0.1", "localhost")})
        else:
            asked.say(404)

    with scripted(answer) as server:
        mx("prefetch", basic(f"{server.url}/near/x")).ok()
    assert all(entry.headers.get("Authorization") for entry in server.asked)
    assert faultd.log()
    assert not [entry for entry in faultd.log() if entry["auth"]]


def test_p17_another_port_is_another_host(mx: Mx, faultd: servers.Faultd, hub: servers.Hub) -> None:
    """The token of a hub does not follow a link to a store, for small and for large files."""
    hub.commit({"config.json": b"{}", "model.bin": DATA})

    def answer(asked: Asked) -> None:
        asked.serve(DATA)

    with scripted(answer) as store:
        hub.flags(f"to={quote(f'{store.url}/blob', safe='')}")
        mx("prefetch", hub.uri, "--include", "model.bin", "--json", env=hub.env | {"HF_TOKEN": "hf_TESTTOKEN123"})
    assert store.asked
    assert not [entry for entry in store.asked if entry.headers.get("Authorization")]
    assert [entry for entry in hub.log() if entry["auth"]]


@pytest.mark.parametrize("kind", ["loop", "endless"])
def test_p17_redirects_that_do_not_end(mx: Mx, kind: str) -> None:
    def answer(asked: Asked) -> None:
        asked.say(302, b"", {"Location": "/x" if kind == "loop" else f"/x{asked.number}"})

    with scripted(answer) as server:
        result = refused(mx, mx("prefetch", f"{server.url}/x"), 12, "redirect")
    assert "retry" not in result.err
    assert len(server.asked) <= 10


@pytest.mark.parametrize(
    "target",
    [
        "file:///etc/passwd",
        "ftp://127.0.0.1/x",
        "javascript:1",
        "http://127.0.0.1:99999/x",
        "http://[::/x",
        "http://h:x/",
    ],
)
def test_p17_redirects_to_something_else(mx: Mx, target: str) -> None:
    with scripted(lambda asked: asked.say(302, b"", {"Location": target})) as server:
        refused(mx, mx("prefetch", f"{server.url}/x"), 16, "not http")


@pytest.mark.parametrize(("status", "code"), [(401, 11), (403, 11), (404, 10), (410, 10), (500, 12), (418, 12)])
def test_p17_the_hop_that_failed_is_named(mx: Mx, status: int, code: int) -> None:
    with (
        scripted(lambda asked: asked.say(status, b"no")) as far,
        scripted(lambda asked: asked.say(302, b"", {"Location": f"{far.url}/blob?sig=SIGNATURE"})) as near,
    ):
        result = refused(mx, mx("prefetch", f"{near.url}/x", env=QUICK), code, f"{far.url}/blob", str(status))
    assert "SIGNATURE" not in result.err


def test_p17_a_redirect_to_nobody(mx: Mx) -> None:
    port = closed_port()
    with scripted(lambda asked: asked.say(302, b"", {"Location": f"http://127.0.0.1:{port}/x"})) as server:
        refused(mx, mx("prefetch", f"{server.url}/x", env=QUICK), 12, f"127.0.0.1:{port}", "refused")


# --- HEAD is refused ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("status", [400, 403, 405, 501])
@pytest.mark.parametrize("ranges", [True, False])
def test_a_server_without_head(mx: Mx, status: int, ranges: bool) -> None:
    def answer(asked: Asked) -> None:
        if asked.method == "HEAD":
            asked.say(status)
        elif ranges:
            asked.serve(DATA)
        else:
            asked.say(200, DATA, {"ETag": '"e"'})

    with scripted(answer) as server:
        url = f"{server.url}/x.bin?X-Amz-Signature=SIGNATURE"
        has(mx("prefetch", url, "--json", env={"MX_RANGE_SIZE": "100000"}), {"x.bin": DATA})


@pytest.mark.parametrize(("status", "code"), [(401, 11), (404, 10), (503, 12)])
def test_a_refusal_of_head_that_means_it(mx: Mx, status: int, code: int) -> None:
    with scripted(lambda asked: asked.say(status)) as server:
        refused(mx, mx("prefetch", f"{server.url}/x.bin", env=QUICK), code, str(status))


# --- names in URLs, IPv6, several URLs ---------------------------------------------------------------------------


@capability("ipv6")
def test_an_ipv6_origin(mx: Mx, start_faultd: Callable[..., servers.Faultd], tls: servers.Tls) -> None:
    for server in (start_faultd(host="::1"), start_faultd(host="::1", tls=tls)):
        url = server.file("cutonce=1000", 3_000_000, "x")
        result = mx("prefetch", url, "--json", env={"MX_CA_BUNDLE": tls.ca, "MX_RANGE_SIZE": "1MiB"})
        assert sha((Path(result.ok().json()["dir"]) / "x").read_bytes()) == server.sum(3_000_000, "x")
        assert server.log()[0]["host"] == server.url.partition("//")[2]


@pytest.mark.parametrize(
    ("written", "asked", "name"),
    [
        ("/a%20b.bin", "/a%20b.bin", "a b.bin"),
        ("/a%2520b.bin", "/a%2520b.bin", "a%20b.bin"),
        ("/a b.bin", "/a%20b.bin", "a b.bin"),
        ("/a+b.bin", "/a+b.bin", "a+b.bin"),
        ("/m.bin?download=true&v=1%262", "/m.bin?download=true&v=1%262", "m.bin"),
        ("/m.bin#fragment", "/m.bin", "m.bin"),
        ("/%E4%BD%A0.bin", "/%E4%BD%A0.bin", "你.bin"),
        ("/你.bin", "/%E4%BD%A0.bin", "你.bin"),
        ("/double//m.bin", "/double//m.bin", "m.bin"),
    ],
)
def test_names_in_urls(mx: Mx, written: str, asked: str, name: str) -> None:
    with scripted(lambda request: request.serve(DATA)) as server:
        has(mx("prefetch", server.url + written, "--json"), {name: DATA})
    assert {line.partition(" ")[2] for line in server.lines()} == {asked}


@pytest.mark.parametrize("path", ["", "/", "/dir/", "/..", "/%2e%2e", "/a%2fb", "/a%00b", "/."])
def test_urls_without_a_usable_name(mx: Mx, path: str) -> None:
    """Whatever they are taken for, no file lands outside its snapshot, and nothing crashes."""
    with scripted(lambda asked: asked.serve(DATA)) as server:
        result = mx("prefetch", server.url + path)
    assert result.code in (0, 2, 10, 16)
    assert "bug in mx" not in result.err
    assert sorted(p.name for p in mx.cache.parent.iterdir()) in (["cache", "home"], ["home"])
    for name in published(mx.cache):
        assert ".." not in Path(name).parts


def test_two_links_that_differ_in_their_signature_are_one_file(mx: Mx) -> None:
    with scripted(lambda asked: asked.serve(DATA)) as server:
        first = mx("prefetch", f"{server.url}/m.bin?X-Amz-Signature=ONE&X-Amz-Date=1&v=2", "--json").ok().json()
        second = mx("prefetch", f"{server.url}/m.bin?X-Amz-Signature=TWO&X-Amz-Date=3&v=2", "--json").ok().json()
        other = mx("prefetch", f"{server.url}/m.bin?v=3", "--json").ok().json()
    assert (second["role"], second["dir"]) == ("hit", first["dir"])
    assert other["dir"] != first["dir"]


@pytest.mark.parametrize("url", ["http://127.0.0.1:99999/x", "http://127.0.0.1:x/y", "http:///x", "https://[::1/x"])
def test_what_is_no_url(mx: Mx, url: str) -> None:
    refused(mx, mx("prefetch", url), 2)


@pytest.mark.parametrize("uri", ["http://127.0.0.1:1/x", "http://no-such-host.invalid/x", "hf://org/model", "s3://b/k"])
def test_nobody_is_there(mx: Mx, uri: str) -> None:
    env = {"HF_ENDPOINT": "http://127.0.0.1:1", "MX_ENDPOINT_URL": "http://127.0.0.1:1", "MX_ANON": "1"}
    result = refused(mx, mx("prefetch", uri, env=env | QUICK), 12)
    assert result.seconds < 20


# --- P-18: whom to trust -----------------------------------------------------------------------------------------


@pytest.fixture
def secure(start_faultd: Callable[..., servers.Faultd], tls: servers.Tls) -> servers.Faultd:
    return start_faultd(tls=tls)


@pytest.mark.parametrize(
    "variable",
    ["MX_CA_BUNDLE", "SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "AWS_CA_BUNDLE", "CURL_CA_BUNDLE", "--ca-bundle"],
)
def test_p18_a_private_ca(mx: Mx, secure: servers.Faultd, tls: servers.Tls, variable: str) -> None:
    url = secure.file("ok", 1000, "x")
    if variable.startswith("--"):
        mx("prefetch", url, variable, tls.ca).ok()
    else:
        mx("prefetch", url, env={variable: tls.ca}).ok()


def test_p18_no_trust_no_transfer(mx: Mx, secure: servers.Faultd) -> None:
    url = secure.file("ok", 1000, "x")
    result = refused(mx, mx("prefetch", url), 11, "certificate verify failed", "--ca-bundle", "SSL_CERT_FILE")
    assert "retry" not in result.err
    assert result.seconds < 10
    careless = mx("prefetch", url, "--insecure").ok()
    assert "warning" in careless.err
    assert "certificates" in careless.err


@pytest.mark.parametrize("kind", ["missing", "garbage", "directory"])
def test_p18_a_bundle_that_is_none(mx: Mx, secure: servers.Faultd, tmp_path: Path, kind: str) -> None:
    bundle = tmp_path / "bundle"
    if kind == "garbage":
        bundle.write_text("no certificate")
    elif kind == "directory":
        bundle.mkdir()
    result = mx("prefetch", secure.file("ok", 1000, "x"), "--ca-bundle", bundle)
    refused(mx, result, 11 if kind == "directory" else 2, str(bundle) if kind != "directory" else "certificate")


def test_p18_a_certificate_for_another_name(mx: Mx, secure: servers.Faultd, tls: servers.Tls) -> None:
    url = secure.file("ok", 1000, "x").replace("127.0.0.1", "127.1")
    refused(mx, mx("prefetch", url, env={"MX_CA_BUNDLE": tls.ca} | QUICK), 11, "certificate verify failed")


def test_p18_the_same_bundle_for_hub_and_stores(
    mx: Mx, start_faultd: Callable[..., servers.Faultd], tls: servers.Tls, nginx: servers.Nginx, tmp_path: Path
) -> None:
    hub = start_faultd(tls=tls, hub=tmp_path / "hub-tls")
    assert isinstance(hub, servers.Hub)
    hub.commit({"config.json": b"{}"})
    store = nginx.s3.new_bucket()
    store.put("m/config.json", b"{}")
    s3 = {"MX_ENDPOINT_URL": nginx.s3_tls.endpoint, "MX_ANON": "1"}
    for uri, env in ((hub.uri, hub.env), (store.uri("m"), s3)):
        assert "certificate verify failed" in mx("prefetch", uri, env=env | QUICK).exits(11).err
        has(mx("prefetch", uri, "--json", env=env | {"SSL_CERT_FILE": tls.ca}), {"config.json": b"{}"})


# --- P-19: mirrors -----------------------------------------------------------------------------------------------


@contextmanager
def mirror(hub: servers.Hub, *dropped: str) -> Iterator[Scripted]:
    """A proxy before the hub that loses headers, and what the API says of commits with "sha"."""

    def answer(asked: Asked) -> None:
        wanted = ("Range", "If-Match", "If-Range")
        headers = {name: asked.headers[name] for name in wanted if asked.headers.get(name)}
        status, head, body = servers.request(asked.method, hub.url + asked.path, headers=headers)
        kept = {name: value for name, value in head.items() if name not in ("date", "server", *dropped)}
        length = kept.pop("content-length", str(len(body)))
        if "sha" in dropped and "/revision/" in asked.path:
            body = b'{"id": "org/model"}'
            length = str(len(body))
        asked.say(status, body, kept | {"Content-Length": length})

    with scripted(answer) as server:
        yield server


@pytest.mark.parametrize("dropped", [["x-repo-commit"], ["etag"], ["x-repo-commit", "etag", "sha"]], ids=" ".join)
def test_p19_a_pinned_commit_through_a_mirror(mx: Mx, hub: servers.Hub, dropped: list[str]) -> None:
    files = checkpoint_files(shards=2, size=300_000)
    sha40 = hub.commit(files)
    with mirror(hub, *dropped) as server:
        has(mx("prefetch", hub.uri, "--revision", sha40, "--json", env={"HF_ENDPOINT": server.url}), files)


def test_p19_a_branch_needs_a_commit(mx: Mx, hub: servers.Hub) -> None:
    hub.commit(checkpoint_files(shards=1, size=1000))
    with mirror(hub, "x-repo-commit", "sha") as server:
        result = mx("prefetch", hub.uri, env={"HF_ENDPOINT": server.url})
    refused(mx, result, 10, "X-Repo-Commit", "--revision")


def test_p19_a_branch_where_only_headers_say_it(mx: Mx, hub: servers.Hub) -> None:
    files = checkpoint_files(shards=1, size=1000)
    sha40 = hub.commit(files)
    with mirror(hub, "sha") as server:
        result = mx("prefetch", hub.uri, "--json", env={"HF_ENDPOINT": server.url})
    has(result, files)
    assert result.json()["revision"] == sha40


# --- P-21: refused, or not there ---------------------------------------------------------------------------------


def test_p21_a_url_that_wants_credentials(mx: Mx, faultd: servers.Faultd) -> None:
    url = faultd.file("auth=secret", 1000, "x")
    result = refused(mx, mx("prefetch", url), 11, "401")
    assert "retry" not in result.err
    assert len(faultd.log()) <= 2


@pytest.mark.parametrize("token", ["", "hf_WRONGTOKEN99"])
@pytest.mark.parametrize("flags", ["auth=hf_RIGHTTOKEN1", "gated"])
def test_p21_a_hub_that_refuses(mx: Mx, hub: servers.Hub, flags: str, token: str) -> None:
    hub.commit({"config.json": b"{}"})
    hub.flags(flags)
    result = mx("prefetch", hub.uri, env=hub.env | {"HF_TOKEN": token})
    refused(mx, result, 11, "token" if flags != "gated" or token else "gated")
    assert "retry" not in result.err
    assert "hint: " in result.err
    if flags != "gated":
        assert ("present" in result.err) == bool(token)


SHA = "a" * 40
ANSWERS = {
    "nothing": b"",
    "no json": b"not json",
    "a list": b"[]",
    "no sha": b"{}",
    "a number": b'{"sha": 5}',
    "deep": b"[" * 100_000,
    "no files": f'{{"sha":"{SHA}","siblings":[]}}'.encode(),
    "no names": f'{{"sha":"{SHA}","siblings":[5,{{"x":1}},null,{{"rfilename":7}}]}}'.encode(),
    "a way out": f'{{"sha":"{SHA}","siblings":[{{"rfilename":"../x"}}]}}'.encode(),
    "an absolute path": f'{{"sha":"{SHA}","siblings":[{{"rfilename":"/etc/x"}}]}}'.encode(),
}


@pytest.mark.parametrize("kind", ANSWERS)
def test_a_hub_that_answers_nonsense(mx: Mx, kind: str) -> None:
    with scripted(lambda asked: asked.say(200, ANSWERS[kind], {"Content-Type": "application/json"})) as server:
        result = mx("prefetch", "hf://org/model", env={"HF_ENDPOINT": server.url} | QUICK)
    refused(mx, result, 16 if kind in ("a way out", "an absolute path") else 10)


def test_p06_a_login_page_instead_of_the_hub(mx: Mx) -> None:
    with scripted(
        lambda asked: asked.say(200, b"<html>log in", {"Content-Type": "text/html; charset=utf-8"})
    ) as server:
        result = mx("prefetch", "hf://org/model", env={"HF_ENDPOINT": server.url} | QUICK)
    refused(mx, result, 16, "text/html")


LISTING = b"<ListBucketResult>%s</ListBucketResult>"
PAGES = {
    "nothing": (b"", 16),
    "a page": (b"<html/>", 16),
    "no objects": (LISTING % b"", 10),
    "no size": (LISTING % b"<Contents><Key>m/a</Key></Contents>", 16),
    "no way on": (LISTING % b"<IsTruncated>true</IsTruncated>", 16),
    "a way out": (LISTING % b"<Contents><Key>m/../../x</Key><Size>1</Size></Contents>", 16),
}


@pytest.mark.parametrize("kind", PAGES)
def test_a_store_that_answers_nonsense(mx: Mx, kind: str) -> None:
    body, code = PAGES[kind]

    def answer(asked: Asked) -> None:
        asked.say(200, body, {"Content-Type": "application/xml"}) if "list-type" in asked.path else asked.say(404)

    with scripted(answer) as server:
        env = {"MX_ENDPOINT_URL": server.url, "MX_ANON": "1"} | QUICK
        refused(mx, mx("prefetch", "s3://bucket/m", env=env), code)


def test_p21_no_fallback_to_an_older_snapshot(mx: Mx, hub: servers.Hub) -> None:
    hub.commit({"config.json": b"{}"})
    mx("prefetch", hub.uri, env=hub.env).ok()
    hub.flags("auth=hf_RIGHTTOKEN1")
    for more in ([], ["--if-unreachable", "cached"]):
        assert mx("prefetch", hub.uri, *more, env=hub.env).exits(11).out == ""


def test_p21_unreachable_may_use_the_cache_when_told_to(mx: Mx, hub: servers.Hub) -> None:
    sha40 = hub.commit({"config.json": b"{}"})
    mx("prefetch", hub.uri, env=hub.env).ok()
    env = {"HF_ENDPOINT": f"http://127.0.0.1:{closed_port()}"} | QUICK
    hint = f"hint: the cache has {sha40}: --offline uses it, or --if-unreachable cached\n"
    assert hint in mx("prefetch", hub.uri, env=env).exits(12).err
    nowhere = env | {"HF_ENDPOINT": "http://hub.invalid:1"}
    assert hint in mx("prefetch", hub.uri, env=nowhere).exits(12).err
    assert hint not in mx("prefetch", f"{hub.uri}-2", env=env).exits(12).err
    used = mx("prefetch", hub.uri, "--if-unreachable", "cached", "--json", env=env).ok()
    assert (used.json()["role"], used.json()["revision"]) == ("hit", sha40)
    assert "ago" in used.err


@pytest.mark.parametrize(
    ("status", "error", "code"),
    [
        (404, "RepoNotFound", 10),
        (404, "RevisionNotFound", 10),
        (404, "EntryNotFound", 10),
        (401, "RepoNotFound", 11),
        (403, "GatedRepo", 11),
        (401, "GatedRepo", 11),
        (404, "", 10),
        (403, "", 11),
        (451, "", 11),
    ],
)
def test_p21_what_a_hub_means(mx: Mx, status: int, error: str, code: int) -> None:
    with scripted(lambda asked: asked.say(status, b"{}", {"X-Error-Code": error} if error else None)) as server:
        result = refused(mx, mx("prefetch", "hf://org/model", env={"HF_ENDPOINT": server.url} | QUICK), code)
    assert "retry" not in result.err


# --- P-38: tokens from files and variables -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "notice", "how"),
    [
        ("hf_TESTTOKEN123", False, "HF_TOKEN"),
        ("hf_TESTTOKEN123\n", True, "HF_TOKEN"),
        ("hf_TESTTOKEN123\n", True, "file"),
        ("  hf_TESTTOKEN123\r\n", True, "HF_TOKEN"),
        ('"hf_TESTTOKEN123"', True, "file"),
        ("'hf_TESTTOKEN123'\n", True, "HF_TOKEN"),
    ],
)
def test_p38_a_token_with_something_around_it(
    mx: Mx, hub: servers.Hub, tmp_path: Path, value: str, notice: bool, how: str
) -> None:
    hub.commit({"config.json": b"{}"})
    hub.flags("auth=hf_TESTTOKEN123")
    if how == "file":
        (tmp_path / "token").write_text(value)
        result = mx("prefetch", hub.uri, "--hf-token-file", tmp_path / "token", env=hub.env)
    else:
        result = mx("prefetch", hub.uri, env=hub.env | {"HF_TOKEN": value})
    result.ok()
    assert "TESTTOKEN" not in result.err + result.out
    if how == "HF_TOKEN" or '"' in value or "'" in value or value.startswith(" "):
        assert ("left out" in result.err) == notice


@pytest.mark.parametrize("value", ["", "  ", "\n", '""'])
def test_p38_an_empty_token_is_none(mx: Mx, hub: servers.Hub, value: str) -> None:
    hub.commit({"config.json": b"{}"})
    mx("prefetch", hub.uri, env=hub.env | {"HF_TOKEN": value}).ok()
    assert not [entry for entry in hub.log() if entry["auth"]]


@pytest.mark.parametrize("value", ["hf_TEST\nTOKEN", "hf_TEST\x01TOKEN", "hf_TEST TOKEN", "hf_TESTé"])
def test_p38_what_no_header_can_carry(mx: Mx, hub: servers.Hub, value: str) -> None:
    hub.commit({"config.json": b"{}"})
    result = refused(mx, mx("prefetch", hub.uri, env=hub.env | {"HF_TOKEN": value}), 2, "HF_TOKEN")
    assert "hf_TEST" not in result.err


# --- P-37: secrets -----------------------------------------------------------------------------------------------

SECRETS = ["TESTTOKEN123", "PASSWORD", "SIGNATURE", "PROXYWORD", "AWSSECRETKEY", "SESSIONTOKEN"]


def spilled(mx: Mx, result: Result, *places: Path) -> list[str]:
    """Where a secret is to be read, as "secret in place"."""
    found = [f"{secret} in stdout" for secret in SECRETS if secret in result.out]
    found += [f"{secret} in stderr" for secret in SECRETS if secret in result.err]
    for root in (mx.cache, mx.home, *places):
        for path in root.rglob("*"):
            text = str(path) + (path.read_bytes().decode("latin-1") if path.is_file() else "")
            found += [f"{secret} in {path}" for secret in SECRETS if secret in text]
    return found


SCENES = {
    "ok": ("{url}/f/ok/1000/x?X-Amz-Signature=SIGNATURE&token=SIGNATURE", 0),
    "userinfo": ("{auth}/f/ok/1000/x", 0),
    "401": ("{auth}/f/auth=other/1000/x?sig=SIGNATURE", 11),
    "404": ("{auth}/nope?X-Goog-Signature=SIGNATURE", 10),
    "html": ("{auth}/f/html/1000/x?Signature=SIGNATURE", 16),
    "retries": ("{auth}/f/fail=503:99/1000/x?X-Amz-Security-Token=SIGNATURE", 12),
    "size": ("{auth}/f/over=5/1000/x?access_token=SIGNATURE", 16),
    "refused": ("http://u:PASSWORD@127.0.0.1:1/x?sig=SIGNATURE", 12),
    "no host": ("http://u:PASSWORD@[::bad/x?sig=SIGNATURE", 2),
    "s3": ("s3://KEY:PASSWORD@bucket/key", 2),
    "scheme": ("ftp://u:PASSWORD@host/x?sig=SIGNATURE", 2),
    "control": ("http://u:PASSWORD@host/x\x01?sig=SIGNATURE", 2),
}


@pytest.mark.parametrize("scene", SCENES)
def test_p37_no_secret_is_told(mx: Mx, faultd: servers.Faultd, tmp_path: Path, scene: str) -> None:
    place = tmp_path / "out"
    place.mkdir()
    env = {
        "HF_TOKEN": "hf_TESTTOKEN123",
        "AWS_ACCESS_KEY_ID": "AKIAEXAMPLE",
        "AWS_SECRET_ACCESS_KEY": "AWSSECRETKEY",
        "AWS_SESSION_TOKEN": "SESSIONTOKEN",
        "MX_DEBUG": "1",
        "MX_TERMINATION_LOG": place / "termination",
        "MX_RESULT": place / "result.json",
    }
    uri, code = SCENES[scene]
    uri = uri.format(url=faultd.url, auth=basic(faultd.url))
    loud = ["--json", "--log-format", "json", "-vv"] if len(scene) % 2 else []
    result = mx("prefetch", uri, *loud, env=env | QUICK).exits(code)
    assert spilled(mx, result, place) == []


def test_p37_redirects_keep_their_secrets(mx: Mx, faultd: servers.Faultd) -> None:
    targets = [
        f"http://u:PASSWORD@127.0.0.1:{closed_port()}/x?sig=SIGNATURE",
        f"{basic(faultd.url)}/nope?sig=SIGNATURE",
    ]
    with scripted(lambda asked: asked.say(302, b"", {"Location": targets[int(asked.path[1:])]})) as server:
        for number in range(len(targets)):
            result = mx("prefetch", f"{server.url}/{number}", "-vv", "--json", env={"MX_DEBUG": "1"} | QUICK)
            assert result.code in (10, 12)
            assert spilled(mx, result) == []


@pytest.mark.parametrize("where", ["nobody", "refuses"])
def test_p37_proxies_keep_their_password(mx: Mx, where: str) -> None:
    with scripted(lambda asked: asked.say(407, b"")) as proxy:
        port = proxy.url.rpartition(":")[2] if where == "refuses" else "1"
        env = {"http_proxy": f"http://me:PROXYWORD@127.0.0.1:{port}", "MX_DEBUG": "1"} | QUICK
        result = mx("prefetch", "http://example.invalid/x?sig=SIGNATURE", "-vv", env=env)
    result.exits(11 if where == "refuses" else 12)
    assert spilled(mx, result) == []


def test_p37_hub_tokens_and_leaders(mx: Mx, hub: servers.Hub) -> None:
    hub.commit({"config.json": b"{}", "model.bin": DATA})
    hub.flags("auth=hf_TESTTOKEN123,slow=300000")
    env = hub.env | {"HF_TOKEN": "hf_TESTTOKEN123", "MX_DEBUG": "1"}
    run = mx.start("prefetch", hub.uri, "-vv", env=env)
    run.wait_err("^leading")
    assert spilled(mx, Result((), 0, run.stdout, run.stderr, 0)) == []
    assert spilled(mx, run.wait().ok()) == []


def test_a_path_is_an_origin_too(mx: Mx, tmp_path: Path) -> None:
    directory = make_checkpoint(tmp_path / "model", shards=2, size=200_000)
    files = {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}
    for uri in (directory, f"file://{directory}", f"{directory}/"):
        has(mx("prefetch", uri, "--json"), files)
