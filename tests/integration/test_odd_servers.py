"""URLs of servers that do without something, say it otherwise, or say it wrongly: P-03, P-06, P-08, P-11, P-12, P-17, P-37."""

from __future__ import annotations

import hashlib
import threading
import urllib.parse
from pathlib import Path
from typing import Any

import pytest

from tests.rig.scripted import Asked, Scripted, published, scripted
from tests.rig.servers import make_tls
from tests.support import MIB, Mx, Result, noise, safetensors_bytes

DATA = safetensors_bytes({"w": ("U8", (2 * MIB,), None)})
NAME = "model.safetensors"
ENV = {"MX_RANGE_SIZE": "1MiB", "MX_RETRY_FOR": "5s"}


def fetched(mx: Mx, server: Scripted, data: bytes = DATA, name: str = NAME) -> Result:
    result = mx("prefetch", f"{server.url}/{name}", env=ENV).ok()
    assert published(mx.cache) == {name: hashlib.sha256(data).hexdigest()}
    return result


def ranges(server: Scripted) -> list[str | None]:
    return [entry.headers.get("Range") for entry in server.asked if entry.method == "GET"]


@pytest.mark.parametrize("status", [400, 405, 406, 416, 417, 501, 505])
def test_p03_a_server_that_refuses_ranges(mx: Mx, status: int) -> None:
    def answer(asked: Asked) -> None:
        if asked.headers.get("Range"):
            asked.say(status, b"no ranges here")
        else:
            asked.serve(DATA)

    with scripted(answer) as server:
        fetched(mx, server)
        assert ranges(server).count(None) == 1


@pytest.mark.parametrize("status", [400, 416, 501])
@pytest.mark.parametrize("total", ["", f"bytes */{len(DATA)}"])
def test_p03_neither_head_nor_ranges(mx: Mx, status: int, total: str) -> None:
    """Refusing the first byte is no way to say that the file is empty, and the refusal's own length is not the file's."""

    def answer(asked: Asked) -> None:
        if asked.method == "HEAD":
            asked.say(405)
        elif asked.headers.get("Range"):
            asked.say(status, b"no ranges here", {"Content-Range": total} if total else None)
        else:
            asked.serve(DATA)

    with scripted(answer) as server:
        document = mx("prefetch", f"{server.url}/{NAME}", "--json", env=ENV).ok().json()
        assert document["revision"]
        assert published(mx.cache) == {NAME: hashlib.sha256(DATA).hexdigest()}


def test_p03_a_refused_range_of_what_is_refused_whole_is_an_error(mx: Mx) -> None:
    def answer(asked: Asked) -> None:
        if asked.method == "HEAD":
            asked.serve(DATA)
        else:
            asked.say(400)

    with scripted(answer) as server:
        assert "HTTP 400" in mx("prefetch", f"{server.url}/{NAME}", env=ENV).exits(12).err
        assert not published(mx.cache)


@pytest.mark.parametrize("status", [200, 400, 501])
def test_p03_one_range_that_is_refused_costs_no_other(mx: Mx, status: int) -> None:
    """One server of several behind a name does no ranges: what the others gave is not begun again for it."""

    def answer(asked: Asked) -> None:
        if asked.number in (3, 4):
            asked.say(status, DATA if status == 200 else b"")
        else:
            asked.serve(DATA)

    with scripted(answer) as server:
        mx("prefetch", f"{server.url}/{NAME}", "--max-connections", "1", env=ENV | {"MX_RANGE_SIZE": "256KiB"}).ok()
        assert None not in ranges(server)


def test_a_packed_answer_to_head_says_nothing_of_the_size(mx: Mx) -> None:
    def answer(asked: Asked) -> None:
        if asked.method == "HEAD":
            asked.say(200, b"", {"Content-Length": "500", "ETag": 'W/"packed"', "Content-Encoding": "gzip"})
        else:
            asked.serve(DATA)

    with scripted(answer) as server:
        fetched(mx, server)


