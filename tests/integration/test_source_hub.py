"""hf:// against a hub with faults, and against mirrors that leave things out."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from mx_cli.base.cancel import Stop
from mx_cli.base.errors import AccessDenied, IntegrityError, MxError, NotFound, UsageError
from mx_cli.engine.ports import ReadItem
from mx_cli.model.manifest import Listing
from mx_cli.sources.registry import OpenOrigin
from tests.rig import servers
from tests.rig.checkpoints import checkpoint_files
from tests.rig.faultd import body
from tests.rig.origins import opened
from tests.rig.scripted import Asked, scripted

TOKEN = "hf_TESTTOKEN123"


def listed(hub: servers.Hub, uri: str = "", **options: Any) -> tuple[OpenOrigin, Listing]:
    env = {**hub.env, **options.pop("env", {})}
    revision = options.pop("revision", None)
    origin = opened(uri or hub.uri, env, **options)
    return origin, origin.listing(revision, Stop())


def read(origin: OpenOrigin, listing: Listing, name: str) -> bytes:
    return origin.read(next(entry for entry in listing.files if entry.path == name), 1 << 30)


def test_files_sizes_and_digests_at_one_commit(hub: servers.Hub) -> None:
    files = checkpoint_files(shards=2, size=200_000)
    sha = hub.commit(files)
    origin, listing = listed(hub)
    assert (listing.revision, listing.ref) == (sha, "main")
    assert {entry.path: entry.size for entry in listing.files} == {name: len(data) for name, data in files.items()}
    weights = [entry for entry in listing.files if entry.path.endswith(".safetensors")]
    assert weights
    assert all("sha256" in entry.digests for entry in weights)
    assert {name: read(origin, listing, name) for name in files} == files


def test_p35_a_branch_that_moves_changes_nothing_that_was_listed(hub: servers.Hub) -> None:
    first = hub.commit({"config.json": b"1"})
    origin, listing = listed(hub)
    second = hub.commit({"config.json": b"2"})
    assert read(origin, listing, "config.json") == b"1"
    assert listed(hub)[1].revision == second
    assert listed(hub, revision=first)[1].revision == first
    assert listed(hub, uri=f"{hub.uri}@{first}")[1].ref == ""


def test_two_revisions_at_once_are_refused(hub: servers.Hub) -> None:
    hub.commit({"config.json": b"1"})
    with pytest.raises(UsageError, match="two revisions"):
        listed(hub, uri=f"{hub.uri}@main", revision="v1")


def test_a_folder_of_a_repository(hub: servers.Hub) -> None:
    hub.commit({"config.json": b"1", "gguf/a.json": b"2", "gguf-2/b.json": b"3"})
    origin, listing = listed(hub, uri=f"{hub.uri}/gguf")
    assert [entry.path for entry in listing.files] == ["a.json"]
    assert read(origin, listing, "a.json") == b"2"


def test_lfs_links_expire_and_are_renewed(hub: servers.Hub) -> None:
    hub.commit({"model.safetensors": b"x" * 100_000})
    hub.flags("links=0")
    origin, listing = listed(hub)
    with pytest.raises(AccessDenied):
        origin.open(ReadItem(listing.files[0], 0, 10))
    hub.flags("links=30")
    for offset in (0, 10):
        assert origin.open(ReadItem(listing.files[0], offset, 10)).read_into(memoryview(bytearray(10))) == 10
    resolved = [entry for entry in hub.log() if "/resolve/" in entry["path"]]
    assert len(resolved) == 2


def test_p21_what_is_missing_and_what_is_refused(hub: servers.Hub) -> None:
    sha = hub.commit({"config.json": b"{}"})
    with pytest.raises(NotFound, match="revision"):
        listed(hub, revision="nope")
    origin, listing = listed(hub)
    (hub.dir / sha / "config.json").unlink()
    with pytest.raises(NotFound, match=r"config\.json.*EntryNotFound"):
        read(origin, listing, "config.json")


def test_p21_gated(hub: servers.Hub) -> None:
    hub.commit({"config.json": b"{}"})
    hub.flags("gated")
    origin, listing = listed(hub)
    retries: list[MxError] = []
    with pytest.raises(AccessDenied, match="gated") as caught:
        read(origin, listing, "config.json")
    assert "accept the terms" in caught.value.hint
    assert not retries


def test_p21_the_token_is_missing_or_refused(hub: servers.Hub) -> None:
    hub.commit({"config.json": b"{}"})
    hub.flags(f"auth={TOKEN}")
    with pytest.raises(AccessDenied, match="no token") as missing:
        listed(hub)
    assert "HF_TOKEN" in missing.value.hint
    with pytest.raises(AccessDenied, match=r"present.*but refused") as refused:
        listed(hub, env={"HF_TOKEN": "hf_WRONG"})
    assert "hf_WRONG" not in f"{refused.value} {refused.value.hint}"
    origin, listing = listed(hub, env={"HF_TOKEN": TOKEN})
    assert read(origin, listing, "config.json") == b"{}"


@pytest.mark.parametrize(
    ("value", "sent", "said"),
    [
        (f"{TOKEN}\n", True, True),
        (f"  '{TOKEN}' ", True, True),
        (f'"{TOKEN}"', True, True),
        (TOKEN, True, False),
        ("", False, False),
        ("  ", False, False),
        ("''", False, False),
    ],
)
def test_p38_a_token_is_cleaned(hub: servers.Hub, value: str, sent: bool, said: bool) -> None:
    hub.commit({"config.json": b"{}"})
    notices: list[str] = []
    listed(hub, env={"HF_TOKEN": value}, notices=notices)
    assert all(entry["auth"] is sent for entry in hub.log())
    assert bool(notices) is said
    assert TOKEN not in "".join(notices)


@pytest.mark.parametrize("value", ["hf_TEST\nSECRET", "hf_TEST SECRET", "hf_SECRET\x00x", "hf_SECRET\u00e9"])
def test_p38_a_token_that_no_header_can_carry_is_not_echoed(hub: servers.Hub, value: str) -> None:
    with pytest.raises(UsageError) as caught:
        listed(hub, env={"HF_TOKEN": value})
    assert "SECRET" not in f"{caught.value} {caught.value.hint}"
    assert not hub.log()


def test_where_a_token_comes_from(hub: servers.Hub, tmp_path: Path) -> None:
    hub.commit({"config.json": b"{}"})
    hub.flags(f"auth={TOKEN}")
    (tmp_path / "token").write_text(f"{TOKEN}\n")
    (tmp_path / ".cache" / "huggingface").mkdir(parents=True)
    (tmp_path / ".cache" / "huggingface" / "token").write_text(TOKEN)
    notices: list[str] = []
    for env in (
        {"MX_HF_TOKEN_FILE": str(tmp_path / "token"), "HF_TOKEN": "hf_WRONG"},
        {"HF_TOKEN_PATH": str(tmp_path / "token")},
        {"HF_HOME": str(tmp_path)},
        {"HOME": str(tmp_path)},
    ):
        assert listed(hub, env=env, notices=notices)[1].files
    assert not notices
    with pytest.raises(AccessDenied):
        listed(hub, env={"HF_TOKEN": TOKEN, "MX_ANON": "1"})
    with pytest.raises(UsageError, match="cannot read the token file"):
        listed(hub, env={"MX_HF_TOKEN_FILE": str(tmp_path / "absent")})


def test_p17_the_token_stays_at_the_hub(hub: servers.Hub, start_faultd: Callable[..., servers.Faultd]) -> None:
    other = start_faultd()
    hub.commit({"config.json": body("config.json", 5)})
    target = other.file("ok", 5, "config.json").replace("/", "%2F").replace(":", "%3A")
    hub.flags(f"to={target}")
    origin, listing = listed(hub, env={"HF_TOKEN": TOKEN})
    read(origin, listing, "config.json")
    assert all(entry["auth"] for entry in hub.log())
    assert [entry["auth"] for entry in other.log()] == [False]


# --- mirrors -----------------------------------------------------------------------------------------------------


class Mirror:
    """A hub's front that drops what `drop` says: tree, sha, sizes, headers; or all of the API. Pages hold two files."""

    def __init__(self, files: Mapping[str, bytes], sha: str) -> None:
        self.files, self.sha = dict(files), sha
        self.drop: set[str] = set()
        self.asked: list[str] = []
        mirror = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *args: object) -> None:
                return

            def do_GET(self) -> None:
                mirror.asked.append(f"{self.command} {self.path}")
                status, headers, body = mirror.answer(self.path)
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                if self.command == "GET":
                    self.wfile.write(body)

            do_HEAD = do_GET

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.server_address[1]}"

    def answer(self, path: str) -> tuple[int, dict[str, str], bytes]:
        plain, _, query = path.partition("?")
        commit = {} if "headers" in self.drop else {"X-Repo-Commit": self.sha}
        if "/resolve/" in plain:
            name = plain.split("/resolve/")[1].split("/", 1)[1]
            return (200, commit, self.files[name]) if name in self.files else (404, commit, b"")
        if "api" in self.drop:
            return 404, {}, b"no such page"
        if "/tree/" in plain:
            return self.tree(query)
        document: dict[str, Any] = {"siblings": [self.sibling(name, "blobs" in query) for name in sorted(self.files)]}
        if "sha" not in self.drop:
            document["sha"] = self.sha
        return 200, {}, json.dumps(document).encode()

    def sibling(self, name: str, blobs: bool) -> dict[str, Any]:
        sized = blobs and "sizes" not in self.drop
        return {"rfilename": name, **({"size": len(self.files[name])} if sized else {})}

    def tree(self, query: str) -> tuple[int, dict[str, str], bytes]:
        if "tree" in self.drop:
            return 404, {}, b"no such page"
        start = int(query.partition("cursor=")[2] or 0)
        names = sorted(self.files)
        rows = [
            {"type": "directory", "path": "sub"},
            *(
                {"type": "file", "path": n, "size": len(self.files[n]), "oid": "0" * 40}
                for n in names[start : start + 2]
            ),
        ]
        following = f'<{self.url}/api/models/org/model/tree/{self.sha}?recursive=true&cursor={start + 2}>; rel="next"'
        return 200, {"Link": following} if start + 2 < len(names) else {}, json.dumps(rows).encode()


