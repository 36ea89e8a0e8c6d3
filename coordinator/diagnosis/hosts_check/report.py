"""The verdict as text of at most 120 columns."""

from __future__ import annotations

import statistics
import textwrap
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from coordinator.diagnosis.hosts_check.judging import listed
from coordinator.diagnosis.hosts_check.narration import WIDTH, printable
from coordinator.diagnosis.hosts_check.records import HostRow, Verdict

__all__ = ["report"]

_MOST_IN_TABLE: Final = 12
"""With more hosts a table would be wider than the page; the slowest ways stand in its place."""
_WORST: Final = 10
_CELL: Final = 8
_MARK: Final = 5
"""Columns of a number behind a name."""


def report(verdict: Verdict) -> str:
    """Return the text, without a line break at its end."""
    lines = ["", "=" * WIDTH, _headline(verdict)]
    lines += _findings(verdict)
    lines += ["", "hosts", *_hosts(verdict.hosts)]
    if len(verdict.hosts) > 1 and any(link.round_trip_us is not None for link in verdict.links):
        lines += ["", *_tables(verdict)]
    lines += ["", "what groups would use"]
    lines += [line for sentence in verdict.used for line in _wrapped(sentence)]
    return "\n".join(printable(line.rstrip()) for line in lines)


def _headline(verdict: Verdict) -> str:
    errors = sum(finding.level == "error" for finding in verdict.findings)
    warnings = len(verdict.findings) - errors
    came = verdict.world_size - len(verdict.missing)
    what = f"{came} of {verdict.world_size} ranks on {_count(len(verdict.hosts), 'host')}"
    if errors:
        return f"NOT READY: {what}, {_count(errors, 'error')}, {_count(warnings, 'warning')}"
    return f"READY: {what}, {_count(warnings, 'warning') if warnings else 'nothing wrong was found'}"


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _findings(verdict: Verdict) -> Iterator[str]:
    for finding in verdict.findings:
        yield ""
        yield from _wrapped(f"{finding.level.upper()}: {finding.text}", "")
        yield from _wrapped(f"look at: {finding.look_at}")


def _hosts(rows: Sequence[HostRow]) -> Iterator[str]:
    cells = [("name", "ranks", "interface", "address", "MTU", "store", "clock")]
    for row in rows:
        store = "serves it" if row.connect_ms is None else f"{row.connect_ms:.2f} ms"
        mtu = "" if row.mtu is None else str(row.mtu)
        cells.append((row.name, listed(row.ranks), row.interface, row.address, mtu, store, _clock(row)))
    widths = [max(len(line[column]) for line in cells) for column in range(len(cells[0]))]
    # What is long is cut: names first, then lists of ranks.
    for column in (0, 1):
        room = WIDTH - 3 - 2 * len(widths) - sum(widths) + widths[column]
        widths[column] = min(widths[column], max(room, 8))
    for line in cells:
        yield "   " + "  ".join(cell[:width].ljust(width) for cell, width in zip(line, widths, strict=True))


def _clock(row: HostRow) -> str:
    if row.clock_ms is None:
        return "unknown"
    if row.clock_error_ms is None:
        return "reference"
    return f"{row.clock_ms:+.3f} ms +- {row.clock_error_ms:.3f}"


def _tables(verdict: Verdict) -> Iterator[str]:
    trips, rates = dict[tuple[int, int], float](), dict[tuple[int, int], float]()
    failures = dict[tuple[int, int], str]()
    for link in verdict.links:
        way = (link.source, link.target)
        if link.failure is not None:
            failures[way] = link.failure.kind
        if link.round_trip_us is not None:
            trips[way] = trips[way[::-1]] = link.round_trip_us
        if link.sent_gbit is not None:
            rates[way] = link.sent_gbit
        if link.received_gbit is not None:
            rates[way[::-1]] = link.received_gbit
    if len(verdict.hosts) > _MOST_IN_TABLE:
        yield from _worst(verdict, trips, "round trip in us", max_first=True)
        yield ""
        yield from _worst(verdict, rates, "bandwidth in Gbit/s", max_first=False)
        return
    yield "round trip of a small message in us (median)"
    yield from _table(verdict.hosts, lambda way: _cell(trips, failures, way, ".0f"))
    yield ""
    yield "bandwidth of one connection in Gbit/s, from the host of the row to that of the column"
    yield from _table(verdict.hosts, lambda way: _cell(rates, failures, way, ".3g"))


def _cell(
    values: dict[tuple[int, int], float],
    failures: dict[tuple[int, int], str],
    way: tuple[int, int],
    form: str,
) -> str:
    if way in values:
        return format(values[way], form)
    return "FAILED" if way in failures or way[::-1] in failures else "?"


def _table(hosts: Sequence[HostRow], cell: Callable[[tuple[int, int]], str]) -> Iterator[str]:
    label = min(max(len(host.name) for host in hosts), WIDTH - 3 - _MARK - _CELL * len(hosts))
    # Columns have numbers where names would not fit.
    are_short = all(len(host.name) < _CELL for host in hosts)
    heads = [host.name if are_short else f"({number})" for number, host in enumerate(hosts)]
    yield "   " + " " * (label + _MARK) + "".join(head.rjust(_CELL) for head in heads)
    for number, host in enumerate(hosts):
        mark = "" if are_short else f" ({number})"
        row = "".join(
            ("-" if other is host else cell((host.leader, other.leader))).rjust(_CELL) for other in hosts
        )
        yield f"   {host.name[:label].ljust(label)}{mark.ljust(_MARK)}{row}"


def _worst(
    verdict: Verdict, values: dict[tuple[int, int], float], title: str, *, max_first: bool
) -> Iterator[str]:
    if not values:
        return
    names = {host.leader: host.name for host in verdict.hosts}
    usual, low, high = statistics.median(values.values()), min(values.values()), max(values.values())
    yield f"{title}: median {usual:.3g}, lowest {low:.3g}, highest {high:.3g}; the {_WORST} worst:"
    for way in sorted(values, key=values.__getitem__, reverse=max_first)[:_WORST]:
        yield f"   {names[way[0]]} to {names[way[1]]}: {values[way]:.3g}"[:WIDTH]


def _wrapped(text: str, indent: str = "   ") -> list[str]:
    further = indent + "   "
    # Names of files and hosts with hyphens stay whole.
    return textwrap.wrap(
        text, WIDTH, initial_indent=indent, subsequent_indent=further, break_on_hyphens=False
    )
