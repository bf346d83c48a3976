"""Reading a snapshot again, and comparing it with what its manifest and its origin say."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

from mx_cli.base.errors import IntegrityError
from mx_cli.base.filesystem import open_regular
from mx_cli.base.oserrors import explain
from mx_cli.cache.files import NO_FILE
from mx_cli.cache.layout import Model
from mx_cli.engine.verify import DigestMismatch, OriginDigest, WholeDigest, read_through
from mx_cli.flows.context import Context
from mx_cli.model import header
from mx_cli.model.manifest import Entry, FileRecord, Listing, Manifest


@dataclass(frozen=True, slots=True)
class Damage:
    """A file that is not what its manifest says: `why` names expected and observed."""

    path: str
    why: str


def verify_snapshot(model: Model, manifest: Manifest, listing: Listing, context: Context) -> str:
    """Hash every file; raise IntegrityError naming the damaged ones. Returns what it was compared with. Reads only."""
    digests = {entry.path: entry for entry in listing.files if entry.digests}
    damage = find_damage(model, manifest, context.stop.check, digests)
    if damage:
        shown = "; ".join(f"{found.path}: {found.why}" for found in damage[:5])
        raise IntegrityError(
            f"{model.snapshot(manifest.directory)} is damaged: {shown}",
            hint="mx cache rm the snapshot, then prefetch again",
        )
    return "the origin's digests and the manifest" if digests else "the manifest"


def find_damage(
    model: Model, manifest: Manifest, check: Callable[[], None], origin: dict[str, Entry] | None = None
) -> list[Damage]:
    """Every damaged or missing file of a manifest. `check` is called often and may raise to stop."""
    found = []
    for record in manifest.files:
        why = _wrong(model, manifest, record, check, (origin or {}).get(record.path))
        if why:
            found.append(Damage(record.path, why))
    return found


def _wrong(model: Model, manifest: Manifest, record: FileRecord, check: Callable[[], None], entry: Entry | None) -> str:
    path = model.snapshot(manifest.directory) / record.path
    whole, origin = WholeDigest(), OriginDigest(record.path, entry.digests if entry else record.digests, record.size)
    head = bytearray()

    def take(view: memoryview) -> None:
        check()
        if not head:
            head.extend(view[: header.SNIFF_BYTES])
        whole.update(view)
        origin.update(view)

    try:
        fd = open_regular(path)
    except FileNotFoundError:
        return "missing"
    except OSError as error:
        if error.errno in NO_FILE:
            return "not a regular file"
        raise explain(error, f"reading {path}") from None
    try:
        size = read_through(fd, take)
    except OSError as error:
        return f"unreadable: {error.strerror}"
    finally:
        os.close(fd)
    whole.finish()
    return _verdict(record, size, whole.value, origin, bytes(head))


def _verdict(record: FileRecord, size: int, digest: str, origin: OriginDigest, head: bytes) -> str:
    if size != record.size:
        return f"wrong size (expected {record.size}, observed {size})"
    if digest != record.xxh3:
        named = header.sniff(head)
        return named or f"wrong xxh3 (expected {record.xxh3}, observed {digest})"
    try:
        origin.finish()
    except DigestMismatch as error:
        return error.what
    return ""
