"""Path `disk`: files of this machine, read in the way that each piece of them likes best.

What is in the page cache is copied from there. What is not comes by O_DIRECT, past the page cache and straight into
place; from a network file system by large reads. Whether O_DIRECT works is found out by reading one block, not by opening;
a file whose direct read fails later is read through the page cache from there on.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from mx_cli.base import filesystem
from mx_cli.base.errors import IntegrityError, OriginChanged, StillLanding, TransportFailed
from mx_cli.base.oserrors import explain_reading
from mx_cli.engine.buffers import Pool, at_address, scatter
from mx_cli.engine.ports import Memory, ReadItem
from mx_cli.engine.threads import Flight
from mx_cli.model.holding import HOST, Holding
from mx_cli.model.manifest import Entry
from mx_cli.transport.inside import Inside
from mx_cli.transport.paths import HOT, LEAST_PART, ReadBuffers
from mx_cli.transport.peer import ITEM, Landed, not_told

BLOCK = 4096
"""Bytes: a multiple of every disk's block. Direct reads begin and end on multiples of it, in the file and in memory."""
LEAST_DIRECT = 64 << 10
"""Bytes: smaller pieces are read through the page cache, whose readahead serves their neighbours."""
MOSTLY = 0.75
LOCAL_READS, NETWORK_READS = 6, 8
LEAVE = 5.0
"""Seconds in which reads under way have to end when the files are closed: those of a mount that is dead never do."""


