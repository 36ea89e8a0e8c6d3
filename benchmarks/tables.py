"""Print figures as tables."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final, TextIO

from rich.console import Console
from rich.table import Table

from benchmarks.results import Measurement, Results

__all__ = ["bytes_text", "console_of", "show_results", "time_text"]


def bytes_text(nbytes: int | None) -> str:
    """Return `64 KB`."""
    if not nbytes:
        return ""
    for unit, size in (("MB", 1 << 20), ("KB", 1 << 10)):
        if nbytes >= size:
            return f"{nbytes / size:.4g} {unit}"
    return f"{nbytes} B"


def time_text(value_us: float) -> str:
    """Return `4.03 µs`, `1.2 ms` or `3 s`, with three digits."""
    for unit, size in (("s", 1e6), ("ms", 1e3)):
        if value_us >= size:
            return f"{value_us / size:.3g} {unit}"
    return f"{value_us:.3g} µs"


_COLUMNS: Final = (
    "call", "ranks", "size", "whose", "p50", "p90", "p99", "GB/s", "CPU/call", "CPU %", "ours is", "by",
)  # fmt: skip

_WIDTH: Final = 150
"""Width of the widest table, in characters."""
_LEFT_OUT: Final = ("p90", "GB/s", "CPU %", "by")
"""Columns that a narrower terminal leaves out; the file has everything."""


def console_of(file: TextIO | None = None) -> Console:
    """Return a console as wide as the terminal; without a terminal, as wide as the widest table."""
    console = Console(file=file)
    return console if console.is_terminal else Console(file=file, width=_WIDTH)


def _groups(measurements: Iterable[Measurement]) -> Iterator[tuple[str, list[Measurement]]]:
    """Yield each case with its measurements."""
    found: dict[str, list[Measurement]] = {}
    for each in measurements:
        found.setdefault(each.case, []).append(each)
    yield from found.items()


def show_results(results: Results, console: Console) -> None:
    """Print one table per case, with one line per implementation and its time relative to ours."""
    machine = results.machine
    for case, measurements in _groups(results.measurements):
        table = Table(title=case, title_justify="left", title_style="bold", header_style="bold")
        is_narrow = console.width < _WIDTH
        shown = [name for name in _COLUMNS if not (is_narrow and name in _LEFT_OUT)]
        for name in shown:
            is_text = name in ("call", "whose", "by")
            table.add_column(name, justify="left" if is_text else "right", no_wrap=True)
        ours: dict[tuple[str, int, int | None], float] = {}
        previous = None
        for each in measurements:
            call = (each.variant, each.world_size, each.nbytes)
            if each.implementation == "ours":
                ours[call] = each.at(50)
            is_first, previous = call != previous, call
            if is_first and table.row_count:
                table.add_section()
            row = dict(zip(_COLUMNS, _row(each, is_first, ours.get(call)), strict=True))
            table.add_row(*(row[name] for name in shown))
        console.print(table)
        # Reasons are too long for a column of the table.
        for reason in _reasons(measurements):
            console.print(f"[dim]{reason}[/dim]", soft_wrap=True)
    for skip in results.skipped:
        console.print(f"[dim]not measured: {skip.what}: {skip.reason}[/dim]")
    gpus = ", ".join(machine.gpus) or "no GPU"
    console.print(
        f"[dim]{machine.cpu}, {machine.cores} of {machine.all_cores} cores, {machine.kernel}, Python {machine.python}, "
        f"torch {machine.packages.get('torch', '?')}, {gpus}; {results.date}, took {results.took_s:.0f} s[/dim]"
    )
    if results.is_quick:
        console.print("[yellow]this was a quick run: its figures mean nothing[/yellow]")


def _row(each: Measurement, is_first: bool, ours_us: float | None) -> list[str]:
    bandwidth = each.bandwidth_gb_s
    ratio = "" if each.implementation.startswith("ours") or not ours_us else f"{each.at(50) / ours_us:.1f}x"
    return [
        each.variant if is_first else "",
        str(each.world_size) if is_first else "",
        bytes_text(each.nbytes) if is_first else "",
        each.implementation,
        time_text(each.at(50)),
        time_text(each.at(90)),
        time_text(each.at(99)),
        "" if bandwidth is None else f"{bandwidth:.2f}",
        time_text(each.cpu_us),
        f"{each.cpu_percent:.0f}" if each.cpu_percent >= 10 else f"{each.cpu_percent:.1f}",
        ratio,
        each.algorithm,
    ]


def _reasons(measurements: Iterable[Measurement]) -> list[str]:
    """Return the reason for each algorithm of ours, at its first call in each world size."""
    found: dict[tuple[int, str], str] = {}
    for each in measurements:
        if each.implementation.startswith("ours") and each.reason:
            found.setdefault((each.world_size, each.algorithm), f"{each.algorithm}: {each.reason}")
    return list(dict.fromkeys(found.values()))
