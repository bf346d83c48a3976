"""Why peers were left out of a search, or are read no more."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from mx_cli.base.errors import AccessDenied, MxError
from mx_cli.engine.many import Member, trouble
from mx_cli.flows.context import Context

SHOWN = 5


@dataclass
class Refusals:
    """Why candidates were left out: {address: reason}.

    `others`: identities that were met and are not wanted; `denied`: the last refusal of the secret; `unlisted`: why nobody
    could be looked for.
    """

    reasons: dict[str, str] = field(default_factory=dict)
    others: set[str] = field(default_factory=set)
    denied: AccessDenied | None = None
    unlisted: str = ""

    def text(self) -> str:
        rows = [said(address, reason) for address, reason in list(self.reasons.items())[:SHOWN]]
        more = len(self.reasons) - SHOWN
        return "; ".join(rows) + (f"; and {more} more" if more > 0 else "")


def said(address: str, reason: str) -> str:
    """The reason, with the address before it unless it begins with that already."""
    return reason if reason.startswith(address) else f"{address}: {reason}"


def telling(context: Context) -> Callable[[Member, MxError], None]:
    """Warns of what `Many` tells about its members. Raises the reason of a stop: what it breaks off is no fault of theirs."""

    def tell(member: Member, error: MxError) -> None:
        context.stop.check()
        context.warn(trouble(member, error))

    return tell