class Disk:
    """Files of a directory, open for as long as this path is: who removes or evicts them does not disturb it.

    `entries`: the files as they were listed, by path; one that has changed since is OriginChanged, as is one that changes
    while it is read. `notice` is told once when O_DIRECT does not work; `made` is shown the memory that bytes for a GPU
    come through. Thread-safe.
    """

    name = "disk"
    ahead = 0
    least_part = LEAST_PART

    def __init__(
        self,
        directory: Path,
        holding: Holding,
        entries: Mapping[str, Entry] | None = None,
        notice: Callable[[str], None] = lambda text: None,
        made: Callable[[Pool], None] = lambda pool: None,
    ) -> None:
        """Raises NotFound, FilesystemRefused, OriginChanged, IntegrityError for a file of another size."""
        self._directory = directory
        self.files: dict[str, OpenFile] = {}
        self._notice = notice
        self._noticed = threading.Lock()
        self._edges = threading.local()
        self._inside = Inside()
        try:
            for record in holding.manifest.files:
                entry = (entries or {}).get(record.path)
                self.files[record.path] = OpenFile(directory / record.path, record.size, entry)
        except BaseException:
            self.close()
            raise
        over_network = any(file.kind in filesystem.NETWORK for file in self.files.values())
        self.window = NETWORK_READS if over_network else LOCAL_READS
        self._buffers = ReadBuffers(self.window, made=made)
        self._bounce = ReadBuffers(self.window, ITEM + 2 * BLOCK)

    def bring(self, item: ReadItem, dest: Memory, flight: Flight, landed: Landed = not_told) -> None:
        """Into place directly where that is host memory, else through a buffer."""
        file = self.files[item.entry.path]
        before = 0

        def tell(count: int) -> None:
            landed(before + count)

        try:
            with self._inside.entered(item.entry.path), file.used():
                for offset, length, address in dest.parts:
                    if dest.device == HOST:
                        self._fill(file, item.offset + offset, address, length, flight, tell)
                        before += length
                    else:
                        self._through_buffer(file, item.offset + offset, offset, length, dest, flight)
                file.check()
        except OSError as error:
            raise explain_reading(error, f"reading {file.path}") from None

    def _through_buffer(self, file: OpenFile, at: int, offset: int, length: int, dest: Memory, flight: Flight) -> None:
        address = self.buffer()
        try:
            for done in range(0, length, ITEM):
                count = min(ITEM, length - done)
                self._fill(file, at + done, address, count, flight, not_told)
                scatter(dest, offset + done, at_address(address, count))
        finally:
            self.give_back(address)

    def _fill(self, file: OpenFile, at: int, address: int, length: int, flight: Flight, landed: Landed) -> None:
        """Bytes [at, at + length) of the file to `address`, in steps of ITEM, or of HOT through the page cache."""
        done = 0
        for begin in range(0, length, ITEM):
            end = min(begin + ITEM, length)
            if not flight.aborted and file.goes_direct(at + begin, end - begin):
                done += self._direct(file, at + begin, address + begin, end - begin)
            while done < end:
                if flight.aborted:
                    raise TransportFailed(f"{file.path}: given up")
                count = min(end - done, HOT)
                _through_cache(file, at + done, at_address(address + done, count))
                done += count
                landed(done)
            landed(done)

    # -- O_DIRECT ------------------------------------------------------------------------------------------------

    def _direct(self, file: OpenFile, at: int, address: int, length: int) -> int:
        """How many bytes came: fewer at the end of a file, and where O_DIRECT does not work after all."""
        edges = self._edge_blocks()
        try:
            fd = file.direct(edges[:BLOCK])
            if address % BLOCK == at % BLOCK:
                return _straight(fd, at, address, length, edges)
            return self._bounced(fd, at, address, length)
        except OSError as error:
            # What else is wrong with the file is told by the read through the page cache.
            file.takes_direct = False
            if self._noticed.acquire(blocking=False):
                self._notice(
                    f"{file.path}: O_DIRECT does not work here ({file.kind}: {error.strerror}): read through the page cache"
                )
            return 0

    def _bounced(self, fd: int, at: int, address: int, length: int) -> int:
        buffer = self._bounce.take()
        try:
            begin = at // BLOCK * BLOCK
            size = -(-(at + length) // BLOCK) * BLOCK - begin
            count = os.preadv(fd, [at_address(buffer, size)], begin)
            got = max(0, min(length, count - (at - begin)))
            if got:
                at_address(address, got)[:] = at_address(buffer + at - begin, got)
            return got
        finally:
            self._bounce.give_back(buffer)

    def _edge_blocks(self) -> memoryview:
        found: memoryview | None = getattr(self._edges, "view", None)
        if found is None:
            found = self._edges.view = memoryview(mmap.mmap(-1, 2 * BLOCK))
        return found

    def buffer(self) -> int:
        """See `Path.buffer`."""
        return self._buffers.take()

    def give_back(self, address: int) -> None:
        """See `Path.give_back`."""
        self._buffers.give_back(address)

    def close(self) -> None:
        """See `Path.close`. Reads that do not end keep their files open, and this object's buffers alive."""
        ended = self._inside.close(LEAVE)
        for file in self.files.values():
            file.close()
        if not ended:
            raise StillLanding(f"a read of {self._directory} has not ended {LEAVE:g} s after it was given up")


class OpenFile:
    """An open file, and what was found out about it."""

    def __init__(self, path: Path, size: int | None = None, entry: Entry | None = None) -> None:
        """`size` and `entry`: what is expected of it. Raises what `Disk` does."""
        self.path = path
        self._lock = threading.Lock()
        self._direct: int | None = None
        self._in_use = 0
        self._closed = False
        try:
            self.fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise explain_reading(error, f"opening {path}") from None
        self.kind = filesystem.kind(self.fd)
        self.takes_direct = self.kind not in filesystem.NETWORK | filesystem.IN_MEMORY
        status = os.fstat(self.fd)
        self.size = status.st_size
        self._state = (status.st_size, entry.validator if entry else filesystem.version(status))
        try:
            self.check()
            if size is not None and status.st_size != size:
                raise IntegrityError(f"{path}: {status.st_size} bytes, expected {size}")
        except BaseException:
            self.close()
            raise

    def check(self) -> None:
        """Raises OriginChanged unless the file is as it was."""
        status = os.fstat(self.fd)
        seen = (status.st_size, filesystem.version(status))
        if seen != self._state:
            raise OriginChanged(f"{self.path}: the file changed (expected {self._state}, observed {seen})")

    def goes_direct(self, at: int, length: int) -> bool:
        """Whether this piece is worth a read past the page cache."""
        if not self.takes_direct or length < LEAST_DIRECT:
            return False
        return filesystem.cached(self.fd, at, length) < MOSTLY * length

    def direct(self, block: memoryview) -> int:
        """The descriptor for direct reads, proved by one that fills `block`. Raises OSError."""
        with self._lock:
            if self._direct is None:
                fd = os.open(f"/proc/self/fd/{self.fd}", os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)
                try:
                    os.preadv(fd, [block], 0)
                except BaseException:
                    os.close(fd)
                    raise
                self._direct = fd
            return self._direct

    @contextlib.contextmanager
    def used(self) -> Iterator[None]:
        """While the block runs, `close` waits with closing: a number of a closed descriptor may be another file's."""
        with self._lock:
            if self._closed:
                raise TransportFailed(f"{self.path}: given up")
            self._in_use += 1
        try:
            yield
        finally:
            with self._lock:
                self._in_use -= 1
                self._release()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._release()

    def _release(self) -> None:
        if not self._closed or self._in_use:
            return
        for fd in (self.fd, self._direct):
            if fd is not None and fd >= 0:
                os.close(fd)
        self.fd, self._direct = -1, None


def _straight(fd: int, at: int, address: int, length: int, edges: memoryview) -> int:
    """Whole blocks to where they belong; what stands before and after them in theirs, by way of `edges`. Bytes that came."""
    head = -at % BLOCK
    middle = (length - head) // BLOCK * BLOCK
    tail = length - head - middle
    parts = [at_address(address + head, middle)]
    if head:
        parts.insert(0, edges[:BLOCK])
    if tail:
        parts.append(edges[BLOCK:])
    begin = at - (BLOCK - head if head else 0)
    got = max(0, min(length, os.preadv(fd, parts, begin) - (at - begin)))
    if head:
        at_address(address, head)[:] = edges[BLOCK - head : BLOCK]
    if tail:
        at_address(address + head + middle, tail)[:] = edges[BLOCK : BLOCK + tail]
    return got


def _through_cache(file: OpenFile, at: int, view: memoryview) -> None:
    done = 0
    while done < len(view):
        count = os.preadv(file.fd, [view[done:]], at + done)
        if count == 0:
            raise OriginChanged(f"{file.path}: the file ends at {at + done} bytes, before the end of a tensor")
        done += count
