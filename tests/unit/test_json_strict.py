"""The one JSON parser: what it accepts, what it means, what it refuses and how it says so."""

from __future__ import annotations

import json
import math
import re
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from mx_cli.base import canonical
from mx_cli.base.errors import IntegrityError, UsageError
from mx_cli.model.json_strict import parse


def refusal(data: bytes) -> str:
    with pytest.raises(UsageError) as caught:
        parse(data, "config.json")
    assert "config.json" in caught.value.what
    return caught.value.what


def test_H02_bom_is_fine() -> None:
    assert parse(b'\xef\xbb\xbf{"a": 1}', "config.json") == {"a": 1}


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ('{"a": 1}'.encode("utf-16-le"), "offset 0: UTF-16"),
        ('{"a": 1}'.encode("utf-16"), "offset 0: UTF-16"),
        (b'{"a": "\xe9"}', "offset 7: byte 0xe9"),
        (b'\xef\xbb\xbf{"a": "\xe9"}', "offset 10: byte 0xe9"),
        (b'{"a": 1}\0', "offset 8: NUL after the end"),
        (b'{"a": 1} x', "offset 9: 'x' after the end"),
        ('{"é": 1} x'.encode(), "offset 10: 'x' after the end"),
        (b"", "empty file"),
        (b"  \n", "empty file"),
        (b'{"a": ', "offset 6, a: unexpected end of file"),
        (b'{"a": 01}', "offset 7, a: unexpected '1'"),
        (b'{"a": 1,}', "expected a key"),
        (b'{"a" 1}', "expected a colon"),
        (b"{'a': 1}", "expected a key"),
        (b'{"a": "x\ny"}', "offset 8, a: invalid control character"),
        (b'{"a": "x', "a: unterminated string"),
        (b'{"a": "\\x"}', "a: invalid \\escape"),
        (b'{"a": [1, 2 3]}', "a[1]: unexpected '3'"),
        (b'{"a": [1, nul]}', "a[1]: unexpected 'n'"),
        (b'{"a": infinity}', "a: unexpected 'i'"),
        (b"[1] [2]", "after the end"),
    ],
)
def test_H02_refused_with_file_and_offset(data: bytes, said: str) -> None:
    assert said in refusal(data)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b'{"x": {"a": 1, "b": 2, "a": 1}}', "x.a: key stands twice"),
        (b'{"x": [{"a": "\\ud800"}]}', "x[0].a: lone surrogate"),
        (b'{"x": {"y": ' + b"7" * 5000 + b"}}", "x.y: a number of 5000 characters"),
        (b'{"x": {"y": 1e' + b"7" * 5000 + b"}}", "x.y: a number of 5002 characters"),
        (b'{"x": ' + b"[" * 200_000 + b"]" * 200_000 + b"}", "x[0][0][0][0][0]…: nested deeper than 128"),
        (b'{"x": ' + b'{"a":' * 200_000, "x.a.a.a.a.a…: nested deeper than 128"),
    ],
    ids=["duplicate", "surrogate", "integer", "exponent", "deep-list", "deep-object"],
)
def test_refused_with_key_path_and_fast(data: bytes, said: str) -> None:
    began = time.process_time()
    assert said in refusal(data)
    assert time.process_time() - began < 0.5


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("10000", 10000),
        ("10000.0", 10000),
        ("1e4", 10000),
        ("-0.0", 0),
        ("-0", 0),
        ("1e-05", 0.00001),
        ("0.00001", 0.00001),
        ("1E-5", 0.00001),
        ("9007199254740993", 9007199254740993),
        ("Infinity", {"__float__": "Infinity"}),
        ("-Infinity", {"__float__": "-Infinity"}),
        ("NaN", {"__float__": "NaN"}),
        ('{"__float__": "Infinity"}', {"__float__": "Infinity"}),
        ("1e400", {"__float__": "1e400"}),
        ("-10.0e399", {"__float__": "-1e400"}),
        ("0e999", 0),
        ("true", True),
        ('"\\u00e9"', "é"),
    ],
)
def test_H03_H06_numbers_by_meaning(text: str, value: Any) -> None:
    parsed = parse(f'{{"k": {text}}}'.encode(), "config.json")
    assert parsed == {"k": value}
    assert type(parsed["k"]) is type(value)
    json.loads(canonical.dumps(parsed), parse_constant=lambda _: pytest.fail("not valid JSON"))


