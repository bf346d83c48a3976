"""`mx hash`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Optional

import typer

from mx_cli.cli.options import CACHE, ORIGIN, command
from mx_cli.cli.session import Session

if TYPE_CHECKING:
    from mx_cli.flows.hash import HashResult

Identify = Callable[[str, str | None], "HashResult"]
TEXT = Optional[str]  # noqa: UP045 - typer reads the object
MANY = Optional[list[str]]  # noqa: UP045
LAYOUT = "Weights as an engine holds them"


@command(CACHE, ORIGIN)
def hash_(
    session: Session,
    model: Annotated[
        TEXT, typer.Argument(metavar="MODEL", help="directory, config.json, weight file, or a URI")
    ] = None,
    revision: Annotated[
        TEXT, typer.Option("--revision", help="commit, branch, tag, or a revision that mx printed")
    ] = None,
    kind: Annotated[
        TEXT, typer.Option("--kind", metavar="content|origin|config", help="which identity to print")
    ] = None,
    no_content: Annotated[bool, typer.Option("--no-content", help="read no weights: the config's identity")] = False,
    explain: Annotated[bool, typer.Option("--explain", help="print what went into the identity")] = False,
    diff: Annotated[
        TEXT, typer.Option("--diff", metavar="OTHER", help="compare with a model or a saved --json")
    ] = None,
    verify: Annotated[bool, typer.Option("--verify", help="read weights again, whatever is remembered")] = False,
    stage: Annotated[
        TEXT,
        typer.Option(
            "--stage",
            metavar="checkpoint|loaded|processed",
            help="the files as published, or what an engine holds [default checkpoint; loaded with these options]",
            rich_help_panel=LAYOUT,
        ),
    ] = None,
    tp: Annotated[TEXT, typer.Option("--tp", metavar="N", help="tensor-parallel size", rich_help_panel=LAYOUT)] = None,
    pp: Annotated[
        TEXT, typer.Option("--pp", metavar="N", help="pipeline-parallel size", rich_help_panel=LAYOUT)
    ] = None,
    ep: Annotated[TEXT, typer.Option("--ep", metavar="N", help="expert-parallel size", rich_help_panel=LAYOUT)] = None,
    dp: Annotated[TEXT, typer.Option("--dp", metavar="N", help="data-parallel size", rich_help_panel=LAYOUT)] = None,
    rank: Annotated[
        TEXT, typer.Option("--rank", metavar="N", help="this rank, counted from 0", rich_help_panel=LAYOUT)
    ] = None,
    dtype: Annotated[
        TEXT, typer.Option("--dtype", metavar="NAME", help="dtype in memory", rich_help_panel=LAYOUT)
    ] = None,
    quantization: Annotated[
        TEXT, typer.Option("--quantization", metavar="NAME", help="quantization in memory", rich_help_panel=LAYOUT)
    ] = None,
    engine: Annotated[
        TEXT, typer.Option("--engine", metavar="NAME", help="inference engine", rich_help_panel=LAYOUT)
    ] = None,
    engine_version: Annotated[
        TEXT, typer.Option("--engine-version", metavar="VERSION", help="its version", rich_help_panel=LAYOUT)
    ] = None,
    set_: Annotated[
        MANY,
        typer.Option("--set", metavar="NAME=VALUE", help="another factor; may be repeated", rich_help_panel=LAYOUT),
    ] = None,
    scheme: Annotated[
        TEXT, typer.Option("--scheme", metavar="mx1|modelexpress", help="whose identity [default mx1]")
    ] = None,
    field: Annotated[MANY, typer.Option("--field", metavar="NAME=VALUE", help="of --scheme modelexpress")] = None,
) -> None:
    """Print the identity of weights: equal ones are interchangeable."""
    from mx_cli.base.errors import UsageError
    from mx_cli.model.layout import layout

    if scheme not in (None, "mx1", "modelexpress"):
        raise UsageError(f"unknown scheme (--scheme {scheme!r}: expected mx1, modelexpress)")
    if scheme == "modelexpress":
        return _modelexpress(session, model, field or [])
    if field:
        raise UsageError("--field is for --scheme modelexpress", hint="use --set for a factor of the layout")
    if model is None:
        raise UsageError("Missing argument 'MODEL'", hint="mx hash --help")
    if no_content and kind == "content":
        raise UsageError("--no-content and --kind content exclude one another", hint="leave one out")
    factors = {"tp": tp, "pp": pp, "ep": ep, "dp": dp, "rank": rank, "dtype": dtype, "quantization": quantization}
    factors |= {"engine": engine, "engine_version": engine_version}
    shape = layout(stage, factors, set_ or ())

    content = kind == "content" or (kind is None and not no_content)
    shown: list[Path] = []

    def identify(name: str, ref: str | None) -> HashResult:
        from mx_cli.flows.hash_anything import hash_anything, uses_cache

        context = session.context()
        if not shown and uses_cache(name, content, context):
            shown.append(context.cache().root)
            session.cache_line(*shown)
        return hash_anything(
            name, context, layout=shape, kind=kind, content=not no_content, revision=ref, verify=verify
        )

    result = identify(model, revision)
    if diff is not None:
        return _compare(session, result, identify, diff, kind)
    chosen = result.choose(kind)
    if chosen.kind == "config":
        from mx_cli.base.events import Notice

        session.emit(Notice("config-only: this identifies a configuration, not weights"))
    for path, size, reason in result.left_out:
        from mx_cli.base.events import Detail

        session.emit(Detail(f"left out {path} ({size} bytes): {reason}"))
    if explain and not session.as_json:
        from mx_cli.cli.render.tree import indented

        return session.answer(indented(chosen.to_json()), {}, final=chosen.id)
    return session.answer(chosen.id, result.to_json(kind), final=chosen.id)


def _modelexpress(session: Session, model: str | None, fields: list[str]) -> None:
    from mx_cli.base.errors import UsageError
    from mx_cli.model.modelexpress import read_fields, source_id

    named = [f"model_name={model}"] if model is not None else []
    if not named and not fields:
        raise UsageError("--scheme modelexpress needs --field model_name=…")
    found = source_id(read_fields([*named, *fields]))
    session.answer(found, {"schema": 1, "scheme": "modelexpress", "identity": found}, final=found)


def _compare(session: Session, left: HashResult, identify: Identify, other: str, kind: str | None) -> None:
    from mx_cli.base.errors import Incompatible
    from mx_cli.flows.hash import compare, saved_record

    right = saved_record(other) or identify(other, None)
    found = compare(left, right, kind)
    if not found.equal:
        session.failed_document = found.to_json()
    if found.kind is None:
        raise Incompatible(
            f"not comparable: {left.model} and {right.model} have no identity of the same kind",
            hint='content is known where the bytes are: compare with "$(mx prefetch URI)"',
        )
    if not found.equal:
        # Tensors say more than the digest of their table.
        named = [row for row in found.differences if row[0] != "weights.table"] or found.differences
        rows = [f"{field}: {_short(one)} -> {_short(two)}" for field, one, two in named]
        shown = "; ".join(rows[:8]) + (f"; and {len(rows) - 8} more" if len(rows) > 8 else "")
        raise Incompatible(f"{found.kind} identities differ: {shown}")
    session.answer(f"equal ({found.kind} {left.choose(found.kind).id})", found.to_json(), final="equal")


def _short(value: object) -> str:
    import json

    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 80 else text[:77] + "..."
