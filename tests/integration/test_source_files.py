"""file:// and plain paths."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from mx_cli.base.cancel import Stop
from mx_cli.base.errors import FilesystemRefused, NotFound, OriginChanged, UsageError
from mx_cli.engine.ports import ReadItem
from mx_cli.model.manifest import Listing
from tests.rig.origins import opened


def listed(path: Path | str) -> Listing:
    return opened(str(path), {}).listing(None, Stop())


def names(path: Path | str) -> list[str]:
    return [entry.path for entry in listed(path).files]


def test_a_hub_snapshot_with_its_symlinks(tmp_path: Path) -> None:
    digest = "ab" * 32
    (tmp_path / "blobs").mkdir()
    (tmp_path / "blobs" / digest).write_bytes(b"weights")
    snapshot = tmp_path / "snapshots" / "sha"
    (snapshot / "sub").mkdir(parents=True)
    (snapshot / "model.safetensors").symlink_to(f"../../blobs/{digest}")
    (snapshot / "sub" / "config.json").write_bytes(b"{}")
    origin = opened(str(snapshot), {})
    weights, config = origin.listing(None, Stop()).files
    assert (weights.path, config.path) == ("model.safetensors", "sub/config.json")
    assert weights.digests == {"sha256": digest}
    assert origin.read(weights, 100) == b"weights"


def test_what_is_left_out(tmp_path: Path) -> None:
    for name in ("a.json", ".git/config", ".cache/huggingface/x", "b.incomplete", "sub/.git/y", ".hidden"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"x")
    os.mkfifo(tmp_path / "pipe")
    assert names(tmp_path) == [".hidden", "a.json"]


def test_loops_and_links_to_nothing(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "up").symlink_to("..")
    with pytest.raises(FilesystemRefused, match="leads back"):
        names(tmp_path)
    (tmp_path / "a" / "up").unlink()
    (tmp_path / "gone").symlink_to("nowhere")
    with pytest.raises(NotFound, match="symlink to nothing"):
        names(tmp_path)
    (tmp_path / "gone").unlink()
    (tmp_path / "self").symlink_to("self")
    with pytest.raises(FilesystemRefused):
        names(tmp_path)


def test_p14_missing_and_empty(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="looked for"):
        names(tmp_path / "absent")
    with pytest.raises(NotFound, match="no files"):
        names(tmp_path)
    with pytest.raises(NotFound, match="no files"):
        names(tmp_path.as_uri())
    (tmp_path / "x").write_bytes(b"1")
    with pytest.raises(NotFound):
        names(f"{tmp_path}/x/")


def test_p22_percent_is_decoded_in_uris_only(tmp_path: Path) -> None:
    (tmp_path / "a%20b").write_bytes(b"literal")
    (tmp_path / "a b").write_bytes(b"space")
    assert names(f"file://{tmp_path}/a%20b") == ["a b"]
    assert names(f"{tmp_path}/a%20b") == ["a%20b"]


def test_a_name_that_is_not_unicode(tmp_path: Path) -> None:
    path = os.fsencode(tmp_path) + b"/\xff.json"
    with open(path, "wb") as file:
        file.write(b"x")
    with pytest.raises(UsageError, match="not Unicode"):
        names(tmp_path)


def test_the_revision_follows_the_modification_time(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"1")
    os.utime(path, ns=(10, 10))
    first = listed(tmp_path).revision
    other = tmp_path / "y"
    other.write_bytes(b"1")
    os.utime(other, ns=(10, 10))
    os.replace(other, path)
    assert listed(tmp_path).revision == first
    os.utime(path, ns=(11, 11))
    assert listed(tmp_path).revision != first


def test_p04_a_file_that_changes_while_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"1" * 1000)
    origin = opened(str(path), {})
    stream = origin.open(ReadItem(origin.listing(None, Stop()).files[0], 0, 1000))
    view = memoryview(bytearray(500))
    assert stream.read_into(view) == 500
    path.write_bytes(b"2" * 1000)
    with pytest.raises(OriginChanged):
        stream.read_into(view)


def test_a_hub_like_path_that_exists_is_a_path_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org" / "name").mkdir(parents=True)
    notices: list[str] = []
    assert opened("org/name", {}, notices=notices).uri.startswith("file://")
    assert "hf://org/name" in notices[0]


def test_descriptors_are_closed(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"1" * 100)
    origin = opened(str(tmp_path), {})
    entry = origin.listing(None, Stop()).files[0]
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        stream = origin.open(ReadItem(entry, 0, 100))
        closer = threading.Thread(target=stream.close)
        closer.start()
        closer.join(5)
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_file_that_is_said_to_be_empty_and_is_not() -> None:
    """So are those of /proc, and of mounts that make them up when they are read."""
    with pytest.raises(FilesystemRefused, match="says that it is empty"):
        opened("/proc/version", {}).listing(None, Stop())


def test_p09_an_empty_file_that_nobody_may_read_is_one(tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "empty").touch(0o000)
    assert [entry.size for entry in opened(str(tmp_path / "m"), {}).listing(None, Stop()).files] == [0]
