"""Mounts for tests: small tmpfs, bind, bindfs and the FUSE rig. All need root; all are undone when the block ends."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from tests.rig import capabilities
from tests.rig.servers import end

HERE = Path(__file__).parent


def _run(*command: str | Path) -> None:
    subprocess.run(
        [str(part) for part in command], check=True, capture_output=True, timeout=20, env={"PATH": capabilities.PATH}
    )


def _unmount(place: Path) -> None:
    try:
        _run("umount", place)
    except subprocess.CalledProcessError:
        # A process that the test failed to end may sit on it: the mount must go from the tree all the same.
        _run("umount", "-l", place)


@contextlib.contextmanager
def tmpfs(place: Path, size: str = "16m", nr_inodes: int = 0) -> Iterator[Path]:
    """A tmpfs of that size ("16m"); nr_inodes=0 is no limit."""
    place.mkdir(parents=True, exist_ok=True)
    _run("mount", "-t", "tmpfs", "-o", f"size={size},nr_inodes={nr_inodes}", "tmpfs", place)
    try:
        yield place
    finally:
        _unmount(place)


@contextlib.contextmanager
def bind(source: Path, place: Path, *, read_only: bool = False) -> Iterator[Path]:
    """The directory once more, elsewhere."""
    place.mkdir(parents=True, exist_ok=True)
    _run("mount", "--bind", source, place)
    try:
        if read_only:
            _run("mount", "-o", "remount,bind,ro", place)
        yield place
    finally:
        _unmount(place)


@contextlib.contextmanager
def _fuse(command: list[str | Path], place: Path, env: dict[str, str] | None = None) -> Iterator[Path]:
    place.mkdir(parents=True, exist_ok=True)
    process = subprocess.Popen(
        [str(part) for part in command],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        env={"PATH": capabilities.PATH, **(env or {})},
    )
    try:
        deadline = time.monotonic() + 20
        while not os.path.ismount(place):
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"{command[0]} mounted nothing (rc {process.poll()})")
            time.sleep(0.01)
        yield place
    finally:
        if os.path.ismount(place):
            _unmount(place)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(5)
        end(process)


@contextlib.contextmanager
def bindfs(source: Path, place: Path, *options: str) -> Iterator[Path]:
    """The directory through bindfs: another mount, another st_dev, flock not shared with the original."""
    program = capabilities.program("bindfs") or "bindfs"
    with _fuse([program, "-f", *options, source, place], place) as mounted:
        yield mounted


@contextlib.contextmanager
def cifuse(backing: Path, place: Path, *, name_max: int = 255, **env: str) -> Iterator[Path]:
    """tests/rig/cifuse.py over the directory; env: HIDE="2", NORENAME="1", NOAPPEND="1", LINKS="1", HANG="1000000"."""
    backing.mkdir(parents=True, exist_ok=True)
    command: list[str | Path] = [sys.executable, HERE / "cifuse.py", backing, place, str(name_max)]
    with _fuse(command, place, env) as mounted:
        yield mounted
