"""How a snapshot leaves the cache: a link, a directory of its own, the Hugging Face layout, a file with the result."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mx_cli.base import canonical
from mx_cli.base.errors import FilesystemRefused, UsageError
from mx_cli.base.oserrors import explain
from mx_cli.cache.layout import Cache, Model, make_dirs, ref_file, sync_directory, write_atomic
from mx_cli.cache.reuse import duplicate
from mx_cli.model.manifest import FileRecord

LAST = (".json",)


def place_of_link(path: Path) -> Path:
    """Where the link will be. Raises UsageError when something that is not a symlink is there."""
    path = Path(os.path.realpath(path.parent)) / path.name
    if os.path.lexists(path) and not path.is_symlink():
        raise UsageError(f"{path} exists and is not a symlink", hint="choose another --link, or move it away")
    return path


def link(target: Path, path: Path, root: Path) -> None:
    """Make `path` a symlink to the snapshot, in one step. Never replaces anything but a symlink.

    Relative when the link lies inside the cache root, so that the root can be mounted elsewhere.
    """
    # realpath: Path.resolve raises for links in a circle; making the directory then says what is wrong.
    path = place_of_link(path)
    inside = path.is_relative_to(os.path.realpath(root))
    to = os.path.relpath(os.path.realpath(target), path.parent) if inside else str(target)
    make_dirs(path.parent)
    temporary = path.with_name(f".{secrets.token_hex(8)}.tmp")
    try:
        os.symlink(to, temporary)
        os.rename(temporary, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise explain(error, f"linking {path}") from None


def copy_to(source: Path, records: list[FileRecord], directory: Path) -> None:
    """Fill `directory` with the snapshot's files: hard links, else clones, else copies. Foreign files stay untouched.

    Files that are there and are the same are left; weights come before the small files that name them, so that whoever
    waits for `config.json` or an index finds everything. Idempotent.
    """
    make_dirs(directory)
    touched = {directory}
    for record in sorted(records, key=lambda r: (r.path.endswith(LAST), r.path)):
        origin, target = source / record.path, directory / record.path
        if _same(origin, target, record):
            continue
        if target.is_dir():
            raise FilesystemRefused(f"{target} is a directory, where a file of the checkpoint belongs")
        make_dirs(target.parent)
        duplicate(origin, target)
        touched.add(target.parent)
    for place in touched:
        try:
            sync_directory(place)
        except OSError as error:
            raise explain(error, f"syncing {place}") from None


def _same(origin: Path, target: Path, record: FileRecord) -> bool:
    try:
        info = os.stat(target, follow_symlinks=False)
    except OSError:
        return False
    if os.path.samestat(info, os.stat(origin)):
        return True
    if info.st_size != record.size:
        return False
    from mx_cli.engine.verify import WholeDigest

    whole = WholeDigest()
    with open(target, "rb") as file:
        while data := file.read(1 << 20):
            whole.update(memoryview(data))
    whole.finish()
    return whole.value == record.xxh3


def write_result(path: Path, document: Mapping[str, Any]) -> None:
    """The JSON document, in one step."""
    make_dirs(path.parent)
    write_atomic(path, json.dumps(document, ensure_ascii=False).encode() + b"\n")


def pin(model: Model, name: str, revision: str, directory: str) -> None:
    """Keep a snapshot from gc under a name; the name moves when it is used again."""
    make_dirs(model.pins)
    data = {"name": name, "revision": revision, "directory": directory, "pinned": round(time.time(), 3)}
    write_atomic(model.pins / f"{ref_file(name)}.json", canonical.dumps(data))


def hf_view(
    cache: Cache, uri: str, revision: str, ref: str, source: Path, records: list[FileRecord], hub: Path
) -> Path:
    """Show a hub snapshot in the Hugging Face cache layout, by hard links only. Returns the snapshot's directory there.

        hub/models--ORG--NAME/refs/<ref>   snapshots/<commit>/<files>

    Raises UsageError for another origin, FilesystemRefused where hard links are not possible: a second copy is no view.
    """
    if not uri.startswith("hf://"):
        raise UsageError(f"--hf-cache is for hf:// origins, not {uri}")
    repository = hub / ("models--" + uri.removeprefix("hf://").replace("/", "--"))
    snapshot = repository / "snapshots" / revision
    for record in records:
        target = snapshot / record.path
        make_dirs(target.parent)
        if target.exists() and os.path.samestat(os.stat(target), os.stat(source / record.path)):
            continue
        temporary = target.with_name(f".{secrets.token_hex(8)}.tmp")
        try:
            os.link(source / record.path, temporary)
            os.rename(temporary, target)
        except OSError as error:
            raise FilesystemRefused(
                f"--hf-cache {hub}: cannot hard-link from {cache.root} ({error.strerror})",
                hint="put both on one file system, or use --to",
            ) from None
        finally:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
    make_dirs(repository / "refs")
    if ref:
        write_atomic(repository / "refs" / ref.replace("/", "--"), revision.encode())
    return snapshot
