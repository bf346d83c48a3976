"""Files of a hub outside LFS: their bytes are compared with the name that git gives to them, whatever way they come."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mx_cli.base.cancel import Stop
from mx_cli.base.errors import IntegrityError
from mx_cli.sources.hub_rows import entries
from tests.rig import cachecheck, servers
from tests.rig.origins import opened
from tests.rig.scripted import Asked, published, scripted
from tests.rig.scripted_origins import Repository
from tests.support import MIB, Mx, checkpoint_files, noise, tree

WORDS = noise("words", 6 * MIB)
FILES = {"config.json": b'{"model_type": "x"}', "tokenizer.json": WORDS}


def git_name(data: bytes, kind: Callable[[bytes], Any] = hashlib.sha1) -> str:
    return str(kind(b"blob %d\0" % len(data) + data).hexdigest())


def pointer(data: bytes) -> bytes:
    sha256 = hashlib.sha256(data).hexdigest()
    return f"version https://git-lfs.github.com/spec/v1\noid sha256:{sha256}\nsize {len(data)}\n".encode()


class Named(Repository):
    """A hub with the names that `name_of(path, data)` gives; `sent` replaces what it listed."""

    def __init__(self, name_of: Callable[[str, bytes], str | None], *lfs: str) -> None:
        super().__init__(FILES)
        self.name_of, self.lfs = name_of, lfs
        self.sent: dict[str, bytes] = {}

    def row(self, name: str) -> dict[str, object]:
        data = FILES[name]
        row: dict[str, object] = {"type": "file", "path": name, "size": len(data), "oid": self.name_of(name, data)}
        if name in self.lfs:
            row["lfs"] = {"oid": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 134}
        return row

    def __call__(self, asked: Asked) -> None:
        self.files = {**FILES, **self.sent} if "/resolve/" in asked.path else FILES
        super().__call__(asked)


def records(mx: Mx) -> dict[str, dict[str, str]]:
    (manifest,) = (json.loads(path.read_text()) for path in mx.cache.glob("models/*/manifests/*/*.json"))
    return {record["path"]: record["digests"] for record in manifest["files"]}


def test_the_names_are_kept_with_what_they_prove(mx: Mx, hub: servers.Hub) -> None:
    files = checkpoint_files(shards=1)
    hub.commit(files)
    result = mx("prefetch", hub.uri, env=hub.env).ok()
    assert tree(Path(result.out.strip())) == cachecheck.sums(files)
    for name, digests in records(mx).items():
        own = {"sha256": hashlib.sha256(files[name]).hexdigest()} if name.endswith(".safetensors") else {}
        assert digests == (own or {"git-sha1": git_name(files[name])}), name
    assert "origin's digests" in mx("prefetch", hub.uri, "--verify", env=hub.env).ok().err


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
@pytest.mark.parametrize("options", [(), ("--range-size", "1MiB"), ("--max-connections", "1")])
def test_other_bytes_than_the_listed_are_refused(mx: Mx, name: str, options: tuple[str, ...]) -> None:
    hub = Named(lambda path, data: git_name(data))
    hub.sent = {name: FILES[name][:-1] + b"~"}
    with scripted(hub) as server:
        env = {"HF_ENDPOINT": server.url}
        result = mx("prefetch", "hf://org/model", *options, env=env).exits(16)
        assert f"{name}: wrong git-sha1" in result.err
        assert name not in published(mx.cache)
        hub.sent = {}
        mx("prefetch", "hf://org/model", env=env).ok()
    assert published(mx.cache) == cachecheck.sums(FILES)


def test_what_a_mirror_spoils_once_is_fetched_again(mx: Mx) -> None:
    """The first answer is wrong, the second is right: the policy for every digest."""
    first = iter([FILES["config.json"].replace(b"x", b"y")])

    def hook(asked: Asked) -> bool:
        if asked.path.endswith("/config.json") and "/resolve/" in asked.path and (wrong := next(first, None)):
            asked.serve(wrong, {"X-Repo-Commit": "a" * 40})
            return True
        return False

    named = Named(lambda path, data: git_name(data))
    named.hook = hook
    with scripted(named) as server:
        result = mx("prefetch", "hf://org/model", env={"HF_ENDPOINT": server.url}).ok()
    assert "wrong git-sha1" in result.err
    assert published(mx.cache) == cachecheck.sums(FILES)


def test_bytes_that_a_killed_one_left_are_compared_too(mx: Mx, hub: servers.Hub) -> None:
    hub.commit(FILES)
    hub.flags("slow=2000000")
    run = mx.start("prefetch", hub.uri, env=hub.env)
    deadline = time.monotonic() + 20
    while hub.bytes_served("tokenizer.json") < 3 * MIB:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    run.kill()
    hub.reset()
    hub.flags("rot=0")
    assert "tokenizer.json: wrong git-sha1" in mx("prefetch", hub.uri, env=hub.env).exits(16).err
    hub.flags("ok")
    mx("prefetch", hub.uri, env=hub.env).ok()
    assert published(mx.cache) == cachecheck.sums(FILES)


@pytest.mark.parametrize("route", ["origin", "stream"])
def test_the_routes_of_a_pull(mx: Mx, tmp_path: Path, route: str) -> None:
    hub = Named(lambda path, data: git_name(data))
    hub.sent = {"config.json": FILES["config.json"].replace(b"x", b"y")}
    to = tmp_path / "out"
    with scripted(hub) as server:
        pull = ("pull", "hf://org/model", "--route", route, "--to", to)
        assert "config.json: wrong git-sha1" in mx(*pull, env={"HF_ENDPOINT": server.url}).exits(16).err
        assert not to.exists()
        hub.sent = {}
        mx(*pull, env={"HF_ENDPOINT": server.url}).ok()
    assert tree(to) == cachecheck.sums(FILES)


def test_small_files_that_are_read_for_what_they_say() -> None:
    """A configuration or an index that decides something is compared before it does."""
    hub = Named(lambda path, data: git_name(data))
    hub.sent = {"config.json": FILES["config.json"].replace(b"x", b"y")}
    with scripted(hub) as server:
        origin = opened("hf://org/model", {"HF_ENDPOINT": server.url})
        (config, _) = origin.listing(None, Stop()).files
        with pytest.raises(IntegrityError, match="wrong git-sha1"):
            origin.read(config, MIB)


def test_verify_finds_what_the_hub_never_had(mx: Mx, hub: servers.Hub) -> None:
    """Both the file and its record were changed: only the origin knows."""
    hub.commit(FILES)
    place = Path(mx("prefetch", hub.uri, env=hub.env).ok().out.strip())
    wrong = FILES["config.json"].replace(b"x", b"y")
    (place / "config.json").write_bytes(wrong)
    import xxhash

    for path in mx.cache.glob("models/*/manifests/*/*.json"):
        document = json.loads(path.read_text())
        for record in document["files"]:
            if record["path"] == "config.json":
                record["xxh3"] = xxhash.xxh3_128_hexdigest(wrong)
        path.write_text(json.dumps(document))
    assert "wrong git-sha1" in mx("prefetch", hub.uri, "--verify", env=hub.env).exits(16).err


def test_a_file_under_a_new_name_is_not_fetched_again(mx: Mx, hub: servers.Hub) -> None:
    hub.commit(FILES)
    mx("prefetch", hub.uri, env=hub.env).ok()
    hub.commit({"config.json": FILES["config.json"], "vocabulary.json": WORDS})
    hub.reset()
    place = Path(mx("prefetch", hub.uri, env=hub.env).ok().out.strip())
    assert (place / "vocabulary.json").read_bytes() == WORDS
    assert hub.bytes_served("/resolve/") == 0


@pytest.mark.parametrize(
    ("name_of", "kept"),
    [
        (lambda path, data: git_name(data, hashlib.sha256), "git-sha256"),
        (lambda path, data: git_name(data).upper(), "git-sha1"),
        (lambda path, data: f'"{git_name(data)}"', "git-sha1"),
        (lambda path, data: hashlib.sha1(data).hexdigest(), "git-sha1"),
        (lambda path, data: None, ""),
        (lambda path, data: "0" * 40, ""),
        (lambda path, data: "c0ffee" * 6 + "abcd", ""),
        (lambda path, data: hashlib.md5(data).hexdigest(), ""),
        (lambda path, data: f"W/{path}", ""),
    ],
    ids=["sha256 repository", "upper case", "quotes", "bytes alone", "none", "zeros", "one for all", "md5", "text"],
)
def test_names_of_mirrors(mx: Mx, name_of: Callable[[str, bytes], str | None], kept: str) -> None:
    with scripted(Named(name_of)) as server:
        mx("prefetch", "hf://org/model", env={"HF_ENDPOINT": server.url}).ok()
    assert published(mx.cache) == cachecheck.sums(FILES)
    assert {kind for digests in records(mx).values() for kind in digests} == ({kept} if kept else set())


def test_a_mirror_whose_pointers_have_other_names_makes_up_all_of_them(mx: Mx) -> None:
    hub = Named(lambda path, data: hashlib.sha1(path.encode()).hexdigest(), "tokenizer.json")
    with scripted(hub) as server:
        mx("prefetch", "hf://org/model", env={"HF_ENDPOINT": server.url}).ok()
    assert records(mx) == {"config.json": {}, "tokenizer.json": {"sha256": hashlib.sha256(WORDS).hexdigest()}}


@pytest.mark.parametrize("size", ["x", None, -1, True, 10**30, 1.5])
@pytest.mark.parametrize("oid", ["ab" * 32, "AB" * 32, "sha256:" + "ab" * 32, "\ud800", 5, None])
def test_what_a_pointer_says_may_be_anything(size: object, oid: object) -> None:
    row = {"type": "file", "path": "a.bin", "size": 7, "oid": "cd" * 20, "lfs": {"oid": oid, "size": size}}
    (entry,) = entries([row], "hf://org/model")
    assert entry.size in (None, 10**30)
    assert entry.digests in ({}, {"sha256": "ab" * 32})


def test_the_name_of_a_pointer_is_not_the_one_of_the_file() -> None:
    data = b"weights"
    rows: list[Any] = [
        {"type": "file", "path": "a.bin", "size": 7, "oid": git_name(pointer(data)), "lfs": lfs}
        for lfs in [{"oid": hashlib.sha256(data).hexdigest(), "size": 7}, {"size": 7}]
    ]
    rows.append({"type": "file", "path": "b.bin", "size": 7, "oid": git_name(pointer(data)), "xetHash": "ab" * 32})
    rows.append({"type": "file", "path": "c.txt", "size": 7, "blobId": git_name(data), "lfs": None})
    found = [dict(entry.digests) for entry in entries(rows, "hf://org/model")]
    assert found == [{"sha256": hashlib.sha256(data).hexdigest()}, {}, {}, {"git-sha1": git_name(data)}]


def test_the_names_of_the_other_listing(mx: Mx) -> None:
    """A mirror without the tree API: `siblings` with `blobId`."""
    name = "config.json"

    def hook(asked: Asked) -> bool:
        if "/tree/" in asked.path:
            asked.say(404)
        elif "blobs=true" in asked.path:
            row = {"rfilename": name, "size": len(FILES[name]), "blobId": git_name(FILES[name])}
            asked.say(200, json.dumps({"sha": "a" * 40, "siblings": [row]}).encode())
        elif "/resolve/" in asked.path:
            asked.serve(os.urandom(len(FILES[name])), {"X-Repo-Commit": "a" * 40})
        else:
            return False
        return True

    with scripted(Repository({name: FILES[name]}, hook=hook)) as server:
        result = mx("prefetch", "hf://org/model", env={"HF_ENDPOINT": server.url}).exits(16)
    assert "wrong git-sha1" in result.err
