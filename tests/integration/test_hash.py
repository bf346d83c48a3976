"""The hash flow on real files: what counts, what is remembered, how bad input ends (H-07 to H-14)."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from mx_cli.base.cancel import Stop
from mx_cli.base.errors import FilesystemRefused, IntegrityError, Interrupted, MxError, NotFound, UsageError
from mx_cli.flows.digest_memory import KEPT, DigestMemory
from mx_cli.flows.hash import HashResult, compare, hash_model, is_local, read_record, saved_record
from mx_cli.model.digest import TensorDigest
from mx_cli.model.layout import layout
from tests.rig import torture

CONFIG = {"model_type": "llama", "hidden_size": 8, "torch_dtype": "bfloat16"}
ROOT = Path(__file__).parents[2]
INDEX = "model.safetensors.index.json"


def weights(tensors: dict[str, bytes]) -> bytes:
    table, at = {}, 0
    for name, data in tensors.items():
        table[name] = torture.entry("U8", [len(data)], at, at + len(data))
        at += len(data)
    return torture.st(table, b"".join(tensors.values()))


TENSORS = {"a": b"1" * 100, "b": os.urandom(9 << 20), "c": b""}


def make(folder: Path, tensors: dict[str, bytes] = TENSORS, config: Any = CONFIG) -> Path:
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(weights(tensors))
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    return folder


def make_sharded(folder: Path) -> Path:
    folder.mkdir(parents=True)
    names = list(TENSORS)
    shards = {"model-00001-of-00002.safetensors": names[1:], "model-00002-of-00002.safetensors": names[:1]}
    for shard, held in shards.items():
        (folder / shard).write_bytes(weights({name: TENSORS[name] for name in held}))
    weight_map = {name: shard for shard, held in shards.items() for name in held}
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (folder / "config.json").write_text(json.dumps(CONFIG, indent=2))
    return folder


def content(path: Path | str, **options: Any) -> str:
    return hash_model(str(path), **options).choose("content").id


def test_H09_path_links_and_shards_do_not_count(tmp_path: Path) -> None:
    plain = make(tmp_path / "data1" / "m")
    copy = shutil.copytree(plain, tmp_path / "data2")
    (tmp_path / "link").symlink_to(plain)
    blobs = tmp_path / "hub" / "blobs"
    blobs.mkdir(parents=True)
    snapshot = tmp_path / "hub" / "snapshots" / "0123abc"
    snapshot.mkdir(parents=True)
    for name in ("config.json", "model.safetensors"):
        shutil.copy(plain / name, blobs / f"blob-{name}")
        (snapshot / name).symlink_to(f"../../blobs/blob-{name}")
    sharded = make_sharded(tmp_path / "sharded")
    ids = {content(path) for path in (plain, f"{plain}/", copy, tmp_path / "link", snapshot, sharded)}
    assert len(ids) == 1
    (plain / "README.md").write_text("more")
    (plain / "original").mkdir()
    (plain / "original" / "model.safetensors").write_bytes(weights({"z": b"1"}))
    assert content(plain) in ids


def test_H07_same_config_other_weights(tmp_path: Path) -> None:
    base = make(tmp_path / "base")
    tuned = make(tmp_path / "tuned", TENSORS | {"b": TENSORS["b"][:-1] + b"!"})
    left, right = hash_model(str(base)), hash_model(str(tuned))
    assert left.choose().kind == "content"
    assert left.choose().id != right.choose().id
    assert left.choose("config").id == right.choose("config").id
    found = compare(left, right)
    assert not found.equal
    assert [field for field, _, _ in found.differences] == ["weights.table", "tensors.b.blocks[2]"]
    only = hash_model(str(base), content=False)
    assert only.choose().id.startswith("mx1x-")
    assert only.to_json()["config_only"] is True


def test_H12_the_differing_field_is_named(tmp_path: Path) -> None:
    one = make(tmp_path / "one", config={**CONFIG, "text_config": {"x": [1, 2]}})
    two = make(tmp_path / "two", config={**CONFIG, "text_config": {"x": [1, 3]}})
    record = tmp_path / "saved.json"
    record.write_text(json.dumps(hash_model(str(one)).to_json()))
    saved = saved_record(str(record))
    assert saved is not None
    for left in (saved, hash_model(str(one))):
        assert compare(left, hash_model(str(two))).differences == (("config.text_config.x[1]", 2, 3),)
        assert compare(left, hash_model(str(one))).equal
    assert saved_record(str(one / "config.json")) is None
    assert saved_record(str(one)) is None
    tampered = json.loads(record.read_text())
    tampered["identities"][0]["weights"]["table"] = "0" * 64
    with pytest.raises(UsageError, match="damaged record"):
        read_record(json.dumps(tampered).encode(), "saved.json")


def test_kinds_that_cannot_be_compared(tmp_path: Path) -> None:
    origin = hash_model("hf://a/b", resolve_origin=lambda uri, revision: (uri, "1" * 40))
    found = compare(hash_model(str(make(tmp_path / "m"))), origin)
    assert found.kind is None
    assert found.to_json()["comparable"] is False


def test_H14_without_config(tmp_path: Path) -> None:
    single = make(tmp_path / "single", config=None)
    assert content(single) == content(single / "model.safetensors")
    assert [known.kind for known in hash_model(str(single)).identities] == ["content"]
    gguf = tmp_path / "gguf"
    gguf.mkdir()
    (gguf / "model.gguf").write_bytes(b"GGUF" + TENSORS["b"])
    assert content(gguf) == content(gguf / "model.gguf")
    assert content(gguf) != content(single)


@contextmanager
def unprivileged() -> Iterator[None]:
    user = os.geteuid()
    if user == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(user)


def _bad_inputs(top: Path) -> dict[str, tuple[Path, type[MxError], str]]:
    for name in (
        "empty-dir",
        "no-config",
        "list",
        "index-only",
        "fifo-dir",
        "truncated",
        "dangling",
        "hub/models--a--b",
    ):
        (top / name).mkdir(parents=True)
    (top / "no-config" / "notes.txt").write_text("x")
    (top / "empty.json").write_bytes(b"")
    (top / "empty.safetensors").write_bytes(b"")
    (top / "list" / "config.json").write_text("[]")
    (top / "notes.txt").write_text("x")
    os.mkfifo(top / "fifo")
    os.mkfifo(top / "fifo-dir" / "config.json")
    (top / "loop").symlink_to("loop")
    (top / "index-only" / INDEX).write_text(json.dumps({"weight_map": {"a": "model-1.safetensors"}}))
    (top / "index-only" / "config.json").write_text("{}")
    (top / "truncated" / "model.safetensors").write_bytes(weights(TENSORS)[:-1])
    (top / "dangling" / "model.safetensors").symlink_to("/nonexistent/blob")
    snapshots = top / "hub" / "models--a--b" / "snapshots"
    snapshots.joinpath("0123").mkdir(parents=True)
    snapshots.parent.joinpath("refs").mkdir()
    return {
        "missing": (top / "missing", NotFound, "no such file"),
        "below-a-file": (top / "notes.txt" / "x", NotFound, "no such file"),
        "empty-dir": (top / "empty-dir", NotFound, "no config.json and no weights"),
        "no-config": (top / "no-config", NotFound, "no config.json and no weights"),
        "empty-config": (top / "empty.json", UsageError, "empty file"),
        "empty-weights": (top / "empty.safetensors", IntegrityError, "empty file"),
        "list": (top / "list", UsageError, "expected a JSON object"),
        "text": (top / "notes.txt", UsageError, "neither weights nor a config"),
        "fifo": (top / "fifo", UsageError, "not a file or a directory"),
        "fifo-config": (top / "fifo-dir", UsageError, "not a regular file"),
        "loop": (top / "loop", UsageError, "in a circle"),
        "index-only": (top / "index-only", NotFound, "an index without its shards"),
        "index": (top / "index-only" / INDEX, UsageError, "a shard index"),
        "truncated": (top / "truncated", IntegrityError, "truncated"),
        "dangling": (top / "dangling", NotFound, "a link to nothing"),
        "hub-model": (top / "hub" / "models--a--b", UsageError, "several revisions"),
        "hub-root": (top / "hub", UsageError, "a cache of models"),
        "long": (top / ("x" * 300), UsageError, "too long"),
        "nul": (Path(f"{top}/a\0b"), UsageError, "not a path"),
    }


def test_H13_H14_bad_input_ends_cleanly(tmp_path: Path) -> None:
    for name, (path, error, said) in _bad_inputs(tmp_path).items():
        with pytest.raises(error, match=said) as caught:
            hash_model(str(path))
        assert type(caught.value) is error, name
        assert caught.value.hint or error is IntegrityError or name in ("empty-config", "list", "nul"), name


def test_H13_unreadable(tmp_path: Path) -> None:
    folder = make(tmp_path / "m")
    (folder / "model.safetensors").chmod(0)
    with unprivileged(), pytest.raises(FilesystemRefused):
        hash_model(str(folder))


def test_P31_shard_missing_and_index_pointing_elsewhere(tmp_path: Path) -> None:
    folder = make_sharded(tmp_path / "m")
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"]["a"] = "model-00001-of-00002.safetensors"
    (folder / INDEX).write_text(json.dumps(index))
    with pytest.raises(IntegrityError, match=r"'a' is not in model-00001-of-00002\.safetensors"):
        hash_model(str(folder))
    (folder / "model-00001-of-00002.safetensors").unlink()
    with pytest.raises(IntegrityError, match=r"model-00001-of-00002\.safetensors"):
        hash_model(str(folder))


def test_T03_all_76_odd_files(tmp_path: Path) -> None:
    written = torture.write(tmp_path)
    assert len(written) == 76
    for name, (path, verdict) in written.items():
        if verdict == "reject":
            expected = NotFound if name[:3] in ("m39", "m40") else IntegrityError
            with pytest.raises(expected, match=name[:3]):
                hash_model(str(path))
        else:
            assert hash_model(str(path)).choose().kind == "content"
        if path.is_file() and not path.is_symlink():
            path.unlink()


def test_duplicate_tensor_names(tmp_path: Path) -> None:
    folder = make(tmp_path / "m")
    shutil.copy(folder / "model.safetensors", folder / "more.safetensors")
    with pytest.raises(IntegrityError, match=r"'a' in model\.safetensors and more\.safetensors"):
        hash_model(str(folder))


def test_layout_is_part_of_each_kind(tmp_path: Path) -> None:
    folder = make(tmp_path / "m")
    plain, eight = hash_model(str(folder)), hash_model(str(folder), layout=layout(None, {"tp": 8}))
    for kind in ("content", "config"):
        assert plain.choose(kind).id != eight.choose(kind).id
    assert eight.choose().stage == "loaded"


def test_origin_is_asked_for_uris_only(tmp_path: Path) -> None:
    asked: list[tuple[str, str | None]] = []

    def resolve(uri: str, revision: str | None) -> tuple[str, str]:
        asked.append((uri, revision))
        return "s3://b/k", "r" * 64

    found = hash_model("S3://b/k/", revision="r1", resolve_origin=resolve)
    assert asked == [("S3://b/k/", "r1")]
    assert found.choose().id.startswith("mx1o-")
    with pytest.raises(UsageError, match="no content identity"):
        found.choose("content")
    folder = make(tmp_path / "m")
    local = hash_model(str(folder), known_origin=("s3://b/k", "r" * 64))
    assert [known.kind for known in local.identities] == ["content", "origin", "config"]
    assert local.choose("origin").id == found.choose().id
    with pytest.raises(UsageError, match="--revision is for a URI"):
        hash_model(str(folder), revision="main")
    with pytest.raises(NotFound):
        hash_model("org/name")
    with pytest.raises(UsageError, match="unknown kind"):
        hash_model(str(folder), kind="other")
    assert [is_local(name) for name in ("hf://a/b", "org/name", "./x", "/x", "~")] == [False, False, True, True, True]


class _Clock:
    def __init__(self, ahead: float) -> None:
        self.ahead = ahead

    def __call__(self) -> float:
        return time.time() + self.ahead


ROWS = (TensorDigest("a", "U8", (1,), ("0" * 32,)),)


def test_memory_needs_the_same_file(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(b"1")
    memory = DigestMemory(tmp_path / "memory", clock=_Clock(10))
    memory.remember("x.safetensors", path.stat(), ROWS)
    assert memory.recall("x.safetensors", path.stat()) == ROWS
    assert memory.recall("x.bin", path.stat()) is None
    assert DigestMemory(tmp_path / "memory", forgetful=True).recall("x.safetensors", path.stat()) is None
    times = path.stat().st_atime_ns, path.stat().st_mtime_ns
    path.write_bytes(b"2")
    os.utime(path, ns=times)
    assert memory.recall("x.safetensors", path.stat()) is None


def test_memory_is_careful(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(b"1")
    fresh = DigestMemory(tmp_path / "memory")
    fresh.remember("x.gguf", path.stat(), ROWS)
    assert fresh.recall("x.gguf", path.stat()) is None
    memory = DigestMemory(tmp_path / "memory", clock=_Clock(10))
    memory.remember("x.gguf", path.stat(), [TensorDigest("x.gguf", "file", (1,), ("0" * 32,))])
    renamed = memory.recall("sub/y.gguf", path.stat())
    assert renamed is not None
    assert renamed[0].name == "sub/y.gguf"
    entry = next((tmp_path / "memory" / "digests" / str(os.geteuid())).iterdir())
    for damage in (
        b"",
        b"[]",
        b"{}",
        entry.read_bytes()[:-5],
        entry.read_bytes().replace(b'"rows":[[', b'"rows":[[1,'),
    ):
        entry.write_bytes(damage)
        assert memory.recall("x.gguf", path.stat()) is None
    unwritable = DigestMemory(Path("/proc/nowhere"), clock=_Clock(10))
    unwritable.remember("x.gguf", path.stat(), ROWS)
    assert unwritable.recall("x.gguf", path.stat()) is None


def test_memory_forgets_the_oldest(tmp_path: Path) -> None:
    folder = tmp_path / "memory" / "digests" / str(os.geteuid())
    folder.mkdir(parents=True)
    for number in range(KEPT):
        (folder / f"{number}.json").touch()
        os.utime(folder / f"{number}.json", (number, number))
    path = tmp_path / "x"
    path.write_bytes(b"1")
    DigestMemory(tmp_path / "memory", clock=_Clock(10)).remember("x", path.stat(), ROWS)
    left = {entry.name for entry in folder.iterdir()}
    assert len(left) <= KEPT
    assert "0.json" not in left
    assert f"{KEPT - 1}.json" in left


def test_second_run_reads_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_sharded(tmp_path / "m")
    monkeypatch.setattr("mx_cli.flows.digest_memory.SETTLED", -1)
    total = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    options: dict[str, Any] = {"memory": tmp_path / "memory"}
    results: list[HashResult] = [hash_model(str(folder), **options) for _ in range(2)]
    results.append(hash_model(str(folder), verify=True, **options))
    assert [result.bytes_read for result in results] == [total, 0, total]
    assert len({result.choose().id for result in results}) == 1


def test_known_rows_save_reading_unless_verified(tmp_path: Path) -> None:
    folder = make(tmp_path / "m")
    known = {"model.safetensors": hash_model(str(folder / "model.safetensors")).table}
    assert hash_model(str(folder), known_rows=known).bytes_read == 0
    assert hash_model(str(folder), known_rows=known).choose().id == content(folder)
    lie = {"model.safetensors": ROWS}
    assert content(folder, known_rows=lie) != content(folder, known_rows=lie, verify=True) == content(folder)


def test_a_stop_ends_the_reading(tmp_path: Path) -> None:
    folder = make(tmp_path / "m")
    stop = Stop()

    def first_bytes(count: int) -> None:
        stop.request(Interrupted(15))

    with pytest.raises(Interrupted):
        hash_model(str(folder), stop=stop, on_bytes=first_bytes)


def run_python(code: str, path: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code, str(path)]
    return subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT, timeout=60)


def test_memory_use_is_bounded(tmp_path: Path) -> None:
    folder = tmp_path / "m"
    folder.mkdir()
    size = 400 << 20
    with (folder / "model.safetensors").open("wb") as file:
        file.write(torture.st({"a": torture.entry("U8", [size], 0, size)}))
        file.truncate(file.tell() + size)
    # Not ru_maxrss: that one starts with the size of the process that forked.
    code = (
        "import re,sys; from mx_cli.flows.hash import hash_model; hash_model(sys.argv[1]).choose();"
        "print(re.search(r'VmHWM:\\s*(\\d+)', open('/proc/self/status').read())[1])"
    )
    done = run_python(code, folder)
    assert int(done.stdout) < 100_000


def test_identity_of_a_config_starts_quickly(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(CONFIG))
    code = (
        "import sys,time; from mx_cli.flows.hash import hash_model; print(hash_model(sys.argv[1]).choose().id);"
        "heavy={'torch','numpy','nixl','typer','rich','botocore','urllib3','asyncio'} & set(sys.modules);"
        "print(time.process_time(), *heavy)"
    )
    done = run_python(code, config)
    found, spent = done.stdout.splitlines()
    assert found == hash_model(str(config)).choose().id
    assert len(spent.split()) == 1
    assert float(spent) < 0.3
