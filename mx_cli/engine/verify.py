"""Streaming digests: everything that reads a file's bytes once, in order, behind the transfer.

The block digests that the journal needs are taken while the bytes are in a buffer (`threads`). What needs the bytes in
order (a whole file's sha256, the tensors' digests, a look at the format) follows the contiguous edge of each file.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

import xxhash

from mx_cli.base.errors import IntegrityError
from mx_cli.engine.buffers import STEP

STRONGEST_FIRST = ("sha256", "git-sha256", "git-sha1", "crc64nvme", "crc32c", "md5", "etag-md5")
GIT = {40: "git-sha1", 64: "git-sha256"}
"""The kinds of the names that git gives to contents, by their length in hex digits."""


class Consumer(Protocol):
    """Reads a file's bytes in order, once."""

    def update(self, view: memoryview) -> None:
        """The next bytes. Raises IntegrityError as soon as they are wrong."""

    def finish(self) -> None:
        """After the last byte. Raises IntegrityError."""


class _Crc:
    def __init__(self, step: Callable[[memoryview, int], int], width: int) -> None:
        self._step, self._width, self._value = step, width, 0

    def update(self, view: memoryview) -> None:
        self._value = self._step(view, self._value)

    def hexdigest(self) -> str:
        return f"{self._value:0{self._width}x}"


class _Hash(Protocol):
    def update(self, view: memoryview, /) -> object: ...
    def hexdigest(self) -> str: ...


def new_digest(kind: str) -> _Hash:
    """A running digest of a kind that origins give: sha256, md5, etag-md5, crc32c, crc64nvme (hex, big-endian).

    Of git's kinds it is the one of the bytes alone.
    """
    if kind in ("sha256", "git-sha256"):
        return hashlib.sha256()
    if kind == "git-sha1":
        return hashlib.sha1(usedforsecurity=False)
    if kind in ("md5", "etag-md5"):
        return hashlib.md5(usedforsecurity=False)
    from awscrt import checksums

    if kind == "crc32c":
        return _Crc(checksums.crc32c, 8)
    if kind == "crc64nvme":
        return _Crc(checksums.crc64nvme, 16)
    raise ValueError(kind)


def _running(kind: str, size: int | None) -> list[_Hash]:
    """What may equal an origin's digest. Git names what a file holds by its length and its bytes; some mirrors by its bytes alone."""
    if kind not in GIT.values():
        return [new_digest(kind)]
    named = new_digest(kind)
    named.update(memoryview(b"blob %d\0" % (size or 0)))
    return [named, new_digest(kind)]


class OriginDigest:
    """Compares a file with the strongest digest that its origin gave; `kind` is which, "" when there is none.

    An `etag-md5` can only confirm: the ETag of an encrypted object, or of another server, has an MD5's form but is none.
    When it doesn't match, `kind` is "" after `finish`. Git's names want the `size` beforehand: without it they are left out.
    """

    def __init__(self, path: str, digests: Mapping[str, str], size: int | None) -> None:
        self._path = path
        usable = set(digests) - (set(GIT.values()) if size is None else set())
        self.kind = next((kind for kind in STRONGEST_FIRST if kind in usable), "")
        self._expected = digests.get(self.kind, "").lower()
        self._hashes = _running(self.kind, size) if self.kind else []

    def update(self, view: memoryview) -> None:
        for running in self._hashes:
            running.update(view)

    def finish(self) -> None:
        observed = [running.hexdigest() for running in self._hashes]
        if observed and self._expected not in observed:
            if self.kind == "etag-md5":
                self.kind = ""
                return
            raise DigestMismatch(self._path, self.kind, self._expected, observed[0])


class DigestMismatch(IntegrityError):
    """The bytes are not those that the origin's digest was made of."""

    def __init__(self, path: str, kind: str, expected: str, observed: str) -> None:
        super().__init__(f"{path}: wrong {kind} (expected {expected} from the origin, observed {observed})")
        self.path, self.kind = path, kind


def read_through(fd: int, take: Callable[[memoryview], object], start: int = 0, end: int | None = None) -> int:
    """Hand the bytes of a file from `start` to `end` (None: to its last) to `take`, in order. Returns how many there were.

    `take` must not keep the view, and may raise to stop. Raises OSError.
    """
    at = start
    buffer = memoryview(bytearray(STEP if end is None else min(STEP, end - start)))
    while end is None or at < end:
        count = os.preadv(fd, [buffer if end is None else buffer[: end - at]], at)
        if count == 0:
            break
        take(buffer[:count])
        at += count
    return at - start


class WholeDigest:
    """The hex xxh3-128 of the whole file, in `value` after `finish`."""

    def __init__(self) -> None:
        self._hash = xxhash.xxh3_128()
        self.value = ""

    @staticmethod
    def of(data: bytes) -> str:
        """The digest of a file that is in memory."""
        return xxhash.xxh3_128_hexdigest(data)

    def update(self, view: memoryview) -> None:
        self._hash.update(view)

    def finish(self) -> None:
        self.value = self._hash.hexdigest()


def digest_of(path: Path, check: Callable[[], None]) -> str:
    """The xxh3 of a file, as records have it. Reads all of it; `check` may raise to stop. Raises OSError."""
    whole = WholeDigest()

    def take(view: memoryview) -> None:
        check()
        whole.update(view)

    with open(path, "rb") as file:
        read_through(file.fileno(), take)
    whole.finish()
    return whole.value
