"""How many peers discovery knows of, and whether they still live."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from mx_cli.base import units
from mx_cli.base.cancel import Stop
from mx_cli.base.capability import FAIL, OK, Capability, judged
from mx_cli.base.errors import MxError
from mx_cli.discovery.registry import open_directory

ROWS = ("discovery",)


def probe(arguments: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """One row. Blocks for as long as the directory does: `text`, `root`, `beat` and `timeout` are `open_directory`'s."""
    yield _discovery(arguments["text"], Path(arguments["root"]), arguments["beat"], arguments["timeout"]).to_json()


def _discovery(text: str | None, root: Path, beat: float, timeout: float) -> Capability:
    try:
        directory = open_directory(text, root, beat, timeout)
        found = directory.sightings(Stop())
    except MxError as error:
        return Capability("discovery", FAIL, error.what, error.hint or "see --discovery")
    stale = sum(one.stale for one in found)
    facts = {"directory": str(directory), "records": len(found), "stale": stale}
    if not found:
        reason = directory.reason()
        return Capability("discovery", OK, f"{directory}: nobody" + (f" ({reason})" if reason else ""), facts=facts)
    value = f"{directory}: {units.count(len(found), 'record')}" + (f", {stale} stale" if stale else "")
    return judged("discovery", stale < len(found), value, "mx peers --probe asks each of them", facts=facts)
