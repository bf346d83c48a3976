"""The header of a safetensors file, and what stands where one should be.

    8 bytes      N, little endian, at most 100,000,000
    N bytes      JSON object: name -> {dtype, shape, data_offsets}, and `__metadata__` (text -> text)
    the rest     the tensors' bytes, without holes or overlaps, to the last byte of the file

Format: README and `safetensors/src/tensor.rs` of huggingface/safetensors. Everything refused is an IntegrityError that
names the file and the cause. Entries are read and checked one by one, so that a hostile header ends the work where it
lies, in memory bounded by its own length.
"""

from __future__ import annotations

import json
import re
from json.decoder import scanstring  # type: ignore[attr-defined]
from typing import Any, NamedTuple

from mx_cli.base import units
from mx_cli.base.errors import IntegrityError

MAX_HEADER = 100_000_000
SNIFF_BYTES = 1024
MAX_ENTRY = 64 << 10
MAX_METADATA = 1_000_000

BITS = {
    "BOOL": 8, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "U8": 8, "I8": 8,
    "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32,
    "C64": 64, "F64": 64, "I64": 64, "U64": 64,
}  # fmt: skip

_MOST_BITS = 8 * (2**63 - 1)

_NUMBER = "(?:0|[1-9][0-9]{0,18})"
_USUAL = re.compile(
    r'"(?!__metadata__")([^"\\\x00-\x1f]*)": ?\{"dtype": ?"([A-Z0-9_]+)", ?'
    rf'"shape": ?\[({_NUMBER}(?:, ?{_NUMBER}){{0,99}})?\], ?"data_offsets": ?\[({_NUMBER}), ?({_NUMBER})\]\}}'
)
"""A tensor as writers write it, read at once: any other JSON is read piece by piece."""
_SPACES = " \t\n\r"
_SPACE = re.compile(r"[ \t\n\r]*")
_PICKLES = (b"\x02", b"\x03", b"\x04", b"\x05")
_LFS = re.compile(rb"version https://git-lfs\.github\.com/spec/v\d+\s+oid \S+\s+size (\d+)")
# The last two are what git-lfs was called before.
_LFS_STARTS = (b"version https://git-lfs", b"version https://hawser", b"version http://git-media")
_OTHER_POINTERS = {b"# xet version": "Xet pointer", b"/annex/objects/": "git-annex pointer"}
_JSON_ERROR = re.compile(rb'\{\s*"(error|errors|message|detail)"\s*:')
_XML_ERROR = re.compile(rb"<error[\s>]")
_JSON_TEXT = rb':[ ]*"([^"]{1,80})'
_TITLE = rb"<title>([^<]{1,80})"
_CODE = rb"<code>([^<]{1,80})"
_TEXT_FILES = (".md", ".html", ".htm", ".txt", ".xml", ".svg", ".rst", ".xhtml", ".json", ".jsonl")
_MAGIC = (
    (b"PK\x03\x04", "a zip archive (a PyTorch .bin or .pt under another name)"),
    *((b"\x80" + version, "a Python pickle (a PyTorch .bin or .pt under another name)") for version in _PICKLES),
    (b"GGUF", "a GGUF file"),
    (b"\x89HDF", "an HDF5 file"),
    (b"\x93NUMPY", "a NumPy file"),
    (b"\x1f\x8b\x08", "gzip data"),
    (b"BZh", "bzip2 data"),
    (b"\xfd7zXZ\x00", "xz data"),
    (b"\x28\xb5\x2f\xfd", "zstd data"),
    (b"\x04\x22\x4d\x18", "lz4 data"),
    (b"7z\xbc\xaf\x27\x1c", "a 7z archive"),
)
# As a length, eight of these characters are far beyond any header.
_TEXT = re.compile(rb"[\t\n\r\x20-\x7e]{8}")
_TORCH_FILES = (".pt", ".pth", ".ckpt")
_TORCH_BIN = re.compile(r"(^|/)(pytorch_model|adapter_model)[^/]*\.bin$")


