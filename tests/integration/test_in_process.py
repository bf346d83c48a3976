"""`mx_cli.serve`, `mx_cli.pull` and `mx_cli.pull_into`: tensors from one real process into another."""

from __future__ import annotations

import contextlib
import errno
import json
import mmap
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

import mx_cli
from mx_cli.base.errors import (
    Incompatible,
    IntegrityError,
    MissingCapability,
    MxError,
    NoPeer,
    TransportFailed,
    UsageError,
)
from mx_cli.flows.data_path import Wish
from mx_cli.flows.from_python import process_context
from mx_cli.flows.peering import Peering
from mx_cli.transport.nixl import Agent
from tests.rig import cachecheck, capabilities, limits, servers
from tests.rig.serving import eventually, slow
from tests.rig.tensor_source import MIB, TensorSource, module, recipe, tensor_source, torture
from tests.support import Mx, capability, checkpoint_files, safetensors_bytes

if not capabilities.have("torch"):
    pytest.skip("missing: torch", allow_module_level=True)
if not capabilities.have("safetensors"):
    pytest.skip("missing: safetensors", allow_module_level=True)

import safetensors.torch
import torch

DTYPES = {torch.float32: "F32", torch.int64: "I64"}
SHARED = ("module", "torture", "empty", "bf16", "shapes", "named:20000", "overlap", "noise:9")


@pytest.fixture(params=["socket", pytest.param("nixl-read", marks=capability("nixl"))])
def path(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where the secret of the user, discovery and the cache of this file's processes are."""
    found = tmp_path_factory.mktemp("tensors")
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("MX_")]:
            patch.delenv(name)
        patch.setenv("HOME", str(found))
        patch.setenv("XDG_RUNTIME_DIR", str(found / "run"))
        yield found


@pytest.fixture(scope="module")
def source(place: Path) -> Iterator[TensorSource]:
    """One process that serves SHARED, which no test changes."""
    with tensor_source(place, *SHARED) as found:
        yield found


@pytest.fixture(scope="module")
def changing(place: Path) -> Iterator[TensorSource]:
    """One process whose tensors tests change, and change back."""
    with tensor_source(place, "overlap", "noise:9", "filled:1", "filled:64") as found:
        yield found


@pytest.fixture(scope="module")
def large(place: Path) -> Iterator[TensorSource]:
    with tensor_source(place, "filled:512") as found:
        yield found


def settings(place: Path) -> dict[str, Any]:
    return {"cache_dir": str(place / "cache"), "discovery": f"dir:{place / 'peers'}"}


class Reader:
    """Pulls what one recipe serves, by one path."""

    def __init__(self, source: TensorSource, recipe: str, place: Path, path: str = "auto") -> None:
        peer = source.peers[recipe]
        self.model = peer["identities"]["content"]
        self.options = {"peers": [peer["address"]], "path": path, **settings(place)}

    def pull(self, **options: Any) -> dict[str, Any]:
        return mx_cli.pull(self.model, **{**self.options, **options})

    def into(self, target: Any, **options: Any) -> mx_cli.Received:
        return mx_cli.pull_into(target, self.model, **{**self.options, **options})


