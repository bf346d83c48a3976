"""The bar on a terminal: a row for all, and at most five files."""

from __future__ import annotations

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from mx_cli.base import units
from mx_cli.base.events import Progress

ROWS = 5


class Bar:
    """A live view on stderr, four times a second."""

    def __init__(self, *, no_color: bool) -> None:
        self._console = Console(stderr=True, no_color=no_color, highlight=False)
        if self._console.width < 1:
            # COLUMNS=0: a terminal that was not asked how wide it is.
            self._console.width = 80
        self._live = Live(console=self._console, refresh_per_second=4, transient=True, redirect_stdout=False)
        self._live.start()

    def update(self, event: Progress) -> None:
        table = Table.grid(padding=(0, 1))
        table.add_row(ProgressBar(total=max(1, event.bytes_total), completed=event.bytes_done, width=30), event.text())
        rows = [
            Text(f"  {name}  {_share(done, total)}", overflow="ellipsis") for name, done, total in event.current[:ROWS]
        ]
        self._live.update(Group(table, *rows))

    def line(self, text: str) -> None:
        self._console.print(text, markup=False, soft_wrap=True)

    def close(self) -> None:
        self._live.stop()


def _share(done: int, total: int) -> str:
    return f"{100 * done // total if total else 100:3d} % of {units.size(total)}"
