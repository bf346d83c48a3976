"""`mx cache`: what is there, whether it is whole, and taking it away again."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from mx_cli.base.errors import IntegrityError, MxError, NotFound, UsageError, WaitExpired
from mx_cli.base.events import Progress
from mx_cli.cache import evict, inventory
from mx_cli.cache.evict import Evictor, Policy
from mx_cli.cache.follow import Watch
from mx_cli.cache.inventory import Revision
from mx_cli.cache.layout import Model, lease_name, slug
from mx_cli.flows.context import Context
from mx_cli.flows.verify import Damage, find_damage
from mx_cli.sources import registry

PREFIX = 6
SHOWN = 20


@dataclass(frozen=True, slots=True)
class Target:
    """A model, or one revision of it (None = all)."""

    model: Model
    revision: str | None = None

    def revisions(self) -> list[Revision]:
        return [r for r in inventory.revisions(self.model) if self.revision in (None, r.name)]


@dataclass(frozen=True, slots=True)
class Row:
    """One line of `mx cache ls`: a snapshot, or a revision without one. Times in seconds since 1970, None = never."""

    uri: str
    revision: str
    directory: Path | None
    size: int
    files: int
    published: int | None
    used: int | None
    pins: tuple[str, ...]
    state: str


@dataclass(frozen=True, slots=True)
class Usage:
    """Bytes of disk of one model; an inode counts once. `unfinished` = parts and other leftovers, among `disk`."""

    uri: str
    directory: Path
    revisions: int
    disk: int
    unfinished: int


@dataclass(frozen=True, slots=True)
class Fate:
    """What happens, or would, to a revision: `action` is keep, remove, or sweep (its leftovers only)."""

    uri: str
    revision: str
    action: str
    why: str
    size: int


@dataclass(frozen=True, slots=True)
class Removal:
    """The fates; `freed` bytes of disk when all of it is done; `done` = it was."""

    fates: tuple[Fate, ...]
    freed: int
    done: bool


# -- what is there ---------------------------------------------------------------------------------------------------


def targets(context: Context, named: Iterable[str]) -> list[Target]:
    """The models and revisions that were named; all models when none was. Raises NotFound, UsageError."""
    known = {model.path.name: model for model in context.cache().all_models()}
    found = [_target(context, known, name) for name in named]
    return found or [Target(model) for model in known.values()]


def _target(context: Context, known: dict[str, Model], name: str) -> Target:
    if name.endswith("@"):
        # The revision of a script's empty variable: the whole model was not meant.
        raise UsageError(f"{name}: no revision after the @", hint="leave the @ out to name the whole model")
    model, suffix = _model(context, known, name)
    if model is None and "@" in name:
        head, _, tail = name.rpartition("@")
        model, _ = _model(context, known, head)
        suffix = tail
    if model is None or not inventory.revisions(model):
        raise NotFound(f"{name} is not in the cache {context.cache().root}", hint="mx cache ls shows what is")
    return Target(model, _revision(model, suffix) if suffix else None)


def _model(context: Context, known: dict[str, Model], name: str) -> tuple[Model | None, str]:
    """The model by slug or URI, and the revision that is part of a hub URI."""
    # A copy of a model's directory is that model, too, under another name.
    models = sorted(known.values(), key=lambda model: model.path.name != slug(model.uri))
    for model in models:
        if name in (model.path.name, model.uri):
            return model, ""
    try:
        uri = registry.parse(name, context.settings, context.resolved.environ)
    except (UsageError, NotFound):
        return None, ""
    return next((model for model in models if model.uri == uri.text), None), uri.revision


def _revision(model: Model, text: str) -> str:
    """A revision by its name, the beginning of its name, or a moving name that was resolved here."""
    names = [revision.name for revision in inventory.revisions(model)]
    if text in names:
        return text
    ref = model.read_ref(text)
    if ref and ref[0] in names:
        return ref[0]
    near = [name for name in names if len(text) >= PREFIX and name.startswith(text)]
    if len(near) > 1:
        raise UsageError(f"{text} is the beginning of several revisions of {model.uri}: {', '.join(near)}")
    if not near:
        raise NotFound(f"{model.uri} has no revision {text} in the cache", hint=f"mx cache ls {model.uri}")
    return near[0]


def rows(context: Context, named: Iterable[str]) -> list[Row]:
    """What is in the cache. Looks at every file's name and size, reads none; writes nothing."""
    return [
        row for target in targets(context, named) for revision in target.revisions() for row in _rows(context, revision)
    ]


