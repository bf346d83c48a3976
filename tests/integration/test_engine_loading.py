"""The order in which an engine's rank gets its weights, and what it offers then: with a small module for an engine."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from mx_cli.base.errors import Incompatible, MxError, NoPeer, UsageError
from mx_cli.engines.loading import Loading, Rank, Started, Tensors
from mx_cli.engines.offering import Offering
from mx_cli.engines.options import options_of
from mx_cli.flows.from_python import process_context
from tests.rig.checkpoints import make_safetensors, noise
from tests.rig.serving import eventually, slow
from tests.support import capability

pytestmark = capability("torch")

SHAPE = (1024, 1024)
NAMES = ("first", "second")
LAYOUT = {"engine": "small", "engine_version": "1", "tp": 2, "dtype": "uint8"}
UNFILLED = 255


def write_checkpoint(directory: Path, seed: str) -> Path:
    directory.mkdir()
    make_safetensors(
        directory / "model.safetensors",
        {f"{name}.weight": ("U8", SHAPE, noise(seed + name, 1 << 20)) for name in NAMES},
    )
    (directory / "config.json").write_text("{}")
    return directory


class Small:
    """An engine with two layers. `after`: its post-processing."""

    def __init__(self, after: Callable[[Any], None] = lambda module: None) -> None:
        self.built = 0
        self._after = after
        self.own: dict[str, Any] = {}

    def agree(self, find: Callable[[], Any]) -> Any:
        return find()

    def build(self, fill: Callable[[Any], None]) -> Any:
        import torch

        self.built += 1
        module = torch.nn.Module()
        for name in NAMES:
            layer = torch.nn.Module()
            empty = torch.full(SHAPE, UNFILLED, dtype=torch.uint8)
            layer.register_parameter("weight", torch.nn.Parameter(empty, requires_grad=False))
            module.add_module(name, layer)
        fill(module)
        self._after(module)
        return module

    def load(self, module: Any, tensors: Tensors | None) -> None:
        targets = dict(module.named_parameters())
        for name, tensor in tensors or iter(self.own.items()):
            targets.pop(name).data.copy_(tensor)
        if targets:
            raise ValueError(f"not in the checkpoint: {sorted(targets)}")

    def fill_anyhow(self, module: Any) -> None:
        for parameter in module.parameters():
            parameter.data.fill_(1)


class Start:
    """One rank's start: `run` gives the module; `said` is its log."""

    def __init__(self, place: Path, cache: str, extra: dict[str, Any], rank: int = 0, refusal: str = "") -> None:
        self.said: list[str] = []
        settings = {"cache_dir": str(place / cache), "discovery": f"dir:{place / 'peers'}", "offline": False}
        options = options_of({**settings, **extra})
        context = process_context(options.settings)
        self.engine = Small()
        self.offering = Offering(options, context, f"rank {rank} of 2", self.said.append)
        started = Started(str(place / "own"), None, {**LAYOUT, "rank": rank}, refusal)
        self._parts = (options, context, Rank(rank, 2, rank == 0), started, self.offering, self.said.append)

    def run(self) -> Any:
        return Loading(self.engine, *self._parts).run()


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Start]]:
    runtime = tmp_path / "run"
    runtime.mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
    monkeypatch.delenv("MX_CACHE_DIR", raising=False)
    write_checkpoint(tmp_path / "wanted", "wanted")
    write_checkpoint(tmp_path / "own", "own")
    starts: list[Start] = []

    def make(cache: str = "cache", *, rank: int = 0, refusal: str = "", **extra: Any) -> Start:
        starts.append(Start(tmp_path, cache, {"uri": str(tmp_path / "wanted"), **extra}, rank, refusal))
        return starts[-1]

    yield make
    for one in starts:
        one.offering.close()


def fill_cache(place: Path, cache: str = "cache") -> None:
    from mx_cli.flows.prefetch import prefetch
    from mx_cli.flows.request import Request

    prefetch(Request(str(place / "wanted")), process_context({"cache_dir": str(place / cache)}))


