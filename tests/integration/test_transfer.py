"""P-01 to P-13 and P-16, P-20: what servers and kills do to a transfer, and what has to be in the cache afterwards."""

from __future__ import annotations

import gzip
import hashlib
import itertools
import re
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from tests.rig import servers
from tests.rig.scripted import Asked, Scripted, manifests, published, scripted
from tests.support import MIB, Mx, Result, Running, checkpoint_files, noise, safetensors_bytes

QUICK = {"MX_RETRY_FOR": "2s"}
SMALL_RANGES = {"MX_RANGE_SIZE": "1MiB"}


def sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def has(mx: Mx, result: Result, files: dict[str, str]) -> dict[str, Any]:
    """The run is well: its directory holds exactly these files {name: sha256}. Returns its JSON document."""
    document: dict[str, Any] = result.ok().json()
    directory = Path(document["dir"])
    found = {str(p.relative_to(directory)): sha(p.read_bytes()) for p in directory.rglob("*") if p.is_file()}
    assert found == files
    assert not list(mx.cache.glob(f"models/*/staging/{document['revision']}/*.part.*")), "parts are left"
    return document


def refused(mx: Mx, result: Result, code: int, *says: str) -> Result:
    """The run failed with this code, says so in one sentence, and left nothing that looks complete."""
    result.exits(code)
    assert result.out == "" or result.json()["error"]["code"] == code
    assert "Traceback" not in result.err
    for text in says:
        assert text in result.err
    assert published(mx.cache) == {}
    assert manifests(mx.cache) == []
    return result


def until_served(server: servers.Faultd, count: int, run: Running, timeout: float = 30) -> None:
    """Blocks until the server has sent so many body bytes in all."""
    deadline = time.monotonic() + timeout
    while server.bytes_served() < count:
        assert time.monotonic() < deadline
        assert run.process.poll() is None, run.stderr
        time.sleep(0.02)


# --- P-01, P-02: killed and run again ----------------------------------------------------------------------------


def test_p01_p02_killed_thrice_and_resumed(mx: Mx, faultd: servers.Faultd) -> None:
    size, name = 24 * MIB, "model.gguf"
    url = faultd.file("slow=4000000", size, name)
    for share in (0.2, 0.45, 0.7):
        run = mx.start("prefetch", url)
        until_served(faultd, int(size * share), run)
        run.kill()
        assert published(mx.cache) == {}
        assert manifests(mx.cache) == []
    document = has(mx, mx("prefetch", url, "--json"), {name: faultd.sum(size, name)})
    assert document["role"] == "leader"
    assert document["bytes_fetched"] < size
    assert document["bytes_reused"] == size - document["bytes_fetched"]
    asked = [entry for entry in faultd.log() if entry["m"] == "GET"]
    assert all(entry["if_match"] or entry["if_range"] for entry in asked)
    # Each kill costs what was in flight: a quarter of a second of each connection, and what the sockets hold.
    assert faultd.bytes_served() <= size + 3 * 4 * MIB


def test_p01_killed_among_many_files(mx: Mx, hub: servers.Hub) -> None:
    files = checkpoint_files(shards=3, size=12 * MIB)
    hub.commit(files)
    hub.flags("slow=4000000")
    size = sum(map(len, files.values()))
    run = mx.start("prefetch", hub.uri, env=hub.env)
    until_served(hub, size // 2, run)
    run.kill()
    assert manifests(mx.cache) == []
    full = {name: sha(data) for name, data in files.items()}
    assert published(mx.cache).items() <= full.items()
    hub.flags("ok")
    has(mx, mx("prefetch", hub.uri, "--json", env=hub.env), full)
    assert hub.bytes_served("/resolve/") <= size + 3 * 2 * MIB


def test_p02_a_part_of_another_version_is_not_continued(mx: Mx, s3: servers.S3) -> None:
    old, new = noise("old", 12 * MIB), noise("new", 12 * MIB)
    s3.put("m/model.bin", old)
    run = mx.start("prefetch", s3.uri("m"), "--max-bandwidth", "4MiB", env=s3.env)
    run.wait_err("leading term")
    deadline = time.monotonic() + 20
    while not list(mx.cache.rglob("*.part.*")) and time.monotonic() < deadline:
        time.sleep(0.01)
    run.kill()
    s3.put("m/model.bin", new)
    has(mx, mx("prefetch", s3.uri("m"), "--json", env=s3.env), {"model.bin": sha(new)})


# --- connections that break, ranges that are not served ----------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "size"),
    [
        ("cutonce=3000000,norange", 8_000_000),
        ("cutonce=0", 8_000_000),
        ("cutonce=300000", 8_000_000),
        ("cut=700000", 4_000_000),
        ("norange", 8_000_000),
        ("norange", 1),
        ("norange,etag=weak", 3 * MIB + 1),
        ("norange,nolen", 3_000_000),
        ("badcr", 8_000_000),
        ("badcr", MIB),
        ("badcr,cutonce=3000", 8_000_000),
        ("nolen", 3 * MIB + 1),
        ("etag=none", 8_000_000),
        ("etag=none,cutonce=3000", 3_000_000),
        ("noct,cutonce=3000", 3_000_000),
        ("head405", 8_000_000),
        ("head405,norange", 3_000_000),
        ("head405,nolen", 3_000_000),
        ("failrange=503:2", 8_000_000),
        ("failrange=416:99", 3_000_000),
    ],
)
def test_p03_p07_p08_right_bytes_all_the_same(mx: Mx, faultd: servers.Faultd, flags: str, size: int) -> None:
    url = faultd.file(flags, size, "model.bin")
    document = has(mx, mx("prefetch", url, "--json", env=SMALL_RANGES), {"model.bin": faultd.sum(size, "model.bin")})
    assert document["bytes_total"] == size


