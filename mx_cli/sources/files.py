"""A directory or a file on this machine, or on whatever is mounted here."""

from __future__ import annotations

import errno
import os
import re
import stat
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

from mx_cli.base.cancel import Stop
from mx_cli.base.errors import FilesystemRefused, MxError, NotFound, OriginChanged, Unreachable, UsageError
from mx_cli.base.filesystem import version
from mx_cli.base.oserrors import explain_reading
from mx_cli.engine.ports import ReadItem, SourceCaps
from mx_cli.model.manifest import Entry, Listing, revision_of
from mx_cli.sources.origin import Context, Named, at_revision, no_versions, read_small
from mx_cli.sources.uri import Uri

LEFT_OUT = frozenset({".cache", ".git", "lost+found"})
_GONE = frozenset({errno.ENOENT, errno.ENOTDIR})
_SMALL = 1 << 20
_MOST_NAMES = 100
"""Of one directory: links that lead to directories of links have without end."""
_HUB_BLOB = re.compile(r"blobs/([0-9a-f]{64})$")


class Files(Named):
    """Lists a directory with what is below it, or one file. Symlinks count as what they lead to."""

    def __init__(self, uri: Uri, context: Context) -> None:
        no_versions(context, uri.shown)
        super().__init__(uri, context)
        self._names: Counter[tuple[int, int]] = Counter()

    @property
    def caps(self) -> SourceCaps:
        settings = self._context.settings
        return SourceCaps(settings.max_connections, settings.range_size, "file")

    def listing(self, revision: str | None, stop: Stop) -> Listing:
        """See `Origin.listing`. The revision is that of paths, sizes and modification times in ns."""
        root = self._uri.path
        status = self._stat(root)
        if stat.S_ISDIR(status.st_mode):
            self._names.clear()
            found = tuple(self._walk(root, "", frozenset({(status.st_dev, status.st_ino)}), stop))
            if not found:
                raise NotFound(f"{self._uri.shown}: no files in this directory (looked in {root} and below)")
        elif not stat.S_ISREG(status.st_mode):
            raise NotFound(f"{root}: neither a file nor a directory")
        elif self._uri.folder:
            raise NotFound(f"{self._uri.shown}: a file, not a directory")
        else:
            if not is_unicode(root):
                raise UsageError(f"{root!r}: a file name that is not Unicode")
            found = (_entry(os.path.basename(root), root, status),)
        files = tuple(sorted(found, key=lambda entry: os.fsencode(entry.path)))
        rows = [replace(entry, validator=entry.validator.partition("-")[0]) for entry in files]
        return at_revision(Listing(self.uri, revision_of(rows), files), revision, self._uri.shown)

    def _stat(self, path: str) -> os.stat_result:
        try:
            return os.stat(path)
        except OSError as error:
            raise _explain(error, path, self._uri.shown) from None

    def _walk(self, directory: str, prefix: str, above: frozenset[tuple[int, int]], stop: Stop) -> Iterator[Entry]:
        """What is below a directory. What cannot be read is listed with the reason: perhaps nobody wants it."""
        stop.check()
        try:
            names = sorted(os.listdir(directory))
        except OSError as error:
            refusal = _explain(error, directory, self._uri.shown)
            if not prefix or isinstance(refusal, Unreachable):
                raise refusal from None
            yield _refused(f"{prefix}*", refusal)
            return
        for name in names:
            if name in LEFT_OUT or name.endswith(".incomplete"):
                continue
            path, shown = os.path.join(directory, name), prefix + name
            try:
                if not is_unicode(name):
                    shown = prefix + os.fsencode(name).decode("utf-8", "backslashreplace")
                    raise UsageError(f"{path!r}: a file name that is not Unicode")
                status = self._stat(path)
                found = _entry(shown, path, status) if stat.S_ISREG(status.st_mode) else None
                place = (status.st_dev, status.st_ino)
                if stat.S_ISDIR(status.st_mode):
                    self._look_for_circles(path, place, above)
            except Unreachable:
                raise
            except _Endless as refusal:
                yield _refused(f"{shown}/*", refusal)
                continue
            except MxError as refusal:
                # What went away meanwhile is not there.
                if os.path.lexists(path):
                    yield _refused(shown, refusal)
                continue
            if found:
                yield found
            elif stat.S_ISDIR(status.st_mode):
                yield from self._walk(path, f"{shown}/", above | {place}, stop)

    def _look_for_circles(self, path: str, place: tuple[int, int], above: frozenset[tuple[int, int]]) -> None:
        if place in above:
            raise _Endless(f"{path}: a symlink that leads back into its own parents")
        self._names[place] += 1
        if self._names[place] > _MOST_NAMES:
            raise _Endless(f"{path}: more than {_MOST_NAMES} names lead to this directory, through symlinks")

    def open(self, item: ReadItem) -> FileStream:
        """See `Reader.open`."""
        path = item.entry.key
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            raise _explain(error, path, item.entry.path) from None
        if item.length is not None and item.length <= _SMALL and item.length < (item.entry.size or 0):
            # Of a piece that small the rest of the file is not wanted soon: no readahead.
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
        stream = FileStream(fd, item)
        try:
            stream.check()
        except BaseException:
            stream.close()
            raise
        return stream

    def read(self, entry: Entry, limit: int) -> bytes:
        """A small file, whole. IntegrityError above `limit` bytes."""
        return read_small(self, entry, limit, self._context)

    def close(self) -> None:
        """Nothing is kept open between reads."""


