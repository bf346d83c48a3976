"""Help is for who reads it for the first time: whole sentences, own options first, examples that can be typed."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from typing import Any

import pytest
import typer

from mx_cli.cli.app import app
from mx_cli.cli.help_text import EVERYWHERE, EXAMPLES
from tests.support import Mx


def commands() -> Iterator[tuple[str, Any]]:
    stack = [("", typer.main.get_command(app))]
    while stack:
        name, command = stack.pop()
        below = getattr(command, "commands", {})
        stack += [(f"{name} {child}".strip(), one) for child, one in below.items()]
        if not below:
            yield name, command


ALL = dict(commands())


@pytest.mark.parametrize("words", [[], ["cache"]])
def test_a_list_of_commands_has_whole_sentences(mx: Mx, words: list[str]) -> None:
    _, _, listed = mx(*words, "--help").ok().out.partition("Commands:\n")
    rows = re.findall(r"^  (\w+) +(\S.*)$", listed.partition("\n\n")[0], re.MULTILINE)
    assert {name for name, _ in rows} == {one.split()[len(words)] for one in ALL if one.split()[: len(words)] == words}
    assert [row for row in rows if row[1].endswith("...")] == []


def test_every_option_is_explained_and_in_a_group(mx: Mx) -> None:
    for name, command in ALL.items():
        text = mx(*name.split(), "--help").ok().out
        titles = re.findall(r"^(\S.*):$", text, re.MULTILINE)
        assert len(titles) == len(set(titles)), name
        assert titles[-1] == EVERYWHERE, name
        assert [one.name for one in command.params if not one.help] == [], name


@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_can_be_typed(mx: Mx, name: str) -> None:
    known = {opt for one in ALL[name].params for opt in one.opts}
    text = mx(name, "--help").ok().out
    for example in EXAMPLES[name]:
        assert f"\n    {example}\n" in text
        program, command, *words = shlex.split(example.partition(" -- ")[0])
        assert (program, command) == ("mx", name)
        assert {word for word in words if word.startswith("-")} <= known
