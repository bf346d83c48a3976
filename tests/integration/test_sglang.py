"""SGLang's plugin against the names and signatures that SGLang 0.5.23 has: SGLang itself needs a GPU.

`rig/sglang_stub` has them. Where SGLang is installed (its wheel on the path is enough) the stub is compared with it.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.rig import capabilities
from tests.rig.serving import Hosts
from tests.support import ROOT, Mx, capability, clean_env, make_safetensors

if not capabilities.have("torch"):
    pytest.skip("missing: torch", allow_module_level=True)
if not capabilities.have("safetensors"):
    pytest.skip("missing: safetensors", allow_module_level=True)

STUB = ROOT / "tests" / "rig" / "sglang_stub"
ENGINE = """
import importlib.util, json, logging, os, sys
if "REAL_HOOKS" in os.environ:
    spec = importlib.util.spec_from_file_location("sglang.srt.plugins.hook_registry", os.environ["REAL_HOOKS"])
    sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules[spec.name])
logging.basicConfig(level=logging.INFO, format="%(name)s %(message)s")
from sglang.srt.plugins import load_plugins
load_plugins()
load_plugins()
from sglang.srt.configs.device_config import DeviceConfig
from sglang.srt.configs.load_config import LoadConfig
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.model_loader import loader
wish = json.loads(sys.argv[1])
config = ModelConfig(wish["model"], is_draft_model=wish["draft"])
chosen = loader.get_model_loader(load_config=LoadConfig(wish["format"], wish["extra"]), model_config=config)
model = chosen.load_model(model_config=config, device_config=DeviceConfig(device="cpu"))
print(json.dumps([type(chosen).__name__, model.gate_up.tolist(), model.processed, model.training]), flush=True)
if wish["stay"]:
    sys.stdin.read()
"""


def checkpoint(directory: Path, value: int) -> Path:
    rows = {name: ("F32", [2, 2], value.to_bytes(1, "big") * 16) for name in ("gate", "up")}
    make_safetensors(directory / "model.safetensors", rows)
    (directory / "config.json").write_text("{}")
    return directory


def numbers(value: int) -> list[list[float]]:
    import struct

    return [[struct.unpack("<f", value.to_bytes(1, "big") * 4)[0]] * 2] * 4


class Engine:
    """Runs an engine's process up to its loaded model."""

    def __init__(self, place: Path, env: dict[str, Any]) -> None:
        self.env = clean_env(place, place / "cache", {**env, "PYTHONPATH": f"{STUB}{os.pathsep}{ROOT}"})

    def start(
        self, model: Path, extra: Any, *, draft: bool = False, load_format: str = "auto", stay: bool = False
    ) -> Any:
        wish = {"model": str(model), "extra": extra, "draft": draft, "format": load_format, "stay": stay}
        return subprocess.Popen(
            [sys.executable, "-c", ENGINE, json.dumps(wish)],
            env=self.env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, model: Path, extra: Any, **options: Any) -> tuple[list[Any], str]:
        """What it loaded, and its log."""
        out, err = self.start(model, extra, **options).communicate(timeout=90)
        assert out, err
        return json.loads(out), err

    def fails(self, model: Path, extra: Any, **options: Any) -> str:
        process = self.start(model, extra, **options)
        _, err = process.communicate(timeout=90)
        assert process.returncode == 1
        return str(err)


@pytest.fixture
def engine(tmp_path: Path) -> Engine:
    return Engine(tmp_path, {})


def test_an_engine_that_does_not_ask_is_not_changed(engine: Engine, tmp_path: Path) -> None:
    model = checkpoint(tmp_path / "own", 1)
    for extra in ({}, None):
        assert engine.run(model, extra)[0] == ["DefaultModelLoader", numbers(1), True, False]
    assert engine.run(model, {}, load_format="gguf")[0][0] == "GGUFModelLoader"


def test_weights_that_the_engine_was_not_started_with(engine: Engine, tmp_path: Path, mx: Mx) -> None:
    """From the cache, and streamed when they are not there; SGLang's own way of filling and post-processing is kept."""
    own, other = checkpoint(tmp_path / "own", 1), checkpoint(tmp_path / "other", 2)
    extra = {"mx": {"uri": other.as_uri(), "routes": ["cache", "stream"]}}
    loaded, log = engine.run(own, extra)
    assert loaded == ["MxLoader", numbers(2), True, False]
    assert "rank 0 of 1: route cache not taken" in log
    assert "rank 0 of 1: route stream taken" in log
    mx("prefetch", other.as_uri(), env={"MX_CACHE_DIR": tmp_path / "cache"}).ok()
    loaded, log = engine.run(own, json.dumps(extra))
    assert loaded == ["MxLoader", numbers(2), True, False]
    assert "rank 0 of 1: route cache taken" in log


def test_without_any_other_route_the_engine_loads_itself(engine: Engine, tmp_path: Path) -> None:
    own = checkpoint(tmp_path / "own", 1)
    loaded, log = engine.run(own, {"mx": {"routes": ["peer", "cache", "engine"]}})
    assert loaded == ["MxLoader", numbers(1), True, False]
    assert "route engine taken: the engine's own loader" in log


