"""Hubs that renamed a repository, redirect, page elsewhere, or lack parts; revisions as people write them."""

from __future__ import annotations

import hashlib
import json

import pytest

from tests.rig import cachecheck
from tests.rig.scripted import Asked, published, scripted
from tests.rig.scripted_origins import SHA, Hook, Repository, no_hook
from tests.support import Mx, Result, safetensors_bytes

WEIGHTS = safetensors_bytes({"w": ("U8", (100_000,), None)})
FILES = {"config.json": b'{"model_type": "x"}', "model.safetensors": WEIGHTS}
TOKEN = "hf_ABCDEFGHIJ"


def repository(*names: str, hook: Hook = no_hook) -> Repository:
    return Repository(FILES, *names, hook=hook)


def always(status: int, headers: dict[str, str]) -> Hook:
    def hook(asked: Asked) -> bool:
        asked.say(status, b"", headers)
        return True

    return hook


def fetched(mx: Mx, hub: Repository, *arguments: str, **env: str) -> Result:
    with scripted(hub) as server:
        return mx("prefetch", *(arguments or ("hf://org/model",)), env={"HF_ENDPOINT": server.url} | env)


def complete(mx: Mx) -> bool:
    return published(mx.cache) == cachecheck.sums(FILES)


def test_a_renamed_repository(mx: Mx) -> None:
    """The hub answers 307 for the old name, with a path alone: the token goes on to the new one."""
    hub = repository()
    hub.name = "new/name"
    bare: list[str] = []

    def hook(asked: Asked) -> bool:
        if not asked.headers.get("Authorization"):
            bare.append(asked.path)
        if "/org/model" in asked.path:
            asked.say(307, b"", {"Location": asked.path.replace("/org/model", "/new/name")})
            return True
        return False

    hub.hook = hook
    fetched(mx, hub, HF_TOKEN=TOKEN).ok()
    assert complete(mx)
    assert not bare


def test_p17_the_token_does_not_go_to_another_port(mx: Mx) -> None:
    """Not with the next page of a listing either."""
    with scripted(lambda asked: asked.say(200, b"[]")) as other:
        hub = repository()

        def hook(asked: Asked) -> bool:
            if "/tree/" not in asked.path:
                return False
            rows = json.dumps([hub.row(name) for name in FILES]).encode()
            asked.say(200, rows, {"Link": f'<{other.url}/next>; rel="next"'})
            return True

        hub.hook = hook
        fetched(mx, hub, HF_TOKEN=TOKEN).ok()
        assert len(other.asked) == 1
        assert not other.asked[0].headers.get("Authorization")


@pytest.mark.parametrize(
    ("uri", "name"),
    [
        ("hf://org/model@feature%2Fx", "feature/x"),
        ("org/model@feature%2fx", "feature/x"),
        ("hf://org/model@refs/pr/3", "refs/pr/3"),
        ("hf://org/model@refs%2Fpr%2F3", "refs/pr/3"),
        ("hf://org/model@v1.0", "v1.0"),
    ],
)
def test_names_of_revisions(mx: Mx, uri: str, name: str) -> None:
    fetched(mx, repository(name), uri).ok()
    assert complete(mx)


def test_a_slash_in_a_branch_is_explained(mx: Mx) -> None:
    result = fetched(mx, repository("main", "feature/x"), "hf://org/model@feature/x").exits(10)
    assert "%2F" in result.err


@pytest.mark.parametrize("before", [" ", ""])
@pytest.mark.parametrize("after", ["/", "//", " ", "\n"])
def test_an_endpoint_with_something_around_it(mx: Mx, before: str, after: str) -> None:
    with scripted(repository()) as server:
        mx("prefetch", "hf://org/model", env={"HF_ENDPOINT": f"{before}{server.url}{after}"}).ok()


@pytest.mark.parametrize("written", ["localhost:8000", "http://h:x", "http://", "http://h/?a=b", "ftp://h"])
def test_what_is_no_endpoint(mx: Mx, written: str) -> None:
    assert "HF_ENDPOINT" in mx("prefetch", "hf://org/model", env={"HF_ENDPOINT": written}).exits(2).err


