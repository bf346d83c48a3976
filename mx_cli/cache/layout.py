"""The tree of the shared cache.

    ROOT/
      CACHEDIR.TAG   format                        {"format":1,"reads_need":1,"writes_need":1}
      models/<slug>/                               readable name + 10 hex digits of the canonical URI
        origin.json                                the URI without secrets
        refs/<name>.json                           a moving name -> revision, and when that was
        snapshots/<revision>[+<8hex>]/…            the checkpoint's own files; never written in place
        manifests/<revision>/<selection>.json      immutable, written last: the commit point
        staging/<revision>/<16hex>.part.<term>     parts, and journal.<term>
                                                   .trash.<term>: what a removal has set aside
        lease/<revision>/                          lead.<term> beat.<term>.<seq>.<bytes> note.<term>.<seq>
                                                   left.<term> failed.<term> lock
        pins/<name>.json   used/<revision>/<yyyymmdd>

No name of ours is longer than 143 bytes. Other processes and hosts are heard through directory listings only: on network
file systems a listing is fresh where a look-up of a name may be answered from a cache.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import itertools
import json
import math
import os
import re
import stat
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from mx_cli.base import canonical
from mx_cli.base.errors import FilesystemRefused, MxError, UsageError
from mx_cli.base.filesystem import nearest, open_regular
from mx_cli.base.oserrors import explain, in_the_way
from mx_cli.base.temporary import temporary_in
from mx_cli.cache import umask

FORMAT = 1
UNVERSIONED = "none"
TAG = "Signature: 8a477f597d28d172789f06886806bc55\n# A cache of mx. Backup programs may leave it out.\n"
OWN = frozenset({"CACHEDIR.TAG", "format", "models", "peers", "digests"})
"""The names in a cache root that are mx's."""
HIDDEN = frozenset({errno.ENOENT, errno.ESTALE})
NO_FILE = frozenset({errno.EISDIR, errno.EINVAL, errno.ENXIO, errno.ELOOP})
"""What opening says where a directory, a link, a pipe or a device has a file's name."""
NO_RENAME = frozenset({errno.ENOSYS, errno.EXDEV, errno.ENOTSUP})

_NUMBER = re.compile(r"0|[1-9][0-9]{0,99}")

T = TypeVar("T")


def slug(uri: str) -> str:
    """A directory name for a canonical URI: its readable end, and 10 hex digits that tell it from all others."""
    path = uri.partition("://")[2] or uri
    readable = "-".join(part for part in path.split("/") if part)[-60:]
    readable = re.sub(r"[^A-Za-z0-9._-]+", "-", readable).strip("-.") or "model"
    return f"{readable}-{hashlib.sha256(uri.encode()).hexdigest()[:10]}"


def revision_name(revision: str, term: int) -> str:
    """The name of a revision in the tree. An origin without versions has none: each download of it is one of its own."""
    return revision or f"{UNVERSIONED}-{term}"


def term_of(name: str) -> int | None:
    """The term of a download from an origin without versions; None for the name of any other revision."""
    kind, _, term = name.rpartition("-")
    return number_of(term) if kind == UNVERSIONED else None


def number_of(text: str) -> int | None:
    """The number that a part of a name of ours holds; None for whatever else stands there."""
    return int(text) if _NUMBER.fullmatch(text) else None


def lease_name(revision: str) -> str:
    """The lease that guards a revision, given by its name or empty: one for all downloads of an origin without versions."""
    return UNVERSIONED if not revision or term_of(revision) is not None else revision


@functools.lru_cache(maxsize=1 << 16)
def part_id(path: str) -> str:
    """16 hex digits that stand for a relative path inside staging."""
    return hashlib.sha256(path.encode("utf-8", "surrogateescape")).hexdigest()[:16]


def names(directory: Path) -> list[str]:
    """The directory's names; empty when it is not there. Raises FilesystemRefused."""
    try:
        return os.listdir(directory)
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise explain(error, f"listing {directory}") from None