def test_p04_a_tag_of_head_that_is_not_the_one_of_get(mx: Mx) -> None:
    with scripted(lambda asked: asked.serve(DATA, {"ETag": f'"{asked.method}"'})) as server:
        fetched(mx, server)
        mx("prefetch", f"{server.url}/{NAME}", env=ENV).ok()


def test_p04_servers_that_do_not_agree_are_named_as_that(mx: Mx) -> None:
    with scripted(lambda asked: asked.serve(DATA, {"ETag": f'"{asked.number}"'})) as server:
        result = mx("prefetch", f"{server.url}/{NAME}", env=ENV).exits(16)
    assert "the object changed" in result.err
    assert "servers that disagree" in result.err


def test_p04_a_server_that_refuses_every_condition(mx: Mx) -> None:
    """Once it lists the same again, no condition is sent any more; what comes is compared all the same."""

    def answer(asked: Asked) -> None:
        if asked.headers.get("If-Match"):
            asked.say(412)
        else:
            asked.serve(DATA)

    with scripted(answer) as server:
        assert "listing the origin again" in fetched(mx, server).err


def test_p12_a_signed_link_that_expires_under_way(mx: Mx) -> None:
    good = [2]

    def answer(asked: Asked) -> None:
        if asked.method == "GET":
            good[0] -= 1
        if good[0] < 0:
            asked.say(403, b"<Error><Code>AccessDenied</Code><Message>Request has expired</Message></Error>")
        else:
            asked.serve(DATA)

    with scripted(answer) as server:
        url = f"{server.url}/{NAME}?X-Amz-Expires=60&X-Amz-Signature="
        result = mx("prefetch", url + "OLDSIGNATURE", "--max-connections", "1", env=ENV).exits(11)
        assert "the link is signed, and may have expired" in result.err
        assert "make a new one" in result.err
        assert "OLDSIGNATURE" not in result.err
        good[0] = 99
        document = mx("prefetch", url + "NEWSIGNATURE", "--json", env=ENV).ok().json()
        assert document["bytes_reused"] >= MIB
        assert document["bytes_reused"] + document["bytes_fetched"] == len(DATA)


def test_p11_a_wait_that_is_too_long_is_said(mx: Mx) -> None:
    with scripted(lambda asked: asked.say(429, b"", {"Retry-After": "7200"})) as server:
        assert "asked again in 2h00m" in mx("prefetch", f"{server.url}/{NAME}", env=ENV).exits(12).err


@pytest.mark.parametrize("wait", ["-5", "1.5", "", "soon", "0, 0", "Thu, 01 Jan 1970 00:00:00 GMT"])
def test_p11_a_wait_that_makes_no_sense_is_none(mx: Mx, wait: str) -> None:
    def answer(asked: Asked) -> None:
        if asked.number == 2:
            asked.say(429, b"", {"Retry-After": wait})
        else:
            asked.serve(DATA)

    with scripted(answer) as server:
        assert "1 retry" in fetched(mx, server).err


@pytest.mark.parametrize(
    ("status", "code", "words"),
    [
        (402, 11, "payment required"),
        (451, 11, "legal reasons"),
        (511, 11, "network authentication"),
        (302, 12, "does not say where to"),
        (423, 12, "locked"),
        (507, 12, "gave up"),
        (530, 12, "gave up"),
    ],
)
def test_seldom_statuses_are_named(mx: Mx, status: int, code: int, words: str) -> None:
    with scripted(lambda asked: asked.say(status)) as server:
        result = mx("prefetch", f"{server.url}/{NAME}", "--retry-for", "1s").exits(code)
    assert f"HTTP {status}" in result.err
    assert words in result.err


def test_p17_a_location_that_nobody_encoded(mx: Mx) -> None:
    place = "/né/模 x.safetensors"

    def answer(asked: Asked) -> None:
        if asked.path != f"/{NAME}":
            assert urllib.parse.unquote(asked.path) == place
            asked.serve(DATA)
            return
        asked.handler.wfile.write(f"HTTP/1.1 302 Found\r\nLocation: {place}\r\nContent-Length: 0\r\n\r\n".encode())

    with scripted(answer) as server:
        fetched(mx, server)


