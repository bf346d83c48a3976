"""What the README shows is real: commands print what stands there, programs run, manifests fit what mx takes.

A prompt `node-b$` is another host's: a cache of its own. `mx serve` goes on in its shell while the others work.
"""

from __future__ import annotations

import difflib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

from mx_cli.base.errors import exit_codes
from tests.rig import capabilities, servers
from tests.support import MIB, ROOT, capability, checkpoint_files, clean_env, make_checkpoint

README = ROOT / "README.md"
REPOSITORY, COMMIT = "acme/llama-tiny", "7f4a3c1d9e2b5a60817f4a3c1d9e2b5a60817f4a"
SHOWN_CACHE, SHOWN_PLACE, SHOWN_PEER, SHOWN_DOCTOR = "/cache", "/work", "node-a:7400", "node-a:7401"
STAYS = ("mx serve", "mx doctor --listen")
"""Commands that go on until they are stopped."""
SIZE, RATE, SECONDS = r"[\d.]+ (?:[KMGTP]i)?B", r"[\d.]+ (?:[KMGTP]i)?B/s", r"[\d.]+ (?:s|ms)"
VARIES = [
    (rf"\(\w+, {SIZE} free\)", "(… free)"),
    (rf"at {RATE}; .*", "at …/s; …"),
    (r"reused; .*", "reused; …"),
    # Whether there is time for a line of progress, and between which others, is a matter of milliseconds.
    (r"^(?:transfer|verify|publish)  .*\n", ""),
    (r"\bmx-[\w.-]+-\d+-[0-9a-f]{12}\b", "mx-…"),
    (r"127\.0\.0\.1:\d+", "127.0.0.1:…"),
    # What node-a resolves to; one address is both here.
    (r"10\.9\.0\.1:740", "node-a:740"),
    (rf"\bat {RATE}", "at …/s"),
    (r"[\d.]+ GB/s", "… GB/s"),
    # Reads under way at once are as many as there are cores.
    (r"^(peer +first +[\d.]+ MiB) +[\d.]+ MiB", r"\1 … MiB"),
    (r"[\d.]+ ms\b", "… ms"),
    (rf"{RATE}, TLS", "…/s, TLS"),
    (r"[+-][\d.]+ s there", "… s there"),
    (r"^(memory per rank .* ranks\)); .*", r"\1; …"),
    # The JSON line of a peer, without what the README leaves out.
    (r', "generation": .* "files": ', ", … "),
    (rf"^(mx-… +\S+ +){SECONDS}", r"\1…"),
    # Of a machine with a GPU another thing is said.
    (r"\(gds: .*\)", "(gds: …)"),
    (rf"{SIZE} kept", "… kept"),
    (rf"goes on from {SIZE}", "goes on from …"),
    (r"\b[\w.-]+/\d+(?=  +\d+  left)", "…"),
    (r"\d{4}-\d\d-\d\d", "…"),
    (r"[ \t]+$", ""),
    (r" {2,}", "  "),
]
WITHOUT_NIXL = [
    (r"^warning: readers get the bytes by path socket only: .*\n", ""),
    (r"\bby (?:nixl-read|socket)\b", "by …"),
    (r"\((?:cma/memory|the peer offers).*\)$", "(…)"),
    (r"^(peer +first +\S+ MiB) .*", r"\1 …"),
]
"""What differs where the optional extra is not installed."""


@dataclass(frozen=True)
class Block:
    """One command of a console block and the output below it; `line` is where it stands, `host` whose prompt it has."""

    line: int
    command: str
    output: str
    host: str = ""