def make_dirs(directory: Path) -> None:
    """Like mkdir -p. Raises FilesystemRefused naming owner, mode and who we are."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        # Another host made it, and look-ups here do not know yet: the listing does.
        taken = directory.is_file() or directory.is_symlink()
        if error.errno == errno.EEXIST and directory.name in names(directory.parent) and not taken:
            return
        raise refused(error, f"creating {directory}", directory) from None


def refused(error: OSError, what: str, path: Path) -> FilesystemRefused:
    """The refusal with the state of the nearest directory that exists, or with what has its place."""
    if error.errno in (errno.EEXIST, errno.ENOTDIR, errno.ELOOP) and (why := in_the_way(path)):
        return FilesystemRefused(f"{what}: {why}", hint="choose another place, or move it away")
    found = explain(error, what)
    if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
        raise found
    near = nearest(path)
    info = near.stat()
    mode = stat.S_IMODE(info.st_mode)
    hint = (
        "in Kubernetes set securityContext.fsGroup, or chown the volume once (initial chown); else choose --cache-dir"
    )
    if error.errno == errno.EROFS:
        hint = "mount the volume writable for the pod that fills it"
    return FilesystemRefused(f"{found.what}; {near} belongs to {info.st_uid}:{info.st_gid}, mode {mode:04o}", hint=hint)


def write_all(fd: int, data: bytes) -> None:
    """Write all of it where the descriptor stands. Raises OSError."""
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def write_private(path: Path, data: bytes, *, sync: bool = True) -> None:
    """Write a new file that nobody reads under this name yet. Raises NoSpace, FilesystemRefused."""
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        try:
            write_all(fd, data)
            if sync:
                os.fsync(fd)
        finally:
            os.close(fd)
    except OSError as error:
        if not isinstance(error, FileExistsError):
            with contextlib.suppress(OSError):
                os.unlink(path)
        raise refused(error, f"writing {path}", path.parent) from None


def write_atomic(path: Path, data: bytes) -> None:
    """Replace `path` in one step; readers see the old or the new content, never a part of it."""
    temporary = temporary_in(path.parent)
    write_private(temporary, data)
    try:
        os.rename(temporary, path)
        sync_directory(path.parent)
    except OSError as error:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        if error.errno in NO_RENAME:
            raise cannot_rename(error, path.parent) from None
        raise explain(error, f"renaming to {path}") from None


def cannot_rename(error: OSError, directory: Path) -> FilesystemRefused:
    """The refusal of a place where nothing could ever be published."""
    return FilesystemRefused(
        f"{directory} cannot rename files ({os.strerror(error.errno or 0)})",
        hint="object-store mounts cannot hold a cache; use a local or network file system",
    )


def sync_directory(directory: Path) -> None:
    """Make the directory's names durable, where the file system knows how."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS):
            raise
    finally:
        os.close(fd)


def seen(what: Callable[[], T], patience: float, *, within: Path, pause: Callable[[float], None] = time.sleep) -> T:
    """`what()`, again while look-ups hide a name that listings show, for at most `patience` seconds. Raises OSError.

    Network file systems remember for up to a minute that a name was not there; a listing knows better. `pause` may raise.
    """
    end = time.monotonic() + patience
    while True:
        try:
            return what()
        except OSError as error:
            hidden = error.errno in HIDDEN and error.filename and is_listed(Path(error.filename), within)
            if not hidden or time.monotonic() >= end:
                raise
        pause(0.1)


def is_listed(path: Path, within: Path) -> bool:
    """Whether listings, from `within` downwards, show the path, or show a directory on its way that cannot be entered yet."""
    place = within
    for name in path.relative_to(within).parts:
        try:
            if name not in os.listdir(place):
                return False
        except OSError as error:
            return error.errno in HIDDEN and place != within
        place = place / name
        if place.is_symlink():
            # It can be looked up. What it leads to is not there, and nothing of ours is a link.
            return False
    return True


def read_file(path: Path) -> bytes:
    """All bytes of a regular file; what else took its name (a pipe, a device) is not read. Raises OSError."""
    with open(open_regular(path, follow=True), "rb") as file:
        return file.read()


def make_way(path: Path) -> None:
    """Take what is no regular file off a name that is ours: a directory gets another name, a link or a pipe goes.

    Raises OSError.
    """
    with contextlib.suppress(FileNotFoundError):
        mode = os.lstat(path).st_mode
        if stat.S_ISDIR(mode):
            os.rename(path, temporary_in(path.parent).with_suffix(".foreign"))
        elif not stat.S_ISREG(mode):
            os.unlink(path)


def read_json(path: Path) -> Any:
    """The document, or None when it is missing, hidden, unreadable or not JSON (yet)."""
    try:
        return json.loads(read_file(path))
    except (OSError, ValueError, RecursionError):
        return None


def number_in(document: Mapping[str, Any], name: str) -> float:
    """A number that a record of another process holds; 0 for everything else that stands there."""
    value = document.get(name)
    return value if isinstance(value, (int, float)) and math.isfinite(value) else 0


