"""What is in the cache: revisions and their snapshots, pins, marks of use, and what unfinished downloads left. Reads only."""

from __future__ import annotations

import calendar
import contextlib
import json
import os
import re
import stat
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from mx_cli.base.errors import IntegrityError, UsageError
from mx_cli.base.temporary import is_temporary
from mx_cli.cache.files import NO_FILE, names, read_file, read_json
from mx_cli.cache.journal import claims
from mx_cli.cache.layout import Model, lease_name, part_id
from mx_cli.cache.snapshots import Missing, Snapshots, is_manifest
from mx_cli.model.manifest import FileRecord, Manifest
from mx_cli.plan.ranges import merge, total

DAY = 86400.0
ANY = ""
"""The revision of a pin that cannot be read: it may be any."""
_ALL_TERMS = 1 << 62
LEFT = re.compile(r"(?:[0-9a-f]{16}\.(?:part|copy)|journal|\.trash)\.\d+")
_PROBE = re.compile(r"\.[0-9a-f]{16}\.probe")


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A directory that manifests vouch for: its files by path, and those that are not on the disk as promised."""

    directory: str
    files: dict[str, FileRecord]
    missing: tuple[Missing, ...]

    @property
    def size(self) -> int:
        return sum(record.size for record in self.files.values())


@dataclass(frozen=True)
class Revision:
    """A revision in the cache. Times are seconds since 1970, 0 = never; `used` is the start of the last day of use.

    `unread` names manifests that say nothing to this mx. `sealed` says why nothing of it may be removed: what a manifest
    vouches for cannot be known (a newer mx wrote it, or the file system does not show it now).
    `directories` exist under snapshots/. `leftovers` are paths that only an unfinished download or gc explains.
    """

    model: Model
    name: str
    manifests: tuple[Manifest, ...] = ()
    unread: tuple[str, ...] = ()
    sealed: str = ""
    published: float = 0.0
    used: float = 0.0
    pins: tuple[str, ...] = ()
    directories: tuple[str, ...] = ()
    leftovers: tuple[Path, ...] = field(default=(), repr=False)

    @property
    def vouched(self) -> bool:
        """Whether a manifest stands for anything of it."""
        return bool(self.manifests or self.unread)

    def snapshots(self) -> list[Snapshot]:
        """Its snapshots, each file looked at."""
        known = Snapshots(self.model)
        found = []
        for directory in sorted({manifest.directory for manifest in self.manifests}):
            mine = [manifest for manifest in self.manifests if manifest.directory == directory]
            files = {record.path: record for manifest in mine for record in manifest.files}
            missing = {gone.path: gone for manifest in mine for gone in known.missing(manifest)}
            found.append(Snapshot(directory, files, tuple(missing[path] for path in sorted(missing))))
        return found

    def paths(self) -> list[Path]:
        """Every file of it: of its snapshot directories, and what is in staging."""
        model = self.model
        return [
            path
            for top in (*(model.snapshot(directory) for directory in self.directories), model.staging(self.name))
            for path in walk(top)
        ]


def revisions(model: Model) -> list[Revision]:
    """Every revision of which something is there, sorted by name."""
    found = {name for kind in ("manifests", "staging") for name in names(model.path / kind)}
    found |= {name.partition("+")[0] for name in names(model.path / "snapshots")}
    pins = pins_by_revision(model)
    all_of_them = (read_revision(model, name, pins) for name in sorted(found) if not name.startswith("."))
    # A directory that no download ever led to is not ours.
    led = set(names(model.path / "lease"))
    return [r for r in all_of_them if r.vouched or r.leftovers or (r.directories and lease_name(r.name) in led)]


def read_revision(model: Model, name: str, pins: dict[str, tuple[str, ...]] | None = None) -> Revision:
    """The present state of one revision."""
    pins = pins_by_revision(model) if pins is None else pins
    manifests, unread, sealed = _manifests(model.manifests(name))
    listed = sorted(d for d in names(model.path / "snapshots") if d == name or d.startswith(f"{name}+"))
    times = [_published(manifest) for manifest in manifests]
    times += [_changed(model.manifests(name) / one) for one in unread]
    found = Revision(
        model=model,
        name=name,
        manifests=tuple(manifests),
        unread=tuple(unread),
        sealed=sealed,
        published=max(times, default=0.0),
        used=max((_day(mark) for mark in names(model.used(name))), default=0.0),
        pins=tuple(sorted({*pins.get(name, ()), *pins.get(ANY, ())})),
        directories=tuple(listed),
    )
    return Revision(**{**vars(found), "leftovers": tuple(_leftovers(found))})


def _manifests(directory: Path) -> tuple[list[Manifest], list[str], str]:
    read, unread, sealed = [], [], ""
    for name in sorted(names(directory)):
        if not is_manifest(name):
            continue
        try:
            read.append(Manifest.from_json(json.loads(read_file(directory / name)), str(directory / name)))
        except UsageError:
            unread.append(name)
            sealed = "a newer mx wrote it"
        except OSError as error:
            unread.append(name)
            if error.errno not in NO_FILE:
                sealed = f"its manifest cannot be read now ({error.strerror})"
        except (ValueError, RecursionError, IntegrityError):
            unread.append(name)
    return read, unread, sealed


def pins_by_revision(model: Model) -> dict[str, tuple[str, ...]]:
    """The names of the pins of each revision. A pin that cannot be read stands under ANY."""
    found: dict[str, tuple[str, ...]] = {}
    for file in sorted(names(model.pins)):
        if file.endswith(".json") and not file.startswith("."):
            data = read_json(model.pins / file)
            known = isinstance(data, dict) and isinstance(data.get("revision"), str)
            revision = data["revision"] if known else ANY
            name = str(data.get("name") or file[:-5]) if known else file[:-5]
            found[revision] = (*found.get(revision, ()), name)
    return found


def owned(revision: Revision) -> dict[str, set[str]]:
    """For each of its directories, the relative paths that mx put there and that no manifest vouches for now.

    Journals of unfinished terms know them, and the manifests that an unfinished gc set aside.
    """
    if revision.sealed:
        return {}
    staging = revision.model.staging(revision.name)
    ids = set(claims(staging, before=_ALL_TERMS))
    aside: dict[str, set[str]] = {}
    for trash in (name for name in names(staging) if name.startswith(".trash.")):
        for manifest in _manifests(staging / trash)[0]:
            aside.setdefault(manifest.directory, set()).update(record.path for record in manifest.files)
    found = {}
    for directory in revision.directories:
        top = revision.model.snapshot(directory)
        vouched = {r.path for m in revision.manifests if m.directory == directory for r in m.files}
        there = {str(path.relative_to(top)) for path in walk(top)} - vouched
        mine = aside.get(directory, set())
        found[directory] = {path for path in there if path in mine or part_id(path) in ids or _is_debris(top / path)}
    return found


def _leftovers(revision: Revision) -> Iterator[Path]:
    staging = revision.model.staging(revision.name)
    for name in sorted(names(staging)):
        if LEFT.fullmatch(name) or _is_debris(staging / name):
            yield staging / name
    for directory, paths in owned(revision).items():
        yield from (revision.model.snapshot(directory) / path for path in sorted(paths))


def _is_debris(path: Path) -> bool:
    """A temporary name of mx that nobody can be about to rename any more: a day is beyond every clock's error."""
    named = is_temporary(path.name) or _PROBE.fullmatch(path.name)
    return bool(named) and 0 < _changed(path) < time.time() - DAY


