"""P-30 to P-36: which files make the checkpoint, indexes that lie, branches that move, and doing without the origin."""

from __future__ import annotations

import io
import json
import re
import zipfile
from pathlib import Path

import pytest

from tests.integration.cache_tools import model_dir
from tests.rig import cachecheck, servers
from tests.rig.origins import FilePlace, HubPlace, Place, StorePlace
from tests.rig.scripted import manifests, published
from tests.support import Mx, capability, checkpoint_files, noise, safetensors_bytes, tree

INDEX = "model.safetensors.index.json"
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


def weights(seed: str, rows: int = 100) -> bytes:
    return safetensors_bytes({seed: ("BF16", (rows, 256), None)}, seed=seed)


def index(*shards: str) -> bytes:
    return json.dumps({"weight_map": {f"t{number}": shard for number, shard in enumerate(shards)}}).encode()


def many_formats() -> tuple[dict[str, bytes], dict[str, bytes]]:
    """(the files of one usable set, the rest)."""
    files = checkpoint_files(shards=2, size=200_000)
    files |= {"original/params.json": b"{}", "README.md": b"# a model\n"}
    rest = {
        "pytorch_model.bin": noise("bin", 100_000),
        "original/model.safetensors": weights("original"),
        "metal/model.bin": noise("metal", 100_000),
        "consolidated.safetensors": weights("consolidated"),
        "optimizer.pt": noise("optimizer", 1000),
    }
    return files, rest


def fetched(hub: servers.Hub) -> set[str]:
    """The files whose bodies were asked for, by path in the repository."""
    paths = (re.fullmatch(r"/org/model/resolve/[0-9a-f]{40}/(.*)", entry["path"]) for entry in hub.log())
    return {match[1] for match in paths if match}


@pytest.fixture
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    if request.param == "hub":
        return HubPlace(request.getfixturevalue("hub"))
    if request.param == "s3":
        return StorePlace(request.getfixturevalue("s3"))
    return FilePlace(tmp_path / "checkpoint")


hub_and_s3 = pytest.mark.parametrize("place", ["hub", "s3"], indirect=True)
s3_and_file = pytest.mark.parametrize("place", ["s3", "file"], indirect=True)


# --- P-30: several formats ---------------------------------------------------------------------------------------


def test_p30_one_weight_set_and_what_was_left_out(mx: Mx, hub: servers.Hub) -> None:
    files, rest = many_formats()
    hub.commit(files | rest)
    looked = mx("prefetch", hub.uri, "--dry-run", "--json", env=hub.env).ok()
    assert "left out 5 files, " in looked.err
    dry = looked.json()
    assert {row["path"] for row in dry["files"]} == set(files)
    assert dry["bytes_missing"] == sum(map(len, files.values()))
    assert not mx.cache.exists()
    hub.reset()
    result = mx("prefetch", hub.uri, env=hub.env).ok()
    assert tree(Path(result.out.strip())) == cachecheck.sums(files)
    assert fetched(hub) == set(files)
    (said,) = [line for line in result.err.splitlines() if "left out" in line]
    assert re.search(
        r"left out 5 files, \d+(\.\d)? KiB saved: .*consolidated\.safetensors.*\(--all takes everything\)", said
    )
    every = mx("prefetch", hub.uri, "--all", env=hub.env).ok()
    assert tree(Path(every.out.strip())) == cachecheck.sums(files | rest)


def test_p30_patterns(mx: Mx, hub: servers.Hub) -> None:
    files, rest = many_formats()
    hub.commit(files | rest)

    def chosen(*words: str) -> set[str]:
        return {
            row["path"]
            for row in mx("prefetch", hub.uri, *words, "--dry-run", "--json", env=hub.env).ok().json()["files"]
        }

    assert chosen("--include", "original/", "--include", "config.json") == {
        "config.json", "original/model.safetensors", "original/params.json",
    }  # fmt: skip
    without = chosen("--exclude", "*.safetensors*", "--exclude", "README.md")
    assert "pytorch_model.bin" in without
    assert not [path for path in without if ".safetensors" in path or path == "README.md"]
    assert chosen("--all", "--exclude", "metal/*") == set(files | rest) - {"metal/model.bin"}
    text = mx("prefetch", hub.uri, "--include", "*.bin", "--dry-run", env=hub.env).ok().out
    assert re.search(r"^fetch +97.7 KiB  pytorch_model.bin$", text, re.MULTILINE)
    assert "to fetch 195" in text


@pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.safetensors", "original/model.safetensors"])
def test_p30_the_only_weights_are_taken(mx: Mx, hub: servers.Hub, name: str) -> None:
    files = {"config.json": b"{}", name: many_formats()[1][name]}
    hub.commit(files)
    assert tree(Path(mx("prefetch", hub.uri, env=hub.env).ok().out.strip())) == cachecheck.sums(files)


# --- P-31, P-32: an index that names more, or less ---------------------------------------------------------------


@hub_and_s3
def test_p31_a_missing_shard(mx: Mx, place: Place) -> None:
    present = {SHARDS[0]: weights("one"), SHARDS[1]: weights("two"), "config.json": b"{}"}
    place.put(present | {INDEX: index(*SHARDS, "model-00003-of-00002.safetensors", "gone.safetensors")})
    for words in ([], ["--all"], ["--dry-run"]):
        error = mx("prefetch", place.tree, *words, env=place.env).exits(16).err
        assert "gone.safetensors; model-00003-of-00002.safetensors" in error
        assert "2 of 4 shards" in error
    assert published(mx.cache) == {}
    assert manifests(mx.cache) == []


def test_p31_a_half_filled_directory_is_completed(mx: Mx, hub: servers.Hub) -> None:
    """A directory with the second shard alone, and a garbage first one of the right size: neither is believed."""
    files = checkpoint_files(shards=2, size=200_000)
    sha = hub.commit(files)
    mx("prefetch", hub.uri, "--include", "README.md", "--include", "config.json", env=hub.env).ok()
    snapshot = model_dir(mx.cache) / "snapshots" / sha
    (snapshot / SHARDS[1]).write_bytes(files[SHARDS[1]])
    (snapshot / SHARDS[0]).write_bytes(b"\1" * len(files[SHARDS[0]]))
    result = mx("prefetch", hub.uri, "--json", env=hub.env).ok().json()
    assert Path(result["dir"]) == snapshot
    assert tree(snapshot) == cachecheck.sums(files)


@hub_and_s3
def test_p32_what_the_index_does_not_name_stays_there(mx: Mx, place: Place) -> None:
    files = {name: weights(name) for name in SHARDS} | {INDEX: index(*SHARDS), "config.json": b"{}"}
    stray = {f"model-0000{number}-of-00004.safetensors": weights(str(number)) for number in range(1, 5)}
    stray["model.safetensors"] = weights("whole")
    place.put(files | stray)
    result = mx("prefetch", place.tree, env=place.env).ok()
    assert tree(Path(result.out.strip())) == cachecheck.sums(files)
    (said,) = [line for line in result.err.splitlines() if "left out" in line]
    assert "left out 5 files" in said
    assert f"not in {INDEX}" in said


# --- P-33: git-lfs pointers --------------------------------------------------------------------------------------

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 5000000000\n"


@s3_and_file
def test_p33_a_pointer_is_no_weights(mx: Mx, place: Place) -> None:
    place.put({"config.json": b"{}", "model.safetensors": POINTER})
    error = mx("prefetch", place.tree, env=place.env).exits(16).err
    assert "git-lfs pointer, not weights (real size 4.7 GiB)" in error
    assert "model.safetensors" in error
    assert manifests(mx.cache) == []
    assert "model.safetensors" not in published(mx.cache)


@s3_and_file
def test_p33_a_pointer_is_found_again(mx: Mx, place: Place) -> None:
    """Somebody put a pointer where the weights were, padded to their size."""
    data = weights("w")
    place.put({"config.json": b"{}", "model.safetensors": data})
    directory = Path(mx("prefetch", place.tree, env=place.env).ok().out.strip())
    (directory / "model.safetensors").write_bytes(POINTER.ljust(len(data), b"\n"))
    error = mx("prefetch", place.tree, "--verify", env=place.env).exits(16).err
    assert "model.safetensors: git-lfs pointer, not weights (real size 4.7 GiB)" in error


