"""Every error that mx explains, with its exit code.

    MxError                    1   bug               a defect in mx
    ├── UsageError             2   usage             wrong option, argument, setting or input
    ├── FinishedWithWarnings   3   warnings          done, but --strict was given
    ├── NotFound              10   not-found         origin, revision or file; offline miss
    ├── AccessDenied          11   access-denied     refused, or no credentials
    ├── Unreachable           12   unreachable       network, throttling, stall (retried inside first)
    ├── WaitExpired           13   wait-expired      --wait passed while another downloads
    ├── NoSpace               15   no-space          disk, memory, GPU memory
    ├── IntegrityError        16   integrity         size, digest or format wrong
    │   └── OriginChanged     16   origin-changed    an object is not the one that was pinned
    ├── Incompatible          17   incompatible      identities or tensors differ
    ├── NoPeer                18   no-peer           no usable peer in time
    ├── TransportFailed       19   transport         a peer transfer failed
    │   └── StillLanding      19   transport         and its bytes may still land: the memory is lost
    ├── MissingCapability     20   missing           a package or a device is not there
    ├── FilesystemRefused     21   filesystem        permission, read-only, no rename
    ├── TimedOut             124   timeout           --timeout passed
    └── Interrupted          130   interrupted       SIGINT; 143 for SIGTERM, 129 for SIGHUP

`retryable` says whether running the command again can help. It is not about retries inside mx: those follow from
`Unreachable` alone.
"""

from __future__ import annotations

import signal
from typing import Any, ClassVar

from mx_cli.base import redact


class MxError(Exception):
    """An error with an exit code, a sentence for people and a hint: the next command to try."""

    code: ClassVar[int] = 1
    name: ClassVar[str] = "bug"
    meaning: ClassVar[str] = "a bug"
    retry: ClassVar[str] = "no"
    default_hint: ClassVar[str] = ""

    def __init__(self, what: str, *, hint: str = "", via: str = "") -> None:
        super().__init__(what)
        self.what = what
        self.hint = hint or self.default_hint
        self.via = via
        if self.hint:
            # A traceback of Python shows it too.
            self.add_note(f"hint: {self.hint}")

    @property
    def exit_code(self) -> int:
        return self.code

    @property
    def retryable(self) -> bool:
        return self.retry == "yes"

    def to_json(self) -> dict[str, Any]:
        """For documents, logs and other processes: without secrets."""
        return {
            "code": self.exit_code,
            "name": self.name,
            "message": redact.text(self.what),
            "hint": redact.text(self.hint),
            "retryable": self.retryable,
            "via": self.via,
        }


class UsageError(MxError):
    code, name, meaning = 2, "usage", "usage or configuration"


class FinishedWithWarnings(MxError):
    code, name, meaning = 3, "warnings", "finished with warnings (`--strict`)"


class NotFound(MxError):
    code, name, meaning = 10, "not-found", "origin, revision or file not found; offline miss"


class AccessDenied(MxError):
    code, name, meaning = 11, "access-denied", "access denied, no credentials"


class Unreachable(MxError):
    """The origin did not answer, or said "later". The engine retries these; `retry_after` (seconds) is the origin's wish."""

    code, name, meaning, retry = 12, "unreachable", "origin unreachable or throttled, `--retry-for` spent", "yes"

    def __init__(
        self, what: str, *, hint: str = "", via: str = "", retry_after: float | None = None, permanent: bool = False
    ) -> None:
        super().__init__(what, hint=hint, via=via)
        self.retry_after = retry_after
        self.permanent = permanent


class WaitExpired(MxError):
    code, name, meaning, retry = 13, "wait-expired", "`--wait` passed while another downloads", "yes"


class NoSpace(MxError):
    code, name, meaning, retry = 15, "no-space", "no space (disk, memory, GPU memory)", "after a fix"


class IntegrityError(MxError):
    """`unknown`: of a format that mx does not know, which alone does not make a file wrong."""

    code, name = 16, "integrity"
    meaning = "integrity: size, digest or format wrong, after one retry inside; `cache verify` found damage"
    unknown = False


class OriginChanged(IntegrityError):
    """An object is not the one that was listed: the revision is abandoned and the origin listed again."""

    name = "origin-changed"


class Incompatible(MxError):
    code, name, meaning = 17, "incompatible", "identity or tensors incompatible; `hash --diff` differs"


class NoPeer(MxError):
    code, name, meaning, retry = 18, "no-peer", "no usable peer in time", "yes"


class TransportFailed(MxError):
    code, name, meaning, retry = 19, "transport", "transport failed", "yes"


class StillLanding(TransportFailed):
    """A read could not be ended: its bytes may land at any time, so nobody may use or free where they go."""


class MissingCapability(MxError):
    code, name, meaning = 20, "missing", "a required capability is missing; `doctor` has a failing row"

    @classmethod
    def package(cls, name: str, error: Exception, install: str) -> MissingCapability:
        """That of what `import name` raised: the package is not there, or it cannot be loaded, and that says why."""
        if isinstance(error, ModuleNotFoundError) and (error.name or "").partition(".")[0] == name.partition(" ")[0]:
            return cls(f"the package {name} is missing", hint=install)
        cause = (str(error).splitlines() or [""])[0][:300]
        return cls(f"the package {name} cannot be loaded ({type(error).__name__}: {cause})", hint=install)


class FilesystemRefused(MxError):
    code, name, retry = 21, "filesystem", "after a fix"
    meaning = "the file system refuses (permission, read-only, no rename)"


class TimedOut(MxError):
    code, name, meaning, retry = 124, "timeout", "`--timeout` passed", "yes"


class Interrupted(MxError):
    """Stopped by a signal; the exit code is 128 + its number."""

    code, name, meaning, retry = 130, "interrupted", "SIGINT, SIGTERM, SIGHUP (137: killed, 139: crashed)", "yes"

    def __init__(self, signum: int, what: str = "", *, hint: str = "", via: str = "") -> None:
        super().__init__(what or f"stopped by {signal.Signals(signum).name}", hint=hint, via=via)
        self.signum = signum

    @property
    def exit_code(self) -> int:
        return 128 + self.signum


CLASSES: tuple[type[MxError], ...] = (
    MxError,
    UsageError,
    FinishedWithWarnings,
    NotFound,
    AccessDenied,
    Unreachable,
    WaitExpired,
    NoSpace,
    IntegrityError,
    Incompatible,
    NoPeer,
    TransportFailed,
    MissingCapability,
    FilesystemRefused,
    TimedOut,
    Interrupted,
)


def by_name(name: str, what: str, *, hint: str = "", via: str = "") -> MxError:
    """The error that another process recorded under its `name`; an unknown name is a plain MxError."""
    known: tuple[type[MxError], ...] = (*CLASSES, OriginChanged)
    for cls in known:
        if cls.name == name and cls is not Interrupted:
            return cls(what, hint=hint, via=via)
    return MxError(what, hint=hint, via=via)


def exit_codes() -> list[tuple[str, str, str]]:
    """The rows (code, meaning, retry the command?) of the table in the README and the help text."""
    rows = [("0", "done, or already there", "–")]
    for cls in CLASSES:
        code = "130, 143, 129" if cls is Interrupted else str(cls.code)
        rows.append((code, cls.meaning, cls.retry))
    return rows