def test_files_of_a_peer_and_served_to_the_next(hosts: Hosts, tmp_path: Path) -> None:
    own, other = checkpoint(tmp_path / "own", 1), checkpoint(tmp_path / "other", 2)
    hosts("prefetch", other.as_uri(), host="a").ok()
    served = hosts.serve(other.as_uri(), host="a")
    engine = Engine(tmp_path, hosts.env("b"))
    wish = {"uri": other.as_uri(), "routes": ["peer"], "peers": [served.address], "serve": True}
    running = engine.start(own, {"mx": wish}, stay=True)
    try:
        line = running.stdout.readline()
        assert line, running.communicate()[1]
        assert json.loads(line) == ["MxLoader", numbers(2), True, False]
        address = next(row.rpartition(" at ")[2].strip() for row in running.stderr if "serves the files" in row)
        served.stop()
        done = hosts("pull", other.as_uri(), "--peer", address, "--route", "peer", "--json", host="c").ok()
        assert done.json()["route"] == "peer"
    finally:
        running.communicate(timeout=30)


def test_a_draft_model_is_left_to_the_engine(engine: Engine, tmp_path: Path) -> None:
    own, other = checkpoint(tmp_path / "own", 1), checkpoint(tmp_path / "other", 2)
    loaded, _ = engine.run(own, {"mx": {"uri": other.as_uri()}}, draft=True)
    assert loaded == ["DefaultModelLoader", numbers(1), True, False]


def test_what_cannot_be_done_is_refused(engine: Engine, tmp_path: Path) -> None:
    own = checkpoint(tmp_path / "own", 1)
    assert "unknown keys in the loader's extra configuration: url" in engine.fails(own, {"mx": {"url": "x"}})
    assert "is no mapping" in engine.fails(own, {"mx": "yes"})
    assert "beside mx in the loader's extra configuration: num_threads" in engine.fails(
        own, {"mx": {}, "num_threads": 2}
    )
    assert "stage loaded: nothing tells mx when" in engine.fails(own, {"mx": {"stage": "loaded"}})
    assert "by GGUFModelLoader (load format gguf)" in engine.fails(own, {"mx": {}}, load_format="gguf")
    assert "by DummyModelLoader" in engine.fails(own, {"mx": {}}, load_format="dummy")


# --- the stub itself -----------------------------------------------------------------------------------------------

SAME = {
    "plugins/__init__.py": ["load_plugins"],
    "plugins/hook_registry.py": ["HookRegistry.register", "HookRegistry.apply_hooks"],
    "model_loader/loader.py": [
        "BaseModelLoader.__init__",
        "BaseModelLoader.load_model",
        "BaseModelLoader.download_model",
        "DefaultModelLoader.load_model",
        "DefaultModelLoader._get_all_weights",
        "DefaultModelLoader.load_weights_and_postprocess",
        "DefaultModelLoader.load_weights_only",
        "DefaultModelLoader.postprocess_weights",
        "get_model_loader",
    ],
}


def signatures(file: Path) -> dict[str, tuple[list[str], list[str], list[str]]]:
    """Of each function and method: the names of its arguments, of those that need their names, and its decorators."""
    found = {}

    def visit(nodes: list[ast.stmt], prefix: str) -> None:
        for node in nodes:
            if isinstance(node, ast.ClassDef):
                visit(node.body, f"{prefix}{node.name}.")
            elif isinstance(node, ast.FunctionDef):
                args = node.args
                plain = [arg.arg for arg in (*args.posonlyargs, *args.args)]
                decorators = [ast.unparse(one) for one in node.decorator_list]
                found[prefix + node.name] = plain, [arg.arg for arg in args.kwonlyargs], decorators

    visit(ast.parse(file.read_text()).body, "")
    return found


def sglang() -> Path:
    spec = importlib.util.find_spec("sglang")
    assert spec is not None
    assert spec.submodule_search_locations
    return Path(next(iter(spec.submodule_search_locations))) / "srt"


@capability("sglang")
def test_by_the_hooks_of_sglang_itself(tmp_path: Path) -> None:
    own, other = checkpoint(tmp_path / "own", 1), checkpoint(tmp_path / "other", 2)
    engine = Engine(tmp_path, {"REAL_HOOKS": sglang() / "plugins" / "hook_registry.py"})
    loaded, log = engine.run(own, {"mx": {"uri": other.as_uri(), "routes": ["stream"]}})
    assert loaded == ["MxLoader", numbers(2), True, False]
    assert "Applied 1 hook(s) to sglang.srt.model_loader.loader.get_model_loader" in log
    assert engine.run(own, {})[0] == ["DefaultModelLoader", numbers(1), True, False]


@capability("sglang")
def test_the_stub_has_the_signatures_of_sglang() -> None:
    real = sglang()
    for file, names in SAME.items():
        ours, theirs = signatures(STUB / "sglang" / "srt" / file), signatures(real / file)
        assert {name: ours[name] for name in names} == {name: theirs[name] for name in names}
    assert "return DefaultModelLoader(load_config)" in (real / "model_loader" / "loader.py").read_text()
    text = (real / "configs" / "load_config.py").read_text()
    assert "model_loader_extra_config: Optional[Union[str, dict]]" in text
    assert 'AUTO = "auto"' in text