def test_error_class_is_the_callers() -> None:
    with pytest.raises(IntegrityError):
        parse(b"{", "model.safetensors.index.json", error=IntegrityError)


def test_memory_and_time_are_bounded() -> None:
    data = b"[" + b"[]," * 4_000_000 + b"1]"
    began = time.process_time()
    assert "more than 500000 values" in refusal(data)
    assert time.process_time() - began < 4


@settings(max_examples=300, deadline=None)
@given(some.binary(max_size=200))
def test_any_bytes_are_parsed_or_refused(noise: bytes) -> None:
    for data in (noise, b'{"a":' + noise + b"}", b"[" + noise + b"]"):
        try:
            canonical.dumps(parse(data, "x"))
        except UsageError:
            continue


def _same(mine: Any, theirs: Any) -> bool:
    if isinstance(theirs, dict):
        return mine.keys() == theirs.keys() and all(_same(mine[key], theirs[key]) for key in theirs)
    if isinstance(theirs, list):
        return len(mine) == len(theirs) and all(map(_same, mine, theirs))
    return bool(mine == theirs) and isinstance(mine, bool) == isinstance(theirs, bool)


@pytest.mark.parametrize(
    ("data", "cause"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1048576\n", "git-lfs pointer, not weights"),
        (b"<html><head><title>Sign in</title></head></html>", "an HTML page (Sign in)"),
    ],
)
def test_what_stands_in_its_place_is_named(data: bytes, cause: str) -> None:
    with pytest.raises(UsageError, match=re.escape(f"not a JSON file (x.json: {cause}")):
        parse(data, "x.json")


_scalars = some.none() | some.booleans() | some.integers(-(10**40), 10**40) | some.floats(allow_nan=False) | some.text()


@settings(max_examples=200, deadline=None)
@given(some.recursive(_scalars, lambda inner: some.lists(inner) | some.dictionaries(some.text(), inner), max_leaves=12))
def test_agrees_with_the_standard_parser(value: Any) -> None:
    def has_infinity(item: Any) -> bool:
        if isinstance(item, dict):
            return any(map(has_infinity, item.values()))
        if isinstance(item, list):
            return any(map(has_infinity, item))
        return isinstance(item, float) and math.isinf(item)

    for indent in (None, 2):
        text = json.dumps(value, indent=indent)
        if not has_infinity(value):
            assert _same(parse(text.encode(), "x"), json.loads(text))


def _meaning(data: bytes) -> str:
    """What a document says, types included; one word for all that is refused."""
    try:
        return repr(parse(data, "x")[1:])
    except UsageError:
        return "refused"


_numbers = some.from_regex(r"-?[0-9]{1,4}(\.[0-9]{1,3})?([eE][-+]?[0-9]{1,4})?", fullmatch=True)
_marks = [
    "{",
    "}",
    "[",
    "]",
    ",",
    ":",
    '"',
    '"a"',
    '"b"',
    '"\\n"',
    '"\\ud83d\\ude00"',
    '"\\ud800"',
    " ",
    "\n",
    "\x0c",
    "\ufeff",
]
_words = ["true", "null", "NaN", "-Infinity", "Infinit", "-", "01", "+1", "1.", ".5", "é", "7" * 1001]
_tokens = some.sampled_from([*_marks, *_words])
_documents = some.recursive(
    some.one_of(_numbers, some.sampled_from(["true", "null", "NaN", '"x"', '"é"'])),
    lambda inner: (
        some.lists(inner, max_size=3).map(lambda found: f"[{','.join(found)}]")
        | some.lists(some.tuples(some.sampled_from("abc"), inner), max_size=3).map(
            lambda found: "{" + ", ".join(f'"{key}" : {value}' for key, value in found) + "}"
        )
    ),
)


@settings(max_examples=500, deadline=None)
@given(some.lists(_tokens | _numbers, max_size=12).map("".join) | _documents)
def test_plain_documents_mean_what_all_others_mean(text: str) -> None:
    plain, other = (f'["{brackets}", {text}]'.encode() for brackets in ("", "[" * 129))
    assert _meaning(plain) == _meaning(other)
