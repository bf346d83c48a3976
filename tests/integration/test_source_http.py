"""http(s):// against a server with faults."""

from __future__ import annotations

import socket
import ssl
import threading
import time
import urllib.parse
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from mx_cli.base.cancel import Stop
from mx_cli.base.errors import AccessDenied, IntegrityError, MxError, NotFound, OriginChanged, Unreachable, UsageError
from mx_cli.engine.ports import NoRanges, ReadItem
from mx_cli.model.manifest import Entry, Listing
from mx_cli.sources.registry import OpenOrigin
from tests.rig import servers
from tests.rig.faultd import body
from tests.rig.origins import opened

NO_ENV: Mapping[str, str] = {}


def listed(url: str, **options: Any) -> tuple[OpenOrigin, Listing]:
    origin = opened(url, NO_ENV, **options)
    return origin, origin.listing(None, Stop())


def read(origin: OpenOrigin, entry: Entry, offset: int = 0, length: int | None = None, *, whole: bool = False) -> bytes:
    stream = origin.open(ReadItem(entry, offset, entry.size if length is None else length, whole=whole))
    found, view = bytearray(), memoryview(bytearray(100_000))
    while count := stream.read_into(view):
        found += view[:count]
    stream.close()
    return bytes(found)


@pytest.mark.parametrize("flags", ["ok", "head405", "noct", "etag=weak", "etag=none", "etag=slash", "etag=mp", "nolen"])
def test_reads_what_there_is(faultd: servers.Faultd, flags: str) -> None:
    origin, listing = listed(faultd.file(flags, 200_000, "x.bin"))
    (entry,) = listing.files
    assert (entry.path, entry.size) == ("x.bin", None if flags == "nolen" else 200_000)
    assert read(origin, entry, 1000, 5000) == body("x.bin", 200_000)[1000:6000]
    assert read(origin, entry, whole=True) == body("x.bin", 200_000)


def test_p20_a_revision_is_a_safe_file_name_whatever_the_validator(faultd: servers.Faultd) -> None:
    revisions = {}
    for flags in ("ok", "etag=weak", "etag=slash", "etag=none"):
        _, listing = listed(faultd.file(flags, 1000, "x"))
        revisions[flags] = listing.revision
        assert set(listing.revision) <= set("0123456789abcdefghijklmnopqrstuvwxyz-")
        assert listing.files[0].strong is (flags in ("ok", "etag=slash"))
    assert len(revisions["ok"]) == 64
    assert revisions["etag=weak"].startswith("weak-")
    assert revisions["etag=none"] == ""


def test_p09_an_empty_file(faultd: servers.Faultd) -> None:
    for flags in ("ok", "head405"):
        origin, listing = listed(faultd.file(flags, 0, "empty"))
        assert listing.files[0].size == 0
        assert origin.read(listing.files[0], 10) == b""


def test_p06_a_page_is_not_a_file(faultd: servers.Faultd) -> None:
    with pytest.raises(IntegrityError, match=r"got text/html, 26 bytes"):
        listed(faultd.file("html", 1_000_000, "model.safetensors"))
    assert listed(faultd.file("html", 1000, "page.html"))[1].files


def test_p03_p08_a_server_without_ranges(faultd: servers.Faultd) -> None:
    for flags in ("norange", "badcr"):
        origin, listing = listed(faultd.file(flags, 10_000, "x.bin"))
        with pytest.raises(NoRanges):
            read(origin, listing.files[0], 100, 100)
        assert read(origin, listing.files[0], whole=True) == body("x.bin", 10_000)


@pytest.mark.parametrize("flags", ["over=4096", "under=4096"])
def test_p05_a_size_that_is_not_true(faultd: servers.Faultd, flags: str) -> None:
    origin, listing = listed(faultd.file(flags, 100_000, "a.bin"))
    with pytest.raises(IntegrityError, match=r"expected \d+ bytes from the listing, observed 100000"):
        read(origin, listing.files[0], 0, 50_000)
    with pytest.raises(IntegrityError):
        read(origin, listing.files[0], whole=True)


def test_p07_a_body_of_unknown_length_that_breaks_off(faultd: servers.Faultd) -> None:
    origin, listing = listed(faultd.file("nolen,cut=5000", 100_000, "x.bin"))
    with pytest.raises(Unreachable):
        read(origin, listing.files[0], whole=True)


@pytest.mark.parametrize("flags", ["flip=1", "flip=1,etag=weak"])
def test_p04_an_object_that_changes(faultd: servers.Faultd, flags: str) -> None:
    origin, listing = listed(faultd.file(flags, 10_000, "x.bin"))
    assert read(origin, listing.files[0], 0, 100) == body("x.bin", 10_000)[:100]
    if flags == "flip=1":
        with pytest.raises(OriginChanged):
            read(origin, listing.files[0], 100, 100)
    else:
        assert not listing.files[0].resumable


