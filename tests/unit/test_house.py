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


CASES = {"P": 61, "H": 14, "V": 9, "L": 9, "T": 3, "X": 5}
"""Troubles that people had with downloads, identities, peers, loading and command lines, by number."""


def test_every_case_has_a_test() -> None:
    text = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    named = {
        (letter.upper(), int(number))
        for letter, number in re.findall(r"(?i)(?<![a-z0-9])([phvltx])-?(\d\d)(?!\d)", text.replace("_", " "))
    }
    wanted = {(letter, number) for letter, count in CASES.items() for number in range(1, count + 1)}
    assert wanted - named == set()
