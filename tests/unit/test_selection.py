"""Which files of a listing make one usable model (P-30, P-31, P-32, P-34)."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from mx_cli.base.errors import IntegrityError, NotFound
from mx_cli.model import paths, selection, shard_index
from mx_cli.model.selection import Selection

MB = 1 << 20
SMALL = ("config.json", "tokenizer.json", "README.md")
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
INDEX = "model.safetensors.index.json"


def index(*shards: str) -> bytes:
    return json.dumps({"metadata": {}, "weight_map": {f"t{i}": shard for i, shard in enumerate(shards)}}).encode()


def select(*names: str, indexes: dict[str, bytes] | None = None, size: int = MB, **options: Any) -> Selection:
    listing = [(name, size) for name in names]
    patterns = {key: options[key] for key in ("include", "exclude") if key in options}
    needed = selection.index_files(names, **patterns)
    given = indexes or {}
    read = {name: selection.read_index(name, given[name]) for name in needed if name in given}
    return selection.select(listing, read, **options)


def test_P30_one_weight_set_and_all_small_files() -> None:
    extra = ("pytorch_model.bin", "original/model.safetensors", "metal/model.bin", "consolidated.safetensors")
    chosen = select(*SMALL, INDEX, *SHARDS, *extra, "original/params.json", indexes={INDEX: index(*SHARDS)})
    assert chosen.files == tuple(sorted((*SMALL, INDEX, *SHARDS, "original/params.json")))
    assert {path for path, _, _ in chosen.left_out} == set(extra)
    assert {reason for _, _, reason in chosen.left_out} == {f"not in {INDEX}", "weights of another folder"}
    assert chosen.bytes_saved == 4 * MB
    assert chosen.bytes_total == 7 * MB
    assert [path for path, _ in chosen.weights] == list(SHARDS)


@pytest.mark.parametrize(
    ("names", "weights"),
    [
        (["pytorch_model.bin"], ["pytorch_model.bin"]),
        (["consolidated.00.pth", "params.json"], ["consolidated.00.pth"]),
        (["consolidated.safetensors"], ["consolidated.safetensors"]),
        (["original/consolidated.00.pth"], ["original/consolidated.00.pth"]),
        (["model.safetensors", "pytorch_model.bin", "model.gguf"], ["model.safetensors"]),
        (["model.safetensors", "model.fp16.safetensors"], ["model.safetensors"]),
        (["model.fp16.safetensors"], ["model.fp16.safetensors"]),
        (["a-Q4_K_M.gguf", "a-Q8_0.gguf"], ["a-Q4_K_M.gguf", "a-Q8_0.gguf"]),
        (["Q4/a.gguf", "Q8/a.gguf"], ["Q4/a.gguf", "Q8/a.gguf"]),
        (["model.onnx", "model.h5"], ["model.h5", "model.onnx"]),
        (["onnx/model.onnx", "pytorch_model.bin", "tf_model.h5"], ["pytorch_model.bin"]),
        (["model.safetensors", "optimizer.pt", "training_args.bin"], ["model.safetensors"]),
        (["model.safetensors", "checkpoint-100/model.safetensors"], ["model.safetensors"]),
        (["weights.xyz"], []),
    ],
)
def test_P30_other_layouts_get_their_weights(names: list[str], weights: list[str]) -> None:
    chosen = select(*SMALL, *names)
    assert [path for path, _ in chosen.weights] == weights
    assert set(weights) <= set(chosen.files)
    assert {path for path in chosen.files if selection.is_weight(path)} == set(weights)
    assert set(SMALL) <= set(chosen.files)


def test_P30_pipeline_takes_each_part() -> None:
    names = (
        "model_index.json",
        "unet/config.json",
        "unet/diffusion_pytorch_model.safetensors",
        "big_single.safetensors",
    )
    more = (
        "unet/diffusion_pytorch_model.fp16.safetensors",
        "unet/diffusion_pytorch_model.bin",
        "vae/model.safetensors",
    )
    encoder = ("text_encoder/model-1.safetensors", "text_encoder/model-2.safetensors", f"text_encoder/{INDEX}")
    indexes = {f"text_encoder/{INDEX}": index("model-1.safetensors", "model-2.safetensors")}
    chosen = select(*names, *more, *encoder, indexes=indexes)
    assert chosen.weights == (
        ("text_encoder/model-1.safetensors", "text_encoder/"),
        ("text_encoder/model-2.safetensors", "text_encoder/"),
        ("unet/diffusion_pytorch_model.safetensors", "unet/"),
        ("vae/model.safetensors", "vae/"),
    )
    assert {path for path, _, _ in chosen.left_out} == {"big_single.safetensors", *more[:2]}


def test_P30_sentence_transformers_keep_their_dense_layers() -> None:
    chosen = select("modules.json", "model.safetensors", "2_Dense/model.safetensors", "onnx/model.onnx")
    assert chosen.weights == (("2_Dense/model.safetensors", "2_Dense/"), ("model.safetensors", ""))


def test_large_files_of_unknown_kind_are_left_out() -> None:
    chosen = selection.select([("model.safetensors", 5 << 30), ("demo.mp4", 300 << 20), ("vocab.json", 1)])
    assert chosen.files == ("model.safetensors", "vocab.json")
    assert chosen.left_out == (("demo.mp4", 300 << 20, "large, and not known as weights"),)


def test_include_exclude_all() -> None:
    names = (*SMALL, "model.safetensors", "pytorch_model.bin", "onnx/model.onnx", "onnx/deep/x.onnx")
    assert select(*names, everything=True).files == tuple(sorted(names))
    assert select(*names, include=["*.onnx"]).files == ("onnx/deep/x.onnx", "onnx/model.onnx")
    assert select(*names, include=["onnx/"]).files == ("onnx/deep/x.onnx", "onnx/model.onnx")
    assert select(*names, include=["onnx/*"], exclude=["x.onnx"]).files == ("onnx/model.onnx",)
    assert select(*names, include=["/config.json", "*.bin"]).files == ("config.json", "pytorch_model.bin")
    assert select(*names, everything=True, exclude=["onnx/", "*.bin"]).files == tuple(
        sorted((*SMALL, "model.safetensors"))
    )
    without = select(*names, exclude=["*.safetensors"])
    assert without.weights == (("pytorch_model.bin", ""),)
    assert ("model.safetensors", MB, "excluded") in without.left_out
    with pytest.raises(NotFound):
        select(*names, include=["*.nothing"])
    with pytest.raises(NotFound):
        select()


def test_exclude_of_an_indexed_set_falls_to_the_next() -> None:
    names = (INDEX, *SHARDS, "pytorch_model.bin")
    chosen = select(*names, indexes={INDEX: index(*SHARDS)}, exclude=["model-*"])
    assert chosen.weights == (("pytorch_model.bin", ""),)
    part = select(*names, indexes={INDEX: index(*SHARDS)}, exclude=[SHARDS[0]])
    assert part.weights == ((SHARDS[1], ""),)


def test_P31_missing_shards_are_listed() -> None:
    shards = [*SHARDS, "model-00003-of-00003.safetensors", "deep/model.safetensors"]
    for options in ({}, {"include": ["*"]}, {"everything": True}):
        with pytest.raises(IntegrityError, match=r"model-00003-of-00003.safetensors") as caught:
            select(INDEX, *SHARDS, indexes={INDEX: index(*shards)}, **options)
        assert "deep/model.safetensors" in caught.value.what
        assert "2 of 4 shards" in caught.value.what


@pytest.mark.parametrize(
    ("names", "missing"),
    [
        (SHARDS[:1], SHARDS[1]),
        (("m-00002-of-00003.gguf", "m-00003-of-00003.gguf"), "m-00001-of-00003.gguf"),
        (("deep/x-00000-of-00002.bin",), "deep/x-00001-of-00002.bin"),
        (("a-Q4-00001-of-00001.gguf", "a-Q8-00001-of-00002.gguf"), "a-Q8-00002-of-00002.gguf"),
    ],
)
def test_P31_names_say_how_many_shards_there_are(names: tuple[str, ...], missing: str) -> None:
    """Without an index too: a model of which a shard is missing loads, and answers nonsense."""
    with pytest.raises(IntegrityError, match=re.escape(missing)) as caught:
        select("config.json", *names)
    assert "--include" in caught.value.hint
    assert select("config.json", *names, include=[names[0]]).files
    assert select("config.json", *names, missing).weights
    # Who leaves one out knows it.
    assert select("config.json", *names, missing, exclude=[missing]).files
    # Names of the weights that were not chosen say nothing.
    assert select("model.safetensors", "model.bin-00001-of-00002.bin").files


def test_P32_only_indexed_shards() -> None:
    strays = ("model.safetensors", *(f"model-0000{i}-of-00004.safetensors" for i in range(1, 5)))
    chosen = select(INDEX, *SHARDS, *strays, indexes={INDEX: index(*SHARDS)})
    assert [path for path, _ in chosen.weights] == list(SHARDS)
    assert {path for path, _, _ in chosen.left_out} == set(strays)


def test_index_names_shards_in_its_own_folder_or_below() -> None:
    chosen = select(f"sub/{INDEX}", "sub/w/a.safetensors", indexes={f"sub/{INDEX}": index("w/a.safetensors")})
    assert chosen.weights == (("sub/w/a.safetensors", ""),)


def test_the_main_index_decides() -> None:
    names = ("consolidated.safetensors.index.json", "c1.safetensors", INDEX, *SHARDS)
    read = {INDEX: index(*SHARDS), "consolidated.safetensors.index.json": index("c1.safetensors")}
    assert [path for path, _ in select(*names, indexes=read).weights] == list(SHARDS)
    assert [found.name for found in select(*names, indexes=read).indexes] == [INDEX]


def test_an_index_of_a_variant_comes_after_the_plain_file() -> None:
    shards = ("model.fp32-00001-of-00002.safetensors", "model.fp32-00002-of-00002.safetensors")
    names, indexes = (
        (*shards, "model.safetensors.index.fp32.json"),
        {"model.safetensors.index.fp32.json": index(*shards)},
    )
    assert [path for path, _ in select(*names, "model.safetensors", indexes=indexes).weights] == ["model.safetensors"]
    assert [path for path, _ in select(*names, "model.safetensors").weights] == ["model.safetensors"]
    alone = select(*names, "consolidated.safetensors", indexes=indexes)
    assert [path for path, _ in alone.weights] == list(shards)
    assert [found.name for found in alone.indexes] == ["model.safetensors.index.fp32.json"]


def test_index_files_are_only_those_that_decide() -> None:
    names = [
        INDEX,
        f"original/{INDEX}",
        "pytorch_model.bin.index.json",
        "tokenizer.json",
        "a.safetensors.index.fp16.json",
    ]
    assert selection.index_files(names) == ["a.safetensors.index.fp16.json", INDEX, "pytorch_model.bin.index.json"]
    assert selection.index_files(["original/x.safetensors", f"original/{INDEX}"]) == [f"original/{INDEX}"]
    assert selection.index_files(["x.safetensors", f"original/{INDEX}"]) == []
    assert selection.index_files([INDEX, f"original/{INDEX}"], include=["original/"]) == [f"original/{INDEX}"]


@pytest.mark.parametrize(
    "shard",
    ["../../etc/passwd", "/etc/passwd", "..%2f..%2fx", "a\\..\\b", "http://127.0.0.1:1/x", "sub/../../x", "a\0b", "", "..",
     "a//b", "./a", "a/", "x" * 256, "C:x", 7, None, ["a"], {"a": 1}, "%2E%2E/x", "a\nb"],
)  # fmt: skip
def test_P34_index_names_outside(shard: Any) -> None:
    data = json.dumps({"weight_map": {"good": SHARDS[0], "evil": shard}}).encode()
    with pytest.raises(IntegrityError, match="evil"):
        selection.read_index(INDEX, data)


@pytest.mark.parametrize("data", [b"", b"[]", b"{}", b'{"weight_map": {}}', b'{"weight_map": []}', b"<html>", b"\xff"])
def test_P34_not_an_index(data: bytes) -> None:
    with pytest.raises(IntegrityError, match=INDEX):
        selection.read_index(INDEX, data)


def test_an_index_that_points_to_the_wrong_shard_is_named() -> None:
    read = selection.read_index(INDEX, index("a", "b"))
    shard_index.check_homes(read, [("a", ["t0", "more"]), ("b", ["t1"])])
    with pytest.raises(IntegrityError, match="'t1' is not in b"):
        shard_index.check_homes(read, [("a", ["t0", "t1"]), ("b", [])])


@pytest.mark.parametrize(
    "path", ["../x", "a/../b", "/x", "a\0", "", "a//b", "a/", "./a", "é" * 128, "\udcff", "a/" * 1500 + "a"]
)
def test_hostile_keys(path: str) -> None:
    with pytest.raises(IntegrityError):
        paths.check_paths(["fine", path])


def test_names_that_are_fine() -> None:
    paths.check_paths(["a", "a b", "..a", "a..", "b/c?d#e", "b/%2f", "b\\c", "é/模型", "x" * 255, ".gitattributes"])


def test_a_name_twice_or_file_and_folder() -> None:
    with pytest.raises(IntegrityError, match="twice"):
        paths.check_paths(["a", "a"])
    with pytest.raises(IntegrityError, match="both a file and a folder"):
        paths.check_paths(["a", "a/b/c"])


def test_collisions_of_case_and_unicode() -> None:
    assert paths.collisions(["Config.json", "config.json", "x"]) == [("Config.json", "config.json")]
    assert paths.collisions(["\u00e9", "e\u0301"]) == [("e\u0301", "\u00e9")]
    assert paths.collisions(["stra\u00dfe", "STRASSE"]) == [("STRASSE", "stra\u00dfe")]
    assert paths.collisions(["a", "b"]) == []


_names = some.sampled_from([
    "config.json", "model.safetensors", "a/model.safetensors", "pytorch_model.bin", "x.gguf", "b/x.gguf", "model_index.json",
    "consolidated.safetensors", "modules.json", "1_Pooling/model.safetensors", "optimizer.pt", "m.pth", "c/d/e.onnx",
])  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(some.sets(_names, min_size=1))
def test_every_file_is_chosen_or_explained(names: set[str]) -> None:
    chosen = select(*names)
    left = {path for path, _, _ in chosen.left_out}
    assert left | set(chosen.files) == names
    assert not left & set(chosen.files)
    assert list(chosen.files) == sorted(chosen.files)
    assert any(map(selection.is_weight, names)) == bool(chosen.weights)
    again = select(*chosen.files)
    assert again.files == chosen.files
    assert again.weights == chosen.weights