def test_name_and_password_of_an_endpoint(mx: Mx) -> None:
    """A mirror that wants them gets them, unless there is a token; they are not told."""
    seen: set[str] = set()

    def hook(asked: Asked) -> bool:
        seen.add(str(asked.headers.get("Authorization")))
        return False

    with scripted(repository(hook=hook)) as server:
        endpoint = server.url.replace("://", "://user:SECRETPW1@")
        result = mx("prefetch", "hf://org/model", "-vv", env={"HF_ENDPOINT": endpoint}).ok()
        assert seen == {"Basic dXNlcjpTRUNSRVRQVzE="}
        assert "SECRETPW1" not in result.err + result.out
        seen.clear()
        mx("prefetch", "hf://org/model", env={"HF_ENDPOINT": endpoint, "HF_TOKEN": TOKEN}).ok()
        assert seen == {f"Bearer {TOKEN}"}


def test_p19_a_mirror_without_sizes_and_without_head(mx: Mx) -> None:
    def hook(asked: Asked) -> bool:
        if asked.method == "HEAD":
            asked.say(405)
        elif "/tree/" in asked.path:
            asked.say(404)
        elif "/revision/" in asked.path:
            siblings = [{"rfilename": name} for name in FILES]
            asked.say(200, json.dumps({"sha": SHA, "siblings": siblings}).encode())
        else:
            return False
        return True

    fetched(mx, repository(hook=hook)).ok()
    assert complete(mx)


def test_p21_a_store_behind_the_hub_that_refuses_is_named(mx: Mx) -> None:
    """Terms to accept would not help there."""
    with scripted(lambda asked: asked.say(403, b"<Error><Code>AccessDenied</Code></Error>")) as store:

        def hook(asked: Asked) -> bool:
            if "/resolve/" not in asked.path:
                return False
            asked.say(302, b"", {"Location": f"{store.url}/blob?X-Amz-Signature=SIGNATURE1"})
            return True

        result = fetched(mx, repository(hook=hook)).exits(11)
        assert f"at {store.url}/blob" in result.err
        assert "accept the terms" not in result.err
        assert "SIGNATURE1" not in result.err


def test_p11_the_hubs_own_way_to_say_later(mx: Mx) -> None:
    limits = {"RateLimit": '"api";r=0;t=7200', "RateLimit-Policy": '"fixed window";"api";q=500;w=300'}
    result = fetched(mx, repository(hook=always(429, limits))).exits(12)
    assert "asked again in 2h00m" in result.err


@pytest.mark.parametrize("row", [7, {"type": "file", "path": ["x"], "size": 1}, {"type": "file", "size": 1}])
def test_a_listing_with_rows_that_are_none_is_not_half_believed(mx: Mx, row: object) -> None:
    hub = repository()

    def hook(asked: Asked) -> bool:
        if "/tree/" not in asked.path:
            return False
        asked.say(200, json.dumps([hub.row("config.json"), row]).encode())
        return True

    hub.hook = hook
    assert "a row that is no file" in fetched(mx, hub).exits(16).err
    assert not published(mx.cache)


def test_folders_in_a_listing_are_no_files(mx: Mx) -> None:
    hub = repository()

    def hook(asked: Asked) -> bool:
        if "/tree/" not in asked.path:
            return False
        rows = [{"type": "directory", "path": "sub", "oid": hashlib.sha1(b"").hexdigest(), "size": 0}]
        asked.say(200, json.dumps(rows + [hub.row(name) for name in FILES]).encode())
        return True

    hub.hook = hook
    fetched(mx, hub).ok()
    assert complete(mx)


def test_p36_the_offline_switch_of_transformers(mx: Mx) -> None:
    fetched(mx, repository()).ok()
    env = {"HF_ENDPOINT": "http://127.0.0.1:1", "TRANSFORMERS_OFFLINE": "1"}
    mx("prefetch", "hf://org/model", env=env).ok()
