"""`mx_cli.load_model`: models made on the spot, filled from other processes, caches and disks, as transformers would."""

from __future__ import annotations

import functools
import json
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import mx_cli
from mx_cli.base.errors import Incompatible, IntegrityError, MissingCapability, MxError, UsageError
from tests.rig import capabilities, tiny_models
from tests.rig.serving import Hosts, slow
from tests.rig.tensor_source import TensorSource, tensor_source
from tests.support import ROOT, capability, clean_env

if not capabilities.have("torch"):
    pytest.skip("missing: torch", allow_module_level=True)
if not capabilities.have("safetensors"):
    pytest.skip("missing: safetensors", allow_module_level=True)
if not capabilities.have("transformers"):
    pytest.skip("missing: transformers", allow_module_level=True)

import safetensors.torch
import torch
import transformers

KINDS = tiny_models.KINDS


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    found = tmp_path_factory.mktemp("models")
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith(("MX_", "HF_"))]:
            patch.delenv(name)
        patch.setenv("HOME", str(found))
        patch.setenv("XDG_RUNTIME_DIR", str(found / "run"))
        yield found


@pytest.fixture(scope="module")
def checkpoints(place: Path) -> dict[str, Path]:
    return {kind: tiny_models.make(place / kind, kind) for kind in KINDS}


@pytest.fixture(scope="module")
def source(place: Path, checkpoints: dict[str, Path]) -> Iterator[TensorSource]:
    """Another process, in which transformers has loaded one of each."""
    with tensor_source(place, *(f"pretrained:{path}" for path in checkpoints.values()), "pipeline") as found:
        yield found


def settings(place: Path) -> dict[str, Any]:
    return {"cache_dir": str(place / "cache"), "discovery": f"dir:{place / 'peers'}"}


Load = Callable[..., Any]


@pytest.fixture(params=["peer", "cache", "directory", "stream"])
def load(request: pytest.FixtureRequest, place: Path, checkpoints: dict[str, Path], source: TensorSource) -> Load:
    """`load(kind, **options)` fills a model of that kind by one of the routes."""

    def from_there(kind: str, **options: Any) -> Any:
        path = checkpoints[kind]
        if request.param == "directory":
            return mx_cli.load_model(path, path, **options)
        if request.param == "peer":
            peer = source.peers[f"pretrained:{path}"]
            options |= {"peers": [peer["address"]], "routes": ["peer"], **settings(place)}
            return mx_cli.load_model(path, peer["identities"]["content"], **options)
        mx_cli.pull(path.as_uri(), **settings(place))
        options |= {"routes": [request.param], **settings(place)}
        return mx_cli.load_model(path, path.as_uri(), **options)

    return from_there


def assert_same_model(found: Any, expected: Any) -> None:
    assert type(found) is type(expected)
    assert not found.training
    ours, theirs = found.state_dict(keep_vars=True), expected.state_dict(keep_vars=True)
    assert {name: tensor.dtype for name, tensor in ours.items()} == {n: t.dtype for n, t in theirs.items()}
    for name, tensor in theirs.items():
        assert torch.equal(ours[name], tensor), name
        for other in theirs:
            assert (ours[name] is ours[other]) == (theirs[name] is theirs[other]), (name, other)
    hidden, expected_hidden = dict(found.named_buffers()), dict(expected.named_buffers())
    assert hidden.keys() == expected_hidden.keys()
    assert all(torch.equal(hidden[name], buffer) for name, buffer in expected_hidden.items())
    assert torch.equal(tiny_models.logits(found), tiny_models.logits(expected))


# --- the same as from_pretrained ---------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_as_transformers_loads_it(kind: str, load: Load, checkpoints: dict[str, Path]) -> None:
    assert_same_model(load(kind), tiny_models.pretrained(checkpoints[kind]))


def test_another_dtype(load: Load, checkpoints: dict[str, Path]) -> None:
    expected = transformers.LlamaForCausalLM.from_pretrained(checkpoints["tied"], dtype=torch.float32)
    assert_same_model(load("tied", dtype=torch.float32), expected)


