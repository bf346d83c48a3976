"""A running vLLM is a peer, and a new one is fed by it: two ranks, real processes, and the tokens that they say.

Engines take half a minute and more to start, so the tests share them: each goes on where the one before it ended.
"""

from __future__ import annotations

import json
import socket
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.rig.engines import BIN, PYTHON, START, Engine, Engines, engine_options
from tests.rig.servers import free_port, free_ports
from tests.rig.serving import eventually, slow

pytestmark = pytest.mark.timeout(600)

MX = str(BIN / "mx")
RANKS = 2
MOST_STARTS = 4


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    found = Engines(tmp_path_factory.mktemp("engines"))
    yield found
    found.close()
    assert found.started <= MOST_STARTS


@pytest.fixture(scope="module")
def other(engines: Engines) -> Path:
    """A checkpoint that nobody is to serve the tokens of."""
    return engines.make("other", 1)


@pytest.fixture(scope="module")
def wanted(engines: Engines) -> str:
    return f"file://{engines.make('wanted', 7)}"


@pytest.fixture(scope="module")
def first(engines: Engines, wanted: str) -> Engine:
    """`mx prefetch` becomes the engine; nobody serves yet."""
    options = engine_options({"serve": True}, tensor_parallel_size=RANKS)
    return engines.engine([MX, "prefetch", wanted, "--", *PYTHON, "run", "{}", options], "a")


@pytest.fixture(scope="module")
def tokens(first: Engine) -> Any:
    return first.tokens()


def records(engines: Engines) -> list[dict[str, Any]]:
    return json.loads(engines.run([MX, "peers", "--json"], "b").out)["peers"]


def fed(engines: Engines, model: Path, wanted: str, cache: str, **more: Any) -> Engine:
    """An engine that is pointed at one directory, and wants the weights of a URI."""
    options = engine_options({"uri": wanted, **more}, tensor_parallel_size=RANKS)
    return engines.engine([*PYTHON, "run", str(model), options], cache)


def test_the_first_engine_loads_from_the_cache_and_serves(first: Engine, tokens: Any) -> None:
    assert len(tokens) == 2
    for rank in range(RANKS):
        first.wait_log(f"rank {rank} of {RANKS}: serves stage loaded at ")
        said = [line for line in first.log() if line.startswith(f"rank {rank} ")]
        assert "route peer not taken: no peer holds mx1o-" in said[0]
        assert "route cache taken: " in said[1]
        assert len(said) == 3


def test_an_engine_with_another_checkpoint_on_disk_pulls_from_it(
    engines: Engines, other: Path, wanted: str, tokens: Any
) -> None:
    engine = fed(engines, other, wanted, "b", serve=True)
    assert engine.tokens() == tokens
    for rank in range(RANKS):
        engine.wait_log(f"rank {rank} of {RANKS}: serves stage loaded at ")
        said = [line for line in engine.log() if line.startswith(f"rank {rank} ")]
        assert "route peer taken: " in said[0]
        assert len(said) == 2
    # It is a peer, too, until it loads what is on its disk.
    assert len(records(engines)) == 2 * RANKS
    engine.tell("reload")
    for rank in range(RANKS):
        engine.wait_log(f"rank {rank} of {RANKS}: no longer served: the engine gets other weights")
    assert len(records(engines)) == RANKS
    engine.kill()


def test_a_sleeping_engine_is_no_peer(engines: Engines, first: Engine) -> None:
    awake = {one["generation"] for one in records(engines)}
    assert len(awake) == RANKS
    first.tell("sleep")
    assert records(engines) == []
    first.tell("wake")
    eventually(lambda: len(records(engines)) == RANKS, 60)
    assert not awake & {one["generation"] for one in records(engines)}


def test_an_engine_that_dies_while_it_is_read_is_left_for_the_cache(
    engines: Engines, wanted: str, first: Engine, tokens: Any
) -> None:
    """Relays stand in for the peer's address: it ends when a part of each rank's bytes is through.

    Of its model this engine has only the small files.
    """
    small = engines.run([MX, "prefetch", wanted, "--include", "*.json"], "small").out.strip()
    assert not list(Path(small).glob("*.safetensors"))
    by_rank = {one["rank"]: one["address"] for one in records(engines)}
    port = free_ports(RANKS)
    with slow(by_rank["0"], 256 << 10, port) as one, slow(by_rank["1"], 256 << 10, port + 1) as two:
        # Rank 1 has the next port.
        engine = fed(engines, Path(small), wanted, "a", peers=[one.address], path="socket")
        one.wait_full(START)
        two.wait_full(START)
        first.kill()
        one.close()
        two.close()
        assert engine.tokens() == tokens
    for rank in range(RANKS):
        said = [line for line in engine.log() if line.startswith(f"rank {rank} ")]
        assert "route peer not taken: " in said[0]
        assert said[0].endswith("; the module is built anew")
        assert "route cache taken: " in said[1]
        assert len(said) == 2
    engine.kill()


def answers(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def test_a_stock_engine_is_started_by_mx_pull(engines: Engines, wanted: str, tokens: Any) -> None:
    """vLLM's server as it is, with files that a peer gave. (The command `vllm` of the wheel for a CPU does not start.)"""
    peer = engines.start([MX, "serve", wanted], "a")
    address = json.loads(peer.wait_out(r"^\{.*\}$", 60).group())["address"]
    port = str(free_port())
    plain = ["--enforce-eager", "--dtype", "bfloat16", "--max-model-len", "128", "--max-num-seqs", "4"]
    server = [str(BIN / "python"), "-P", "-m", "vllm.entrypoints.openai.api_server", "--model", "{}"]
    serve = [*server, *plain, "--tensor-parallel-size", str(RANKS), "--host", "127.0.0.1", "--port", port]
    engines.started += 1
    running = engines.start([MX, "pull", wanted, "--peer", address, "--", *serve, "--served-model-name", "m"], "d")
    running.wait_err(r"route peer taken", 60)
    running.wait_err(r"Application startup complete", START)
    eventually(lambda: answers(int(port)))
    ask = {"model": "m", "prompt": ["hello", "weights"], "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions",
        json.dumps({**ask, "return_token_ids": True}).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        choices = json.load(answer)["choices"]
    assert [one["token_ids"] for one in sorted(choices, key=lambda one: one["index"])] == tokens
