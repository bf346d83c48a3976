"""What gc keeps, whom it takes for alive, and that it looks again before it takes anything away."""

from __future__ import annotations

import calendar
import json
import os
import time
from pathlib import Path

import pytest

from mx_cli.base.cancel import Stop
from mx_cli.base.errors import FilesystemRefused
from mx_cli.cache.evict import Evictor, Policy, free_leases, unpin
from mx_cli.cache.follow import Watch
from mx_cli.cache.inventory import DAY, Revision, disk_use, freed, read_revision, resumable, revisions
from mx_cli.cache.journal import Claim, Journal
from mx_cli.cache.layout import Cache, Model, part_id
from mx_cli.cache.lease import Lease
from mx_cli.cache.snapshots import Snapshots
from mx_cli.model.manifest import FileRecord, Manifest

NOW = calendar.timegm((2026, 5, 20, 12, 0, 0))
TTL = 0.3


@pytest.fixture
def model(tmp_path: Path) -> Model:
    cache = Cache(tmp_path / "cache")
    cache.prepare()
    model = cache.model("s3://bucket/model")
    model.prepare()
    return model


def publish(model: Model, revision: str, files: dict[str, bytes], selection: str = "all", days: float = 0) -> None:
    """A snapshot with a manifest, as old as said, counted from NOW."""
    for path, data in files.items():
        place = model.snapshot(revision) / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(data)
    records = tuple(FileRecord(path, len(data), "0" * 32) for path, data in files.items())
    created = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(NOW - days * DAY))
    Snapshots(model).publish(Manifest(model.uri, revision, selection, 1, revision, records, created=created))


def lease_of(model: Model, revision: str) -> tuple[Lease, Watch]:
    lease = Lease(model.lease(revision))
    return lease, Watch(lease, TTL)


def evict(model: Model, revision: str, keep: object = lambda revision: "") -> str:
    lease, watch = lease_of(model, revision)
    return Evictor(model, 0.1, Stop()).evict(revision, lease, watch, keep)  # type: ignore[arg-type]


def kept(model: Model, policy: Policy) -> dict[str, str]:
    known = revisions(model)
    why = policy.keep(known, NOW)
    return {revision.name: why(revision) for revision in known}


def files_of(model: Model) -> set[str]:
    return {str(p.relative_to(model.path)) for p in model.path.rglob("*") if p.is_file()}


# --- the policy --------------------------------------------------------------------------------------------------


def test_the_newest_stay_by_publication(model: Model) -> None:
    for days, name in ((30, "b"), (20, "c"), (40, "a")):
        publish(model, name, {"x": b"1"}, days=days)
    assert kept(model, Policy(2, 7 * DAY)) == {"a": "", "b": "one of the newest 2", "c": "one of the newest 2"}
    assert kept(model, Policy(0, 7 * DAY)) == {"a": "", "b": "", "c": ""}


@pytest.mark.parametrize(
    ("marks", "kept_because"),
    [
        ([], ""),
        (["20260512"], ""),
        (["20260513"], "used"),
        (["20260520"], "used today"),
        (["20260101", "20260518"], "used"),
        (["20270101"], "used today"),
        (["not-a-day"], ""),
    ],
)
def test_a_mark_counts_to_the_end_of_its_day(model: Model, marks: list[str], kept_because: str) -> None:
    publish(model, "a", {"x": b"1"}, days=100)
    for mark in marks:
        model.used("a").mkdir(parents=True, exist_ok=True)
        (model.used("a") / mark).touch()
    (why,) = kept(model, Policy(0, 7 * DAY)).values()
    assert why.startswith(kept_because)
    assert bool(why) == bool(kept_because)


def test_times_of_access_and_change_mean_nothing(model: Model) -> None:
    publish(model, "a", {"x": b"1"}, days=100)
    os.utime(model.snapshot("a") / "x", (NOW, NOW))
    assert kept(model, Policy(0, 7 * DAY)) == {"a": ""}


