"""What the file system under a cache can do, found out by doing it. Nothing stays behind."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import secrets
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from mx_cli.base import filesystem, units
from mx_cli.base.capability import FAIL, OK, WARN, Capability, judged
from mx_cli.base.errors import MxError
from mx_cli.base.filesystem import nearest
from mx_cli.base.oserrors import in_the_way
from mx_cli.cache.layout import Cache
from mx_cli.cache.reserve import VOLATILE
from mx_cli.cache.reserve import filesystem as place_of

ROWS = ("cache root", "free space", "rename", "hard links", "O_DIRECT", "flock")
BLOCK = 4096
SKEW = 2.0
_ELSEWHERE = "name another place with --cache-dir or MX_CACHE_DIR"


def probe(arguments: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """One row after the other, as ROWS has them; the first that is missing is where the file system hangs.

    Blocks for as long as the file system does. `root`: the cache; where it is not there, what is above it is tried.
    """
    root = Path(arguments["root"])
    above = nearest(root)
    work = above / f".mx-doctor-{secrets.token_hex(8)}"
    try:
        if refused := _refused(root, work):
            yield refused.to_json()
            return
        yield _root(root, above, work).to_json()
        yield _free(above).to_json()
        yield _rename(work).to_json()
        yield _hard_links(work).to_json()
        yield _direct(work).to_json()
        yield _flock(work).to_json()
    finally:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            for name in os.listdir(work):
                (work / name).unlink()
            work.rmdir()


def _refused(root: Path, work: Path) -> Capability | None:
    """Makes the directory for probes; why it cannot be."""
    if why := in_the_way(root):
        return Capability("cache root", FAIL, why, _ELSEWHERE)
    try:
        Cache(root)
        os.mkdir(work, 0o700)
    except MxError as error:
        return Capability("cache root", FAIL, error.what, error.hint or _ELSEWHERE)
    except OSError as error:
        return Capability("cache root", FAIL, f"{root}: cannot write ({error.strerror})", _ELSEWHERE)
    return None


def _root(root: Path, above: Path, work: Path) -> Capability:
    kind = place_of(above).kind
    path = _make(work)
    skew = path.stat().st_mtime - time.time()
    new = "" if above == root else f", to be made in {above}"
    facts = {"path": str(root), "kind": kind, "skew": round(skew, 3)}
    if abs(skew) > SKEW:
        value = f"{root} ({kind}{new}), whose clock differs by {units.duration(abs(skew))}"
        return Capability("cache root", WARN, value, "set the clocks of this host and of the file server", facts)
    return judged(
        "cache root",
        kind not in VOLATILE,
        f"{root} ({kind}{new})",
        f"what it holds goes with the container or the host; {_ELSEWHERE}",
        facts=facts,
    )


def _free(above: Path) -> Capability:
    place = place_of(above)
    inodes = "" if place.inodes is None else f", {place.inodes} inodes"
    facts = {"free": place.free, "inodes": place.inodes}
    full = place.free < 1 << 20 or place.inodes == 0
    fix = f"mx cache gc, a larger volume, or {_ELSEWHERE}"
    return judged("free space", not full, f"{units.size(place.free)}{inodes}", fix, otherwise=FAIL, facts=facts)


def _make(work: Path, data: bytes = b"") -> Path:
    path = work / secrets.token_hex(8)
    path.write_bytes(data)
    return path


def _rename(work: Path) -> Capability:
    path = _make(work)
    try:
        os.rename(path, path.with_suffix(".renamed"))
    except OSError as error:
        return Capability("rename", FAIL, f"does not work ({_named(error)})", f"nothing can be published: {_ELSEWHERE}")
    return Capability("rename", OK, "works")


def _hard_links(work: Path) -> Capability:
    path = _make(work)
    try:
        os.link(path, path.with_suffix(".linked"))
        works = path.stat().st_nlink == 2
        why = "" if works else "a link is a copy here"
    except OSError as error:
        works, why = False, _named(error)
    value = "work" if works else f"do not work ({why})"
    return judged("hard links", works, value, "--to DIR makes a copy, which takes as much space again")


def _direct(work: Path) -> Capability:
    """Whether a block that was written comes back past the page cache: an open alone proves nothing."""
    path = _make(work, os.urandom(BLOCK))
    block = mmap.mmap(-1, BLOCK)
    try:
        fd = os.open(path, os.O_RDWR | os.O_DIRECT)
    except OSError as error:
        return _without_direct(path, _named(error))
    try:
        block[:] = os.urandom(BLOCK)
        count = os.pwrite(fd, block, 0)
        back = mmap.mmap(-1, BLOCK)
        count += os.preadv(fd, [back], 0)
        if count != 2 * BLOCK or back[:] != block[:]:
            return Capability("O_DIRECT", FAIL, "other bytes come back than were written", _ELSEWHERE)
    except OSError as error:
        return _without_direct(path, _named(error))
    finally:
        os.close(fd)
    return Capability("O_DIRECT", OK, "works (a block was written and read)", facts={"works": True})


def _without_direct(path: Path, why: str) -> Capability:
    with path.open("rb") as file:
        kind = filesystem.kind(file.fileno())
    usual = kind in filesystem.NETWORK | filesystem.IN_MEMORY
    value = f"not here ({kind}: {why}); the page cache is used"
    return judged("O_DIRECT", usual, value, "a disk of this host is read faster with it", facts={"works": False})


def _flock(work: Path) -> Capability:
    """Whether a second process is kept out."""
    path = _make(work)
    fix = "the election works without; a dead leader is noticed after --ttl only"
    with path.open("r+b") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            return Capability("flock", WARN, f"does not work ({_named(error)})", fix, {"works": False})
        pid = os.fork()
        if pid == 0:
            os._exit(_second(path))
        kept_out = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    value = "keeps a second process out" if kept_out else "lets a second process in"
    return judged("flock", kept_out, value, fix, facts={"works": kept_out})


def _second(path: Path) -> int:
    with path.open("r+b") as file, contextlib.suppress(OSError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return 1
    return 0


def _named(error: OSError) -> str:
    return errno.errorcode.get(error.errno or 0, "?")
