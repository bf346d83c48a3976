"""What every origin promises, whatever it is: one suite over all of them, against real servers."""

from __future__ import annotations

import threading
import uuid
from pathlib import Path

import pytest

from mx_cli.base.cancel import Stop
from mx_cli.base.errors import IntegrityError, Interrupted, MxError, NotFound, OriginChanged
from mx_cli.engine.ports import ReadItem, Stream
from mx_cli.model.manifest import Entry, Listing
from mx_cli.sources.registry import OpenOrigin
from tests.rig.checkpoints import noise
from tests.rig.origins import FilePlace, HttpPlace, HubPlace, Place, StorePlace, opened

TREES = ("file", "hub", "moto", "hadro", "rclone", "nginx-s3", "gcs")
ALL = (*TREES, "http", "https")
SHARD = noise("shard", 300_000)
FILES = {
    "config.json": b'{"a": 1}',
    "model.safetensors": SHARD,
    "sub/dir/tokenizer.json": b"{}",
    "empty.txt": b"",
}
SPECIAL = {
    name: name.encode()
    for name in (
        "a b.json",
        "a+b.json",
        "a%20b.json",
        "x#y.json",
        "q?z.json",
        "模型.json",
        "caf\u00e9.json",
        "cafe\u0301.json",
        "m&n=o;p.json",
        "(1)'!*~$@,.json",
    )
}


@pytest.fixture
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    kind = request.param
    if kind == "file":
        return FilePlace(tmp_path / "checkpoint")
    if kind == "hub":
        return HubPlace(request.getfixturevalue("hub"))
    if kind in ("http", "https"):
        ca = request.getfixturevalue("tls").ca if kind == "https" else None
        return HttpPlace(request.getfixturevalue("nginx"), f"h-{uuid.uuid4().hex[:8]}", ca)
    fixture = {"moto": "s3", "hadro": "hadro", "rclone": "rclone_s3", "nginx-s3": "nginx_s3", "gcs": "gcs"}[kind]
    return StorePlace(request.getfixturevalue(fixture))


trees = pytest.mark.parametrize("place", TREES, indirect=True)
all_kinds = pytest.mark.parametrize("place", ALL, indirect=True)


def listed(place: Place, uri: str = "", revision: str | None = None) -> tuple[OpenOrigin, Listing]:
    origin = opened(uri or place.tree, place.env)
    return origin, origin.listing(revision, Stop())


def entry_of(listing: Listing, name: str) -> Entry:
    return next(entry for entry in listing.files if entry.path == name)


def read_all(stream: Stream) -> bytes:
    found, view = bytearray(), memoryview(bytearray(50_000))
    while count := stream.read_into(view):
        found += view[:count]
    stream.close()
    return bytes(found)


@trees
def test_lists_every_file_with_its_size(place: Place) -> None:
    place.put(FILES)
    origin, listing = listed(place)
    assert {entry.path: entry.size for entry in listing.files} == {name: len(data) for name, data in FILES.items()}
    assert listing.uri == origin.uri
    assert listing.revision
    assert set(listing.revision) <= set("0123456789abcdef")
    assert all(entry.resumable for entry in listing.files)


@trees
def test_the_revision_is_the_same_until_something_changes(place: Place) -> None:
    place.put(FILES)
    first = listed(place)[1].revision
    assert listed(place)[1].revision == first
    place.put({"config.json": b'{"a": 2}', "more.json": b"{}"})
    assert listed(place)[1].revision != first


@trees
def test_p24_a_listing_is_never_served_from_memory(place: Place) -> None:
    place.put({"config.json": b"{}"})
    origin, listing = listed(place)
    place.put({"later.json": b"{}"})
    assert len(listing.files) == 1
    assert len(origin.listing(None, Stop()).files) == 2


@trees
def test_a_wanted_revision_is_had_or_not_found(place: Place) -> None:
    place.put(FILES)
    revision = listed(place)[1].revision
    again = listed(place, revision=revision)[1]
    assert (again.revision, again.ref) == (revision, "")
    with pytest.raises(NotFound, match="f" * 40):
        listed(place, revision="f" * 40)