class _Endless(FilesystemRefused):
    """A directory that its own links would have listed for ever."""


class FileStream:
    """The bytes of a piece of a file; when its last byte was read, the file must be as it was when listed."""

    def __init__(self, fd: int, item: ReadItem) -> None:
        self._fd = fd
        self._item = item
        self._position = item.offset
        size = item.entry.size or 0
        self._end = size if item.whole or item.end is None else item.end
        self._lock = threading.Lock()
        self._closed = False

    def read_into(self, view: memoryview) -> int:
        """See `Stream.read_into`."""
        want = min(len(view), self._end - self._position)
        with self._lock:
            if self._closed:
                self._release()
                raise Unreachable(f"{self._item.entry.path}: given up")
            if want <= 0:
                return 0
            return self._read(view[:want])

    def _read(self, view: memoryview) -> int:
        try:
            count = os.preadv(self._fd, [view], self._position)
        except OSError as error:
            raise _explain(error, self._item.entry.key, self._item.entry.path) from None
        self._position += count
        if count == 0 or self._position >= self._end:
            self.check()
        if count == 0:
            raise OriginChanged(f"{self._item.entry.path}: the file ends at {self._position} of {self._end} bytes")
        return count

    def check(self) -> None:
        """Raise OriginChanged unless the open file is the one that was listed."""
        entry = self._item.entry
        status = os.fstat(self._fd)
        seen = (status.st_size, version(status))
        if seen != (entry.size, entry.validator):
            raise OriginChanged(
                f"{entry.path}: the file changed (expected {entry.size} bytes, {entry.validator}; "
                f"observed {seen[0]} bytes, {seen[1]})"
            )

    def close(self) -> None:
        """See `Stream.close`."""
        self._closed = True
        # A read in another thread holds the lock, and would use the number of a closed descriptor: it releases it itself.
        if self._lock.acquire(blocking=False):
            self._release()
            self._lock.release()

    def _release(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def __del__(self) -> None:
        self._release()


def is_unicode(name: str) -> bool:
    """Whether the bytes of a name from the file system were UTF-8."""
    return not any("\udc80" <= char <= "\udcff" for char in name)


def _entry(name: str, path: str, status: os.stat_result) -> Entry:
    if status.st_size == 0 and _holds_bytes(path):
        raise FilesystemRefused(
            f"{path}: the file system says that it is empty, and it is not", hint="copy it elsewhere"
        )
    # The hub's cache names its blobs by their SHA-256: a digest for nothing.
    blob = _HUB_BLOB.search(os.path.realpath(path)) if os.path.islink(path) else None
    digests = {"sha256": blob[1]} if blob else {}
    return Entry(name, status.st_size, version(status), digests=digests, key=path)


def _holds_bytes(path: str) -> bool:
    """Whether there is anything to read: /proc, and mounts that make their files up, give no sizes."""
    try:
        with open(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), "rb", buffering=0) as file:
            return bool(file.read(1))
    except OSError:
        return False


def _refused(name: str, refusal: MxError) -> Entry:
    return Entry(name, None, strong=False, refusal=refusal)


def _explain(error: OSError, path: str, shown: str) -> MxError:
    try:
        leads = os.readlink(path)
    except OSError:
        leads = ""
    if leads and error.errno in _GONE:
        return NotFound(f"{path}: a symlink to nothing ({leads}, which would be {os.path.realpath(path)})")
    if leads and error.errno == errno.ELOOP:
        return FilesystemRefused(f"{path}: a symlink that leads back to itself ({leads})")
    if error.errno in _GONE:
        return NotFound(f"{shown}: no such file or directory (looked for {path})")
    return explain_reading(error, f"{path} (a symlink to {leads})" if leads else path)
