"""A process group of torch: whether all are ready, and bytes from one to all. No rank waits for ever for another."""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from mx_cli.base.errors import MxError, TransportFailed, UsageError
from mx_cli.model.holding import HOST

BEAT = 1.0
"""Seconds after which a rank that is not ready says so: who says nothing for the group's patience is lost."""
ARRIVAL = 600.0
"""Seconds in which all ranks have to come to the first step."""
BUSY, READY, FAILED = 0, 1, 2
MESSAGE = 1024
BUCKET = 64 << 20
_HOST_BACKENDS = ("gloo", "mpi")


class Collective:
    """The ranks of `group`; `device` is where the bytes are. Every call must be made by all ranks, in the same order.

    `patience`: seconds for each step, in which the slowest of the others has to answer. NCCL ends the process instead when
    its own timeout is over. After an error the group must not be used for anything.
    """

    def __init__(self, group: Any, device: int, patience: float) -> None:
        """Raises UsageError for what is no group that this process is in, or one that cannot move these bytes."""
        import torch
        from torch import distributed

        if not distributed.is_available() or not distributed.is_initialized():
            raise UsageError("a group without torch.distributed", hint="init_process_group first")
        try:
            self.rank = distributed.get_rank(group)
        except (ValueError, TypeError, RuntimeError):
            kind = type(group).__name__
            raise UsageError(f"not a group of this process: {kind}", hint="of a DeviceMesh: mesh.get_group()") from None
        if self.rank < 0:
            raise UsageError("this process is not in the group")
        self.size = distributed.get_world_size(group)
        self._group, self._patience = group, datetime.timedelta(seconds=patience)
        backends = dict(pair.split(":") for pair in distributed.get_backend_config(group).split(",") if ":" in pair)
        kind = "cpu" if device == HOST else "cuda"
        if kind not in backends:
            raise UsageError(
                f"the group moves no bytes of {kind} (backends: {', '.join(sorted(backends)) or 'none'})",
                hint="gloo for the CPU, nccl for GPUs",
            )
        # What ranks say to each other goes by the host where it can: there a rank that is lost has a name.
        self._by_host = backends.get("cpu") in _HOST_BACKENDS
        gpu = torch.cuda.current_device() if device == HOST and not self._by_host else device
        self._talk = torch.device("cpu") if self._by_host else torch.device("cuda", gpu)
        self._bytes = torch.device("cpu") if device == HOST else torch.device("cuda", device)

    # -- what all must know --------------------------------------------------------------------------------------

    def agree(self, ready: Callable[[float], bool]) -> None:
        """Return when `ready` is true on all ranks; it waits for as many seconds as it is given, at most.

        Raises what this rank's `ready` raised, or TransportFailed naming the rank whose did, or that is lost.
        """
        while True:
            failure: MxError | None = None
            state = FAILED
            try:
                state = READY if ready(BEAT) else BUSY
            except MxError as error:
                failure = error
            states = self._tell(state)
            lost = [rank for rank, said in enumerate(states) if said == FAILED]
            if lost:
                message = self._message(lost[0], failure)
                raise failure or TransportFailed(f"rank {lost[0]} of the group failed: {message}")
            if all(said == READY for said in states):
                return

    def same(self, value: int, what: str) -> None:
        """Raise UsageError on all ranks unless all have the same value (less than 2**63). Waits for ranks that come late."""
        patience, self._patience = self._patience, datetime.timedelta(seconds=ARRIVAL)
        values = self._tell(value)
        self._patience = patience
        other = next((rank for rank, said in enumerate(values) if said != values[0]), None)
        if other is not None:
            raise UsageError(f"the ranks of the group differ in {what} (rank {other} from rank 0)")

    def _tell(self, value: int) -> list[int]:
        """One number of each rank."""
        return self._tell_each(value) if self._by_host else self._tell_all(value)

    def _tell_all(self, value: int) -> list[int]:
        import torch
        from torch import distributed

        own = torch.tensor([value], dtype=torch.int64, device=self._talk)
        found = [torch.zeros_like(own) for _ in range(self.size)]
        with self._watched("a word from all ranks"):
            self._wait(distributed.all_gather(found, own, group=self._group, async_op=True))
        return [int(one.item()) for one in found]

    def _tell_each(self, value: int) -> list[int]:
        """From each to each, so that who does not answer has a name."""
        import torch
        from torch import distributed

        own = torch.tensor([value], dtype=torch.int64)
        found = [own.clone() for _ in range(self.size)]
        others = [rank for rank in range(self.size) if rank != self.rank]
        works: list[tuple[int, Any]] = []
        lost: dict[int, str] = {}
        for rank in others:
            try:
                works.append((rank, distributed.isend(own, group=self._group, group_dst=rank)))
                works.append((rank, distributed.irecv(found[rank], group=self._group, group_src=rank)))
            except RuntimeError as error:
                lost[rank] = _first_line(error)
        end = time.monotonic() + self._patience.total_seconds()
        for rank, work in works:
            try:
                left = max(0.001, end - time.monotonic())
                if work is not None and rank not in lost:
                    work.wait(datetime.timedelta(seconds=left))
            except RuntimeError as error:
                lost[rank] = _first_line(error)
        if lost:
            names = ", ".join(map(str, sorted(lost)))
            why = next(iter(lost.values()))
            raise TransportFailed(f"the group lost rank{'s' if len(lost) > 1 else ''} {names} ({why})")
        return [int(one.item()) for one in found]

    def _message(self, rank: int, failure: MxError | None) -> str:
        text = (failure.what if failure else "").encode()[:MESSAGE]
        return self.share(text.ljust(MESSAGE), rank, MESSAGE).decode(errors="replace").rstrip()

    # -- bytes ---------------------------------------------------------------------------------------------------

    def share(self, data: bytes, source: int, size: int | None = None) -> bytes:
        """Bytes that rank `source` has, on all ranks. `size`: where all know it."""
        import torch

        if size is None:
            size = self._tell(len(data))[source]
        if self.rank == source:
            found = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(self._talk)
        else:
            found = torch.empty(size, dtype=torch.uint8, device=self._talk)
        for at in range(0, size, BUCKET):
            self.broadcast([(source, found[at : at + BUCKET])])
        return bytes(found.cpu().numpy().tobytes())

    def broadcast(self, pieces: Sequence[tuple[int, Any]]) -> None:
        """Each (rank, tensor of bytes) of the pieces from that rank into the tensors of the others, all at once."""
        from torch import distributed

        with self._watched(f"bytes of rank {', '.join(str(rank) for rank, _ in pieces)}"):
            works = [
                distributed.broadcast(piece, group=self._group, group_src=rank, async_op=True)
                for rank, piece in pieces
                if piece.numel()
            ]
            for work in works:
                self._wait(work)

    def piece(self, size: int, own: memoryview | None) -> Any:
        """A tensor to broadcast from (`own` bytes of this rank) or into, where ranks talk to each other."""
        import torch

        if own is None:
            return torch.empty(size, dtype=torch.uint8, device=self._talk)
        return torch.frombuffer(own, dtype=torch.uint8).to(self._talk)

    def view(self, piece: Any) -> memoryview:
        """The bytes of a piece in host memory, which the caller keeps."""
        return memoryview(piece.cpu().numpy()).cast("B")

    def _wait(self, work: Any) -> None:
        if work is not None:
            work.wait(self._patience)

    @contextmanager
    def _watched(self, what: str) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise TransportFailed(f"the group lost a rank while {what} were awaited ({_first_line(error)})") from None


def _first_line(error: RuntimeError) -> str:
    return (str(error).splitlines() or [""])[0][:200]
