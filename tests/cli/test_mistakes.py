"""Mistakes that people make, most of them with peers: the exit code, what was seen and what was wanted, and what to do next."""

from __future__ import annotations

import base64
import os
from pathlib import Path

import pytest

from tests.rig import servers
from tests.rig.serving import Hosts, Served
from tests.support import Mx, capability, make_checkpoint

NOBODY = "mx1c-" + 32 * "0"


def secret(place: Path) -> Path:
    place.write_bytes(base64.b64encode(os.urandom(32)) + b"\n")
    return place


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_checkpoint(tmp_path / "model", shards=1, size=10_000)


@pytest.fixture
def guarded(hosts: Hosts, model: Path, tmp_path: Path) -> Served:
    """A peer that wants the secret in `secret`."""
    return hosts.serve(model, "--peer-token-file", secret(tmp_path / "secret"))


@pytest.mark.parametrize(
    ("arguments", "code", "said", "hint"),
    [
        (["serve", "{model}", "--listen", "0.0.0.0:0"], 2, "there is no secret", "--peer-token-file FILE"),
        (["serve", "{model}", "--listen", "0.0.0.0"], 2, "--listen: not an address ('0.0.0.0': no port", "HOST:PORT"),
        (["serve", "{model}", "--ready-file", "no/ready"], 2, "no/ready: there is no directory /", "mkdir -p /"),
        (["serve", "{model}", "--advertise", ":7400"], 2, "--advertise: not an address (':7400': no host", "HOST:PORT"),
        (["pull", NOBODY, "--peer", "7400"], 2, "--peer: not an address ('7400': no port", "HOST:PORT"),
        (["pull", NOBODY, "--peer", "a:0"], 2, "--peer: not an address ('a:0': port 0", "HOST:PORT"),
        (["pull", NOBODY, "--peer", "https://a:1"], 2, "--peer: not an address ('https://a:1': a URL)", "HOST:PORT"),
        (["pull", NOBODY, "--peer", "a:1,b:2"], 2, "--peer: not an address ('a:1,b:2': several)", "is repeated"),
        (["doctor", "--peer", "7400"], 2, "--peer: not an address ('7400': no port", "HOST:PORT"),
        (["doctor", "--listen", "7400"], 2, "--listen: not an address ('7400': no port", "HOST:PORT"),
        (["serve", "{model}", "--peer-token-file", "absent"], 2, "absent: No such file", "make one: head -c 32"),
        (["serve", "{model}", "--device", "gpu"], 2, "--device gpu: expected file, cpu, cuda or cuda:N", ""),
        (["serve", "{model}.gone"], 10, "no such file", ""),
        (["pull", NOBODY], 18, "no peer has a record in", "mx serve MODEL"),
        (["pull", NOBODY, "--discovery", "static:127.0.0.1:1"], 18, "(127.0.0.1:1: Connection refused)", "mx peers"),
        (["pull", NOBODY, "--discovery", "dns:7400"], 2, "'dns:7400': expected dir:PATH", "HOST:PORT"),
        (["pull", NOBODY, "--peer", "192.0.2.1:7400"], 2, "192.0.2.1:7400: on another host", "--peer-token-file FILE"),
        (["pull", "mx1c-0a1b2c3d"], 2, "mx1c-0a1b2c3d: expected 32 hexadecimal digits", "mx hash MODEL"),
        (["peers", "mx1c-0a1b2c3d"], 2, "mx1c-0a1b2c3d: expected 32 hexadecimal digits", "mx hash MODEL"),
        (["pull", NOBODY, "--route", "peers"], 2, "--route peers: expected peer, cache, origin", ""),
        (["pull", NOBODY, "--require", "fast"], 2, "--require fast: expected rdma, encrypted", ""),
        (["pull", NOBODY, "--path", "tcp"], 2, "--path tcp: expected auto, nixl-read, socket", ""),
        (["prefetch", "s3:/bucket/model"], 2, "no :// after s3", "write s3://bucket/model"),
        (["prefetch", "https:/u:secret@host/model"], 2, "no :// after https", "write https://host/model"),
        (["prefetch", "{model}", "--include"], 2, "'--include' requires an argument", "mx prefetch --help"),
        (["serve", NOBODY], 2, "is an identity, and a model is wanted", f"mx pull {NOBODY}"),
        (["serve", "{model}", "--drain-timeout", "soon"], 2, "--drain-timeout: not a duration: 'soon'", "90s, 5m"),
        (["cache", "gc", "--min-age", "7days"], 2, "--min-age: not a duration: '7days'", "7d"),
        (["prefetch", "{model}", "--from", "peers"], 2, "--from peers: expected peer, origin or both", ""),
        (["prefetch", "{model}", "--from", "peer"], 2, "only the origin knows the newest revision", "--revision"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_mistake_is_named(hosts: Hosts, model: Path, arguments: list[str], code: int, said: str, hint: str) -> None:
    result = hosts(*(word.format(model=model) for word in arguments)).exits(code)
    error, _, hinted = result.err.partition("mx: error: ")[2].partition("\nhint: ")
    assert said in error
    assert hint in hinted
    assert (result.out, "Traceback" in result.err) == ("", False)


def test_a_wrong_secret_is_11_and_a_secret_that_is_missing_too(hosts: Hosts, guarded: Served, tmp_path: Path) -> None:
    wrong = ["--peer-token-file", secret(tmp_path / "wrong")]
    for given in (wrong, []):
        refused = hosts("pull", guarded.content, "--to", tmp_path / "to", *given, host="b").exits(11)
        assert f"{guarded.address} refuses the secret" in refused.err
        assert "hint: " in refused.err
    assert not (tmp_path / "to").exists()


def test_a_taken_port_names_who_has_it(hosts: Hosts, model: Path, guarded: Served) -> None:
    refused = hosts("serve", model, "--listen", guarded.address).exits(2)
    assert f"cannot listen on {guarded.address}: port" in refused.err
    assert f"is taken by process {guarded.running.pid} " in refused.err
    assert "give --listen another port" in refused.err


def test_a_directory_with_something_in_it_is_left_alone(hosts: Hosts, guarded: Served, tmp_path: Path) -> None:
    (tmp_path / "to").mkdir()
    (tmp_path / "to" / "mine").write_text("mine")
    given = ["--peer-token-file", tmp_path / "secret"]
    refused = hosts("pull", guarded.content, "--to", tmp_path / "to", *given).exits(2)
    assert f"--to {tmp_path / 'to'} is there already" in refused.err
    assert [path.name for path in (tmp_path / "to").iterdir()] == ["mine"]


def test_what_is_required_and_not_there_is_20_at_once(hosts: Hosts, guarded: Served, tmp_path: Path) -> None:
    given = ["--peer-token-file", tmp_path / "secret", "--path", "nixl-read", "--wait", "50s"]
    refused = hosts("pull", guarded.content, "--to", tmp_path / "to", *given, timeout=40).exits(20)
    assert "path nixl-read is wanted, and cannot be had (the peer serves from disk)" in refused.err
    assert "hint: without --path and --require" in refused.err


def test_what_is_no_model_is_no_matter_of_routes(mx: Mx) -> None:
    refused = mx("pull", "acme").exits(10)
    assert "route" not in refused.err
    assert refused.err.partition("mx: error: ")[2].startswith("acme: neither an existing path")


@capability("torch")
def test_a_gpu_that_is_not_there_is_found_before_anything_is_read(mx: Mx, faultd: servers.Faultd) -> None:
    refused = mx("serve", faultd.file("ok", 1000, "x"), "--device", "cuda:99").exits(20)
    assert "no such GPU (--device cuda:99: torch sees" in refused.err
    assert faultd.log() == []