def test_pins_keep_and_one_that_cannot_be_read_keeps_all(model: Model) -> None:
    publish(model, "a", {"x": b"1"}, days=100)
    publish(model, "b", {"x": b"1"}, days=100)
    model.pins.mkdir()
    (model.pins / "prod.json").write_text(json.dumps({"name": "prod", "revision": "a", "directory": "a"}))
    assert kept(model, Policy(0, 0)) == {"a": "pinned: prod", "b": ""}
    (model.pins / "torn.json").write_text("{")
    assert kept(model, Policy(0, 0)) == {"a": "pinned: prod, torn", "b": "pinned: torn"}
    assert unpin(model, "torn") == [""]
    assert unpin(model, "prod") == ["a"]
    assert unpin(model, "prod") == []


def test_what_a_newer_mx_wrote_stays(model: Model) -> None:
    publish(model, "a", {"x": b"1"}, days=100)
    path = model.manifests("a") / "later.json"
    path.write_text(json.dumps({"format": 99}))
    assert "newer" in kept(model, Policy(0, 0))["a"]
    path.write_text("{")
    assert kept(model, Policy(0, 0)) == {"a": ""}


# --- the election ------------------------------------------------------------------------------------------------


def test_who_is_alive(model: Model) -> None:
    watches = {}
    beats = 0
    for name in ("nobody", "left", "silent", "alive"):
        lease, watches[name] = lease_of(model, name)
        if name != "nobody":
            assert lease.claim(1)
        if name == "left":
            lease.leave(1)
    alive = model.lease("alive")

    def pause(seconds: float) -> None:
        nonlocal beats
        beats += 1
        (alive / f"beat.1.{beats}.0").touch()
        time.sleep(seconds)

    assert free_leases(watches, pause) == {"nobody", "left", "silent"}


def test_a_live_leader_is_not_disturbed(model: Model) -> None:
    publish(model, "a", {"x": b"1"}, days=100)
    lease, watch = lease_of(model, "a")
    assert lease.claim(1)
    before = files_of(model)

    class Beating(Stop):
        seq = 0

        def wait(self, seconds: float) -> None:
            self.seq += 1
            (model.lease("a") / f"beat.1.{self.seq}.0").touch()
            super().wait(0.01)

    assert "in use by" in Evictor(model, 0.1, Beating()).evict("a", lease_of(model, "a")[0], watch, lambda r: "")
    assert {name for name in files_of(model) - before if not name.startswith("lease/")} == set()


def test_nothing_stays_but_the_lease(model: Model) -> None:
    publish(model, "a", {"x": b"1", "d/y": b"2"}, days=100)
    publish(model, "a", {"z": b"3"}, selection="more", days=100)
    model.write_ref("main", "a")
    model.mark_used("a")
    assert evict(model, "a") == ""
    assert {name.partition("/")[0] for name in files_of(model)} == {"origin.json", "lease"}
    assert (model.lease("a") / "lead.1").exists()
    assert (model.lease("a") / "left.1").exists()
    assert revisions(model) == []


def test_other_revisions_stay(model: Model) -> None:
    for name in ("a", "ab", "a+12345678"):
        publish(model, name, {"x": b"1"})
    evict(model, "ab")
    assert (model.snapshot("a") / "x").exists()
    assert (model.snapshot("a+12345678") / "x").exists()
    assert not model.snapshot("ab").exists()


def test_origins_without_versions_share_one_lease(model: Model) -> None:
    publish(model, "none-3", {"x": b"1"})
    lease, _ = lease_of(model, "none-7")
    assert lease.claim(7)
    lease.leave(7)
    assert evict(model, "none-3") == ""
    assert (model.lease("none") / "lead.8").exists()


# --- looking again -----------------------------------------------------------------------------------------------


