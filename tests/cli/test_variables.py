"""Every option has a variable: flag > variable > default; a misspelt one is named."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from mx_cli.base.config import asks_for_json, resolve
from mx_cli.cli.app import app
from tests.support import Mx, Result

# prefetch gives these to the command that it starts.
GIVEN = {"MX_DIR", "MX_IDENTITY"}


def options() -> Iterator[tuple[str, Any]]:
    """(command, option) of the whole tree."""
    stack = [("mx", typer.main.get_command(app))]
    while stack:
        name, command = stack.pop()
        stack += [(f"{name} {child}", below) for child, below in getattr(command, "commands", {}).items()]
        for parameter in command.params:
            if parameter.param_type_name == "option" and parameter.name not in ("help", "version"):
                yield name, parameter


def variable_of(option: Any) -> str:
    found = re.search(r"\[env (MX_[A-Z0-9_]+)", option.help or "")
    return found[1] if found else ""


def test_every_option_names_its_variable_in_the_help() -> None:
    """All but consent: what removes something has to be said each time."""
    without = {opt for _, option in options() if not variable_of(option) for opt in option.opts}
    assert without == {"--yes", "--force"}


def test_no_variable_is_one_that_kubernetes_injects_or_that_prefetch_gives_away() -> None:
    names = {variable_of(option) for _, option in options()}
    assert {name for name in names if name.endswith("_PORT") or "_SERVICE_" in name} == set()
    assert names & GIVEN == set()


@pytest.fixture
def files(tmp_path: Path) -> Path:
    directory = tmp_path / "files"
    directory.mkdir()
    for name in ("a.txt", "b.txt", "c.txt"):
        (directory / name).write_text(name)
    return directory


def listed(directory: str) -> list[str]:
    return sorted(path.name for path in Path(directory).iterdir())


def test_a_variable_stands_for_the_option_and_the_option_wins(mx: Mx, files: Path, tmp_path: Path) -> None:
    env = {"MX_INCLUDE": "a.txt b.txt", "MX_JSON": "1"}
    assert listed(mx("prefetch", files, env=env).ok().json()["dir"]) == ["a.txt", "b.txt"]
    one = mx("prefetch", files, "--include", "c.txt", "--cache-dir", tmp_path / "other", env=env).ok().json()
    assert listed(one["dir"]) == ["c.txt"]


@pytest.mark.parametrize("empty", ["", None])
def test_an_empty_variable_is_none(mx: Mx, files: Path, empty: str | None) -> None:
    names = ("MX_DRY_RUN", "MX_INCLUDE", "MX_REVISION", "MX_JSON", "MX_TO", "MX_VERBOSE", "MX_TIMEOUT", "MX_OFFLINE")
    env = {} if empty is None else dict.fromkeys(names, empty)
    assert listed(mx("prefetch", files, env=env).ok().out.strip()) == ["a.txt", "b.txt", "c.txt"]


def test_several_variables_together(mx: Mx, files: Path, tmp_path: Path) -> None:
    env = {
        "MX_TO": tmp_path / "to",
        "MX_LINK": tmp_path / "link",
        "MX_RESULT": tmp_path / "result.json",
        "MX_PIN": "serving",
        "MX_QUIET": "true",
        "MX_EXCLUDE": "c.txt",
    }
    result = mx("prefetch", files, env=env).ok()
    assert result.err == ""
    assert listed(str(tmp_path / "to")) == listed(str(tmp_path / "link")) == ["a.txt", "b.txt"]
    assert json.loads((tmp_path / "result.json").read_text())["files"] == 2
    assert list(mx.cache.rglob("pins/*.json"))


@pytest.mark.parametrize("value", ["maybe", "2"])
def test_a_variable_that_makes_no_sense_is_a_usage_error(mx: Mx, files: Path, value: str) -> None:
    assert mx("prefetch", files, env={"MX_DRY_RUN": value}).exits(2).out == ""
    assert "MX_OFFLINE" in mx("prefetch", files, env={"MX_OFFLINE": value}).exits(2).err


def test_a_variable_beats_the_file_and_the_file_the_default(mx: Mx, tmp_path: Path) -> None:
    config = tmp_path / "config.toml"
    config.write_text('wait = "7m"\nttl = "40s"\n')
    env = {"MX_CONFIG": config, "MX_TTL": "30s"}
    rows = {row["name"]: row for row in mx("config", "--json", "--beat", "3s", env=env).ok().json()["settings"]}
    assert (rows["wait"]["value"], rows["wait"]["origin"]) == (420.0, str(config))
    assert (rows["ttl"]["value"], rows["ttl"]["origin"]) == (30.0, "MX_TTL")
    assert (rows["beat"]["value"], rows["beat"]["origin"]) == (3.0, "--beat")
    assert rows["retry_for"]["origin"] == "default"


def planned(result: Result) -> set[str]:
    return {row["path"] for row in result.ok().json()["files"]}


def test_the_file_stands_in_for_the_options_of_a_command(mx: Mx, files: Path, tmp_path: Path) -> None:
    config = tmp_path / "config.toml"
    config.write_text('include = ["a.*", "no such"]\ndry_run = true\njson = true\n')
    assert planned(mx("prefetch", files, env={"MX_CONFIG": config})) == {"a.txt"}
    assert planned(mx("prefetch", files, "--config", config, env={"MX_INCLUDE": "b.* c.*"})) == {"b.txt", "c.txt"}
    assert planned(mx("prefetch", files, "--config", config, "--include", "b.*")) == {"b.txt"}
    config.write_text('include = "b.* c.*"\ndry_run = false\n')
    assert planned(mx("prefetch", files, "--config", config, "--dry-run", "--json")) == {"b.txt", "c.txt"}
    assert listed(mx("prefetch", files, "--config", config).ok().out.strip()) == ["b.txt", "c.txt"]


def test_options_of_commands_in_the_file_disturb_no_other_reader(mx: Mx, files: Path, tmp_path: Path) -> None:
    config = tmp_path / "config.toml"
    config.write_text('max_readers = 3\nlisten = "127.0.0.1:0"\n')
    mx("prefetch", files, "--config", config).ok()
    # Its rows are measured in processes of their own.
    assert "unknown" not in mx("doctor", files, "--config", config).out
    assert resolve({}, {}, config).settings.ttl == 20.0


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("yes = true", "unknown settings: yes"),
        ('config = "other.toml"', "unknown settings: config"),
        ("keep_last = [1]", "--keep-last: one value is expected, not a list"),
        ('keep_last = "few"', "--keep-last"),
        ("keep_last = 2026-01-01", "config.toml: keep_last: not a text or a number"),
    ],
)
def test_wrong_options_in_the_file(mx: Mx, tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "config.toml").write_text(text)
    assert says in mx("cache", "gc", "--config", tmp_path / "config.toml").exits(2).err


def test_what_is_no_configuration_file_is_refused_at_once(mx: Mx, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "large").write_text("# " + "x" * (64 << 10))
    for path in ("/dev/zero", tmp_path / "pipe", tmp_path, tmp_path / "large"):
        assert str(path) in mx("config", "--config", path, timeout=20).exits(2).err
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to("file")
    mx("config", "--config", tmp_path / "link").ok()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("wat = 1", "wat"),
        ("ttl = [", "config.toml"),
        ("ttl = " + "[" * 50_000, "config.toml"),
        ("ttl = 1\nttl = 2\n", "line 2"),
        ('hf_token = "x"', "secrets"),
        ('ttl = 1\nanon = "maybe"', "config.toml: anon: "),
        ("wait = nan", "config.toml: wait: "),
        ("cache_dir = true", "config.toml: cache_dir: "),
        ('cache_dir = ["/cache"]', "config.toml: cache_dir: "),
        ("ttl = 2026-01-01", "config.toml: ttl: "),
        (r'termination_log = "a\u0000b"', "config.toml: termination_log: "),
    ],
)
def test_a_wrong_file_is_a_usage_error(mx: Mx, tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "config.toml").write_text(text)
    result = mx("config", "--config", tmp_path / "config.toml").exits(2)
    assert says in result.err
    assert "no such" in mx("config", "--config", tmp_path / "absent.toml").exits(2).err
    assert "not a path" in mx("config", "--cache-dir", "~nobody-of-that-name/x").exits(2).err


@pytest.mark.parametrize("option", ["--timeout", "--max-connections", "--range-size", "--max-bandwidth"])
def test_a_number_without_end_is_a_usage_error(mx: Mx, option: str) -> None:
    said = mx("prefetch", "/nowhere", option, "9" * 5000, "--json").exits(2).json()
    assert said["error"]["message"].startswith(f"{option}: not a ")


@pytest.mark.parametrize(("text", "value"), [("true", True), ("false", False), ("1", True), ('"off"', False)])
def test_a_yes_or_no_of_the_file(mx: Mx, tmp_path: Path, text: str, value: bool) -> None:
    (tmp_path / "config.toml").write_text(f"strict = {text}\nci = {str(value).lower()}")
    rows = mx("config", "--config", tmp_path / "config.toml", "--json").ok().json()["settings"]
    assert {row["name"]: row["value"] for row in rows if row["name"] in ("strict", "ci")} == dict.fromkeys(
        ("strict", "ci"), value
    )


@pytest.mark.parametrize(
    ("variable", "near"),
    [
        ("MX_CASHE_DIR", "MX_CACHE_DIR"),
        ("MX_INCLUDES", "MX_INCLUDE"),
        ("MX_DRYRUN", "MX_DRY_RUN"),
        ("MX_OFLINE", "MX_OFFLINE"),
    ],
)
def test_a_misspelt_variable_is_named(mx: Mx, variable: str, near: str) -> None:
    assert f"{variable} is not a setting of mx; did you mean {near}?" in mx("config", env={variable: "1"}).ok().err


def test_foreign_variables_are_not_mentioned(mx: Mx) -> None:
    foreign = [
        "MX_SERVER_ADDRESS",
        "MX_METADATA_BACKEND",
        "MX_POOL_REG",
        "MX_PORT",
        "MX_SERVICE_HOST",
        "MX_TP",
        "MX_ENABLED",
    ]
    assert mx("config", env=dict.fromkeys(foreign, "1")).ok().err == ""


def test_known_variables_are_not_misspelt() -> None:
    assert resolve({}, {"MX_TO": "x"}, known={"MX_TO"}).notices == ()


@pytest.mark.parametrize(
    ("arguments", "environ", "wanted"),
    [
        (["prefetch", "--json"], {}, True),
        (["prefetch", "x", "--", "tool", "--json"], {}, False),
        (["prefetch"], {"MX_JSON": "1"}, True),
        (["prefetch"], {"MX_JSON": "0"}, False),
        (["prefetch"], {"MX_JSON": ""}, False),
    ],
)
def test_who_asks_for_json(arguments: list[str], environ: dict[str, str], wanted: bool) -> None:
    assert asks_for_json(arguments, environ) is wanted


def test_a_refusal_of_the_parser_is_json_too(mx: Mx) -> None:
    for result in (mx("prefetch", "--json"), mx("prefetch", env={"MX_JSON": "1"}), mx("nonsense", "--json")):
        error = result.exits(2).json()["error"]
        assert (error["code"], error["name"], error["retryable"]) == (2, "usage", False)
    assert mx("prefetch").exits(2).out == ""
