"""`mx hash` as it is typed: H-01 to H-14, what it prints, and that origins agree with what prefetch brought."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.rig import servers
from tests.support import MIB, Mx, capability, checkpoint_files, make_checkpoint, make_safetensors, need, noise

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 4096,
    "rms_norm_eps": 1e-05,
    "torch_dtype": "bfloat16",
    "quantization_config": {"bits": 4, "group_size": 128, "ignore": ["lm_head", "re:.*gate"]},
}
IDENTITY = re.compile(r"mx1[cox]-[0-9a-f]{32}\n")
COMMIT = "0123456789abcdef0123456789abcdef01234567"

Identify = Callable[..., str]


@pytest.fixture
def identify(mx: Mx) -> Identify:
    """identify(MODEL, options…) -> the identity, after a look at the two streams: it and a newline, and no traceback."""

    def run(*arguments: str | Path, env: Mapping[str, str] | None = None, cwd: Path | None = None) -> str:
        result = mx("hash", *arguments, env=env, cwd=cwd).ok()
        assert IDENTITY.fullmatch(result.out), result.out
        assert "Traceback" not in result.err
        return result.out.strip()

    return run


@pytest.fixture
def config_ids(tmp_path: Path, identify: Identify) -> Callable[..., list[str]]:
    """config_ids(text or bytes or value, …) -> the identity of each as a config.json."""

    def run(*configs: Any) -> list[str]:
        path = tmp_path / "config.json"
        found = []
        for config in configs:
            text = config if isinstance(config, (str, bytes)) else json.dumps(config)
            path.write_bytes(text.encode() if isinstance(text, str) else text)
            found.append(identify(path))
        return found

    return run


def refusal(mx: Mx, code: int, *arguments: str | Path) -> str:
    """What a run that must fail said: nothing on stdout, one sentence, no traceback."""
    result = mx("hash", *arguments).exits(code)
    assert result.out == ""
    assert result.err.count("mx: error: ") == 1
    assert "Traceback" not in result.err
    return result.err


# --- the configuration by meaning --------------------------------------------------------------------------------


def test_H01_formatting(config_ids: Callable[..., list[str]]) -> None:
    pretty = json.dumps(CONFIG, indent=2)
    found = config_ids(
        pretty,
        dict(reversed(CONFIG.items())),
        json.dumps(CONFIG, separators=(",", ":")),
        pretty.replace("\n", "\r\n"),
        pretty + "\n",
        json.dumps(CONFIG, indent="\t"),
        b"\xef\xbb\xbf" + pretty.encode(),  # H-02: what an editor on Windows adds
    )
    assert len(set(found)) == 1


@pytest.mark.parametrize(
    ("data", "place"),
    [
        (json.dumps(CONFIG).encode("utf-16"), "UTF-16"),
        (b'{"name": "caf\xe9"}', "13"),
        (b'{"a": 1}\0', "8"),
        (b'{"a": 1} rest', "9"),
    ],
)
def test_H02_encodings_that_are_refused(mx: Mx, tmp_path: Path, data: bytes, place: str) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(data)
    said = refusal(mx, 2, path)
    assert str(path) in said
    assert place in said


def test_H03_non_finite(config_ids: Callable[..., list[str]]) -> None:
    def limit(text: str) -> str:
        return f'{{"time_step_limit": [0.0, {text}]}}'

    infinity, newer, *others = config_ids(
        *map(limit, ("Infinity", '{"__float__": "Infinity"}', "-Infinity", "NaN", "1e400"))
    )
    assert infinity == newer
    assert len({infinity, *others}) == 4


def test_H03_what_is_printed_is_valid_json(mx: Mx, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text('{"time_step_limit": [0.0, Infinity], "x": NaN}')
    out = mx("hash", path, "--json").ok().out
    json.loads(out, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


def test_H04_dtype(config_ids: Callable[..., list[str]], identify: Identify, tmp_path: Path) -> None:
    found = config_ids(
        {"torch_dtype": "bfloat16"},
        {"dtype": "bfloat16"},
        {"torch_dtype": "torch.bfloat16"},
        {"dtype": "bfloat16", "torch_dtype": "bfloat16"},
    )
    assert len(set(found)) == 1
    assert identify(tmp_path / "config.json", "--dtype", "float16") not in found


def test_H05_rope(config_ids: Callable[..., list[str]]) -> None:
    found = config_ids(
        {"rope_theta": 10000, "rope_scaling": {"type": "linear", "factor": 4}},
        {"rope_theta": 10000, "rope_scaling": {"rope_type": "linear", "factor": 4}},
        {"rope_parameters": {"rope_type": "linear", "factor": 4, "rope_theta": 10000}},
    )
    assert len(set(found)) == 1
    own = config_ids({"rope_scaling": {"type": "My-Own", "x": 1}}, {"rope_scaling": {"type": "my-own", "x": 1}})
    assert len({*own, *found}) == 3


@pytest.mark.parametrize(
    "config",
    [
        {"torch_dtype": "bfloat16", "dtype": "float16"},
        {"rope_scaling": {"type": "linear", "rope_type": "yarn", "factor": 4}},
    ],
)
def test_H04_H05_disagreement_is_named(mx: Mx, tmp_path: Path, config: dict[str, Any]) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    said = refusal(mx, 2, path)
    key = next(iter(config))
    assert key in said
    assert str(path) in said


def test_H06_numbers(config_ids: Callable[..., list[str]]) -> None:
    whole = config_ids('{"x": 10000}', '{"x": 10000.0}')
    small = config_ids('{"x": 1e-05}', '{"x": 0.00001}', '{"x": 1E-5}')
    zero = config_ids('{"x": -0.0}', '{"x": 0}')
    large = config_ids('{"x": 9007199254740992}', '{"x": 9007199254740993}')
    assert [len(set(ids)) for ids in (whole, small, zero, large)] == [1, 1, 1, 2]


def test_H10_quantization(config_ids: Callable[..., list[str]], identify: Identify, tmp_path: Path) -> None:
    def changed(**values: Any) -> dict[str, Any]:
        return {**CONFIG, "quantization_config": {**CONFIG["quantization_config"], **values}}

    base, reordered, null, *others = config_ids(
        CONFIG,
        changed(ignore=["re:.*gate", "lm_head"]),
        changed(sym=None),
        changed(bits=8),
        changed(group_size=64),
        changed(ignore=["lm_head"]),
    )
    assert base == reordered == null
    assert len({base, *others}) == 4
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG))
    assert identify(path, "--quantization", "fp8") != identify(path)


# --- weights -----------------------------------------------------------------------------------------------------


def test_H07_same_config_other_weights(mx: Mx, identify: Identify, tmp_path: Path) -> None:
    base, tuned = (make_checkpoint(tmp_path / name, seed=name) for name in ("base", "tuned"))
    assert (base / "config.json").read_bytes() == (tuned / "config.json").read_bytes()
    assert identify(base) != identify(tuned)
    only = mx("hash", base, "--no-content").ok()
    assert only.out == mx("hash", tuned, "--no-content").ok().out
    assert only.out.startswith("mx1x-")
    assert "config-only" in only.err
    assert mx("hash", base, "--no-content", "--json").ok().json()["config_only"] is True


def test_a_file_that_says_nothing_of_a_model_is_doubted(mx: Mx, tmp_path: Path) -> None:
    """Any JSON object is a config. A tokenizer's is hashed in the place of one when the wrong name was typed."""
    for name, content, doubted in (
        ("tokenizer.json", {"version": "1.0", "model": {"type": "BPE"}}, True),
        ("config.json", {"version": "1.0"}, False),
        ("other.json", {"architectures": ["LlamaForCausalLM"]}, False),
        ("unet.json", {"_class_name": "UNet2DConditionModel"}, False),
    ):
        (tmp_path / name).write_text(json.dumps(content))
        found = mx("hash", tmp_path / name).ok()
        assert found.out.startswith("mx1x-")
        assert (f"warning: {tmp_path / name} names no model_type" in found.err) == doubted, name
    mx("hash", tmp_path / "tokenizer.json", "--strict").exits(3)


