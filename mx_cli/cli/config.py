"""`mx config`."""

from __future__ import annotations

from mx_cli.base import redact
from mx_cli.base.config import FIELDS, SECRET
from mx_cli.cli.options import CACHE, ELECTION, ORIGIN, TRANSFER, command
from mx_cli.cli.session import Session


@command(CACHE, ORIGIN, TRANSFER, ELECTION, ("if_unreachable",))
def config(session: Session) -> None:
    """Show each setting, its value and where it came from."""
    rows = []
    for name in FIELDS:
        value = getattr(session.settings, name)
        shown = "(set)" if name in SECRET and value else value
        rows.append({"name": name, "value": _plain(shown), "origin": session.resolved.origins[name]})
    widths = [max(len(_text(row[key])) for row in rows) for key in ("name", "value")]
    lines = [f"{r['name']:<{widths[0]}}  {_text(r['value']):<{widths[1]}}  {r['origin']}".rstrip() for r in rows]
    session.answer("\n".join(lines), {"schema": 1, "settings": rows}, final="mx config")


def _plain(value: object) -> object:
    if isinstance(value, str):
        return redact.text(value)
    return value if isinstance(value, (bool, int, float, type(None))) else str(value)


def _text(value: object) -> str:
    return "-" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
