"""How far a long command is: a live table on a terminal, a line now and then elsewhere."""

from collections.abc import Callable
from typing import Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table

from kvkeep_server.core.clock import Clock

_TERMINAL_INTERVAL_S = 0.5
_LINES_INTERVAL_S = 5.0

Rows = list[tuple[str, str]]


class Progress:
    """A context manager; the last state stays on the screen.

    Args:
        console: Where it is shown.
        clock: When.
        count: Requests in all, None = unknown.
        rows: Names and values, asked for when they are shown.
    """

    def __init__(
        self, console: Console, clock: Clock, *, count: int | None, rows: Callable[[], Rows]
    ) -> None:
        """See the class."""
        self._console = console
        self._clock = clock
        self._count = count
        self._rows = rows
        self._shown_s = clock.monotonic_s()
        self._done = 0
        self._live = Live(console=console, auto_refresh=False) if console.is_terminal else None

    def __enter__(self) -> Self:
        """Shows the empty table."""
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Leaves the last state on the screen."""
        self._show()
        if self._live:
            self._live.stop()

    def update(self, done: int) -> None:
        """So many requests are done: shows it, at most once an interval."""
        self._done = done
        interval_s = _TERMINAL_INTERVAL_S if self._live else _LINES_INTERVAL_S
        if self._clock.monotonic_s() - self._shown_s >= interval_s:
            self._show()

    def _show(self) -> None:
        self._shown_s = self._clock.monotonic_s()
        if self._live:
            self._live.update(self._table(), refresh=True)
        else:
            values = ", ".join(f"{name} {value}" for name, value in self._rows())
            self._console.print(f"{self._of_all()} requests: {values}")

    def _of_all(self) -> str:
        return f"{self._done}/{self._count}" if self._count else f"{self._done}"

    def _table(self) -> RenderableType:
        table = Table(box=None, show_header=False, pad_edge=False)
        table.add_column(style="bold")
        table.add_column(justify="right")
        table.add_row(
            "requests", f"{self._done} of {self._count}" if self._count else self._of_all()
        )
        for name, value in self._rows():
            table.add_row(name, value)
        if not self._count:
            return table
        return Group(ProgressBar(self._count, self._done, width=60), table)
