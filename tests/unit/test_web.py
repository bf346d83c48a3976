"""What an answer means, before a byte of it is used."""

from __future__ import annotations

import email.utils
import time

import pytest

from mx_cli.base.errors import AccessDenied, IntegrityError, MxError, NotFound, OriginChanged, Unreachable
from mx_cli.engine.ports import NoRanges, ReadItem
from mx_cli.model.manifest import Entry
from mx_cli.sources.answers import (
    Target,
    Unmatched,
    check_answer,
    hex_of,
    parse_content_range,
    refusal,
    same_place,
    size_of,
)
from mx_cli.sources.wire import Head

ENTRY = Entry("m.safetensors", 1000, "tag")
TARGET = Target("http://h/m", "h/m", pinned={"etag": "tag"})
PIECE = ReadItem(ENTRY, 100, 50)


def head(status: int = 206, **headers: str) -> Head:
    return Head(status, {name.replace("_", "-"): value for name, value in headers.items()}, True)


@pytest.mark.parametrize(
    "answer",
    [
        head(content_range="bytes 100-149/1000", content_length="50", etag='"tag"'),
        head(content_range="bytes 100-149/*", content_length="50"),
        head(content_range="bytes 100-149/1000", transfer_encoding="chunked"),
        head(200, content_range="bytes 100-149/1000", content_length="50"),
        head(content_range="bytes 100-149/1000", content_length="50", etag='W/"tag"', content_encoding="aws-chunked"),
        head(content_range="bytes 100-149/1000", content_length="50", etag='"tag"', content_type="text/html"),
    ],
)
def test_the_right_piece(answer: Head) -> None:
    check_answer(TARGET, PIECE, answer, True)


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (head(200, content_length="1000"), NoRanges),
        (head(content_length="50"), NoRanges),
        (head(content_range="bytes 101-150/1000", content_length="50"), NoRanges),
        (head(content_range="bytes 100-148/1000", content_length="49"), NoRanges),
        (head(content_range="bytes 100-149/1000", content_length="51"), NoRanges),
        (head(content_range="lines 1-2/3", content_length="50"), NoRanges),
        (head(content_range="bytes 100-149/1001", content_length="50"), IntegrityError),
        (head(content_range="bytes 100-149/1000", content_length="50", etag='"other"'), OriginChanged),
        (head(content_range="bytes 100-149/1000", content_length="50", content_encoding="gzip"), IntegrityError),
        (head(200, content_length="26", content_type="text/html; charset=utf-8"), IntegrityError),
    ],
)
def test_anything_else_is_refused(answer: Head, error: type[Exception]) -> None:
    with pytest.raises(error):
        check_answer(TARGET, PIECE, answer, True)


def test_p05_a_whole_file_of_another_size_names_both() -> None:
    with pytest.raises(IntegrityError, match="expected 1000 bytes from the listing, observed 999 in Content-Length"):
        check_answer(TARGET, ReadItem(ENTRY, 0, 1000, whole=True), head(200, content_length="999"), False)


def test_p03_the_whole_file_for_a_range_over_all_of_it_is_right() -> None:
    check_answer(TARGET, ReadItem(ENTRY, 0, 1000), head(200, content_length="1000"), True)


@pytest.mark.parametrize(
    ("status", "error", "retried"),
    [
        (401, AccessDenied, False),
        (403, AccessDenied, False),
        (404, NotFound, False),
        (410, NotFound, False),
        (412, Unmatched, False),
        (416, OriginChanged, False),
        (429, Unreachable, True),
        (500, Unreachable, True),
        (503, Unreachable, True),
        (400, Unreachable, False),
        (505, Unreachable, False),
    ],
)
def test_refusals(status: int, error: type[MxError], retried: bool) -> None:
    found = refusal("h/m", head(status))
    assert type(found) is error
    if isinstance(found, Unreachable):
        assert found.permanent is not retried


def test_p11_retry_after_in_both_forms() -> None:
    def wait(text: str) -> float | None:
        found = refusal("h", head(429, retry_after=text))
        assert isinstance(found, Unreachable)
        return found.retry_after

    assert wait("7") == 7
    dated = wait(email.utils.formatdate(time.time() + 30, usegmt=True))
    assert dated is not None
    assert 28 <= dated <= 30
    for nonsense in ("soon", "\u00b2", "9" * 5000, "Mon, 01 Jan 99999 00:00:00 GMT"):
        assert wait(nonsense) is None


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("bytes 0-99/1234", (0, 99, 1234)),
        ("bytes 0-99/*", (0, 99, None)),
        ("bytes */1234", (-1, -1, None)),
        ("", (-1, -1, None)),
        ("bytes 0-\u00b2/9", (-1, -1, None)),
        (f"bytes 0-99/{'9' * 5000}", (0, 99, None)),
        (f"bytes {2**32}-{2**33}/{600 << 30}", (2**32, 2**33, 600 << 30)),
    ],
)
def test_p10_content_range(text: str, expected: tuple[int, int, int | None]) -> None:
    assert parse_content_range(text) == expected


@pytest.mark.parametrize(
    ("home", "moved", "same"),
    [
        ("https://h/a", "https://h/b", True),
        ("http://h/a", "https://h/b", True),
        ("https://h/a", "http://h/b", False),
        ("https://h/a", "https://h:444/b", False),
        ("http://h:8080/a", "https://h/b", False),
        ("https://h/a", "https://cdn.h/b", False),
    ],
)
def test_p17_where_credentials_may_go(home: str, moved: str, same: bool) -> None:
    assert same_place(home, moved) is same


def test_sizes() -> None:
    assert size_of(head(200, content_length="5")) == 5
    assert size_of(head(206, content_length="1", content_range="bytes 0-0/5")) == 5
    assert size_of(head(416, content_range="bytes */0")) == 0
    assert size_of(head(416)) is None
    assert size_of(head(200, transfer_encoding="chunked")) is None


def test_base64_digests() -> None:
    assert hex_of("AAAAAA==", 4) == "00000000"
    assert hex_of("AAAAAA==-7", 4) == ""
    assert hex_of("AAAA", 4) == ""
    assert hex_of("", 4) == ""