def blocks(text: str) -> list[Block]:
    found: list[Block] = []
    for fence in re.finditer(r"^```console\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        line = text.count("\n", 0, fence.start()) + 2
        prompts = list(re.finditer(r"^([\w-]*)\$ ", fence[1], re.MULTILINE))
        ends = [prompt.start() for prompt in prompts[1:]] + [len(fence[1])]
        for prompt, end in zip(prompts, ends, strict=True):
            part = fence[1][prompt.end() : end]
            command, _, output = part.partition("\n")
            while command.endswith("\\"):
                more, _, output = output.partition("\n")
                command = f"{command}\n{more}"
            found.append(Block(line, command, output, prompt[1]))
            line += part.count("\n")
    return found


def plain(text: str) -> str:
    """The text with what differs between two runs as `…`."""
    for pattern, shown in VARIES + ([] if capabilities.have("nixl") else WITHOUT_NIXL):
        text = re.sub(pattern, shown, text, flags=re.MULTILINE)
    return text.strip()


@dataclass
class Sandbox:
    """A directory with `mx` on the PATH, a cache for each host, and a hub that has acme/llama-tiny."""

    place: Path
    env: dict[str, str]
    peer: str = field(default_factory=lambda: f"127.0.0.1:{servers.free_port()}")
    doctor: str = field(default_factory=lambda: f"127.0.0.1:{servers.free_port()}")
    serving: list[subprocess.Popen[str]] = field(default_factory=list)

    def run(self, block: Block) -> str:
        """Both streams of the command, as on a terminal, the host's cache shown as /cache; of a peer, until it is ready."""
        cache = self.env["MX_CACHE_DIR"] + block.host
        places = ((cache, SHOWN_CACHE), (self.peer, SHOWN_PEER), (self.doctor, SHOWN_DOCTOR))
        command = block.command
        for real, shown in places:
            command = command.replace(shown, real)
        process = subprocess.Popen(
            ["bash", "-c", command],
            cwd=self.place,
            env={**self.env, "MX_CACHE_DIR": cache},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        if block.command.startswith(STAYS):
            self.serving.append(process)
            output = _until_ready(process)
        else:
            output = process.communicate(timeout=60)[0]
        for real, shown in (*places, (str(self.place), SHOWN_PLACE)):
            output = output.replace(real, shown)
        return output

    def close(self) -> list[int]:
        """Stop the peers; their exit codes."""
        for process in self.serving:
            process.send_signal(signal.SIGTERM)
        return [process.wait(30) for process in self.serving]


def _until_ready(process: subprocess.Popen[str]) -> str:
    lines = []
    for line in process.stdout or ():
        lines.append(line)
        if line.startswith("{"):
            break
    return "".join(lines)


@pytest.fixture
def sandbox(tmp_path: Path, hub: servers.Hub) -> Iterator[Sandbox]:
    make_checkpoint(hub.dir / COMMIT, shards=2, size=12 * MIB, seed="readme")
    hub.move("main", COMMIT)
    for name in ("bin", "home", "work", "run"):
        (tmp_path / name).mkdir(mode=0o700)
    program = tmp_path / "bin" / "mx"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m mx_cli "$@"\n')
    program.chmod(0o755)
    env = clean_env(tmp_path / "home", tmp_path / "cache", {**hub.env, "XDG_RUNTIME_DIR": tmp_path / "run"})
    # What a reader's own shell doesn't have either.
    for name in ("MX_TTL", "MX_BEAT", "MX_STALL_TIMEOUT"):
        del env[name]
    env["PATH"] = f"{tmp_path / 'bin'}{os.pathsep}{env['PATH']}"
    sandbox = Sandbox(tmp_path / "work", env)
    yield sandbox
    for process in sandbox.serving:
        process.kill()
        process.wait()


def test_every_command_prints_what_the_readme_shows(sandbox: Sandbox) -> None:
    wrong = []
    for block in blocks(README.read_text()):
        shown, real = plain(block.output), plain(sandbox.run(block))
        if shown != real:
            rows = difflib.unified_diff(shown.splitlines(), real.splitlines(), "README.md", "mx", lineterm="")
            wrong.append(f"README.md:{block.line}: {block.host}$ {block.command}\n" + "\n".join(rows))
    assert not wrong, "\n\n".join(wrong)
    # Both peers of the README, and the doctor who listens, as mx ends when it is told to.
    assert sandbox.close() == [128 + signal.SIGTERM] * 3


def test_each_command_has_a_transcript() -> None:
    commands = " ".join(block.command for block in blocks(README.read_text()))
    wanted = [
        "prefetch",
        "serve",
        "pull",
        "peers",
        "hash",
        "cache ls",
        "cache du",
        "cache verify",
        "cache gc",
        "status",
    ]
    wanted += ["config", "doctor"]
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
    assert plain(one) == "cache /cache (… free)\nA  B"
    shells = "```console\n$ mx a\none\nnode-b$ mx b\ntwo\n```\n"
    assert blocks(shells) == [Block(2, "mx a", "one\n"), Block(4, "mx b", "two\n", "node-b")]


# --- programs ----------------------------------------------------------------------------------------------------


def program(call: str) -> str:
    """The one that calls this."""
    found = re.findall(r"^```python\n(.*?)^```$", README.read_text(), re.MULTILINE | re.DOTALL)
    (one,) = (text for text in found if f"mx_cli.{call}(" in text)
    return str(one)


@capability("torch")
@capability("transformers")
def test_the_program_that_loads_a_model_runs(tmp_path: Path) -> None:
    import torch

    from tests.rig import tiny_models

    directory = tiny_models.make(tmp_path / "model", "tied")
    words = tiny_models.pretrained(directory)(torch.arange(8)[None]).logits[0].argmax(-1).tolist()
    env = clean_env(tmp_path, tmp_path / "cache", {"XDG_RUNTIME_DIR": tmp_path / "run"})
    for source in (str(directory), directory.as_uri()):
        done = subprocess.run(
            [sys.executable, "-c", program("load_model"), str(directory), source],
            env=env,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout.splitlines()[-1] == str(words)


@capability("torch")
def test_the_python_program_that_needs_no_peer_runs(tmp_path: Path, hub: servers.Hub) -> None:
    files = checkpoint_files()
    hub.commit(files)
    env = clean_env(tmp_path, tmp_path / "cache", hub.env)
    done = subprocess.run(
        [sys.executable, "-c", program("stream"), hub.uri], env=env, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    # Bytes that are noise are numbers that equal themselves, or none.
    assert [line.split(" ")[0] for line in done.stdout.splitlines()] == [
        f"model.layers.{layer}.{part}_proj.weight" for layer in range(2) for part in ("q", "o")
    ]
    assert list((tmp_path / "cache").glob("models/*/manifests/*/*.json"))


@capability("torch")
def test_the_python_programs_run(tmp_path: Path) -> None:
    giver, taker = program("serve"), program("pull_into")
    (tmp_path / "run").mkdir(mode=0o700)
    env = clean_env(tmp_path, tmp_path / "cache", {"XDG_RUNTIME_DIR": tmp_path / "run"})
    shows = "\nprint(target.weight.sum().item(), target.bias.tolist() == tensors['bias'].tolist())"
    source = subprocess.Popen(
        [sys.executable, "-c", giver], env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert source.stdout
    try:
        identity = source.stdout.readline().strip()
        done = subprocess.run(
            [sys.executable, "-c", taker + shows, identity], env=env, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, done.stderr
        total, same = done.stdout.split()
        assert (total != "0.0", same) == (True, "True")
        source.communicate("\n", timeout=30)
        assert source.returncode == 0
    finally:
        source.kill()
        source.wait()


# --- manifests and command lines ---------------------------------------------------------------------------------


def manifests(section: str = "Kubernetes") -> dict[str, dict[str, Any]]:
    """{kind: manifest} of the YAML blocks of a section."""
    _, _, text = README.read_text().partition(f"\n## {section}\n")
    found = re.findall(r"^```yaml\n(.*?)^```$", text.partition("\n## ")[0], re.MULTILINE | re.DOTALL)
    return {one["kind"]: one for text in found for one in yaml.safe_load_all(text)}


def containers(manifest: dict[str, Any]) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """(pod's spec, container) of each container that runs mx; none of what runs nothing."""
    spec = manifest["spec"].get("template", manifest)["spec"]
    for container in [*spec.get("initContainers", ()), *spec.get("containers", ())]:
        if container["command"][0] == "mx":
            yield spec, container


def option(container: dict[str, Any], name: str) -> str:
    command = container["command"]
    return str(command[command.index(name) + 1])


def test_manifests_agree_with_each_other_and_with_the_command_lines() -> None:
    found = manifests()
    assert set(found) == {"Service", "NetworkPolicy", "DaemonSet", "Pod", "Job"}
    service, policy = found["Service"], found["NetworkPolicy"]
    [(_, peer)] = containers(found["DaemonSet"])
    [(_, reader)] = containers(found["Pod"])
    name, port = service["metadata"]["name"], service["spec"]["ports"][0]["port"]
    labels = found["DaemonSet"]["spec"]["template"]["metadata"]["labels"]

    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["selector"] == policy["spec"]["podSelector"]["matchLabels"] == labels
    assert labels == found["DaemonSet"]["spec"]["selector"]["matchLabels"]
    [rule] = policy["spec"]["ingress"]
    [who] = rule["from"][0]["podSelector"]["matchExpressions"]
    assert {labels["app"], found["Pod"]["metadata"]["labels"]["app"]} == set(who["values"])
    assert [one["port"] for one in rule["ports"]] == [port]

    assert option(peer, "--listen") == f"0.0.0.0:{port}"
    assert option(peer, "--advertise") == f"$(POD_IP):{port}"
    assert [one["containerPort"] for one in peer["ports"]] == [port]
    assert option(peer, "--discovery") == option(reader, "--discovery") == f"dns:{name}:{port}"
    for probe, path in (("livenessProbe", "/livez"), ("readinessProbe", "/readyz")):
        assert peer[probe]["httpGet"] == {"path": path, "port": peer["ports"][0]["name"], "scheme": "HTTPS"}
    grace = found["DaemonSet"]["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
    assert grace > int(option(peer, "--drain-timeout").rstrip("s"))


def test_manifests_mount_what_the_command_lines_name() -> None:
    made = re.search(r"kubectl create secret generic (\S+) --from-file=(\S+)=", README.read_text())
    assert made
    for kind in ("DaemonSet", "Pod"):
        for spec, container in containers(manifests()[kind]):
            mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
            volumes = {volume["name"]: volume for volume in spec["volumes"]}
            assert volumes["secret"]["secret"]["secretName"] == made[1]
            assert option(container, "--peer-token-file") == f"{mounts['secret']}/{made[2]}"
            values = {one["name"]: one.get("value") for one in container["env"]}
            assert values["MX_CACHE_DIR"] == mounts["cache"]
            assert set(mounts) == set(volumes)


def test_an_engines_manifest_agrees_with_itself_and_with_the_loaders_keys() -> None:
    from mx_cli.engines.options import options_of

    service, replicas = manifests("Engines")["Service"], manifests("Engines")["StatefulSet"]
    pod = replicas["spec"]["template"]
    labels = pod["metadata"]["labels"]
    assert service["spec"]["selector"] == labels == replicas["spec"]["selector"]["matchLabels"]
    assert service["metadata"]["name"] == replicas["spec"]["serviceName"]
    [engine], [config] = pod["spec"]["containers"], pod["spec"]["initContainers"]
    extra = option(engine, "--model-loader-extra-config").replace("$(POD_IP)", "10.0.0.7")
    options = options_of(json.loads(extra))
    ranks = next(
        int(word.partition("=")[2]) for word in engine["command"] if word.startswith("--tensor-parallel-size=")
    )
    ports = [int(options.of_rank(rank).listen.rpartition(":")[2]) for rank in range(ranks)]
    assert [one["port"] for one in service["spec"]["ports"]] == ports
    assert set(ports) < {one["containerPort"] for one in engine["ports"]}
    assert engine["resources"]["limits"]["nvidia.com/gpu"] == ranks
    for rank, port in enumerate(ports):
        mine = options.of_rank(rank)
        assert mine.advertise == f"10.0.0.7:{port}"
        assert mine.settings["discovery"] == f"dns:{service['metadata']['name']}:{port}"
    mounts = {mount["name"]: mount["mountPath"] for mount in engine["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in pod["spec"]["volumes"]}
    made = re.search(r"kubectl create secret generic (\S+) --from-file=(\S+)=", README.read_text())
    assert made
    assert volumes["secret"]["secret"]["secretName"] == made[1]
    assert options.settings["peer_token_file"] == f"{mounts['secret']}/{made[2]}"
    assert options.uri == config["command"][2]
    assert engine["command"][2] == option(config, "--link")


def test_the_keys_and_routes_of_engines_are_those_of_the_text() -> None:
    from mx_cli.engines.options import KEYS, ROUTES

    _, _, text = README.read_text().partition("\n## Engines\n")
    rows = re.findall(r"^\| ((?:`\w+`(?:, )?)+) \|", text.partition("\n## ")[0], re.MULTILINE)
    named = [name for row in rows for name in re.findall(r"`(\w+)`", row)]
    assert sorted(named) == sorted([*ROUTES, *KEYS])


def command_lines() -> list[list[str]]:
    """Every command line of mx in the README: of transcripts, of shell blocks and of manifests."""
    text = README.read_text()
    found = [block.command for block in blocks(text)]
    for block in re.findall(r"^```sh\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        found += block.splitlines()
    shown = [*manifests().values(), *manifests("Engines").values()]
    lines = [container["command"] for one in shown if one["kind"] != "Service" for _, container in containers(one)]
    for line in found:
        lines += [shlex.split(words) for words in re.findall(r"(?:^|\$\(|&& )(mx [^&|;)#]*)", line)]
    return lines


def test_every_command_line_has_options_that_there_are() -> None:
    import typer.main

    from mx_cli.cli.app import app

    lines = command_lines()
    assert len(lines) > 20
    for words in lines:
        node: Any = typer.main.get_command(app)
        rest = words[1:]
        while rest and rest[0] in getattr(node, "commands", {}):
            node, rest = node.commands[rest[0]], rest[1:]
        own = rest[: rest.index("--")] if "--" in rest else rest
        known = {name for param in node.params for name in (*param.opts, *param.secondary_opts)} | {"--help"}
        assert [word for word in own if word.startswith("-") and word.partition("=")[0] not in known] == [], words
        assert node.params, words
        node.make_context(" ".join(words), list(rest))


def test_every_option_that_the_text_names_is_one_of_mx() -> None:
    import typer.main

    from mx_cli.cli.app import app

    def names(node: Any) -> set[str]:
        own = {name for param in node.params for name in (*param.opts, *param.secondary_opts)}
        return own.union(*(names(child) for child in getattr(node, "commands", {}).values())) | {"--help"}

    prose = re.sub(r"^```.*?^```$", "", README.read_text(), flags=re.MULTILINE | re.DOTALL)
    named = {word for code in re.findall(r"`([^`]+)`", prose) for word in re.findall(r"(?<!\S)--[\w-]+", code)}
    assert len(named) > 30
    assert named - names(typer.main.get_command(app)) == set()