@pytest.mark.parametrize("flags", ["norange", "badcr", "cutonce=3000000,norange"])
def test_p03_without_ranges_the_bytes_come_in_one_stream(mx: Mx, faultd: servers.Faultd, flags: str) -> None:
    url = faultd.file(flags, 8_000_000, "model.bin")
    mx("prefetch", url, env=SMALL_RANGES).ok()
    whole = [entry for entry in faultd.log() if entry["m"] == "GET" and entry["sent"] == 8_000_000]
    assert len(whole) == 1
    assert whole[0]["range"] is None


def test_p03_a_whole_file_announced_as_a_range_is_taken(mx: Mx) -> None:
    """200 with a right Content-Range, and 200 for a range over everything."""
    data = noise("200", 3 * MIB)

    def answer(asked: Asked) -> None:
        span = asked.span(len(data))
        if asked.method == "GET" and span:
            headers = {"Content-Range": f"bytes {span[0]}-{span[1] - 1}/{len(data)}", "ETag": '"one"'}
            asked.say(200, data[slice(*span)], headers)
        else:
            asked.serve(data, {"ETag": '"one"'})

    with scripted(answer) as server:
        has(mx, mx("prefetch", f"{server.url}/m.bin", "--json", env=SMALL_RANGES), {"m.bin": sha(data)})


@pytest.mark.parametrize(
    "wrong", ["bytes 0-99/100", "bytes */3145728", "octets 0-1/2", "bytes 5-4/3145728", "nonsense"]
)
def test_p08_a_content_range_that_cannot_be(mx: Mx, wrong: str) -> None:
    data = noise("wrong", 3 * MIB)

    def answer(asked: Asked) -> None:
        span = asked.span(len(data))
        if asked.method == "GET" and span:
            asked.say(206, data[slice(*span)], {"Content-Range": wrong, "ETag": '"one"'})
        else:
            asked.serve(data, {"ETag": '"one"'})

    with scripted(answer) as server:
        result = mx("prefetch", f"{server.url}/m.bin", "--json", env=SMALL_RANGES)
    if "/100" in wrong:
        # Another total size is another object.
        refused(mx, result, 16, "wrong size")
    else:
        has(mx, result, {"m.bin": sha(data)})


def test_a_206_that_is_shorter_than_it_says(mx: Mx) -> None:
    data = noise("short", 2 * MIB)
    short = iter([True, True])

    def answer(asked: Asked) -> None:
        span = asked.span(len(data))
        if asked.method == "GET" and span and next(short, False):
            first, end = span
            headers = {"Content-Range": f"bytes {first}-{end - 1}/{len(data)}", "ETag": '"one"'}
            asked.say(206, data[first : end - 1000], headers)
        else:
            asked.serve(data, {"ETag": '"one"'})

    with scripted(answer) as server:
        has(mx, mx("prefetch", f"{server.url}/m.bin", "--json", env=SMALL_RANGES), {"m.bin": sha(data)})


@pytest.mark.parametrize("when", ["always", "announced"])
def test_connections_that_close_between_requests(mx: Mx, when: str) -> None:
    files = {f"f{n}.bin": noise(f"close{n}", 400_000) for n in range(3)}
    data = files["f0.bin"]

    def answer(asked: Asked) -> None:
        asked.serve(data, {"Connection": "close"} if when == "announced" else None)
        asked.hang_up()

    with scripted(answer) as server:
        result = mx("prefetch", f"{server.url}/f0.bin", "--json", env={"MX_RANGE_SIZE": "64KiB"})
    assert "retry" not in result.err
    has(mx, result, {"f0.bin": sha(data)})


@pytest.mark.parametrize("cut", ["head", "reset"])
def test_connections_that_break_before_an_answer(mx: Mx, cut: str) -> None:
    data = noise("break", 300_000)
    broken = iter([True] * 3)

    def answer(asked: Asked) -> None:
        if next(broken, False):
            if cut == "head":
                asked.handler.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Le")
            asked.hang_up()
        else:
            asked.serve(data)

    with scripted(answer) as server:
        result = mx("prefetch", f"{server.url}/m.bin", "--json", env={"MX_RANGE_SIZE": "64KiB"})
    has(mx, result, {"m.bin": sha(data)})


