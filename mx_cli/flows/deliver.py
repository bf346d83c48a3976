"""How a snapshot leaves the cache: a link, a directory of its own, the Hugging Face layout, a file with the result."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import time
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import unquote_to_bytes

from mx_cli.base import canonical
from mx_cli.base.config import Settings, read_path
from mx_cli.base.errors import FilesystemRefused, UsageError
from mx_cli.base.filesystem import may, nearest
from mx_cli.base.oserrors import explain, in_the_way
from mx_cli.base.temporary import temporary_in
from mx_cli.cache.files import make_dirs, refused, write_atomic
from mx_cli.cache.layout import OWN, Cache, Model, ref_file
from mx_cli.cache.reserve import check_names
from mx_cli.flows.hash import is_local
from mx_cli.flows.request import Request
from mx_cli.model.manifest import FileRecord, Manifest
from mx_cli.model.paths import fault
from mx_cli.sources.files import LEFT_OUT


def check(request: Request, uri: str, root: Path) -> None:
    """Refuse, before anything is fetched, what could not be delivered. Raises UsageError, FilesystemRefused."""
    if request.link:
        link_place = place_of_link(request.link)
        _check_outside("--link", link_place, root)
        _check_writable("--link", link_place.parent)
    if request.to and not os.path.isdir(request.to):
        _check_writable("--to", request.to)
    if request.to and _below(request.to, root) is not None:
        raise UsageError(f"--to {request.to} lies inside the cache {root}", hint="the cache's own directories are mx's")
    origin = _directory_of(uri)
    if origin is not None:
        # What is put there would be part of what is fetched the next time.
        for name, place in (("--to", request.to), ("the cache", root)):
            parts = _below(place, origin) if place else None
            if parts is not None and not LEFT_OUT & set(parts):
                raise UsageError(f"{name} {place} lies inside the origin {origin}", hint="choose another place for it")
    if request.hf_cache is not None:
        check_hub(uri)


def check_names_in_place(request: Request, files: Collection[str]) -> None:
    """Refuse files that cannot stand side by side in --to, or whose names there are taken by the other options.

    Raises UsageError, FilesystemRefused.
    """
    if not request.to:
        return
    for option, place in (("--link", request.link), ("--result", request.result)):
        parts = _below(place.parent, request.to) if place else None
        if place and parts is not None:
            name = "/".join((*parts, place.name))
            if any(file == name or file.startswith(f"{name}/") for file in files):
                raise UsageError(f"{option} {place} has the name of a file of the checkpoint in --to {request.to}")
    near = next(parent for parent in (request.to, *request.to.parents) if os.path.isdir(parent))
    check_names(near, files)


def prepare_result(option: str, path: Path, root: Path) -> None:
    """Take away the document of an earlier run: who finds one knows that this run has succeeded.

    Raises UsageError, FilesystemRefused where none could be written at the end.
    """
    if path.is_dir():
        raise UsageError(f"{option} {path} is a directory", hint=f"{option} {path / 'result.json'}")
    if not _is_stream(path):
        _check_outside(option, path, root)
        _check_writable(option, path.parent)
    withdraw_result(path)


def check_directory_of(option: str, path: Path) -> None:
    """UsageError where the file's directory is not there: nobody looks into one that is made for a mistyped name."""
    if not os.path.lexists(path.parent):
        raise UsageError(f"{option} {path}: there is no directory {path.parent}", hint=f"mkdir -p {path.parent}")


def _check_outside(option: str, path: Path, root: Path) -> None:
    """The cache's own files are written by the election alone; beside them, in its root, is room for others."""
    parts = _below(path.parent, root)
    own = parts[0] if parts else path.name
    if parts is not None and own in OWN:
        raise UsageError(
            f"{option} {path} lies inside the cache {root}", hint=f"{option} {root / 'NAME'}, or elsewhere"
        )


def _check_writable(option: str, directory: Path) -> None:
    near = nearest(directory)
    number = 0
    if in_the_way(directory):
        number = errno.ENOTDIR
    elif not may(os.W_OK | os.X_OK, near):
        number = errno.EROFS if os.statvfs(near).f_flag & os.ST_RDONLY else errno.EACCES
    if number:
        raise refused(OSError(number, os.strerror(number)), f"writing to {option} {directory}", directory)