def test_a_use_meanwhile_puts_the_manifests_back(model: Model) -> None:
    publish(model, "a", {"x": b"1"}, days=100)
    seen: list[Revision] = []

    def keep(revision: Revision) -> str:
        seen.append(revision)
        return "used today" if not revision.vouched else ""

    before = files_of(model)
    assert evict(model, "a", keep) == "used today"
    assert [revision.vouched for revision in seen] == [True, False]
    assert seen[1].published == seen[0].published > 0
    assert {name for name in files_of(model) if not name.startswith("lease/")} == before


def test_whoever_is_deposed_takes_nothing_away(model: Model) -> None:
    publish(model, "a", {"x": b"1"}, days=100)

    def keep(revision: Revision) -> str:
        if not revision.vouched:
            (model.lease("a") / "lead.2").write_text("{}")
        return ""

    assert evict(model, "a", keep).startswith("in use by")
    assert (model.snapshot("a") / "x").read_bytes() == b"1"


def test_a_refusal_half_way_puts_everything_back(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    publish(model, "a", {"x": b"1"}, days=100)
    real = os.rename

    def rename(source: Path, target: Path) -> None:
        if Path(source) == model.snapshot("a"):
            raise PermissionError(13, "Permission denied", str(source))
        real(source, target)

    monkeypatch.setattr(os, "rename", rename)
    with pytest.raises(FilesystemRefused):
        evict(model, "a")
    assert [m.selection for m in read_revision(model, "a").manifests] == ["all"]
    assert (model.snapshot("a") / "x").exists()


# --- leftovers ---------------------------------------------------------------------------------------------------


def unfinished(model: Model, revision: str, term: int, files: dict[str, bytes]) -> None:
    """What a dead leader leaves: a journal, a part for "part", a file under its name for the others."""
    staging = model.staging(revision)
    staging.mkdir(parents=True, exist_ok=True)
    journal = Journal(staging, term)
    journal.announce((part_id(path), "") for path in files)
    for path, data in files.items():
        journal.record(Claim(part_id(path), 0, len(data), "0" * 32))
        place = staging / f"{part_id(path)}.part.{term}" if path == "part" else model.snapshot(revision) / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(data)
    journal.close()


def test_leftovers_go_and_what_is_vouched_for_stays(model: Model) -> None:
    publish(model, "a", {"x": b"1"})
    unfinished(model, "a", 3, {"x": b"1", "part": b"22", "made": b"333"})
    (model.snapshot("a") / "foreign").write_bytes(b"4")
    (model.staging("a") / "foreign").write_bytes(b"5")
    lease, _ = lease_of(model, "a")
    assert lease.claim(3)
    lease.leave(3)
    assert resumable(model, "a") == 5
    assert evict(model, "a", None) == ""
    assert {p.name for p in model.snapshot("a").iterdir()} == {"x", "foreign"}
    assert {p.name for p in model.staging("a").iterdir()} == {"foreign"}
    assert read_revision(model, "a").leftovers == ()


def test_parts_of_a_later_term_stay(model: Model) -> None:
    unfinished(model, "a", 9, {"part": b"22"})
    assert evict(model, "a", None) == ""
    assert {p.name for p in model.staging("a").iterdir()} == {f"{part_id('part')}.part.9", "journal.9"}


def test_temporary_names_go_after_a_day(model: Model) -> None:
    publish(model, "a", {"x": b"1"})
    young, old = (model.snapshot("a") / f".{digit * 16}.tmp" for digit in "12")
    young.touch()
    old.touch()
    os.utime(old, (time.time() - 2 * DAY,) * 2)
    assert read_revision(model, "a").leftovers == (old,)
    evict(model, "a", None)
    assert young.exists()
    assert not old.exists()


def test_sizes_count_an_inode_once(tmp_path: Path) -> None:
    one, two, three = (tmp_path / name for name in ("one", "two", "three"))
    one.write_bytes(os.urandom(1 << 16))
    os.link(one, two)
    three.write_bytes(os.urandom(1 << 16))
    assert disk_use([one, two, three]) == 2 << 16
    assert freed([one, three]) == 1 << 16
    assert freed([one, two, three]) == 2 << 16