@pytest.fixture
def mirror() -> Iterator[Mirror]:
    files = {f"file-{i}.json": b"x" * i for i in range(5)}
    made = Mirror(files, "ab" * 20)
    yield made
    made.server.shutdown()
    made.server.server_close()


def from_mirror(mirror: Mirror, revision: str | None) -> Listing:
    origin = opened("org/model", {"HF_ENDPOINT": mirror.url})
    listing = origin.listing(revision, Stop())
    assert {entry.path: entry.size for entry in listing.files} == {n: len(d) for n, d in mirror.files.items()}
    assert {entry.path: origin.read(entry, 99) for entry in listing.files} == mirror.files
    return listing


def test_pages_of_the_tree_are_followed(mirror: Mirror) -> None:
    assert from_mirror(mirror, None).revision == mirror.sha
    assert sum("/tree/" in line for line in mirror.asked) == 3


@pytest.mark.parametrize(
    "drop", [{"tree"}, {"tree", "sizes"}, {"tree", "sizes", "headers"}, {"sha"}, {"sha", "headers"}, {"tree", "sha"}]
)
def test_p19_a_pinned_commit_needs_no_more_than_names(mirror: Mirror, drop: set[str]) -> None:
    mirror.drop = drop
    listing = from_mirror(mirror, mirror.sha)
    assert listing.revision == mirror.sha
    assert all(entry.resumable for entry in listing.files)