def _rows(context: Context, revision: Revision) -> Iterator[Row]:
    busy = " downloading" if _led(context, revision) else ""
    common = (int(revision.published) or None, int(revision.used) or None, revision.pins)
    model = revision.model
    snapshots = revision.snapshots()
    for one in snapshots:
        state = "complete"
        if one.missing:
            lost = one.missing[0]
            more = f" and {len(one.missing) - 1} more" if len(one.missing) > 1 else ""
            state = f"damaged ({lost.path}: {lost.why}{more})"
        path = model.snapshot(one.directory)
        yield Row(model.uri, revision.name, path, one.size, len(one.files), *common, state + busy)
    if not snapshots:
        state = f"unknown ({revision.sealed})" if revision.sealed else "damaged (manifest)" if revision.unread else ""
        state = state or ("" if busy else "unfinished" if revision.leftovers else "foreign files")
        size = inventory.disk_use(revision.paths())
        yield Row(model.uri, revision.name, None, size, 0, *common, (state + busy).strip())


def _led(context: Context, revision: Revision) -> bool:
    """Whether somebody seems to lead. It is one look: a leader elsewhere that died a moment ago still counts."""
    lease = context.lease(revision.model, revision.name)
    view = lease.look()
    return bool(view.term) and not (view.left or view.failed or lease.surely_dead(view.term))


def usage(context: Context, named: Iterable[str]) -> list[Usage]:
    """Disk use of each model. Writes nothing."""
    found = []
    for target in targets(context, named):
        seen: set[tuple[int, int]] = set()
        revisions = target.revisions()
        left = sum(inventory.disk_use(_leftover_files(revision), seen) for revision in revisions)
        disk = left + sum(inventory.disk_use(revision.paths(), seen) for revision in revisions)
        if revisions:
            found.append(Usage(target.model.uri, target.model.path, len(revisions), disk, left))
    return found


def _leftover_files(revision: Revision) -> list[Path]:
    return [path for top in revision.leftovers for path in inventory.walk(top)]


# -- whether it is whole ---------------------------------------------------------------------------------------------


def verify(context: Context, named: Iterable[str]) -> tuple[int, int]:
    """Read and hash every file that a manifest vouches for. Returns (files, bytes); writes nothing; blocks for long.

    Raises IntegrityError naming what is damaged, after all was read.
    """
    revisions = [revision for target in targets(context, named) for revision in target.revisions()]
    manifests = {
        (revision.model.path, manifest.directory, record.path, record.xxh3): (revision.model, manifest, record)
        for revision in revisions
        for manifest in revision.manifests
        for record in manifest.files
    }
    total = sum(record.size for _, _, record in manifests.values())
    damage = [(r.model.manifests(r.name), Damage(name, "not a manifest")) for r in revisions for name in _garbage(r)]
    done, began = 0, time.monotonic()
    for count, (model, manifest, record) in enumerate(manifests.values(), 1):
        for found in find_damage(model, dataclasses.replace(manifest, files=(record,)), context.stop.check):
            damage.append((model.snapshot(manifest.directory), found))
            context.warn(f"{damage[-1][0]}/{found.path}: {found.why}")
        done += record.size
        rate = done / max(1e-6, time.monotonic() - began)
        context.emit(Progress("verify", done, total, rate, files_done=count, files_total=len(manifests)))
    for revision in revisions:
        if revision.sealed:
            context.warn(f"{revision.model.uri}@{revision.name} was not verified: {revision.sealed}")
    if damage:
        shown = "; ".join(f"{top}/{found.path}: {found.why}" for top, found in damage[:SHOWN])
        more = f"; and {len(damage) - SHOWN} more" if len(damage) > SHOWN else ""
        raise IntegrityError(
            f"{len(damage)} of {len(manifests)} files are damaged: {shown}{more}",
            hint="mx cache rm MODEL@REVISION --yes, then mx prefetch again",
        )
    return len(manifests), total


def _garbage(revision: Revision) -> tuple[str, ...]:
    return () if revision.sealed else revision.unread


# -- taking it away --------------------------------------------------------------------------------------------------


def gc(context: Context, named: Iterable[str], policy: Policy, *, yes: bool) -> Removal:
    """Remove what `policy` does not keep, and leftovers of terms that are over. Without `yes` only say what would go.

    Blocks for up to the TTL where a leader is silent. A killed run is finished by the next. Raises FilesystemRefused.
    """
    job = _Job(context, yes)
    for target in targets(context, named):
        keep = policy.keep(inventory.revisions(target.model), time.time())
        for revision in target.revisions():
            job.consider(revision, keep)
    return job.run()


