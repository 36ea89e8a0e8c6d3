"""Pages of ranks that never ran, whose calls meet: what traces and clock offsets are tested with."""

from collections.abc import Sequence
from typing import Any

import msgspec

from coordinator.diagnosis.model import Clock, Group, Lane, Page, Record

__all__ = ["call", "group", "lane", "page", "shifted"]


def call(begin_ns: int, end_ns: int, **words: Any) -> Record:
    """Return a barrier of the host plane in a process group, or another call."""
    values: dict[str, Any] = {
        "index": 1,
        "group": "world:0",
        "epoch": 0,
        "plane": "host",
        "algorithm": "process group",
        "call": "barrier",
        "number": 1,
        "count": 0,
        "dtype": 0,
        "op": 0,
        "root": None,
        "detail": 0,
        "begin_ns": begin_ns,
        "end_ns": end_ns,
        "last": None,
        "waited_ns": 0,
        "late_ns": 0,
        "outcome": "done",
    }
    return Record(**{**values, **words})


def lane(**words: Any) -> Lane:
    """Return a lane with a call that goes on."""
    values: dict[str, Any] = {
        "plane": "host",
        "algorithm": "process group",
        "state": "asleep",
        "call": "barrier",
        "number": 9,
        "count": 0,
        "nbytes": 0,
        "root": None,
        "dtype": 0,
        "op": 0,
        "detail": 0,
        "begin_ns": 0,
        "end_ns": 0,
        "is_torn": False,
        "counters": (),
    }
    return Lane(**{**values, **words})


def group(place: int, ranks: Sequence[int], name: str = "world:0", lanes: Sequence[Lane] = ()) -> Group:
    """Return a group that has existed for ever."""
    return Group(
        name=name,
        state="usable",
        epoch=0,
        place=place,
        world_size=len(ranks),
        ranks=tuple(ranks),
        created_ns=0,
        cause="",
        is_torn=False,
        lanes=tuple(lanes),
    )


def page(
    rank: int,
    groups: Sequence[Group],
    records: Sequence[Record],
    host: str = "a",
    clock: Clock | None = None,
    pid: int | None = None,
) -> Page:
    """Return a page. Each host has a clock of its own."""
    return Page(
        pid=100 + rank if pid is None else pid,
        start_ticks=1,
        pid_namespace=1,
        time_namespace=1,
        boot_id=host,
        hostname=host,
        rank=rank,
        world_size=4,
        stack_signal=0,
        refused=0,
        created_ns=0,
        realtime_ns=0,
        calls=len(records),
        groups=tuple(groups),
        queues=(),
        records=tuple(records),
        clock=clock or Clock(),
    )


def shifted(given: Page, by_ns: int, host: str) -> Page:
    """Return a page as a host would have written it whose clock shows `by_ns` more."""

    def moved(at_ns: int) -> int:
        return at_ns + by_ns if at_ns else 0

    def group_of(each: Group) -> Group:
        lanes = tuple(
            msgspec.structs.replace(one, begin_ns=moved(one.begin_ns), end_ns=moved(one.end_ns))
            for one in each.lanes
        )
        return msgspec.structs.replace(each, created_ns=each.created_ns + by_ns, lanes=lanes)

    return msgspec.structs.replace(
        given,
        boot_id=host,
        hostname=host,
        realtime_ns=given.realtime_ns - by_ns,
        created_ns=given.created_ns + by_ns,
        clock=msgspec.structs.replace(given.clock, monotonic_ns=given.clock.monotonic_ns + by_ns),
        groups=tuple(group_of(each) for each in given.groups),
        records=tuple(
            msgspec.structs.replace(each, begin_ns=moved(each.begin_ns), end_ns=moved(each.end_ns))
            for each in given.records
        ),
    )
