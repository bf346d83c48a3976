"""`load` and `stream` with `fill_cache`: one pass over the network gives tensors, and a snapshot like any other."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import mx_cli
from mx_cli.base.errors import IntegrityError, Unreachable, UsageError
from mx_cli.engine.ports import ReadItem
from mx_cli.flows import fill_cache
from mx_cli.flows.from_python import process_context
from mx_cli.model.manifest import Entry, Listing
from tests.rig import capabilities
from tests.rig import tensor_parallel as tp
from tests.rig.big_file import big_file, name_of
from tests.rig.servers import Hub, S3Stub
from tests.support import MIB, Mx, clean_env

if not capabilities.have("torch"):
    pytest.skip("missing: torch", allow_module_level=True)

INDEX = "model.safetensors.index.json"


@pytest.fixture(autouse=True)
def surroundings(tmp_path: Path, mx: Mx, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith(("MX_", "AWS_", "HF_"))]:
        monkeypatch.delenv(name)
    for name, value in clean_env(mx.home, mx.cache).items():
        monkeypatch.setenv(name, value)


def load(model: str, **options: Any) -> dict[str, Any]:
    return mx_cli.load(model, fill_cache=True, **options)


def stream(model: str, **options: Any) -> dict[str, Any]:
    return dict(mx_cli.stream(model, fill_cache=True, memory="64MiB", **options))


@pytest.fixture(params=[load, stream], ids=["load", "stream"])
def way(request: pytest.FixtureRequest) -> Callable[..., dict[str, Any]]:
    return request.param  # type: ignore[no-any-return]


@pytest.fixture
def stored(
    tmp_path: Path, s3stub: Callable[..., S3Stub], monkeypatch: pytest.MonkeyPatch
) -> tuple[S3Stub, str, dict[str, Any]]:
    whole = tp.write(tmp_path / "model")
    store = s3stub()
    store.put_tree("model", tmp_path / "model")
    for name, value in store.env.items():
        monkeypatch.setenv(name, value)
    return store, store.uri("model"), whole


def size_of(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.iterdir())


def test_one_pass_gives_both(
    way: Callable[..., dict[str, Any]], stored: tuple[S3Stub, str, dict[str, Any]], mx: Mx, tmp_path: Path
) -> None:
    store, model, whole = stored
    assert not tp.differing(way(model), whole)
    # The index is read before it is fetched; nothing else comes twice, no header either.
    assert store.bytes_served("model/") == size_of(tmp_path / "model") + (tmp_path / "model" / INDEX).stat().st_size
    store.reset()
    said = mx("prefetch", model, "--json", env=store.env).ok().json()
    assert (said["role"], said["bytes_fetched"]) == ("hit", 0)
    assert store.bytes_served("model/") == 0
    mx("cache", "verify").ok()
    assert {path.name for path in Path(said["dir"]).iterdir()} == {path.name for path in (tmp_path / "model").iterdir()}
    # What is there is read there.
    assert not tp.differing(way(model), whole)
    assert store.bytes_served("model/") == 0


def test_a_part_of_it_fills_all(stored: tuple[S3Stub, str, dict[str, Any]], mx: Mx) -> None:
    store, model, whole = stored
    assert not tp.differing(load(model, rank="1/2"), tp.shares(whole, 1, 2))
    names = ["model.norm.weight"]
    assert not tp.differing(load(model, names=names), {name: whole[name] for name in names})
    assert mx("prefetch", model, "--json", env=store.env).ok().json()["bytes_fetched"] == 0


READER = """
import sys, mx_cli
found = mx_cli.load(sys.argv[1], fill_cache=True)
print(len(found))
"""


def test_two_at_once_are_one_download(stored: tuple[S3Stub, str, dict[str, Any]], tmp_path: Path) -> None:
    store, model, whole = stored
    readers = [
        subprocess.Popen([sys.executable, "-c", READER, model], stdout=subprocess.PIPE, text=True, env={**os.environ})
        for _ in range(3)
    ]
    assert [reader.communicate(timeout=60)[0].strip() for reader in readers] == [str(len(whole))] * 3
    once = size_of(tmp_path / "model")
    assert once <= store.bytes_served("model/") <= once + 3 * (tmp_path / "model" / INDEX).stat().st_size


def test_tensors_come_while_the_rest_is_fetched(mx: Mx) -> None:
    """And a consumer that stops there leaves what was fetched for the next one."""
    with big_file(40, 4 * MIB) as server:
        found = mx_cli.stream(server.url, fill_cache=True, memory="64MiB", max_bandwidth="40MiB")
        name, tensor = next(found)
        assert name == name_of(0)
        assert not tensor.any()
        assert server.sent < server.length
        assert not list(mx.cache.glob("models/*/manifests/*/*.json"))
        found.close()  # type: ignore[attr-defined]
        sent = server.sent
        assert sent < server.length
        for index, (name, tensor) in enumerate(mx_cli.stream(server.url, fill_cache=True, memory="64MiB")):
            assert (name, bool((tensor == index % 256).all())) == (name_of(index), True)
        assert index == 39


def test_an_origin_that_goes_away(
    way: Callable[..., dict[str, Any]], hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tp.write(tmp_path / "model")
    hub.commit(tmp_path / "model")
    for name, value in hub.env.items():
        monkeypatch.setenv(name, value)
    hub.flags("failrange=503:100000")
    with pytest.raises(Unreachable):
        way(hub.uri, retry_for="200ms", range_size="1MiB")
    hub.reset()
    assert not tp.differing(way(hub.uri), tp.tensors())


def test_wrong_bytes_are_an_error(
    way: Callable[..., dict[str, Any]], hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mx: Mx
) -> None:
    tp.write(tmp_path / "model")
    hub.commit(tmp_path / "model")
    for name, value in hub.env.items():
        monkeypatch.setenv(name, value)
    hub.flags("rot=0")
    with pytest.raises(IntegrityError):
        way(hub.uri)
    assert not list(mx.cache.glob("models/*/manifests/*/*.json"))


def test_what_changes_under_way_is_not_mixed(
    way: Callable[..., dict[str, Any]],
    s3stub: Callable[..., S3Stub],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    mx: Mx,
) -> None:
    """Either all of the new bytes, or an error; never some of both."""
    tp.write(tmp_path / "model")
    store = s3stub(mutate="00002-of:1")
    store.put_tree("model", tmp_path / "model")
    for name, value in store.env.items():
        monkeypatch.setenv(name, value)
    try:
        found = way(store.uri("model"), range_size="1MiB")
    except IntegrityError:
        return
    there = mx("prefetch", store.uri("model"), "--json", env=store.env).ok().json()["dir"]
    assert not tp.differing(found, mx_cli.load(there))


def test_what_another_process_finishes_is_read_as_it_published_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A leader that is deposed leaves a file half done, and follows: who waits for the rest gets it from the snapshot."""
    (tmp_path / "staged").write_bytes(b"s" * 10)
    (tmp_path / "a").write_bytes(b"p" * 1000)
    entry, read = Entry("a", 1000), threading.Event()

    def deposed(request: Any, context: Any, landing: Any) -> Any:
        landing.begins(Listing("s3://weights/model", "1", (entry,)))
        with open(tmp_path / "staged", "rb") as staged:
            landing.opened(entry, tmp_path / "staged", staged.fileno(), [(0, 10)])
        assert read.wait(60)
        return SimpleNamespace(directory=tmp_path)

    monkeypatch.setattr(fill_cache, "prefetch", deposed)
    with fill_cache.Fill("s3://weights/model", None, process_context({})) as fill:
        stream, view = fill.open(ReadItem(entry, 0, 1000)), memoryview(bytearray(1000))
        closing = threading.Timer(60, stream.close)
        closing.start()
        assert stream.read_into(view) == 10
        read.set()
        assert stream.read_into(view[10:]) == 990
        closing.cancel()
        assert bytes(view[10:]) == b"p" * 990
        # The first ten were nobody's to verify.
        assert fill.torn


def test_what_is_here_fills_nothing(tmp_path: Path) -> None:
    tp.write(tmp_path / "model")
    for way in (load, stream):
        with pytest.raises(UsageError, match="on this machine"):
            way(str(tmp_path / "model"))
    with pytest.raises(UsageError, match="fill_cache"):
        load("s3://weights/model", group=object())
