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
import functools
import hashlib
import itertools
import os
import re
import stat
import time
from collections.abc import Iterator
from pathlib import Path

from mx_cli.base import canonical
from mx_cli.base.errors import FilesystemRefused, MxError, UsageError
from mx_cli.base.filesystem import may, nearest
from mx_cli.base.oserrors import in_the_way
from mx_cli.cache import umask
from mx_cli.cache.files import make_dirs, names, number_in, read_json, write_atomic

FORMAT = 1
UNVERSIONED = "none"
TAG = "Signature: 8a477f597d28d172789f06886806bc55\n# A cache of mx. Backup programs may leave it out.\n"
OWN = frozenset({"CACHEDIR.TAG", "format", "models", "peers", "digests"})
"""The names in a cache root that are mx's."""

_NUMBER = re.compile(r"0|[1-9][0-9]{0,99}")


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
            if day in names(directory) or not may(os.W_OK, self.path):
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
