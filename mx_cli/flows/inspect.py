"""Checks a file on its way into the cache: digests, format and tensors, in one pass over its bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mx_cli.base.cancel import Stop
from mx_cli.base.errors import IntegrityError
from mx_cli.base.oserrors import explain
from mx_cli.engine.verify import DigestMismatch, OriginDigest, WholeDigest, new_digest, read_through
from mx_cli.model import header, json_strict
from mx_cli.model.digest import Digester, TensorDigest, digester
from mx_cli.model.manifest import Entry

JSON_LIMIT = 1 << 20


@dataclass(frozen=True, slots=True)
class Verdict:
    """What was found: `digests` are the origin's that matched, `rows` the tensors' (None: no table), `warning` what is odd.

    `starts`: the first byte in the file of each of the rows.
    """

    xxh3: str
    digests: Mapping[str, str]
    rows: Sequence[TensorDigest] | None
    warning: str = ""
    starts: Sequence[int] = ()


class Inspection:
    """The consumer of one file.

    A payload that is plainly something else (an HTML page, a git-lfs pointer) is refused always, and so are weights that
    are empty or cut. A file that mx cannot read otherwise is refused unless its bytes are proven to be the origin's, by a
    digest of the origin's: then the origin holds it so, and mx says that.
    """

    def __init__(self, entry: Entry, *, is_weight: bool) -> None:
        self._entry = entry
        self._whole = WholeDigest()
        # A peer's digest of the whole file stands for the origin's that the peer has checked.
        self._vouched = entry.digests.get("xxh3", "")
        self._origin = OriginDigest(entry.path, {} if self._vouched else entry.digests, entry.size)
        self._is_weight = is_weight
        self._tensors: Digester | None = None
        self._head = bytearray()
        self._json = bytearray()
        self._wants_json = entry.path.endswith(".json") and self._origin.kind in ("", "etag-md5")
        self._problem: IntegrityError | None = None

    def update(self, view: memoryview) -> None:
        self._whole.update(view)
        self._origin.update(view)
        if len(self._head) < header.SNIFF_BYTES:
            self._head += view[: header.SNIFF_BYTES - len(self._head)]
        if self._wants_json and len(self._json) <= JSON_LIMIT:
            self._json += view
        if self._is_weight and self._problem is None and self._entry.size is not None:
            self._feed_tensors(view)

    def _feed_tensors(self, view: memoryview) -> None:
        try:
            if self._tensors is None:
                self._tensors = digester(self._entry.path, self._entry.size or 0)
            self._tensors.update(view)
        except IntegrityError as error:
            self._problem = error

    def finish(self) -> None:
        self._whole.finish()
        self._origin.finish()
        if self._vouched and self._whole.value != self._vouched:
            raise DigestMismatch(self._entry.path, "xxh3", self._vouched, self._whole.value)

    def verdict(self, fd: int, size: int) -> Verdict:
        """After `finish`. Raises IntegrityError for a format that is wrong and not proven to be the origin's own."""
        rows: Sequence[TensorDigest] | None = None
        starts: Sequence[int] = ()
        try:
            header.check_payload(self._entry.path, bytes(self._head), size)
            if self._problem:
                raise self._problem
            if self._is_weight:
                tensors = self._tensors or digester(self._entry.path, size)
                if self._entry.size is not None:
                    rows, starts = tensors.finish(), tensors.starts
            if self._wants_json and not self._origin.kind and size <= JSON_LIMIT:
                json_strict.parse(bytes(self._json), self._entry.path, error=IntegrityError)
        except IntegrityError as error:
            is_plainly_else = header.sniff(bytes(self._head)) is not None or (size > 0 and not any(self._head))
            is_broken = self._is_weight and not error.unknown
            if is_plainly_else or is_broken or not self._proven(fd):
                raise
            return Verdict(self._whole.value, self._matched(), None, f"{error.what}; the origin holds it so")
        return Verdict(self._whole.value, self._matched(), rows, starts=starts)

    def _matched(self) -> dict[str, str]:
        if self._vouched:
            return {kind: value for kind, value in self._entry.digests.items() if kind != "xxh3"}
        kind = self._origin.kind
        return {kind: self._entry.digests[kind]} if kind else {}

    def _proven(self, fd: int) -> bool:
        """Whether the bytes are the origin's beyond doubt. A validator that looks like an md5 is tried as one."""
        if self._origin.kind or self._vouched:
            return True
        tag = self._entry.validator.strip('"').lower()
        if len(tag) != 32 or set(tag) - set("0123456789abcdef"):
            return False
        running = new_digest("md5")
        read_through(fd, running.update)
        return running.hexdigest() == tag


def inspect_file(path: Path, entry: Entry, *, is_weight: bool, stop: Stop) -> Verdict:
    """The verdict on a file of this machine that should be `entry`. Reads all of it; raises what an Inspection raises,
    IntegrityError for another size, FilesystemRefused, the stop's reason."""
    inspection = Inspection(entry, is_weight=is_weight)

    def take(view: memoryview) -> None:
        stop.check()
        inspection.update(view)

    try:
        with open(path, "rb") as file:
            size = read_through(file.fileno(), take)
            if size != entry.size:
                raise IntegrityError(f"{path}: changed while it was read")
            inspection.finish()
            return inspection.verdict(file.fileno(), size)
    except OSError as error:
        raise explain(error, f"reading {path}") from None