def test_an_http_1_0_server(mx: Mx) -> None:
    data = noise("old", 300_000)

    def answer(asked: Asked) -> None:
        asked.handler.protocol_version = "HTTP/1.0"
        asked.say(200, data, {"Last-Modified": "Mon, 30 Nov 2026 20:00:00 GMT"})
        asked.hang_up()

    with scripted(answer) as server:
        url = f"{server.url}/m.bin"
        has(mx, mx("prefetch", url, "--json", env={"MX_RANGE_SIZE": "64KiB"}), {"m.bin": sha(data)})
        assert mx("prefetch", url, "--json").ok().json()["role"] == "hit"


# --- P-04: the object changes ------------------------------------------------------------------------------------


@pytest.mark.parametrize("after", [1, 3])
def test_p04_an_object_overwritten_between_ranges(mx: Mx, s3stub: Callable[..., servers.S3Stub], after: int) -> None:
    store = s3stub(mutate=f"shard:{after}")
    data = noise("first", 24 * MIB)
    store.put("m/shard.bin", data)
    result = mx("prefetch", store.uri("m"), "--json", env=store.env | {"MX_RANGE_SIZE": "4MiB"})
    document = result.ok().json()
    got = (Path(document["dir"]) / "shard.bin").read_bytes()
    status, _, now = servers.request("GET", f"{store.endpoint}/{store.bucket}/m/shard.bin", headers=servers.PUBLIC)
    assert status == 200
    assert got in (data, now)
    assert all(entry["if_match"] for entry in store.log() if entry["m"] == "GET" and "shard" in entry["path"])


@pytest.mark.parametrize("flags", ["flip=1", "flip=2", "flip=1,etag=weak", "flip=2,norange"])
def test_p04_a_url_whose_file_changes(mx: Mx, faultd: servers.Faultd, flags: str) -> None:
    url = faultd.file(flags, 3_000_000, "model.bin")
    result = mx("prefetch", url, "--json", env=SMALL_RANGES)
    versions = [faultd.sum(3_000_000, "model.bin", version) for version in (0, 1)]
    found = published(mx.cache)
    if result.code == 0:
        assert len(set(found.values()) & set(versions)) == len(found) == 1
    else:
        refused(mx, result, 16)


def test_p04_an_object_that_never_stands_still_is_given_up(mx: Mx) -> None:
    def answer(asked: Asked) -> None:
        asked.serve(noise(f"version{asked.number}", 300_000))

    with scripted(answer) as server:
        result = mx("prefetch", f"{server.url}/m.bin", "--json")
    refused(mx, result, 16, "changed")
    assert result.err.count("listing the origin again") == 2
    assert len(server.asked) < 20


def test_p04_a_pinned_revision_that_is_gone(mx: Mx, s3: servers.S3) -> None:
    s3.put("m/a.bin", b"one")
    revision = mx("prefetch", s3.uri("m"), "--json", env=s3.env).ok().json()["revision"]
    s3.put("m/a.bin", b"two")
    again = mx("prefetch", s3.uri("m"), "--revision", revision, "--json", env=s3.env).ok().json()
    assert (again["role"], Path(again["dir"], "a.bin").read_bytes()) == ("hit", b"one")
    other = {"MX_CACHE_DIR": mx.home / "other"}
    assert revision in mx("prefetch", s3.uri("m"), "--revision", revision, env=s3.env | other).exits(10).err


# --- P-05, P-06, P-07: not what was promised ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "size"),
    [
        ("over=4096", 1_000_000),
        ("under=4096", 1_000_000),
        ("over=4096,norange", 1_000_000),
        ("under=4096,norange", 1_000_000),
        ("over=1,etag=none", 1000),
        ("under=1,etag=none", 1000),
        ("over=1000000,etag=weak", 1_000_000),
    ],
)
def test_p05_a_size_that_is_not_true(mx: Mx, faultd: servers.Faultd, flags: str, size: int) -> None:
    url = faultd.file(flags, size, "a.bin")
    result = mx("prefetch", url, env=SMALL_RANGES | QUICK)
    promised = (
        size
        + int((re.search(r"over=(\d+)", flags) or [0, 0])[1])
        - int((re.search(r"under=(\d+)", flags) or [0, 0])[1])
    )
    refused(mx, result, 16, str(promised), str(size), "expected", "observed")
    assert len(faultd.log()) < 20


@pytest.mark.parametrize(("second", "code"), [("300000", 0), ("299999", 12), ("-1", 12), ("0x10", 12)])
def test_p05_two_lengths_in_one_answer(mx: Mx, second: str, code: int) -> None:
    data = noise("twice", 300_000)
    with scripted(lambda asked: asked.serve(data, {"content-length": second})) as server:
        result = mx("prefetch", f"{server.url}/m.bin", "--json", env=QUICK)
    if code:
        refused(mx, result, code, "length")
    else:
        has(mx, result, {"m.bin": sha(data)})


