"""gs:// against fake-gcs-server, and against a server that refuses."""

from __future__ import annotations

import base64
import http.server
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from mx_cli.base.cancel import Stop
from mx_cli.base.errors import AccessDenied, IntegrityError, NotFound, OriginChanged, UsageError
from mx_cli.engine.ports import ReadItem
from mx_cli.sources.gcs_token import Token
from tests.rig import servers
from tests.rig.origins import opened
from tests.rig.scripted import Asked, scripted


def test_digests_and_generations(gcs: servers.Gcs) -> None:
    gcs.put("m/x.bin", b"123456789")
    for key in ("m", "m/x.bin"):
        entry = opened(gcs.uri(key), gcs.env).listing(None, Stop()).files[0]
        assert entry.digests == {"crc32c": "e3069283", "md5": "25f9e794323b453885f5181f1b624d0b"}
        assert entry.version == entry.validator
        assert entry.validator.isdigit()


def test_pages_of_a_listing_are_followed(gcs: servers.Gcs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mx_cli.sources.gcs._PAGE", "3")
    for number in range(8):
        gcs.put(f"m/{number}", b"x")
    listing = opened(gcs.uri("m"), gcs.env).listing(None, Stop())
    assert [entry.path for entry in listing.files] == [f"{number}" for number in range(8)]


def test_a_generation_is_a_number(gcs: servers.Gcs) -> None:
    gcs.put("m/x", b"abc")
    with pytest.raises(UsageError, match="generation"):
        opened(gcs.uri("m/x"), gcs.env, version_id="abc")
    generation = opened(gcs.uri("m/x"), gcs.env).listing(None, Stop()).files[0].version
    assert opened(gcs.uri("m/x"), gcs.env, version_id=generation).listing(None, Stop()).files
    with pytest.raises(NotFound, match="generation 7"):
        opened(gcs.uri("m/x"), gcs.env, version_id="7").listing(None, Stop())


def test_p23_markers_are_no_files(gcs: servers.Gcs) -> None:
    gcs.put("m/", b"")
    gcs.put("m/sub/", b"")
    gcs.put("m/sub/a.json", b"{}")
    listing = opened(gcs.uri("m"), gcs.env).listing(None, Stop())
    assert [entry.path for entry in listing.files] == ["sub/a.json"]


def test_p14_nothing_there(gcs: servers.Gcs) -> None:
    with pytest.raises(NotFound, match="names below nope/"):
        opened(gcs.uri("nope"), gcs.env).listing(None, Stop())
    with pytest.raises(NotFound, match="no-such-bucket"):
        opened("gs://no-such-bucket/nope", gcs.env).listing(None, Stop())


def test_a_name_that_is_not_unicode_is_refused() -> None:
    rows = [{"name": name, "size": "1", "generation": "1"} for name in ("m/config.json", "m/\ud800.bin")]
    with scripted(lambda asked: asked.say(200, json.dumps({"items": rows}).encode())) as server:
        origin = opened("gs://bucket/m/", {"STORAGE_EMULATOR_HOST": server.url})
        with pytest.raises(IntegrityError, match=r"not Unicode \('.ud800.bin'\)"):
            origin.listing(None, Stop())


def test_p04_an_overwritten_object_is_the_old_one_or_an_error(gcs: servers.Gcs) -> None:
    gcs.put("m/x", b"old")
    origin = opened(gcs.uri("m/x"), gcs.env)
    entry = origin.listing(None, Stop()).files[0]
    gcs.put("m/x", b"new")
    with pytest.raises(OriginChanged):
        origin.open(ReadItem(entry, 0, 3))


def test_an_endpoint_without_a_scheme_is_an_emulator(gcs: servers.Gcs) -> None:
    gcs.put("m/x", b"abc")
    host = gcs.endpoint.removeprefix("http://")
    first = opened(gcs.uri("m"), {"STORAGE_EMULATOR_HOST": host})
    assert first.listing(None, Stop()).files
    assert first.uri == opened(gcs.uri("m"), gcs.env).uri
    assert opened(gcs.uri("m"), {"MX_ENDPOINT_URL": gcs.endpoint}).listing(None, Stop()).files


def test_who_pays_must_be_known(gcs: servers.Gcs) -> None:
    with pytest.raises(UsageError, match="who pays"):
        opened(gcs.uri("m"), gcs.env, requester_pays="true").listing(None, Stop())


# --- a store that looks at tokens, and a token service -------------------------------------------------------------


class Google:
    """Answers for one object to those who have the token of the moment. The token service gives T1, T2 …"""

    def __init__(self) -> None:
        self.good = "T1"
        self.given = 0
        self.asked: list[tuple[str, str]] = []
        google = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *args: object) -> None:
                return

            def do_GET(self) -> None:
                google.asked.append((self.path, self.headers.get("Authorization", "")))
                status, headers, body = google.answer(self.path, self.headers.get("Authorization", ""))
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"

    def answer(self, path: str, authorization: str) -> tuple[int, dict[str, str], bytes]:
        if authorization != f"Bearer {self.good}":
            return 401, {}, json.dumps({"error": {"message": "Invalid Credentials"}}).encode()
        if path.startswith("/download"):
            return 206, {"Content-Range": "bytes 0-2/3", "x-goog-generation": "7"}, b"abc"
        if "/o/" in path:
            return 404, {}, b'{"error": {"message": "No such object"}}'
        crc = base64.b64encode(bytes(4)).decode()
        rows = [{"name": "m/x", "size": "3", "generation": "7", "crc32c": crc}]
        return 200, {}, json.dumps({"items": rows}).encode()


