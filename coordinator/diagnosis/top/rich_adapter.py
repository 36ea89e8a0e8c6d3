"""Lay out rows for a terminal with rich, which is optional: import this module only where that is installed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from rich.console import Group, RenderableType
from rich.text import Text

from coordinator.diagnosis.top.rows import Row
from coordinator.diagnosis.top.sampling import Sample
from coordinator.diagnosis.top.screen import BETWEEN, WIDTH, Column, head_of, line_of, notes_of, tables_of

__all__ = ["rich_screen"]

_STYLES: Final = {
    "title": "bold",
    "dead": "bold red",
    "broken": "bold red",
    "stopped": "bold yellow",
    "unknown": "yellow",
    "torn": "bold red",
    "waiting": "cyan",
    "computing": "green",
    "running": "green",
    "loading": "blue",
    "idle": "dim",
    "elsewhere": "dim",
}


def rich_screen(sample: Sample, rows: Sequence[Row], height: int, hint: str) -> RenderableType:
    """Return all for a terminal of `height` lines, with the last line `hint`; rows without room are counted."""
    room = max(height - 2, 1)
    lines: list[RenderableType] = [
        Text(head_of(sample, rows), style="bold", no_wrap=True, overflow="ellipsis")
    ]
    for table in tables_of(sample, rows):
        if table.rows:
            titles = line_of(table.columns, tuple(column.title for column in table.columns))
            lines += [Text(""), Text(titles.ljust(WIDTH), style="reverse", no_wrap=True, overflow="crop")]
            lines += [_styled(table.columns, state, cells) for state, cells in table.rows]
    notes = notes_of(sample, rows)
    if notes:
        lines.append(Text(""))
        lines += [
            Text(text, style=_STYLES.get(state, ""), no_wrap=True, overflow="ellipsis")
            for state, text in notes
        ]
    if len(lines) > room:
        hidden = len(lines) - room
        lines = lines[:room]
        hint = f"{hidden} more lines: use a taller terminal, or --pid. {hint}"
    lines += [Text(""), Text(hint, style="dim", no_wrap=True, overflow="ellipsis")]
    return Group(*lines[:height])


def _styled(columns: Sequence[Column], state: str, cells: Sequence[str]) -> RenderableType:
    line = Text(line_of(columns, cells), no_wrap=True, overflow="crop")
    style = _STYLES.get(state, "")
    if style in ("dim", "bold", "bold red"):
        line.stylize(style)
    elif style:
        # The state alone has the colour, where there is a column of states.
        at = 0
        for column in columns:
            if column.title in ("state", "who waits"):
                line.stylize(style, at, at + column.width)
            at += column.width + len(BETWEEN)
    return line
