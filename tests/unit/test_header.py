"""The safetensors header reader: 76 odd files, the causes it names, and that hostile input stays cheap."""

from __future__ import annotations

import bz2
import json
import lzma
import struct
import time
import tracemalloc
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from mx_cli.base.errors import IntegrityError
from mx_cli.model import header
from tests.rig import torture


def parse(data: bytes, name: str = "model.safetensors") -> header.Header:
    return header.parse_header(data, len(data), name)


def refusal(data: bytes) -> str:
    with pytest.raises(IntegrityError) as caught:
        parse(data)
    assert "model.safetensors" in caught.value.what
    return caught.value.what


@pytest.mark.parametrize("case", torture.CASES)
def test_T03_verdict(case: str) -> None:
    data, verdict = torture.CASES[case]
    if verdict == "reject":
        refusal(data)
        return
    parsed = parse(data)
    length = struct.unpack("<Q", data[:8])[0]
    wanted = json.loads(data[8 : 8 + length])
    wanted.pop("__metadata__", None)
    assert {t.name for t in parsed.tensors} == set(wanted)
    for tensor in parsed.tensors:
        said = wanted[tensor.name]
        assert (tensor.dtype, list(tensor.shape)) == (said["dtype"], said["shape"])
        assert [tensor.start - 8 - length, tensor.end - 8 - length] == said["data_offsets"]
    assert [t.start for t in parsed.tensors] == sorted(t.start for t in parsed.tensors)


def test_all_76_cases_are_here() -> None:
    """Three are no bytes to parse (a 100 MB file, a directory, a dangling link): disk, http, hash and peer have them too."""
    assert len(torture.CASES) == 76 - len(torture.NOT_BYTES)
    assert {name[:3] for name in torture.NOT_BYTES} == {"m05", "m39", "m40"}


@pytest.mark.parametrize(
    ("data", "cause"),
    [
        (torture.CASES["m06-lfs-pointer"][0], "git-lfs pointer, not weights (real size 4.7 GiB)"),
        (torture.CASES["m07-html"][0], "an HTML page (403 Forbidden)"),
        (torture.CASES["m08-s3-xml-error"][0], "an XML error document of an object store (AccessDenied)"),
        (torture.CASES["m09-json-error-body"][0], "a JSON error document (Repository not found)"),
        (torture.CASES["m33-zip-renamed-bin"][0], "a zip archive"),
        (b'<?xml version="1.0"?><Error xmlns="x"><Code>NoSuchKey</Code></Error>', "of an object store (NoSuchKey)"),
        (b"\x80\x02}q\x00X\x05\x00\x00\x00", "a Python pickle"),
        (b"model.safetensors".ljust(257, b"\0") + b"ustar\0", "a tar archive, expected safetensors"),
        (b"\x93NUMPY\x01\0", "a NumPy file, expected safetensors"),
        (bz2.compress(b"weights"), "bzip2 data, expected safetensors"),
        (lzma.compress(b"weights"), "xz data, expected safetensors"),
        (b"\x28\xb5\x2f\xfd1234", "zstd data, expected safetensors"),
        (b"404: Not Found", "text that starts with b'404: Not Found', expected safetensors"),
        (torture.st({"a": torture.entry("U8", [0, 2**63], 0, 0)}), "more than 64 bits can count"),
        (torture.st({"a": torture.entry("F32", [2**61, 0, 2], 0, 0)}), "more than 64 bits can count"),
        (torture.CASES["m34-all-zero"][0], "preallocated and never filled"),
        (b"", "empty file"),
        (b"1234567", "7 bytes"),
        (torture.CASES["m10-truncated-data"][0], "truncated"),
        (torture.CASES["m11-trailing-bytes"][0], "16 bytes after the last tensor"),
        (torture.CASES["m12-hole"][0], "hole of 16 bytes before tensor 'b'"),
        (torture.CASES["m13-overlap"][0], "'b' overlaps"),
        (torture.CASES["m20-duplicate-key"][0], "'a' stands twice"),
        (torture.CASES["m22-unknown-dtype"][0], "unknown dtype 'F3'"),
        (struct.pack("<Q", 2**40) + b"{}", "header of 1099511627776 bytes"),
        (torture.st(b'{"\\ud800":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}', b"x"), "broken text"),
        (torture.st(b'{"a":{"dtype":"U8","dtype":"I8","shape":[1],"data_offsets":[0,1]}}', b"x"), "each field once"),
        (torture.st(b'{"a":{"dtype":"U8","shape":[true],"data_offsets":[0,1]}}', b"x"), "shape [True]"),
    ],
)
def test_T03_P33_cause_is_named(data: bytes, cause: str) -> None:
    assert cause in refusal(data)


