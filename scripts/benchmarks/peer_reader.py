"""The reading side of `scripts/bench peer`, a process of its own: what UCX read of its environment is for one transport.

`python -m scripts.benchmarks.peer_reader '{"what": "large", …}'` prints one JSON object: samples of each contender, taken
in turn, as [seconds, CPU seconds here, CPU seconds at the source].
"""

from __future__ import annotations

import base64
import itertools
import json
import os
import random
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import xxhash

from mx_cli.base.cancel import Stop
from mx_cli.base.config import resolve
from mx_cli.engine.buffers import Pool, at_address
from mx_cli.engine.many import Bell
from mx_cli.flows.context import Context
from mx_cli.flows.data_path import Wish
from mx_cli.flows.peering import Peering
from mx_cli.flows.pull_memory import compare as compare_tables
from mx_cli.flows.pull_memory import move, pieces_to_read, table
from mx_cli.model.holding import HOST, Extent, Extents, Holding, joined
from mx_cli.model.manifest import BLOCK
from mx_cli.sinks.host import MemorySink
from mx_cli.transport.nixl import Agent, Network, Read, rows
from mx_cli.transport.paths import extents_of
from mx_cli.transport.secret import client_context
from mx_cli.transport.session import Grant, Queued

PAGE = 4096

Sample = tuple[float, float, float]


def main() -> None:
    given = json.loads(sys.argv[1])
    print(json.dumps(WHAT[given.pop("what")](**given)))


