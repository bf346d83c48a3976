"""The README's console blocks are real: each command is run, and what it prints is what stands there."""

from __future__ import annotations

import difflib
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from mx_cli.base.errors import exit_codes
from tests.rig import servers
from tests.support import MIB, ROOT, clean_env, make_checkpoint

README = ROOT / "README.md"
REPOSITORY, COMMIT = "acme/llama-tiny", "7f4a3c1d9e2b5a60817f4a3c1d9e2b5a60817f4a"
SHOWN_CACHE, SHOWN_PLACE = "/cache", "/work"
SIZE, RATE, SECONDS = r"[\d.]+ (?:[KMGTP]i)?B", r"[\d.]+ (?:[KMGTP]i)?B/s", r"[\d.]+ (?:s|ms)"
VARIES = [
    (rf"\(\w+, {SIZE} free\)", "(… free)"),
    (rf"at {RATE}; .*", "at …/s; …"),
    (r"reused; .*", "reused; …"),
    (r"^(?:transfer|verify|publish)  .*(?:\n(?:transfer|verify|publish)  .*)*", "transfer  …"),
    (rf"{SIZE} kept", "… kept"),
    (rf"goes on from {SIZE}", "goes on from …"),
    (r"\b[\w.-]+/\d+(?=  +\d+  left)", "…"),
    (r"\d{4}-\d\d-\d\d", "…"),
    (r"[ \t]+$", ""),
    (r" {2,}", "  "),
]


@dataclass(frozen=True)
class Block:
    """One command of a console block and the output below it; `line` is where it stands."""

    line: int
    command: str
    output: str


def blocks(text: str) -> list[Block]:
    found: list[Block] = []
    for fence in re.finditer(r"^```console\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        line = text.count("\n", 0, fence.start()) + 2
        for part in re.split(r"^\$ ", fence[1], flags=re.MULTILINE)[1:]:
            command, _, output = part.partition("\n")
            while command.endswith("\\"):
                more, _, output = output.partition("\n")
                command = f"{command}\n{more}"
            found.append(Block(line, command, output))
            line += part.count("\n")
    return found


def plain(text: str) -> str:
    """The text with what differs between two runs as `…`."""
    for pattern, shown in VARIES:
        text = re.sub(pattern, shown, text, flags=re.MULTILINE)
    return text.strip()


@dataclass(frozen=True)
class Sandbox:
    """A directory with `mx` on the PATH, a cache, and a hub that has acme/llama-tiny."""

    place: Path
    env: dict[str, str]

    def run(self, command: str) -> str:
        """Both streams of the command, as on a terminal, the cache shown as /cache."""
        command = command.replace(SHOWN_CACHE, self.env["MX_CACHE_DIR"])
        done = subprocess.run(
            ["bash", "-c", command],
            cwd=self.place,
            env=self.env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=60,
        )
        return done.stdout.replace(self.env["MX_CACHE_DIR"], SHOWN_CACHE).replace(str(self.place), SHOWN_PLACE)


@pytest.fixture
def sandbox(tmp_path: Path, hub: servers.Hub) -> Sandbox:
    make_checkpoint(hub.dir / COMMIT, shards=2, size=12 * MIB, seed="readme")
    hub.move("main", COMMIT)
    for name in ("bin", "home", "work"):
        (tmp_path / name).mkdir()
    program = tmp_path / "bin" / "mx"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m mx_cli "$@"\n')
    program.chmod(0o755)
    env = clean_env(tmp_path / "home", tmp_path / "cache", hub.env)
    # What a reader's own shell doesn't have either.
    for name in ("MX_TTL", "MX_BEAT", "MX_STALL_TIMEOUT"):
        del env[name]
    env["PATH"] = f"{tmp_path / 'bin'}{os.pathsep}{env['PATH']}"
    return Sandbox(tmp_path / "work", env)


def test_every_command_prints_what_the_readme_shows(sandbox: Sandbox) -> None:
    wrong = []
    for block in blocks(README.read_text()):
        shown, real = plain(block.output), plain(sandbox.run(block.command))
        if shown != real:
            rows = difflib.unified_diff(shown.splitlines(), real.splitlines(), "README.md", "mx", lineterm="")
            wrong.append(f"README.md:{block.line}: $ {block.command}\n" + "\n".join(rows))
    assert not wrong, "\n\n".join(wrong)


def test_each_command_has_a_transcript() -> None:
    commands = " ".join(block.command for block in blocks(README.read_text()))
    wanted = ["prefetch", "hash", "cache ls", "cache du", "cache verify", "cache gc", "status", "config"]
    assert [name for name in wanted if f"mx {name}" not in commands] == []


def test_the_failure_policy_follows_from_the_exit_codes() -> None:
    listed = re.search(r"operator: In\n\s+values: \[([\d, ]+)\]", README.read_text())
    assert listed
    final = [int(code) for code, _, retry in exit_codes() if code != "0" and retry != "yes"]
    assert [int(code) for code in listed[1].split(",")] == final


def test_the_blocks_are_found_and_what_varies_is_not_compared() -> None:
    text = "x\n```console\n$ mx a \\\n    b\none\n\n$ mx c\n```\n"
    assert blocks(text) == [Block(3, "mx a \\\n    b", "one\n\n"), Block(7, "mx c", "")]
    one = "cache /cache (ext4, 67.2 GiB free)\ntransfer   28 %  1 B\ntransfer   99 %  2 B\nA   B\n"
    assert plain(one) == "cache /cache (… free)\ntransfer  …\nA  B"