@pytest.mark.parametrize(
    ("flags", "name"),
    [
        ("html", "model.safetensors"),
        ("html", "config.json"),
        ("html,head405", "model.bin"),
        ("html", "tokenizer.model"),
        ("html,head405", "model.gguf"),
    ],
)
def test_p06_a_page_with_status_200(mx: Mx, faultd: servers.Faultd, flags: str, name: str) -> None:
    refused(mx, mx("prefetch", faultd.file(flags, 1_000_000, name)), 16, "text/html", "bytes")


@pytest.mark.parametrize("status", [201, 202, 204, 205, 226])
@pytest.mark.parametrize("method", ["HEAD GET", "GET"])
def test_p06_a_success_without_the_file(mx: Mx, status: int, method: str) -> None:
    """202: the server makes it ready, and promises it for later. 204: there is nothing."""
    data = noise("ready", 1000)

    def answer(asked: Asked) -> None:
        if asked.method in method:
            asked.say(status, b"" if status in (204, 205) else b"one moment, please")
        else:
            asked.serve(data)

    with scripted(answer) as server:
        refused(mx, mx("prefetch", f"{server.url}/model.bin", env=QUICK), 16, f"HTTP {status}")
        assert len(server.asked) < 6


@pytest.mark.parametrize("etag", ['"strong"', ""])
def test_p05_more_chunks_than_promised(mx: Mx, etag: str) -> None:
    """Chunks have no length that could be compared: what is read must be all that comes."""
    data = noise("more", 300_000)

    def answer(asked: Asked) -> None:
        tag = {"ETag": etag} if etag else {}
        if asked.method == "HEAD":
            asked.say(200, b"", {"Content-Length": "299999", **tag})
            return
        asked.handler.send_response(200)
        for name, value in {"Transfer-Encoding": "chunked", **tag}.items():
            asked.handler.send_header(name, value)
        asked.handler.end_headers()
        asked.handler.wfile.write(b"%x\r\n%b\r\n0\r\n\r\n" % (len(data), data))

    with scripted(answer) as server:
        refused(mx, mx("prefetch", f"{server.url}/m.bin", env=QUICK), 16, "wrong size", "299999")


@pytest.mark.parametrize("header", ["Transfer-Encoding", "Content-Encoding"])
def test_p07_packed_bytes_are_not_the_file(mx: Mx, header: str) -> None:
    data = gzip.compress(noise("packed", 300_000))

    def answer(asked: Asked) -> None:
        if asked.method == "HEAD":
            asked.say(200, b"", {"Content-Length": "300000", "ETag": '"x"'})
            return
        asked.handler.send_response(200)
        coding = "gzip, chunked" if header == "Transfer-Encoding" else "gzip"
        if header != "Transfer-Encoding":
            asked.handler.send_header("Transfer-Encoding", "chunked")
        asked.handler.send_header(header, coding)
        asked.handler.send_header("ETag", '"x"')
        asked.handler.end_headers()
        asked.handler.wfile.write(b"%x\r\n%b\r\n0\r\n\r\n" % (len(data), data))

    with scripted(answer) as server:
        refused(mx, mx("prefetch", f"{server.url}/m.bin", env=QUICK), 16, header, "gzip")


WHOLE = safetensors_bytes({"t": ("F32", (4,), bytes(16))})
PAGES = {
    "xml": b'<?xml version="1.0"?>\n<Error><Code>AccessDenied</Code></Error>' + b" " * 230,
    "html": b"<!DOCTYPE html><html><body>Please log in</body></html>",
    "pointer": b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"a" * 64 + b"\nsize 5000000000\n",
    "zeros": bytes(4096),
    "old pointer": b"version https://hawser.github.com/spec/v1\noid sha256:" + b"a" * 64 + b"\nsize 5000000000\n",
    "xet": b"# xet version 0\nfilesize = 5000000000\nhash = 'abc'\n",
    "annex": b"/annex/objects/SHA256E-s5000000000--" + b"a" * 64 + b".safetensors\n",
    "xhtml": b'<?xml version="1.0"?><!DOCTYPE html PUBLIC "-//W3C//DTD XHTML 1.0//EN"><html xmlns="x"><head/></html>',
    "empty": b"",
    "cut": WHOLE[:-4],
    "too long": WHOLE + b"tail",
    "zip": b"PK\x03\x04" + bytes(range(200)),
}


