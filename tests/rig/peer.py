"""A peer with a small checkpoint in memory, behind the real control channel: in this process, or as one of its own.

As a program: `python -m tests.rig.peer SECRETS_FILE TTL` prints its address and serves until it is ended.
"""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import xxhash

from mx_cli.base.address import join_address
from mx_cli.base.errors import NotFound
from mx_cli.model.holding import Holding, start_key
from mx_cli.model.manifest import FileRecord, Manifest
from mx_cli.transport import secret
from mx_cli.transport.connection import Limits
from mx_cli.transport.control import Control, is_data
from mx_cli.transport.door import Door
from mx_cli.transport.listen import listen
from mx_cli.transport.session import Session, dial
from tests.rig.checkpoints import noise

SECRET = b"the-secret-of-the-tests-0123456789"
FILE = "weights/ä model.safetensors"
TENSOR = "very.private.tensor.name"
BLOB = "blob-that-opens-the-process"
URI = "hf://private/name-of-the-model"
DATA = noise("peer", 5 << 20)


def holding(version: int = 0) -> Holding:
    """One file, one tensor of 4 MiB + 100 bytes that begins at byte 64."""
    size = (4 << 20) + 100
    blocks = tuple(xxhash.xxh3_128_hexdigest(DATA[at : min(at + (4 << 20), 64 + size)]) for at in (64, 64 + (4 << 20)))
    manifest = Manifest(
        URI,
        "0" * 40,
        "selection",
        1,
        "directory",
        (FileRecord(FILE, len(DATA), xxhash.xxh3_128_hexdigest(DATA)),),
        tensors=((FILE, TENSOR, "U8", (size,), blocks),),
    )
    return Holding(manifest, (), {start_key(FILE, TENSOR): 64}, version=version)


class MemoryHolder:
    """`before_piece` is called before each piece of a file that is read."""

    def __init__(self, generation: str = "mx-test-1-abc") -> None:
        self.generation = generation
        self.holding: Holding | None = holding()
        self.before_piece: Callable[[], object] = lambda: None

    def facts(self) -> dict[str, Any]:
        return {"device": "cpu"}

    def access(self, reader: Mapping[str, Any]) -> dict[str, Any]:
        return {"paths": ["nixl-read", "socket"], "nixl": {"name": self.generation, "blob": BLOB, "extents": []}}

    def read(self, file: str, offset: int, length: int) -> Iterator[memoryview]:
        if file != FILE:
            raise NotFound(f"no such file: {file}")
        end = offset + length
        for at in range(offset, end, 1 << 20):
            self.before_piece()
            yield memoryview(DATA)[at : min(end, at + (1 << 20))]


@dataclasses.dataclass
class Peer:
    """A peer that serves in this process. `bugs`: what its door was told of."""

    holder: MemoryHolder
    control: Control
    door: Door
    bugs: list[BaseException]

    @classmethod
    def start(
        cls,
        secrets: Callable[[], list[bytes]] = lambda: [SECRET],
        slots: int = 2,
        ttl: float = 30.0,
        limits: Limits | None = None,
        place: str = "127.0.0.1:0",
        **options: Any,
    ) -> Peer:
        holder = MemoryHolder()
        certificate = secret.make_certificate()
        control = Control(holder, secrets, certificate.sha256, slots, ttl, **options)
        bugs: list[BaseException] = []
        door = Door(listen(place), certificate.context, control.handle, is_data, bugs.append, bugs.append, limits)
        door.start()
        return cls(holder, control, door, bugs)

    @property
    def address(self) -> str:
        return join_address(*self.door.address)

    def dial(self, known: bytes = SECRET) -> Session:
        return dial(self.address, [known], 10.0, 20.0)

    def close(self) -> None:
        self.control.grants.close()
        self.door.close()


class PeerProcess:
    """The same in a process of its own, to be stopped and killed."""

    def __init__(self, secrets: Path, ttl: float) -> None:
        command = [sys.executable, "-m", "tests.rig.peer", str(secrets), str(ttl)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.address = self.process.stdout.readline().strip()

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


def main() -> None:
    path = Path(sys.argv[1])
    peer = Peer.start(lambda: secret.read_secrets(path), ttl=float(sys.argv[2]))
    print(peer.address, flush=True)
    threading.Event().wait()


if __name__ == "__main__":
    main()
