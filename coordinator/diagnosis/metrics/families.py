"""Name the metrics, and make them of a reading: one list for all ways in which they leave.

The labels are `rank`, `group`, `plane` and `op`, and never a pid, the number of a call or a size: Prometheus keeps a
series for each value of a label.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib.metadata import version
from typing import Any, Final, Literal, NamedTuple

from coordinator.diagnosis.metrics.totals import Counts, Key, Reading
from shm_broadcast.status.layout import BUCKETS, FIRST_BUCKET_NS

__all__ = ["PREFIX", "Family", "Sample", "families_of"]

PREFIX: Final = "group_coordinator_"
_CALL: Final = ("rank", "group", "plane", "op")
_MEMBER: Final = ("rank", "group")
_READER: Final = ("rank", "group", "reader")
# Limits of the exported histogram in seconds, and up to which bucket of the page each reaches: from 1 us by factors
# of 4 to 69 s. Half of the page's limits, because each is a series for each rank, group, plane and op.
_LIMITS: Final = [(FIRST_BUCKET_NS * 2**place / 1e9, place) for place in range(2, BUCKETS - 1, 2)]


class Sample(NamedTuple):
    """One series.

    Attributes:
        labels: Values, in the order of the family's labels.
        value: In the unit of the family's name; of a histogram the sum.
        buckets: Of a histogram: each limit, and how many values are below it; the last limit is infinite.
    """

    labels: tuple[str, ...]
    value: float
    buckets: tuple[tuple[float, int], ...] = ()


class Family(NamedTuple):
    """The series of one name.

    Attributes:
        name: Of the metric, as Prometheus shows it.
        kind: What it is.
        help: A sentence.
        labels: Names.
        samples: One for each combination of values.
    """

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    labels: tuple[str, ...]
    samples: tuple[Sample, ...]


class _Counter(NamedTuple):
    name: str
    help: str
    value: Callable[[Counts], float]


_COUNTERS: Final = (
    _Counter("calls_total", "Calls that have ended.", lambda counts: counts.calls),
    _Counter("bytes_total", "Bytes that the rank brought to its calls.", lambda counts: counts.nbytes),
    _Counter(
        "wait_seconds_total",
        "Time for which the rank waited for the last rank to come.",
        lambda counts: counts.waited_ns / 1e9,
    ),
    _Counter("last_arrivals_total", "Calls to which the rank came last.", lambda counts: counts.last),
    _Counter(
        "late_seconds_total",
        "Time by which the rank came after the one before, in calls to which it came last.",
        lambda counts: counts.late_ns / 1e9,
    ),
)


def families_of(reading: Reading) -> Iterator[Family]:
    """Return the metrics, in a fixed order; the series of each are ordered too."""
    yield from _of_calls(sorted(reading.counts.items()))
    yield from _of_groups(reading)
    yield from _of_queues(reading)
    yield from _of_host(reading)


def _of_calls(counts: list[tuple[Key, Counts]]) -> Iterator[Family]:
    for each in _COUNTERS:
        samples = (Sample(key, each.value(of)) for key, of in counts)
        yield _family(each.name, "counter", each.help, _CALL, samples)
    yield _family(
        "errors_total",
        "counter",
        'Calls that have ended with an error: "disagreed" if the calls of the ranks differ, else "failed".',
        (*_CALL, "error"),
        (
            Sample((*key, error), number)
            for key, of in counts
            for error, number in (("disagreed", of.disagreed), ("failed", of.failed))
        ),
    )
    yield _family(
        "wait_seconds",
        "histogram",
        "How long the rank waited in a call for the last rank to come.",
        _CALL,
        (Sample(key, of.waited_ns / 1e9, _buckets(of)) for key, of in counts),
    )


def _of_groups(reading: Reading) -> Iterator[Family]:
    yield _gauge(
        "inflight_seconds",
        "For how long the call has gone on that the rank is in; 0 if it is in none.",
        _CALL,
        reading.inflight_s,
    )
    yield _gauge(
        "group_usable",
        "1 if the rank can use the group; 0 while it is created, and once it is broken.",
        _MEMBER,
        reading.usable,
    )
    yield _gauge("epoch", "How often the members of the group have changed.", _MEMBER, reading.epoch)


def _of_queues(reading: Reading) -> Iterator[Family]:
    yield _gauge(
        "queue_lag_messages",
        "Messages that the reader has not given back, in the group's queue in which these are most.",
        _READER,
        {reader: lag.messages for reader, lag in reading.lags.items()},
    )
    yield _gauge(
        "queue_lag_bytes",
        "Bytes of the messages that the reader has not given back, in the group's queue in which these are most.",
        _READER,
        {reader: lag.nbytes for reader, lag in reading.lags.items()},
    )


def _of_host(reading: Reading) -> Iterator[Family]:
    yield _gauge("processes", "Live processes whose status page was read.", (), {(): reading.processes})
    yield _gauge(
        "undecodable_pages",
        "Status pages that could not be decoded, such as those of another release.",
        (),
        {(): reading.undecodable},
    )
    yield _gauge(
        "build_info",
        "1; the label is the version of group-coordinator that exports.",
        ("version",),
        {(version("group-coordinator"),): 1},
    )


def _family(
    name: str,
    kind: Literal["counter", "gauge", "histogram"],
    help_: str,
    labels: tuple[str, ...],
    samples: Iterable[Sample],
) -> Family:
    return Family(PREFIX + name, kind, help_, labels, tuple(samples))


def _gauge(name: str, help_: str, labels: tuple[str, ...], values: Mapping[Any, float]) -> Family:
    samples = (Sample(tuple(key), float(value)) for key, value in sorted(values.items()))
    return _family(name, "gauge", help_, labels, samples)


def _buckets(counts: Counts) -> tuple[tuple[float, int], ...]:
    below = [(limit, sum(counts.waits[: place + 1])) for limit, place in _LIMITS]
    return (*below, (float("inf"), sum(counts.waits)))