@pytest.mark.parametrize(
    ("where", "page"),
    [
        ("http", "html"),
        ("http", "zeros"),
        ("s3", "xml"),
        ("s3", "pointer"),
        ("hub", "pointer"),
        ("hub", "html"),
        ("file", "pointer"),
        ("file", "zeros"),
        *itertools.product(
            ("s3", "hub", "file"), ("old pointer", "xet", "annex", "xhtml", "empty", "cut", "too long", "zip")
        ),
    ],
)
def test_p06_something_else_under_the_name(
    mx: Mx, s3: servers.S3, hub: servers.Hub, page: str, where: str, tmp_path: Path
) -> None:
    data, env = PAGES[page], {}
    if where == "s3":
        s3.put("m/model.safetensors", data)
        s3.put("m/config.json", b"{}")
        result = mx("prefetch", s3.uri("m"), env=s3.env)
    elif where == "hub":
        hub.commit({"model.safetensors": data, "config.json": b"{}"})
        result = mx("prefetch", hub.uri, env=hub.env)
    elif where == "file":
        (tmp_path / "model.safetensors").write_bytes(data)
        result = mx("prefetch", tmp_path / "model.safetensors", env=env)
    else:
        with scripted(lambda asked: asked.serve(data)) as server:
            result = mx("prefetch", f"{server.url}/model.safetensors")
    result.exits(16)
    assert "model.safetensors" in result.err
    assert manifests(mx.cache) == []
    assert "model.safetensors" not in published(mx.cache)


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("config.json", b"{"),
        ("config.json", b"<html>"),
        ("config.json", b""),
        ("model.safetensors", b"\xff" * 5000),
        ("model.safetensors", (1 << 40).to_bytes(8, "little") + b"{}"),
        ("model.safetensors", b""),
        ("model.safetensors", b"12345"),
    ],
)
def test_p06_without_a_digest_the_format_decides(mx: Mx, name: str, data: bytes) -> None:
    with scripted(lambda asked: asked.serve(data, {"ETag": '"no-digest"'})) as server:
        refused(mx, mx("prefetch", f"{server.url}/{name}"), 16, name)


FUTURE = b'{"t":{"dtype":"F2_FUTURE","shape":[4],"data_offsets":[0,1]}}    '


@pytest.mark.parametrize("data", [noise("ours", 5000), len(FUTURE).to_bytes(8, "little") + FUTURE + b"x"])
def test_p06_what_mx_does_not_know_is_taken_when_the_origin_holds_it_so(mx: Mx, s3: servers.S3, data: bytes) -> None:
    s3.put("m/model.safetensors", data)
    result = mx("prefetch", s3.uri("m"), "--json", env=s3.env)
    has(mx, result, {"model.safetensors": sha(data)})
    assert "the origin holds it so" in result.err
    assert mx("prefetch", s3.uri("m"), "--strict", "--cache-dir", mx.home / "other", env=s3.env).code == 3


def test_p07_unknown_length_that_breaks_off(mx: Mx, faultd: servers.Faultd) -> None:
    refused(mx, mx("prefetch", faultd.file("nolen,cut=500000", 1_000_000, "x.bin"), env=QUICK), 12, "broke off")
    assert len(faultd.log()) < 20


def test_p07_unknown_length_to_its_end(mx: Mx, faultd: servers.Faultd) -> None:
    url = faultd.file("nolen", 1_000_000, "x.bin")
    result = mx("prefetch", url, "--json")
    document = has(mx, result, {"x.bin": faultd.sum(1_000_000, "x.bin")})
    assert document["bytes_total"] == document["bytes_fetched"] == 1_000_000
    assert len(re.findall(r"^warning: .*(length|size).*", result.err, re.MULTILINE)) == 1
    assert mx("prefetch", url, "--strict", "--cache-dir", mx.home / "other").code == 3


def test_p07_neither_length_nor_chunks(mx: Mx) -> None:
    """The end of the connection is the end of the file: nothing can tell it from a break, so it is said."""
    data = noise("close", 300_000)

    def answer(asked: Asked) -> None:
        asked.handler.send_response(200)
        asked.handler.send_header("Connection", "close")
        asked.handler.end_headers()
        if asked.method == "GET":
            asked.handler.wfile.write(data)
        asked.hang_up()

    with scripted(answer) as server:
        result = mx("prefetch", f"{server.url}/x.bin", "--json")
    has(mx, result, {"x.bin": sha(data)})
    assert "warning:" in result.err


# --- P-09, P-10: very small, very large --------------------------------------------------------------------------


@pytest.mark.parametrize("flags", ["ok", "head405", "norange", "nolen", "etag=none", "etag=weak", "etag=none,head405"])
def test_p09_an_empty_file_at_a_url(mx: Mx, faultd: servers.Faultd, flags: str) -> None:
    url = faultd.file(flags, 0, "empty")
    has(mx, mx("prefetch", url, "--json"), {"empty": sha(b"")})
    if "head405" not in flags:
        assert not [entry for entry in faultd.log() if entry["range"]]
    faultd.reset()
    again = mx("prefetch", url, "--json").ok().json()
    assert again["bytes_fetched"] == 0
    if flags in ("ok", "norange", "etag=weak"):
        assert again["role"] == "hit"
        assert faultd.bytes_served() == 0