def test_H09_paths_and_shards_do_not_count(identify: Identify, tmp_path: Path) -> None:
    tensors = {f"layers.{n}.weight": ("U8", (MIB + n,), noise(f"t{n}", MIB + n)) for n in range(4)}
    config = json.dumps(CONFIG)
    for place, shards in (("data1/m", 1), ("data2/m", 2), ("sharded", 4)):
        for number in range(shards):
            name = f"model-{number + 1:05d}-of-{shards:05d}.safetensors" if shards > 1 else "model.safetensors"
            held = list(tensors)[number::shards]
            make_safetensors(tmp_path / place / name, {key: tensors[key] for key in reversed(held)})
        (tmp_path / place / "config.json").write_text(config)
    hub = tmp_path / "hub" / "models--a--b"
    (hub / "blobs").mkdir(parents=True)
    snapshot = hub / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    for name in ("config.json", "model.safetensors"):
        shutil.copy(tmp_path / "data1" / "m" / name, hub / "blobs" / name)
        (snapshot / name).symlink_to(f"../../blobs/{name}")
    (tmp_path / "link").symlink_to(tmp_path / "data1" / "m")
    paths = ["data1/m", "data1/m/", "data2/m", "sharded", "link", str(snapshot), "./data1/../data2/m"]
    assert len({identify(path, cwd=tmp_path) for path in paths}) == 1