def _directory_of(model: str) -> Path | None:
    """The directory of this machine that is meant by a file:// URI or a path."""
    if model.startswith("file://"):
        return Path(os.fsdecode(unquote_to_bytes(model.removeprefix("file://"))))
    return read_path(model) if is_local(model) else None


def _below(place: Path, directory: Path) -> tuple[str, ...] | None:
    """The components that lead from a directory down to a place, None when the place lies elsewhere."""
    real, top = Path(os.path.realpath(place)), os.path.realpath(directory)
    return real.relative_to(top).parts if real.is_relative_to(top) else None


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
    temporary = temporary_in(path.parent)
    try:
        os.symlink(to, temporary)
        os.rename(temporary, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise explain(error, f"linking {path}") from None


def withdraw_result(path: Path) -> None:
    """Remove the document of an earlier run; a device or a pipe stays. Idempotent; raises FilesystemRefused."""
    try:
        if path.is_file() and not _is_stream(path):
            path.unlink(missing_ok=True)
    except OSError as error:
        raise explain(error, f"removing {path}") from None


def write_result(path: Path, document: Mapping[str, Any]) -> None:
    """The JSON document, in one step; written into a device or a pipe (/dev/stdout), never put in its place."""
    data = json.dumps(document).encode() + b"\n"
    make_dirs(path.parent)
    try:
        if _is_stream(path):
            with open(path, "ab", buffering=0) as file:
                file.write(data)
            return
    except OSError as error:
        raise explain(error, f"writing {path}") from None
    write_atomic(path, data)


def _is_stream(path: Path) -> bool:
    """Whether the path is, or leads to, what an open file of this process is, a device or a pipe. Raises OSError."""
    if path.is_symlink() and os.readlink(path).startswith("/proc/"):
        return True
    return path.exists() and not path.is_file() and not path.is_dir()


def pin(model: Model, name: str, revision: str, directory: str) -> None:
    """Keep a snapshot from gc under a name; the name moves when it is used again."""
    make_dirs(model.pins)
    data = {"name": name, "revision": revision, "directory": directory, "pinned": round(time.time(), 3)}
    write_atomic(model.pins / f"{ref_file(name)}.json", canonical.dumps(data))


def check_hub(uri: str) -> None:
    """UsageError for an origin that is no hub's: the Hugging Face layout has no place for it."""
    if not uri.startswith("hf://"):
        raise UsageError(f"--hf-cache is for hf:// origins, not {uri}")


def hub_cache(given: Path, settings: Settings) -> Path:
    """The Hugging Face cache that was asked for; for an empty path the one that its own tools would use."""
    if str(given) not in ("", "."):
        return read_path(str(given))
    home = settings.hf_home or (settings.home or Path("/")) / ".cache" / "huggingface"
    return settings.hf_hub_cache or home / "hub"


def hf_view(cache: Cache, manifest: Manifest, ref: str, source: Path, records: list[FileRecord], hub: Path) -> Path:
    """Show a hub snapshot in the Hugging Face cache layout, by hard links only: a second copy is no view.

        hub/models--ORG--NAME/refs/<ref>   snapshots/<commit>/<files>

    `ref` is the branch that was asked for, if one was. Returns the snapshot's directory there. Raises FilesystemRefused
    where hard links are not possible.
    """
    *name, folder = (*manifest.uri.removeprefix("hf://").split("/", 2), "")[:3]
    if [path for path, _ in manifest.listing] == [folder.rpartition("/")[2]]:
        # The URI names one file, which the listing has without its folder.
        folder = folder.rpartition("/")[0]
    repository = hub / "--".join(["models", *name])
    snapshot = repository / "snapshots" / manifest.revision / folder
    for record in records:
        target = snapshot / record.path
        make_dirs(target.parent)
        if target.exists() and os.path.samestat(os.stat(target), os.stat(source / record.path)):
            continue
        temporary = temporary_in(target.parent)
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
    # The client's own tools take a repository without them for a broken one.
    make_dirs(repository / "blobs")
    make_dirs(repository / "refs")
    if ref and not fault(ref):
        make_dirs((repository / "refs" / ref).parent)
        write_atomic(repository / "refs" / ref, manifest.revision.encode())
    return snapshot
