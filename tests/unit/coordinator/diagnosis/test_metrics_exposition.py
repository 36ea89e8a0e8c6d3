"""The text that is exported is Prometheus's, with the names and labels that are documented."""

import math
import subprocess

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from coordinator.diagnosis.metrics.exposition import exposition
from coordinator.diagnosis.metrics.families import Family, Sample, families_of
from coordinator.diagnosis.metrics.lags import Lag, QueueReader
from coordinator.diagnosis.metrics.totals import Counts, Key, Member, Reading
from shm_broadcast.status.layout import BUCKETS
from tests.probes import requires

CALL = {"rank", "group", "plane", "op"}
LABELS = {
    "calls_total": CALL,
    "bytes_total": CALL,
    "wait_seconds_total": CALL,
    "last_arrivals_total": CALL,
    "late_seconds_total": CALL,
    "errors_total": CALL | {"error"},
    "wait_seconds": CALL,
    "inflight_seconds": CALL,
    "group_usable": {"rank", "group"},
    "epoch": {"rank", "group"},
    "queue_lag_messages": {"rank", "group", "reader"},
    "queue_lag_bytes": {"rank", "group", "reader"},
    "processes": set(),
    "undecodable_pages": set(),
    "build_info": {"version"},
}
NAMES = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)


def reading(group: str = "tp:0", op: str = "all_reduce") -> Reading:
    """One series of each metric, with values that differ."""
    key = Key("3", group, "shared", op)
    waits = tuple(range(1, BUCKETS + 1))
    counts = Counts(
        calls=sum(waits),
        nbytes=2**53 + 1,
        waited_ns=1_500_000_000,
        last=7,
        late_ns=250_000_000,
        disagreed=1,
        failed=2,
        waits=waits,
    )
    return Reading(
        counts={key: counts},
        inflight_s={key: 2.5},
        usable={Member("3", group): True},
        epoch={Member("3", group): 4},
        lags={QueueReader("0", group, "3"): Lag(5, 640)},
        processes=1,
        undecodable=0,
    )


def parsed(text: str) -> dict[str, Metric]:
    """Families by the name in the text; prometheus_client leaves `_total` out of it."""
    return {
        family.name + ("_total" if family.type == "counter" else ""): family
        for family in text_string_to_metric_families(text)
    }


def test_every_metric_has_its_name_and_labels() -> None:
    """No label is a pid, the number of a call or a size, which would make a series for each value."""
    families = {family.name: family for family in families_of(reading())}
    assert {name: set(family.labels) for name, family in families.items()} == {
        f"group_coordinator_{name}": labels for name, labels in LABELS.items()
    }
    found = parsed(exposition(families.values()))
    assert set(found) == set(families)
    for name, family in found.items():
        labels = LABELS[name.removeprefix("group_coordinator_")]
        assert family.type == families[name].kind
        assert all(set(sample.labels) - {"le"} == labels for sample in family.samples)


def test_values_have_the_units_of_their_names() -> None:
    """Seconds, bytes and plain numbers."""
    found = parsed(exposition(families_of(reading())))

    def value(name: str, **labels: str) -> float:
        (sample,) = [
            each
            for each in found[f"group_coordinator_{name}"].samples
            if labels.items() <= each.labels.items()
        ]
        return float(sample.value)

    assert value("calls_total") == sum(range(1, BUCKETS + 1))
    assert value("wait_seconds_total") == 1.5
    assert value("last_arrivals_total") == 7
    assert value("late_seconds_total") == 0.25
    assert value("errors_total", error="disagreed") == 1
    assert value("errors_total", error="failed") == 2
    assert value("inflight_seconds") == 2.5
    assert value("group_usable") == 1
    assert value("epoch") == 4
    assert value("queue_lag_messages", reader="3") == 5
    assert value("queue_lag_bytes", reader="3") == 640
    assert "group_coordinator_bytes_total{" in exposition(families_of(reading()))
    assert " 9007199254740993\n" in exposition(families_of(reading()))  # a float would round it