# --- P-34: names that lead out -----------------------------------------------------------------------------------

HOSTILE = (
    "../../etc/passwd", "/etc/passwd", "..%2f..%2fx", "a\\..\\b", "http://127.0.0.1:1/x", "sub/../../x", "x\0y", "",
    "//host/x", ".", "..", "C:x", "a/./b", "a//b", "%2e%2e/x", 7, None, ["x"],
)  # fmt: skip


@pytest.mark.parametrize("place", ["hub", "s3", "file"], indirect=True)
def test_p34_hostile_indexes(mx: Mx, place: Place, request: pytest.FixtureRequest) -> None:
    """Refused one by one and together, before anything that they name is asked for."""
    place.put({"config.json": b"{}", SHARDS[0]: weights("one")})
    for names in (HOSTILE, HOSTILE[:1], HOSTILE[4:5]):
        weight_map = {"good": SHARDS[0]} | {f"t{number}": name for number, name in enumerate(names)}
        place.put({INDEX: json.dumps({"weight_map": weight_map}).encode()})
        error = mx("prefetch", place.tree, "--all", "--json", env=place.env).exits(16).json()["error"]
        assert f"names what can't be its shard ({INDEX}: 't0' -> {names[0]!r}" in error["message"]
    assert published(mx.cache) == {}
    assert not [path for path in mx.cache.parent.rglob("*") if path.name in ("passwd", "x", "b")]
    if not isinstance(place, FilePlace):
        origin = request.getfixturevalue("hub" if isinstance(place, HubPlace) else "s3")
        file = r"(config|model\.safetensors\.index)\.json"
        known = rf"/api/models/org/model(/(revision|tree)/\w+)?|/org/model/resolve/\w{{40}}/{file}"
        known += rf"|/{getattr(origin, 'bucket', '')}(/models/m(/{file})?)?"
        asked = [entry["path"].partition("?")[0] for entry in origin.log()]
        assert [path for path in asked if not re.fullmatch(known, path)] == []


@pytest.mark.parametrize("key", ["../x", "/abs", "sub/../../x", "a//b", "./x"])
def test_p34_hostile_keys(mx: Mx, gcs: servers.Gcs, key: str) -> None:
    """Keys of a store may be anything; a name that would leave the directory is refused before a byte is fetched."""
    gcs.put("m/config.json", b"{}")
    gcs.put(f"m/{key}", b"evil")
    error = mx("prefetch", gcs.uri("m"), env=gcs.env).exits(16).err
    assert "names that mx doesn't write to a disk" in error
    assert published(mx.cache) == {}


# --- P-35: the branch moves --------------------------------------------------------------------------------------


def test_p35_a_branch_that_moves_during_the_run(mx: Mx, hub: servers.Hub) -> None:
    old = {f"{number}.bin": noise(f"old{number}", 300_000) for number in range(5)} | {"config.json": b'{"v": 1}'}
    new = {name: noise(f"new{name}", 300_000) for name in old if name != "config.json"} | {"config.json": b'{"v": 2}'}
    first = hub.commit(old)
    second = hub.commit(new, branch="next")
    hub.flags("slow=300000")
    env = hub.env | {"MX_MAX_CONNECTIONS": "1", "MX_PROGRESS_EVERY": "0.1s"}
    run = mx.start("prefetch", hub.uri, "--json", env=env)
    run.wait_err(r"transfer +[2-7]\d %", 40)
    hub.move("main", second)
    hub.flags("ok")
    done = run.wait().ok()
    result = done.json()
    assert result["revision"] == first
    assert f"revision {first}" in done.err
    assert tree(Path(result["dir"])) == cachecheck.sums(old)
    later = mx("prefetch", hub.uri, "--json", env=env).ok().json()
    assert later["revision"] == second
    assert tree(Path(later["dir"])) == cachecheck.sums(new)
    assert tree(Path(result["dir"])) == cachecheck.sums(old)
    hub.reset()
    assert mx("prefetch", hub.uri, "--revision", first, env=env).ok().out.strip() == result["dir"]
    assert not hub.log()


