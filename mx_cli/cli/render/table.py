"""Rows of text in columns."""

from __future__ import annotations

from collections.abc import Sequence


def table(heads: Sequence[str], rows: Sequence[Sequence[str]], *, right: frozenset[str] = frozenset()) -> str:
    """The heads, then the rows; columns named in `right` end at the right. Nothing is cut: a terminal wraps."""
    widths = [max(len(row[column]) for row in (heads, *rows)) for column in range(len(heads))]
    lines = []
    for row in (heads, *rows):
        cells = [
            text.rjust(width) if head in right else text.ljust(width)
            for head, text, width in zip(heads, row, widths, strict=True)
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)
