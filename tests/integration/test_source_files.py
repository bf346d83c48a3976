"""file:// and plain paths."""

from __future__ import annotations

import hashlib
import os
import threading
from pathlib import Path

import pytest

from mx_cli.base.cancel import Stop
from mx_cli.base.errors import FilesystemRefused, NotFound, OriginChanged, UsageError
from mx_cli.engine.ports import ReadItem
from mx_cli.model.manifest import Listing
from tests.rig.origins import opened
from tests.rig.scripted import published
from tests.support import Mx, capability, safetensors_bytes, tree

WEIGHTS = safetensors_bytes({"w": ("U8", (1000,), None)})


def listed(path: Path | str) -> Listing:
    return opened(str(path), {}).listing(None, Stop())


def names(path: Path | str) -> list[str]:
    return [entry.path for entry in listed(path).files]


def test_a_hub_snapshot_with_its_symlinks(tmp_path: Path) -> None:
    digest = hashlib.sha256(b"weights").hexdigest()
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


def faulty(place: Path) -> None:
    """A usable checkpoint, and beside it one of each thing that cannot be read."""
    (place / "sub").mkdir(parents=True)
    for name in ("config.json", "model.safetensors", "sub/notes.txt"):
        (place / name).write_bytes(WEIGHTS if name.endswith("s") else b"{}")
    (place / "pytorch_model.bin").symlink_to("../blobs/gone")
    (place / "self.txt").symlink_to("self.txt")
    (place / "sub" / "up").symlink_to("..")
    Path(os.fsdecode(os.fsencode(place) + b"/\xff.txt")).write_bytes(b"x")


FAULTY = {
    "pytorch_model.bin": (NotFound, "symlink to nothing \\(../blobs/gone, which would be "),
    "self.txt": (FilesystemRefused, "leads back to itself \\(self.txt\\)"),
    "sub/up/*": (FilesystemRefused, "leads back into its own parents"),
    "\\xff.txt": (UsageError, "not Unicode"),
}


def test_what_cannot_be_read_is_listed_with_the_reason(tmp_path: Path) -> None:
    faulty(tmp_path)
    listing = listed(tmp_path)
    assert {entry.path for entry in listing.files if not entry.refusal} == {
        "config.json",
        "model.safetensors",
        "sub/notes.txt",
    }
    for entry in listing.files:
        if entry.refusal:
            kind, said = FAULTY[entry.path]
            with pytest.raises(kind, match=said):
                raise entry.refusal


@pytest.mark.parametrize("command", ["prefetch", "pull"])
def test_only_what_is_wanted_may_refuse(mx: Mx, tmp_path: Path, command: str) -> None:
    model = tmp_path / "model"
    faulty(model)
    to = ("--to", tmp_path / "out", *(("--route", "stream") if command == "pull" else ()))
    assert "not Unicode" in mx(command, model, *to).exits(2).err
    Path(os.fsdecode(os.fsencode(model) + b"/\xff.txt")).unlink()
    assert "leads back to itself" in mx(command, model, *to).exits(21).err
    (model / "self.txt").unlink()
    assert "leads back into its own parents" in mx(command, model, *to).exits(21).err
    (model / "sub" / "up").unlink()
    # The link to nothing is another format of the same weights, which nobody wants.
    mx(command, model, *to).ok()
    assert set(tree(tmp_path / "out")) == {"config.json", "model.safetensors", "sub/notes.txt"}


def test_what_is_left_out_by_name_does_not_refuse(mx: Mx, tmp_path: Path) -> None:
    model = tmp_path / "model"
    faulty(model)
    patterns = [word for path in ("self.txt", "sub/up/", "\\xff.txt") for word in ("--exclude", path)]
    mx("prefetch", model, *patterns, "--to", tmp_path / "out").ok()
    assert set(tree(tmp_path / "out")) == {"config.json", "model.safetensors", "sub/notes.txt"}
    mx("prefetch", model, "--include", "*.safetensors").ok()
    chosen = mx("prefetch", model, "--include", "pytorch_model.bin").exits(10)
    assert f"{model}/pytorch_model.bin: a symlink to nothing (../blobs/gone, which would be {tmp_path}" in chosen.err
    assert "leads back" in mx("prefetch", model, "--all", "--exclude", "*.bin", "--exclude", "*ff.txt").exits(21).err


def test_an_index_that_is_a_link_to_nothing_decides_nothing(mx: Mx, tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "model-00001-of-00001.safetensors").write_bytes(WEIGHTS)
    (model / "model.safetensors.index.json").symlink_to("/nowhere/index.json")
    assert "a symlink to nothing (/nowhere/index.json" in mx("prefetch", model).exits(10).err
    mx("prefetch", model, "--exclude", "*.index.json").ok()


def test_links_to_directories_of_links(tmp_path: Path) -> None:
    """Two ways from each of 16 directories to the next are 65,536 ways to the last."""
    for depth in range(16):
        (tmp_path / f"{depth}").mkdir()
        for name in "ab":
            (tmp_path / f"{depth}" / name).symlink_to(f"../{depth + 1}")
    (tmp_path / "16").mkdir()
    (tmp_path / "16" / "x.json").write_bytes(b"{}")
    listing = listed(tmp_path)
    assert len(listing.files) < 5000
    assert "names lead to this directory" in str(next(entry.refusal for entry in listing.files if entry.refusal))


@capability("root", "setpriv")
def test_directories_of_others_refuse_when_they_are_wanted(mx: Mx, tmp_path: Path) -> None:
    model = tmp_path / "model"
    for name in ("config.json", "model.safetensors", "lost+found/x", "private/y.json"):
        (model / name).parent.mkdir(parents=True, exist_ok=True)
        (model / name).write_bytes(WEIGHTS if name.endswith("s") else b"{}")
    (model / "lost+found").chmod(0)
    (model / "private").chmod(0)
    # As root without the right to override permissions, and not the owner of these two.
    for name in ("lost+found", "private"):
        os.chown(model / name, 1000, 1000)
    other = ("setpriv", "--bounding-set=-dac_override,-dac_read_search")
    refused = mx("prefetch", model, prefix=other).exits(21)
    assert f"{model}/private: Permission denied" in refused.err
    mx("prefetch", model, "--exclude", "private/", prefix=other).ok()
    assert set(published(mx.cache)) == {"config.json", "model.safetensors"}


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