def test_p19_a_branch_is_resolved_by_whatever_names_the_commit(mirror: Mirror) -> None:
    mirror.drop = {"sha"}
    mirror.files["config.json"] = b"{}"
    assert from_mirror(mirror, "main").revision == mirror.sha


def test_p19_a_branch_that_nothing_resolves_says_what_to_do(mirror: Mirror) -> None:
    mirror.drop = {"sha", "headers"}
    with pytest.raises(NotFound, match="X-Repo-Commit") as caught:
        from_mirror(mirror, "main")
    assert "--revision" in caught.value.hint


def test_p19_without_any_api_the_reason_is_said(mirror: Mirror) -> None:
    mirror.drop = {"api"}
    with pytest.raises(NotFound, match="lists no files"):
        from_mirror(mirror, mirror.sha)


@pytest.mark.parametrize(
    ("code", "told", "refused"),
    [
        ("DisabledRepo", "This repository has been disabled", AccessDenied),
        ("GatedRepo", "Access to model is restricted", AccessDenied),
        ("", "Your token hf_SECRETSECRET may not", AccessDenied),
    ],
)
def test_p21_the_hubs_own_words(code: str, told: str, refused: type[MxError]) -> None:
    headers = {"X-Error-Code": code, "X-Error-Message": told}
    with scripted(lambda asked: asked.say(403, b"", headers)) as server, pytest.raises(refused) as caught:
        opened("org/model", {"HF_ENDPOINT": server.url}).listing(None, Stop())
    said = f"{caught.value} {caught.value.hint}"
    assert told.partition(" hf_")[0] in said
    assert "SECRET" not in said
    assert ("accept the terms" in said) == (code != "DisabledRepo")


def test_pages_that_lead_in_a_circle() -> None:
    row = b'[{"type": "file", "path": "config.json", "size": 2, "oid": "x"}]'

    def answer(asked: Asked) -> None:
        if "/tree/" in asked.path:
            cursor = "b" if "cursor=a" in asked.path else "a"
            asked.say(200, row, {"Link": f'<{asked.path.partition("?")[0]}?cursor={cursor}>; rel="next"'})
        else:
            asked.say(200, b'{"sha": "%b"}' % (b"ab" * 20))

    with scripted(answer) as server, pytest.raises(IntegrityError, match="does not advance"):
        opened("org/model", {"HF_ENDPOINT": server.url}).listing(None, Stop())
    assert len(server.asked) == 4
