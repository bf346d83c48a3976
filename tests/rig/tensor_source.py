"""A process that serves tensors of its own by `mx_cli.serve`: `TensorSource(place, "tied", "torture", …)`.

As a program: `python -m tests.rig.tensor_source '{"recipes": […], "settings": {…}}'` serves each recipe by a handle of its
own, says where in one line of JSON, and obeys one command a line from stdin, each of which it answers in one line. It ends
with its stdin, all handles open.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tests.rig import tensor_parallel, tiny_models
from tests.rig.capabilities import PATH
from tests.rig.checkpoints import noise

ROOT = Path(__file__).parents[2]
MIB = 1 << 20
WHOLE = [
    "uint8", "int8", "int16", "uint16", "int32", "uint32", "int64", "uint64", "float16", "bfloat16", "float32", "float64",
    "complex64", "float8_e5m2", "float8_e4m3fn", "float8_e8m0fnu", "float8_e5m2fnuz", "float8_e4m3fnuz",
    "float4_e2m1fn_x2",
]  # fmt: skip
STRANGE_NAMES = ["", "模型/层.0😀", 'a b"\\\n', "nul\0name", "x" * 100_000, "../../etc/passwd", "a+b", "0", "é"]


# --- what is served --------------------------------------------------------------------------------------------------


def module(seed: int = 1) -> Any:
    """V-06, V-07: two tied weights, a buffer, and one that a state dict leaves out. Seed 0: all zeros, it full of sevens."""
    import torch

    torch.manual_seed(seed)

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = torch.nn.Embedding(100, 16)
            self.layer = torch.nn.Linear(16, 16)
            self.head = torch.nn.Linear(16, 100, bias=False)
            self.head.weight = self.embed.weight
            self.register_buffer("steps", torch.arange(10) + seed)
            self.register_buffer("scratch", torch.full((3,), float(seed)), persistent=False)

    made = Model()
    if not seed:
        with torch.no_grad():
            for tensor in (*made.parameters(), *made.buffers()):
                tensor.zero_()
        made.scratch.fill_(7.0)
    return made


def random_bytes(size: int) -> Any:
    import torch

    return torch.randint(0, 255, (size,), dtype=torch.uint8)


def torture() -> dict[str, Any]:
    """Each dtype, strange shapes, strides, views and names."""
    import torch

    torch.manual_seed(2)
    found: dict[str, Any] = {}
    for short in WHOLE:
        if dtype := getattr(torch, short, None):
            found[f"of.{short}"] = random_bytes(48 * dtype.itemsize).view(dtype).reshape(4, 12)
            found[f"none.{short}"] = torch.empty((0, 8), dtype=dtype)
            found[f"scattered.{short}"] = random_bytes(48 * dtype.itemsize).view(dtype).reshape(4, 12)[:, 2:8]
    found["bool"] = torch.rand(7) > 0.5
    found["scalar"] = torch.tensor(3.5)
    found["three bytes"] = random_bytes(3)
    storage = torch.randn(300)
    found |= {"views.a": storage[:200], "views.b": storage[100:], "views.middle": storage[120:180]}
    found["views.own"] = torch.arange(64, dtype=torch.uint8)
    found["views.as int16"] = found["views.own"][4:12].view(torch.int16)
    big = torch.randn(64, 64)
    found |= {"odd columns": big.t()[:, ::2], "even columns": big.t()[:, 1::2]}
    found["conjugate"] = torch.randn(8, dtype=torch.complex64).conj()
    found["negative"] = torch.conj(torch.randn(8, dtype=torch.complex64)).imag
    found["channels last"] = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    found["expanded"] = torch.randn(1).expand(10)
    found["parameter"] = torch.nn.Parameter(torch.randn(5))
    found |= {f"name:{name}": random_bytes(5) for name in STRANGE_NAMES}
    found |= {name: random_bytes(5) for name in STRANGE_NAMES}
    linear = torch.nn.Linear(3, 3)
    return found | {"nested": {"deep": {"w": torch.randn(3)}, "module": linear}}


def recipe(text: str) -> Any:
    """`name` or `name:argument`."""
    import torch

    name, _, argument = text.partition(":")
    if name == "module":
        return module(int(argument or 1))
    if name == "torture":
        return torture()
    if name == "empty":
        return {"nothing": torch.empty(0, 3), "neither": torch.empty(2, 0, dtype=torch.int8)}
    if name == "bf16":
        return {"w": torch.randn(4, 8).bfloat16(), "f": torch.randn(4)}
    if name == "shapes":
        return {"m": torch.randn(64, 16), "flat": torch.randn(8, 16), "same": torch.randn(3)}
    if name == "named":
        return {f"layer.{index}": torch.full((4,), float(index)) for index in range(int(argument))}
    if name == "noise":
        # Whole MiB of bytes that differ from block to block.
        return {"w": torch.frombuffer(bytearray(noise("w", int(argument) * MIB)), dtype=torch.uint8)}
    if name == "filled":
        return {"w": torch.full((int(argument) * MIB,), 1, dtype=torch.uint8), "small": torch.ones(4)}
    if name == "overlap":
        storage = torch.arange(3 * MIB, dtype=torch.int32)
        return {"a": storage[: 2 * MIB], "b": storage[MIB:]}
    if name == "pretrained":
        return tiny_models.pretrained(argument)
    if name == "pipeline":
        return tiny_models.pipeline()
    if name == "rank":
        return tensor_parallel.shares(tensor_parallel.tensors(), *map(int, argument.split("/")))
    raise KeyError(text)


def serve_options(text: str) -> dict[str, Any]:
    """What `mx_cli.serve` is told of a recipe: `rank:0/2` is that rank's part of the model of `tensor_parallel`."""
    name, _, argument = text.partition(":")
    if name != "rank":
        return {}
    whole = {name: shape for name, shape in tensor_parallel.SHAPES.items() if shape[0] == tensor_parallel.VOCAB}
    return {
        "rank": argument,
        "config": tensor_parallel.CONFIG,
        "origin": (tensor_parallel.URI, tensor_parallel.REVISION),
        "whole": whole,
    }