def remove(context: Context, name: str, *, force: bool, yes: bool) -> Removal:
    """Remove a model or one revision, all or nothing: pins (unless `force`) and downloads in progress refuse.

    Raises NotFound, UsageError (pinned), WaitExpired (somebody downloads), FilesystemRefused.
    """
    (target,) = targets(context, [name])

    def keep(revision: Revision) -> str:
        if revision.sealed or not revision.pins or force:
            return revision.sealed
        return f"pinned: {', '.join(revision.pins)}"

    for revision in target.revisions():
        if why := keep(revision):
            hint = f"mx cache unpin {revision.pins[0]}, or --force" if revision.pins else ""
            raise UsageError(f"{target.model.uri}@{revision.name} stays ({why})", hint=hint)
    job = _Job(context, yes)
    for revision in target.revisions():
        job.consider(revision, keep)
    _refuse_busy(job.fates)
    removal = job.run()
    _refuse_busy(removal.fates)
    return removal


def _refuse_busy(fates: Iterable[Fate]) -> None:
    for fate in fates:
        if fate.why.startswith(evict.IN_USE):
            raise WaitExpired(f"{fate.uri}@{fate.revision} stays ({fate.why})", hint="mx status shows who downloads")


class _Job:
    """Fates of revisions, decided with a look at their leases, then carried out."""

    def __init__(self, context: Context, yes: bool) -> None:
        self._context, self._yes = context, yes
        self._considered: list[tuple[Revision, evict.Keep]] = []
        self._watches: dict[str, Watch] = {}
        self._free: set[str] | None = None

    def consider(self, revision: Revision, keep: evict.Keep) -> None:
        self._considered.append((revision, keep))
        key = _key(revision)
        if key not in self._watches:
            lease = self._context.lease(revision.model, revision.name)
            self._watches[key] = Watch(lease, self._context.settings.ttl)

    @property
    def free(self) -> set[str]:
        """The leases that nobody holds; blocks the first time."""
        if self._free is None:
            touched = {_key(r): self._watches[_key(r)] for r, keep in self._considered if not keep(r) or r.leftovers}
            self._free = evict.free_leases(touched, self._context.stop.wait)
        return self._free

    @property
    def fates(self) -> list[Fate]:
        return [self._fate(revision, keep) for revision, keep in self._considered]

    def _fate(self, revision: Revision, keep: evict.Keep) -> Fate:
        why = keep(revision)
        action, paths = (
            ("sweep", _leftover_files(revision)) if why or not revision.vouched else ("remove", revision.paths())
        )
        if action == "sweep" and not revision.leftovers:
            action, paths, why = "keep", revision.paths(), why or "foreign files"
        elif _key(revision) not in self.free:
            action, paths = "keep", revision.paths()
            lease = self._context.lease(revision.model, revision.name)
            why = f"{evict.IN_USE} {lease.leader(lease.look().term)}"
        elif action == "sweep":
            why = "left by a download that is over"
        return Fate(revision.model.uri, revision.name, action, why, inventory.disk_use(paths))

    def run(self) -> Removal:
        """Blocks. The first refusal is raised after all others were tried."""
        fates = self.fates
        going = [
            path
            for fate, (revision, _) in zip(fates, self._considered, strict=True)
            for path in self._going(fate, revision)
        ]
        freed = inventory.freed(going)
        if not self._yes:
            return Removal(tuple(fates), freed, done=False)
        refusal: MxError | None = None
        for index, (revision, keep) in enumerate(self._considered):
            if fates[index].action == "keep":
                continue
            try:
                kept = self._evict(revision, keep if fates[index].action == "remove" else None)
                if kept:
                    fates[index] = dataclasses.replace(fates[index], action="keep", why=kept)
            except MxError as error:
                self._context.stop.check()
                refusal = refusal or error
                fates[index] = dataclasses.replace(fates[index], action="keep", why=error.what)
        if refusal:
            raise refusal
        return Removal(tuple(fates), freed, done=True)

    def _going(self, fate: Fate, revision: Revision) -> list[Path]:
        return {"keep": [], "sweep": _leftover_files(revision), "remove": revision.paths()}[fate.action]

    def _evict(self, revision: Revision, keep: evict.Keep | None) -> str:
        context = self._context
        lease = context.lease(revision.model, revision.name)
        work = Evictor(revision.model, context.settings.beat, context.stop)
        return work.evict(revision.name, lease, self._watches[_key(revision)], keep)


def _key(revision: Revision) -> str:
    return f"{revision.model.path.name}/{lease_name(revision.name)}"


def unpin(context: Context, name: str) -> list[Target]:
    """Remove the pins of that name. Returns what they kept; raises NotFound when there is none."""
    found = [Target(model, revision) for model in context.cache().all_models() for revision in evict.unpin(model, name)]
    if not found:
        raise NotFound(f"no pin {name} in the cache {context.cache().root}", hint="mx cache ls shows pins")
    return found
