"""What discovery says of a peer: a hint where it may be found. The handshake is the truth."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mx_cli.base.address import peer_address
from mx_cli.base.errors import IntegrityError, UsageError

SERVING, DRAINING, LOADING, UNKNOWN = "serving", "draining", "loading", "unknown"


@dataclass(frozen=True, slots=True)
class Record:
    """One peer. `identities` are id strings, one of each kind it knows; times are seconds since the epoch.

    `name` is the key of a record: the generation, or a name that the operator chose and that outlives a restart.
    `address` is HOST:PORT of the control channel ("[v6]:PORT" for IPv6). `stage` and `rank` say what shape the weights
    have and whose share they are; `size` is in bytes. `proto` is the range of wire versions. Never holds a secret or
    anything that gives access. Without a generation it is an address and no more: the state is UNKNOWN.
    """

    name: str
    generation: str
    address: str
    identities: tuple[str, ...] = ()
    uri: str = ""
    revision: str = ""
    stage: str = "checkpoint"
    rank: str = ""
    device: str = ""
    size: int = 0
    version: int = 0
    state: str = SERVING
    readers: int = 0
    slots: int = 0
    host: str = ""
    pid: int = 0
    started: float = 0.0
    beaten: float = 0.0
    proto: tuple[int, int] = (1, 1)
    mx: str = ""

    def to_json(self) -> dict[str, Any]:
        """Plain values only; `from_json` reads it back."""
        fields = {name: getattr(self, name) for name in self.__slots__}
        return {**fields, "identities": list(self.identities), "proto": list(self.proto)}

    @classmethod
    def from_json(cls, data: Any, where: str) -> Record:
        """Raises IntegrityError for anything but a record. Unknown fields of a newer mx are left out."""
        try:
            known = {name: data[name] for name in cls.__slots__ if name in data}
            known["identities"] = tuple(map(str, known.get("identities", ())))
            low, high = known.get("proto", (1, 1))
            known["proto"] = (int(low), int(high))
            record = cls(**known)
            for name in _TEXTS:
                if not isinstance(getattr(record, name), str):
                    raise TypeError(f"{name} is not text")
            for name in _COUNTS:
                if type(getattr(record, name)) is not int or not 0 <= getattr(record, name) < 1 << 63:
                    raise TypeError(f"{name} is not a number that can be")
            float(record.started), float(record.beaten)
            peer_address(record.address)
            return record
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError, UsageError) as error:
            raise IntegrityError(f"not a peer's record: {where} ({error})") from None


_TEXTS = ("name", "generation", "address", "uri", "revision", "stage", "rank", "device", "state", "host", "mx")
_COUNTS = ("size", "version", "readers", "slots", "pid")


@dataclass(frozen=True, slots=True)
class Sighting:
    """A record as a directory has it. `age`: seconds since its last sign of life by the directory's own clock, None when
    that cannot be told. `stale`: for so long that the peer is no longer believed to live.
    """

    record: Record
    age: float | None = None
    stale: bool = False