def is_filled(module: Any, seed: str = "wanted") -> bool:
    return all(
        bytes(getattr(module, name).weight.data.numpy().reshape(-1)) == noise(seed + name, 1 << 20) for name in NAMES
    )


def served(one: Start) -> str:
    """Where this start offers its weights."""
    one.run()
    one.offering.offer()
    assert one.offering.address, one.said
    return one.offering.address


def routes(said: list[str]) -> list[str]:
    """`peer not taken`, … of the lines about routes."""
    return [line.split("route ")[1].split(":")[0] for line in said if "route " in line]


# --- the order -------------------------------------------------------------------------------------------------------


def test_without_a_peer_the_cache_is_taken(start: Callable[..., Start], tmp_path: Path) -> None:
    fill_cache(tmp_path)
    one = start()
    assert is_filled(one.run())
    assert routes(one.said) == ["peer not taken", "cache taken"]
    assert one.said[0].startswith("rank 0 of 2: route peer not taken: no peer holds mx1o-")
    assert one.engine.built == 1


def test_without_a_snapshot_the_origin_is_streamed(start: Callable[..., Start]) -> None:
    one = start()
    assert is_filled(one.run())
    assert routes(one.said) == ["peer not taken", "cache not taken", "stream taken"]
    assert one.engine.built == 1


@pytest.mark.parametrize("stage", ["loaded", "processed"])
def test_weights_that_may_be_others_are_offered_as_nobodys(start: Callable[..., Start], stage: str) -> None:
    """The URI is known, and what the engine's own loader found is something else."""
    import torch

    one = start(serve=True, stage=stage, routes=["engine"])
    one.engine.own = {f"{name}.weight": torch.full(SHAPE, 3, dtype=torch.uint8) for name in NAMES}
    one.run()
    one.offering.offer()
    assert one.offering.address == ""


@pytest.mark.parametrize("stage", ["loaded", "processed", "checkpoint"])
def test_the_engines_own_loader_comes_last_and_its_weights_are_not_offered_as_others(
    start: Callable[..., Start], stage: str
) -> None:
    import torch

    one = start(uri="file:///nowhere/model", serve=True, stage=stage)
    one.engine.own = {f"{name}.weight": torch.full(SHAPE, 3, dtype=torch.uint8) for name in NAMES}
    assert int(one.run().first.weight.data.min()) == 3
    assert routes(one.said) == ["peer not taken", "cache not taken", "stream not taken", "engine taken"]
    assert one.said[-1].endswith("whether those are the weights of file:///nowhere/model is not known")
    one.offering.offer()
    assert one.offering.address == ""


def test_only_the_routes_that_were_asked_for_are_tried(start: Callable[..., Start]) -> None:
    one = start(routes=["peer", "cache"])
    with pytest.raises(MxError) as failed:
        one.run()
    assert "peer: no peer holds" in failed.value.what
    assert routes(one.said) == ["peer not taken", "cache not taken"]


def test_a_checkpoint_that_lacks_a_tensor_is_the_engines_own_error(start: Callable[..., Start], tmp_path: Path) -> None:
    (tmp_path / "wanted" / "model.safetensors").unlink()
    make_safetensors(tmp_path / "wanted" / "model.safetensors", {"first.weight": ("U8", SHAPE, None)})
    with pytest.raises(ValueError, match=r"second\.weight"):
        start().run()


def test_what_the_engine_was_started_with_is_wanted_without_a_uri(start: Callable[..., Start]) -> None:
    one = start(uri="")
    assert is_filled(one.run(), "own")


# --- peers -----------------------------------------------------------------------------------------------------------


def pack(module: Any) -> None:
    """As a library for a CPU does it: the weights are elsewhere afterwards."""
    import torch

    for name in NAMES:
        getattr(module, name).weight.data = torch.empty(0, dtype=torch.uint8)


