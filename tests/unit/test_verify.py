"""Digests that origins give: which one counts, and what an ETag that looks like one may say."""

from __future__ import annotations

import hashlib

import pytest

from mx_cli.base.errors import IntegrityError
from mx_cli.engine.verify import OriginDigest

DATA = b"weights"
BLOB = b"blob 7\0" + DATA
GIT_SHA1, GIT_SHA256 = hashlib.sha1(BLOB).hexdigest(), hashlib.sha256(BLOB).hexdigest()
MD5, SHA256 = hashlib.md5(DATA).hexdigest(), hashlib.sha256(DATA).hexdigest()


def checked(digests: dict[str, str], size: int | None = len(DATA)) -> str:
    digest = OriginDigest("a.safetensors", digests, size)
    digest.update(memoryview(DATA))
    digest.finish()
    return digest.kind


@pytest.mark.parametrize(
    ("digests", "kind"),
    [
        ({"md5": MD5, "sha256": SHA256}, "sha256"),
        ({"md5": MD5.upper()}, "md5"),
        ({"etag-md5": MD5}, "etag-md5"),
        ({"git-sha1": GIT_SHA1}, "git-sha1"),
        ({"git-sha256": GIT_SHA256}, "git-sha256"),
        ({"git-sha1": hashlib.sha1(DATA).hexdigest()}, "git-sha1"),
        ({"git-sha1": GIT_SHA1, "sha256": SHA256}, "sha256"),
        ({}, ""),
    ],
)
def test_the_strongest_digest_confirms(digests: dict[str, str], kind: str) -> None:
    assert checked(digests) == kind


@pytest.mark.parametrize("kind", ["sha256", "md5", "crc32c", "crc64nvme", "git-sha1", "git-sha256"])
def test_a_wrong_digest_is_refused(kind: str) -> None:
    with pytest.raises(IntegrityError, match=f"wrong {kind}"):
        checked({kind: "0" * 8, "etag-md5": MD5})


def test_an_etag_with_the_form_of_an_md5_need_not_be_one() -> None:
    assert checked({"etag-md5": "0" * 32}) == ""


def test_git_names_nothing_whose_length_is_not_known() -> None:
    assert checked({"git-sha1": "0" * 40}, size=None) == ""
    assert checked({"git-sha1": "0" * 40, "md5": MD5}, size=None) == "md5"