def walk(top: Path) -> Iterator[Path]:
    """All files below a directory, or the file itself; nothing when it is not there. Follows no symlinks."""
    if top.is_symlink():
        return
    try:
        entries = sorted(os.scandir(top), key=lambda entry: entry.name)
    except NotADirectoryError:
        yield top
        return
    except OSError:
        return
    for entry in entries:
        if entry.is_dir(follow_symlinks=False):
            yield from walk(Path(entry.path))
        else:
            yield Path(entry.path)


def disk_use(paths: Iterable[Path], seen: set[tuple[int, int]] | None = None) -> int:
    """Bytes of disk behind the files; an inode counts once over all calls with the same `seen`."""
    seen = set() if seen is None else seen
    total = 0
    for path in paths:
        with contextlib.suppress(OSError):
            info = os.stat(path, follow_symlinks=False)
            if (info.st_dev, info.st_ino) not in seen:
                seen.add((info.st_dev, info.st_ino))
                total += info.st_blocks * 512
    return total


def freed(paths: Iterable[Path]) -> int:
    """Bytes of disk that come free when all these names go: other links to the same bytes keep them."""
    links: dict[tuple[int, int], int] = {}
    total = 0
    for path in paths:
        with contextlib.suppress(OSError):
            info = os.stat(path, follow_symlinks=False)
            if stat.S_ISDIR(info.st_mode):
                continue
            key = info.st_dev, info.st_ino
            links[key] = links.get(key, 0) + 1
            if links[key] == info.st_nlink:
                total += info.st_blocks * 512
    return total


def _published(manifest: Manifest) -> float:
    try:
        return float(calendar.timegm(time.strptime(manifest.created, "%Y-%m-%dT%H:%M:%SZ")))
    except ValueError:
        return 0.0


def _day(mark: str) -> float:
    try:
        return float(calendar.timegm(time.strptime(mark, "%Y%m%d")))
    except ValueError:
        return 0.0


def _changed(path: Path) -> float:
    try:
        return os.stat(path, follow_symlinks=False).st_mtime
    except OSError:
        return 0.0


def resumable(model: Model, name: str) -> int:
    """Bytes that an unfinished download has in place, as its journals claim: the next one hashes them before it believes."""
    found = read_revision(model, name)
    staging = model.staging(name)
    there = {file.partition(".")[0] for file in names(staging) if ".part." in file}
    there |= {part_id(path) for paths in owned(found).values() for path in paths}
    spans = {
        part: merge([(claim.offset, claim.offset + claim.length) for claim in made])
        for part, made in claims(staging, before=_ALL_TERMS).items()
        if part in there
    }
    return sum(total(places) for places in spans.values())
