"""A snapshot that is read while it is fetched: `load` and `stream` fill the cache in the same pass over the network."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import threading
from collections.abc import Sequence
from pathlib import Path

from mx_cli.base.cancel import Stop
from mx_cli.base.errors import IntegrityError, MxError, TransportFailed, Unreachable, UsageError
from mx_cli.base.oserrors import explain
from mx_cli.base.threads import begin
from mx_cli.engine.ports import ReadItem, SourceCaps
from mx_cli.flows.catalog import Catalog, catalog, catalog_of
from mx_cli.flows.context import Context
from mx_cli.flows.hash import is_local
from mx_cli.flows.prefetch import prefetch
from mx_cli.flows.request import Outcome, Request
from mx_cli.model.manifest import Entry, Listing
from mx_cli.plan.ranges import Span, merge
from mx_cli.sources.registry import OpenOrigin
from mx_cli.transport.peer import ITEM

READS = 8
JOIN = 10.0
LOOK_AGAIN = 1.0


class Fill:
    """A prefetch in a thread of its own. `catalog` tells what can be read, `finish` waits for the snapshot; a context manager.

    It is the origin of what it fetches: a read waits until the bytes are in the cache's file, and takes them from there.
    So every byte crosses the network once, by the usual election, and a slow consumer holds up nobody. `torn`: bytes that
    were handed out differ from those that were published.
    """

    caps = SourceCaps(READS, ITEM, "cache")

    def __init__(self, model: str, revision: str | None, context: Context) -> None:
        """Raises UsageError for a model that is here already."""
        if is_local(model):
            raise UsageError(f"{model} is on this machine: fill_cache is for a URI", hint="leave fill_cache out")
        self.uri, self.revision, self._context = model, revision or "", context
        self.torn = False
        self._process = os.getpid()
        self._stop = Stop()
        self._changed = threading.Condition()
        self._listing: Listing | None = None
        self._arriving: dict[str, _Arriving] = {}
        self._opened: list[int] = []
        self._outcome: Outcome | None = None
        self._failure: MxError | None = None
        self._ends = contextlib.ExitStack()
        self._thread = threading.Thread(target=self._fetch, name="fill-cache", daemon=True)

    def __enter__(self) -> Fill:
        begin(self._thread)
        self._ends.enter_context(self._stop.following(self._context.stop))
        return self

    def __exit__(self, *exc: object) -> None:
        if os.getpid() != self._process:
            # The thread and its connections are those of the process that this one was forked from.
            return
        self._stop.request(UsageError("the reader of what is fetched was closed"))
        self._ends.close()
        self._thread.join(JOIN)
        if not self._thread.is_alive():
            for fd in self._opened:
                os.close(fd)

    def _fetch(self) -> None:
        request = Request(self.uri, revision=self.revision or None)
        outcome, failure = None, None
        try:
            outcome = prefetch(request, dataclasses.replace(self._context, stop=self._stop), self)
        except MxError as error:
            failure = error
        except BaseException as bug:
            # Whoever waits must hear of it; the thread ends with it all the same.
            failure = TransportFailed(f"filling the cache: {type(bug).__name__}: {bug}")
            raise
        finally:
            with self._changed:
                self._outcome, self._failure = outcome, failure
                # What was begun here and published by another process: only the bytes that were published are right.
                for path in [path for path, file in self._arriving.items() if not file.whole]:
                    del self._arriving[path]
                    self.torn = True
                self._changed.notify_all()

    # -- what is asked of it -------------------------------------------------------------------------------------

    def catalog(self) -> tuple[Catalog, OpenOrigin]:
        """What is there or on its way, and the origin of it, which is closed with this one. Blocks until that is known.

        Raises what a prefetch raises.
        """
        with self._changed:
            while self._listing is None and self._outcome is None:
                self._check()
                self._changed.wait(LOOK_AGAIN)
            listing, outcome = self._listing, self._outcome
        if outcome is not None or listing is None:
            found, origin = catalog(str(self.finish()), None, self._context)
            self._ends.callback(origin.close)
            return found, origin
        return catalog_of(listing, self, None, self.patient()), self

    def finish(self) -> Path:
        """The snapshot's directory, once it is published: all was verified. Blocks; raises what a prefetch raises."""
        with self._changed:
            while self._outcome is None:
                self._check()
                self._changed.wait(LOOK_AGAIN)
            return self._outcome.directory

    def patient(self) -> Context:
        """The context for reading from here: the prefetch watches and retries the origin, so readers do not."""
        return self._context.with_settings(stall_timeout=float("inf"), retry_for=0.0, max_bandwidth=None)

    def _check(self) -> None:
        self._context.stop.check()
        if self._failure:
            raise self._failure

    # -- an origin -----------------------------------------------------------------------------------------------

    def open(self, item: ReadItem) -> _Stream:
        """See `Reader`."""
        return _Stream(self, item)

    def read(self, entry: Entry, limit: int) -> bytes:
        """See `OpenOrigin`."""
        size = entry.size or 0
        if size > limit:
            raise IntegrityError(f"{entry.path}: {size} bytes, expected at most {limit}")
        data = bytearray(size)
        stream, view = _Stream(self, ReadItem(entry, 0, size)), memoryview(data)
        while view and (count := stream.read_into(view)):
            view = view[count:]
        return bytes(data)

    def listing(self, revision: str | None, stop: Stop) -> Listing:
        """See `Origin`."""
        assert self._listing is not None, "there is one when somebody has this origin"
        return self._listing

    def close(self) -> None:
        """It is closed by its own block."""

    def wait_for(self, path: str, at: int, closed: threading.Event) -> tuple[int, int]:
        """(descriptor, end) of a run of bytes from `at` that is in place. Blocks; raises what the prefetch raises."""
        with self._changed:
            while True:
                self._check()
                if closed.is_set():
                    raise Unreachable(f"{path}: given up")
                file = self._arriving.get(path)
                if file is None and self._outcome is not None:
                    place = self._outcome.directory / path
                    file = self._arriving[path] = _Arriving(place, spans=[(0, place.stat().st_size)], whole=True)
                end = file.reach(at) if file else at
                if file and end > at:
                    return self._descriptor(file), end
                self._changed.wait(LOOK_AGAIN)

    def wake(self) -> None:
        """Look again at whether there is still something to wait for."""
        with self._changed:
            self._changed.notify_all()

    def _descriptor(self, file: _Arriving) -> int:
        if file.fd is None:
            file.fd = os.open(file.path, os.O_RDONLY | os.O_CLOEXEC)
            self._opened.append(file.fd)
        return file.fd

    # -- what the prefetch tells ---------------------------------------------------------------------------------

    def begins(self, listing: Listing) -> None:
        """See `Landing`."""
        with self._changed:
            self.torn = self.torn or (self._listing is not None and self._listing != listing)
            self._listing = listing
            self._changed.notify_all()

    def opened(self, entry: Entry, path: Path, fd: int, have: Sequence[Span]) -> None:
        """See `Landing`."""
        with self._changed:
            # Under its number here the file may be closed, and under its name replaced.
            own = os.dup(fd)
            self._opened.append(own)
            self._arriving[entry.path] = _Arriving(path, own, list(have))
            self._changed.notify_all()

    def placed(self, entry: Entry, offset: int, length: int) -> None:
        """See `Landing`."""
        with self._changed:
            file = self._arriving.get(entry.path)
            # A small file is gathered in memory first.
            if file:
                file.spans = merge([*file.spans, (offset, offset + length)])
                self._changed.notify_all()

    def complete(self, path: str, place: Path, size: int) -> None:
        """See `Landing`."""
        with self._changed:
            file = self._arriving.setdefault(path, _Arriving(place))
            file.spans, file.whole = [(0, size)], True
            self._changed.notify_all()

    def again(self, entry: Entry) -> None:
        """See `Landing`."""
        with self._changed:
            self.torn = self._arriving.pop(entry.path, None) is not None or self.torn


