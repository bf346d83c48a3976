"""Help texts that are read from above: what a command is for, its own options, then those that many commands share."""

from __future__ import annotations

from typing import Any

from typer.core import TyperCommand

from mx_cli.base.errors import exit_codes

OWN, EVERYWHERE = "Options", "Every command"

EXAMPLES = {
    "hash": ["mx hash ./llama", "mx hash hf://org/name --diff ./llama"],
    "prefetch": [
        "mx prefetch hf://org/name",
        "mx prefetch s3://bucket/llama --link /cache/current",
        "mx prefetch s3://bucket/llama -- vllm serve {}",
    ],
    "serve": ["mx serve hf://org/name", "mx serve ./llama --listen 0.0.0.0:7400 --peer-token-file peers.secret"],
    "pull": [
        "mx pull hf://org/name --dry-run",
        "mx pull ./llama --to ./copy",
        "mx pull hf://org/name -- vllm serve {}",
    ],
    "peers": ["mx peers", "mx peers hf://org/name --probe"],
    "doctor": ["mx doctor", "mx doctor hf://org/name --ranks 8", "mx doctor --peer HOST:PORT"],
}


class Command(TyperCommand):
    """A command whose options stand in groups: each where its `rich_help_panel` says."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        groups: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None:
                groups.setdefault(_group(parameter), []).append(record)
        for title, records in groups.items():
            with formatter.section(title):
                formatter.write_dl(records)


def _group(parameter: Any) -> str:
    if parameter.param_type_name == "argument":
        return "Arguments"
    if parameter.name == "help":
        return EVERYWHERE
    return parameter.rich_help_panel or OWN


def examples(name: str) -> str | None:
    return _verbatim("Examples:", EXAMPLES[name]) if name in EXAMPLES else None


def exit_codes_text() -> str:
    rows = [(code, meaning.replace("`", "")) for code, meaning, _ in exit_codes()]
    width = max(len(code) for code, _ in rows)
    return _verbatim("Exit codes:", [f"{code:<{width}}  {meaning}" for code, meaning in rows])


def _verbatim(title: str, lines: list[str]) -> str:
    """A paragraph whose lines are not wrapped."""
    return "\n".join(["\b", title, *(f"  {line}" for line in lines)])
