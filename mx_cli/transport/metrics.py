"""Counts in the text format of Prometheus (exposition format 0.0.4). No names of models, readers or hosts are in it."""

from __future__ import annotations

from collections.abc import Iterable

PREFIX = "mxcli_"


def text(rows: Iterable[tuple[str, str, str, int]], state: str, states: Iterable[str]) -> str:
    """`rows` are (name, gauge or counter, help, value); `state` is the one of `states` that is 1."""
    lines: list[str] = []
    for name, kind, what, value in rows:
        lines += [f"# HELP {PREFIX}{name} {what}", f"# TYPE {PREFIX}{name} {kind}", f"{PREFIX}{name} {value}"]
    lines += [f"# HELP {PREFIX}state what the peer does", f"# TYPE {PREFIX}state gauge"]
    lines += [f'{PREFIX}state{{state="{one}"}} {int(one == state)}' for one in states]
    return "\n".join(lines) + "\n"
