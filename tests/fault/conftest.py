"""Fixtures of the fault tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fault.points import FILES, calls_of_a_run
from tests.rig import servers


@pytest.fixture(scope="module")
def origin(tmp_path_factory: pytest.TempPathFactory) -> Iterator[servers.Hub]:
    """A hub with one commit of FILES."""
    place = tmp_path_factory.mktemp("origin")
    with servers.faultd(place, hub=place / "hub") as server:
        assert isinstance(server, servers.Hub)
        server.commit(FILES)
        yield server


@pytest.fixture(scope="module")
def calls(origin: servers.Hub, fault_so: Path, tmp_path_factory: pytest.TempPathFactory) -> list[list[str]]:
    """See `calls_of_a_run`."""
    return calls_of_a_run(tmp_path_factory.mktemp("calls"), fault_so, origin)