def test_H14_without_a_config(mx: Mx, identify: Identify, tmp_path: Path) -> None:
    gguf, single, shardless = (tmp_path / name for name in ("gguf", "single", "shardless"))
    for folder in (gguf, shardless):
        folder.mkdir()
    (gguf / "model.gguf").write_bytes(b"GGUF" + noise("gguf", MIB))
    make_safetensors(single / "model.safetensors", {"a": ("BF16", (64, 64), None)})
    for folder in (gguf, single):
        assert identify(folder).startswith("mx1c-")
        assert mx("hash", folder, "--json").ok().json()["kind"] == "content"
    (shardless / "model.safetensors.index.json").write_text('{"weight_map": {"a": "model-1.safetensors"}}')
    assert "mx prefetch" in refusal(mx, 10, shardless)
    cache = tmp_path / "hub" / "models--a--b"
    for part in ("blobs", "refs", f"snapshots/{COMMIT}"):
        (cache / part).mkdir(parents=True)
    assert f"mx hash {cache}/snapshots/{COMMIT}" in refusal(mx, 2, cache)
    assert "snapshot" in refusal(mx, 2, cache.parent)


# --- bad input ---------------------------------------------------------------------------------------------------


def make_bad_inputs(top: Path) -> dict[str, int]:
    """{path: exit code}"""
    (top / "empty.json").touch()
    (top / "list.json").write_text("[]")
    (top / "folder").mkdir()
    (top / "folder" / "notes.txt").write_text("x")
    os.mkfifo(top / "fifo")
    (top / "loop").symlink_to("loop")
    (top / "piped").mkdir()
    os.mkfifo(top / "piped" / "config.json")
    (top / "cut").mkdir()
    whole = make_safetensors(top / "cut" / "model.safetensors", {"a": ("U8", (100,), None)})
    whole.write_bytes(whole.read_bytes()[:-1])
    return {
        "./missing": 10,
        "empty.json": 2,
        "list.json": 2,
        "folder": 10,
        "fifo": 2,
        "loop": 2,
        "piped": 2,
        "cut": 16,
        "": 2,
        "plainname": 10,
    }


def test_H13_bad_input(mx: Mx, tmp_path: Path) -> None:
    for name, code in make_bad_inputs(tmp_path).items():
        result = mx("hash", name, cwd=tmp_path).exits(code)
        assert result.out == "", name
        assert re.fullmatch(r"(cache .+\n)?mx: error: .+\n(hint: .+\n)?", result.err), result.err
        error = mx("hash", name, "--json", cwd=tmp_path).exits(code).json()
        assert next(iter(error)) == "schema"
        assert error["error"]["code"] == code