@all_kinds
def test_reads_whole_files(place: Place) -> None:
    place.put(FILES)
    for name in ("config.json", "model.safetensors", "empty.txt"):
        origin, listing = listed(place, place.one(name))
        assert [entry.path for entry in listing.files] == [name]
        assert origin.read(listing.files[0], 1 << 20) == FILES[name]
        whole = ReadItem(listing.files[0], 0, listing.files[0].size, whole=True)
        assert read_all(origin.open(whole)) == FILES[name]


@all_kinds
def test_reads_pieces(place: Place) -> None:
    place.put(FILES)
    origin, listing = listed(place, place.one("model.safetensors"))
    for offset, length in ((0, 1), (0, 1000), (123_456, 100_001), (299_999, 1), (0, 300_000)):
        item = ReadItem(listing.files[0], offset, length)
        assert read_all(origin.open(item)) == SHARD[offset : offset + length]


@trees
def test_p22_special_names_by_prefix_and_one_by_one(place: Place) -> None:
    place.put(SPECIAL)
    origin, listing = listed(place)
    assert {entry.path: origin.read(entry, 100) for entry in listing.files} == SPECIAL


@all_kinds
def test_p22_special_names_one_by_one(place: Place) -> None:
    place.put(SPECIAL)
    for name, data in SPECIAL.items():
        origin, listing = listed(place, place.one(name))
        assert [entry.path for entry in listing.files] == [name]
        assert origin.read(listing.files[0], 100) == data


@trees
def test_p15_p59_an_object_or_a_folder_and_no_sibling(place: Place) -> None:
    place.put({"a/b/c/d.json": b"1", "a/b/model.bin": b"2", "a/b-hf/extra.bin": b"3"})
    for uri in (place.one("a/b"), place.one("a/b/")):
        assert {entry.path for entry in listed(place, uri)[1].files} == {"c/d.json", "model.bin"}
    assert [entry.path for entry in listed(place, place.one("a/b/model.bin"))[1].files] == ["model.bin"]


@all_kinds
def test_p14_what_is_not_there_is_not_found_and_named(place: Place) -> None:
    place.put({"config.json": b"{}"})
    with pytest.raises(NotFound) as caught:
        listed(place, place.one("nope"))
    assert "nope" in caught.value.what


@all_kinds
def test_p04_a_changed_file_is_noticed_at_every_read(place: Place) -> None:
    place.put(FILES)
    origin, listing = listed(place, place.one("model.safetensors"))
    item = ReadItem(listing.files[0], 0, 1000)
    assert read_all(origin.open(item)) == SHARD[:1000]
    place.put({"model.safetensors": noise("other", 300_001)})
    if isinstance(place, HubPlace):
        assert read_all(origin.open(item)) == SHARD[:1000]  # the commit still has it
        return
    with pytest.raises(OriginChanged):
        read_all(origin.open(item))


@all_kinds
def test_small_reads_have_a_limit(place: Place) -> None:
    place.put(FILES)
    origin, listing = listed(place, place.one("model.safetensors"))
    with pytest.raises(IntegrityError, match="larger than 1000"):
        origin.read(listing.files[0], 1000)


@all_kinds
def test_closing_a_stream_ends_its_reads(place: Place) -> None:
    place.put({"model.safetensors": noise("big", 20 << 20)})
    origin, listing = listed(place, place.one("model.safetensors"))
    stream = origin.open(ReadItem(listing.files[0], 0, 20 << 20))
    view = memoryview(bytearray(1 << 20))
    assert stream.read_into(view[:4096])
    for _ in range(2):
        closer = threading.Thread(target=stream.close)
        closer.start()
        closer.join(5)
    with pytest.raises(MxError):
        read_all(stream)
    stream.close()
    # The origin itself goes on.
    assert origin.open(ReadItem(listing.files[0], 0, 10)).read_into(view[:10])


@all_kinds
def test_closing_is_idempotent_and_reading_still_works_after_a_stop(place: Place) -> None:
    place.put(FILES)
    stop = Stop()
    origin = opened(place.one("config.json"), place.env, stop=stop)
    entry = origin.listing(None, stop).files[0]
    stop.request(Interrupted(2))
    with pytest.raises(Interrupted):
        origin.read(entry, 100)
    origin.close()
    origin.close()


@all_kinds
def test_the_uri_is_known_before_any_connection(place: Place) -> None:
    first = opened(place.one("config.json"), place.env)
    second = opened(place.one("config.json"), place.env)
    assert first.uri == second.uri
    assert first.caps.host
