"""X-01, X-02, X-04: what goes to stdout, what to stderr, and how progress looks where nobody watches."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.rig import servers
from tests.support import MIB, Mx, Result, Running, capability, checkpoint_files, clean_env, make_checkpoint

PLAIN = {"MX_PROGRESS_EVERY": "300ms"}
KEYS = [
    "uri",
    "revision",
    "identity",
    "dir",
    "role",
    "bytes_total",
    "bytes_fetched",
    "bytes_reused",
    "files",
    "seconds",
]
PHASES = {"resolve", "wait", "transfer", "verify", "publish"}
PROGRESS = re.compile(r"^(transfer|check|verify|publish|start)\s+.*(%|B)")


def plain(text: str) -> None:
    """No carriage return, no escape, nothing that a log would choke on; whole lines."""
    assert "\r" not in text
    assert "\x1b" not in text
    assert "\x08" not in text
    assert text == "" or text.endswith("\n")


# --- progress off a terminal -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "env",
    [
        {},
        {"TERM": "dumb", "NO_COLOR": "1"},
        {"CI": "true", "TERM": "xterm-256color", "FORCE_COLOR": "1"},
        {"COLUMNS": "20", "TERM": "xterm"},
    ],
    ids=str,
)
def test_x01_a_log_is_plain(mx: Mx, faultd: servers.Faultd, env: dict[str, str]) -> None:
    result = mx("prefetch", faultd.file("slow=3000000", 3_000_000, "x"), env=env | PLAIN).ok()
    plain(result.err)
    plain(result.out)
    assert [line for line in result.err.splitlines() if PROGRESS.match(line)]


def test_x01_lines_come_at_once_and_seldom(mx: Mx, faultd: servers.Faultd) -> None:
    """The first at once, then one in ten seconds or five percent, never more than ten a minute."""
    began = time.monotonic()
    run = mx.start("prefetch", faultd.file("slow=1500000", 7_000_000, "x"))
    run.wait_err("^cache /", timeout=20)
    run.wait_err(r"^transfer", timeout=20)
    assert time.monotonic() - began < 20
    assert run.process.poll() is None, "the first line came only at the end"
    result = run.wait().ok()
    lines = [line for line in result.err.splitlines() if PROGRESS.match(line)]
    assert 1 <= len(lines) <= 1 + result.seconds / 6
    assert all(len(line) < 120 for line in lines)


def test_x01_every_line_is_flushed(mx: Mx, faultd: servers.Faultd) -> None:
    run = mx.start("prefetch", faultd.file("slow=1500000", 6_000_000, "x"), env=PLAIN)
    seen = []
    for _ in range(3):
        seen.append(run.wait_err(r"^transfer\s+(\d+) %", timeout=20)[0])
        run.err.clear()
        assert run.process.poll() is None
    run.wait().ok()
    assert len(set(seen)) > 1


@capability("pidns")
def test_x01_also_as_pid_1_with_a_pipe(mx: Mx, faultd: servers.Faultd) -> None:
    prefix = ("unshare", "--pid", "--fork", "--mount-proc")
    run = mx.start("prefetch", faultd.file("slow=1500000", 4_000_000, "x"), env=PLAIN, prefix=prefix)
    run.wait_err(r"^transfer\s+\d+ %", timeout=20)
    assert run.process.poll() is None
    plain(run.wait().ok().err)


def test_x01_progress_counts_up_to_everything(mx: Mx, faultd: servers.Faultd) -> None:
    result = mx("prefetch", faultd.file("slow=3000000", 3_000_000, "x"), env=PLAIN).ok()
    shares = [int(found) for found in re.findall(r"^transfer\s+(\d+) %", result.err, re.MULTILINE)]
    assert shares == sorted(shares)
    assert shares[0] < 50
    assert "0 B of 0 B" not in result.err


def test_x01_progress_without_a_known_length_shows_bytes(mx: Mx, faultd: servers.Faultd) -> None:
    result = mx("prefetch", faultd.file("nolen,slow=3000000", 3_000_000, "x"), env=PLAIN).ok()
    lines = [line for line in result.err.splitlines() if line.startswith("transfer")]
    assert lines
    assert not [line for line in lines if "%" in line]
    assert [line for line in lines if "MiB" in line]


@pytest.mark.parametrize(
    ("arguments", "lines"),
    [(["--progress", "none"], 0), (["-q"], 0), (["--quiet", "--progress", "plain"], 0), (["--progress", "plain"], 1)],
)
def test_x01_progress_can_be_left_out(mx: Mx, faultd: servers.Faultd, arguments: list[str], lines: int) -> None:
    result = mx("prefetch", faultd.file("ok", 100_000, "x"), *arguments, env=PLAIN).ok()
    assert (len([line for line in result.err.splitlines() if PROGRESS.match(line)]) > 0) == bool(lines)
    if "-q" in arguments or "--quiet" in arguments:
        assert result.err == ""


def on_terminal(mx: Mx, *arguments: str, env: dict[str, str] | None = None) -> tuple[int, str]:
    """(exit code, what the terminal got on stderr); stdout goes elsewhere."""
    master, slave = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "mx_cli", *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=slave,
        env=clean_env(mx.home, mx.cache, {"TERM": "xterm-256color"} | (env or {})),
    )
    os.close(slave)
    data = b""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        ready, _, _ = select.select([master], [], [], 0.5)
        if ready:
            try:
                chunk = os.read(master, 65536)
            except OSError:
                break
            if not chunk:
                break
            data += chunk
    os.close(master)
    return process.wait(10), data.decode()


def test_x01_a_bar_on_a_terminal_only(mx: Mx, faultd: servers.Faultd) -> None:
    code, text = on_terminal(mx, "prefetch", faultd.file("slow=3000000", 3_000_000, "name-of-the-file"))
    assert code == 0
    assert "\x1b[" in text
    assert re.search(r"  name-of-the-file +\d+ % of 2.9 MiB", text)
    assert "MiB" in text


@pytest.mark.parametrize(
    "env", [{"TERM": "dumb"}, {"CI": "1"}, {"MX_PROGRESS": "plain"}, {"MX_LOG_FORMAT": "json"}], ids=str
)
def test_x01_no_bar_where_none_is_wanted(mx: Mx, faultd: servers.Faultd, env: dict[str, str]) -> None:
    code, text = on_terminal(mx, "prefetch", faultd.file("slow=3000000", 1_500_000, "x"), env=env)
    assert code == 0
    assert "\x1b" not in text


def test_x01_no_colour_with_a_bar(mx: Mx, faultd: servers.Faultd) -> None:
    code, text = on_terminal(mx, "prefetch", faultd.file("slow=3000000", 1_500_000, "x"), env={"NO_COLOR": "1"})
    assert code == 0
    assert not re.search(r"\x1b\[[0-9;]*(3[0-7]|38|9[0-7])[0-9;]*m", text)


def test_x01_a_follower_shows_the_leader(mx: Mx, faultd: servers.Faultd) -> None:
    url = faultd.file("slow=2000000", 6_000_000, "x")
    leader = mx.start("prefetch", url, env=PLAIN | {"MX_NODE_NAME": "node-7"})
    leader.wait_err("^leading")
    follower = mx.start("prefetch", url, "--json", env=PLAIN)
    line = follower.wait_err(r"^following .*node-7.*")[0]
    assert re.search(r"\d+ %.*\(alive \d+ s ago\)", line)
    follower.wait_err(r"^following .* [1-9]\d* %")
    leader.wait().ok()
    done = follower.wait().ok()
    plain(done.err)
    assert done.json()["role"] == "follower"


# --- stdout is the answer ----------------------------------------------------------------------------------


def outcomes(mx: Mx, faultd: servers.Faultd, *more: str) -> list[Result]:
    """One run of each kind of end that costs little."""
    good = faultd.file("ok", 1000, "x")
    return [
        mx("prefetch", good, *more),
        mx("prefetch", good, *more),
        mx("prefetch", good, "--dry-run", *more),
        mx("config", *more),
        mx("prefetch", faultd.file("html", 1000, "x"), *more),
        mx("prefetch", f"{faultd.url}/nope", *more),
        mx("prefetch", "/nope", *more),
        mx("prefetch", faultd.file("auth=secret", 1000, "x"), *more),
        mx("prefetch", "ftp://x/y", *more),
        mx("prefetch", *more),
        mx("config", "--ttl", "soon", *more),
        mx("nonsense", *more),
    ]


def test_x02_json_alone_on_stdout(mx: Mx, faultd: servers.Faultd) -> None:
    for result in outcomes(mx, faultd, "--json"):
        assert result.out.count("\n") == 1, result
        document = json.loads(result.out)
        assert next(iter(document)) == "schema"
        assert document["schema"] == 1
        assert ("error" in document) == (result.code != 0)
        if result.code:
            error = document["error"]
            assert set(error) >= {"code", "name", "message", "hint", "retryable", "via"}
            assert error["code"] == result.code
            assert error["message"] in result.err
            assert "mx: error: " in result.err


def test_x02_text_alone_on_stdout(mx: Mx, faultd: servers.Faultd) -> None:
    results = outcomes(mx, faultd)
    for result in results:
        assert "Traceback" not in result.err
        if result.code:
            assert result.out == ""
            assert re.search(r"^mx: error: .+", result.err, re.MULTILINE)
        else:
            assert result.out.endswith("\n")
            assert "error" not in result.err
    answer = results[0].out
    assert answer.count("\n") == 1
    assert Path(answer.strip()).is_dir()


def test_x02_the_keys_of_the_answer_stay(mx: Mx, hub: servers.Hub) -> None:
    sha = hub.commit(checkpoint_files(shards=2, size=100_000))
    document = mx("prefetch", hub.uri, "--json", env=hub.env).ok().json()
    assert [key for key in KEYS if key not in document] == []
    assert set(document["identity"]) >= {"content", "origin"}
    assert set(document["seconds"]) >= PHASES
    assert document["revision"] == sha
    assert all(isinstance(document[key], int) for key in ("bytes_total", "bytes_fetched", "bytes_reused", "files"))


def test_x02_the_first_line_says_where_the_cache_is(mx: Mx, faultd: servers.Faultd) -> None:
    first = mx("prefetch", faultd.file("ok", 1000, "x")).ok().err.splitlines()[0]
    assert re.fullmatch(rf"cache {re.escape(str(mx.cache))} \(\S+, [\d.]+ [KMGT]?i?B free\)", first)


def test_x02_help_and_version_are_answers(mx: Mx) -> None:
    for arguments in (["--help"], ["-h"], ["prefetch", "--help"], ["--version"]):
        result = mx(*arguments).ok()
        assert result.err == ""
        assert result.out.endswith("\n")
        plain(result.out)


def test_x02_no_command_is_a_usage_error(mx: Mx) -> None:
    result = mx().exits(2)
    assert result.out == ""
    assert re.search(r"^hint: .*--help$", result.err, re.MULTILINE)
    assert result.err.count("\n") == 2


COMMANDS = {
    "hash": (["hash", "{model}"], ["hash", "{model}/nope"]),
    "status": (["status"], ["status", "--ttl", "soon"]),
    "cache ls": (["cache", "ls"], ["cache", "ls", "--nonsense"]),
    "cache du": (["cache", "du"], ["cache", "du", "--nonsense"]),
    "cache verify": (["cache", "verify"], ["cache", "verify", "file:///nope"]),
    "cache gc": (["cache", "gc"], ["cache", "gc", "--min-age", "soon"]),
    "cache rm": (["cache", "rm", "{model}", "--force"], ["cache", "rm", "file:///nope"]),
    "cache unpin": (["cache", "unpin", "mine"], ["cache", "unpin", "nope"]),
    "config": (["config"], ["config", "--config", "/nope"]),
}


@pytest.mark.parametrize("command", COMMANDS)
def test_x02_every_command(mx: Mx, tmp_path: Path, command: str) -> None:
    model = make_checkpoint(tmp_path / "model", shards=1, size=10_000)
    mx("prefetch", model, "--pin", "mine").ok()
    good, bad = ([word.format(model=model) for word in words] for words in COMMANDS[command])
    document = json.loads(mx(*good, "--json").ok().out)
    assert next(iter(document)) == "schema"
    assert document["schema"] == 1
    assert "error" not in document
    failed = mx(*bad, "--json")
    assert failed.code not in (0, 1), failed
    assert failed.json()["error"]["code"] == failed.code
    assert "mx: error: " in failed.err
    text = mx(*bad)
    assert (text.code, text.out) == (failed.code, "")
    assert "Traceback" not in text.err


@pytest.mark.parametrize("where", ["stdout", "stderr", "both"])
def test_sigpipe_is_quiet(mx: Mx, faultd: servers.Faultd, where: str) -> None:
    read, write = os.pipe()
    os.close(read)
    process = subprocess.Popen(
        [sys.executable, "-m", "mx_cli", "prefetch", faultd.file("ok", 100_000, "x")],
        stdin=subprocess.DEVNULL,
        stdout=write if where != "stderr" else subprocess.PIPE,
        stderr=write if where != "stdout" else subprocess.PIPE,
        env=clean_env(mx.home, mx.cache),
    )
    os.close(write)
    out, err = process.communicate(timeout=60)
    assert b"Traceback" not in (err or b"")
    assert b"BrokenPipe" not in (err or b"")
    if where == "stderr":
        # The log is lost, the work is not.
        assert (process.returncode, Path(out.decode().strip()).is_dir()) == (0, True)
    else:
        assert process.returncode == 128 + signal.SIGPIPE
    assert mx("prefetch", faultd.file("ok", 100_000, "x"), "--json").ok().json()["role"] == "hit"


@pytest.mark.parametrize("words", [["--help"], ["--version"], ["cache", "--help"]])
def test_a_help_text_that_nobody_reads_is_quiet(mx: Mx, words: list[str]) -> None:
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "mx_cli", *words]
    done = subprocess.run(command, env=clean_env(mx.home, mx.cache), stdout=write, stderr=subprocess.PIPE, text=True)
    os.close(write)
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, "")


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-"])
def test_closed_streams(mx: Mx, faultd: servers.Faultd, closed: str) -> None:
    process = subprocess.run(
        [
            "sh",
            "-c",
            f'exec "$@" {closed}',
            "sh",
            sys.executable,
            "-m",
            "mx_cli",
            "prefetch",
            faultd.file("ok", 9, "x"),
        ],
        env=clean_env(mx.home, mx.cache),
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert b"Traceback" not in process.stderr
    if closed != ">&-":
        assert process.returncode == 0
        assert Path(process.stdout.decode().strip()).is_dir()


def test_nothing_is_asked_and_stdin_is_left_alone(mx: Mx, faultd: servers.Faultd) -> None:
    process = subprocess.run(
        [
            "sh",
            "-c",
            '"$@" >/dev/null; cat',
            "sh",
            sys.executable,
            "-m",
            "mx_cli",
            "prefetch",
            faultd.file("ok", 9, "x"),
        ],
        env=clean_env(mx.home, mx.cache),
        input=b"for the next command",
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert process.stdout == b"for the next command"


# --- --log-format json -------------------------------------------------------------------------------------------


def log_of(result: Result) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in result.err.splitlines()]
    for line in lines:
        assert list(line) == ["ts", "level", "event", "msg", "run", "fields"]
        assert line["level"] in ("debug", "info", "warning", "error")
        assert isinstance(line["ts"], float)
        assert isinstance(line["fields"], dict)
        assert "\n" not in line["msg"]
    assert len({line["run"] for line in lines}) == 1
    return lines


@pytest.mark.parametrize("verbose", [[], ["-v"], ["-vv"]])
def test_json_lines_of_a_good_run(mx: Mx, faultd: servers.Faultd, verbose: list[str]) -> None:
    url = faultd.file("failget=503:1,slow=600000", 1_000_000, "x")
    lines = log_of(mx("prefetch", url, "--log-format", "json", *verbose, env=PLAIN).ok())
    events = [line["event"] for line in lines]
    assert {"notice", "retried", "progress"} <= set(events)
    progress = [line["fields"] for line in lines if line["event"] == "progress"]
    assert all({"phase", "bytes_done", "bytes_total", "rate"} <= set(fields) for fields in progress)
    assert {path for fields in progress for path, _, _ in fields["current"]} == {"x"}
    assert max(fields["workers"] for fields in progress) > 0
    retried = next(line for line in lines if line["event"] == "retried")
    assert (retried["level"], retried["fields"]["attempt"]) == ("warning", 1)


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_json_lines_with_names_that_are_no_plain_text(mx: Mx, tmp_path: Path, encoding: str) -> None:
    odd = "é\u00a0\u009b31m\u0085\U000e0001.bin"
    model = make_checkpoint(tmp_path / "model")
    (model / odd).write_bytes(b"x")
    env = {"PYTHONIOENCODING": f"{encoding}:backslashreplace"}
    result = mx("prefetch", str(model), "--log-format", "json", env=env).ok()
    assert any(f"1 B saved: {odd}" in line["msg"] for line in log_of(result))
    lines = log_of(mx("prefetch", str(model / f"{odd}.none"), "--log-format", "json", env=env).exits(10))
    assert odd in lines[-1]["msg"]
    assert "\u009b" not in result.err


def test_verbose_says_why_and_very_verbose_says_all(mx: Mx, faultd: servers.Faultd) -> None:
    def events(*options: str) -> set[str]:
        url = faultd.file("ok", 100_000, "x" + "".join(options)) + "?token=SECRET"
        result = mx("prefetch", url, "--log-format", "json", *options).ok()
        assert "SECRET" not in result.err
        return {line["event"] for line in log_of(result)}

    plain = events()
    assert events("-v") - plain == {"detail"}
    assert events("-vv") - plain == {"detail", "requested"}
    text = mx("prefetch", faultd.file("ok", 100_000, "y"), "-vv").ok().err
    assert re.search(r"^GET http://\S+/y bytes=0-99999: 206 in \d", text, re.MULTILINE)
    assert "nobody ever led; term 1 is mine" in text


def test_json_lines_of_errors(mx: Mx, faultd: servers.Faultd) -> None:
    for arguments in (
        ["prefetch", faultd.file("html", 1000, "x")],
        ["prefetch", "/nope"],
        ["config", "--ttl", "soon"],
        ["prefetch", "--nonsense"],
    ):
        result = mx(*arguments, "--log-format", "json")
        last = log_of(result)[-1]
        assert (last["level"], last["event"]) == ("error", "error")
        assert last["fields"]["code"] == result.code
        assert result.out == ""


def test_json_lines_by_variable_of_a_misspelt_variable(mx: Mx) -> None:
    lines = log_of(mx("config", env={"MX_LOG_FORMAT": "json", "MX_CASHE_DIR": "x"}).ok())
    assert [line["level"] for line in lines] == ["warning"]


# --- the termination log -----------------------------------------------------------------------------------------


def test_the_termination_log_has_the_final_sentence(mx: Mx, faultd: servers.Faultd, tmp_path: Path) -> None:
    log = tmp_path / "termination"
    env = {"MX_TERMINATION_LOG": log}
    good = mx("prefetch", faultd.file("ok", 1000, "x"), "--json", env=env).ok()
    assert log.read_text().strip() == good.json()["dir"]
    bad = mx("prefetch", faultd.file("html", 1000, "x"), env=env).exits(16)
    assert "text/html" in log.read_text()
    assert log.read_text().strip() in bad.err
    mx("config", "--ttl", "soon", env=env).exits(2)
    assert "soon" in log.read_text()
    mx("prefetch", "--nonsense", env=env).exits(2)
    assert "--nonsense" in log.read_text()


def test_the_termination_log_is_short_and_whole(mx: Mx, tmp_path: Path) -> None:
    log = tmp_path / "termination"
    result = mx("prefetch", "/" + "é" * 3000, env={"MX_TERMINATION_LOG": log})
    assert result.code != 0
    assert 0 < log.stat().st_size <= 4096
    log.read_text("utf-8")


@pytest.mark.parametrize("where", ["missing/deep", "."])
def test_a_termination_log_that_cannot_be_written_changes_nothing(
    mx: Mx, faultd: servers.Faultd, tmp_path: Path, where: str
) -> None:
    mx("prefetch", faultd.file("ok", 1000, "x"), env={"MX_TERMINATION_LOG": tmp_path / where}).ok()


def test_the_termination_log_of_a_stopped_run(mx: Mx, faultd: servers.Faultd, tmp_path: Path) -> None:
    log = tmp_path / "termination"
    run = mx.start("prefetch", faultd.file("slow=500000", 5 * MIB, "x"), env={"MX_TERMINATION_LOG": log})
    run.wait_err("^leading")
    run.send(signal.SIGTERM)
    run.wait().exits(143)
    assert "SIGTERM" in log.read_text()


# --- where the time went -----------------------------------------------------------------------------------


def summary(result: Result, role: str) -> str:
    lines = [line for line in result.err.splitlines() if line.startswith(f"{role}: ")]
    assert len(lines) == 1, result.err
    assert re.search(r"\d+ files?, .* fetched, .* reused", lines[0])
    return lines[0]


def timed(result: Result) -> dict[str, Any]:
    document: dict[str, Any] = result.ok().json()
    assert set(document["seconds"]) >= PHASES
    assert all(0 <= seconds <= result.seconds + 0.1 for seconds in document["seconds"].values())
    assert sum(document["seconds"].values()) <= result.seconds + 0.1
    assert document["bytes_fetched"] + document["bytes_reused"] == document["bytes_total"]
    return document


def test_x04_leader_follower_hit_and_resumed(mx: Mx, faultd: servers.Faultd) -> None:
    size = 12 * MIB
    url = faultd.file("slow=4000000", size, "x")
    run: Running = mx.start("prefetch", url)
    run.wait_err("^leading")
    deadline = time.monotonic() + 30
    while faultd.bytes_served() < size // 3 and time.monotonic() < deadline:
        time.sleep(0.02)
    run.kill()
    leader = mx.start("prefetch", url, "--json")
    leader.wait_err("^leading")
    follower = mx("prefetch", url, "--json")
    resumed = timed(leader.wait())
    assert resumed["role"] == "leader"
    assert 0 < resumed["bytes_reused"] < size
    assert resumed["seconds"]["transfer"] > 0.5
    assert "transfer" in summary(leader.wait(), "leader")
    followed = timed(follower)
    assert (followed["role"], followed["bytes_fetched"]) == ("follower", 0)
    assert followed["seconds"]["wait"] > 0.5
    assert "wait" in summary(follower, "follower")
    hit = mx("prefetch", url, "--json")
    assert timed(hit)["role"] == "hit"
    assert timed(hit)["bytes_fetched"] == 0
    assert "revalidated, not transferred" in hit.err
    summary(hit, "hit")


def test_a_name_that_is_no_text_leaves_one_json_document(mx: Mx) -> None:
    for encoding in ("utf-8:strict", "utf-8:surrogateescape", "ascii:strict"):
        result = mx("prefetch", "./\udcff", "--json", env={"PYTHONIOENCODING": encoding}).exits(10)
        assert "\udcff" in result.json()["error"]["message"]


@pytest.mark.parametrize("encoding", ["ascii", "latin-1:strict", "utf-8"])
def test_the_directory_is_named_whatever_the_encoding_of_stdout(mx: Mx, tmp_path: Path, encoding: str) -> None:
    """A script takes it as a path: the file system's bytes, not a picture of them."""
    (tmp_path / "x.json").write_text("{}")
    cache = tmp_path / "模型"
    command = [sys.executable, "-m", "mx_cli", "prefetch", str(tmp_path / "x.json"), "--cache-dir", str(cache)]
    env = clean_env(mx.home, mx.cache, {"PYTHONIOENCODING": encoding})
    for options in ([], ["--dry-run"]):
        done = subprocess.run([*command, *options], env=env, capture_output=True)
        assert done.returncode == 0, done.stderr
        assert b"Traceback" not in done.stderr
        assert os.path.isdir(done.stdout.splitlines()[0]) or options


