"""The one JSON parser for what others wrote: configs, shard indexes, saved records.

It differs from `json.loads` where two readers could disagree about the meaning:

- text is UTF-8, a byte order mark is fine; UTF-16, stray bytes, NUL and trailing text are errors with their offset
- a key that stands twice in an object, a lone surrogate, a literal of more than 1,000 characters and a nesting deeper
  than 128 are errors that name the key path
- an integer literal means exactly itself; a literal with a fraction or an exponent means the nearest double, and a
  whole double is the integer (`10000.0` == `1e4` == `10000`, `-0.0` == `0`)
- `Infinity`, `-Infinity` and `NaN` become `{"__float__": "Infinity"}` and so on, which is how newer transformers write
  them; a literal beyond the doubles keeps its decimal value: `{"__float__": "1e400"}`

The result holds only what canonical JSON can hold. Time and memory are linear in the input, with no recursion.
"""

from __future__ import annotations

import json
import math
import re
from json.decoder import scanstring  # type: ignore[attr-defined]
from typing import Any

from mx_cli.base.errors import MxError, UsageError
from mx_cli.model import header

MAX_BYTES = 128 << 20
MAX_DEPTH = 128
MAX_LITERAL = 1000
MAX_VALUES = 500_000

_BOM = b"\xef\xbb\xbf"
_SPACES = " \t\n\r"
_SPACE = re.compile(r"[ \t\n\r]*")
_NUMBER = re.compile(r"-?(0|[1-9]\d*)(\.\d+)?([eE][-+]?\d+)?", re.ASCII)
_WORD = re.compile(r"-?[A-Za-z]+", re.ASCII)
_CLOSING = {"{": "}", "[": "]"}
_WORDS: dict[str, Any] = {"true": True, "false": False, "null": None}
_NON_FINITE = ("Infinity", "-Infinity", "NaN")
_SHOWN_KEYS = 6


def parse(data: bytes, name: str, *, error: type[MxError] = UsageError, max_values: int = MAX_VALUES) -> Any:
    """The value of a JSON document; `name` is the file that `error` (raised for everything refused) speaks of."""
    if len(data) > MAX_BYTES:
        raise error(f"not a JSON file that mx reads ({name}: {len(data)} bytes, expected at most {MAX_BYTES})")
    if other := header.instead_of_json(data[: header.SNIFF_BYTES]):
        raise error(f"not a JSON file ({name}: {other})")
    text = _decode(data, name, error)
    plain = _plain(text, max_values)
    return _Document(text, data.startswith(_BOM), name, error, max_values).value() if plain is _NOT_PLAIN else plain


def _decode(data: bytes, name: str, error: type[MxError]) -> str:
    if not data.strip():
        raise error(f"not JSON ({name}: empty file)")
    if data[:2] in (b"\xff\xfe", b"\xfe\xff") or b"\0" in data[:2]:
        raise error(
            f"not UTF-8 text ({name}: offset 0: UTF-16 or UTF-32)",
            hint=f"iconv -f UTF-16 -t UTF-8 {name}, or fetch it again",
        )
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as bad:
        offset = bad.start + (len(_BOM) if data.startswith(_BOM) else 0)
        raise error(f"not UTF-8 text ({name}: offset {offset}: byte 0x{data[offset]:02x})") from None


_NOT_PLAIN = object()


def _plain(text: str, max_values: int) -> Any:
    """The value of a document in which nothing can be wrong but what Python's own parser, a tenth of the work, is told of.

    _NOT_PLAIN for every other document: nested deeply, perhaps, or with too many values or a surrogate; and for one with
    a fault, so that it is told where.
    """
    opened = text.count("{") + text.count("[")
    if opened > MAX_DEPTH or opened + text.count(",") >= max_values or "\\u" in text:
        return _NOT_PLAIN
    try:
        return _DECODER.decode(text)
    except ValueError:
        return _NOT_PLAIN


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key stands twice")
    return found


def _number(literal: str) -> Any:
    """ValueError for one that is too long."""
    if len(literal) > MAX_LITERAL:
        raise ValueError(f"a number of {len(literal)} characters, expected at most {MAX_LITERAL}")
    if literal.lstrip("-").isdigit():
        return int(literal)
    double = float(literal)
    if math.isinf(double):
        return {"__float__": _decimal(literal)}
    return int(double) if double.is_integer() else double


def _non_finite(word: str) -> dict[str, str]:
    return {"__float__": word}


_DECODER = json.JSONDecoder(object_pairs_hook=_once, parse_int=_number, parse_float=_number, parse_constant=_non_finite)


