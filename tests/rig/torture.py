"""Odd and broken safetensors files: name -> (bytes, verdict), the verdict being load, reject or either.

Those of NOT_BYTES aren't bytes (a 100 MB file, a directory, a dangling link): `write` makes them.
"""

from __future__ import annotations

import json
import random
import struct
from pathlib import Path
from typing import Any

_RANDOM = random.Random(0)
DATA = bytes(_RANDOM.randrange(1, 255) for _ in range(4096))


def st(header: Any, data: bytes = b"", pad: bytes = b"", length: int | None = None) -> bytes:
    """A file with that header, true or not."""
    text = (
        header if isinstance(header, bytes) else json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    )
    text += pad
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def entry(dtype: str, shape: list[Any], start: int, end: int, **extra: Any) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end], **extra}


def _aligned(header: dict[str, Any]) -> bytes:
    return b" " * (-len(json.dumps(header, separators=(",", ":"))) % 8)


def _valid() -> dict[str, bytes]:
    plain = {"a": entry("F32", [4], 0, 16), "b": entry("BF16", [2, 4], 16, 32)}
    cases = {
        "v01-no-tensors": st({}),
        "v02-metadata-only": st({"__metadata__": {"format": "pt"}}),
        "v03-plain": st(plain, DATA[:32], _aligned(plain)),
        "v07-only-zero-size": st({"z": entry("F32", [0], 0, 0)}),
        "v08-scalar-rank0": st({"s": entry("F32", [], 0, 4)}, DATA[:4]),
        "v12-header-padded-4k-spaces": st(plain, DATA[:32], b" " * 4000),
        "v14-F4-even": st({"a": entry("F4", [2, 8], 0, 8)}, DATA[:8]),
        "v15-F4-zero-size": st({"a": entry("F4", [0, 8], 0, 0)}),
        "v21-big-dims-zero": st({"a": entry("F32", [0, 2**31], 0, 0)}),
    }
    header = {"a": entry("F32", [4], 0, 16), "z": entry("F32", [0, 3], 16, 16), "b": entry("F32", [4], 16, 32)}
    cases["v04-zero-size-between"] = st(header, DATA[:32], _aligned(header))
    header = {"b": entry("F32", [4], 0, 16), "z": entry("F32", [0], 0, 0), "c": entry("F32", [1], 16, 20)}
    cases["v05-zero-size-same-start-listed-later"] = st(header, DATA[:20], _aligned(header))
    header = {"a": entry("F32", [4], 0, 16), "z": entry("F32", [0, 7], 16, 16)}
    cases["v06-zero-size-at-eof"] = st(header, DATA[:16], _aligned(header))
    header = {"b": entry("BF16", [2, 4], 16, 32), "a": entry("F32", [4], 0, 16)}
    cases["v09-header-not-in-offset-order"] = st(header, DATA[:32], _aligned(header))
    cases["v10-header-unaligned"] = st(plain, DATA[:32], _aligned(plain) + b" " * 3)
    header = {"u": entry("U8", [3], 0, 3), "f": entry("F32", [4], 3, 19), "i": entry("I64", [2], 19, 35)}
    cases["v11-odd-u8-then-f32-misaligned"] = st(header, DATA[:35], _aligned(header))
    for dtype in ("F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"):
        cases[f"v13-{dtype}"] = st({"a": entry(dtype, [4, 4], 0, 16)}, DATA[:16])
    for dtype, width in (
        ("BOOL", 1),
        ("I8", 1),
        ("I16", 2),
        ("U16", 2),
        ("U32", 4),
        ("U64", 8),
        ("C64", 8),
        ("F64", 8),
    ):
        cases[f"v17-{dtype}"] = st({"a": entry(dtype, [2], 0, 2 * width)}, DATA[: 2 * width])
    names = ["", "模型/层.0😀", 'a b"\\\n', "x" * 3000, "../../etc/passwd"]
    cases["v18-strange-names"] = st({name: entry("U8", [1], i, i + 1) for i, name in enumerate(names)}, DATA[:5])
    many = 100_000
    cases["v19-100k-tensors"] = st({f"l.{i}": entry("U8", [1], i, i + 1) for i in range(many)}, (DATA * 25)[:many])
    metadata = {"__metadata__": {"k": "v" * 1_000_000}, "a": entry("U8", [4], 0, 4)}
    cases["v20-metadata-1MB"] = st(metadata, DATA[:4])
    return cases


def _payloads() -> dict[str, bytes]:
    pointer = (
        "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2\n"
    )
    error = '<?xml version="1.0" encoding="UTF-8"?><Error><Code>AccessDenied</Code></Error>'
    page = "<!DOCTYPE html>\n<html><head><title>403 Forbidden</title></head><body>Forbidden</body></html>\n"
    return {
        "m01-empty-file": b"",
        "m02-7-bytes": b"\1\0\0\0\0\0\0",
        "m06-lfs-pointer": pointer.encode() + b"size 4997779448\n",
        "m07-html": page.encode(),
        "m08-s3-xml-error": error.encode(),
        "m09-json-error-body": b'{"error":"Repository not found"}',
        "m33-zip-renamed-bin": b"PK\3\4" + DATA[:200],
        "m34-all-zero": b"\0" * 4096,
    }


