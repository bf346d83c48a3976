"""One contender, once, in a process of its own: `python -m scripts.benchmarks.load_reader '{"who": …, "files": […]}'`.

Prints a line of JSON: seconds until all was there and touched, until the first tensor, CPU, memory beside what the
libraries take, bytes, and a sum over the bytes that were touched. Runs in this package's environment, or in one that has
the peers.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import queue
import resource
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy
import torch

Tensors = Iterator[tuple[str, Any]]
DIRECT_THREADS, DIRECT_STEP = 4, 8 << 20
HUGE = 2 << 20


def mx_load(given: dict[str, Any]) -> Tensors:
    import mx_cli

    for model in given["models"]:
        yield from mx_cli.load(model, **given.get("options", {})).items()


def mx_stream(given: dict[str, Any]) -> Tensors:
    import mx_cli

    for model in given["models"]:
        yield from mx_cli.stream(model, **given.get("options", {}))


def safetensors_load(given: dict[str, Any]) -> Tensors:
    from safetensors.torch import load_file

    for file in given["files"]:
        yield from load_file(file, **given.get("options", {})).items()


def safetensors_open(given: dict[str, Any]) -> Tensors:
    from safetensors import safe_open

    for path in given["files"]:
        with safe_open(path, framework="pt") as file:
            for name in file.offset_keys():
                yield name, file.get_tensor(name)


def runai(given: dict[str, Any]) -> Tensors:
    from runai_model_streamer import SafetensorsStreamer

    with SafetensorsStreamer() as streamer:
        streamer.stream_files(given["urls"], device="cpu", **given.get("options", {}))
        yield from streamer.get_tensors()


def fastsafetensors(given: dict[str, Any]) -> Tensors:
    from fastsafetensors import SafeTensorsFileLoader, SingleGroup

    loader = SafeTensorsFileLoader(SingleGroup(), torch.device("cpu"), nogds=True)
    loader.add_filenames({0: given["files"]})
    buffer = loader.copy_files_to_device()
    for name in loader.get_keys():
        yield name, buffer.get_tensor(name)


def address(buffer: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer))


def direct(given: dict[str, Any]) -> Tensors:
    """No loader: what O_DIRECT gives, into buffers that are read over."""
    work: queue.SimpleQueue[tuple[str, int]] = queue.SimpleQueue()
    for file in given["files"]:
        for at in range(0, os.path.getsize(file), DIRECT_STEP):
            work.put((file, at))

    def read() -> None:
        buffer = mmap.mmap(-1, DIRECT_STEP + HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        buffer.madvise(mmap.MADV_HUGEPAGE)
        view = memoryview(buffer)
        view = view[-address(buffer) % HUGE :][:DIRECT_STEP]
        fds = {file: os.open(file, os.O_RDONLY | os.O_DIRECT) for file in given["files"]}
        while True:
            try:
                file, at = work.get_nowait()
            except queue.Empty:
                return
            os.preadv(fds[file], [view], at)

    threads = [threading.Thread(target=read) for _ in range(DIRECT_THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    yield from ()


WHO: dict[str, tuple[Callable[[dict[str, Any]], Tensors], str]] = {
    "mx_load": (mx_load, "mx_cli"),
    "mx_stream": (mx_stream, "mx_cli"),
    "safetensors_load": (safetensors_load, "safetensors.torch"),
    "safetensors_open": (safetensors_open, "safetensors.torch"),
    "runai": (runai, "runai_model_streamer"),
    "fastsafetensors": (fastsafetensors, "fastsafetensors"),
    "direct": (direct, "os"),
}


def warm(files: Sequence[str]) -> None:
    buffer = bytearray(4 << 20)
    for path in files:
        with open(path, "rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


def evict(files: Sequence[str]) -> None:
    """Where a virtual machine gives free memory back to its host, taking it again costs more than the read: what was cached
    just now is free and warm for everybody."""
    warm(files)
    for path in files:
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fdatasync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


def _memory(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name):
            return int(line.split()[1]) << 10
    return 0


def _touch(tensor: Any) -> int:
    data = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    return int(data[::4096].sum(dtype=numpy.int64)) if data.size else 0


def _cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def main() -> None:
    given = json.loads(sys.argv[1])
    tensors, module = WHO[given["who"]]
    __import__(module)
    if given["who"].startswith("mx"):
        import mx_cli

        # What a process imports at its first call is no part of reading.
        mx_cli.load(given["warm_up"])
    (evict if given["cold"] else warm)(given["files"])
    Path("/proc/self/clear_refs").write_text("5")
    before, cpu, start = _memory("VmRSS"), _cpu(), time.perf_counter()
    kept, size, seen, first = [], 0, 0, None
    for _, tensor in tensors(given):
        if first is None:
            first = time.perf_counter() - start
        size += tensor.numel() * tensor.element_size()
        if given["keep"]:
            kept.append(tensor)
        else:
            seen += _touch(tensor)
    seen += sum(map(_touch, kept))
    seconds = time.perf_counter() - start
    print(
        json.dumps(
            {
                "seconds": seconds,
                "first": first,
                "cpu": _cpu() - cpu,
                "rss": _memory("VmHWM") - before,
                "bytes": size,
                "seen": seen,
            }
        ),
        flush=True,
    )
    os._exit(0)


if __name__ == "__main__":
    main()