class _Document:
    """One parse. `open` are the containers not yet closed, `at` the key or the index being read in each."""

    def __init__(self, text: str, bom: bool, name: str, error: type[MxError], max_values: int) -> None:
        self.text, self.bom, self.name, self.error, self.max_values = text, bom, name, error, max_values
        self.open: list[Any] = []
        self.at: list[str | int] = []
        self.count = 0

    def value(self) -> Any:
        pos = self._space(0)
        while True:
            done, value, pos = self._start(pos)
            while done:
                if not self.open:
                    return self._end(value, pos)
                done, value, pos = self._attach(value, pos)

    def _start(self, pos: int) -> tuple[bool, Any, int]:
        """Read a value: (True, value, its end), or (False, None, place of its first member) when it opens a container."""
        self.count += 1
        if self.count > self.max_values:
            raise self._refusal(pos, f"more than {self.max_values} values")
        char = self.text[pos : pos + 1]
        if char == '"':
            return True, *self._string(pos)
        if char not in ("{", "["):
            return True, *self._scalar(pos)
        if len(self.open) >= MAX_DEPTH:
            raise self._refusal(pos, f"nested deeper than {MAX_DEPTH}")
        container: Any = {} if char == "{" else []
        inside = self._space(pos + 1)
        if self.text[inside : inside + 1] == _CLOSING[char]:
            return True, container, inside + 1
        self.open.append(container)
        self.at.append("" if char == "{" else 0)
        return False, None, self._key(inside) if char == "{" else inside

    def _attach(self, value: Any, pos: int) -> tuple[bool, Any, int]:
        """Put a value into its container: (False, None, place of the next one), or (True, container, its end)."""
        container, key = self.open[-1], self.at[-1]
        is_object = isinstance(container, dict)
        if is_object:
            container[key] = value
        else:
            container.append(value)
        pos = self._space(pos)
        char = self.text[pos : pos + 1]
        if char == ",":
            pos = self._space(pos + 1)
            if is_object:
                return False, None, self._key(pos)
            self.at[-1] = len(container)
            return False, None, pos
        if char != ("}" if is_object else "]"):
            raise self._refusal(pos, f"unexpected {self._seen(pos)}")
        self.at.pop()
        return True, self.open.pop(), pos + 1

    def _key(self, pos: int) -> int:
        """Read `"key":`; the place of its value."""
        self.at[-1] = ""
        if self.text[pos : pos + 1] != '"':
            raise self._refusal(pos, f"unexpected {self._seen(pos)}, expected a key")
        key, end = self._string(pos)
        self.at[-1] = key
        if key in self.open[-1]:
            raise self._refusal(pos, "key stands twice")
        end = self._space(end)
        if self.text[end : end + 1] != ":":
            raise self._refusal(end, f"unexpected {self._seen(end)}, expected a colon")
        return self._space(end + 1)

    def _string(self, pos: int) -> tuple[str, int]:
        try:
            value, end = scanstring(self.text, pos + 1, True)
        except json.JSONDecodeError as bad:
            raise self._refusal(bad.pos, bad.msg.lower().rstrip(" at")) from None
        if not value.isascii():
            try:
                value.encode()
            except UnicodeEncodeError:
                raise self._refusal(pos, "lone surrogate in a string") from None
        return value, end

    def _scalar(self, pos: int) -> tuple[Any, int]:
        number = _NUMBER.match(self.text, pos)
        if number:
            try:
                return _number(number[0]), number.end()
            except ValueError as bad:
                raise self._refusal(pos, str(bad)) from None
        word = _WORD.match(self.text, pos)
        if word and word[0] in _WORDS:
            return _WORDS[word[0]], word.end()
        if word and word[0] in _NON_FINITE:
            return _non_finite(word[0]), word.end()
        raise self._refusal(pos, f"unexpected {self._seen(pos)}")

    def _end(self, value: Any, pos: int) -> Any:
        pos = self._space(pos)
        if pos < len(self.text):
            raise self._refusal(pos, f"{self._seen(pos)} after the end")
        return value

    def _space(self, pos: int) -> int:
        if self.text[pos : pos + 1] not in _SPACES:
            return pos
        match = _SPACE.match(self.text, pos)
        return match.end() if match else pos

    def _seen(self, pos: int) -> str:
        char = self.text[pos : pos + 1]
        return "end of file" if not char else "NUL" if char == "\0" else repr(char)

    def _refusal(self, pos: int, why: str) -> MxError:
        offset = len(self.text[:pos].encode()) + (len(_BOM) if self.bom else 0)
        where = key_path(self.at)
        return self.error(
            f"not the JSON that mx reads ({self.name}: offset {offset}{', ' + where if where else ''}: {why})"
        )


def _decimal(literal: str) -> str:
    """One spelling for a decimal: `10e399` and `1.0e400` are `1e400`."""
    mantissa, _, exponent = literal.lower().partition("e")
    sign = "-" if mantissa.startswith("-") else ""
    whole, _, fraction = mantissa.lstrip("-").partition(".")
    digits = (whole + fraction).lstrip("0")
    kept = digits.rstrip("0")
    return f"{sign}{kept}e{int(exponent or 0) - len(fraction) + len(digits) - len(kept)}"


def key_path(keys: list[str | int]) -> str:
    """`text_config.rope_scaling[3]`: the place of a value, shortened in the middle when it is deep."""
    parts = [f"[{key}]" if isinstance(key, int) else f".{_shown(key)}" for key in keys[:_SHOWN_KEYS]]
    if len(keys) > _SHOWN_KEYS:
        parts.append("…")
    return "".join(parts).lstrip(".")


def _shown(key: str) -> str:
    text = key if key.isprintable() else ascii(key)[1:-1]
    return text if len(text) <= 60 else text[:57] + "…"
