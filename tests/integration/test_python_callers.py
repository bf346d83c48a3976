"""What programs do with `mx_cli.load` and `mx_cli.stream`, and what torch is told to do meanwhile."""

from __future__ import annotations

import contextlib
import gc
import io
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import mx_cli
from mx_cli.base.errors import MissingCapability, UsageError
from mx_cli.engine.buffers import Pool
from tests.rig import capabilities
from tests.support import clean_env, make_safetensors

if not capabilities.have("torch"):
    pytest.skip("missing: torch", allow_module_level=True)

import torch

ROOT = str(Path(__file__).parents[2])
COUNT, SIZE = 32, 256 << 10


@pytest.fixture(autouse=True)
def surroundings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No settings of the caller's, and a home of the test's own."""
    for name in [name for name in os.environ if name.startswith(("MX_", "AWS_", "HF_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("MX_CACHE_DIR", str(tmp_path / "cache"))


@pytest.fixture
def model(tmp_path: Path) -> str:
    """Tensors that share one piece of a read."""
    path = tmp_path / "model.safetensors"
    make_safetensors(path, {f"t{at:02}": ("F32", (SIZE // 4,), None) for at in range(COUNT)})
    return str(path)


def load(model: str, **options: Any) -> dict[str, Any]:
    return mx_cli.load(model, **options)


def mapped(model: str, **options: Any) -> dict[str, Any]:
    return mx_cli.load(model, mapped=True, **options)


def stream(model: str, **options: Any) -> dict[str, Any]:
    return dict(mx_cli.stream(model, **options))


def share(model: str, **options: Any) -> dict[str, Any]:
    return mx_cli.load(model, rank="0/2", rules={"rules": [["*", "replicate"]]}, **options)


WAYS = (load, mapped, stream, share)


@pytest.fixture(params=WAYS, ids=lambda way: way.__name__)
def way(request: pytest.FixtureRequest) -> Callable[..., dict[str, Any]]:
    return request.param  # type: ignore[no-any-return]


# --- arguments ----------------------------------------------------------------------------------------------------


def test_names_may_be_one_word_or_an_iterator(way: Callable[..., dict[str, Any]], model: str) -> None:
    for names in ("t03", ["t03", "t03"], iter(["t03"]), {"t03": 1}, (name for name in ("t03",))):
        assert list(way(model, names=names)) == ["t03"]
    assert way(model, names=[]) == {}


@pytest.mark.parametrize("names", [3, [3], [None], [b"t03"], [["t03"]]])
def test_what_is_no_name(way: Callable[..., dict[str, Any]], model: str, names: Any) -> None:
    with pytest.raises(UsageError, match="not a tensor's name"):
        way(model, names=names)


def test_the_host_by_its_names_in_torch(model: str) -> None:
    hosts: list[Any] = ["cpu", "cpu:0", torch.device("cpu"), torch.device("cpu", 0)]
    for device in hosts:
        assert len(mx_cli.load(model, device=device)) == COUNT
    others: list[Any] = ["cpu:1", "cuda:", "cuda:-1", "cuda:²", "meta", "", None]
    for device in others:
        with pytest.raises(UsageError, match="not a device"):
            mx_cli.load(model, device=device)


# --- torch's own ways ---------------------------------------------------------------------------------------------


def test_tensors_without_bytes_are_refused(way: Callable[..., dict[str, Any]], model: str) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(), pytest.raises(UsageError, match="FakeTensors"):
        way(model)


def test_defaults_of_torch_change_nothing(way: Callable[..., dict[str, Any]], model: str) -> None:
    expected = way(model)
    with torch.device("meta"), torch.inference_mode():
        torch.set_default_dtype(torch.float64)
        try:
            found = way(model)
        finally:
            torch.set_default_dtype(torch.float32)
    for name, one in expected.items():
        assert found[name].dtype == one.dtype
        assert torch.equal(found[name].view(torch.uint8), one.view(torch.uint8))


@pytest.mark.parametrize("package", ["torch", "transformers"])
@pytest.mark.parametrize("error", ["ImportError", "OSError"])
def test_a_package_that_cannot_be_loaded_says_why(package: str, error: str, model: str, tmp_path: Path) -> None:
    broken = tmp_path / "broken" / package
    broken.mkdir(parents=True)
    (broken / "__init__.py").write_text(f"raise {error}('libodd.so.9: cannot open shared object file')")
    call = "load_model('.', '.')" if package == "transformers" else f"load({model!r})"
    code = f"import mx_cli\ntry: mx_cli.{call}\nexcept mx_cli.base.errors.MissingCapability as e: print(e.what)"
    env = clean_env(tmp_path, tmp_path / "cache", {"PYTHONPATH": f"{broken.parent}:{ROOT}"})
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60)
    assert f"cannot be loaded ({error}: libodd.so.9: cannot open shared object file)" in done.stdout, done.stderr
    assert MissingCapability.code == 20


# --- what becomes of the memory -----------------------------------------------------------------------------------


def test_a_tensor_is_saved_without_its_neighbours(way: Callable[..., dict[str, Any]], model: str) -> None:
    file = io.BytesIO()
    torch.save(way(model)["t03"], file)
    assert file.tell() < SIZE + 4096


def test_no_tensor_grows_into_its_neighbour(way: Callable[..., dict[str, Any]], model: str) -> None:
    tensors = way(model)
    with pytest.raises(RuntimeError, match="not resizable"):
        tensors["t03"].resize_(SIZE)
    assert tensors["t03"].untyped_storage().nbytes() == SIZE


def abandon(tensors: Iterator[tuple[str, Any]]) -> None:
    next(tensors)
    tensors.close()  # type: ignore[attr-defined]


def fail_in(tensors: Iterator[tuple[str, Any]]) -> None:
    for _ in tensors:
        raise ValueError


@pytest.mark.parametrize("owned", [True, False])
@pytest.mark.parametrize("use", [abandon, next, fail_in, list])
def test_the_memory_of_a_stream_goes_with_it(use: Callable[..., Any], owned: bool, model: str) -> None:
    def pools() -> int:
        return sum(type(one) is Pool for one in gc.get_objects())

    gc.collect()
    before = pools()
    gc.disable()
    try:
        with contextlib.suppress(ValueError):
            use(mx_cli.stream(model, owned=owned))
        assert pools() == before
    finally:
        gc.enable()


FORK = """
import os, sys, torch, mx_cli
torch.ones(3_000_000).add_(1)  # torch's own threads, which a fork has not
child = os.fork()
if not child:
    found = dict(mx_cli.stream(sys.argv[1])), mx_cli.load(sys.argv[1]), mx_cli.load(sys.argv[1], mapped=True)
    os._exit(len({len(one) for one in found}) - 1)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_fork_without_torchs_threads_loads_and_streams(model: str, tmp_path: Path) -> None:
    env = clean_env(tmp_path, tmp_path / "cache", {"PYTHONPATH": ROOT, "OMP_NUM_THREADS": "2"})
    done = subprocess.run([sys.executable, "-c", FORK, model], env=env, capture_output=True, text=True, timeout=60)
    assert done.stdout == "0\n", done.stderr