def test_H13_unreadable(mx: Mx, tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "m")
    (folder / "config.json").chmod(0)
    prefix: tuple[str, ...] = ()
    if os.geteuid() == 0:
        need("setpriv")
        # root without its right to read everything
        prefix = ("setpriv", "--bounding-set=-dac_override,-dac_read_search")
    result = mx("hash", folder, prefix=prefix).exits(21)
    assert result.out == ""
    assert str(folder / "config.json") in result.err
    home = mx.home / ".config"
    home.mkdir(mode=0)
    assert mx("hash", folder / "tokenizer.json", prefix=prefix).exits(0).out.startswith("mx1x-")


@pytest.mark.parametrize(
    "arguments",
    [
        ["--kind", "other"],
        ["--kind", "origin"],
        ["--stage", "later"],
        ["--stage", "checkpoint", "--tp", "2"],
        ["--stage", "processed", "--tp", "2"],
        ["--stage", "loaded"],
        ["--tp", "0"],
        ["--set", "novalue"],
        ["--set", "tp=2", "--tp", "4"],
        ["--field", "dtype=x"],
        ["--scheme", "md5"],
        ["--revision", "main"],
        ["--nonsense"],
    ],
)
def test_H13_wrong_options(mx: Mx, tmp_path: Path, arguments: list[str]) -> None:
    (tmp_path / "config.json").write_text("{}")
    refusal(mx, 2, tmp_path, *arguments)


# --- layout ------------------------------------------------------------------------------------------------------