class Tensor(NamedTuple):
    """One tensor of a file. `start` and `end` are offsets in the file, not in its data section."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


class Header(NamedTuple):
    """The tensors in the order of their bytes (empty ones before what starts at the same place), and free text."""

    tensors: tuple[Tensor, ...]
    metadata: dict[str, str]
    data_start: int
    file_size: int


def sniff(first: bytes) -> str | None:
    """What a payload is when it can't be part of a model: a pointer, an error page, an error document; else None.

    `first` are the first SNIFF_BYTES bytes or more. Only a pointer is certain for every kind of file: see check_payload.
    """
    pointer = _LFS.match(first)
    if pointer:
        return f"git-lfs pointer, not weights (real size {units.size(int(pointer[1][:18]))})"
    if pointer_kind := _pointer(first):
        return f"{pointer_kind}, not weights"
    text = _text(first)
    if text.startswith((b"<!doctype html", b"<html", b"<head")) or (text.startswith(b"<?xml") and b"<html" in text):
        return f"an HTML page{_named(_TITLE, first)}"
    if text.startswith((b"<?xml", b"<error")) and _XML_ERROR.search(text):
        return f"an XML error document of an object store{_named(_CODE, first)}"
    if _JSON_ERROR.match(text):
        return f"a JSON error document{_named(_JSON_TEXT, first)}"
    return None


def _text(first: bytes) -> bytes:
    return first[:SNIFF_BYTES].removeprefix(b"\xef\xbb\xbf").lstrip().lower()


def _pointer(first: bytes) -> str | None:
    """What kind of pointer a payload is: the name of another file, which the tool that made it was not asked for."""
    text = _text(first)
    if text.startswith(_LFS_STARTS):
        return "git-lfs pointer"
    return next((kind for start, kind in _OTHER_POINTERS.items() if text.startswith(start)), None)


def instead_of_json(first: bytes) -> str | None:
    """The same where any JSON document may stand."""
    found = sniff(first)
    return None if found and found.startswith("a JSON") else found


def check_payload(name: str, first: bytes, size: int) -> None:
    """Refuse a file whose first bytes show that it isn't what its name says (IntegrityError).

    A cheap test for every file of a checkpoint, given its first min(SNIFF_BYTES, size) bytes or more; parse_header is
    the full one for safetensors, json_strict.parse for JSON.
    """
    lowered = name.lower()
    if lowered.endswith(".safetensors"):
        header_length(first, size, name)
        return
    found = sniff(first)
    if found and (_pointer(first) or not lowered.endswith(_TEXT_FILES)):
        raise _refusal(name, found)
    if lowered.endswith(".json") and (other := instead_of_json(first)):
        raise _refusal(name, other)
    torch_file = lowered.endswith(_TORCH_FILES) or _TORCH_BIN.search(lowered)
    if size == 0 and (torch_file or lowered.endswith(".gguf")):
        raise _refusal(name, "empty file, expected weights")
    zeros = _zeros(first)
    if zeros and torch_file:
        raise _refusal(name, zeros)
    if lowered.endswith(".gguf") and first[:4] != b"GGUF":
        if zeros:
            raise _refusal(name, zeros)
        raise _unknown(name, f"starts with {first[:4]!r}, expected b'GGUF'")


def header_length(first: bytes, file_size: int, name: str) -> int:
    """How many bytes parse_header needs: 8 + N. `first`: the first min(SNIFF_BYTES, file_size) bytes or more."""
    if file_size == 0:
        raise _refusal(name, "empty file, expected a safetensors header")
    if file_size < 8 or len(first) < 8:
        raise _refusal(name, f"{file_size} bytes, expected a safetensors header of at least 8")
    length = int.from_bytes(first[:8], "little")
    if zeros := _zeros(first):
        raise _refusal(name, zeros)
    if length > MAX_HEADER:
        if impostor := _impostor(first):
            raise _refusal(name, impostor)
        raise _unknown(name, f"header of {length} bytes, expected at most {MAX_HEADER}")
    if length < 2:
        raise _refusal(name, f"header of {length} bytes, expected at least 2")
    if 8 + length > file_size:
        cause = f"truncated: {file_size} bytes, expected {8 + length} for the header alone"
        raise _refusal(name, _impostor(first) or cause)
    return 8 + length


def parse_header(first: bytes, file_size: int, name: str) -> Header:
    """The tensor table of the file `name` of `file_size` bytes; `first` holds at least header_length() bytes of it."""
    needed = header_length(first[:SNIFF_BYTES], file_size, name)
    if len(first) < needed:
        raise ValueError(f"{len(first)} bytes given, {needed} needed")
    try:
        text = str(first[8:needed], "utf-8")
    except UnicodeDecodeError as bad:
        raise _refusal(name, f"header isn't UTF-8 (byte {8 + bad.start})") from None
    reader = _Reader(text, name, needed, file_size)
    tensors, metadata = reader.read()
    tensors.sort(key=lambda tensor: (tensor.start, tensor.end, tensor.name))
    _check_layout(tensors, needed, file_size, name)
    return Header(tuple(tensors), metadata, needed, file_size)


def _check_layout(tensors: list[Tensor], data_start: int, file_size: int, name: str) -> None:
    at = data_start
    for tensor in tensors:
        if tensor.start > at:
            raise _refusal(name, f"hole of {tensor.start - at} bytes before tensor {tensor.name!r}")
        if tensor.start < at:
            raise _refusal(name, f"tensor {tensor.name!r} overlaps the one before it by {at - tensor.start} bytes")
        at = tensor.end
    if at > file_size:
        raise _refusal(name, f"truncated: {file_size} bytes, expected {at}")
    if at < file_size:
        raise _refusal(name, f"{file_size - at} bytes after the last tensor: {file_size} bytes, expected {at}")


class _Reader:
    """One pass over a header's JSON."""

    def __init__(self, text: str, name: str, data_start: int, file_size: int) -> None:
        self.text, self.name, self.data_start, self.file_size = text, name, data_start, file_size
        self.decode = json.JSONDecoder(object_pairs_hook=_unique).raw_decode

    def read(self) -> tuple[list[Tensor], dict[str, str]]:
        tensors: list[Tensor] = []
        metadata: dict[str, str] = {}
        seen: set[str] = set()
        pos = self._open(self._space(0), "header")
        while self.text[pos : pos + 1] != "}":
            usual = _USUAL.match(self.text, pos)
            key, pos = (usual[1], usual.end()) if usual else self._key(pos)
            if key in seen:
                raise _refusal(self.name, f"{_shown(key)} stands twice in the header")
            seen.add(key)
            if usual:
                _, dtype, dims, start, stop = usual.groups()
                shape = [int(dim) for dim in dims.split(",")] if dims else []
                tensors.append(self._checked(key, dtype, shape, int(start), int(stop)))
            elif key == "__metadata__":
                metadata, pos = self._metadata(pos)
            else:
                tensor, pos = self._tensor(key, pos)
                tensors.append(tensor)
            pos = self._next(pos)
        if self._space(pos + 1) < len(self.text):
            raise _refusal(self.name, f"unexpected {self.text[self._space(pos + 1)]!r} after the header's JSON")
        return tensors, metadata

    def _tensor(self, key: str, pos: int) -> tuple[Tensor, int]:
        entry, end = self._entry(key, pos)
        dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
        if type(dtype) is not str:
            raise _refusal(self.name, f"tensor {_shown(key)}: no dtype")
        if type(shape) is not list or not all(type(dim) is int and dim >= 0 for dim in shape):
            raise _refusal(self.name, f"tensor {_shown(key)}: shape {_shown(shape)}, expected whole numbers")
        if type(offsets) is not list or [type(offset) for offset in offsets] != [int, int]:
            raise self._not_offsets(key, offsets)
        return self._checked(key, dtype, shape, *offsets), end

    def _entry(self, key: str, pos: int) -> tuple[dict[str, Any], int]:
        close = self.text.find("}", pos, pos + MAX_ENTRY)
        # An entry ends at the first brace, unless it has fields that we don't know; the slices bound what is decoded.
        for stop in (close + 1, pos + MAX_ENTRY) if close >= 0 else ():
            try:
                entry, length = self.decode(self.text[pos:stop])
            except (ValueError, RecursionError):
                continue
            if type(entry) is dict:
                return entry, pos + length
            break
        raise _refusal(
            self.name, f"tensor {_shown(key)}: expected one object with each field once, shorter than {MAX_ENTRY}"
        )

    def _checked(self, key: str, dtype: str, shape: list[int], start: int, stop: int) -> Tensor:
        if not 0 <= start <= stop:
            raise self._not_offsets(key, [start, stop])
        if self.data_start + stop > self.file_size:
            cause = f"truncated: {self.file_size} bytes, expected at least {self.data_start + stop}"
            raise _refusal(self.name, f"{cause} for tensor {_shown(key)}")
        self._check_size(key, dtype, shape, stop - start)
        return Tensor(key, dtype, tuple(shape), self.data_start + start, self.data_start + stop)

    def _not_offsets(self, key: str, offsets: Any) -> IntegrityError:
        return _refusal(self.name, f"tensor {_shown(key)}: data_offsets {_shown(offsets)}, expected [start, end]")

    def _check_size(self, key: str, dtype: str, shape: list[int], size: int) -> None:
        bits = BITS.get(dtype)
        if bits is None:
            raise _unknown(self.name, f"tensor {_shown(key)}: unknown dtype {_shown(dtype)}")
        count = 1
        for dim in shape:
            # The strides of a tensor without elements are those of one that has them.
            count *= max(dim, 1)
            if count * bits > _MOST_BITS:
                refuse = _unknown if 0 in shape else _refusal
                raise refuse(self.name, f"tensor {_shown(key)}: {dtype} {_shown(shape)} is more than 64 bits can count")
        if (0 if 0 in shape else count * bits) != 8 * size:
            raise _refusal(self.name, f"tensor {_shown(key)}: {size} bytes, not what {dtype} {_shown(shape)} takes")

    def _metadata(self, pos: int) -> tuple[dict[str, str], int]:
        metadata: dict[str, str] = {}
        pos = self._open(pos, "__metadata__")
        while self.text[pos : pos + 1] != "}":
            key, pos = self._key(pos)
            if self.text[pos : pos + 1] != '"':
                raise _refusal(self.name, f"__metadata__ {_shown(key)}: expected text")
            if key in metadata:
                raise _refusal(self.name, f"__metadata__ {_shown(key)} stands twice")
            metadata[key], pos = self._string(pos)
            if len(metadata) > MAX_METADATA:
                raise _refusal(self.name, f"more than {MAX_METADATA} entries in __metadata__")
            pos = self._next(pos)
        return metadata, pos + 1

    def _open(self, pos: int, what: str) -> int:
        if self.text[pos : pos + 1] != "{":
            seen = self.text[pos : pos + 1]
            raise _refusal(self.name, f"{what} starts with {seen!r}, expected a JSON object")
        return self._space(pos + 1)

    def _key(self, pos: int) -> tuple[str, int]:
        if self.text[pos : pos + 1] != '"':
            raise _refusal(self.name, f"header isn't JSON at byte {self._byte(pos)}: expected a name")
        key, pos = self._string(pos)
        pos = self._space(pos)
        if self.text[pos : pos + 1] != ":":
            raise _refusal(self.name, f"header isn't JSON at byte {self._byte(pos)}: expected a colon")
        return key, self._space(pos + 1)

    def _next(self, pos: int) -> int:
        """Past a comma to the next key, or to the closing brace."""
        if self.text.startswith(',"', pos):
            return pos + 1
        pos = self._space(pos)
        char = self.text[pos : pos + 1]
        if char == "}":
            return pos
        after = self._space(pos + 1)
        if char != "," or self.text[after : after + 1] != '"':
            raise _refusal(
                self.name, f"header isn't JSON at byte {self._byte(pos)}: expected a comma and a name, or a brace"
            )
        return after

    def _string(self, pos: int) -> tuple[str, int]:
        try:
            value, end = scanstring(self.text, pos + 1, True)
            if not value.isascii():
                value.encode()
        except ValueError:
            raise _refusal(self.name, f"header isn't JSON at byte {self._byte(pos)}: broken text") from None
        return value, end

    def _space(self, pos: int) -> int:
        if self.text[pos : pos + 1] not in _SPACES:
            return pos
        match = _SPACE.match(self.text, pos)
        return match.end() if match else pos

    def _byte(self, pos: int) -> int:
        return 8 + len(self.text[:pos].encode())


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any] | None:
    entry = dict(pairs)
    return entry if len(entry) == len(pairs) else None