@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("reason", ["", " OK"])
def test_heads_of_old_servers(mx: Mx, end: str, reason: str) -> None:
    """Without carriage returns, without a reason, with folded lines, and with what is no header at all."""
    lines = [f"HTTP/1.1 200{reason}", f"CONTENT-length:  {len(DATA)} ", "X-Long: a", "\tb", "nothing", "X-\xff: \xfe"]

    def answer(asked: Asked) -> None:
        asked.handler.wfile.write((end.join(lines) + end + end).encode("latin-1"))
        if asked.method == "GET":
            asked.handler.wfile.write(DATA)

    with scripted(answer) as server:
        fetched(mx, server)


def test_p16_bytes_that_come_one_by_one_are_no_stall(mx: Mx) -> None:
    data = noise("drip", 25)
    never = threading.Event()

    def answer(asked: Asked) -> None:
        if asked.method == "HEAD":
            asked.serve(data)
            return
        asked.handler.send_response(206)
        tag = hashlib.md5(data).hexdigest()
        for header in (("ETag", f'"{tag}"'), ("Content-Range", f"bytes 0-{len(data) - 1}/{len(data)}")):
            asked.handler.send_header(*header)
        asked.handler.send_header("Content-Length", str(len(data)))
        asked.handler.end_headers()
        for byte in data:
            asked.handler.wfile.write(bytes([byte]))
            never.wait(0.1)

    with scripted(answer) as server:
        result = mx("prefetch", f"{server.url}/x.bin", env={"MX_STALL_TIMEOUT": "1s"}).ok()
    assert "stalled" not in result.err


@pytest.mark.parametrize("span", ["multipart", "longer", "shorter"])
def test_p08_a_206_that_is_not_the_piece(mx: Mx, span: str) -> None:
    def answer(asked: Asked) -> None:
        asked_for = asked.span(len(DATA))
        if asked.method == "HEAD" or not asked_for:
            asked.serve(DATA)
            return
        first, end = asked_for
        tag = {"ETag": f'"{hashlib.md5(DATA).hexdigest()}"'}
        if span == "multipart":
            head = f"--B\r\nContent-Range: bytes {first}-{end - 1}/{len(DATA)}\r\n\r\n".encode()
            body = head + DATA[first:end] + b"\r\n--B--\r\n"
            asked.say(206, body, tag | {"Content-Type": "multipart/byteranges; boundary=B"})
            return
        last = end if span == "longer" else max(first + 1, end - 5000)
        given = {"Content-Range": f"bytes {first}-{(end if span == 'longer' else last) - 1}/{len(DATA)}"}
        asked.say(206, DATA[first:last] + (b"more" if span == "longer" else b""), tag | given)

    with scripted(answer) as server:
        fetched(mx, server)


def test_https_where_nobody_speaks_it(mx: Mx) -> None:
    with scripted(lambda asked: asked.serve(DATA)) as server:
        url = server.url.replace("http:", "https:")
        assert "try http://" in mx("prefetch", f"{url}/{NAME}", env=ENV).exits(12).err


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"address": "127.0.0.9"}, "a name that its certificate holds"),
        ({"days": -0.5}, "renew the server's certificate"),
    ],
)
def test_p18_what_is_wrong_with_a_certificate_is_told_apart(
    mx: Mx, tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    """A CA to trust would cure neither."""
    tls = make_tls(tmp_path, **changes)
    with scripted(lambda asked: asked.serve(DATA), tls) as server:
        result = mx("prefetch", f"{server.url}/{NAME}", env=ENV | {"MX_CA_BUNDLE": str(tls.ca)}).exits(11)
    assert "certificate verify failed" in result.err
    assert words in result.err


@pytest.mark.parametrize("proxy", ["http://", "http://127.0.0.1:x", "::1:3128", "http://h:0"])
def test_what_is_no_proxy(mx: Mx, proxy: str) -> None:
    assert "http_proxy" in mx("prefetch", "http://origin.invalid/x", env={"http_proxy": proxy}).exits(2).err