# --- P-36: without the origin ------------------------------------------------------------------------------------

# A machine without any network: who opens a connection fails.
LONELY = ("unshare", "--net")


@capability("unshare", "netns")
@pytest.mark.parametrize("how", ["--offline", "HF_HUB_OFFLINE"])
def test_p36_hits_and_misses(mx: Mx, hub: servers.Hub, how: str) -> None:
    files = checkpoint_files(shards=1, size=100_000) | {"pytorch_model.bin": noise("bin", 1000)}
    sha = hub.commit(files)
    directory = mx("prefetch", hub.uri, env=hub.env).ok().out.strip()
    hub.reset()
    env = hub.env | ({"HF_HUB_OFFLINE": "1"} if how != "--offline" else {})
    words = ("prefetch", *(["--offline"] if how == "--offline" else []))

    for hit in ([hub.uri], [f"{hub.uri}@{sha}"], [hub.uri, "--revision", "main"]):
        result = mx(*words, *hit, env=env, prefix=LONELY).ok()
        assert result.out.strip() == directory
    other = "0" * 40
    for miss, says in (
        ([f"{hub.uri}@{other}"], f"revision {other} is not in the cache"),
        ([hub.uri, "--revision", "dev"], "'dev' was never resolved in this cache"),
        (["hf://org/other"], "never resolved"),
        ([hub.uri, "--all"], "not in the cache: pytorch_model.bin"),
    ):
        assert says in mx(*words, *miss, env=env, prefix=LONELY).exits(10).err
    assert not hub.log()


@capability("strace")
@pytest.mark.parametrize("kind", ["hub", "s3"])
def test_p36_a_hit_opens_no_connection(mx: Mx, request: pytest.FixtureRequest, kind: str, tmp_path: Path) -> None:
    """A pinned revision that is complete needs nobody, asked for offline or not."""
    place: Place = (
        HubPlace(request.getfixturevalue("hub")) if kind == "hub" else StorePlace(request.getfixturevalue("s3"))
    )
    place.put({"config.json": b"{}", "model.safetensors": weights("w")})
    first = mx("prefetch", place.tree, "--json", env=place.env).ok().json()
    for number, words in enumerate((["--offline"], ["--revision", first["revision"]])):
        trace = tmp_path / f"trace-{number}"
        prefix = ("strace", "-f", "-qq", "-e", "trace=connect,sendto,sendmsg", "-o", str(trace))
        result = mx("prefetch", place.tree, *words, "--json", env=place.env, prefix=prefix).ok().json()
        assert (result["role"], result["dir"]) == ("hit", first["dir"])
        assert "AF_INET" not in trace.read_text()


def test_p36_a_hit_needs_no_token_and_no_endpoint(mx: Mx, hub: servers.Hub) -> None:
    """A token that would be asked for, an endpoint that is not there: nothing of it matters for a hit."""
    hub.commit({"config.json": b"{}"})
    directory = mx("prefetch", hub.uri, env=hub.env).ok().out.strip()
    env = {"HF_ENDPOINT": "http://127.0.0.1:1", "HF_TOKEN_PATH": "/nonexistent/token"}
    assert mx("prefetch", hub.uri, "--offline", env=env).ok().out.strip() == directory


# --- P-61: archives ----------------------------------------------------------------------------------------------


def test_p61_archives_stay_closed(mx: Mx, s3: servers.S3Stub) -> None:
    """Whatever their members would do: nobody asked for them."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in ("../evil", "/evil", "ok/../../evil"):
            archive.writestr(name, b"evil")
        archive.writestr("bomb", bytes(4 * 10**6))
    files = {"config.json": b"{}", "model.zip": buffer.getvalue()}
    for name, data in files.items():
        s3.put(f"m/{name}", data)
    assert tree(Path(mx("prefetch", s3.uri("m"), env=s3.env).ok().out.strip())) == cachecheck.sums(files)
    one = mx("prefetch", s3.uri("m/model.zip"), env=s3.env).ok().out.strip()
    assert tree(Path(one)) == cachecheck.sums({"model.zip": files["model.zip"]})
    assert not list(mx.cache.parent.rglob("evil*"))
