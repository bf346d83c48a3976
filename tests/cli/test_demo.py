"""scripts/demo holds what it promises, and says it on one screen."""

from __future__ import annotations

import subprocess
import sys

from tests.support import ROOT, capability


@capability("hadro")
def test_the_demo_holds() -> None:
    command = [sys.executable, "-m", "scripts.demo"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    assert "the leader ---" in done.stdout
    assert "--- kill -9 d, one of two peers" in done.stdout
    assert "d is left: " in done.stdout
    assert "demo: all of it held" in done.stdout
    assert len(done.stdout.splitlines()) < 90
