"""Leaving peers: nothing reads from them any more when they are told."""

from __future__ import annotations

from typing import Any

import pytest

from mx_cli.base.errors import TransportFailed
from mx_cli.engine.many import Member
from mx_cli.flows.group import Peer, leave
from mx_cli.model.holding import Holding
from mx_cli.model.manifest import FileRecord, Manifest
from mx_cli.transport.peer import PeerSource
from tests.rig.memory import MemoryPath

HOLDING = Holding(Manifest("", "", "", 1, "", (FileRecord("f", 1, ""),)), (), {})


class Told:
    """Stands for a grant: notes whether the path was closed when it was given back."""

    def __init__(self, path: MemoryPath) -> None:
        self._path = path
        self.closed: list[bool] = []

    def release(self, serving: str, verified: int) -> None:
        self.closed.append(self._path.closed.is_set())


def peer_of(path: MemoryPath, told: Told) -> Peer:
    member = Member("a", PeerSource("a", HOLDING, path, lambda: None, lambda: None))
    grant: Any = told
    session: Any = None
    return Peer(session, {}, "", grant, member)


def test_what_reads_a_peer_is_closed_before_it_is_told() -> None:
    path = MemoryPath({"f": b"x"})
    told = Told(path)
    leave([peer_of(path, told)])
    assert told.closed == [True]


def test_all_are_told_though_one_does_not_end(monkeypatch: pytest.MonkeyPatch) -> None:
    paths = [MemoryPath({"f": b"x"}), MemoryPath({"f": b"x"})]
    told = [Told(path) for path in paths]

    def hang() -> None:
        raise TransportFailed("it does not end")

    monkeypatch.setattr(paths[0], "close", hang)
    with pytest.raises(TransportFailed, match="does not end"):
        leave([peer_of(path, one) for path, one in zip(paths, told, strict=True)])
    assert [one.closed for one in told] == [[False], [True]]
