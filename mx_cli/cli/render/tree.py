"""Nested values as indented lines."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any


def indented(value: dict[str, Any]) -> str:
    """`key: value` lines; what is nested is indented by two."""
    return "\n".join(_lines(value, ""))


def _lines(value: Any, indent: str) -> Iterator[str]:
    rows = value.items() if isinstance(value, dict) else ((f"[{i}]", item) for i, item in enumerate(value))
    for key, item in rows:
        if isinstance(item, (dict, list)) and item:
            yield f"{indent}{key}:"
            yield from _lines(item, indent + "  ")
        else:
            yield f"{indent}{key}: {json.dumps(item, ensure_ascii=False)}"