def test_H11_every_factor_counts(identify: Identify, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    processed = ["--stage", "processed", "--engine", "vllm", "--engine-version"]
    factors = [
        [],
        ["--tp", "2"],
        ["--pp", "2"],
        ["--ep", "2"],
        ["--dp", "2"],
        ["--tp", "2", "--rank", "1"],
        ["--dtype", "float16"],
        ["--set", "kv_cache_dtype=fp8"],
        ["--set", "foo=1"],
        ["--set", "foo=2"],
        [*processed, "0.24.0"],
        [*processed, "0.25.0"],
    ]
    found = [identify(tmp_path, *options) for options in factors]
    assert len(set(found)) == len(factors)
    assert identify(tmp_path, "--tp", "2", "--pp", "1") == found[1]
    assert identify(tmp_path, "--dtype", "torch.float16") == identify(tmp_path, "--dtype", "fp16") == found[6]
    volatile = {
        "MX_LOG_FORMAT": "json",
        "MX_TTL": "9",
        "LANG": "tr_TR.UTF-8",
        "TZ": "Asia/Tokyo",
        "PYTHONHASHSEED": "7",
    }
    assert identify(tmp_path, "-v", env=volatile) == found[0]


# --- explain and diff --------------------------------------------------------------------------------------------


def test_H12_explain_names_the_fields(mx: Mx, tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "m")
    out = mx("hash", tmp_path / "m", "--explain", "--tp", "8").ok().out
    for line in ('kind: "content"', 'stage: "loaded"', "  tensors: 4", '  dtype: "bfloat16"', "  tp: 8"):
        assert f"{line}\n" in out


def test_H12_diff_names_the_field_and_both_values(mx: Mx, tmp_path: Path) -> None:
    one, two = (make_checkpoint(tmp_path / name) for name in ("one", "two"))
    config = json.loads((two / "config.json").read_text())
    config["text_config"] = {"layers": [1, 2]}
    (one / "config.json").write_text(json.dumps(config))
    config["text_config"] = {"layers": [1, 3]}
    (two / "config.json").write_text(json.dumps(config, indent=4))
    saved = tmp_path / "saved.json"
    saved.write_text(mx("hash", one, "--json").ok().out)
    for other in (one, saved):
        equal = mx("hash", one, "--diff", other).ok()
        assert re.fullmatch(r"equal \(content mx1c-[0-9a-f]{32}\)\n", equal.out)
        differing = mx("hash", two, "--diff", other).exits(17)
        assert differing.out == ""
        assert "config.text_config.layers[1]: 3 -> 2" in differing.err
    document = mx("hash", two, "--diff", saved, "--json").exits(17).json()
    assert document["differences"] == [{"field": "config.text_config.layers[1]", "left": 3, "right": 2}]
    assert (document["equal"], document["comparable"], document["error"]["code"]) == (False, True, 17)
    assert mx("hash", two, "--diff", one, "--kind", "config").exits(17).err.count("config identities differ") == 1


def test_H12_kinds_that_say_nothing_about_each_other(mx: Mx, tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "m")
    other = f"hf://org/name@{COMMIT}"
    said = mx("hash", tmp_path / "m", "--diff", other, "--offline").exits(17).err
    assert "not comparable" in said
    assert "differ" not in said
    assert 'compare with "$(mx prefetch URI)"' in said
    document = mx("hash", tmp_path / "m", "--diff", other, "--offline", "--json").exits(17).json()
    assert document["comparable"] is False


def test_H12_secrets_are_not_shown(mx: Mx) -> None:
    uri = "https://user:hunter2@host.invalid/m.safetensors?X-Amz-Signature=hunter2&part=1"
    for options in (["--explain"], ["--json"], ["-vv"]):
        result = mx("hash", uri, "--revision", "a" * 64, "--offline", *options).ok()
        assert "hunter2" not in result.out + result.err


# --- origins -----------------------------------------------------------------------------------------------------


def identities(mx: Mx, model: str, env: Mapping[str, str]) -> dict[str, str]:
    return {one["kind"]: one["id"] for one in mx("hash", model, "--json", env=env).ok().json()["identities"]}


def check_origin_agrees(mx: Mx, uri: str, env: Mapping[str, str]) -> None:
    """The identities of the URI are among those of what prefetch brought, and no weight is read for that."""
    asked = mx("hash", uri, env=env).ok().out.strip()
    assert asked.startswith("mx1o-")
    fetched = mx("prefetch", uri, "--json", env=env).ok().json()
    found = identities(mx, fetched["dir"], env)
    assert found["origin"] == asked
    assert {kind: found[kind] for kind in ("content", "origin")} == fetched["identity"]
    document = mx("hash", fetched["dir"], "--json", env=env).ok().json()
    assert document["bytes_read"] == 0
    assert document["identity"] == found["content"]
    again = mx("hash", fetched["dir"], "--verify", "--json", env=env).ok().json()
    assert again["identity"] == found["content"]
    assert again["bytes_read"] > 0
    for options in (["--revision", fetched["revision"]], []):
        assert mx("hash", uri, "--offline", *options, env=env).ok().out.strip() == asked
    assert mx("hash", uri, "--diff", fetched["dir"], env=env).ok().out.startswith("equal (origin ")


def test_origin_s3(mx: Mx, s3: servers.S3, tmp_path: Path) -> None:
    s3.put_tree("models/m", make_checkpoint(tmp_path / "m"))
    check_origin_agrees(mx, s3.uri("models/m"), s3.env)


def test_origin_gs(mx: Mx, gcs: servers.Gcs, tmp_path: Path) -> None:
    gcs.put_tree("models/m", make_checkpoint(tmp_path / "m"))
    check_origin_agrees(mx, gcs.uri("models/m"), gcs.env)


def test_origin_hub(mx: Mx, hub: servers.Hub) -> None:
    hub.commit(checkpoint_files())
    check_origin_agrees(mx, hub.uri, hub.env)


def test_origin_http(mx: Mx, hub: servers.Hub) -> None:
    sha = hub.commit(checkpoint_files(shards=1))
    check_origin_agrees(mx, f"{hub.url}/{hub.repo}/resolve/{sha}/model.safetensors", {})


def test_origin_file(mx: Mx, tmp_path: Path) -> None:
    check_origin_agrees(mx, f"file://{make_checkpoint(tmp_path / 'm')}", {})


def test_H08_a_branch_is_resolved_before_it_is_hashed(mx: Mx, hub: servers.Hub) -> None:
    shas = [hub.commit(checkpoint_files(seed=seed)) for seed in ("yesterday", "today")]
    found = []
    for sha in shas:
        hub.move("main", sha)
        found.append(mx("hash", f"{hub.uri}@main", env=hub.env).ok().out)
        assert mx("hash", f"{hub.uri}@{sha}", env=hub.env).ok().out == found[-1]
    assert found[0] != found[1]
    snapshots = [mx("prefetch", f"{hub.uri}@{sha}", env=hub.env).ok().out.strip() for sha in shas]
    assert len({mx("hash", snapshot).ok().out for snapshot in snapshots}) == 2


def test_H08_a_branch_that_nobody_resolved_is_refused(mx: Mx) -> None:
    assert "main" in refusal(mx, 10, "hf://org/name@main", "--offline")


def test_a_given_revision_asks_nobody(mx: Mx, hub: servers.Hub) -> None:
    sha = hub.commit(checkpoint_files())
    online = mx("hash", f"{hub.uri}@{sha}", env=hub.env).ok().out
    assert mx("hash", f"{hub.uri}@{sha}", "--offline", env={"HF_ENDPOINT": "http://127.0.0.1:9"}).ok().out == online
    assert hub.log() == []


@capability("strace")
@pytest.mark.parametrize(
    "uri", ["s3://bucket/m", "gs://bucket/m", "hf://org/name", "https://host.invalid/m.safetensors"]
)
def test_offline_opens_no_connection(mx: Mx, tmp_path: Path, uri: str) -> None:
    trace = tmp_path / "trace"
    prefix = ("strace", "-f", "-qq", "-o", str(trace), "-e", "trace=%network")
    mx("hash", uri, "--revision", COMMIT, "--offline", prefix=prefix).ok()
    assert "AF_INET" not in trace.read_text()


# --- ModelExpress ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, "5a5f555570065064"),
        ({"revision": "abc123def4567890"}, "d0c184b2a9a34c82"),
        ({"extra_parameters.Foo": "a", "extra_parameters.foo": "b"}, "bf71fb9340cd940a"),
        ({"model_name": "org/modèle-模型"}, "13f72a8a8e92e22a"),
    ],
)
def test_modelexpress_vectors(mx: Mx, changes: dict[str, str], expected: str) -> None:
    fields = {
        "mx_version": "0.5.0",
        "mx_source_type": "0",
        "model_name": "deepseek-ai/DeepSeek-V3",
        "backend_framework": "1",
        "tensor_parallel_size": "8",
        "pipeline_parallel_size": "1",
        "expert_parallel_size": "0",
        "dtype": "bfloat16",
        **changes,
    }
    options = [word for name, value in fields.items() for word in ("--field", f"{name}={value}")]
    assert mx("hash", "--scheme", "modelexpress", *options).ok().out == f"{expected}\n"