# --- the process, from outside ---------------------------------------------------------------------------------------


class TensorSource:
    """The process. `.peers[recipe]` says how to find what it serves: address, generation, identities, counts."""

    def __init__(self, place: Path, *recipes: str, all_buffers: bool = False, **settings: Any) -> None:
        runtime = place / "run"
        runtime.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.stderr = place / "source.err"
        env = {"PATH": PATH, "HOME": str(place), "XDG_RUNTIME_DIR": str(runtime), "PYTHONPATH": str(ROOT)}
        options = {"cache_dir": str(place / "cache"), "discovery": f"dir:{place / 'peers'}", **settings}
        wish = {"recipes": recipes, "settings": options, "all_buffers": all_buffers}
        with self.stderr.open("ab") as errors:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.rig.tensor_source", json.dumps(wish)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=env,
                cwd=ROOT,
            )
        self.peers: dict[str, dict[str, Any]] = self._answer()

    def _answer(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"it ended: {self.process.wait(10)}\n{self.stderr.read_text()}"
        return json.loads(line)

    def tell(self, do: str, recipe: str = "", **more: Any) -> Any:
        """Send a command, and wait for its answer."""
        self.send(do, recipe, **more)
        return self._answer()

    def send(self, do: str, recipe: str = "", **more: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"do": do, "recipe": recipe, **more}) + "\n")
        self.process.stdin.flush()

    def answer(self) -> Any:
        """The answer to what was sent."""
        return self._answer()

    def stop(self) -> None:
        """SIGSTOP; returns when it is stopped."""
        self.process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self.process.pid, os.WSTOPPED | os.WNOWAIT)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def end(self, do: str = "", **more: Any) -> int:
        """Its exit code after a last command, or the end of its stdin."""
        assert self.process.stdin is not None
        if do:
            self.send(do, **more)
        self.process.stdin.close()
        return self.process.wait(30)


@contextlib.contextmanager
def tensor_source(place: Path, *recipes: str, **settings: Any) -> Iterator[TensorSource]:
    source = TensorSource(place, *recipes, **settings)
    try:
        yield source
    finally:
        source.kill()


# --- the process, from inside ----------------------------------------------------------------------------------------


class Served:
    def __init__(self, text: str, settings: Mapping[str, Any]) -> None:
        import mx_cli

        self.source = recipe(text)
        self.handle = mx_cli.serve(self.source, **settings, **serve_options(text))

    def describe(self) -> dict[str, Any]:
        handle = self.handle
        return {
            "address": handle.address,
            "generation": handle.generation,
            "identities": handle.identities,
            "version": handle.version,
            "counts": handle.counts,
        }

    def fill(self, command: Mapping[str, Any]) -> None:
        self.source[command["name"]].fill_(command["value"])


def obey(served: Mapping[str, Served], command: Mapping[str, Any]) -> Any:
    do, one = command["do"], served.get(command["recipe"])
    if do == "exit":
        sys.exit(command["code"])
    if do == "raise":
        raise RuntimeError("as it was told")
    assert one is not None
    if do == "flip":
        # Behind torch's back, as damage is.
        address = one.source[command["name"]].data_ptr() + command["at"]
        ctypes.c_ubyte.from_address(address).value ^= 1
    elif do == "take away":
        one.source[command["name"]].untyped_storage().resize_(0)
    elif do == "update":
        with one.handle.update(command.get("wait", 30.0)):
            one.fill(command)
    elif do == "begin":
        # An update that stays open until `finish`.
        block = one.handle.update(command.get("wait", 30.0))
        block.__enter__()
        one.fill(command)
        one.block = block  # type: ignore[attr-defined]
    elif do == "finish":
        one.block.__exit__(None, None, None)  # type: ignore[attr-defined]
    elif do == "close":
        one.handle.close()
        one.handle.close()
    elif do != "describe":
        raise KeyError(do)
    return one.describe()


def main() -> None:
    wish = json.loads(sys.argv[1])
    settings = {**wish["settings"], "all_buffers": wish["all_buffers"]}
    served = {text: Served(text, settings) for text in wish["recipes"]}
    print(json.dumps({text: one.describe() for text, one in served.items()}), flush=True)
    for line in sys.stdin:
        print(json.dumps(obey(served, json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
