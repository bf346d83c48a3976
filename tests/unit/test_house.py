"""Rules of the house that no linter knows."""

from __future__ import annotations

import re

from tests.support import ROOT


def test_modules_are_short() -> None:
    lines = {
        str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in (ROOT / "mx_cli").rglob("*.py")
    }
    assert {path: count for path, count in lines.items() if count > 400} == {}


def test_one_module_imports_nixl() -> None:
    """By name, since it chooses between two builds at run time."""
    names = re.compile(r"\b(?:import|from) nixl\b|nixl_cu1\d|nixl\._")
    found = [path for path in (ROOT / "mx_cli").rglob("*.py") if names.search(path.read_text())]
    assert found == [ROOT / "mx_cli/transport/nixl_env.py"]
