"""Files, tensors and digests of a checkpoint: as an origin lists them, and as the cache vouches for them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from mx_cli.base import canonical
from mx_cli.base.errors import IntegrityError, MxError, UsageError
from mx_cli.model.paths import check_paths, fault

FORMAT = 1
BLOCK = 4 << 20


@dataclass(frozen=True, slots=True)
class Entry:
    """A file as its origin lists it.

    `path` is relative, with `/`. `size` in bytes, None when the origin does not say. `validator` is what the origin
    promises to change when the bytes do (strong ETag, generation, version id); `strong` says whether it may be relied
    on for resuming. `digests` are the origin's own, hex by kind (sha256, git-sha1, git-sha256, crc64nvme, crc32c, md5);
    an md5 under the kind `etag-md5` is one only if the object is not encrypted with a customer key. `key` is the origin's own name for the file.
    `refusal` is why the origin cannot give this file, where it knows beforehand: to be raised when the file is wanted.
    """

    path: str
    size: int | None
    validator: str = ""
    strong: bool = True
    digests: Mapping[str, str] = field(default_factory=dict, hash=False)
    key: str = ""
    version: str = ""
    refusal: MxError | None = field(default=None, compare=False)

    @property
    def resumable(self) -> bool:
        return self.strong and bool(self.validator) and self.size is not None


@dataclass(frozen=True, slots=True)
class Listing:
    """What an origin holds under a URI at one immutable revision.

    `uri` is canonical and without secrets. `revision` is empty when the origin offers nothing to derive one from.
    `ref` is the moving name it was resolved from ("" when the revision was given).
    """

    uri: str
    revision: str
    files: tuple[Entry, ...]
    ref: str = ""


def store_ref(version_id: str = "") -> str:
    """The name for what a store without branches holds now, or for one version of an object."""
    return f"version {version_id}" if version_id else "latest"


def revision_of(entries: Iterable[Entry]) -> str:
    """SHA-256 over the canonical `[key, size, validator]` rows, sorted by the keys' bytes: the revision of a plain store.

    Raises IntegrityError for a key that is not Unicode.
    """
    try:
        rows = sorted(([e.path, e.size, e.validator] for e in entries), key=lambda row: str(row[0]).encode())
    except UnicodeEncodeError as error:
        raise IntegrityError(f"a name that is not Unicode ({error.object!a})") from None
    return canonical.sha256(rows)


@dataclass(frozen=True, slots=True)
class FileRecord:
    """A file that was verified: `xxh3` is the hex xxh3-128 of all its bytes; `digests` the origin's, which it matched."""

    path: str
    size: int
    xxh3: str
    validator: str = ""
    digests: Mapping[str, str] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return {
            "path": self.path,
            "size": self.size,
            "xxh3": self.xxh3,
            "validator": self.validator,
            "digests": dict(self.digests),
        }


@dataclass(frozen=True)
class Manifest:
    """The commit point: these files of this revision are whole and right. Immutable, one per selection.

    `directory` is the snapshot's name under `snapshots/`, if it has one. `tensors` holds rows [file, name, dtype, shape, blocks].
    `listing` is everything the origin held at this revision, [path, size]: later selections are resolved from it offline.
    """

    uri: str
    revision: str
    selection: str
    rules: int
    directory: str
    files: tuple[FileRecord, ...]
    weights: tuple[str, ...] = ()
    tensors: tuple[tuple[str, str, str, tuple[int, ...], tuple[str, ...]], ...] = ()
    identity: Mapping[str, str] = field(default_factory=dict)
    listing: tuple[tuple[str, int | None], ...] = ()
    version: str = ""
    created: str = ""

    def record(self, path: str) -> FileRecord | None:
        return self._records.get(path)

    @cached_property
    def _records(self) -> Mapping[str, FileRecord]:
        return {record.path: record for record in self.files}

    @cached_property
    def tables(self) -> Mapping[str, Sequence[tuple[str, str, tuple[int, ...], tuple[str, ...]]]]:
        """The rows of `tensors` by file."""
        found: dict[str, list[tuple[str, str, tuple[int, ...], tuple[str, ...]]]] = {}
        for file, name, dtype, shape, blocks in self.tensors:
            found.setdefault(file, []).append((name, dtype, shape, blocks))
        return found

    def to_json(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "uri": self.uri,
            "revision": self.revision,
            "selection": self.selection,
            "rules": self.rules,
            "directory": self.directory,
            "files": [record.to_json() for record in self.files],
            "weights": list(self.weights),
            "tensors": [[f, n, d, list(s), list(b)] for f, n, d, s, b in self.tensors],
            "identity": dict(self.identity),
            "listing": [list(row) for row in self.listing],
            "mx": self.version,
            "created": self.created,
        }

    @classmethod
    def from_json(cls, data: Any, where: str) -> Manifest:
        """Raises IntegrityError for anything but a manifest, UsageError for one of a newer format.

        Its names become paths below the snapshot: one that leads elsewhere makes it none.
        """
        try:
            if data["format"] > FORMAT:
                raise UsageError(
                    f"the manifest {where} was written by a newer mx (format {data['format']}, known {FORMAT})"
                )
            try:
                check_paths(str(f["path"]) for f in data["files"])
            except IntegrityError as error:
                raise ValueError(error.what) from None
            # Of what was never in a cache it is empty.
            if data["directory"] and ("/" in data["directory"] or fault(data["directory"])):
                raise ValueError(f"directory {data['directory']!a}")
            return cls(
                uri=str(data["uri"]),
                revision=str(data["revision"]),
                selection=str(data["selection"]),
                rules=int(data["rules"]),
                directory=str(data["directory"]),
                files=tuple(
                    FileRecord(str(f["path"]), int(f["size"]), str(f["xxh3"]), str(f["validator"]), dict(f["digests"]))
                    for f in data["files"]
                ),
                weights=tuple(map(str, data["weights"])),
                tensors=tuple((str(f), str(n), str(d), tuple(s), tuple(b)) for f, n, d, s, b in data["tensors"]),
                identity=dict(data["identity"]),
                listing=tuple((str(path), size) for path, size in data["listing"]),
                version=str(data["mx"]),
                created=str(data["created"]),
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise IntegrityError(f"not a manifest: {where} ({error!r})") from None


def selection_digest(paths: Iterable[str]) -> str:
    """16 hex digits that name a resolved, sorted list of files."""
    return canonical.sha256(sorted(paths))[:16]
