"""The completions that scripts/generate makes, driven in the shells that are installed."""

from __future__ import annotations

import enum
import importlib.machinery
import importlib.util
import os
import pty
import select
import shlex
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Annotated

import pytest
import typer

from tests.support import ROOT, capability


def load_generator() -> ModuleType:
    loader = importlib.machinery.SourceFileLoader("mx_generate", str(ROOT / "scripts" / "generate"))
    spec = importlib.util.spec_from_loader("mx_generate", loader)
    assert spec
    module = importlib.util.module_from_spec(spec)
    # A dataclass looks its own module up by name.
    sys.modules["mx_generate"] = module
    loader.exec_module(module)
    return module


generate = load_generator()


class Format(enum.StrEnum):
    text = "text"
    json = "json"


def sample_app() -> typer.Typer:
    app = typer.Typer(add_completion=False)
    cache = typer.Typer(help="The cache.")
    app.add_typer(cache, name="cache")

    @app.command()
    def prefetch(
        uri: str,
        log_format: Annotated[Format, typer.Option(help="How [stderr] looks: it's a 'choice'.")] = Format.text,
        link: Annotated[Path | None, typer.Option("--link", "-l")] = None,
        to: Annotated[Path | None, typer.Option(file_okay=False)] = None,
        progress: Annotated[str, typer.Option(metavar="auto|bar|none")] = "auto",
        include: Annotated[list[str] | None, typer.Option()] = None,
        quiet: bool = False,
    ) -> None:
        """Fetch a `checkpoint`. Once."""

    @app.command("ls")
    def top_ls() -> None:
        """Not the cache's."""

    @cache.command("ls")
    def ls(json: bool = False) -> None:
        """List the snapshots."""

    @cache.command("rm")
    def rm(name: str) -> None:
        """Remove one."""

    return app


def tree() -> object:
    return generate.command_of(typer.main.get_command(sample_app()))


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "mx").write_text("#!/bin/sh\n")
    (tmp_path / "bin" / "mx").chmod(0o755)
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "some file").touch()
    (tmp_path / "work" / "subdir").mkdir()
    for name, text in (
        ("mx.bash", generate.bash(tree())),
        ("_mx", generate.zsh(tree())),
        ("mx.fish", generate.fish(tree())),
    ):
        (tmp_path / name).write_text(text)
    return tmp_path


def run(place: Path, *command: str | Path) -> str:
    env = {"PATH": f"{place / 'bin'}:{os.environ['PATH']}", "HOME": str(place), "LANG": "C.UTF-8", "TERM": "dumb"}
    done = subprocess.run(command, cwd=place / "work", env=env, capture_output=True, text=True, timeout=20)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout


CASES = [
    ("", {"prefetch", "cache", "ls"}),
    ("ca", {"cache"}),
    ("cache ", {"ls", "rm"}),
    ("cache ls --j", {"--json"}),
    ("prefetch --log-format ", {"text", "json"}),
    ("prefetch --log-format json --progress b", {"bar"}),
    ("prefetch --link cache --q", {"--quiet"}),
    ("prefetch so", {"some file"}),
    ("prefetch -l ", {"some file", "subdir"}),
    ("prefetch --to ", {"subdir"}),
    ("prefetch --include ", set()),
]


@capability("bash")
@pytest.mark.parametrize(
    ("line", "expected"), [*CASES, ("prefetch --log-format = j", {"json"}), ("ls -- so", {"some file"})]
)
def test_bash(place: Path, line: str, expected: set[str]) -> None:
    words = ["mx", *line.split(" ")]
    script = f"COMP_WORDS=({shlex.join(words)}); COMP_CWORD={len(words) - 1}; source {place}/mx.bash; _mx"
    out = run(place, "bash", "--norc", "-c", script + '; for word in "${COMPREPLY[@]}"; do echo "$word"; done')
    found = {word for word in out.splitlines() if not (word.startswith("--no-") and "--no" not in line)}
    assert found == expected


