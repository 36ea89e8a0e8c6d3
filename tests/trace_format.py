"""Check a file against the Trace Event Format, as strictly as readers need it to drop nothing and draw it right.

Perfetto's JSON importer drops a slice that overlaps the one before it in its track, and an arrow of which one end is in
no slice.
"""

import json
import math
from collections import defaultdict
from typing import Any

__all__ = ["Event", "check_trace"]

Event = dict[str, Any]

_META = {"process_name": "name", "thread_name": "name", "process_sort_index": "sort_index"}
_META["thread_sort_index"] = "sort_index"


def check_trace(content: bytes) -> list[Event]:
    """Return the events of a trace, or raise `AssertionError` with what is wrong."""
    whole = json.loads(content)
    assert isinstance(whole, dict)
    assert whole["displayTimeUnit"] in ("ms", "ns")
    events: list[Event] = whole["traceEvents"]
    for event in events:
        _check_event(event)
    timed = [event for event in events if event["ph"] != "M"]
    assert [event["ts"] for event in timed] == sorted(event["ts"] for event in timed)
    _check_names(events)
    tracks = defaultdict(list)
    for event in timed:
        if event["ph"] == "X":
            tracks[event["pid"], event["tid"]].append(_span(event))
    for track, spans in tracks.items():
        _check_nesting(track, spans)
    _check_arrows(timed, tracks)
    return events


def _ns(us: float) -> int:
    """Return microseconds as Perfetto keeps them."""
    return round(us * 1000)


def _span(event: Event) -> tuple[int, int]:
    return _ns(event["ts"]), _ns(event["ts"]) + _ns(event["dur"])


def _check_event(event: Event) -> None:
    assert event["ph"] in ("M", "X", "s", "f"), event
    for word in ("pid", "tid"):
        assert type(event[word]) is int, event
        assert 0 <= event[word] < 2**31, event
    assert isinstance(event["name"], str), event
    assert event["name"], event
    if event["ph"] == "M":
        assert list(event["args"]) == [_META[event["name"]]], event
        return
    assert event["cat"], event
    for word in ("ts", *(("dur",) if event["ph"] == "X" else ())):
        assert isinstance(event[word], int | float), event
        assert math.isfinite(event[word]), event
        assert 0 <= event[word] < 2**53, event
    if event["ph"] == "X":
        assert isinstance(event["args"], dict), event
    else:
        assert type(event["id"]) is int, event
        # Without it the arrow would end at the next slice.
        assert event["ph"] == "s" or event["bp"] == "e", event


def _check_names(events: list[Event]) -> None:
    named = [(event["pid"], event["tid"], event["name"]) for event in events if event["ph"] == "M"]
    assert len(named) == len(set(named))
    for event in events:
        if event["ph"] != "M":
            assert any(each[0] == event["pid"] and each[2] == "process_name" for each in named), event
            assert (event["pid"], event["tid"], "thread_name") in named, event


def _check_nesting(track: object, spans: list[tuple[int, int]]) -> None:
    """Each slice is inside of the one that is open, or behind it. They come with the outer one first."""
    opened: list[int] = []
    for begin, end in spans:
        while opened and opened[-1] <= begin:
            opened.pop()
        assert not opened or end <= opened[-1], (track, begin, end, opened)
        opened.append(end)


def _check_arrows(timed: list[Event], tracks: dict[Any, list[tuple[int, int]]]) -> None:
    started: dict[int, Event] = {}
    ended = set()
    for event in timed:
        if event["ph"] == "X":
            continue
        at = _ns(event["ts"])
        spans = tracks[event["pid"], event["tid"]]
        assert any(begin <= at <= end for begin, end in spans), event
        if event["ph"] == "s":
            assert event["id"] not in started, event
            started[event["id"]] = event
        else:
            first = started[event["id"]]
            assert event["id"] not in ended, event
            ended.add(event["id"])
            assert (first["cat"], first["name"]) == (event["cat"], event["name"])
            assert first["pid"] != event["pid"], event
    assert ended == set(started)