def test_p11_p12_a_server_that_says_later(faultd: servers.Faultd) -> None:
    retries: list[MxError] = []
    _, listing = listed(faultd.file("fail=503:2", 1000, "x"), retries=retries)
    assert listing.files[0].size == 1000
    assert len(retries) == 2
    with pytest.raises(Unreachable, match="gave up"):
        listed(faultd.file("fail=500:99", 1000, "x"), retry_for="1")
    assert len(faultd.log()) < 12


def test_p13_what_is_missing_is_asked_for_once(faultd: servers.Faultd) -> None:
    with pytest.raises(NotFound):
        listed(f"{faultd.url}/nothing/here")
    assert len(faultd.log()) == 1


def test_p16_a_stall_ends(faultd: servers.Faultd) -> None:
    origin, listing = listed(faultd.file("stall=50000:30", 100_000, "x"), stall_timeout="500ms")
    with pytest.raises(Unreachable, match=r"no byte for 0\.5 s"):
        read(origin, listing.files[0], whole=True)


def test_p16_a_stall_ends_over_tls_too(start_faultd: Callable[..., servers.Faultd], tls: servers.Tls) -> None:
    secure = start_faultd(tls=tls)
    origin, listing = listed(secure.file("stall=50000:30", 100_000, "x"), stall_timeout="500ms", ca_bundle=tls.ca)
    with pytest.raises(Unreachable, match=r"no byte for 0\.5 s"):
        read(origin, listing.files[0], whole=True)


def test_p18_a_private_ca(start_faultd: Callable[..., servers.Faultd], tls: servers.Tls) -> None:
    secure = start_faultd(tls=tls)
    url = secure.file("ok", 100_000, "x")
    origin, listing = listed(url, ca_bundle=tls.ca)
    assert read(origin, listing.files[0], whole=True) == body("x", 100_000)
    retries: list[MxError] = []
    with pytest.raises(AccessDenied, match="certificate verify failed") as caught:
        listed(url, retries=retries)
    assert not retries
    assert "SSL_CERT_FILE" in caught.value.hint
    assert listed(url, insecure="true")[1].files


def test_p21_credentials_in_the_url_go_to_their_host_and_into_no_sentence(faultd: servers.Faultd) -> None:
    url = faultd.file("auth=T", 1000, "x").replace("http://", "http://user:SECRET@")
    with pytest.raises(AccessDenied) as caught:
        listed(url)
    assert "SECRET" not in f"{caught.value} {caught.value.hint}"
    assert all(entry["auth"] for entry in faultd.log())


def test_p17_credentials_stay_at_their_host(
    faultd: servers.Faultd, start_faultd: Callable[..., servers.Faultd]
) -> None:
    other = start_faultd()
    target = urllib.parse.quote(other.file("ok", 1000, "x"), safe="")
    url = faultd.file(f"to={target}", 1, "x").replace("http://", "http://user:SECRET@")
    origin, listing = listed(url)
    assert read(origin, listing.files[0], 0, 10) == body("x", 1000)[:10]
    assert [entry["auth"] for entry in faultd.log()] == [True, True]
    assert [entry["auth"] for entry in other.log()] == [False, False]


def test_a_redirect_is_paid_for_once_and_a_stale_link_is_renewed(faultd: servers.Faultd) -> None:
    origin, listing = listed(faultd.file("sign=1.5", 10_000, "x.bin"))
    entry = listing.files[0]
    faultd.reset()
    for offset in (0, 1000, 2000):
        assert read(origin, entry, offset, 1000) == body("x.bin", 10_000)[offset : offset + 1000]
    first = [log["path"] for log in faultd.log()]
    assert len(first) == 4
    link = first[-1]
    # The link says itself when it ends.
    while time.time() <= float(link.split("/")[2]):
        Stop().wait(0.1)
    assert read(origin, entry, 3000, 1000) == body("x.bin", 10_000)[3000:4000]
    again = [log["path"] for log in faultd.log()][4:]
    assert again[0] == link
    assert len(again) == 3


def test_a_version_id_is_for_object_stores(faultd: servers.Faultd) -> None:
    with pytest.raises(UsageError, match="--version-id"):
        opened(faultd.file("ok", 1, "x"), NO_ENV, version_id="v1")


def test_nobody_listens() -> None:
    with pytest.raises(Unreachable, match=r"127\.0\.0\.1") as caught:
        listed(f"http://127.0.0.1:{servers.free_port()}/x", retry_for="300ms")
    assert "gave up" in caught.value.what


def test_a_server_that_hangs_up_during_the_handshake_is_asked_again(tls: servers.Tls) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tls.cert, tls.key)
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            first, _ = listener.accept()
            first.recv(1)
            first.shutdown(socket.SHUT_RDWR)
            first.close()
            plain, _ = listener.accept()
            with context.wrap_socket(plain, server_side=True) as secure:
                secure.recv(4096)
                secure.sendall(b'HTTP/1.1 200 OK\r\nContent-Length: 7\r\nETag: "a"\r\n\r\n')

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        _, listing = listed(f"https://localhost:{listener.getsockname()[1]}/x.bin", ca_bundle=str(tls.ca))
        thread.join(10)
    assert listing.files[0].size == 7