def test_X05_no_heavy_package_is_imported(mx: Mx, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    result = mx("hash", tmp_path, env={"PYTHONPROFILEIMPORTTIME": "1"}).ok()
    imported = {line.rpartition("|")[2].strip().partition(".")[0] for line in result.err.splitlines()}
    assert imported & {"torch", "numpy", "nixl", "botocore", "google", "pydantic", "rich"} == set()


def test_the_cache_is_named_where_it_is_used(mx: Mx, tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "m")
    line = re.compile(r"cache .* free\)")
    used = mx("hash", tmp_path / "m", "--diff", tmp_path / "m").ok().err.splitlines()
    assert line.match(used[0])
    assert sum(bool(line.match(row)) for row in used) == 1
    snapshot = mx("prefetch", tmp_path / "m").ok().out.strip()
    assert line.match(mx("hash", snapshot, "--kind", "origin").ok().err)
    for arguments in ([tmp_path / "m" / "config.json"], [tmp_path / "m", "--no-content"], [f"hf://org/name@{COMMIT}"]):
        assert not line.search(mx("hash", *arguments).ok().err)


def test_content_without_content_is_refused(mx: Mx, tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "m")
    assert "--no-content" in refusal(mx, 2, tmp_path / "m", "--no-content", "--kind", "content")