def _impostor(first: bytes) -> str | None:
    """What stands in the place of a safetensors file whose length field makes no sense."""
    found = sniff(first)
    if found:
        return found
    kind = next((kind for start, kind in _MAGIC if first.startswith(start)), None)
    if first[257:262] == b"ustar":
        kind = "a tar archive"
    if kind is None and _TEXT.match(first):
        kind = f"text that starts with {first[:24]!r}"
    return f"{kind}, expected safetensors" if kind else None


def _zeros(first: bytes) -> str | None:
    return "starts with zeros: preallocated and never filled" if first and not any(first[:SNIFF_BYTES]) else None


def _named(pattern: bytes, first: bytes) -> str:
    match = re.search(pattern, first[:SNIFF_BYTES], re.IGNORECASE)
    return f" ({match[1].decode('utf-8', 'replace').strip()})" if match else ""


def _shown(value: Any) -> str:
    text = ascii(value) if not isinstance(value, str) or not value.isprintable() else repr(value)
    return text if len(text) <= 100 else text[:97] + "..."


def _unknown(name: str, cause: str) -> IntegrityError:
    """The refusal of what shows no damage: it may be newer than this mx, or of somebody's own."""
    error = _refusal(name, cause)
    error.unknown = True
    return error


def _refusal(name: str, cause: str) -> IntegrityError:
    return IntegrityError(f"not a usable file ({name}: {cause})")