@dataclasses.dataclass(slots=True)
class _Arriving:
    """A file of which `spans` are in place; all of it is, and verified, once it is `whole`."""

    path: Path
    fd: int | None = None
    spans: list[Span] = dataclasses.field(default_factory=list)
    whole: bool = False

    def reach(self, at: int) -> int:
        """The end of the run of bytes from `at`."""
        return next((end for start, end in self.spans if start <= at < end), at)


class _Stream:
    """A piece of a file, as it comes."""

    def __init__(self, fill: Fill, item: ReadItem) -> None:
        self._fill, self._path, self._at, self._end = fill, item.entry.path, item.offset, item.end
        self._closed = threading.Event()

    def read_into(self, view: memoryview) -> int:
        want = len(view) if self._end is None else min(len(view), self._end - self._at)
        if want <= 0:
            return 0
        try:
            fd, end = self._fill.wait_for(self._path, self._at, self._closed)
            count = os.preadv(fd, [view[: min(want, end - self._at)]], self._at)
        except OSError as error:
            raise explain(error, f"reading {self._path} from the cache") from None
        if count == 0:
            raise IntegrityError(f"{self._path}: the cache's file is shorter than what was written into it")
        self._at += count
        return count

    def close(self) -> None:
        self._closed.set()
        self._fill.wake()
