"""Removing revisions and leftovers, under the same election as a download.

Order, so that a kill at any moment leaves no manifest over missing files: the manifests are set aside, everything is looked
at again, then the files are set aside into `staging/<revision>/.trash.<term>`, where no reader looks, and only then
unlinked. What says which files are ours (manifests set aside, journals) goes last, so that the next run can finish.

    staging/<revision>/.trash.<term>/<selection>.json   a manifest that was taken back
                                     <n>.d  <n>.f       a snapshot directory, a single file

A file that no manifest and no journal explains is foreign and stays where it is.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from mx_cli.base import units
from mx_cli.base.cancel import Stop
from mx_cli.base.errors import MxError
from mx_cli.cache.beat import Beat, Deposed
from mx_cli.cache.files import make_dirs, make_way, names, read_json, refused, sync_directory
from mx_cli.cache.follow import FIRST_POLL, Watch
from mx_cli.cache.inventory import DAY, LEFT, Revision, owned, pins_by_revision, read_revision, walk
from mx_cli.cache.layout import Model
from mx_cli.cache.lease import Lease
from mx_cli.cache.snapshots import is_manifest
from mx_cli.engine.meter import Meter

IN_USE = "in use by"
Keep = Callable[[Revision], str]
"""Why a revision stays; empty when it may go."""


@dataclass(frozen=True, slots=True)
class Policy:
    """What gc keeps: the newest `keep_last` revisions of a model, and what was published or used within `min_age` seconds."""

    keep_last: int
    min_age: float

    def keep(self, revisions: Iterable[Revision], now: float) -> Keep:
        """The rule, for all revisions of one model. The newest are chosen once; pins and use are asked afresh."""
        vouched = sorted((r for r in revisions if r.vouched), key=lambda r: (r.published, r.name), reverse=True)
        newest = {revision.name for revision in vouched[: self.keep_last]}

        def why(revision: Revision) -> str:
            if revision.sealed:
                return revision.sealed
            if revision.pins:
                return f"pinned: {', '.join(revision.pins)}"
            if revision.name in newest:
                return f"one of the newest {self.keep_last}"
            # A mark says which day, not when on it.
            for what, at in (("used", revision.used and revision.used + DAY), ("published", revision.published)):
                age = max(0.0, now - at)
                if at and age < self.min_age:
                    return f"{what} {units.duration(age)} ago" if age else f"{what} today"
            return ""

        return why


def free_leases(watches: Mapping[str, Watch], pause: Callable[[float], None]) -> set[str]:
    """The keys of those that nobody leads. Blocks until each showed a sign of life, or none for the TTL, or its end."""
    free: set[str] = set()
    first: dict[str, tuple[int, str]] = {}
    pending = set(watches)
    while pending:
        for key in sorted(pending):
            view = watches[key].look()
            if watches[key].vacant():
                free.add(key)
            if key in free or first.setdefault(key, view.sign) != view.sign:
                pending.discard(key)
        if pending:
            pause(FIRST_POLL)
    return free


@dataclass
class Evictor:
    """Clears revisions of one model. A stop is heard often; what was begun then is finished by the next run.

    `beat`: seconds between signs of life, so that downloaders wait for a slow removal and don't take it for dead.
    """

    model: Model
    beat: float
    stop: Stop
    meter: Meter = field(default_factory=Meter)

    def evict(self, name: str, lease: Lease, watch: Watch, keep: Keep | None) -> str:
        """Remove a revision unless `keep` has a reason, and its leftovers; with `keep` None only the leftovers.

        Returns the reason why it stayed, empty when it is done. Raises FilesystemRefused, or the stop's reason.
        """
        if not free_leases({name: watch}, self.stop.wait):
            return f"{IN_USE} {lease.leader(watch.view.term)}"
        term = watch.view.term + 1
        if not lease.claim(term):
            return f"{IN_USE} {lease.leader(term)}"
        self.meter.phase = "remove"
        try:
            with Beat(lease, term, self.meter, self.beat, on_deposed=lambda: None):
                return _Eviction(self, lease, term, name).run(keep)
        except Deposed:
            return f"{IN_USE} {lease.leader(lease.look().term)}"
        except OSError as error:
            raise refused(error, f"removing from {self.model.path}", self.model.path) from None
        finally:
            lease.leave(term)
            lease.sweep(term)


class _Eviction:
    """One revision, by the leader of one term."""

    def __init__(self, evictor: Evictor, lease: Lease, term: int, name: str) -> None:
        self._model, self._meter, self._check = evictor.model, evictor.meter, evictor.stop.check
        self._lease, self._term, self._name = lease, term, name
        self._staging = self._model.staging(name)
        self._trash = self._staging / f".trash.{term}"
        self._manifests = self._model.manifests(name)
        self._aside: list[tuple[Path, Path]] = []

    def run(self, keep: Keep | None) -> str:
        why = keep(read_revision(self._model, self._name)) if keep else ""
        if why:
            return why
        make_dirs(self._trash)
        try:
            why = self._retract(keep) if keep else ""
            if not why:
                self._set_files_aside()
        except OSError:
            # Half of a removal would take the model away and free nothing.
            self._put_back(everything=True)
            raise
        if not why:
            self._forget(pins=keep is not None)
        self._empty()
        return why

    def _mine(self) -> None:
        self._check()
        self._meter.tick()
        if self._lease.look().term > self._term:
            raise Deposed("another process leads now")

    # -- taking back ---------------------------------------------------------------------------------------------

    def _retract(self, keep: Keep) -> str:
        """Set the manifests aside, then look again: a use or a pin that came meanwhile puts them back."""
        self._mine()
        before = read_revision(self._model, self._name)
        for name in sorted(names(self._manifests)):
            if is_manifest(name):
                self._move(self._manifests / name, self._trash / name)
        if self._aside:
            sync_directory(self._manifests)
        try:
            self._mine()
        except MxError as error:
            # Nothing but manifests was moved: a stop must not cost what it did not free. A successor decides for itself.
            if not isinstance(error, Deposed):
                self._put_back(everything=True)
            raise
        now = read_revision(self._model, self._name)
        why = keep(Revision(**{**vars(now), "published": before.published}))
        if why:
            self._put_back(everything=True)
        return why

    def _set_files_aside(self) -> None:
        """Whole directories where all is ours, else file by file; back again if another process leads by then."""
        revision = read_revision(self._model, self._name)
        self._mine()
        for directory, paths in owned(revision).items():
            top = self._model.snapshot(directory)
            vouched = any(manifest.directory == directory for manifest in revision.manifests)
            foreign = {str(path.relative_to(top)) for path in walk(top)} - paths
            whole = not foreign and not vouched
            for path in [top] if whole else [top / path for path in sorted(paths) if not _is_elsewhere(top, path)]:
                self._move(path, self._trash / f"{len(self._aside)}.{'d' if whole else 'f'}")
            if not whole:
                _remove_empty(top)
        try:
            self._mine()
        except Deposed:
            self._put_back(everything=False)
            raise

    def _move(self, path: Path, target: Path) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.rename(path, target)
            self._aside.append((path, target))

    def _put_back(self, *, everything: bool) -> None:
        """Undo the renames, but for names that a successor has made again; manifests only with `everything`."""
        for path, target in reversed(self._aside):
            if (everything or path.parent != self._manifests) and not os.path.lexists(path):
                with contextlib.suppress(OSError):
                    path.parent.mkdir(parents=True, exist_ok=True)
                    os.rename(target, path)
        self._aside = []

    # -- unlinking -----------------------------------------------------------------------------------------------

    def _empty(self) -> None:
        """Unlink what is in staging: bytes first, then what explains them."""
        listed = [name for name in sorted(names(self._staging)) if self._is_old(name)]
        trashes = [self._staging / name for name in listed if name.startswith(".trash.")]
        for path in (self._staging / name for name in listed):
            if path not in trashes or path.is_symlink():
                make_way(path)
        for trash in trashes:
            self._unlink(path for path in walk(trash) if path.parent != trash or not is_manifest(path.name))
        self._unlink(self._staging / name for name in listed if ".part." in name or ".copy." in name)
        revision = read_revision(self._model, self._name)
        debris = [path for path in revision.leftovers if path.name.endswith((".tmp", ".probe"))]
        self._unlink(debris)
        self._unlink(self._staging / name for name in listed if name.startswith("journal."))
        for trash in trashes:
            self._unlink(path for path in walk(trash) if path.parent == trash and is_manifest(path.name))
            _remove_empty(trash)

    def _is_old(self, name: str) -> bool:
        term = name.rpartition(".")[2]
        return bool(LEFT.fullmatch(name)) and int(term) <= self._term

    def _unlink(self, paths: Iterable[Path]) -> None:
        for path in list(paths):
            self._check()
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
            self._meter.tick()

    def _forget(self, *, pins: bool) -> None:
        """Without a manifest nothing may name the revision: moving names, marks of use, and pins that were overruled."""
        if any(is_manifest(name) for name in names(self._manifests)):
            return
        for directory in (self._model.refs, self._model.pins) if pins else (self._model.refs,):
            for name in names(directory):
                data = read_json(directory / name) if is_manifest(name) else None
                if isinstance(data, dict) and data.get("revision") == self._name:
                    self._unlink([directory / name])
        used = self._model.used(self._name)
        self._unlink(used / mark for mark in names(used))
        _remove_empty(used)


def _is_elsewhere(top: Path, path: str) -> bool:
    """Whether a link leads out on the way from a snapshot to a file that it should have."""
    return os.path.realpath((top / path).parent) != os.path.join(os.path.realpath(top), os.path.dirname(path)).rstrip(
        "/"
    )


def _remove_empty(top: Path) -> None:
    """Remove a directory and those below it as far as they are empty; what a link leads to is not below it."""
    if top.is_symlink():
        return
    for place, _, _ in os.walk(top, topdown=False):
        with contextlib.suppress(OSError):
            os.rmdir(place)


def unpin(model: Model, name: str) -> list[str]:
    """Remove every pin of that name. Returns the revisions that it kept. Raises FilesystemRefused."""
    found = [revision for revision, pins in pins_by_revision(model).items() if name in pins]
    for file in names(model.pins):
        data = read_json(model.pins / file) if is_manifest(file) else None
        if (isinstance(data, dict) and data.get("name", file[:-5]) == name) or (found and file == f"{name}.json"):
            try:
                os.unlink(model.pins / file)
            except FileNotFoundError:
                continue
            except OSError as error:
                raise refused(error, f"removing {model.pins / file}", model.pins) from None
    return found