def test_the_generation_config_is_that_of_the_directory(place: Path, checkpoints: dict[str, Path]) -> None:
    path = tiny_models.make(place / "generates", "untied")
    (path / "generation_config.json").write_text(json.dumps({"max_new_tokens": 7, "eos_token_id": 5}))
    found = mx_cli.load_model(path, path)
    assert (found.generation_config.max_new_tokens, found.generation_config.eos_token_id) == (7, 5)


def test_a_config_instead_of_a_directory(checkpoints: dict[str, Path]) -> None:
    path = checkpoints["tied"]
    config = transformers.AutoConfig.from_pretrained(path)
    before = config.to_dict()
    found = mx_cli.load_model(config, path, torch.device("cpu"), dtype="float32")
    assert config.to_dict() == before
    assert found.dtype == torch.float32
    assert_same_model(mx_cli.load_model(path / "config.json", str(path)), tiny_models.pretrained(path))


def test_a_class_of_ones_own_choice(checkpoints: dict[str, Path]) -> None:
    """The model without its head: names without the prefix, and one tensor too many."""
    path = checkpoints["untied"]
    found = mx_cli.load_model(path, path, model_class=transformers.LlamaModel, allow_extra=True)
    expected = transformers.LlamaModel.from_pretrained(path)
    words = torch.arange(3, 19)[None]
    assert torch.equal(found(words).last_hidden_state, expected(words).last_hidden_state)
    with pytest.raises(Incompatible, match=r"lm_head\.weight"):
        mx_cli.load_model(path, path, model_class=transformers.LlamaModel)


# --- dtypes that differ ------------------------------------------------------------------------------------------


def saved_as(path: Path, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Path:
    """The checkpoint with other tensors in its file."""
    file = path / "model.safetensors"
    safetensors.torch.save_file(change(safetensors.torch.load(file.read_bytes())), file, {"format": "pt"})
    return path


def test_floats_that_differ_from_the_config_are_converted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "mx")
    path = saved_as(tiny_models.make(tmp_path, "tied"), lambda found: {n: t.float() * 1.001 for n, t in found.items()})
    found = mx_cli.load_model(path, path)
    assert found.dtype == torch.bfloat16
    assert_same_model(found, tiny_models.pretrained(path))
    assert "of another dtype at the source: model.embed_tokens.weight, " in caplog.text


def test_a_config_without_a_dtype_follows_the_source(tmp_path: Path) -> None:
    path = tiny_models.make(tmp_path, "untied")
    config = json.loads((path / "config.json").read_bytes())
    del config["dtype"]
    (path / "config.json").write_text(json.dumps(config))
    found = mx_cli.load_model(path, path)
    assert found.dtype == torch.bfloat16
    assert_same_model(found, tiny_models.pretrained(path))


def test_other_dtypes_are_not_converted(tmp_path: Path) -> None:
    change = lambda found: {**found, "model.norm.weight": found["model.norm.weight"].to(torch.int32)}  # noqa: E731
    path = saved_as(tiny_models.make(tmp_path, "untied"), change)
    with pytest.raises(Incompatible, match=r"model\.norm\.weight: BF16\[32\] here, I32\[32\] there"):
        mx_cli.load_model(path, path)


def test_several_at_once(checkpoints: dict[str, Path]) -> None:
    """transformers has one default dtype, and one switch for initial values, for the whole process."""
    wishes = [("tied", torch.float32), ("untied", torch.bfloat16), ("experts", torch.float32), ("grouped", None)] * 2
    with ThreadPoolExecutor(len(wishes)) as pool:
        paths = [checkpoints[kind] for kind, _ in wishes]
        found = list(pool.map(lambda path, wish: mx_cli.load_model(path, path, dtype=wish[1]), paths, wishes))
    for model, path, (_, dtype) in zip(found, paths, wishes, strict=True):
        assert_same_model(model, type(model).from_pretrained(path, dtype=dtype))
    assert torch.get_default_dtype() == torch.float32
    fresh = transformers.LlamaForCausalLM(tiny_models.config("untied"))
    assert 0 < float(fresh.lm_head.weight.detach().std()) < 0.1


