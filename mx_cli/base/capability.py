"""What a machine can do: one row for each thing, with what was measured and what to do about it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

OK, WARN, FAIL = "ok", "warn", "fail"
STATES = (OK, WARN, FAIL)


@dataclass(frozen=True)
class Capability:
    """`state`: ok; warn (mx works, slower or with less); fail (it does not). `value` says what was measured, for people;
    `facts` the same for programs (bytes, seconds). `fix`: what to do, empty for ok.
    """

    name: str
    state: str
    value: str
    fix: str = ""
    facts: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "state": self.state,
            "value": self.value,
            "fix": self.fix,
            "facts": dict(self.facts),
        }

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> Capability:
        """The reverse of `to_json`."""
        return cls(**row)

    def failing(self, value: str, fix: str) -> Capability:
        """The same, but not good enough."""
        return replace(self, state=FAIL, value=value, fix=fix)


def judged(
    name: str, good: bool, value: str, fix: str, *, otherwise: str = WARN, facts: Mapping[str, Any] | None = None
) -> Capability:
    """ok where it is `good`, else the state `otherwise` with its fix."""
    return Capability(name, OK if good else otherwise, value, "" if good else fix, facts or {})