@pytest.fixture
def google(monkeypatch: pytest.MonkeyPatch) -> Iterator[Google]:
    made = Google()

    class Credentials:
        token = ""
        valid = False

        def refresh(self, request: object) -> None:
            made.given += 1
            self.token, self.valid = f"T{made.given}", True

    def find(self: Token) -> None:
        self._credentials = Credentials()

    # The token service is Google's own; everything else is real.
    monkeypatch.setattr(Token, "_find", find)
    monkeypatch.setattr("mx_cli.sources.gcs._GOOGLE", made.url)
    yield made
    made.server.shutdown()
    made.server.server_close()


def test_p27_a_token_that_is_refused_is_renewed_once(google: Google) -> None:
    origin = opened("gs://bucket/m", {})
    entry = origin.listing(None, Stop()).files[0]
    google.good = "T2"
    view = memoryview(bytearray(3))
    assert origin.open(ReadItem(entry, 0, 3)).read_into(view) == 3
    assert google.given == 2
    google.good = "nobody's"
    with pytest.raises(AccessDenied) as caught:
        origin.open(ReadItem(entry, 0, 3))
    assert "storage.objects.get" in caught.value.hint
    assert "T2" not in f"{caught.value}"
    assert google.given == 3


def test_p26_anonymous_sends_nothing(google: Google) -> None:
    with pytest.raises(AccessDenied) as caught:
        opened("gs://bucket/m", {}, anon="true").listing(None, Stop())
    assert "leave --anon out" in caught.value.hint
    assert not [authorization for _, authorization in google.asked if authorization]


def test_p26_the_search_for_credentials_ends(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("GOOGLE_APPLICATION_CREDENTIALS", "GOOGLE_CLOUD_PROJECT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("CLOUDSDK_CONFIG", str(tmp_path))
    monkeypatch.setenv("NO_GCE_CHECK", "true")
    begun = time.monotonic()
    with pytest.raises(AccessDenied) as caught:
        opened("gs://bucket/m", {}).listing(None, Stop())
    assert time.monotonic() - begun < 8
    assert "--anon" in caught.value.hint


def test_pages_that_lead_in_a_circle() -> None:
    def answer(asked: Asked) -> None:
        token = "b" if "pageToken=a" in asked.path else "a"
        row = {"name": f"m/{token}", "size": "1", "generation": "1"}
        asked.say(200, json.dumps({"items": [row], "nextPageToken": token}).encode())

    with scripted(answer) as server, pytest.raises(IntegrityError, match="does not advance"):
        opened("gs://b/m/", {"STORAGE_EMULATOR_HOST": server.url}).listing(None, Stop())
    assert len(server.asked) == 3