@capability("fish")
@pytest.mark.parametrize(("line", "expected"), [*CASES, ("prefetch --log-format=j", {"--log-format=json"})])
def test_fish(place: Path, line: str, expected: set[str]) -> None:
    script = f"source {place}/mx.fish; complete -C {shlex.quote('mx ' + line)}"
    out = run(place, "fish", "--no-config", "-c", script)
    found = {word.split("\t")[0].replace("\\", "").rstrip("/") for word in out.splitlines()}
    assert found == expected


def complete_in_zsh(place: Path, line: str, quiet: float) -> str:
    """Types the line and TAB into an interactive zsh; what it shows until it is `quiet` for so many seconds."""
    pid, terminal = pty.fork()
    if pid == 0:
        env = {"PATH": f"{place / 'bin'}:{os.environ['PATH']}", "HOME": str(place), "TERM": "dumb", "COLUMNS": "200"}
        os.chdir(place / "work")
        os.execvpe("zsh", ["zsh", "-f", "-i"], env)
    try:
        setup = (
            f"fpath=({place} $fpath); autoload -U compinit; compinit -u -D; setopt nobeep autolist; PROMPT='REA''DY> '"
        )
        os.write(terminal, setup.encode() + b"\n")
        # What is typed before the prompt, the terminal takes and not zsh: its ^D is another one.
        read_until(terminal, "READY> ", 20)
        # ^D at the end of the line lists what is possible; a space cannot be typed ahead of the prompt by mistake.
        os.write(terminal, f"mx {line}\x04".encode())
        time_out = 10.0
        shown = read_until(terminal, "\x00", time_out + quiet, quiet=quiet)
    finally:
        os.close(terminal)
        os.kill(pid, 9)
        os.waitpid(pid, 0)
    return shown


def read_until(terminal: int, text: str, timeout: float, quiet: float | None = None) -> str:
    """What the terminal shows until the text comes, or (with `quiet`) until nothing more comes for so long."""
    shown, deadline = "", time.monotonic() + timeout
    while text not in shown and time.monotonic() < deadline:
        ready, _, _ = select.select([terminal], [], [], quiet or deadline - time.monotonic())
        if not ready:
            if quiet:
                break
            continue
        shown += os.read(terminal, 65536).decode(errors="replace")
    return shown


@capability("zsh")
@pytest.mark.parametrize(
    ("line", "expected", "absent"),
    [
        ("", ["prefetch", "Fetch a checkpoint", "cache"], ["rm"]),
        ("cache ", ["ls", "rm", "List the snapshots"], ["prefetch"]),
        ("prefetch --log-format ", ["text", "json"], ["subdir"]),
        ("prefetch --", ["--link", "--quiet", "How stderr looks: it's a 'choice'"], ["--json"]),
        ("prefetch --to ", ["subdir"], ["some"]),
        ("prefetch ", ["subdir", "some"], []),
    ],
)
def test_zsh(place: Path, line: str, expected: list[str], absent: list[str]) -> None:
    shown = complete_in_zsh(place, line, quiet=1.0)
    if not all(word in shown for word in expected):
        # A busy machine thinks for longer than that.
        shown = complete_in_zsh(place, line, quiet=8.0)
    assert [word for word in expected if word not in shown] == [], shown
    assert [word for word in absent if word in shown] == [], shown


def test_the_table_goes_between_the_marks() -> None:
    text = "a\n<!-- exit-codes -->\nold\n<!-- /exit-codes -->\nb\n"
    new = generate.with_table(text, generate.exit_code_table([("0", "done", "no")]))
    assert "old" not in new
    assert "| 0 | done | no |" in new
    assert generate.with_table(new, generate.exit_code_table([("0", "done", "no")])) == new
    with pytest.raises(ValueError, match="exit-codes"):
        generate.with_table("a", "b")
