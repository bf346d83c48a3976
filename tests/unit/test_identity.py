"""Identities: what changes them, what doesn't, and what is said about two that differ (H-04, H-07 to H-12)."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as some

from mx_cli.base import canonical
from mx_cli.base.errors import IntegrityError, UsageError
from mx_cli.model import digest, identity
from mx_cli.model.digest import TensorDigest
from mx_cli.model.identity import Identity
from mx_cli.model.layout import layout
from mx_cli.model.manifest import BLOCK
from mx_cli.model.tables import whole_table
from tests.rig import torture


def checkpoint_file(tensors: dict[str, bytes], pad: int = 0) -> bytes:
    table, at = {}, 0
    for name, data in tensors.items():
        table[name] = torture.entry("U8", [len(data)], at, at + len(data))
        at += len(data)
    return torture.st(table, b"".join(tensors.values()), b" " * pad)


def rows(data: bytes, steps: list[int] | None = None, path: str = "model.safetensors") -> tuple[TensorDigest, ...]:
    taker = digest.digester(path, len(data))
    at, view = 0, memoryview(data)
    for step in steps or []:
        taker.update(view[at : at + step])
        at = min(len(data), at + step)
    taker.update(view[at:])
    return taker.finish()


def blocks(data: bytes) -> tuple[str, ...]:
    pieces = [data[at : at + BLOCK] for at in range(0, len(data), BLOCK)]
    return tuple(xxhash.xxh3_128_hexdigest(piece) for piece in pieces)


BIG = b"".join(hashlib.sha256(str(i).encode()).digest() for i in range(300_000))
TENSORS = {
    "big": BIG,
    "empty": b"",
    "small": b"123",
    "exact": BIG[:BLOCK],
    "two": BIG[7 : 7 + 2 * BLOCK],
}


@pytest.mark.parametrize("step", [1000, BLOCK, BLOCK + 1, 1 << 20, 65537])
def test_digests_do_not_depend_on_the_pieces(step: int) -> None:
    data = checkpoint_file(TENSORS)
    found = rows(data, [step] * (len(data) // step))
    assert {row.name: row.blocks for row in found} == {name: blocks(data) for name, data in TENSORS.items()}
    assert found == rows(data)
    assert all(row.dtype == "U8" and row.shape == (len(TENSORS[row.name]),) for row in found)


@settings(max_examples=100, deadline=None)
@given(
    some.lists(some.integers(1, 40), max_size=40),
    some.dictionaries(some.text(min_size=1, max_size=4), some.binary(max_size=30)),
)
def test_digests_of_small_files_in_any_pieces(steps: list[int], tensors: dict[str, bytes]) -> None:
    tensors.pop("__metadata__", None)
    data = checkpoint_file(tensors)
    assert {row.name: row.blocks for row in rows(data, steps)} == {name: blocks(data) for name, data in tensors.items()}


@pytest.mark.parametrize("case", torture.CASES)
def test_T03_digester_agrees_with_the_header_reader(case: str) -> None:
    data, verdict = torture.CASES[case]
    for steps in (None, [3] * 20, [8, 2000]):
        if verdict == "reject":
            with pytest.raises(IntegrityError):
                rows(data, steps)
        else:
            rows(data, steps)


def test_refused_before_the_data_comes() -> None:
    taker = digest.TensorDigester("m.safetensors", 5 << 30)
    with pytest.raises(IntegrityError, match="git-lfs"):
        taker.update(memoryview(torture.CASES["m06-lfs-pointer"][0] + bytes(2000)))
    taker = digest.TensorDigester("m.safetensors", 5 << 30)
    with pytest.raises(IntegrityError, match="after the last tensor"):
        taker.update(memoryview(torture.CASES["v03-plain"][0] + bytes(2000)))


def test_more_or_fewer_bytes_than_said() -> None:
    data = checkpoint_file({"a": b"x" * 5000})
    taker = digest.TensorDigester("m.safetensors", len(data))
    taker.update(memoryview(data)[:-1])
    with pytest.raises(IntegrityError, match="wrong size"):
        taker.finish()
    for path in ("m.safetensors", "m.gguf"):
        taker = digest.digester(path, 9)
        with pytest.raises(IntegrityError):
            taker.update(memoryview(b"GGUF567890"))


def test_H14_other_weights_are_a_row_for_each_file() -> None:
    data = b"GGUF" + BIG
    found = rows(data, path="Q4/model.gguf")
    assert found == (TensorDigest("Q4/model.gguf", "file", (len(data),), blocks(data)),)
    with pytest.raises(IntegrityError, match="HTML"):
        rows(b"<html>", path="model.gguf")
    with pytest.raises(IntegrityError, match="empty"):
        rows(b"", path="model.gguf")


def content(*files: dict[str, bytes], config: dict[str, Any] | None = None) -> Identity:
    found = {f"m-{i}": rows(checkpoint_file(tensors)) for i, tensors in enumerate(files)}
    table = whole_table(found, dict.fromkeys(found, ""))
    return identity.of_content(table, config)


def test_resharded_and_padded_copies_are_equal() -> None:
    one = content({"a": b"1", "b": BIG, "c": b"3"})
    assert one.id == content({"c": b"3", "a": b"1"}, {"b": BIG}).id
    assert one.id == content({"b": BIG}, {}, {"a": b"1", "c": b"3"}).id
    assert rows(checkpoint_file({"a": b"1"}, pad=7)) == rows(checkpoint_file({"a": b"1"}))
    assert one.id.startswith("mx1c-")
    assert len(one.id) == 5 + 32


def test_H07_same_config_other_weights() -> None:
    config = {"model_type": "llama"}
    changed = BIG[:5_000_000] + b"!" + BIG[5_000_001:]
    base, tuned = content({"a": BIG}, config=config), content({"a": changed}, config=config)
    assert base.id != tuned.id
    assert identity.of_config(config).id == identity.of_config(dict(config)).id
    assert identity.of_config(config).id.startswith("mx1x-")


def test_name_dtype_shape_and_config_count() -> None:
    row = TensorDigest("a", "U8", (4,), ("0" * 32,))
    variants = [
        row,
        row._replace(name="b"),
        row._replace(dtype="I8"),
        row._replace(shape=(2, 2)),
        row._replace(blocks=("1" * 32,)),
    ]
    ids = {identity.of_content([variant], None).id for variant in variants}
    ids |= {identity.of_content([row], {}).id, identity.of_content([row], {"x": 1}).id}
    assert len(ids) == 7


def test_duplicate_tensors_are_named() -> None:
    shard = rows(checkpoint_file({"a": b"1", "b": b"2"}))
    with pytest.raises(IntegrityError, match=r"'a' in one and two; 'b' in one and two"):
        whole_table({"one": shard, "two": shard}, {"one": "", "two": ""})
    assert [row.name for row in whole_table({"one": shard, "two": shard}, {"one": "unet/", "two": "vae/"})] == [
        "unet/a",
        "unet/b",
        "vae/a",
        "vae/b",
    ]


def test_frozen_ids() -> None:
    """A change of one of these is a new scheme (mx2), not a fix."""
    row = TensorDigest("a", "F32", (2, 2), (xxhash.xxh3_128_hexdigest(b"x" * 16),))
    assert canonical.dumps([row.to_json()]).decode() == '[["a","F32",[2,2],["ceb3fbd8af7001ac76ba55acf0be061e"]]]'
    assert identity.of_content([row], {"model_type": "llama"}).id == "mx1c-4cf58f03ad1c2b17892b231b2388731f"
    assert identity.of_origin("hf://a/b", "0" * 40).id == "mx1o-6e7405f4c0cf5e65e430be4d3405cb4f"
    assert (
        identity.of_config({"model_type": "llama", "rope_theta": 10000}).id == "mx1x-86331e70bc7143f9c756399ca1216ee8"
    )
    stage, factors = layout(
        "processed", {"tp": 8, "rank": 3, "engine": "vllm", "engine_version": "0.33.0"}, ["torch=2.9"]
    )
    assert identity.of_origin("hf://a/b", "0" * 40, stage, factors).id == "mx1o-94c481cc0b2c6d2791cd6f0c6f42cedf"


def test_H08_origin_needs_a_revision() -> None:
    first, second = identity.of_origin("hf://a/b", "1" * 40), identity.of_origin("hf://a/b", "2" * 40)
    assert first.id != second.id
    assert first.id.startswith("mx1o-")
    with pytest.raises(UsageError, match="revision"):
        identity.of_origin("hf://a/b", "")


FACTORS: list[tuple[dict[str, Any], list[str]]] = [
    ({"tp": 8}, []),
    ({"tp": 4}, []),
    ({"tp": 8, "pp": 2}, []),
    ({"tp": 8, "ep": 8}, []),
    ({"tp": 8, "dp": 2}, []),
    ({"tp": 8, "rank": 0}, []),
    ({"tp": 8, "rank": 1}, []),
    ({"tp": 8, "dtype": "float16"}, []),
    ({"tp": 8, "quantization": "fp8"}, []),
    ({"tp": 8, "engine": "vllm"}, []),
    ({"tp": 8, "engine": "vllm", "engine_version": "0.33.0"}, []),
    ({"tp": 8, "engine": "vllm", "engine_version": "0.33.1"}, []),
    ({"tp": 8}, ["kv_cache_dtype=fp8"]),
    ({"tp": 8}, ["kv_cache_dtype=auto"]),
    ({"tp": 8}, ["foo=1"]),
    ({}, ["foo=1"]),
]


def test_H10_H11_every_factor_counts() -> None:
    ids = {identity.of_origin("hf://a/b", "1", *layout(None, options, more)).id for options, more in FACTORS}
    ids.add(identity.of_origin("hf://a/b", "1").id)
    ids.add(identity.of_origin("hf://a/b", "1", *layout("processed", {"engine": "v", "engine_version": "1"})).id)
    ids.add(identity.of_origin("hf://a/b", "1", *layout("loaded", {"engine": "v", "engine_version": "1"})).id)
    assert len(ids) == len(FACTORS) + 3


def test_H11_same_layout_in_other_words() -> None:
    assert layout(None, {"tp": 8}) == layout("loaded", {"tp": "8", "pp": 1, "dtype": None}, ["ep=1"])
    assert layout(None, {"dtype": "torch.bfloat16"}) == layout(None, {}, ["dtype=bf16"])
    assert layout(None, {"engine_version": "1"}) == layout(None, {}, ["engine-version=1"])
    assert layout(None, {}) == layout("checkpoint", {}) == ("checkpoint", {})


@pytest.mark.parametrize(
    ("stage", "options", "more", "said"),
    [
        ("checkpoint", {"tp": 8}, [], "--tp given"),
        ("loaded", {}, [], "needs a layout"),
        ("processed", {"tp": 8}, [], "needs --engine and --engine-version"),
        ("baked", {"tp": 8}, [], "unknown stage"),
        (None, {"tp": 0}, [], "1 or more"),
        (None, {"tp": "x"}, [], "1 or more"),
        (None, {"rank": -1}, [], "0 or more"),
        (None, {"tp": 8}, ["tp=4"], "given twice"),
        (None, {}, ["foo=1", "foo=2"], "given twice"),
        (None, {}, ["foo"], "name=value"),
        (None, {}, ["=1"], "name=value"),
        (None, {"dtype": ""}, [], "empty value"),
    ],
)
def test_layout_refusals(stage: str | None, options: dict[str, Any], more: list[str], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        layout(stage, options, more)


def test_H12_the_field_is_named() -> None:
    left = identity.of_config({"a": {"b": [1, {"c": 2}]}, "same": 1, "gone": "x"})
    right = identity.of_config({"a": {"b": [1, {"c": 3}]}, "same": 1, "new": True})
    assert identity.diff(left, right) == [
        ("config.a.b[1].c", 2, 3),
        ("config.gone", "x", None),
        ("config.new", None, True),
    ]
    assert identity.diff(left, left) == []
    assert identity.diff(identity.of_config({"a": 1}), identity.of_config({"a": True})) == [("config.a", 1, True)]


def test_H12_the_tensor_is_named() -> None:
    row = TensorDigest("a", "U8", (4,), ("0" * 32, "1" * 32))
    other = [row._replace(blocks=("0" * 32, "2" * 32)), TensorDigest("b", "U8", (1,), ("3" * 32,))]
    assert identity.diff_tables([row], other) == [
        ("tensors.a.blocks[1]", "1" * 32, "2" * 32),
        ("tensors.b", None, "U8[1]"),
    ]
    assert identity.diff_tables([row], [row._replace(dtype="I8")]) == [("tensors.a", "U8[4]", "I8[4]")]


def test_records_go_out_and_come_back() -> None:
    made = identity.of_content([TensorDigest("a", "U8", (1,), ("0" * 32,))], {"é": 1.5}, *layout(None, {"tp": 2}))
    document = json.loads(json.dumps(made.to_json()))
    assert Identity.from_json(document) == made
    assert document["id"] == made.id
    for broken in ({**document, "config": {}}, {**document, "kind": "x"}, {**document, "layout": None}, [], None):
        with pytest.raises(UsageError):
            Identity.from_json(broken)


def test_kinds_are_compared_strongest_first() -> None:
    row = TensorDigest("a", "U8", (1,), ("0" * 32,))
    contents = [identity.of_content([row], None), identity.of_content([row._replace(name="b")], None)]
    origin, config = identity.of_origin("hf://a/b", "1"), identity.of_config({})
    assert identity.strongest_pair([contents[0], origin], [contents[1], origin]) == (contents[0], contents[1])
    assert identity.strongest_pair([contents[0], config], [origin, config]) == (config, config)
    assert identity.strongest_pair([contents[0]], [origin]) is None


def test_kind_of_a_string() -> None:
    assert identity.kind_of(identity.of_origin("u", "r").id) == "origin"
    for text in ("mx1c-" + "g" * 32, "mx1c-" + "0" * 31, "", "0" * 32, "hf://a/b"):
        assert identity.kind_of(text) is None