class Cache:
    """A cache root. Opening one writes nothing."""

    def __init__(self, root: Path, *, chosen: bool = True) -> None:
        self.root = root
        self.chosen = chosen
        self._check_format()
        self._share_with_group()

    def _check_format(self) -> None:
        # One below a file cannot be made, which is said by who makes it: a stream needs none.
        if os.path.lexists(self.root) and (why := in_the_way(self.root)):
            raise FilesystemRefused(f"the cache {self.root}: {why}", hint="choose another --cache-dir")
        data = read_json(self.root / "format")
        needs = [data.get(name, FORMAT) if isinstance(data, dict) else FORMAT for name in ("reads_need", "writes_need")]
        if not all(isinstance(need, int) for need in needs):
            raise FilesystemRefused(
                f"{self.root / 'format'} is damaged (observed {data})", hint="remove that file: mx writes it anew"
            )
        reads, writes = needs
        if reads > FORMAT:
            raise UsageError(
                f"the cache {self.root} has a newer format ({data.get('format')}, known {FORMAT})",
                hint="use the newer mx, or another --cache-dir",
            )
        self.writable_format = writes <= FORMAT

    def prepare(self) -> None:
        """Create what a cache root needs. Idempotent; raises FilesystemRefused."""
        if not self.writable_format:
            raise UsageError(f"the cache {self.root} may only be written by a newer mx")
        make_dirs(self.root)
        present = set(names(self.root))
        if "format" not in present:
            data = {"format": FORMAT, "reads_need": FORMAT, "writes_need": FORMAT}
            write_atomic(self.root / "format", canonical.dumps(data))
        if "CACHEDIR.TAG" not in present:
            write_atomic(self.root / "CACHEDIR.TAG", TAG.encode())
        make_dirs(self.root / "models")

    def _share_with_group(self) -> None:
        """In a group-writable root everything is made group-writable, whatever the umask: Kubernetes cannot set one.

        So it is with a root that is still to be made in a volume with an fsGroup: group-writable, and setgid.
        """
        near = nearest(self.root)
        mode = near.stat().st_mode
        if mode & stat.S_IWGRP and (near == self.root or mode & stat.S_ISGID):
            umask.relax()

    @property
    def models(self) -> Path:
        return self.root / "models"

    def model(self, uri: str) -> Model:
        return Model(self.models / slug(uri), uri)

    def all_models(self) -> Iterator[Model]:
        """Every directory that says of which model it is."""
        for name in sorted(names(self.models)):
            if uri := _uri_in(self.models / name):
                yield Model(self.models / name, uri)


class Model:
    """One model's directory."""

    def __init__(self, path: Path, uri: str) -> None:
        self.path, self.uri = path, uri

    @property
    def exists(self) -> bool:
        return self.path.name in names(self.path.parent)

    def snapshot(self, directory: str) -> Path:
        return self.path / "snapshots" / directory

    def manifests(self, revision: str) -> Path:
        return self.path / "manifests" / revision

    def staging(self, revision: str) -> Path:
        return self.path / "staging" / revision

    def lease(self, revision: str) -> Path:
        return self.path / "lease" / lease_name(revision)

    @property
    def refs(self) -> Path:
        return self.path / "refs"

    @property
    def pins(self) -> Path:
        return self.path / "pins"

    def used(self, revision: str) -> Path:
        return self.path / "used" / revision

    def prepare(self) -> None:
        """Create the model's directory and say what it is of. Idempotent."""
        make_dirs(self.path)
        if "origin.json" not in names(self.path) or read_json(self.path / "origin.json") is None:
            write_atomic(self.path / "origin.json", canonical.dumps({"uri": self.uri}))
        # There before anybody looks into it: a name that was looked for in vain may stay hidden for a minute.
        make_dirs(self.path / "manifests")

    def write_ref(self, name: str, revision: str) -> None:
        """Remember what a moving name was resolved to."""
        path = self.refs / f"{ref_file(name)}.json"
        known = read_json(path)
        if (
            isinstance(known, dict)
            and known.get("revision") == revision
            and time.time() - number_in(known, "resolved") < 60
        ):
            return
        make_dirs(self.refs)
        write_atomic(path, canonical.dumps({"name": name, "revision": revision, "resolved": round(time.time(), 3)}))

    def read_ref(self, name: str) -> tuple[str, float] | None:
        """(revision, when it was resolved in seconds since 1970) of a moving name."""
        # Earlier versions of mx gave names with capitals no digest.
        for file in (ref_file(name), name):
            data = read_json(self.refs / f"{file}.json")
            if isinstance(data, dict) and data.get("name") == name and isinstance(data.get("revision"), str):
                return data["revision"], number_in(data, "resolved")
        return None

    def mark_used(self, revision: str) -> None:
        """Leave today's mark, for gc; best effort, and nothing on a read-only mount."""
        day = time.strftime("%Y%m%d", time.gmtime())
        directory = self.used(revision)
        with contextlib.suppress(OSError, MxError):
            if day in names(directory) or not os.access(self.path, os.W_OK):
                return
            make_dirs(directory)
            os.close(os.open(directory / day, os.O_WRONLY | os.O_CREAT, 0o666))


def _uri_in(directory: Path) -> str:
    """The URI of a model's directory, by its origin.json, or by a manifest where that is damaged; empty for others."""
    documents = map(read_json, itertools.chain([directory / "origin.json"], directory.glob("manifests/*/*.json")))
    found = (document.get("uri") for document in documents if isinstance(document, dict))
    return next((uri for uri in found if isinstance(uri, str)), "")


def ref_file(name: str) -> str:
    """A name that somebody chose as a file name; a digest tells unusual ones apart, also where case does not count."""
    plain = re.sub(r"[^A-Za-z0-9._-]", "-", name)[:80].lstrip(".") or "ref"
    return plain if plain == name.lower() else f"{plain}-{hashlib.sha256(name.encode()).hexdigest()[:10]}"
