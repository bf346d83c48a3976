"""Rules of the house that no linter knows."""

from __future__ import annotations

from tests.support import ROOT


def test_modules_are_short() -> None:
    lines = {
        str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in (ROOT / "mx_cli").rglob("*.py")
    }
    assert {path: count for path, count in lines.items() if count > 400} == {}
