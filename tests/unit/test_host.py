"""Facts of a host: when two peers can share memory."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from mx_cli.transport.host import host_facts, share_memory
from tests.support import ROOT, capability

ME = {"boot_id": "b", "pid_namespace": 7, "uid": 1000}


@pytest.mark.parametrize(
    ("mine", "theirs", "shared"),
    [
        ({}, {}, True),
        ({}, {"boot_id": "c"}, False),
        ({}, {"pid_namespace": 8}, False),
        ({}, {"uid": 1001}, False),
        ({}, {"uid": 0}, False),
        ({"uid": 0}, {"uid": 1001}, True),
        ({"boot_id": ""}, {"boot_id": ""}, False),
        ({"pid_namespace": 0}, {"pid_namespace": 0}, False),
    ],
)
def test_memory_is_shared_within_a_kernel_a_namespace_and_a_user(
    mine: dict[str, object], theirs: dict[str, object], shared: bool
) -> None:
    assert share_memory(ME | mine, ME | theirs) is shared
    assert not share_memory(ME | mine, {})


def facts(*prefix: str) -> dict[str, object]:
    program = "import json; from mx_cli.transport.host import host_facts; print(json.dumps(host_facts()))"
    said = subprocess.run([*prefix, sys.executable, "-c", program], cwd=ROOT, capture_output=True, check=True)
    found: dict[str, object] = json.loads(said.stdout)
    return found


def test_processes_of_a_host_have_the_same_facts() -> None:
    assert facts() == host_facts()
    assert share_memory(host_facts(), facts())


@capability("pidns")
def test_another_pid_namespace_is_another_host() -> None:
    assert not share_memory(host_facts(), facts("unshare", "--pid", "--fork", "--mount-proc"))