def test_a_rank_gets_its_tensors_from_the_same_rank_of_another_engine(
    start: Callable[..., Start], tmp_path: Path
) -> None:
    fill_cache(tmp_path, "a")
    first = start("a", serve=True)
    first.engine._after = pack
    module = first.run()
    first.offering.offer()
    address = first.offering.address
    assert module.first.weight.numel() == 0
    assert first.said[-1].endswith(f"serves stage loaded at {address}; 2.0 MiB of them are kept for readers only")
    second = start("b", peers=[address])
    assert is_filled(second.run())
    assert routes(second.said) == ["peer taken"]
    assert f"2 tensors, 2.0 MiB in 0.0 s, {address} by " in second.said[0]


@pytest.mark.parametrize("other", [{"rank": 1}, {"stage": "processed"}, {"revision": "other"}])
def test_other_ranks_stages_and_revisions_do_not_match(start: Callable[..., Start], other: dict[str, Any]) -> None:
    address = served(start("a", serve=True))
    second = start("b", peers=[address], routes=["peer"], **other)
    with pytest.raises(Incompatible) as failed:
        second.run()
    assert f"{address}: other weights" in failed.value.what


def test_an_engine_that_moves_weights_around_neither_asks_nor_answers(start: Callable[..., Start]) -> None:
    one = start(serve=True, refusal="experts move")
    one.run()
    one.offering.offer()
    assert one.offering.address == ""
    assert one.said[0] == "rank 0 of 2: route peer not taken: experts move"
    assert one.said[-1] == "rank 0 of 2: not served: experts move"


def test_a_peer_that_is_lost_half_way_leaves_no_module_behind(start: Callable[..., Start], tmp_path: Path) -> None:
    fill_cache(tmp_path, "a")
    first = start("a", serve=True)
    address = served(first)
    with slow(address, 256 << 10) as relay:
        second = start("a", peers=[relay.address], path="socket")
        modules: list[Any] = []
        run = threading.Thread(target=lambda: modules.append(second.run()))
        run.start()
        relay.wait_full()
        first.offering.close()
        relay.close()
        run.join(60)
    assert is_filled(modules[0])
    assert second.engine.built == 2, second.said
    assert routes(second.said) == ["peer not taken", "cache taken"]
    assert second.said[0].endswith("; the module is built anew")


def test_empty_tensors_are_neither_received_nor_offered(start: Callable[..., Start], tmp_path: Path) -> None:
    """What is post-processed before it is exchanged may have its weights elsewhere."""
    address = served(start("a", serve=True, stage="processed"))
    second = start("b", serve=True, stage="processed", peers=[address])
    second.engine._after = pack
    second.run()
    assert "2 of 2 tensors are empty here (first.weight, second.weight)" in second.said[0]
    assert routes(second.said) == ["peer not taken", "cache not taken", "stream taken"]
    assert "not served: 2 of 2 tensors are empty here" in second.said[-1]


# --- after post-processing -------------------------------------------------------------------------------------------


def turn(module: Any) -> None:
    for name in NAMES:
        weight = getattr(module, name).weight
        weight.data = weight.data.t().contiguous()


def test_post_processed_tensors_are_received_as_they_are(start: Callable[..., Start]) -> None:
    import torch

    first, second = start("a", serve=True, stage="processed"), start("b", stage="processed")
    first.engine._after = second.engine._after = turn
    module = first.run()
    first.offering.offer()
    second._parts = start("b", stage="processed", peers=[first.offering.address])._parts
    copy = second.run()
    assert torch.equal(copy.first.weight.data, module.first.weight.data)
    assert is_filled(start("c").run())
    assert torch.equal(module.first.weight.data.t().contiguous(), start("c").run().first.weight.data)


def test_tensors_outside_of_parameters_and_buffers_are_refused(start: Callable[..., Start]) -> None:
    import torch

    def hide(module: Any) -> None:
        module.first.absorbed = torch.ones(4)

    first = start("a", serve=True, stage="processed")
    first.engine._after = hide
    first.run()
    assert "not served: 1 tensors are neither parameters nor buffers (first.absorbed)" in first.said[-1]
    address = served(start("b", serve=True, stage="processed"))
    second = start("c", stage="processed", peers=[address])
    second.engine._after = hide
    second.run()
    assert "first.absorbed" in second.said[0]
    assert routes(second.said)[-1] == "stream taken"