@pytest.mark.parametrize(
    "text",
    [
        b'{"__metadata__":' + b"[" * 30_000_000,
        b'{"a":' + b'{"a":' * 6_000_000,
        b'{"a":{"x":{},"y":[' + b"1," * 15_000_000 + b"1]}}",
        b'{"a":{"dtype":"U8","shape":[' + b"9" * 30_000 + b'],"data_offsets":[0,1]}}',
        b'{"a":{"dtype":"U8","shape":[' + b"4611686018427387904," * 3000 + b'1],"data_offsets":[0,1]}}',
    ],
    ids=["deep-list", "deep-object", "long-list", "long-integer", "many-dimensions"],
)
def test_T03_hostile_header_is_cheap(text: bytes) -> None:
    data = torture.st(text, b"x")
    tracemalloc.start()
    began = time.process_time()
    refusal(data)
    spent = time.process_time() - began
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert spent < 2
    assert peak < 3 * len(data) + (1 << 20)


def test_100k_tensors_take_no_time() -> None:
    data, _ = torture.CASES["v19-100k-tensors"]
    began = time.process_time()
    assert len(parse(data).tensors) == 100_000
    assert time.process_time() - began < 2.5


def test_only_the_header_is_needed() -> None:
    data, _ = torture.CASES["v03-plain"]
    needed = header.header_length(data[:64], len(data), "m")
    assert header.parse_header(data[:needed], len(data), "m") == parse(data)
    with pytest.raises(ValueError, match="needed"):
        header.parse_header(data[: needed - 1], len(data), "m")


@settings(max_examples=300, deadline=None)
@given(some.binary(max_size=300), some.integers(0, 400))
def test_any_bytes_are_parsed_or_refused(noise: bytes, cut: int) -> None:
    good, _ = torture.CASES["v11-odd-u8-then-f32-misaligned"]
    for data in (noise, good[:cut] + noise, torture.st(noise), torture.st(b"{" + noise + b"}")):
        try:
            parse(data)
        except IntegrityError:
            continue


@settings(max_examples=100, deadline=None)
@given(some.dictionaries(some.text(max_size=8), some.lists(some.integers(0, 3), max_size=3), max_size=6))
def test_what_a_writer_writes_is_read_back(shapes: dict[str, list[int]]) -> None:
    shapes.pop("__metadata__", None)
    table, at = {}, 0
    for name, shape in shapes.items():
        count = 1
        for dim in shape:
            count *= dim
        table[name] = torture.entry("U16", shape, at, at + 2 * count)
        at += 2 * count
    data = torture.st(json.dumps(table).encode(), bytes(at))
    if any(data[:1024]):
        assert {t.name: list(t.shape) for t in parse(data).tensors} == shapes


ENTRIES = [
    torture.entry("U16", [2, 3], 0, 12), torture.entry("U16", [2, 3], 0, 11), torture.entry("F4", [3], 0, 1),
    torture.entry("X9", [1], 0, 1), torture.entry("U8", [0, 2**61], 0, 0), torture.entry("U8", [2**63, 2], 0, 4),
    torture.entry("U8", [], 0, 1), torture.entry("U8", [-1], 0, 1), torture.entry("U8", [4], 4, 0),
    torture.entry("U8", [40], 0, 40), torture.entry("U8", [10**25], 0, 4), torture.entry("U8", [4], 1, 5),
]  # fmt: skip


@pytest.mark.parametrize("entry", ENTRIES, ids=str)
@pytest.mark.parametrize("name", ["w", "__metadata__", "", "ü"])
def test_no_spelling_changes_what_is_read_or_refused(name: str, entry: dict[str, Any]) -> None:
    def verdict(text: str) -> Any:
        try:
            return parse(torture.st(text.encode().ljust(400), bytes(range(12)))).tensors
        except IntegrityError as error:
            return str(error)

    usual = json.dumps({name: entry}, separators=(",", ":"), ensure_ascii=False)
    others = (json.dumps({name: entry}), json.dumps({name: entry}, indent=1))
    assert {verdict(other) for other in others} == {verdict(usual)}


@pytest.mark.parametrize(
    ("name", "data", "refused"),
    [
        ("README.md", b"<html><div align=center>", False),
        ("config.json", b"<!doctype html><title>Sign in</title>", True),
        ("config.json", b'{"error": "x"}', False),
        ("tokenizer.model", b'{"error": "x"}', True),
        ("README.md", torture.CASES["m06-lfs-pointer"][0], True),
        ("tokenizer.json", torture.CASES["m06-lfs-pointer"][0], True),
        ("a/model.gguf", b"GGUF\3\0\0\0", False),
        ("a/model.gguf", b"\0" * 100, True),
        ("pytorch_model-00001-of-00002.bin", b"\0" * 100, True),
        ("openvino_model.bin", b"\0" * 100, False),
        ("consolidated.00.pth", b"", True),
        ("model.safetensors", torture.CASES["v03-plain"][0], False),
        ("model.safetensors", b"\0" * 100, True),
        ("empty.txt", b"", False),
    ],
)
def test_P33_payload_of_any_file(name: str, data: bytes, refused: bool) -> None:
    if not refused:
        header.check_payload(name, data, len(data))
        return
    with pytest.raises(IntegrityError, match=name.rpartition("/")[2]):
        header.check_payload(name, data, len(data))