@pytest.mark.parametrize("words", [["config"], ["--help"], ["--version"], ["prefetch", "--help"]])
def test_stdout_without_space_is_no_bug(mx: Mx, words: list[str]) -> None:
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "mx_cli", *words]
        done = subprocess.run(command, env=clean_env(mx.home, mx.cache), stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 15, done.stderr
    assert "Traceback" not in done.stderr


@capability("ipv6")
def test_an_ipv6_address_is_shown_as_it_is_written(mx: Mx) -> None:
    said = mx("prefetch", "http://user:SECRET@[::1]:1/x?token=SECRET", "--retry-for", "0").exits(12).err
    assert "http://[::1]:1/x: [::1]:1: cannot connect" in said
    assert "SECRET" not in said


def test_a_removed_current_directory_is_named(mx: Mx, tmp_path: Path) -> None:
    script = 'mkdir gone && cd gone && rmdir ../gone && exec "$0" -m mx_cli prefetch ./model --json'
    command = ["sh", "-c", script, sys.executable]
    done = subprocess.run(command, cwd=tmp_path, env=clean_env(mx.home, mx.cache), capture_output=True, text=True)
    assert done.returncode == 2, done.stderr
    assert "current directory" in json.loads(done.stdout)["error"]["message"]


def test_config_shows_no_secrets_of_an_endpoint(mx: Mx) -> None:
    env = {"MX_ENDPOINT_URL": "http://user:SECRETPW@store:9000/?sig=SECRETSIG"}
    for words in (("config",), ("config", "--json")):
        out = mx(*words, env=env).ok().out
        assert "http://store:9000" in out
        assert "SECRET" not in out