def test_the_histogram_is_cumulative_and_ends_with_all_calls() -> None:
    """Its limits are limits of the page's histogram, so that no call is counted in a wrong bucket."""
    family = parsed(exposition(families_of(reading())))["group_coordinator_wait_seconds"]
    buckets = [each for each in family.samples if each.name.endswith("_bucket")]
    limits = [float(each.labels["le"]) for each in buckets]
    assert limits[0] == 1.024e-6
    assert limits[-1] == math.inf
    assert limits == sorted(limits)
    for limit, each in zip(limits[:-1], buckets, strict=False):
        below = [place for place in range(BUCKETS) if 256 * 2**place <= round(limit * 1e9)]
        assert each.value == sum(place + 1 for place in below)
    assert buckets[-1].value == sum(range(1, BUCKETS + 1))
    plain = {each.name.rpartition("_")[2]: each.value for each in family.samples if "le" not in each.labels}
    assert plain == {"sum": 1.5, "count": buckets[-1].value}


@given(NAMES, NAMES)
def test_any_name_of_a_group_comes_through(group: str, op: str) -> None:
    """A page may hold any text: quotes, backslashes, ends of lines."""
    text = exposition(families_of(reading(group, op)))
    (sample,) = parsed(text)["group_coordinator_calls_total"].samples
    assert (sample.labels["group"], sample.labels["op"]) == (group, op)


def test_a_family_without_series_is_left_out() -> None:
    """A name without a sample tells nothing."""
    empty = Family("group_coordinator_epoch", "gauge", "Help.", ("rank",), ())
    full = Family("group_coordinator_processes", "gauge", "Help.", (), (Sample((), 0),))
    assert exposition([empty, full]) == (
        "# HELP group_coordinator_processes Help.\n"
        "# TYPE group_coordinator_processes gauge\n"
        "group_coordinator_processes 0\n"
    )


@requires("promtool")
def test_promtool_accepts_the_text() -> None:
    """Prometheus's own linter has no complaint about names, types or help texts."""
    outcome = subprocess.run(
        ["promtool", "check", "metrics"],
        input=exposition(families_of(reading())),
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert (outcome.returncode, outcome.stdout, outcome.stderr) == (0, "", "")


@pytest.mark.parametrize(
    ("name", "group", "writer", "reader"),
    [
        ("tp:0/1", "tp:0", "0", "1"),
        ("tp:0@2/1", "tp:0", "0", "1"),
        ("engine", "engine", "0", "1"),
        ("a/b/12", "a/b", "0", "1"),
    ],
)
def test_a_queue_is_counted_for_its_group(
    monkeypatch: pytest.MonkeyPatch, name: str, group: str, writer: str, reader: str
) -> None:
    """A group numbers its queues, and a number is no label; of several the greatest lag counts."""
    from coordinator.diagnosis.metrics import lags
    from coordinator.diagnosis.queues import Reader, Ring

    def ring(messages: int, state: str = "attached") -> Ring:
        behind = Reader(0, 11, 1, state, messages, 64 * messages, 0, waits=False)
        return Ring(name, False, 1, 0, 10, 0, readers=(behind,))

    rings = (ring(3), ring(9), ring(5), ring(100, state="left"))
    monkeypatch.setattr(lags, "read_rings", lambda pages: rings)
    assert lags.lags_of([]) == {QueueReader(writer, group, reader): Lag(9, 576)}


def test_a_channel_is_counted_for_its_two_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """It names them, also where only one of them has a page that can be read."""
    from coordinator.diagnosis.metrics import lags
    from coordinator.diagnosis.queues import Reader, Ring

    behind = Reader(0, None, None, "attached", 2, 128, 0, waits=False)
    ring = Ring("pp:0@12 3 to 5", True, 1, 4096, None, None, readers=(behind,))
    unknown = Ring("tp:0/1", False, 2, 0, None, None, readers=(behind,))
    monkeypatch.setattr(lags, "read_rings", lambda pages: (ring, unknown))
    assert lags.lags_of([]) == {
        QueueReader("3", "pp:0", "5"): Lag(2, 128),
        QueueReader("", "tp:0", "#0"): Lag(2, 128),
    }