# --- what does not agree -----------------------------------------------------------------------------------------


def test_missing_and_extra_tensors_are_named(tmp_path: Path) -> None:
    def change(found: dict[str, Any]) -> dict[str, Any]:
        del found["model.norm.weight"]
        return {**found, "model.stray": torch.ones(3)}

    path = saved_as(tiny_models.make(tmp_path, "untied"), change)
    with pytest.raises(Incompatible, match=r"lacks 1 \(model\.norm\.weight\).*1 more \(model\.stray\)"):
        mx_cli.load_model(path, path)
    with pytest.raises(Incompatible, match=r"lacks 1 \(model\.norm\.weight\)"):
        mx_cli.load_model(path, path, allow_extra=True)


def test_missing_tensors_get_the_values_of_a_new_model(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "mx")

    def change(found: dict[str, Any]) -> dict[str, Any]:
        del found["model.norm.weight"]
        return found

    path = saved_as(tiny_models.make(tmp_path, "untied"), change)
    found = mx_cli.load_model(path, path, allow_missing=True)
    assert torch.equal(found.model.norm.weight, torch.ones(32, dtype=torch.bfloat16))
    assert_same_model(found, tiny_models.pretrained(path))
    assert "not at the source: as a new model has them: model.norm.weight" in caplog.text


def test_missing_experts_are_named(tmp_path: Path) -> None:
    def change(found: dict[str, Any]) -> dict[str, Any]:
        return {name: tensor for name, tensor in found.items() if "layers.1" not in name or "experts" not in name}

    path = saved_as(tiny_models.make(tmp_path, "experts"), change)
    with pytest.raises(Incompatible, match=r"lacks 2 \(model\.layers\.1\.mlp\.experts\.down_proj, "):
        mx_cli.load_model(path, path)


def test_what_the_class_itself_ignores_is_left(tmp_path: Path) -> None:
    old = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    path = saved_as(tiny_models.make(tmp_path, "untied"), lambda found: {**found, **old})
    assert_same_model(mx_cli.load_model(path, path), tiny_models.pretrained(path))


def test_tied_names_that_the_source_has_both(tmp_path: Path) -> None:
    """Equal bytes are what is wanted; others would make one name lose."""
    head, embedding = "lm_head.weight", "model.embed_tokens.weight"
    path = saved_as(tiny_models.make(tmp_path / "m", "tied"), lambda found: {**found, head: found[embedding].clone()})
    expected = tiny_models.pretrained(path)
    assert_same_model(mx_cli.load_model(path, path), expected)
    cached = {"cache_dir": str(tmp_path / "cache"), "discovery": f"dir:{tmp_path / 'peers'}"}
    assert_same_model(mx_cli.load_model(path, path.as_uri(), **cached), expected)
    assert_same_model(
        mx_cli.load_model(path, path, dtype=torch.float32),
        transformers.LlamaForCausalLM.from_pretrained(path, dtype=torch.float32),
    )
    saved_as(path, lambda found: {**found, head: found[head] + 1})
    cached["cache_dir"] = str(tmp_path / "another")
    for model in (path, path.as_uri()):
        with pytest.raises(Incompatible, match="share memory here, and differ at the source"):
            mx_cli.load_model(path, model, **cached)


def test_shapes_that_differ_are_named(tmp_path: Path) -> None:
    path = saved_as(tiny_models.make(tmp_path, "untied"), lambda found: {**found, "lm_head.weight": torch.ones(3, 32)})
    with pytest.raises(Incompatible, match=r"lm_head\.weight: BF16\[96, 32\] here, F32\[3, 32\] there"):
        mx_cli.load_model(path, path)


# --- what cannot be made -----------------------------------------------------------------------------------------