def _layouts() -> dict[str, bytes]:
    plain = {"a": entry("F32", [4], 0, 16), "b": entry("BF16", [2, 4], 16, 32)}
    first = entry("F32", [4], 0, 16)
    return {
        "m03-header-len-past-eof": st(plain, DATA[:32], length=10_000),
        "m04-header-len-2^63": st(plain, DATA[:32], length=1 << 63),
        "m10-truncated-data": st(plain, DATA[:20], _aligned(plain)),
        "m11-trailing-bytes": st(plain, DATA[:48], _aligned(plain)),
        "m12-hole": st({"a": first, "b": entry("F32", [4], 32, 48)}, DATA[:48]),
        "m13-overlap": st({"a": first, "b": entry("F32", [4], 8, 24)}, DATA[:24]),
        "m14-tied-same-offsets": st({"a": first, "b": first}, DATA[:16]),
        "m15-offsets-reversed": st({"a": entry("F32", [4], 16, 0)}, DATA[:16]),
        "m16-offsets-negative": st({"a": entry("F32", [4], -16, 0)}, DATA[:16]),
        "m17-shape-vs-bytes": st({"a": entry("F32", [5], 0, 16)}, DATA[:16]),
        "m18-shape-overflow": st({"a": entry("F32", [2**40, 2**40], 0, 16)}, DATA[:16]),
        "m19-shape-negative": st({"a": entry("F32", [-2, -2], 0, 16)}, DATA[:16]),
        "m30-hole-at-start": st({"a": entry("F32", [4], 8, 24)}, DATA[:24]),
        "m32-F4-half-byte": st({"a": entry("F4", [3], 0, 1)}, DATA[:1]),
        "m42-huge-int-offset": st({"a": entry("U8", [1], 0, 99999999999999999999999999)}, DATA[:1]),
    }


def _json() -> dict[str, bytes]:
    plain = {"a": entry("F32", [4], 0, 16), "b": entry("BF16", [2, 4], 16, 32)}
    one = b'"a":{"dtype":"F32","shape":[4],"data_offsets":[0,16]}'
    other = b'"a":{"dtype":"F32","shape":[4],"data_offsets":[16,32]}'
    byte = b'":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}'
    deep = b'{"__metadata__":' + b'{"a":' * 5000 + b"1" + b"}" * 5000 + b"}"
    return {
        "m20-duplicate-key": st(b"{" + one + b"," + other + b"}", DATA[:32]),
        "m21-duplicate-key-same-entry": st(b"{" + one + b"," + one + b"}", DATA[:16]),
        "m22-unknown-dtype": st({"a": entry("F3", [4], 0, 4)}, DATA[:4]),
        "m23-header-not-utf8": st(b'{"\xff' + byte, DATA[:1]),
        "m24-header-NUL-padded": st(plain, DATA[:32], b"\0" * 5),
        "m26-header-is-array": st(b"[1,2,3]"),
        "m27-missing-dtype": st({"a": {"shape": [4], "data_offsets": [0, 16]}}, DATA[:16]),
        "m29-metadata-not-strings": st({"__metadata__": {"n": 1}, "a": entry("U8", [1], 0, 1)}, DATA[:1]),
        "m36-tensor-named-__metadata__": st({"__metadata__": entry("U8", [1], 0, 1)}, DATA[:1]),
        "m37-float-offsets": st(b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0.0,1.0]}}', DATA[:1]),
        "m38-float-shape": st(b'{"a":{"dtype":"U8","shape":[1.0],"data_offsets":[0,1]}}', DATA[:1]),
        "m41-deep-json": st(deep),
        "m43-data-offsets-3": st(b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1,2]}}', DATA[:1]),
        "m44-header-json-then-garbage": st(json.dumps(plain).encode() + b"xx", DATA[:32]),
    }


def _either() -> dict[str, bytes]:
    plain = {"a": entry("F32", [4], 0, 16), "b": entry("BF16", [2, 4], 16, 32)}
    named = b'{"a\\u0000b":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}'
    return {
        "v16-F6_E2M3": st({"a": entry("F6_E2M3", [8], 0, 6)}, DATA[:6]),
        "m25-header-leading-spaces": st(b"   " + json.dumps(plain).encode(), DATA[:32]),
        "m28-extra-field": st({"a": entry("F32", [4], 0, 16, strides=[1])}, DATA[:16]),
        "m31-F4-odd-last-dim": st({"a": entry("F4", [2, 3], 0, 3)}, DATA[:3]),
        "m35-NUL-in-name": st(named, DATA[:1]),
    }


CASES: dict[str, tuple[bytes, str]] = {
    **{name: (data, "load") for name, data in _valid().items()},
    **{name: (data, "reject") for group in (_payloads(), _layouts(), _json()) for name, data in group.items()},
    **{name: (data, "either") for name, data in _either().items()},
}


NOT_BYTES = ("m05-header-100MB+1", "m39-directory", "m40-dangling-symlink")
"""All to be refused."""


def write(folder: Path) -> dict[str, tuple[Path, str]]:
    """Every case as a file, with the three that are not bytes; takes 110 MB."""
    written = {}
    for name, (data, verdict) in CASES.items():
        path = folder / f"{name}.safetensors"
        path.write_bytes(data)
        written[name] = path, verdict
    big, directory, link = others = [folder / f"{name}.safetensors" for name in NOT_BYTES]
    with big.open("wb") as file:
        file.write(struct.pack("<Q", 100_000_002) + b"{}" + b" " * 100_000_000)
    directory.mkdir()
    link.symlink_to("/nonexistent/blob")
    return written | {name: (path, "reject") for name, path in zip(NOT_BYTES, others, strict=True)}