def flat(source: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """The tensors of nested mappings and modules, by their joined names."""
    found: dict[str, Any] = {}
    for name, value in source.items():
        if isinstance(value, torch.nn.Module):
            value = value.state_dict()
        if isinstance(value, Mapping):
            found |= flat(value, f"{prefix}{name}.")
        else:
            found[prefix + name] = value.detach()
    return found


def raw(tensor: Any) -> bytes:
    """The elements in their order, as bytes."""
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return plain.view(torch.uint8).numpy().tobytes() if plain.numel() else b""


def assert_same(found: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape), name
        assert raw(found[name]) == raw(tensor), name


def zeroed(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """New tensors of the same kinds, each with memory of its own, with the same strides where they can be had."""
    found = {name: torch.empty_like(tensor, memory_format=torch.preserve_format) for name, tensor in tensors.items()}
    for tensor in found.values():
        if tensor.numel():
            tensor.untyped_storage().fill_(0)
    return found


# --- V-06: shared memory ---------------------------------------------------------------------------------------------


def test_v06_tied_weights_are_sent_once_and_stay_tied(source: TensorSource, place: Path, path: str) -> None:
    reader, expected = Reader(source, "module", place, path), module()
    assert source.peers["module"]["counts"] == {"parameter": 4, "buffer": 1, "tied": 1}
    target = module(0)
    received = reader.into(target)
    assert_same(target.state_dict(), expected.state_dict())
    assert target.head.weight is target.embed.weight
    assert received.bytes == sum(t.nbytes for n, t in expected.state_dict().items() if n != "head.weight")
    pulled = reader.pull()
    assert_same(pulled, expected.state_dict())
    assert pulled["head.weight"].data_ptr() == pulled["embed.weight"].data_ptr()


def test_v06_tied_at_the_source_only(source: TensorSource, place: Path, path: str) -> None:
    target = module(0)
    target.head.weight = torch.nn.Parameter(torch.zeros(100, 16))
    Reader(source, "module", place, path).into(target)
    assert_same(target.state_dict(), module().state_dict())


def test_v06_tied_at_the_target_only(place: Path, tmp_path: Path, path: str) -> None:
    expected = {"one": torch.arange(1000.0), "other": torch.arange(1000.0)}
    with mx_cli.serve(expected, **settings(place)) as handle:
        options = {"peers": [handle.address], "path": path, **settings(place)}
        memory = torch.zeros(1000)
        mx_cli.pull_into({"one": memory, "other": memory}, handle.identities["content"], **options)
        assert torch.equal(memory, expected["one"])
    expected["other"] = expected["other"] + 1
    with mx_cli.serve(expected, **settings(place)) as handle:
        options = {"peers": [handle.address], "path": path, **settings(place)}
        memory = torch.full((1000,), 5.0)
        for target in (
            {"one": memory, "other": memory},
            {"one": memory, "other": memory.view(1, 1000)[0]},
        ):
            with pytest.raises(Incompatible, match="one and other share memory here"):
                mx_cli.pull_into(target, handle.identities["content"], **options)
        overlapping = torch.full((1001,), 5.0)
        with pytest.raises(Incompatible, match="one and other share memory here"):
            mx_cli.pull_into(
                {"one": overlapping[:1000], "other": overlapping[1:]}, handle.identities["content"], **options
            )
        assert torch.equal(memory, torch.full((1000,), 5.0))
        assert torch.equal(overlapping, torch.full((1001,), 5.0))
        scattered = torch.zeros(1000, 2)
        with pytest.raises(Incompatible, match="share memory here"):
            mx_cli.pull_into(
                {"one": scattered[:, 0], "other": scattered.t()[0][:]}, handle.identities["content"], **options
            )


def test_v06_scattered_tensors_that_overlap_are_compared(place: Path) -> None:
    square = torch.arange(16.0).reshape(4, 4)
    options = settings(place)
    with mx_cli.serve({"w": square, "wt": square.t()}, **options) as handle:
        memory = torch.zeros(4, 4)
        wish = {"peers": [handle.address], **options}
        mx_cli.pull_into({"w": memory, "wt": memory.t()}, handle.identities["content"], **wish)
        assert torch.equal(memory, square)
    with mx_cli.serve({"w": square, "wt": square.t() + 1}, **options) as handle:
        wish = {"peers": [handle.address], **options}
        with pytest.raises(Incompatible, match="share memory here"):
            mx_cli.pull_into({"w": memory, "wt": memory.t()}, handle.identities["content"], **wish)


def test_v06_two_views_that_overlap(source: TensorSource, place: Path, path: str) -> None:
    reader, expected = Reader(source, "overlap", place, path), recipe("overlap")
    pulled = reader.pull()
    assert_same(pulled, expected)
    assert pulled["b"].data_ptr() - pulled["a"].data_ptr() == 4 * MIB
    memory = torch.zeros(3 * MIB, dtype=torch.int32)
    target = {"a": memory[: 2 * MIB], "b": memory[MIB:]}
    assert reader.into(target).bytes == 12 * MIB
    assert_same(target, expected)
    apart = zeroed(expected)
    reader.into(apart)
    assert_same(apart, expected)


def test_v06_a_view_alone_is_verified_too(changing: TensorSource, place: Path, path: str) -> None:
    """Part of a block has no digest of its own: the whole block is fetched for it."""
    reader, expected = Reader(changing, "overlap", place, path), {"b": recipe("overlap")["b"]}
    target = zeroed(expected)
    assert_same(reader.pull(names=["b"]), expected)
    reader.into(target, allow_extra=True)
    assert_same(target, expected)
    changing.tell("flip", "overlap", name="b", at=5)
    for pull in (lambda: reader.pull(names=["b"]), lambda: reader.into(target, allow_extra=True)):
        with pytest.raises(IntegrityError):
            pull()
    changing.tell("flip", "overlap", name="b", at=5)
    assert_same(reader.pull(), recipe("overlap"))


# --- V-07: kinds -----------------------------------------------------------------------------------------------------


def test_v07_buffers_that_a_state_dict_leaves_out_are_untouched(source: TensorSource, place: Path, path: str) -> None:
    target = module(0)
    received = Reader(source, "module", place, path).into(target)
    assert (received.tensors, received.parameters, received.buffers) == (5, 4, 1)
    assert torch.equal(target.scratch, torch.full((3,), 7.0))
    assert torch.equal(target.steps, module().steps)


def test_v07_all_buffers_when_asked(place: Path, path: str) -> None:
    with mx_cli.serve(module(), all_buffers=True, **settings(place)) as handle:
        assert handle.counts == {"parameter": 4, "buffer": 2, "tied": 1}
        target, options = module(0), {"peers": [handle.address], "path": path, **settings(place)}
        received = mx_cli.pull_into(target, handle.identities["content"], all_buffers=True, **options)
        assert (received.parameters, received.buffers) == (4, 2)
        assert torch.equal(target.scratch, torch.ones(3))
        with pytest.raises(Incompatible, match="1 more \\(scratch\\)"):
            mx_cli.pull_into(module(0), handle.identities["content"], **options)


# --- L-03, L-04, L-05: what does not fit is refused before a byte moves ----------------------------------------------


def refused(reader: Reader, target: dict[str, Any], **options: Any) -> str:
    """Why the target is refused; nothing in it may have changed."""
    before = {name: raw(tensor) for name, tensor in target.items()}
    with pytest.raises(Incompatible) as caught:
        reader.into(target, **options)
    assert {name: raw(tensor) for name, tensor in target.items()} == before
    assert caught.value.exit_code == 17
    return caught.value.what


@pytest.mark.parametrize(("name", "dtype"), [("w", torch.float16), ("f", torch.int32)])
def test_l03_another_dtype_of_the_same_size(source: TensorSource, place: Path, name: str, dtype: torch.dtype) -> None:
    target = zeroed(recipe("bf16"))
    target[name] = torch.full_like(target[name], 7, dtype=dtype)
    said = refused(Reader(source, "bf16", place), target)
    offered = {"w": "BF16[4, 8]", "f": "F32[4]"}[name]
    wanted = {"w": "F16[4, 8]", "f": "I32[4]"}[name]
    assert f"{name}: {wanted} here, {offered} there" in said


def test_l04_another_shape_of_the_same_size(source: TensorSource, place: Path) -> None:
    target = {"m": torch.ones(16, 64), "flat": torch.ones(128), "same": torch.ones(3)}
    said = refused(Reader(source, "shapes", place), target)
    assert "2 differ" in said
    assert "m: F32[16, 64] here, F32[64, 16] there" in said
    assert "flat: F32[128] here, F32[8, 16] there" in said
    assert "same" not in said


def test_l05_names_that_do_not_agree(source: TensorSource, place: Path, path: str) -> None:
    reader, expected = Reader(source, "shapes", place, path), source_shapes(source, place)
    more = {**zeroed(expected), "extra.bias": torch.full((2,), 9.0)}
    assert "the source lacks 1 (extra.bias)" in refused(reader, more)
    reader.into(more, allow_missing=True)
    assert_same(more, {**expected, "extra.bias": torch.full((2,), 9.0)})
    less = {name: tensor for name, tensor in zeroed(expected).items() if name != "flat"}
    assert "the source has 1 more (flat)" in refused(reader, less)
    assert reader.into(less, allow_extra=True).tensors == 2
    assert raw(less["m"]) == raw(expected["m"])
    prefixed = {f"module.{name}": tensor for name, tensor in zeroed(expected).items()}
    said = refused(reader, prefixed)
    assert "the source lacks 3 (module.flat, module.m, module.same)" in said
    assert "the source has 3 more (flat, m, same)" in said


def source_shapes(source: TensorSource, place: Path) -> dict[str, Any]:
    return Reader(source, "shapes", place).pull()


def test_l05_names_are_listed_up_to_a_number(source: TensorSource, place: Path) -> None:
    said = refused(Reader(source, "named:20000", place), {"other": torch.ones(1)})
    assert "the source has 20000 more (layer.0, layer.1, layer.10, layer.100, layer.1000, and 19995 more)" in said
    assert len(said) < 500


# --- L-06: the right bytes, whatever the tensors are ----------------------------------------------------------------


def test_l06_every_dtype_view_and_name(source: TensorSource, place: Path, path: str) -> None:
    reader, expected = Reader(source, "torture", place, path), flat(torture())
    pulled = reader.pull()
    assert_same(pulled, expected)
    assert pulled["views.b"].data_ptr() - pulled["views.a"].data_ptr() == 400
    assert pulled["views.as int16"].data_ptr() - pulled["views.own"].data_ptr() == 4
    for name in ("views.middle", "views.as int16", "scalar", "none.int8", "odd columns", ""):
        assert_same(reader.pull(names=[name]), {name: expected[name]})
    assert reader.pull(names=[]) == {}
    with pytest.raises(UsageError, match="no such tensors: nobody"):
        reader.pull(names=["scalar", "nobody"])


def test_l06_into_views_and_strides(source: TensorSource, place: Path, path: str) -> None:
    reader, expected = Reader(source, "torture", place, path), flat(torture())
    same = flat(torture())
    same["expanded"] = torch.zeros(10)
    for tensor in same.values():
        if tensor.numel():
            tensor.untyped_storage().fill_(0)
    reader.into(same)
    assert_same(same, expected)
    apart = zeroed(expected)
    reader.into(apart)
    assert_same(apart, expected)


def test_l06_nothing_but_empty_tensors(source: TensorSource, place: Path, path: str) -> None:
    reader, expected = Reader(source, "empty", place, path), recipe("empty")
    assert_same(reader.pull(), expected)
    assert reader.into(zeroed(expected)).bytes == 0


def test_l06_a_byte_that_changed_at_the_source(changing: TensorSource, place: Path, path: str) -> None:
    reader = Reader(changing, "noise:9", place, path)
    changing.tell("flip", "noise:9", name="w", at=4 * MIB + 7)
    with pytest.raises(IntegrityError, match=r"tensor w, block 1") as caught:
        reader.pull(routes=["peer"])
    assert caught.value.exit_code == 16
    changing.tell("flip", "noise:9", name="w", at=4 * MIB + 7)
    assert_same(reader.pull(), recipe("noise:9"))


def test_many_small_tensors(source: TensorSource, place: Path, path: str) -> None:
    reader, expected = Reader(source, "named:20000", place, path), recipe("named:20000")
    if path == "socket":
        found = reader.pull()
    else:
        found = zeroed(expected)
        assert reader.into(found).tensors == 20_000
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


# --- what cannot be served or filled ---------------------------------------------------------------------------------


def freed() -> Any:
    tensor = torch.ones(3)
    tensor.untyped_storage().resize_(0)
    return tensor


class Wrapper(torch.Tensor):
    """As DTensor and quantised tensors are: made of others."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner: torch.Tensor) -> None:
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, call: Any, types: Any, args: Any = (), options: Any = None) -> Any:
        if call is torch.ops.aten.detach.default:
            return Wrapper(args[0].inner)
        raise NotImplementedError(call)


def within_itself() -> dict[str, Any]:
    found: dict[str, Any] = {"w": torch.ones(2), "deep": {}}
    found["deep"]["me"] = found
    return found


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "meta": (lambda: {"layer.w": torch.empty(3, device="meta")}, "'layer.w' is on the device meta"),
    "sparse": (lambda: {"layer.w": torch.eye(3).to_sparse()}, "'layer.w' is torch.sparse_coo"),
    "nested": (lambda: {"layer.w": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])}, "'layer.w' is nested"),
    "quantised": (
        lambda: {"layer.w": torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)},
        "'layer.w' is quantised",
    ),
    "freed": (lambda: {"layer.w": freed()}, "'layer.w' has no bytes"),
    "complex128": (lambda: {"layer.w": torch.ones(3, dtype=torch.complex128)}, "'layer.w' has the dtype"),
    "lazy": (lambda: torch.nn.Sequential(torch.nn.LazyLinear(3)), "'0.weight' is not initialised"),
    "text": (lambda: {"layer.w": "weights"}, "'layer.w' is a str"),
    "deep text": (lambda: {"layer": {"w": "weights"}}, "'layer.w' is a str"),
    "wrapper": (lambda: {"layer.w": Wrapper(torch.ones(3))}, "'layer.w' is a Wrapper, which has no memory of its own"),
    "wrapper in a module": (
        lambda: torch.nn.ParameterDict({"w": torch.nn.Parameter(Wrapper(torch.ones(3)), requires_grad=False)}),
        "'w' is a Wrapper",
    ),
    "itself": (within_itself, "'deep.me' is a mapping that it is in itself"),
    "list": (lambda: [torch.ones(3)], "not a module or a mapping"),
    "twice": (lambda: {"a.b": torch.ones(3), "a": {"b": torch.ones(3)}}, "two tensors have the name 'a.b'"),
    "numbers": (lambda: {0: torch.ones(3), "0": torch.ones(3)}, "two tensors have the name '0'"),
    "metadata": (lambda: {"__metadata__": torch.ones(3)}, "__metadata__"),
    "surrogate": (lambda: {"a\udcff": torch.ones(3)}, "not Unicode"),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_bytes_is_refused_by_name(name: str, place: Path) -> None:
    make, said = REFUSED[name]
    with pytest.raises(UsageError) as caught:
        mx_cli.serve(make(), **settings(place))
    assert said in caught.value.what
    with pytest.raises(UsageError) as caught:
        mx_cli.pull_into(make(), "mx1c-" + "0" * 32, **settings(place))
    assert said in caught.value.what


def test_an_expanded_target_is_refused_by_name(place: Path) -> None:
    with pytest.raises(UsageError, match=r"'w' is expanded"):
        mx_cli.pull_into({"w": torch.ones(1).expand(5)}, "mx1c-" + "0" * 32, **settings(place))


def test_memory_that_is_taken_away_ends_nobody(place: Path, path: str) -> None:
    with tensor_source(place, "filled:8", "bf16") as source:
        source.tell("take away", "filled:8", name="w")
        with pytest.raises((TransportFailed, IntegrityError, MissingCapability)):
            Reader(source, "filled:8", place, path).pull()
        assert Reader(source, "bf16", place, path).pull()
        assert source.end() == 0


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("scattered", [False, True])
def test_a_target_that_cannot_be_written_to_is_refused_by_name(scattered: bool, place: Path, tmp_path: Path) -> None:
    """The kernel would end who writes there."""
    (tmp_path / "mapped").write_bytes(bytes(1 << 16))
    with (tmp_path / "mapped").open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
    tensor = torch.frombuffer(mapped, dtype=torch.uint8)
    target = {"other": torch.ones(3), "w": tensor.view(256, 256).t() if scattered else tensor}
    with pytest.raises(UsageError, match=r"'w' lies in memory that cannot be written to"):
        mx_cli.pull_into(target, "mx1c-" + "0" * 32, **settings(place))


def test_arguments_that_mean_nothing(place: Path) -> None:
    target = {"w": torch.ones(1)}
    for wrong in ({"routes": ["disk"]}, {"path": "carrier-pigeon"}, {"require": ["luck"]}, {"no_such_setting": 1}):
        with pytest.raises(UsageError):
            mx_cli.pull_into(target, "mx1c-" + "0" * 32, **wrong, **settings(place))
    with pytest.raises(UsageError, match="cuda:x"):
        mx_cli.pull("mx1c-" + "0" * 32, device="cuda:x", **settings(place))
    with pytest.raises(UsageError, match="not an address"):
        mx_cli.pull("mx1c-" + "0" * 32, peers=[None], **settings(place))
    with pytest.raises(UsageError, match="not a model: 7"):
        mx_cli.pull(7, **settings(place))
    for wrong, said in (
        ({"origin": "hf://org/name"}, "not an origin"),
        ({"origin": ("hf://org/name", "main")}, "'main' is a moving name"),
        ({"max_readers": 0}, "not a number of readers: 0"),
        ({"max_readers": "4"}, "not a number of readers: '4'"),
        ({"rank": 1, "origin": ("s3://b/k", "r")}, "not a rank: 1"),
    ):
        with pytest.raises(UsageError, match=said):
            mx_cli.serve(target, **wrong, **settings(place))


def test_inference_tensors_and_gradients(source: TensorSource, place: Path) -> None:
    reader, expected = Reader(source, "shapes", place), source_shapes(source, place)
    with torch.inference_mode():
        target = {"m": torch.zeros(16, 64).t(), "flat": torch.zeros(8, 16), "same": torch.zeros(3)}
    reader.into(target)
    assert_same(target, expected)
    weight = torch.nn.Parameter(torch.zeros(16, 64).t())
    reader.into({"m": weight}, allow_extra=True)
    assert raw(weight) == raw(expected["m"])
    assert weight.requires_grad
    assert weight.is_leaf


# --- updates ---------------------------------------------------------------------------------------------------------


def changed(source: TensorSource, recipe: str, do: str, **more: Any) -> dict[str, Any]:
    """What the source says of itself after a command, which readers made from now on know."""
    source.peers[recipe] = source.tell(do, recipe, **more)
    return source.peers[recipe]


def test_an_update_is_another_version_with_another_identity(changing: TensorSource, place: Path, path: str) -> None:
    text = "filled:1"
    reader, before = Reader(changing, text, place, path), changing.peers[text]
    assert reader.into(recipe(text)).version == before["version"]
    after = changed(changing, text, "update", name="w", value=2)
    assert (after["version"], after["generation"]) == (before["version"] + 1, before["generation"])
    assert after["identities"] != before["identities"]
    with pytest.raises(Incompatible):
        reader.pull()
    target = zeroed(recipe(text))
    assert Reader(changing, text, place, path).into(target).version == after["version"]
    assert torch.equal(target["w"], torch.full((MIB,), 2, dtype=torch.uint8))
    same = changed(changing, text, "update", name="w", value=1)
    assert (same["version"], same["identities"]) == (after["version"] + 1, before["identities"])
    assert_same(reader.pull(), recipe(text))


def test_no_grants_while_weights_change(changing: TensorSource, place: Path) -> None:
    reader = Reader(changing, "filled:1", place)
    changed(changing, "filled:1", "begin", name="small", value=3)
    with pytest.raises(NoPeer, match="updating"):
        reader.pull(routes=["peer"])
    changed(changing, "filled:1", "finish")
    pulled = Reader(changing, "filled:1", place).pull()
    assert torch.equal(pulled["small"], torch.full((4,), 3.0))
    changed(changing, "filled:1", "update", name="small", value=1)


def test_who_reads_during_an_update_is_sent_away(changing: TensorSource, place: Path) -> None:
    """The reader hangs in the midst; the update does not wait longer than it said, and nothing mixed comes out."""
    text = "filled:64"
    reader, target = Reader(changing, text, place, "socket"), zeroed(recipe(text))
    errors: list[MxError] = []

    def read(address: str) -> None:
        try:
            reader.into(target, peers=[address], routes=["peer"])
        except MxError as error:
            errors.append(error)

    with slow(changing.peers[text]["address"], 16 * MIB) as relay:
        thread = threading.Thread(target=read, args=[relay.address])
        thread.start()
        relay.wait_full()
        address = changed(changing, text, "update", name="w", value=2, wait=0.1)["address"]
        assert metric(address, "readers") == 0
        relay.go()
        thread.join(60)
        assert not thread.is_alive()
    assert [type(error) for error in errors] in ([TransportFailed], [IntegrityError])
    Reader(changing, text, place, "socket").into(target)
    assert int(target["w"].min()) == 2
    changed(changing, text, "update", name="w", value=1)


@capability("nixl")
def test_memory_that_changes_under_a_reader_never_comes_out_mixed(changing: TensorSource, place: Path) -> None:
    """By nixl-read the source is not asked: what changes too early for a reader fails its digests."""
    text = "filled:64"
    reader, target = Reader(changing, text, place, "nixl-read"), zeroed(recipe(text))
    results: list[object] = []

    def read() -> None:
        for _ in range(6):
            try:
                reader.into(target, routes=["peer"])
                results.append(sorted(set(target["w"].unique().tolist())))
            except (IntegrityError, TransportFailed, MissingCapability, NoPeer, Incompatible) as error:
                results.append(error)

    thread = threading.Thread(target=read)
    thread.start()
    for value in (2, 1, 3, 1):
        changed(changing, text, "update", name="w", value=value, wait=0)
    thread.join(60)
    assert not thread.is_alive()
    assert all(isinstance(result, MxError) or result == [1] for result in results), results
    reader.into(target)


def test_small_tensors_are_verified_together(place: Path) -> None:
    tensors = {f"t{index:02}": torch.full((10,), index) for index in range(40)}
    with mx_cli.serve(tensors, **settings(place)) as handle:
        model, options = (
            handle.identities["content"],
            {"peers": [handle.address], "routes": ["peer"], **settings(place)},
        )
        peering = Peering(process_context(settings(place)), [model], Wish((handle.address,)))
        try:
            holding = peering.find(0).holding
        finally:
            peering.close()
        (file,) = holding.packs
        first, last = holding.tensors[0], holding.tensors[-1]
        assert [(pack.offset, pack.end) for pack in holding.packs[file]] == [(first.start, last.end)]
        assert {name: raw(one) for name, one in mx_cli.pull(model, **options).items()} == {
            name: raw(one) for name, one in tensors.items()
        }
        tensors["t07"][3] = 99
        with pytest.raises((IntegrityError, TransportFailed), match="tensor t07"):
            mx_cli.pull(model, **options)


def test_an_update_that_fails_leaves_nobody_with_wrong_weights(place: Path) -> None:
    tensors = {"w": torch.ones(10)}
    with mx_cli.serve(tensors, **settings(place)) as handle:
        options = {"peers": [handle.address], "routes": ["peer"], **settings(place)}
        with pytest.raises(UsageError, match="meta"), handle.update():
            tensors["w"] = torch.empty(10, device="meta")
        with pytest.raises(NoPeer, match="updating"):
            mx_cli.pull(handle.identities["content"], **options)
        block = handle.update()
        block.__enter__()
        tensors["w"] = torch.zeros(10)
        assert not block.__exit__(ZeroDivisionError, ZeroDivisionError(), None)
        assert handle.version == 1
        assert_same(mx_cli.pull(handle.identities["content"], **options), tensors)


@capability("nixl")
def test_memory_that_could_not_be_registered_is_not_taken_for_registered(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(agent: Agent, regions: object) -> None:
        raise TransportFailed("no more memory can be locked")

    tensors = {"w": torch.ones(10)}
    with mx_cli.serve(tensors, **settings(place)) as handle:
        options = {"peers": [handle.address], "path": "nixl-read", "routes": ["peer"], **settings(place)}
        with monkeypatch.context() as patch:
            patch.setattr(Agent, "register", refuse)
            with handle.update():
                tensors["w"] = torch.randn(20)
        with pytest.raises(MissingCapability, match="offers only socket"):
            mx_cli.pull(handle.identities["content"], **options)
        with handle.update():
            pass
        assert_same(mx_cli.pull(handle.identities["content"], **options), tensors)


def test_an_update_may_add_and_move_tensors(place: Path, path: str) -> None:
    tensors = {"w": torch.ones(10)}
    with mx_cli.serve(tensors, **settings(place)) as handle:
        options = {"peers": [handle.address], "path": path, **settings(place)}
        for version in (1, 2, 3):
            with handle.update():
                tensors["w"] = torch.randn(10 * version)
                tensors[f"more.{version}"] = torch.randn(3)
            assert handle.version == version
            assert_same(mx_cli.pull(handle.identities["content"], **options), tensors)


# --- the handle ------------------------------------------------------------------------------------------------------


def test_a_closed_handle_is_closed(place: Path) -> None:
    tensors = {"w": torch.ones(10)}
    handle = mx_cli.serve(tensors, **settings(place))
    options = {"peers": [handle.address], "routes": ["peer"], **settings(place)}
    references, address = sys.getrefcount(tensors), handle.address
    handle.close()
    handle.close()
    assert sys.getrefcount(tensors) < references
    with pytest.raises(NoPeer):
        mx_cli.pull(handle.identities["content"], **options)
    with pytest.raises(UsageError, match="closed"), handle.update():
        pytest.fail("its block must not run")
    with pytest.raises(UsageError, match="closed"):
        handle.publish()
    assert address not in [json.loads(one.read_text())["address"] for one in (place / "peers").glob("*.json")]


def test_a_process_does_not_find_itself(place: Path, source: TensorSource) -> None:
    expected = module()
    with mx_cli.serve(expected, **settings(place)) as handle:
        model = handle.identities["content"]
        assert model == source.peers["module"]["identities"]["content"]
        received = mx_cli.pull_into(module(0), model, **settings(place))
        assert list(received.sources) == [source.peers["module"]["address"]]
    with mx_cli.serve({"mine": torch.ones(3)}, **settings(place)) as handle:
        with pytest.raises((NoPeer, Incompatible)):
            mx_cli.pull(handle.identities["content"], **settings(place))
        pulled = mx_cli.pull(handle.identities["content"], peers=[handle.address], **settings(place))
        assert_same(pulled, {"mine": torch.ones(3)})


READ_FOR_EVER = """
import sys, mx_cli
model, address, path, cache = sys.argv[1:]
while True:
    mx_cli.pull(model, peers=[address], path=path, cache_dir=cache)
    print("once", flush=True)
"""


def test_l02_readers_that_are_killed_leave_the_source_alone(large: TensorSource, place: Path, path: str) -> None:
    """kill -9 after a whole pull, in the midst of the next."""
    peer = large.peers["filled:512"]
    arguments = [peer["identities"]["content"], peer["address"], path, str(place / "cache")]
    command = [sys.executable, "-c", READ_FOR_EVER, *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as reader:
        assert reader.stdout is not None
        assert reader.stdout.readline() == "once\n"
        eventually(lambda: metric(peer["address"], "readers") > 0)
        reader.kill()
    assert_same(Reader(large, "filled:512", place, path).pull(names=["small"]), {"small": torch.ones(4)})
    assert large.process.poll() is None


def metric(address: str, name: str) -> int:
    body = servers.request("GET", f"https://{address}/metrics")[2].decode()
    return next(int(line.split()[1]) for line in body.splitlines() if line.startswith(f"mxcli_{name} "))


def test_an_update_within_an_update_and_a_close_within_one(place: Path) -> None:
    tensors = {"w": torch.ones(10)}
    with (
        mx_cli.serve(tensors, **settings(place)) as handle,
        handle.update(),
        pytest.raises(UsageError, match="within an update"),
        handle.update(),
    ):
        pytest.fail("its block must not run")
    with mx_cli.serve({"w": torch.ones(10)}, **settings(place)) as handle, handle.update():
        handle.close()


def test_identities_are_those_of_mx_hash(mx: Mx, place: Path, tmp_path: Path) -> None:
    """H-, and identity.md: a module in memory and its checkpoint on disk are the same weights; so is a tied module."""
    rows = {
        name: (DTYPES[tensor.dtype], list(tensor.shape), raw(tensor)) for name, tensor in module().state_dict().items()
    }
    del rows["head.weight"]
    (tmp_path / "config.json").write_text('{"model_type": "llama", "hidden_size": 16}')
    (tmp_path / "model.safetensors").write_bytes(safetensors_bytes(rows))
    revision = "a" * 40

    def hashed(*options: str) -> str:
        return mx("hash", *options).ok().out.strip()

    for options, layout in (
        ([], {}),
        (
            ["--stage", "loaded", "--tp", "2", "--rank", "1", "--dtype", "bf16"],
            {"tp": 2, "rank": 1, "dtype": "torch.bfloat16"},
        ),
        (["--stage", "loaded", "--set", "gpu_arch=90"], {"gpu_arch": "90"}),
    ):
        stage = "loaded" if layout else None
        config = (tmp_path / "config.json").read_bytes()
        origin = ("hf://org/name", revision)
        with mx_cli.serve(
            module(), config=config, stage=stage, layout=layout, origin=origin, **settings(place)
        ) as handle:
            assert handle.identities["content"] == hashed(str(tmp_path), "--kind", "content", *options)
            assert handle.identities["origin"] == hashed(f"hf://org/name@{revision}", "--kind", "origin", *options)
    for wrong in ({"stage": "runtime"}, {"layout": {"tp": 0}}, {"stage": "checkpoint", "layout": {"tp": 2}}):
        with pytest.raises(UsageError):
            mx_cli.serve(module(), **wrong, **settings(place))
    with pytest.raises(UsageError, match="config is neither"):
        mx_cli.serve(module(), config=object(), **settings(place))
    with pytest.raises(UsageError, match="config is not"):
        mx_cli.serve(module(), config={"dtype": torch.float16}, **settings(place))


# --- exit codes ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("last", "code"), [({}, 0), ({"do": "exit", "code": 3}, 3), ({"do": "raise"}, 1)])
def test_a_process_that_served_ends_as_it_says(place: Path, last: dict[str, Any], code: int) -> None:
    """A handle that is still open, and had readers, does not turn the end into a crash."""
    with tensor_source(place, "bf16") as one:
        for path in every_path():
            Reader(one, "bf16", place, path).pull()
        one.stderr.write_text("")
        assert one.end(**last) == code
        assert ("Traceback" in one.stderr.read_text()) == (code == 1)


def every_path() -> list[str]:
    return ["socket", "nixl-read"] if capabilities.have("nixl") else ["socket"]


ENDS = {
    "simply": ("", 0),
    "sys.exit": ("sys.exit(4)", 4),
    "exception": ("raise RuntimeError('as told')", 1),
    "while it serves": ("handle = mx_cli.serve(tensors, cache_dir=cache)", 0),
}


@pytest.mark.parametrize("how", ENDS)
def test_a_process_that_pulled_ends_as_it_says(source: TensorSource, place: Path, how: str) -> None:
    last, code = ENDS[how]
    peer = source.peers["bf16"]
    script = (
        "import sys, mx_cli\n"
        "model, address, cache, *paths = sys.argv[1:]\n"
        "for path in paths: tensors = mx_cli.pull(model, peers=[address], path=path, cache_dir=cache)\n"
        f"assert len(tensors) == 2\n{last}\n"
    )
    arguments = [peer["identities"]["content"], peer["address"], str(place / "cache"), *every_path()]
    ended = subprocess.run([sys.executable, "-c", script, *arguments], capture_output=True, text=True, timeout=60)
    assert ended.returncode == code, ended.stderr
    assert ended.stdout == ""


WITHOUT_UCX = """
import sys, torch, mx_cli
options = {"cache_dir": sys.argv[1], "discovery": f"dir:{sys.argv[1]}/peers"}
with mx_cli.serve({"w": torch.arange(3000)}, **options) as handle:
    with handle.update():
        pass
    assert mx_cli.pull(handle.identities["content"], peers=[handle.address], **options)["w"][-1] == 2999
"""


@capability("nixl")
def test_where_ucx_cannot_start_readers_get_the_bytes_by_sockets(place: Path) -> None:
    """Also after an update, which opens the memory anew."""
    env = {**os.environ, "UCX_NET_DEVICES": "nope0"}
    command = [sys.executable, "-c", WITHOUT_UCX, str(place)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, env=env)
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr.count("by path socket only: UCX cannot be started") == 2


FORKS = """
import os, select, socket, sys, torch, mx_cli
from mx_cli.base.address import split_address
options = {"cache_dir": sys.argv[1], "discovery": f"dir:{sys.argv[1]}/peers"}
handle = mx_cli.serve({"w": torch.arange(3000)}, **options)
model = handle.identities["content"]
def pull():
    return int(mx_cli.pull(model, routes=["peer"], **options)["w"][-1])
told, tell = os.pipe()
child = os.fork()
if child == 0:
    found = pull()
    handle.close()
    os.write(tell, found.to_bytes(2, "big"))
    os.read(0, 1)
    os._exit(0)
assert select.select([told], [], [], 40)[0], "the child hangs"
assert os.read(told, 2) == (2999).to_bytes(2, "big")
assert mx_cli.pull(model, peers=[handle.address], **options)["w"][-1] == 2999
handle.close()
with socket.socket() as sock:
    print(sock.connect_ex(split_address(handle.address)))
"""


def test_a_forked_child_finds_its_parent_and_holds_nothing_open(place: Path) -> None:
    """As the workers of a data loader are: with copies of the peer's sockets, and none of its threads."""
    with subprocess.Popen(
        [sys.executable, "-c", FORKS, str(place)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.communicate(timeout=60)[0] == f"{errno.ECONNREFUSED}\n"
        assert process.returncode == 0


# --- memory, routes, sources that die -------------------------------------------------------------------------------

INTO_512 = """
import resource, sys, torch, mx_cli
target = {"w": torch.zeros(512 << 20, dtype=torch.uint8), "small": torch.zeros(4)}
received = mx_cli.pull_into(target, sys.argv[1], peers=sys.argv[2:3], path=sys.argv[3], cache_dir=sys.argv[4])
assert received.bytes == (512 << 20) + 16 and int(target["w"].min()) == 1
"""


@capability("memory-cgroup")
def test_a_target_of_512_mib_in_712(large: TensorSource, place: Path, path: str) -> None:
    with limits.memory(712 * MIB) as prefix:
        peer = large.peers["filled:512"]
        arguments = [peer["identities"]["content"], peer["address"], path, str(place / "cache")]
        command = [*prefix, sys.executable, "-c", INTO_512, *arguments]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=100)
        assert ended.returncode == 0, ended.stderr


TOO_MUCH = """
import sys, mx_cli
from mx_cli.base.errors import NoSpace
try:
    mx_cli.pull(sys.argv[1], peers=sys.argv[2:3], cache_dir=sys.argv[3], routes=["peer"])
except NoSpace as error:
    print(error.what)
"""


@capability("memory-cgroup")
def test_what_does_not_fit_is_said_before_the_kernel_ends_the_process(large: TensorSource, place: Path) -> None:
    with limits.memory(400 * MIB) as prefix:
        peer = large.peers["filled:512"]
        arguments = [peer["identities"]["content"], peer["address"], str(place / "cache")]
        command = [*prefix, sys.executable, "-c", TOO_MUCH, *arguments]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=100)
        assert "no memory for weights (need 512 MiB, at most " in ended.stdout, (ended.returncode, ended.stderr)


def test_l07_peer_then_cache_then_origin(place: Path, tmp_path: Path, path: str) -> None:
    """One source of each kind, which are taken away one by one."""
    origin, expected = tmp_path / "model", recipe("shapes")
    origin.mkdir()
    rows = {name: ("F32", list(tensor.shape), raw(tensor)) for name, tensor in expected.items()}
    (origin / "model.safetensors").write_bytes(safetensors_bytes(rows))
    options = {**settings(place), "cache_dir": str(tmp_path / "cache"), "path": path}
    uri = origin.as_uri()

    def into(model: str, **more: Any) -> mx_cli.Received:
        target = zeroed(expected)
        received = mx_cli.pull_into(target, model, **options, **more)
        assert_same(target, expected)
        return received

    with mx_cli.serve(expected, **settings(place)) as handle:
        content = handle.identities["content"]
        peers = {"peers": [handle.address], "origin": uri}
        assert into(content, **peers).route == "peer"
        fetched = into(content, routes=["cache", "origin"], origin=uri)
        assert [(a.route, a.taken) for a in fetched.attempts] == [("cache", False), ("origin", True)]
        assert fetched.route == "origin"
        assert into(content, **peers).route == "peer"
    cached = into(content, **peers)
    assert [(a.route, a.taken) for a in cached.attempts] == [("peer", False), ("cache", True)]
    assert cached.sources == {"cache": cached.bytes}
    assert_same(mx_cli.pull(content, **options, **peers), expected)
    assert into(uri).route == "cache"
    cachecheck.check_clean(tmp_path / "cache")


def test_a_checkpoint_of_several_files(place: Path, tmp_path: Path) -> None:
    files = checkpoint_files(shards=3, size=5 * MIB)
    expected: dict[str, Any] = {}
    for name, data in files.items():
        (tmp_path / "model" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "model" / name).write_bytes(data)
        if name.endswith(".safetensors"):
            expected |= safetensors.torch.load(data)
    uri = (tmp_path / "model").as_uri()
    assert_same(mx_cli.pull(uri, **settings(place)), expected)
    target = zeroed(expected)
    assert mx_cli.pull_into(target, uri, **settings(place)).route == "cache"
    assert_same(target, expected)


def test_a_checkpoint_whose_tensors_cannot_be_told_apart(place: Path, tmp_path: Path) -> None:
    """Files of other formats have none; the parts of a pipeline have their folders' names (test_load_model)."""
    pickle = tmp_path / "pickle"
    pickle.mkdir()
    torch.save({"w": torch.ones(4)}, pickle / "pytorch_model.bin")
    with pytest.raises(UsageError, match="is not safetensors"):
        mx_cli.pull_into({"w": torch.ones(4)}, pickle.as_uri(), **settings(place))


def test_a_tied_module_from_a_checkpoint_without_the_tied_name(place: Path, tmp_path: Path) -> None:
    """A checkpoint keeps one of the names; the module's own tie fills the other."""
    state = module().state_dict()
    del state["head.weight"]
    rows = {name: (DTYPES[tensor.dtype], list(tensor.shape), raw(tensor)) for name, tensor in state.items()}
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "model.safetensors").write_bytes(safetensors_bytes(rows))
    target = module(0)
    received = mx_cli.pull_into(target, (tmp_path / "model").as_uri(), **settings(place))
    assert_same(target.state_dict(), module().state_dict())
    assert (received.route, received.parameters, received.buffers) == ("origin", 4, 1)
    untied = module(0)
    untied.head.weight = torch.nn.Parameter(torch.zeros(100, 16))
    with pytest.raises(Incompatible, match=r"head\.weight"):
        mx_cli.pull_into(untied, (tmp_path / "model").as_uri(), **settings(place))
    with mx_cli.serve(module(), **settings(place)) as handle:
        mx_cli.pull_into(untied, handle.identities["content"], peers=[handle.address], **settings(place))


INTO_FILE = """
import json, sys, torch, mx_cli
model, path, cache, file, size, *peers = sys.argv[1:]
target = {"w": torch.from_file(file, shared=True, size=int(size), dtype=torch.uint8), "small": torch.zeros(4)}
print("begun", flush=True)
received = mx_cli.pull_into(target, model, peers=peers, path=path, cache_dir=cache, routes=["peer"])
print(json.dumps([received.bytes, received.sources]), flush=True)
"""


@contextlib.contextmanager
def stopped_midway(
    command: list[str], file: Path, size: int, sources: list[str]
) -> Iterator[tuple[subprocess.Popen[str], mmap.mmap, int]]:
    """The reader, stopped when some of its target has come, and much has not; the target; what was served before it."""
    for _ in range(10):
        served = sum(metric(address, "bytes_served_total") for address in sources)
        memory = shared_memory(file, size)
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as reader:
            assert reader.stdout is not None
            assert reader.stdout.readline() == "begun\n"
            eventually(lambda: any(memory[:: 4 * MIB]))  # noqa: B023 - it is over before the next
            reader.send_signal(signal.SIGSTOP)
            os.waitid(os.P_PID, reader.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
            if 0 < sum(memory[:: 4 * MIB]) * 4 * MIB < size - 64 * MIB:
                yield reader, memory, served
                return
            reader.kill()
    pytest.fail("it was stopped too late to lose anything, each time")


def test_l01_one_of_two_sources_is_killed(large: TensorSource, place: Path, tmp_path: Path, path: str) -> None:
    """The reader is stopped once some of its target has come; then one source dies with reads of its open."""
    size, text = 512 * MIB, "filled:512"
    with tensor_source(place, text) as one:
        addresses = [each.peers[text]["address"] for each in (one, large)]
        arguments = [one.peers[text]["identities"]["content"], path, str(place / "cache")]
        command = [sys.executable, "-c", INTO_FILE, *arguments, str(tmp_path / "target"), str(size), *addresses]
        with stopped_midway(command, tmp_path / "target", size, addresses) as (reader, memory, served):
            died = metric(addresses[0], "bytes_served_total")
            one.kill()
            reader.send_signal(signal.SIGCONT)
            assert reader.stdout is not None
            moved, sources = json.loads(reader.stdout.readline())
        assert reader.returncode == 0
        assert moved == size + 16
        assert sum(sources.values()) == moved
        assert sources[addresses[1]] > 0
        assert memory.find(b"\0") == -1
        if path == "socket":
            assert died + metric(addresses[1], "bytes_served_total") - served <= 1.1 * size


def shared_memory(file: Path, size: int) -> mmap.mmap:
    """A file of zeros, for another process to fill under our eyes."""
    with file.open("w+b") as opened:
        opened.truncate(size)
        return mmap.mmap(opened.fileno(), size)


# --- a GPU at either end ---------------------------------------------------------------------------------------------


@capability("gpu")
def test_into_a_gpu(source: TensorSource, changing: TensorSource, place: Path, path: str) -> None:
    target = module(0).cuda()
    Reader(source, "module", place, path).into(target)
    assert_same({name: tensor.cpu() for name, tensor in target.state_dict().items()}, module().state_dict())
    pulled = Reader(source, "torture", place, path).pull(device="cuda")
    assert_same({name: tensor.cpu() for name, tensor in pulled.items()}, flat(torture()))
    changing.tell("flip", "noise:9", name="w", at=4 * MIB + 7)
    with pytest.raises(IntegrityError, match=r"tensor w, block 1"):
        Reader(changing, "noise:9", place, path).pull(device="cuda", routes=["peer"])
    changing.tell("flip", "noise:9", name="w", at=4 * MIB + 7)


@capability("gpu")
def test_from_a_gpu(place: Path, path: str) -> None:
    with mx_cli.serve(module().cuda(), **settings(place)) as handle:
        options = {"peers": [handle.address], "path": path, **settings(place)}
        assert_same(mx_cli.pull(handle.identities["content"], **options), module().state_dict())
