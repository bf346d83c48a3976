"""`mx cache`."""

from __future__ import annotations

import dataclasses
import time
from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer

from mx_cli.base import units
from mx_cli.cli.help_text import Command
from mx_cli.cli.options import CACHE, command
from mx_cli.cli.places import seconds
from mx_cli.cli.render.table import table
from mx_cli.cli.session import Session

if TYPE_CHECKING:
    from mx_cli.flows.cache import Removal

LEASE = ("ttl", "beat", "node_name", "namespace")
NAME = "[MODEL|MODEL@REVISION]..."
ABOUT = "URI, or directory name below models/, of a model; all when none is given"
MODELS = Annotated[Optional[list[str]], typer.Argument(metavar=NAME, help=ABOUT)]  # noqa: UP045 - typer reads the object

app = typer.Typer(help="Look into the cache, verify it, and remove what is in it.")


@app.command("ls", cls=Command)
@command(CACHE, LEASE)
def ls(session: Session, models: MODELS = None) -> None:
    """List what is in the cache, a row for each snapshot."""
    from mx_cli.flows import cache

    context = session.context()
    session.existing_cache_line(context.cache().root)
    rows = cache.rows(context, models or ())
    text = table(
        ("MODEL", "REVISION", "SIZE", "FILES", "USED", "PINS", "STATE"),
        [
            (r.uri, r.revision, units.size(r.size), str(r.files), _day(r.used), ",".join(r.pins) or "-", r.state)
            for r in rows
        ],
        right=frozenset({"SIZE", "FILES"}),
    )
    session.answer(
        text, {"schema": 1, "snapshots": [_plain(row) for row in rows]}, final=units.count(len(rows), "snapshot")
    )


@app.command("du", cls=Command)
@command(CACHE)
def du(session: Session, models: MODELS = None) -> None:
    """Show the disk use of each model. Files that snapshots share count once."""
    from mx_cli.flows import cache

    context = session.context()
    session.existing_cache_line(context.cache().root)
    rows = cache.usage(context, models or ())
    total = sum(row.disk for row in rows)
    text = table(
        ("DISK", "UNFINISHED", "REVISIONS", "MODEL"),
        [(units.size(r.disk), units.size(r.unfinished), str(r.revisions), r.uri) for r in rows]
        + [(units.size(total), units.size(sum(r.unfinished for r in rows)), "", "total")],
        right=frozenset({"DISK", "UNFINISHED", "REVISIONS"}),
    )
    document = {"schema": 1, "models": [_plain(row) for row in rows], "disk": total}
    session.answer(text, document, final=units.size(total))


@app.command("verify", cls=Command)
@command(CACHE)
def verify(
    session: Session,
    models: MODELS = None,
) -> None:
    """Read every file again and compare its digest. Exit 16 names the damage."""
    from mx_cli.flows import cache

    context = session.context()
    session.existing_cache_line(context.cache().root)
    files, size = cache.verify(context, models or ())
    session.answer(
        f"{units.count(files, 'file')}, {units.size(size)}: all right", {"schema": 1, "files": files, "bytes": size}
    )


@app.command("rm", cls=Command)
@command(CACHE, LEASE)
def rm(
    session: Session,
    model: Annotated[str, typer.Argument(metavar="MODEL|MODEL@REVISION", help="what to remove")],
    yes: Annotated[bool, typer.Option("--yes", help="remove; without it only say what would go")] = False,
    force: Annotated[bool, typer.Option("--force", help="also what is pinned")] = False,
) -> None:
    """Remove a model, or one revision of it."""
    from mx_cli.flows import cache

    context = session.context()
    session.existing_cache_line(context.cache().root)
    _removed(session, cache.remove(context, model, force=force, yes=yes))


@app.command("gc", cls=Command)
@command(CACHE, LEASE)
def gc(
    session: Session,
    models: MODELS = None,
    keep_last: Annotated[
        int, typer.Option("--keep-last", min=0, metavar="N", help="newest revisions of each model to keep")
    ] = 2,
    min_age: Annotated[
        str, typer.Option("--min-age", metavar="DURATION", help="keep what was published or used within this")
    ] = "7d",
    yes: Annotated[bool, typer.Option("--yes", help="remove; without it only say what would go")] = False,
) -> None:
    """Remove old revisions and what downloads left; keeps pins. It cannot see engines: pin what you serve."""
    from mx_cli.cache.evict import Policy
    from mx_cli.flows import cache

    context = session.context()
    session.existing_cache_line(context.cache().root)
    policy = Policy(keep_last, seconds("--min-age", min_age))
    _removed(session, cache.gc(context, models or (), policy, yes=yes))


@app.command("unpin", cls=Command)
@command(CACHE)
def unpin(session: Session, name: Annotated[str, typer.Argument(metavar="NAME", help="name given to --pin")]) -> None:
    """Remove a pin: gc may take what it kept."""
    from mx_cli.flows import cache

    context = session.context()
    session.existing_cache_line(context.cache().root)
    freed = cache.unpin(context, name)
    session.answer(
        table(("MODEL", "REVISION"), [(one.model.uri, one.revision or "-") for one in freed]),
        {"schema": 1, "name": name, "unpinned": [{"uri": o.model.uri, "revision": o.revision} for o in freed]},
    )


def _removed(session: Session, removal: Removal) -> None:
    words = {"remove": "removed", "sweep": "swept", "keep": "kept"} if removal.done else {}
    text = table(
        ("ACTION", "SIZE", "MODEL", "REVISION", "WHY"),
        [(words.get(f.action, f.action), units.size(f.size), f.uri, f.revision, f.why or "-") for f in removal.fates],
        right=frozenset({"SIZE"}),
    )
    final = f"{units.size(removal.freed)} freed" if removal.done else f"{units.size(removal.freed)} would be freed"
    if not removal.done:
        final += "; nothing was removed: add --yes"
    document = {
        "schema": 1,
        "done": removal.done,
        "freed": removal.freed,
        "revisions": [_plain(fate) for fate in removal.fates],
    }
    session.answer(f"{text}\n{final}", document, final=final)


def _day(at: int | None) -> str:
    return time.strftime("%Y-%m-%d", time.gmtime(at)) if at else "-"


def _plain(row: Any) -> dict[str, object]:
    fields = dataclasses.asdict(row)
    plain = (str, int, float, bool, type(None))
    return {k: v if isinstance(v, plain) else list(v) if isinstance(v, tuple) else str(v) for k, v in fields.items()}
