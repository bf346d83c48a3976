"""What a lease says of itself where look-ups hide what listings show."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from mx_cli.base.cancel import Stop
from mx_cli.base.errors import Interrupted
from mx_cli.cache.lease import Lease


def test_a_stop_does_not_wait_for_a_hidden_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Listed, and not to be found: as on a network file system that remembers that the name was not there.
    monkeypatch.setattr(os, "listdir", lambda place: ["failed.1"])
    stop = Stop()
    stop.request(Interrupted(2))
    began = time.monotonic()
    with pytest.raises(Interrupted):
        Lease(tmp_path, patience=60.0, pause=stop.wait).failure(1)
    assert time.monotonic() - began < 30


def test_a_lease_is_taken_away_by_its_last_leader_only(tmp_path: Path) -> None:
    one, two = Lease(tmp_path / "lease"), Lease(tmp_path / "lease")
    assert one.claim(1)
    one.leave(1)
    assert two.claim(2)
    one.remove(1)
    assert not two.is_lost(2)
    assert one.is_lost(1)
    two.remove(2)
    assert not (tmp_path / "lease").exists()
    assert two.is_lost(2)
    assert one.claim(1)
    assert two.claim(1) is False
