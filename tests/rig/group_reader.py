"""Processes of one gloo group that load a model together: `group_load(place, 2, model)` gives what each said in the end."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.rig.capabilities import PATH

ROOT = Path(__file__).parents[2]


class Group:
    """`ranks` are the processes; each prints `there` when the group stands, and at the end what came of it."""

    def __init__(
        self,
        place: Path,
        size: int,
        model: str,
        env: Mapping[str, str] | None = None,
        odd: Any = None,
        keys: str = "",
        **arguments: Any,
    ) -> None:
        """`odd`: {rank: other arguments of that rank}. `keys`: a variable that is `rank0`, `rank1`, … for each of them."""
        place.mkdir(parents=True, exist_ok=True)
        self.ranks: list[subprocess.Popen[str]] = []
        for rank in range(size):
            mine = {**arguments, **(odd or {}).get(rank, {})}
            wish = {"rank": rank, "size": size, "store": str(place / "store"), "model": model, "arguments": mine}
            around = {"PATH": PATH, "HOME": str(place), "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo"}
            around |= {"MX_CACHE_DIR": str(place / "cache"), "OMP_NUM_THREADS": "1"}
            own = {keys: f"rank{rank}"} if keys else {}
            with (place / f"{rank}.err").open("w") as errors:
                self.ranks.append(
                    subprocess.Popen(
                        [sys.executable, "-m", "tests.rig.group_reader", json.dumps(wish)],
                        stdout=subprocess.PIPE,
                        stderr=errors,
                        text=True,
                        env={**around, **(env or {}), **own},
                        cwd=ROOT,
                    )
                )
        self._place = place

    def line(self, rank: int) -> dict[str, Any]:
        """The next line of a rank."""
        out = self.ranks[rank].stdout
        assert out is not None
        text = out.readline()
        assert text, (self._place / f"{rank}.err").read_text()
        found: dict[str, Any] = json.loads(text)
        return found

    def wait_there(self) -> None:
        for rank in range(len(self.ranks)):
            assert self.line(rank) == {"there": rank}

    def __enter__(self) -> Group:
        return self

    def __exit__(self, *exc: object) -> None:
        for process in self.ranks:
            process.kill()
            process.wait()
            if process.stdout:
                process.stdout.close()


def group_load(place: Path, size: int, model: str, **arguments: Any) -> list[dict[str, Any]]:
    """What each rank says in the end: `sha256` of all tensors, or `error` and `what`."""
    with Group(place, size, model, **arguments) as group:
        group.wait_there()
        return [group.line(rank) for rank in range(size)]


def digest(tensors: Mapping[str, Any]) -> str:
    """SHA-256 over the names, shapes and bytes."""
    import torch

    found = hashlib.sha256()
    for name in sorted(tensors):
        found.update(f"{name} {tensors[name].dtype} {tuple(tensors[name].shape)}".encode())
        found.update(tensors[name].contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def main() -> None:
    from torch import distributed

    import mx_cli
    from mx_cli.base.errors import MxError

    wish = json.loads(sys.argv[1])
    rank, size = wish["rank"], wish["size"]
    distributed.init_process_group("gloo", init_method=f"file://{wish['store']}", rank=rank, world_size=size)
    print(json.dumps({"there": rank}), flush=True)
    try:
        tensors = mx_cli.load(wish["model"], group=distributed.group.WORLD, **wish["arguments"])
        said = {"sha256": digest(tensors)}
    except MxError as error:
        said = {"error": type(error).__name__, "what": error.what}
    print(json.dumps(said), flush=True)


if __name__ == "__main__":
    main()