def cpu_of(pid: int) -> float:
    """CPU seconds of a live process so far, over all its threads, those that ended included."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    ended_too = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    living = 0.0
    for task in Path(f"/proc/{pid}/task").iterdir():
        living += int((task / "schedstat").read_text().split()[0]) / 1e9
    return max(ended_too, living)


@contextmanager
def measured(pid: int) -> Iterator[list[float]]:
    """[seconds, CPU here, CPU of `pid`] of the block; seconds may be put in by the block itself."""
    found: list[float] = []
    here, there, start = time.process_time(), cpu_of(pid), time.perf_counter()
    yield found
    seconds = time.perf_counter() - start
    found[:] = [found[0] if found else seconds, time.process_time() - here, cpu_of(pid) - there]


def in_turn(runs: int, contenders: dict[str, Callable[[], Sample]]) -> dict[str, list[Sample]]:
    """Each once and then again. The first round warms up, and does not count."""
    found: dict[str, list[Sample]] = {name: [] for name in contenders}
    for number in range(runs + 1):
        for name, take in contenders.items():
            sample = take()
            print(f"  {name}: {sample[0]:.3f} s, CPU {sample[1]:.2f} + {sample[2]:.2f} s", file=sys.stderr)
            if number:
                found[name].append(sample)
    return found


def make_context() -> Context:
    return Context(resolve({}), Stop(), lambda event: None)


class Target:
    """Touched memory for the tensors of a holding: in the order of the file, or each somewhere else."""

    def __init__(self, holding: Holding, *, scattered: bool) -> None:
        tensors = holding.tensors
        slots = list(range(len(tensors)))
        if scattered:
            random.Random(7).shuffle(slots)
        sizes = [tensor.size for tensor in tensors]
        if scattered:
            # A slot is one page larger than a tensor, so that no two neighbours touch.
            stride = -(-max(sizes) // PAGE) * PAGE + PAGE
            self.pool = Pool(stride * len(tensors))
            offsets = [slot * stride for slot in slots]
        else:
            *offsets, total = itertools.accumulate(sizes, initial=0)
            self.pool = Pool(total)
        self.size = sum(sizes)
        self.extents = [
            Extent(tensor.file, tensor.start, tensor.size, self.pool.address + offset)
            for tensor, offset in zip(tensors, offsets, strict=True)
        ]

    def clear(self) -> None:
        self.pool.view[: 1 << 20] = bytes(1 << 20)

    def check(self, holding: Holding) -> None:
        """Raises RuntimeError unless every block is right."""
        for tensor, extent in zip(holding.tensors, self.extents, strict=True):
            for index, expected in enumerate(tensor.blocks):
                at = index * BLOCK
                view = at_address(extent.address + at, min(BLOCK, extent.length - at))
                if xxhash.xxh3_128_hexdigest(view) != expected:
                    raise RuntimeError(f"wrong bytes in {tensor.name}")


class Mx:
    """Verified pulls by the parts that `mx pull` uses, and raw READs from the same peer."""

    def __init__(self, address: str, identity: str, pid: int) -> None:
        self.address, self.identity, self.pid = address, identity, pid
        self.reasons: set[str] = set()

    @contextmanager
    def peering(self, path: str) -> Iterator[Peering]:
        peering = Peering(make_context(), [self.identity], Wish((self.address,), path))
        try:
            peering.find(0)
            yield peering
        finally:
            peering.close()

    def holding(self) -> Holding:
        with self.peering("auto") as peering:
            assert peering.group is not None
            return peering.group.holding

    def pull(self, path: str, target: Target) -> Sample:
        """From the first read to the last verified block."""
        with self.peering(path) as peering:
            assert peering.group is not None
            bell = Bell()
            members = peering.members(bell, [(target.pool.address, target.pool.size, HOST)])
            self.reasons |= {f"{peer.path}: {peer.reason}" for peer in peering.group.peers}
            target.clear()
            with measured(self.pid) as found:
                moved = move(peering.group.holding, joined(target.extents), members, bell, make_context(), target.pool)
                found.append(moved.seconds)
            if not all(member.alive for member in members):
                raise RuntimeError("the peer was left")
            return found[0], found[1], found[2]

    def raw(self, target: Target) -> Sample:
        """One READ of the same list: no pieces, no digests."""
        with self.peering("nixl-read") as peering:
            assert peering.group is not None
            peer = peering.group.peers[0]
            grant = _granted(peer.session.grant({"host": "bench", "pid": os.getpid()}))
            capability = grant.access["nixl"]
            agent = Agent(f"raw-{time.time_ns():x}", Network(loopback=True))
            agent.register([(target.pool.address, target.pool.size, HOST)])
            name = str(capability["name"])
            agent.connect(base64.b64decode(capability["blob"]), name, str(capability["digest"]))
            theirs = Extents(extents_of(capability))
            own: list[int] = []
            remote: list[int] = []
            lengths: list[int] = []
            for extent in target.extents:
                for run in theirs.cut(extent.file, extent.offset, extent.end):
                    own.append(extent.address + run.offset - extent.offset)
                    remote.append(run.address)
                    lengths.append(run.length)
            first = agent.read(name, rows(own[:1], [PAGE]), rows(remote[:1], [PAGE]))
            _finish(first)
            read = agent.read(name, rows(own, lengths), rows(remote, lengths))
            target.clear()
            with measured(self.pid) as found:
                start = time.perf_counter()
                read.post()
                while not read.done():
                    time.sleep(0.0002)
                found.append(time.perf_counter() - start)
            read.release()
            agent.destroy()
            grant.release()
            return found[0], found[1], found[2]


def _granted(answer: Grant | Queued) -> Grant:
    assert isinstance(answer, Grant), "the bench never holds all slots"
    return answer


def _finish(read: Read) -> None:
    read.post()
    while not read.done():
        time.sleep(0.0002)
    read.release()


class Plain:
    """One connection to a process that sends the same number of bytes out of touched memory."""

    def __init__(self, size: int) -> None:
        self._size = size
        command = [sys.executable, "-m", "scripts.benchmarks.plain_sender", str(size)]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        self._ports = json.loads(self._process.stdout.readline())
        self._context = client_context()

    def read(self, kind: str, pool: Pool) -> Sample:
        plain = socket.create_connection(("127.0.0.1", self._ports[kind]))
        sock = self._context.wrap_socket(plain) if kind == "tls" else plain
        with sock, measured(self._process.pid) as found:
            sock.sendall(b"!")
            start = time.perf_counter()
            view = pool.view[: self._size]
            at = 0
            while at < self._size:
                count = sock.recv_into(view[at : at + BLOCK])
                if count == 0:
                    raise RuntimeError("the plain sender broke off")
                at += count
            found.append(time.perf_counter() - start)
        return found[0], found[1], found[2]

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


def compare(address: str, identity: str, pid: int, runs: int, scattered: bool, baselines: bool) -> dict[str, Any]:
    """`mx` by both paths beside a raw READ and, with `baselines`, memcpy and one plain connection."""
    mx = Mx(address, identity, pid)
    holding = mx.holding()
    target = Target(holding, scattered=scattered)
    contenders: dict[str, Callable[[], Sample]] = {
        "nixl-read": lambda: mx.pull("nixl-read", target),
        "raw READ": lambda: mx.raw(target),
    }
    plain = None
    if baselines:
        other = Pool(target.pool.size)
        plain = Plain(target.size)
        contenders |= {
            "socket": lambda: mx.pull("socket", target),
            "plain TLS": lambda: plain.read("tls", other),
            "plain TCP": lambda: plain.read("tcp", other),
            "memcpy": lambda: _memcpy(target, other),
        }
    try:
        samples = in_turn(runs, contenders)
    finally:
        if plain:
            plain.close()
    mx.raw(target)
    target.check(holding)
    return {"samples": samples, "bytes": target.size, "reasons": sorted(mx.reasons)}


def _memcpy(target: Target, other: Pool) -> Sample:
    import numpy as np

    one, two = np.frombuffer(target.pool.view, np.uint8), np.frombuffer(other.view, np.uint8)
    here, start = time.process_time(), time.perf_counter()
    np.copyto(two[: target.size], one[: target.size])
    return time.perf_counter() - start, time.process_time() - here, 0.0


def prepare(address: str, identity: str, pid: int, runs: int) -> dict[str, Any]:
    """Seconds of what comes before the first read: control, plan, registration; NIXL's own start apart."""
    found: list[dict[str, float]] = []
    for _ in range(runs + 1):
        clock = _Clock()
        context = make_context()
        peering = Peering(context, [identity], Wish((address,), "nixl-read"))
        group = peering.find(0)
        clock.mark("control")
        target = Target(group.holding, scattered=True)
        clock.mark("memory")
        agent = Agent(f"prepare-{time.time_ns():x}", Network(loopback=True))
        agent.register([])
        agent.blob()
        clock.mark("start")
        agent.register([(target.pool.address, target.pool.size, HOST)])
        clock.mark("registration")
        peer = group.peers[0]
        grant = _granted(peer.session.grant({"host": "bench", "pid": os.getpid()}))
        Extents(extents_of(grant.access["nixl"]))
        clock.mark("control")
        compare_tables(group.holding, table(group.holding))
        targets = joined(target.extents)
        MemorySink(targets)
        pieces_to_read(group.holding, targets, {})
        clock.mark("plan")
        grant.release()
        agent.destroy()
        peering.close()
        found.append(clock.seconds)
    return {"seconds": found[1:]}


class _Clock:
    """Wall seconds of phases, and the CPU seconds of this process under `CPU of` the phase."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._at, self._cpu = time.perf_counter(), time.process_time()

    def mark(self, phase: str) -> None:
        now, cpu = time.perf_counter(), time.process_time()
        for name, taken in ((phase, now - self._at), (f"CPU of {phase}", cpu - self._cpu)):
            self.seconds[name] = self.seconds.get(name, 0.0) + taken
        self._at, self._cpu = now, cpu


def manifest(address: str, identity: str, pid: int, runs: int) -> dict[str, Any]:
    """Seconds from the request for a manifest to a holding; the first makes the peer pack it."""
    seconds: list[float] = []
    count = 0
    for _ in range(runs + 1):
        peering = Peering(make_context(), [identity], Wish((address,)))
        start = time.perf_counter()
        count = len(peering.find(0).holding.tensors)
        seconds.append(time.perf_counter() - start)
        peering.close()
    return {"first": seconds[0], "again": seconds[1:], "tensors": count}


WHAT: dict[str, Callable[..., dict[str, Any]]] = {"compare": compare, "prepare": prepare, "manifest": manifest}


if __name__ == "__main__":
    main()
