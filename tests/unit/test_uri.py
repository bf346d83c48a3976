"""What people write, and the one spelling that it becomes."""

from __future__ import annotations

from pathlib import Path

import pytest

from mx_cli.base.errors import MxError, NotFound, UsageError
from mx_cli.sources.uri import Uri, last_component, parse


def parsed(text: str, endpoint: str = "") -> Uri:
    return parse(text, endpoint=lambda scheme: endpoint, exists=lambda path: False)


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("S3://Bucket/Key", "s3://Bucket/Key"),
        ("s3a://b/k", "s3://b/k"),
        ("s3://b", "s3://b"),
        ("s3://b/m/", "s3://b/m"),
        ("s3://b/a%20b?c#d", "s3://b/a%20b?c#d"),
        ("gcs://b/k", "gs://b/k"),
        ("s3+HTTP://Host:80/b/k", "s3+http://host/b/k"),
        ("s3+http://127.0.0.1:9000/b/k", "s3+http://127.0.0.1:9000/b/k"),
        ("hf://org/name", "hf://org/name"),
        ("hf://org/name@v1.0", "hf://org/name"),
        ("hf://org/name@refs/pr/7/sub/dir", "hf://org/name/sub/dir"),
        ("hf://org/name/a@b.json", "hf://org/name/a@b.json"),
        ("hf://gpt2", "hf://gpt2"),
        ("org/name", "hf://org/name"),
        ("org/name@main", "hf://org/name"),
        ("HTTPS://user:PW@Example.COM:443/a b/é?x=1#frag", "https://example.com/a%20b/%C3%A9?x=1"),
        ("https://h", "https://h/"),
        ("http://[::1]:80/x", "http://[::1]/x"),
        ("https://bücher.example/x", "https://xn--bcher-kva.example/x"),
        ("https://h/x?X-Amz-Signature=s&X-Amz-Date=d&a=1", "https://h/x?a=1"),
        ("https://h/x?X-Goog-Signature=s&generation=5", "https://h/x?generation=5"),
        ("https://h/x?Expires=1&Signature=s&AWSAccessKeyId=k&GoogleAccessId=g", "https://h/x"),
        ("https://h/x?sv=2022&se=2026&sr=b&sp=r&sig=abc&keep=1", "https://h/x?keep=1"),
        ("https://h/x?sr=1&sp=2", "https://h/x?sr=1&sp=2"),
        ("https://h/x?access_token=hf_abc&q=z", "https://h/x?q=z"),
        ("file:///a/b%20c", "file:///a/b%20c"),
        ("file://localhost/a//b/../c", "file:///a/c"),
        ("file:/a/b%20c", "file:///a/b%20c"),
        ("/a/b%20c", "file:///a/b%2520c"),
        ("/a/x#y?z", "file:///a/x%23y%3Fz"),
    ],
)
def test_canonical(text: str, canonical: str) -> None:
    assert parsed(text).text == canonical


def test_the_canonical_form_is_its_own_canonical_form() -> None:
    for text in ("s3+http://h:9/b/k", "s3://b/k?x", "hf://o/n/sub", "https://h/a%20b?x=1", "file:///a/b%20c"):
        assert parsed(text).text == text


def test_an_endpoint_that_is_not_the_default_counts() -> None:
    assert parsed("s3://b/k", "https://S3.example.com/").text == "s3+https://s3.example.com/b/k"
    assert parsed("gs://b/k", "localhost:4443").text == "gs+http://localhost:4443/b/k"
    assert parsed("s3://b/k", "http://user:pw@h:9000").endpoint == "http://h:9000"


@pytest.mark.parametrize(
    ("text", "revision"),
    [
        ("hf://o/n@abc", "abc"),
        ("hf://o/n", ""),
        ("o/n@v1", "v1"),
        ("hf://o/n@refs/pr/3", "refs/pr/3"),
        ("hf://o/n@a%2Fb/sub", "a/b"),
    ],
)
def test_revisions(text: str, revision: str) -> None:
    assert parsed(text).revision == revision


def test_paths_and_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "org").mkdir()
    (tmp_path / "org" / "name").mkdir()
    assert parse("org/name").scheme == "file"
    assert parse("org/other").scheme == "hf"
    assert parse("./org/other").scheme == "file"
    assert parse("~/x").path == str(tmp_path / "x")
    assert parse("..").path == str(tmp_path.parent)


@pytest.mark.parametrize("text", ["name", "a/b/c", "org/na me", "-org/name", "org/na--me", "org/..", "models\\x/y z"])
def test_neither_path_nor_repository_tells_both_readings(text: str) -> None:
    with pytest.raises(NotFound) as caught:
        parsed(text)
    assert "path" in caught.value.what
    assert "hub" in caught.value.what
    assert "hf://" in caught.value.hint


@pytest.mark.parametrize(
    "text",
    [
        "",
        "  ",
        "az://c/b",
        "ftp://h/x",
        "s3://",
        "s3:///k",
        "hf://a b/c",
        "https://",
        "hf://datasets/org/name",
        "s3+ftp://h/b",
        "s3://b/\n",
        "file:///a%00b",
    ],
)
def test_usage_errors(text: str) -> None:
    with pytest.raises(UsageError):
        parsed(text)


def test_an_unknown_scheme_lists_the_known_ones() -> None:
    with pytest.raises(UsageError) as caught:
        parsed("az://container/x")
    assert all(known in caught.value.hint for known in ("hf://", "s3://", "gs://", "https://", "file://"))


@pytest.mark.parametrize(
    "text",
    [
        "https://user:SECRET@h/x?X-Amz-Signature=SECRET&token=SECRET",
        "s3://SECRET:SECRET@bucket/k",
        "ftp://user:SECRET@h/x",
        "https://user:SECRET@",
        "https://user:SECRET@h:port/x",
        "s3+https://user:SECRET@h/b/k",
    ],
)
def test_p37_secrets_are_in_nothing_that_is_shown(text: str) -> None:
    assert "SECRET" not in said(text)


def said(text: str) -> str:
    try:
        uri = parsed(text)
    except MxError as error:
        return f"{error} {error.hint}"
    return f"{uri!r} {uri.text} {uri.shown} {uri.place}"


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("/a/b.bin", "b.bin"),
        ("/a/b%20c.bin", "b c.bin"),
        ("/a/b%2520c", "b%20c"),
        ("/a/..%2f..%2fetc", ".._.._etc"),
        ("/", "index"),
        ("", "index"),
        ("/a/%2e%2e", "download"),
        ("/dir/", "dir"),
        ("/a%00b", "a_b"),
    ],
)
def test_the_name_of_a_url_s_file(path: str, name: str) -> None:
    assert last_component(path) == name


@pytest.mark.parametrize("text", ["file:a/b", "file:./a/b", "FILE:a/b"])
def test_a_file_uri_is_absolute(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        parsed(text)
    assert caught.value.hint == "write ./a/b"