def test_p09_a_head_that_says_empty_is_not_believed(mx: Mx, faultd: servers.Faultd) -> None:
    """Some servers answer every HEAD with a length of 0."""
    result = mx("prefetch", faultd.file("under=1000", 1000, "a.bin"), "--json")
    has(mx, result, {"a.bin": faultd.sum(1000, "a.bin")})


@pytest.mark.parametrize("where", ["s3", "hub", "gcs", "file"])
def test_p09_empty_files_among_others(mx: Mx, where: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    files = {"config.json": b"{}", "empty.txt": b"", "sub/empty.bin": b"", "model.bin": b"weights"}
    uri, env = placed(where, files, request, tmp_path)
    full = {name: sha(data) for name, data in files.items()}
    assert has(mx, mx("prefetch", uri, "--all", "--json", env=env), full)["role"] == "leader"
    again = mx("prefetch", uri, "--all", "--json", env=env).ok().json()
    assert (again["role"], again["bytes_fetched"]) == ("hit", 0)


def placed(
    where: str, files: dict[str, bytes], request: pytest.FixtureRequest, tmp_path: Path
) -> tuple[str, dict[str, str]]:
    """(URI, variables) of these files at that kind of origin."""
    if where == "file":
        directory = tmp_path / "origin"
        for name, data in files.items():
            (directory / name).parent.mkdir(parents=True, exist_ok=True)
            (directory / name).write_bytes(data)
        return str(directory), {}
    origin = request.getfixturevalue(where)
    if where == "hub":
        origin.commit(files)
        return origin.uri, origin.env
    for name, data in files.items():
        origin.put(f"m/{name}", data)
    return origin.uri("m"), origin.env


def test_p10_a_file_that_cannot_fit_is_refused_before_a_byte(mx: Mx, faultd: servers.Faultd) -> None:
    url = faultd.file("over=139586437120", 1, "x.safetensors")
    result = mx("prefetch", url)
    refused(mx, result, 15, "130 GiB", "free", "GiB")
    assert [entry["m"] for entry in faultd.log()] == ["HEAD"]
    assert mx("prefetch", url, "--dry-run").ok().out.count("130 GiB") >= 1


def test_p10_a_file_beyond_any_number(mx: Mx, faultd: servers.Faultd) -> None:
    refused(mx, mx("prefetch", faultd.file(f"over={1 << 70}", 1, "x.safetensors")), 15, "free")


# --- P-11, P-12: later -------------------------------------------------------------------------------------------


def gaps(log: list[dict[str, Any]]) -> list[float]:
    times = [entry["t"] for entry in log]
    return [later - earlier for earlier, later in itertools.pairwise(times)]


@pytest.mark.parametrize(
    ("flags", "least"), [("fail=429:3:1", 1.0), ("failget=503:2:1", 1.0), ("fail=429:2:date+2", 0.9)]
)
def test_p11_retry_after_is_kept(mx: Mx, faultd: servers.Faultd, flags: str, least: float) -> None:
    times = int(flags.split(":")[1])
    result = mx("prefetch", faultd.file(flags, 1000, "x"), "--json")
    document = has(mx, result, {"x": faultd.sum(1000, "x")})
    assert document["retries"] == times
    assert f"{times} retries" in result.err
    log = faultd.log()
    kept = [gap for gap in gaps(log) if gap >= least]
    assert len(kept) == times
    assert len({round(gap, 2) for gap in kept}) > 1 or times == 1, "no jitter"


def test_p11_one_limiter_for_all_connections_to_a_host(mx: Mx, faultd: servers.Faultd) -> None:
    """One 429 holds every range back, not only the one that was refused."""
    result = mx("prefetch", faultd.file("failrange=429:1:2", 8 * MIB, "x"), "--json", env=SMALL_RANGES)
    has(mx, result, {"x": faultd.sum(8 * MIB, "x")})
    ranged = [entry["t"] for entry in faultd.log() if entry["range"]]
    refused_at = ranged[0]
    assert [t for t in ranged if refused_at + 0.5 < t < refused_at + 2.0] == []


def test_p11_a_wait_longer_than_the_budget_ends_at_once(mx: Mx, faultd: servers.Faultd) -> None:
    result = refused(mx, mx("prefetch", faultd.file("fail=429:99:3600", 1000, "x")), 12, "429", "--retry-for")
    assert result.seconds < 20
    assert len(faultd.log()) == 1


@pytest.mark.parametrize("flags", ["fail=503:4", "failget=502:3", "fail=408:2", "failget=500:2", "fail=504:1,head405"])
def test_p12_a_server_that_is_busy_for_a_while(mx: Mx, faultd: servers.Faultd, flags: str) -> None:
    has(mx, mx("prefetch", faultd.file(flags, 1000, "x"), "--json"), {"x": faultd.sum(1000, "x")})
    log = gaps(faultd.log())
    assert max(log) > min(log)


@pytest.mark.parametrize("flags", ["fail=500:999", "failget=503:999", "fail=429:999"])
def test_p12_a_server_that_stays_busy(mx: Mx, faultd: servers.Faultd, flags: str) -> None:
    result = refused(mx, mx("prefetch", faultd.file(flags, 1000, "x"), env=QUICK), 12, "--retry-for", "HTTP")
    assert result.seconds < 20
    assert len(faultd.log()) <= 10, "retry layers multiply"


def test_p12_slow_down_of_a_store(mx: Mx, s3stub: Callable[..., servers.S3Stub]) -> None:
    store = s3stub(slow503=6)
    files = {f"f{n}.bin": noise(f"slow{n}", 50_000) for n in range(8)}
    for name, data in files.items():
        store.put(f"m/{name}", data)
    result = mx("prefetch", store.uri("m"), "--all", "--json", env=store.env)
    document = has(mx, result, {name: sha(data) for name, data in files.items()})
    assert document["retries"] == 6


@pytest.mark.parametrize("flags", ["fail=503:2", "failget=500:1"])
def test_p12_a_hub_that_is_busy(mx: Mx, hub: servers.Hub, flags: str) -> None:
    files = checkpoint_files(shards=2, size=100_000)
    hub.commit(files)
    hub.flags(flags)
    has(mx, mx("prefetch", hub.uri, "--json", env=hub.env), {name: sha(data) for name, data in files.items()})


@pytest.mark.parametrize("what", ["listing", "tree", "revision"])
def test_p12_a_listing_is_retried_like_a_range(mx: Mx, what: str) -> None:
    sha40 = "a" * 40
    files = {"config.json": b"{}", "model.bin": b"weights"}
    busy = iter([503, 429, 502])

    def answer(asked: Asked) -> None:
        wanted = {"tree": "/tree/", "revision": "/revision/", "listing": "/api/"}[what]
        if wanted in asked.path and (status := next(busy, 0)):
            asked.say(status, b"busy")
        elif "/tree/" in asked.path:
            rows = [f'{{"type":"file","path":"{n}","size":{len(d)},"oid":"x{n}"}}' for n, d in files.items()]
            asked.say(200, f"[{','.join(rows)}]".encode())
        elif "/revision/" in asked.path:
            asked.say(200, f'{{"sha":"{sha40}"}}'.encode())
        else:
            asked.serve(files[asked.path.rpartition("/")[2]], {"X-Repo-Commit": sha40})

    with scripted(answer) as server:
        result = mx("prefetch", "hf://org/name", "--json", env={"HF_ENDPOINT": server.url})
    assert has(mx, result, {name: sha(data) for name, data in files.items()})["retries"] == 3


# --- P-13: one of many is missing --------------------------------------------------------------------------------


def test_p13_a_shard_that_is_listed_and_gone(mx: Mx, s3stub: Callable[..., servers.S3Stub]) -> None:
    store = s3stub(get404="00002-of")
    files = checkpoint_files(shards=3, size=200_000)
    for name, data in files.items():
        store.put(f"m/{name}", data)
    result = mx("prefetch", store.uri("m"), env=store.env).exits(10)
    assert "model-00002-of-00003.safetensors" in result.err
    assert "retry" not in result.err
    gets = [entry for entry in store.log() if entry["m"] == "GET" and "00002-of" in entry["path"]]
    assert len(gets) == 1
    assert manifests(mx.cache) == []
    full = {name: sha(data) for name, data in files.items()}
    assert published(mx.cache).items() < full.items()


def test_p13_good_shards_are_kept_for_the_next_run(mx: Mx, hub: servers.Hub) -> None:
    files = checkpoint_files(shards=3, size=1_500_000)
    sha40 = hub.commit(files)
    gone = hub.dir / sha40 / "model-00002-of-00003.safetensors"
    held = gone.read_bytes()
    listed_size = len(held)
    env = hub.env | {"MX_MAX_CONNECTIONS": "1"}

    def hide() -> None:
        gone.unlink()

    with proxied(hub, hide) as door:
        mx("prefetch", hub.uri, env=env | {"HF_ENDPOINT": door.url}).exits(10)
    gone.write_bytes(held)
    kept = published(mx.cache)
    hub.reset()
    document = has(mx, mx("prefetch", hub.uri, "--json", env=env), {name: sha(data) for name, data in files.items()})
    assert listed_size <= document["bytes_fetched"] <= document["bytes_total"] - sum(len(files[n]) for n in kept)


def proxied(hub: servers.Hub, after_listing: Callable[[], None]) -> AbstractContextManager[Scripted]:
    """The hub through a door that does something once the tree was read."""

    def answer(asked: Asked) -> None:
        headers = {"Range": asked.headers["Range"]} if asked.headers.get("Range") else {}
        status, head, body = servers.request(asked.method, hub.url + asked.path, headers=headers)
        wanted = ("etag", "content-range", "x-repo-commit", "x-error-code", "content-type", "content-length")
        asked.say(status, body, {name: head[name] for name in wanted if name in head})
        if "/tree/" in asked.path:
            after_listing()

    return scripted(answer)


# --- P-16: nothing comes -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("flags", ["stall=1000000:600", "stall=1000000:600,norange", "stall=100000:600,nolen"])
def test_p16_a_stall_ends_and_the_rest_is_fetched(mx: Mx, faultd: servers.Faultd, flags: str) -> None:
    size = 900_000 if "norange" in flags else 3_000_000
    env = {"MX_STALL_TIMEOUT": "1s", "MX_RETRY_FOR": "3s", "MX_RANGE_SIZE": "1000000"}
    result = mx("prefetch", faultd.file(flags, size, "x"), "--json", env=env)
    assert result.seconds < 40
    if "nolen" in flags:
        # Each try stalls at the same byte, and nothing may be continued.
        refused(mx, result, 12, "stall")
    else:
        has(mx, result, {"x": faultd.sum(size, "x")})


def test_p16_the_limit_is_an_option(mx: Mx, faultd: servers.Faultd) -> None:
    url = faultd.file("stall=1000:600", 100_000, "x")
    result = mx("prefetch", url, "--stall-timeout", "500ms", "--retry-for", "1s", env={"MX_STALL_TIMEOUT": "90s"})
    assert result.code in (0, 12)
    assert result.seconds < 40
    assert "no byte for 0.5 s" in result.err


@pytest.mark.parametrize("where", ["head", "listing"])
def test_p16_a_server_that_accepts_and_says_nothing(mx: Mx, where: str) -> None:
    ends: list[Any] = []

    def answer(asked: Asked) -> None:
        ends.append(asked)
        time.sleep(30 if not asked.hang_up() else 0)

    with scripted(answer) as server:
        uri = f"{server.url}/x" if where == "head" else "hf://org/name"
        env = {"MX_STALL_TIMEOUT": "500ms", "MX_RETRY_FOR": "1s", "HF_ENDPOINT": server.url}
        result = mx("prefetch", uri, env=env)
    assert result.seconds < 20
    refused(mx, result, 12, "no byte for 0.5 s")


def test_p16_a_head_that_comes_byte_by_byte(mx: Mx) -> None:
    """Never silent for long, and never there: what counts is the whole head."""
    ended = threading.Event()

    def answer(asked: Asked) -> None:
        while not ended.wait(0.1):
            asked.handler.wfile.write(b"X")

    with scripted(answer) as server:
        try:
            env = {"MX_STALL_TIMEOUT": "500ms", "MX_RETRY_FOR": "1s"}
            refused(mx, mx("prefetch", f"{server.url}/m.bin", env=env), 12, "stalled", "head")
        finally:
            ended.set()


def test_p16_a_limit_on_the_bandwidth_is_no_stall(mx: Mx, faultd: servers.Faultd) -> None:
    size = 4 * MIB
    env = {"MX_STALL_TIMEOUT": "700ms", "MX_RANGE_SIZE": "256KiB"}
    result = mx("prefetch", faultd.file("ok", size, "x"), "--max-bandwidth", "1MiB", "--json", env=env)
    document = has(mx, result, {"x": faultd.sum(size, "x")})
    assert document["retries"] == 0
    assert document["seconds"]["transfer"] > 2


# --- P-20 and reruns ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("flags", ["etag=weak", "etag=slash", "etag=mp", "ok", "etag=none"])
def test_p20_p28_validators_on_a_rerun(mx: Mx, faultd: servers.Faultd, flags: str, tmp_path: Path) -> None:
    url = faultd.file(flags, 1_000_000, "x")
    first = mx("prefetch", url, "--json", env=SMALL_RANGES)
    has(mx, first, {"x": faultd.sum(1_000_000, "x")})
    for path in mx.cache.rglob("*"):
        assert '"' not in path.name
        assert not path.name.startswith("W")
        assert len(path.name.encode()) <= 143
    assert sorted(p.name for p in mx.cache.parent.iterdir()) == ["cache", "home"]
    assert not [entry for entry in faultd.log() if (entry["if_range"] or "").startswith("W/")]
    assert not [entry for entry in faultd.log() if (entry["if_match"] or "").startswith("W/")]
    faultd.reset()
    again = mx("prefetch", url, "--json").ok().json()
    served = faultd.bytes_served()
    if flags == "etag=none":
        assert (again["role"], served) == ("leader", 1_000_000)
    else:
        assert (again["role"], served, again["dir"]) == ("hit", 0, first.json()["dir"])


def test_p20_a_weak_file_that_changed_is_fetched_again(mx: Mx, faultd: servers.Faultd) -> None:
    url = faultd.file("etag=weak,flip=1", 100_000, "x")
    assert sha((Path(mx("prefetch", url).ok().out.strip()) / "x").read_bytes()) == faultd.sum(100_000, "x")
    servers.request("GET", url)
    again = mx("prefetch", url, "--json").ok().json()
    assert sha((Path(again["dir"]) / "x").read_bytes()) == faultd.sum(100_000, "x", 1)