def test_models_that_cannot_be_made_are_refused_before_anything_moves(tmp_path: Path) -> None:
    path = tiny_models.make(tmp_path / "m", "untied")
    config = json.loads((path / "config.json").read_bytes())
    nowhere = "mx1c-" + "0" * 32

    def refused(change: dict[str, Any], match: str, **options: Any) -> None:
        (path / "config.json").write_text(json.dumps({**config, **change}))
        with pytest.raises(UsageError, match=match):
            mx_cli.load_model(path, nowhere, **options)

    refused({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "quantised")
    refused({"architectures": None}, "no class of transformers")
    refused({"architectures": ["Nothing"]}, "no class of transformers .*Nothing")
    refused({"model_type": "nothing-known"}, "transformers cannot use")
    refused({"model_type": "own", "auto_map": {"AutoConfig": "configuration_own.Own"}}, "transformers cannot use")
    refused({}, "not a device", device="tpu")
    refused({}, "not a dtype of weights: 'float31'", dtype="float31")
    refused({}, "not a dtype of weights: torch.int8", dtype=torch.int8)
    with pytest.raises(UsageError, match=r"no config\.json"):
        mx_cli.load_model(tmp_path / "absent", nowhere)
    with pytest.raises(UsageError, match="there already"):
        mx_cli.load_model(torch.nn.Linear(2, 2), nowhere)
    with pytest.raises(UsageError, match="not a model: 7"):
        mx_cli.load_model(path, 7)
    with pytest.raises(UsageError, match="neither"):
        mx_cli.load_model(7, nowhere)
    with pytest.raises(UsageError, match="not settings: nonsense"):
        mx_cli.load_model(lambda: torch.nn.Linear(2, 2), nowhere, nonsense=1)


WITHOUT = """
import sys, mx_cli
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "transformers":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Absent())
try:
    mx_cli.load_model(sys.argv[1], sys.argv[1])
except mx_cli.base.errors.MissingCapability as error:
    print(error.what, "|", error.hint)
"""


def test_without_transformers(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    path = str(checkpoints["tied"])
    env = clean_env(tmp_path, tmp_path / "cache", {"PYTHONPATH": ROOT})
    done = subprocess.run([sys.executable, "-c", WITHOUT, path], env=env, capture_output=True, text=True, timeout=60)
    assert done.stdout == ("the package transformers (5 or newer) is missing | pip install 'transformers>=5'\n"), (
        done.stderr
    )
    assert MissingCapability.code == 20


# --- failures in the middle --------------------------------------------------------------------------------------


def large() -> Any:
    """A module of 64 MiB, as the recipe `filled:64` has its tensors."""
    made = torch.nn.Module()
    made.register_buffer("w", torch.zeros(64 << 20, dtype=torch.uint8))
    made.small = torch.nn.Parameter(torch.zeros(4))
    return made


@pytest.fixture
def dying(place: Path) -> Iterator[TensorSource]:
    with tensor_source(place, "filled:64") as found:
        yield found


def test_a_peer_that_dies_in_the_middle(place: Path, dying: TensorSource, tmp_path: Path) -> None:
    """No model comes out; with another route all of it comes from there."""
    peer = dying.peers["filled:64"]
    (tmp_path / "m").mkdir()
    whole = {"w": torch.ones(64 << 20, dtype=torch.uint8), "small": torch.ones(4)}
    safetensors.torch.save_file(whole, tmp_path / "m" / "model.safetensors")
    results: list[Any] = []

    def read(address: str, **options: Any) -> None:
        wish = {"peers": [address], "path": "socket", **settings(place), **options}
        try:
            results.append(mx_cli.load_model(large, peer["identities"]["content"], **wish))
        except MxError as error:
            results.append(error)

    with slow(peer["address"], 16 << 20) as one, slow(peer["address"], 16 << 20) as other:
        readers = [
            threading.Thread(target=read, args=[one.address], kwargs={"routes": ["peer"]}),
            threading.Thread(target=read, args=[other.address], kwargs={"origin": (tmp_path / "m").as_uri()}),
        ]
        for index, (relay, reader) in enumerate(zip((one, other), readers, strict=True)):
            reader.start()
            relay.wait_full()
            if index:
                dying.kill()
        for relay, reader in zip((one, other), readers, strict=True):
            relay.go()
            reader.join(60)
            assert not reader.is_alive()
    [error] = [one for one in results if isinstance(one, MxError)]
    [model] = [one for one in results if not isinstance(one, MxError)]
    assert peer["address"].rpartition(":")[0] in str(error)
    assert torch.equal(model.w, whole["w"])
    assert torch.equal(model.small, whole["small"])


def test_damage_at_the_source(place: Path, dying: TensorSource) -> None:
    peer = dying.peers["filled:64"]
    dying.tell("flip", "filled:64", name="w", at=5)
    wish = {"peers": [peer["address"]], "routes": ["peer"], **settings(place)}
    with pytest.raises(IntegrityError, match="block"):
        mx_cli.load_model(large, peer["identities"]["content"], **wish)


def test_tensors_that_are_left_without_memory_are_named(checkpoints: dict[str, Path]) -> None:
    def meta() -> Any:
        with torch.device("meta"):
            return torch.nn.Linear(3, 3)

    with pytest.raises(UsageError, match="'weight' is on the device meta"):
        mx_cli.load_model(meta, checkpoints["tied"])

    def half_meta() -> Any:
        made = transformers.LlamaForCausalLM(tiny_models.config("untied")).to(torch.bfloat16)
        made.model.rotary_emb.register_buffer("inv_freq", torch.ones(4, device="meta"), persistent=False)
        return made

    with pytest.raises(UsageError, match=r"device meta, without bytes: model\.rotary_emb\.inv_freq"):
        mx_cli.load_model(half_meta, checkpoints["untied"])


# --- pipelines: mappings of modules ------------------------------------------------------------------------------


def makers() -> dict[str, Callable[[], Any]]:
    return {name: lambda size=size: tiny_models.part(size, 0.0) for name, (size, _) in tiny_models.PARTS.items()}


def assert_pipeline(found: Any) -> None:
    expected = tiny_models.pipeline()
    assert found.keys() == expected.keys()
    for name, module in expected.items():
        for own, tensor in module.state_dict().items():
            assert torch.equal(found[name].state_dict()[own], tensor), (name, own)


@pytest.fixture(scope="module")
def pipeline(place: Path) -> Path:
    return tiny_models.save_pipeline(place / "pipeline")


def test_a_pipeline_by_its_parts(pipeline: Path, place: Path, source: TensorSource) -> None:
    assert_pipeline(mx_cli.load_model(makers(), pipeline))
    assert_pipeline(mx_cli.load_model(makers(), pipeline.as_uri(), **settings(place)))
    assert_pipeline(mx_cli.load_model(makers(), pipeline.as_uri(), routes=["cache"], **settings(place)))
    peer = source.peers["pipeline"]
    wish = {"peers": [peer["address"]], "routes": ["peer"], **settings(place)}
    assert_pipeline(mx_cli.load_model(makers(), peer["identities"]["content"], **wish))


def test_a_pipeline_into_modules_that_are_there(pipeline: Path, place: Path, source: TensorSource) -> None:
    peer = source.peers["pipeline"]
    wish = {"peers": [peer["address"]], "routes": ["peer"], **settings(place)}
    for model, options in ((peer["identities"]["content"], wish), (pipeline.as_uri(), settings(place))):
        target = {name: make() for name, make in makers().items()}
        mx_cli.pull_into(target, model, **options)
        assert_pipeline(target)


def test_one_part_of_a_pipeline(pipeline: Path, place: Path) -> None:
    one = {"vae": makers()["vae"]}
    found = mx_cli.load_model(one, pipeline, allow_extra=True)
    assert torch.equal(found["vae"][0].weight, torch.full((4, 4), 2.5))
    with pytest.raises(Incompatible, match=r"more \(transformer\.0\.bias, "):
        mx_cli.load_model(one, pipeline)


def test_tensors_of_a_pipeline_have_the_names_of_their_folders(pipeline: Path, place: Path) -> None:
    expected = {
        f"{part}/{name}": tensor
        for part, module in tiny_models.pipeline().items()
        for name, tensor in module.state_dict().items()
    }
    pulled = mx_cli.pull(pipeline.as_uri(), **settings(place))
    manifest = next((place / "cache" / "models").rglob("model_index.json")).parent
    for found in (
        pulled,
        mx_cli.load(str(pipeline)),
        mx_cli.load(str(manifest), **settings(place)),
        dict(mx_cli.stream(str(manifest), **settings(place))),
    ):
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    target = {name: torch.zeros_like(tensor) for name, tensor in expected.items()}
    mx_cli.pull_into(target, pipeline.as_uri(), **settings(place))
    assert all(torch.equal(target[name], tensor) for name, tensor in expected.items())


def test_a_pipeline_from_mx_serve(pipeline: Path, hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    served = hosts.serve(pipeline, host="a")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(hosts.runtime))
    wish = {"peers": [served.address], "routes": ["peer"], "cache_dir": str(hosts.cache("b"))}
    assert_pipeline(mx_cli.load_model(makers(), served.content, **wish))


def test_parts_that_are_models_of_transformers(place: Path, checkpoints: dict[str, Path], tmp_path: Path) -> None:
    """A text encoder beside a module of another kind, as pipelines have them; one of them converted."""
    whole = tiny_models.save_pipeline(tmp_path / "whole")
    for name in ("text_encoder", "text_encoder_2"):
        tiny_models.make(whole / name, "experts" if name.endswith("2") else "tied")
    wish = {**makers(), "text_encoder": whole / "text_encoder", "text_encoder_2": whole / "text_encoder_2"}
    for model, options in ((whole, {}), (whole.as_uri(), settings(place))):
        found = mx_cli.load_model(wish, model, **options)
        assert_pipeline({name: found[name] for name in tiny_models.PARTS})
        for name in ("text_encoder", "text_encoder_2"):
            assert_same_model(found[name], tiny_models.pretrained(whole / name))


@capability("diffusers")
def test_a_pipeline_of_diffusers(place: Path, tmp_path: Path) -> None:
    """Its own classes make the parts; what it paints is the same."""
    import diffusers

    blocks = {"block_out_channels": (4, 8), "norm_num_groups": 2}
    coder = {"down_block_types": ["DownEncoderBlock2D"] * 2, "up_block_types": ["UpDecoderBlock2D"] * 2}
    made = {
        "unet": diffusers.UNet2DModel(
            sample_size=8,
            layers_per_block=1,
            down_block_types=["DownBlock2D"] * 2,
            up_block_types=["UpBlock2D"] * 2,
            **blocks,
        ),
        "vae": diffusers.AutoencoderKL(latent_channels=3, **coder, **blocks),
    }
    index = {"_class_name": "Pipeline"}
    for name, module in made.items():
        module.eval().save_pretrained(tmp_path / name)
        index[name] = ["diffusers", type(module).__name__]
    (tmp_path / "model_index.json").write_text(json.dumps(index))

    def again(name: str) -> Any:
        kind = type(made[name])
        return kind.from_config(kind.load_config(tmp_path / name))

    wish = {name: functools.partial(again, name) for name in made}
    with mx_cli.serve(made, **settings(place)) as handle:
        sources = {
            str(tmp_path): {},
            tmp_path.as_uri(): settings(place),
            handle.identities["content"]: {"peers": [handle.address], "routes": ["peer"], **settings(place)},
        }
        for model, options in sources.items():
            found = mx_cli.load_model(wish, model, **options)
            noise = torch.linspace(-1, 1, 3 * 64).reshape(1, 3, 8, 8)
            with torch.no_grad():
                assert torch.equal(found["unet"](noise, 5).sample, made["unet"](noise, 5).sample)
                assert torch.equal(found["vae"].decode(noise).sample, made["vae"].decode(noise).sample)


@capability("gpu")
@pytest.mark.parametrize("kind", ["tied", "untied", "experts"])
def test_on_a_gpu(kind: str, load: Load, checkpoints: dict[str, Path]) -> None:
    found = load(kind, device="cuda")
    assert {tensor.device.type for tensor in (*found.parameters(), *found.buffers())} == {"cuda"}
    expected = tiny_models.pretrained(checkpoints[kind])
    for name, tensor in expected.state_dict().items():
        assert torch.equal(found.state_dict()[name].cpu(), tensor), name
