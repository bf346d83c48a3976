"""UCX's log, kept in memory: the only place where it says which transport a read takes, and why something failed."""

from __future__ import annotations

import ctypes
import os
import re

_PREFIX = re.compile(r"^\[[^]]*\] \[[^]]*\]\s+", re.MULTILINE)
_REASON = re.compile(r"UCX +(?:ERROR|FATAL) +(.*)")
_READ = "remote memory read"
_NUMBER = re.compile(r"\d+[KMG]?", re.ASCII)
_TRANSPORT = re.compile(r"(\w+)/")
_RDMA = frozenset({"rc", "dc", "ud", "srd", "gga"})
_UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
_TAIL = 1 << 20


class Log:
    """A file without a name that UCX writes, from the moment it is loaded to the end of the process."""

    def __init__(self) -> None:
        self._fd = os.memfd_create("ucx.log", os.MFD_CLOEXEC)

    def variables(self) -> dict[str, str]:
        """What makes UCX write there: errors, and a table for each kind of operation that it has chosen a protocol for."""
        path = f"/proc/{os.getpid()}/fd/{self._fd}"
        return {"UCX_LOG_FILE": path, "UCX_LOG_LEVEL": "error", "UCX_PROTO_INFO": "y"}

    @property
    def size(self) -> int:
        """Bytes so far."""
        self._flush()
        return os.fstat(self._fd).st_size

    def _flush(self) -> None:
        # UCX writes through the C library, which buffers what goes to a file.
        ctypes.CDLL(None).fflush(None)

    def since(self, offset: int) -> str:
        """What came after `offset`, at most the last MiB of it."""
        offset = max(offset, self.size - _TAIL)
        return _PREFIX.sub("", os.pread(self._fd, _TAIL, offset).decode(errors="replace"))


def reason(text: str) -> str:
    """The last error in a log, "" without one."""
    found = _REASON.findall(text)
    return found[-1].strip() if found else ""


def path_of_reads(text: str, size: int) -> str:
    """How UCX reads `size` bytes from a peer by the newest table of a log: `cma/memory`, `tcp/eth0 (software emulation)`.

    "" when the log has no such table.
    """
    found, of_peer, reading = "", False, False
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if " cfg#" in line:
            of_peer, reading = " self cfg#" not in line, False
        if _READ in line:
            reading = of_peer
        elif reading and len(cells) == 3 and _covers(cells[0], size):
            description, transport = cells[1], cells[2]
            found = transport if description == "zero-copy" else f"{transport} ({description})"
    return found


def is_rdma(path: str) -> bool:
    """Whether all transports of a path (of `path_of_reads`) are those of RDMA devices."""
    transports = _TRANSPORT.findall(path)
    return bool(transports) and all(transport.split("_")[0] in _RDMA for transport in transports)


def is_kernel_copy(path: str) -> bool:
    """Whether the kernel copies from the other process's memory."""
    return _TRANSPORT.findall(path) == ["cma"]


def _covers(cell: str, size: int) -> bool:
    first, _, last = cell.partition("..")
    if not _NUMBER.fullmatch(first) or not (last in ("", "inf") or _NUMBER.fullmatch(last)):
        return False
    return _bytes(first) <= size and (last == "inf" or size <= _bytes(last or first))


def _bytes(number: str) -> int:
    return int(number.rstrip("KMG")) * _UNITS.get(number[-1], 1)
