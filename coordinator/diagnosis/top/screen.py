"""Lay out rows as text of at most 120 columns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from coordinator.diagnosis.queues import Reader, Ring
from coordinator.diagnosis.top.quantities import in_bytes, in_number, in_seconds
from coordinator.diagnosis.top.rows import Row
from coordinator.diagnosis.top.sampling import Sample

__all__ = [
    "BETWEEN",
    "WIDTH",
    "Column",
    "Table",
    "head_of",
    "line_of",
    "notes_of",
    "tables_of",
    "text_screen",
]

WIDTH: Final = 120
BETWEEN: Final = " "


class Column(NamedTuple):
    """A column of a table.

    Attributes:
        title: Its title.
        width: Its width in characters.
        is_number: Whether its cells are aligned to the right.
    """

    title: str
    width: int
    is_number: bool = False


class Table(NamedTuple):
    """A table to be shown.

    Attributes:
        columns: Title, width and whether it is aligned to the right.
        rows: The state by which a row is coloured, and its cells, which may be longer than the columns; or a single
            cell, which is the title of the rows below.
    """

    columns: tuple[Column, ...]
    rows: tuple[tuple[str, tuple[str, ...]], ...]


_RANKS: Final = (
    Column("group and plane", 19),
    Column("rank", 4, is_number=True),
    Column("pid", 7, is_number=True),
    Column("state", 9),
    Column("call", 18),
    Column("since", 6, is_number=True),
    Column("waits for, or does", 19),
    Column("calls/s", 7, is_number=True),
    Column("B/s", 5, is_number=True),
    Column("last", 5, is_number=True),
    Column("late", 6, is_number=True),
    Column("wait", 4, is_number=True),
)
_RINGS: Final = (
    Column("queue or channel", 28),
    Column("writer", 8, is_number=True),
    Column("reader", 8, is_number=True),
    Column("messages", 8, is_number=True),
    Column("behind", 8, is_number=True),
    Column("bytes", 8, is_number=True),
    Column("since", 7, is_number=True),
    Column("who waits", 36),
)


def tables_of(sample: Sample, rows: Sequence[Row]) -> tuple[Table, Table]:
    """Return the table of the ranks, and that of the queues and channels."""
    jobs = {row.job: sorted({each.pid for each in rows if each.job == row.job}) for row in rows}
    ranks: list[tuple[str, tuple[str, ...]]] = []
    for job, pids in sorted(jobs.items()):
        if len(jobs) > 1:
            ranks.append(("title", (f"job of pid {', '.join(map(str, pids))}",)))
        ranks += [(row.state, _rank_cells(row)) for row in rows if row.job == job]
    rings = tuple(
        (_ring_state(ring, reader), _ring_cells(sample, ring, reader))
        for ring in sample.rings
        for reader in (ring.readers or (None,))
    )
    return Table(_RANKS, tuple(ranks)), Table(_RINGS, rings)


def _rank_cells(row: Row) -> tuple[str, ...]:
    group = f"{row.group} {row.plane}".strip() or "no group"
    return (
        group,
        "-" if row.rank is None else str(row.rank),
        str(row.pid),
        row.state,
        row.call or ("-" if row.state == "elsewhere" else "not in a call"),
        _or_dash(row.since_s, in_seconds),
        _doing(row),
        _or_dash(row.calls_per_s, in_number),
        _or_dash(row.bytes_per_s, in_number),
        _or_dash(row.last_share, _percent) + ("!" if row.is_late else ""),
        _or_dash(None if row.late_ns is None else row.late_ns / 1e9, _brief_seconds),
        _or_dash(row.wait_share, _percent),
    )


def _doing(row: Row) -> str:
    """Return for which ranks the row's call waits, or what the row's process does."""
    if not row.call or row.state in ("dead", "unknown", "broken", "torn"):
        return row.note
    waits_for = row.waits_for
    if waits_for is None:
        return "any rank"
    named = [*(str(rank) for rank in waits_for), *(f"{rank}?" for rank in row.unseen)]
    return ", ".join(named) if named else "all came"


def _or_dash(value: float | None, write: Callable[[float], str]) -> str:
    return "-" if value is None else write(value)


def _percent(share: float) -> str:
    return f"{share:.0%}"


def _brief_seconds(seconds: float) -> str:
    return in_seconds(seconds).replace(" ", "")


def _ring_state(ring: Ring, reader: Reader | None) -> str:
    if ring.fault or reader is None:
        return "broken"
    if ring.writer_waits and reader.behind_bytes:
        return "waiting"
    return "idle" if _awaits_message(reader) else ""


def _ring_cells(sample: Sample, ring: Ring, reader: Reader | None) -> tuple[str, ...]:
    writer = _process(ring.rank, ring.pid)
    if ring.fault or reader is None:
        return ring.name, writer, "-", "-", "-", "-", "-", ring.fault
    progress_ns = reader.progress_ns
    if not reader.behind_bytes:
        # It has all: since the last of it came, or it gave that back.
        progress_ns = max(ring.published_ns, progress_ns)
    return (
        ring.name,
        writer,
        _process(reader.rank, reader.pid) if reader.pid is not None else f"place {reader.place}",
        in_number(ring.messages),
        in_number(reader.behind_messages),
        in_bytes(reader.behind_bytes),
        in_seconds(max(sample.at_ns - progress_ns, 0) / 1e9) if progress_ns else "start",
        _side(ring, reader),
    )


def _process(rank: int | None, pid: int | None) -> str:
    """Return the rank of a process, or else its number."""
    return f"rank {rank}" if rank is not None else "-" if pid is None else str(pid)


def _side(ring: Ring, reader: Reader) -> str:
    """Return which side of a ring waits for the other one."""
    if reader.state != "attached" and not ring.is_channel:
        return f"reader is {reader.state}"
    if ring.writer_waits and reader.behind_bytes:
        return "writer, for room"
    if _awaits_message(reader):
        return "reader, for a message"
    if ring.is_closed:
        return "nobody, writer has closed"
    return "nobody, reader is behind" if reader.behind_bytes else "nobody"


def _awaits_message(reader: Reader) -> bool:
    """Return whether a reader sleeps with nothing to read: one that is stopped in its sleep cannot take what comes."""
    return reader.waits and not reader.behind_messages


def _clean(text: str) -> str:
    """Return a text without what a terminal might obey: names come from other processes."""
    return "".join(char if char.isprintable() else "?" for char in text)


def _cut(text: str, width: int) -> str:
    text = _clean(text)
    return text if len(text) <= width else text[: width - 1] + "…"


def head_of(sample: Sample, rows: Sequence[Row]) -> str:
    """Return the first line."""
    jobs = len({seen.job for seen in sample.seen})
    parts = [f"{_processes(len(sample.seen))} with a status page"]
    if jobs > 1:
        parts.append(f"{jobs} jobs")
    if sample.refused:
        parts.append(f"{_processes(len(sample.refused))} may not be read")
    if not rows:
        parts.append("nothing to show")
    return ", ".join(parts)


def _processes(count: int) -> str:
    return f"{count} process{'' if count == 1 else 'es'}"


def notes_of(sample: Sample, rows: Sequence[Row]) -> list[tuple[str, str]]:
    """Return what is too long for a cell: why groups are broken, who is late, and which pages make no sense."""
    notes = {
        ("broken", f"{row.group} broken on rank {row.rank}: {row.cause}"): None for row in rows if row.cause
    }
    for row in rows:
        if row.is_late:
            notes[
                "stopped", f"{row.group} {row.plane}: rank {row.rank} (pid {row.pid}) is late all the time"
            ] = None
    for pid, fault in sorted(sample.faults.items()):
        notes["broken", f"page held by process {pid}: {fault}"] = None
    refused = sum(seen.page.refused for seen in sample.seen)
    if refused:
        notes["", f"{refused} groups, queues or planes are not shown: their pages had no room"] = None
    return [(state, _clean(text)) for state, text in notes]


def text_screen(sample: Sample, rows: Sequence[Row]) -> str:
    """Return all as plain text, with lines of at most 120 columns but for the notes."""
    lines = [head_of(sample, rows)]
    for table in tables_of(sample, rows):
        if table.rows:
            lines += ["", line_of(table.columns, tuple(column.title for column in table.columns))]
            lines += [line_of(table.columns, cells) for _, cells in table.rows]
    notes = [text for _, text in notes_of(sample, rows)]
    return "\n".join([*lines, *([""] if notes else []), *notes]) + "\n"


def line_of(columns: Sequence[Column], cells: Sequence[str]) -> str:
    """Return a row as text, each cell cut to its column."""
    if len(cells) == 1:
        return _cut(cells[0], WIDTH)
    parts = []
    for column, cell in zip(columns, cells, strict=True):
        text = _cut(cell, column.width)
        parts.append(text.rjust(column.width) if column.is_number else text.ljust(column.width))
    return BETWEEN.join(parts).rstrip()
