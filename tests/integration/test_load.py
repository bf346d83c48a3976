"""`mx_cli.load` and `mx_cli.stream`: real files, real servers, their faults, and what it costs."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import logging
import mmap
import os
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

import mx_cli
from mx_cli.base import filesystem
from mx_cli.base.errors import IntegrityError, MxError, NoSpace, NotFound, OriginChanged, Unreachable, UsageError
from mx_cli.flows.from_python import process_context
from mx_cli.flows.hash_anything import hash_anything
from mx_cli.flows.holdings import local_holding
from mx_cli.flows.prefetch import prefetch
from mx_cli.flows.pull_memory import table
from mx_cli.flows.request import Request
from tests.rig import capabilities, limits, torture
from tests.rig.big_file import big_file, name_of
from tests.rig.scripted import Asked, scripted
from tests.rig.scripted_origins import SHA, Repository
from tests.rig.servers import S3, Hub, Nginx, S3Stub
from tests.rig.serving import eventually
from tests.support import Mx, capability, make_checkpoint, make_safetensors, noise

if not capabilities.have("torch"):
    pytest.skip("missing: torch", allow_module_level=True)

import torch

MIB = 1 << 20
MEMORY = 64 * MIB


@pytest.fixture(autouse=True)
def surroundings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No settings of the caller's, and a home of the test's own."""
    for name in [name for name in os.environ if name.startswith(("MX_", "AWS_", "HF_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("MX_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("MX_STALL_TIMEOUT", "3s")


def load(model: str | Path, **options: Any) -> dict[str, Any]:
    return mx_cli.load(str(model), **options)


def stream(model: str | Path, **options: Any) -> dict[str, Any]:
    return dict(mx_cli.stream(str(model), memory=MEMORY, **options))


def streamed_once(model: str | Path, **options: Any) -> dict[str, Any]:
    """What is good only until the next one is asked for, as a copy."""
    return {name: copy_of(tensor) for name, tensor in mx_cli.stream(str(model), memory=MEMORY, owned=False, **options)}


def copy_of(tensor: Any) -> Any:
    """Bit by bit: a clone of bools makes every byte 0 or 1."""
    return (
        tensor.reshape(-1).view(torch.uint8).clone().view(tensor.dtype).view(tensor.shape) if tensor.numel() else tensor
    )


WAYS: tuple[Callable[..., dict[str, Any]], ...] = (load, stream, streamed_once)


@pytest.fixture(params=WAYS, ids=lambda way: way.__name__)
def way(request: pytest.FixtureRequest) -> Callable[..., dict[str, Any]]:
    return request.param  # type: ignore[no-any-return]


def raw(tensor: Any) -> bytes:
    return bytes(tensor.detach().reshape(-1).view(torch.uint8).numpy()) if tensor.numel() else b""


def bytes_of(directory: Path) -> dict[str, bytes]:
    """Every tensor's bytes, as the headers of the files place them."""
    found = {}
    for path in sorted(directory.rglob("*.safetensors")):
        data = path.read_bytes()
        end = 8 + int.from_bytes(data[:8], "little")
        for name, entry in json.loads(data[8:end]).items():
            if name != "__metadata__":
                first, last = entry["data_offsets"]
                found[name] = data[end + first : end + last]
    return found


def assert_same(tensors: dict[str, Any], directory: Path) -> None:
    expected = bytes_of(directory)
    assert tensors.keys() == expected.keys()
    for name, tensor in tensors.items():
        assert raw(tensor) == expected[name], name
        assert tensor.data_ptr() % max(1, tensor.element_size()) == 0


def evict(directory: Path) -> None:
    """Out of the page cache, so that it is read from the disk."""
    for path in directory.rglob("*.safetensors"):
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


# -- where from ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("state", ["cached", "cold"])
def test_directory(way: Callable[..., dict[str, Any]], state: str, tmp_path: Path) -> None:
    directory = tmp_path / "plain"
    make_safetensors(directory / "model.safetensors", {f"t{i}": ("F32", [3, 100_003], None) for i in range(20)})
    if state == "cold":
        evict(directory)
    assert_same(way(directory), directory)
    assert_same(way(directory / "model.safetensors"), directory)


def test_index_and_shards(way: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "m", shards=3, size=3 * MIB)
    assert_same(way(tmp_path / "m"), tmp_path / "m")


def test_paths_and_devices_of_other_libraries(tmp_path: Path) -> None:
    make_safetensors(tmp_path / "model.safetensors", {"w": ("F32", [5], None)})
    device = torch.device("cpu")
    loaded = mx_cli.load(tmp_path, device=device, cache_dir=str(tmp_path / "cache"))
    streamed = dict(mx_cli.stream(tmp_path / "model.safetensors", device=device, cache_dir=str(tmp_path / "cache")))
    assert raw(loaded["w"]) == raw(streamed["w"]) == bytes_of(tmp_path)["w"]


def test_an_index_alone_says_where_the_shards_are_looked_for(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "m", shards=3, size=MIB)
    with pytest.raises(IntegrityError, match=r"shards are missing .*: 3 of 3") as refused:
        mx_cli.load(tmp_path / "m" / "model.safetensors.index.json", cache_dir=str(tmp_path / "cache"))
    assert "give what it is in" in refused.value.hint


def test_some_names_only(way: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    make_safetensors(tmp_path / "model.safetensors", {f"t{i}": ("U8", [70_001], None) for i in range(9)})
    expected = bytes_of(tmp_path)
    found = way(tmp_path, names=["t7", "t2"])
    assert {name: raw(tensor) for name, tensor in found.items()} == {name: expected[name] for name in ("t2", "t7")}
    with pytest.raises(UsageError, match="t9"):
        way(tmp_path, names=["t1", "t9"])


def test_snapshot_is_verified(way: Callable[..., dict[str, Any]], mx: Mx, tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "m", shards=2, size=9 * MIB)
    where = Path(mx("prefetch", f"file://{tmp_path}/m", "--json").ok().json()["dir"])
    assert_same(way(where, cache_dir=mx.cache), tmp_path / "m")
    shard = min(where.glob("*.safetensors")).resolve()
    os.chmod(shard, 0o644)
    with open(shard, "r+b") as file:
        file.seek(-10, os.SEEK_END)
        file.write(b"\xff\xfe\xff")
    with pytest.raises(IntegrityError, match="block"):
        way(where, cache_dir=mx.cache)


def test_mapped_tensors_are_private(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    make_safetensors(path, {"a": ("F32", [100], None), "odd": ("U8", [3], None), "b": ("F32", [100], None)})
    before = path.read_bytes()
    found = load(tmp_path, mapped=True)
    assert_same(found, tmp_path)
    found["a"].zero_()
    assert not found["a"].any()
    assert path.read_bytes() == before
    own = load(tmp_path)
    path.write_bytes(noise("other", len(before)))
    assert raw(own["a"]) in before


@pytest.mark.parametrize("misaligned", [1, 3])
def test_tensors_of_files_with_odd_headers_are_aligned(
    way: Callable[..., dict[str, Any]], tmp_path: Path, misaligned: int
) -> None:
    entries = {"u": torture.entry("U8", [misaligned], 0, misaligned)}
    entries["f"] = torture.entry("F32", [300_000], misaligned, misaligned + 1_200_000)
    data = torture.st(entries, noise("odd", misaligned + 1_200_000))
    (tmp_path / "model.safetensors").write_bytes(data)
    evict(tmp_path)
    assert_same(way(tmp_path), tmp_path)


def test_s3(way: Callable[..., dict[str, Any]], s3: S3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_checkpoint(tmp_path / "m", shards=2, size=9 * MIB)
    s3.put_tree("org/model", tmp_path / "m")
    set_all(monkeypatch, s3.env)
    assert_same(way(s3.uri("org/model/")), tmp_path / "m")


def test_hub_redirects(
    way: Callable[..., dict[str, Any]], hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_checkpoint(tmp_path / "m", shards=2, size=9 * MIB)
    hub.commit(tmp_path / "m")
    hub.flags("links=60")
    set_all(monkeypatch, hub.env)
    assert_same(way(hub.uri), tmp_path / "m")


def test_only_wanted_bytes_travel(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_safetensors(tmp_path / "m" / "model.safetensors", {f"t{i}": ("U8", [4 * MIB], None) for i in range(6)})
    hub.commit(tmp_path / "m")
    set_all(monkeypatch, hub.env)
    assert load(hub.uri, names=["t3"])["t3"].numel() == 4 * MIB
    assert hub.bytes_served("model.safetensors") <= 4 * MIB + MIB


def set_all(patch: pytest.MonkeyPatch, values: dict[str, str]) -> None:
    for name, value in values.items():
        patch.setenv(name, value)


# -- faults of origins -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("flags", ["cutonce=3000000", "cutat=9000000", "fail=503:3"])
def test_faults_that_pass(
    way: Callable[..., dict[str, Any]], flags: str, hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_safetensors(tmp_path / "m" / "model.safetensors", {f"t{i}": ("F32", [1_500_001], None) for i in range(3)})
    hub.commit(tmp_path / "m")
    set_all(monkeypatch, hub.env)
    hub.flags(flags)
    assert_same(way(hub.uri, retry_for=30.0), tmp_path / "m")


@pytest.mark.parametrize("refusal", [200, 400, 501])
def test_an_origin_without_ranges(
    way: Callable[..., dict[str, Any]], refusal: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A header is read from the beginning of the whole file, and tensors come with all of it: too much for a stream."""
    make_safetensors(tmp_path / "m" / "model.safetensors", {"a": ("F32", [1_500_001], None), "b": ("U8", [7], None)})
    files = {"model.safetensors": (tmp_path / "m" / "model.safetensors").read_bytes()}

    def hook(asked: Asked) -> bool:
        if "/resolve/" not in asked.path or not asked.headers.get("Range"):
            return False
        whole = refusal == 200
        asked.say(refusal, files["model.safetensors"] if whole else b"", {"X-Repo-Commit": SHA} if whole else None)
        return True

    with scripted(Repository(files, hook=hook)) as server:
        set_all(monkeypatch, {"HF_ENDPOINT": server.url})
        if way is load:
            assert_same(way("hf://org/model", retry_for=30.0), tmp_path / "m")
        else:
            with pytest.raises(IntegrityError, match="serves no ranges"):
                way("hf://org/model", retry_for=30.0)


def test_a_log_says_what_is_tried_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with socket.create_server(("127.0.0.1", 0)) as nobody:
        port = nobody.getsockname()[1]
    with caplog.at_level(logging.WARNING, "mx"), pytest.raises(Unreachable):
        load(f"http://127.0.0.1:{port}/m/", retry_for=1.0)
    assert re.search(r"retry 1 of .* in \d\.\d s: .*cannot connect", caplog.text)


def test_an_origin_that_stays_away(
    way: Callable[..., dict[str, Any]], hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_safetensors(tmp_path / "m" / "model.safetensors", {"t": ("F32", [3_000_000], None)})
    hub.commit(tmp_path / "m")
    hub.flags("failget=503:1000000")
    set_all(monkeypatch, hub.env)
    with pytest.raises(Unreachable, match=r"model\.safetensors"):
        way(hub.uri, retry_for=0.5)


def test_a_file_that_changes_under_way(tmp_path: Path) -> None:
    make_safetensors(tmp_path / "model.safetensors", {f"t{i:02}": ("U8", [5 * MIB], None) for i in range(12)})
    found = mx_cli.stream(str(tmp_path), memory=MEMORY)
    next(found)
    with open(tmp_path / "model.safetensors", "r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"x")
    with pytest.raises(OriginChanged, match=r"model\.safetensors"):
        list(found)


def test_an_object_that_changes_under_way(
    s3stub: Callable[..., S3Stub], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_safetensors(tmp_path / "model.safetensors", {f"t{i:02}": ("U8", [5 * MIB], None) for i in range(12)})
    store = s3stub()
    data = (tmp_path / "model.safetensors").read_bytes()
    store.put("m/model.safetensors", data)
    set_all(monkeypatch, store.env)
    found = mx_cli.stream(store.uri("m/"), memory=MEMORY)
    next(found)
    store.put("m/model.safetensors", data[:-1] + b"x")
    with pytest.raises(OriginChanged):
        list(found)


# -- memory and order ------------------------------------------------------------------------------------------------


CONSUMER = """
import sys, mx_cli
for at, (name, tensor) in enumerate(mx_cli.stream(sys.argv[1], memory=int(sys.argv[2]))):
    assert bool((tensor == at % 256).all()), name
    print(name, flush=True)
    sys.stdin.readline()
"""


@capability("memory-cgroup")
def test_T01_a_slow_consumer_holds_up_the_server(tmp_path: Path) -> None:
    size, count = 8 * MIB, 128
    with big_file(count, size) as server, limits.memory(256 * MIB) as prefix:
        command = [*prefix, sys.executable, "-c", CONSUMER, server.url, str(MEMORY)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
            assert child.stdin is not None
            assert child.stdout is not None
            for at in range(count):
                assert child.stdout.readline().strip() == name_of(at)
                server.consumed = at * size
                if at in (0, 40):
                    # It goes on to read ahead, until its memory is full: `ahead` remembers the most there ever was.
                    eventually(lambda: server.sent >= server.consumed + 2 * size)
                child.stdin.write("\n")
                child.stdin.flush()
            assert child.wait(60) == 0
        assert server.ahead <= MEMORY + MIB
        assert server.sent <= server.length + MIB


def test_an_abandoned_stream_ends_its_thread_and_connections() -> None:
    before = set(threading.enumerate())
    with big_file(64, 4 * MIB) as server:
        found = mx_cli.stream(server.url, memory=MEMORY)
        next(found)
        assert [thread.name for thread in threading.enumerate() if thread.name == "stream"]
        found.close()  # type: ignore[attr-defined]
        eventually(lambda: not [t for t in threading.enumerate() if t.name == "stream" and t not in before])
        eventually(lambda: server.open == 0)
        assert server.sent < server.length


FORKED = """
import os, sys, mx_cli
from mx_cli.base.errors import UsageError
found = mx_cli.stream(sys.argv[1], memory=64 << 20, max_connections=2)
first = next(found)[0]
child = os.fork()
if child == 0:
    if sys.argv[2] == "use":
        try:
            next(found)
        except UsageError as error:
            os._exit(7 if "forked" in error.what else 1)
    else:
        found.close()
        os._exit(7)
    os._exit(2)
ended = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
print(ended, len({first, *(name for name, _ in found)}))
"""


@pytest.mark.parametrize("what", ["use", "close"])
def test_a_stream_is_that_of_one_process(what: str) -> None:
    """A fork has no thread that reads, and shares the connections of the process that has one."""
    with big_file(24, 4 * MIB) as server:
        done = subprocess.run(
            [sys.executable, "-c", FORKED, server.url, what], capture_output=True, text=True, timeout=60, check=False
        )
        assert done.stdout.split() == ["7", "24"], done.stderr
        assert server.sent <= server.length + MIB


FEW_THREADS = """
import re, sys, threading, mx_cli
from mx_cli.base.errors import MxError
model, refused = sys.argv[1:]
begin, one = threading.Thread.start, threading.RLock()
def start(thread):
    with one:
        # What the system says when a thread's stack cannot be had: no address space is that large.
        threading.stack_size((1 << 46) if re.match(refused, thread.name) else 0)
        begin(thread)
threading.Thread.start = start
for way in (lambda: len(mx_cli.load(model)), lambda: sum(1 for _ in mx_cli.stream(model))):
    try:
        print(way())
    except MxError as error:
        print("cannot be started" in error.what)
"""


def test_fewer_threads_than_there_is_work_for(tmp_path: Path) -> None:
    """One is enough of each kind; where there is none, that is said."""
    make_checkpoint(tmp_path / "model", shards=8, size=64 * MIB)

    def run(refused: str) -> list[str]:
        command = [sys.executable, "-c", FEW_THREADS, str(tmp_path / "model"), refused]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()

    assert run("side") == ["True", "True"]
    assert run("read") == ["True", "True"]
    assert run("stream") == ["16", "True"]
    assert run("(side|read)-[2-9]") == ["16", "16"]


def test_no_weights_is_not_nothing(way: Callable[..., dict[str, Any]], mx: Mx, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "model" / "model.safetensors.part").write_bytes(b"half")
    with pytest.raises(NotFound, match="no weights"):
        way(tmp_path / "model")
    snapshot = mx("prefetch", str(tmp_path / "model")).ok().out.strip()
    with pytest.raises(NotFound, match="no weights"):
        way(snapshot, cache_dir=str(mx.cache))


def test_rules_that_are_hostile(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "model")
    (tmp_path / "rules.json").write_bytes(b"[" * 100_000)
    with pytest.raises(UsageError, match=r"rules\.json: offset 128, .*nested deeper"):
        load(tmp_path / "model", rank="0/2", rules=tmp_path / "rules.json")


def test_too_few_open_files_have_a_way_out(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "model", shards=40)
    code = (
        "import resource, sys, mx_cli; resource.setrlimit(resource.RLIMIT_NOFILE, (32, 32)); mx_cli.load(sys.argv[1])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "model")], capture_output=True, text=True, timeout=60, check=False
    )
    assert "Too many open files" in done.stderr
    assert "hint: more open files: ulimit -n" in done.stderr


def test_too_little_memory_is_said(tmp_path: Path) -> None:
    make_safetensors(tmp_path / "model.safetensors", {"large": ("U8", [40 * MIB], None)})
    with pytest.raises(NoSpace, match="needs"):
        next(mx_cli.stream(str(tmp_path), memory="50MiB"))


def test_owned_tensors_outlive_the_stream(tmp_path: Path) -> None:
    make_safetensors(tmp_path / "model.safetensors", {f"t{i:02}": ("U8", [5 * MIB + i], None) for i in range(8)})
    kept = dict(itertools.islice(mx_cli.stream(str(tmp_path), memory=MEMORY), 5))
    expected = bytes_of(tmp_path)
    for name, tensor in kept.items():
        assert raw(tensor) == expected[name]
        tensor.zero_()
    assert_same(stream(tmp_path), tmp_path)


# -- the disk --------------------------------------------------------------------------------------------------------


READER = """
import hashlib, json, logging, sys, mx_cli, torch
said = []
class Keep(logging.Handler):
    def emit(self, record): said.append(record.getMessage())
log = logging.getLogger("mx"); log.setLevel(logging.INFO); log.addHandler(Keep())
def sums(found): return {n: hashlib.sha256(t.numpy().tobytes()).hexdigest() for n, t in found}
loaded = sums(mx_cli.load(sys.argv[1]).items())
first, said[:] = [text for text in said if "O_DIRECT" in text], []
print(json.dumps({"said": first, "loaded": loaded, "streamed": sums(mx_cli.stream(sys.argv[1], memory=64 << 20))}))
"""


@pytest.mark.parametrize(("after", "error"), [(0, "EINVAL"), (3, "EOPNOTSUPP"), (1, "EIO")])
def test_T02_direct_reads_that_are_refused_late(
    after: int, error: str, fault_env: Callable[..., dict[str, str]], tmp_path: Path
) -> None:
    directory = tmp_path / "model"
    for shard in range(2):
        make_safetensors(directory / f"model-{shard}.safetensors", {f"s{shard}": ("U8", [17 * MIB + 1], None)})
    evict(directory)
    need_disk(directory / "model-0.safetensors")
    env = {**os.environ, **fault_env(directory, DIRECT=error, DIRECT_AFTER=after)}
    done = subprocess.run(
        [sys.executable, "-c", READER, directory], env=env, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert len(found["said"]) == 1
    assert "through the page cache" in found["said"][0]
    expected = {name: hashlib.sha256(data).hexdigest() for name, data in bytes_of(directory).items()}
    assert found["loaded"] == found["streamed"] == expected


@pytest.mark.parametrize(("times", "after"), [(1, 0), (2, 3), (3, 6)])
def test_reads_that_fail_for_a_while_are_read_again(
    times: int, after: int, fault_env: Callable[..., dict[str, str]], tmp_path: Path
) -> None:
    """A mount that comes back: the same policy for opening, for headers and for weights."""
    directory = tmp_path / "model"
    make_safetensors(directory / "model.safetensors", {f"t{i}": ("U8", [5 * MIB], None) for i in range(4)})
    env = {**os.environ, **fault_env(directory, READ="EIO", READ_TIMES=times, READ_AFTER=after)}
    done = subprocess.run(
        [sys.executable, "-c", READER, directory], env=env, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    expected = {name: hashlib.sha256(data).hexdigest() for name, data in bytes_of(directory).items()}
    assert found["loaded"] == found["streamed"] == expected


def test_reads_that_go_on_failing_end_with_what_the_disk_said(
    fault_env: Callable[..., dict[str, str]], tmp_path: Path
) -> None:
    directory = tmp_path / "model"
    make_safetensors(directory / "model.safetensors", {"t": ("U8", [5 * MIB], None)})
    env = {**os.environ, **fault_env(directory, READ="EIO", READ_AFTER=2), "MX_RETRY_FOR": "1s"}
    done = subprocess.run(
        [sys.executable, "-c", READER, directory], env=env, capture_output=True, text=True, timeout=60
    )
    assert "Unreachable" in done.stderr
    assert f"{directory}/model.safetensors: Input/output error (gave up after" in done.stderr


def need_disk(path: Path) -> None:
    with open(path, "rb") as file:
        if filesystem.kind(file.fileno()) in filesystem.IN_MEMORY:
            pytest.skip("missing: disk")


def test_T02_tmpfs(way: Callable[..., dict[str, Any]], tmpfs: Callable[..., Path]) -> None:
    place = tmpfs("64m")
    make_safetensors(place / "model.safetensors", {f"t{i}": ("U8", [3 * MIB + 1], None) for i in range(4)})
    assert_same(way(place), place)


def test_residency_is_what_the_kernel_says(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(noise("resident", 4 * MIB))
    need_disk(path)
    with open(path, "rb") as file:
        fd = file.fileno()
        os.fsync(fd)
        assert filesystem.cached(fd, 0, 4 * MIB) == 4 * MIB
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        assert filesystem.cached(fd, 0, 4 * MIB) == 0
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
        os.pread(fd, mmap.PAGESIZE, MIB)
        for ask in (filesystem.cached, filesystem._mincore):
            assert ask(fd, MIB, MIB) >= mmap.PAGESIZE
            assert ask(fd, 2 * MIB, MIB) == 0


# -- odd and broken files --------------------------------------------------------------------------------------------


def verdict(way: Callable[..., dict[str, Any]], model: str | Path, **options: Any) -> str:
    """`loads`, or how it was refused. Anything that is no refusal is a bug, and ends the test."""
    try:
        found = way(model, **options)
    except MxError as error:
        return f"{type(error).__name__}: {error.what}"
    for tensor in found.values():
        raw(tensor)
    return "loads"


def check_verdict(name: str, expected: str, observed: str) -> None:
    if expected != "reject":
        assert observed == "loads", name
        return
    # Of a directory a web server says that nobody may see it.
    assert observed.startswith(("IntegrityError", "NotFound", "AccessDenied")), (name, observed)
    assert name[:3] in observed
    if name.startswith("m06"):
        assert "git-lfs pointer, not weights (real size 4.7 GiB)" in observed


def test_T03_the_76_files_from_disk(tmp_path: Path) -> None:
    written = torture.write(tmp_path)
    assert len(written) == 76
    for name, (path, expected) in written.items():
        said = verdict(load, path)
        check_verdict(name, expected, said)
        if expected == "reject":
            assert verdict(stream, path) == said
            continue
        check_bytes(stream(path), path)
        if path.stat().st_size < MIB:
            check_bytes(load(path), path)
            check_bytes(load(path, mapped=True), path)
            check_bytes(streamed_once(path), path)


def check_bytes(found: dict[str, Any], path: Path) -> None:
    data = path.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    table = json.loads(data[8:end])
    table.pop("__metadata__", None)
    assert found.keys() == table.keys()
    for name in table if len(table) < 1000 else ("l.0", "l.99999"):
        first, last = table[name]["data_offsets"]
        assert raw(found[name]) == data[end + first : end + last]


def test_T03_the_76_files_over_http(nginx: Nginx, tmp_path: Path) -> None:
    written = torture.write(nginx.root)
    try:
        for name, (path, expected) in written.items():
            url = f"{nginx.url}/{path.name}"
            check_verdict(name, expected, verdict(stream, url, retry_for=0.2))
            if expected != "reject":
                check_bytes(load(url), path)
    finally:
        for path, _ in written.values():
            if path.is_file() or path.is_symlink():
                path.unlink()
            else:
                path.rmdir()


def test_T03_a_peer_refuses_what_the_disk_does(tmp_path: Path) -> None:
    """In the same words, before it offers anything."""
    (tmp_path / "files").mkdir()
    context = process_context({})
    for number, (name, (path, expected)) in enumerate(torture.write(tmp_path / "files").items()):
        if expected == "reject":
            directory = tmp_path / f"model-{number}"
            directory.mkdir()
            (directory / "config.json").write_text("{}")
            path.rename(directory / path.name)
            said = verdict(load, directory)
            # A directory is none of the files, whatever its name.
            assert (f"{directory}: no weights" if name[:3] == "m39" else f"{path.name}: ") in said
            assert verdict(lambda model: table(local_holding(Path(model), context)), directory) == said


def two_shards(top: Path, index: str, shards: Mapping[str, str]) -> Path:
    """A directory of files `shards`, each with the tensor of that name, and an index that says the same."""
    for shard, name in shards.items():
        make_safetensors(top / shard, {name: ("F32", (4,), None)})
    (top / "config.json").write_text("{}")
    (top / index).write_text(json.dumps({"weight_map": {name: shard for shard, name in shards.items()}}))
    return top


def swap(top: Path) -> Path:
    one, other = sorted(top.glob("*.safetensors"))
    kept = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(kept)
    return top


def give_one_twice(top: Path) -> Path:
    (top / INDEX).unlink()
    one, other = sorted(top.glob("*.safetensors"))
    other.write_bytes(one.read_bytes())
    return top


def hide_in_a_cache(top: Path) -> Path:
    root = top.parent / "models--a--b"
    (root / "refs").mkdir(parents=True)
    (root / "snapshots").mkdir()
    top.rename(root / "snapshots" / "abc")
    return root


INDEX = "model.safetensors.index.json"


@pytest.mark.parametrize("change", [swap, give_one_twice, hide_in_a_cache])
def test_what_is_no_checkpoint_is_refused_alike_whoever_reads_it(
    change: Callable[[Path], Path], tmp_path: Path
) -> None:
    """By `mx hash`, by a load, and by a peer before it offers anything."""
    names = {"model-00001-of-00002.safetensors": "a", "model-00002-of-00002.safetensors": "b"}
    model, context = change(two_shards(tmp_path / "m", INDEX, names)), process_context({})
    said = set()
    for way in (lambda: hash_anything(str(model), context), lambda: load(model), lambda: local_holding(model, context)):
        with pytest.raises(MxError) as caught:
            way()
        said.add((type(caught.value), caught.value.what))
    assert len(said) == 1


def test_shards_that_are_no_safetensors_have_one_identity(tmp_path: Path) -> None:
    """Their index names tensors that only their own library finds: of a directory, of its snapshot, and as a peer says it."""
    names = {"pytorch_model-00001-of-00002.bin": "a", "pytorch_model-00002-of-00002.bin": "b"}
    model, context = two_shards(tmp_path / "m", "pytorch_model.bin.index.json", names), process_context({})
    for path in model.glob("*.bin"):
        path.write_bytes(b"PK\3\4" + noise(path.name, 1000))
    content = hash_anything(str(model), context).choose("content").id
    snapshot = prefetch(Request(f"file://{model}"), context)
    assert snapshot.identity["content"] == content
    for path in (model, snapshot.directory):
        assert content in {one.id for one in local_holding(path, context).identities}


def test_a_part_of_a_snapshot_has_the_files_beside_it(mx: Mx, tmp_path: Path) -> None:
    make_safetensors(tmp_path / "m" / "model.safetensors", {"a": ("F32", (4, 4), None)})
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / "m" / name).write_text("{}")
    snapshot = mx("prefetch", f"file://{tmp_path}/m").ok().out.strip()
    mx("pull", snapshot, "--rank", "0/1", "--route", "stream", "--to", tmp_path / "to").ok()
    assert {"config.json", "tokenizer.json"} < {path.name for path in (tmp_path / "to").iterdir()}


def test_T03_serve_names_the_file_and_the_cause(mx: Mx, tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.json").write_text("{}")
    (tmp_path / "m" / "m06.safetensors").write_bytes(torture.CASES["m06-lfs-pointer"][0])
    refused = mx("serve", str(tmp_path / "m"), "--discovery", f"dir:{tmp_path}/peers").exits(16)
    assert "m06.safetensors: git-lfs pointer, not weights (real size 4.7 GiB)" in refused.err


LARGE_TABLE = "v19-100k-tensors"


def test_T03_the_files_that_load_pass_through_a_peer(mx: Mx, tmp_path: Path) -> None:
    """Each as it is: as a part of one pipeline, so that their names do not clash."""
    cases = [name for name, (_, expected) in torture.CASES.items() if expected != "reject" and name != LARGE_TABLE]
    assert len(cases) == 35
    write_parts(tmp_path / "m", cases)
    with served(mx, tmp_path) as (identity, options):
        found = mx_cli.pull(identity, **options)
        loaded = load(tmp_path / "m")
        assert {name: as_told(tensor) for name, tensor in found.items()} == {
            name: as_told(tensor) for name, tensor in loaded.items()
        }
        words = ("--peer", options["peers"][0], "--discovery", options["discovery"], "--path", "socket")
        mx("pull", identity, "--to", tmp_path / "to", *words, "--route", "peer").ok()
    for name in cases:
        check_part({key: loaded[key] for key in loaded if key.startswith(f"{name}/")}, tmp_path / "m", name)
    for path in (path for path in (tmp_path / "m").rglob("*") if path.is_file()):
        assert (tmp_path / "to" / path.relative_to(tmp_path / "m")).read_bytes() == path.read_bytes()


def test_T03_a_table_of_100k_tensors_passes_through_a_peer(mx: Mx, tmp_path: Path) -> None:
    write_parts(tmp_path / "m", [LARGE_TABLE])
    with served(mx, tmp_path) as (identity, options):
        names = [f"{LARGE_TABLE}/l.{number}" for number in (0, 777, 99_999)]
        found = mx_cli.pull(identity, names=names, **options)
    data = torture.CASES[LARGE_TABLE][0][-100_000:]
    assert {name: raw(tensor) for name, tensor in found.items()} == {
        name: data[number : number + 1] for name, number in zip(names, (0, 777, 99_999), strict=True)
    }


def test_T03_no_weights_are_not_nothing_from_a_peer(mx: Mx, tmp_path: Path) -> None:
    """A peer may offer files that are no weights; tensors are not among them."""
    write_parts(tmp_path / "m", [])
    (tmp_path / "m" / "m39.safetensors").mkdir()
    with served(mx, tmp_path) as (identity, options), pytest.raises(NotFound, match="no weights among its files"):
        mx_cli.pull(identity, **options)


def write_parts(directory: Path, cases: Iterable[str]) -> None:
    directory.mkdir()
    for name in ("config.json", "model_index.json"):
        (directory / name).write_text("{}")
    for name in cases:
        (directory / name).mkdir()
        (directory / name / "model.safetensors").write_bytes(torture.CASES[name][0])


@contextlib.contextmanager
def served(mx: Mx, tmp_path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """The identity of `tmp_path/m` while a peer serves it, and what a pull needs to reach that."""
    discovery, ready = f"dir:{tmp_path}/peers", tmp_path / "ready"
    source = mx.start(
        "serve", str(tmp_path / "m"), "--discovery", discovery, "--device", "cpu", "--ready-file", str(ready)
    )
    try:
        eventually(ready.exists, 60)
        said = json.loads(ready.read_text())
        identity = said["identity"].get("content") or said["identity"]["origin"]
        yield identity, {"peers": [said["address"]], "path": "socket", "routes": ["peer"], "discovery": discovery}
    finally:
        source.kill()


def as_told(tensor: Any) -> tuple[Any, tuple[int, ...], bytes]:
    return tensor.dtype, tuple(tensor.shape), raw(tensor)


def check_part(found: dict[str, Any], directory: Path, name: str) -> None:
    prefix = f"{name}/"
    check_bytes({key.removeprefix(prefix): found[key] for key in found}, directory / name / "model.safetensors")


def test_T03_no_giant_allocation(tmp_path: Path) -> None:
    for number, data in enumerate(
        (torture.st({}, length=1 << 40), torture.st({"a": torture.entry("F32", [2**40], 0, 2**42)}, b"x"))
    ):
        (tmp_path / f"{number}.safetensors").write_bytes(data)
        with pytest.raises(IntegrityError, match=rf"{number}\.safetensors"):
            load(tmp_path / f"{number}.safetensors")


def test_not_there(way: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="nowhere"):
        way(tmp_path / "nowhere")