def test_nothing_is_built_for_a_peer_that_is_not_there(start: Callable[..., Start]) -> None:
    one = start(stage="processed")
    assert is_filled(one.run())
    assert one.engine.built == 1


# --- what is offered -------------------------------------------------------------------------------------------------


def test_what_has_changed_since_it_was_loaded_is_not_offered(start: Callable[..., Start], tmp_path: Path) -> None:
    one = start(serve=True)
    module = one.run()
    module.first.weight.data[0, 0] += 1
    one.offering.offer()
    assert one.offering.address == ""
    assert one.said[-1] == "rank 0 of 2: not served: the weights have changed since they were loaded"
    assert not list((tmp_path / "peers").glob("*.json"))


def test_withdrawn_weights_come_back_and_dropped_ones_do_not(start: Callable[..., Start], tmp_path: Path) -> None:
    one = start(serve=True)
    served(one)
    assert len(list((tmp_path / "peers").glob("*.json"))) == 1
    one.offering.withdraw("the engine sleeps")
    assert not list((tmp_path / "peers").glob("*.json"))
    with pytest.raises(NoPeer):
        start("b", routes=["peer"]).run()
    one.offering.offer()
    assert one.offering.address
    one.offering.drop("other weights")
    one.offering.offer()
    assert one.offering.address == ""


def test_a_withdrawal_before_the_offer_has_begun_wins(start: Callable[..., Start]) -> None:
    """The engine's memory may be gone when the thread that offers it comes to run."""
    one = start(serve=True)
    one.run()
    with one.offering._lock:
        one.offering.begin()
        one.offering.withdraw("the engine sleeps")
    for thread in threading.enumerate():
        if thread.name == "mx-offer":
            thread.join(30)
    assert one.offering.address == ""
    one.offering.begin()
    eventually(lambda: one.offering.address)


def test_who_cannot_have_its_name_leaves_nothing_open(start: Callable[..., Start]) -> None:
    one, two = start(serve=True, name="web"), start("b", serve=True, name="web")
    served(one)
    two.run()
    two.offering.offer()
    assert two.offering.address == ""
    assert "not served: " in two.said[-1]
    assert [thread.name for thread in threading.enumerate()].count("mx-lobby") == 1


def test_an_address_for_others_without_a_secret_is_found_out_at_once(start: Callable[..., Start]) -> None:
    with pytest.raises(UsageError, match="there is no secret"):
        start(serve=True, listen="0.0.0.0:0")
    start(listen="0.0.0.0:0")


def test_nothing_is_held_for_nobody(start: Callable[..., Start]) -> None:
    one = start()
    one.run()
    one.offering.begin()
    assert one.offering.address == ""
    assert not one.offering._tensors


# --- files -----------------------------------------------------------------------------------------------------------


def test_at_the_stage_checkpoint_engines_exchange_files(start: Callable[..., Start], tmp_path: Path) -> None:
    fill_cache(tmp_path, "a")
    first = start("a", serve=True, stage="checkpoint")
    address = served(first)
    assert f"serves the files of {tmp_path / 'a'}" in first.said[-1]
    second = start("b", serve=True, stage="checkpoint", peers=[address], rank=0)
    assert is_filled(second.run())
    assert routes(second.said) == ["peer taken"]
    assert f"{address} by " in second.said[0]
    first.offering.withdraw("the engine sleeps")
    assert first.offering.address == address
    one_more = start("b", stage="checkpoint", rank=1, routes=["cache"], serve=True)
    one_more.run()
    one_more.offering.offer()
    assert one_more.offering.address == ""


def test_what_is_wrong_with_the_options_is_said_in_every_rank(start: Callable[..., Start]) -> None:
    """One rank finds it, and the others wait for what it found."""
    one = start(uri="s3://")
    found: list[Any] = []
    one.engine.agree = lambda find: found.append(find()) or found[0]  # type: ignore[method-assign, func-returns-value]
    with pytest.raises(UsageError):
        one.run()
    assert isinstance(found[0], UsageError)
    assert one.engine.built == 0
