"""An application exports what its own process does with the library that it has."""

import itertools
import os
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.openmetrics.parser import text_string_to_metric_families as read_openmetrics
from prometheus_client.parser import text_string_to_metric_families

from coordinator.diagnosis import metrics
from coordinator.diagnosis.decoding import decode_page
from coordinator.diagnosis.metrics import in_process, opentelemetry_adapter, reader
from coordinator.diagnosis.metrics.exposition import exposition
from coordinator.diagnosis.metrics.families import families_of
from coordinator.diagnosis.metrics.reader import MetricsReader, read_own
from coordinator.diagnosis.pages import Search
from shm_broadcast import _core
from shm_broadcast.errors import CapabilityError, DecodeError
from shm_broadcast.segment import Segment
from shm_broadcast.status.kinds import kind_of
from shm_broadcast.status.layout import NAME, PAGE_BYTES, TABLES, GroupState, LaneState, Outcome
from shm_broadcast.status.page import GroupStatus, own_page

BARRIER = kind_of("barrier")


def make_group(name: str) -> GroupStatus:
    status = own_page().group(name, 0, [0, 1])
    status.set_state(GroupState.USABLE)
    return status


def make_calls(status: GroupStatus, number: int, outcome: Outcome = Outcome.DONE) -> None:
    lane = status.lane("host", "process group")
    for _ in range(number):
        lane.begin(BARRIER, 0, 0, 0)
        lane.end(outcome)


NAMES = (f"in_process:{number}" for number in itertools.count())


@pytest.fixture
def name() -> str:
    """Of a group that no other test counts in."""
    return next(NAMES)


@pytest.fixture
def group(name: str) -> Iterator[GroupStatus]:
    """A group with three barriers, one of which failed and one of which disagreed."""
    status = make_group(name)
    make_calls(status, 1)
    make_calls(status, 1, Outcome.FAILED)
    make_calls(status, 1, Outcome.DISAGREED)
    yield status
    status.leave()


def values(families: Any, name: str, **labels: str) -> list[float]:
    return [
        sample.value
        for family in families
        for sample in family.samples
        if sample.name == f"group_coordinator_{name}" and labels.items() <= sample.labels.items()
    ]


def registry() -> CollectorRegistry:
    found = CollectorRegistry()
    found.register(metrics)
    return found


def test_prometheus_client_collects(name: str, group: GroupStatus) -> None:
    """Its registry takes the module, as it has `collect`."""
    families = list(text_string_to_metric_families(generate_latest(registry()).decode()))
    assert values(families, "calls_total", group=name, op="barrier", plane="host") == [3]
    assert values(families, "errors_total", group=name, error="disagreed") == [1]
    assert values(families, "errors_total", group=name, error="failed") == [1]
    assert values(families, "wait_seconds_count", group=name) == [3]
    assert values(families, "group_usable", group=name) == [1]


def test_both_forms_of_text_are_valid(name: str, group: GroupStatus) -> None:
    """A Prometheus server asks prometheus_client for OpenMetrics, in which no two families have one name."""
    families = list(read_openmetrics(openmetrics.generate_latest(registry()).decode()))
    assert values(families, "calls_total", group=name) == [3]
    assert len({family.name for family in families}) == len(families)
    (waited,) = values(families, "wait_seconds_total", group=name)
    assert values(families, "wait_seconds_sum", group=name) == [waited]


def test_names_and_series_are_those_of_the_exporter(name: str, group: GroupStatus) -> None:
    """The same queries and alerts work for both, but for two gauges on the host."""
    ours = exposition(families_of(MetricsReader(read_own).read()))

    def series(text: str) -> set[tuple[str, frozenset[tuple[str, str]]]]:
        return {
            (sample.name, frozenset((name, value) for name, value in sample.labels.items() if name != "le"))
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }

    of_host: set[Any] = {
        ("group_coordinator_processes", frozenset()),
        ("group_coordinator_undecodable_pages", frozenset()),
    }
    assert series(ours) - of_host == series(generate_latest(registry()).decode())


def test_sums_do_not_fall_when_a_group_gets_the_place_of_another() -> None:
    """A page has room for 64 groups. An application that makes more sees each call once, and all of them."""

    def calls() -> float:
        return sum(values(registry().collect(), "calls_total", group="reused:0"))

    last = 0.0
    for number in range(2 * TABLES["groups"].number):
        status = make_group("reused:0")
        make_calls(status, 3)
        assert calls() == last + 3
        last = calls()
        status.leave()
        assert calls() == last
        assert number < 2 * TABLES["groups"].number


def test_a_call_in_progress_is_shown(name: str, group: GroupStatus) -> None:
    """Its time grows while it goes on, also while this rank waits."""
    lane = group.lane("device", "shared memory")
    lane.begin(BARRIER, 0, 0, 0)
    lane.set_state(LaneState.POSTED)
    first, second = (
        values(metrics.collect(), "inflight_seconds", group=name, plane="device") for _ in range(2)
    )
    assert 0 < first[0] < second[0] < 60
    lane.end(Outcome.DONE)
    assert values(metrics.collect(), "inflight_seconds", group=name, plane="device") == [0]


def test_opentelemetry_observes(name: str, group: GroupStatus, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counters and gauges with the same values; names that exporters to Prometheus turn into ours."""
    monkeypatch.setattr(opentelemetry_adapter, "_SAME_S", 0.0)
    exported = InMemoryMetricReader()
    provider = MeterProvider([exported])
    metrics.observe(provider.get_meter("test"))
    data = exported.get_metrics_data()
    assert data is not None
    found = {each.name: each for each in data.resource_metrics[0].scope_metrics[0].metrics}
    provider.shutdown()
    assert set(found) == {
        f"group_coordinator.{name}"
        for name in (
            *("calls", "bytes", "wait", "last_arrivals", "late", "errors"),
            *("inflight", "group_usable", "epoch", "build_info"),
        )
    }
    assert {name: each.unit for name, each in found.items() if each.unit} == {
        "group_coordinator.bytes": "By",
        "group_coordinator.wait": "s",
        "group_coordinator.late": "s",
        "group_coordinator.inflight": "s",
    }
    points = [
        point
        for point in found["group_coordinator.calls"].data.data_points
        if (point.attributes or {}).get("group") == name
    ]
    assert [(point.value, point.attributes["op"]) for point in points] == [(3, "barrier")]  # type: ignore[union-attr,index]
    assert found["group_coordinator.calls"].data.is_monotonic  # type: ignore[union-attr]


def test_instruments_share_one_look(name: str, group: GroupStatus, monkeypatch: pytest.MonkeyPatch) -> None:
    """OpenTelemetry asks for each of a dozen instruments on its own."""
    looks: list[int] = []

    def look() -> Any:
        looks.append(1)
        return read_own()

    monkeypatch.setattr(in_process, "_READER", MetricsReader(look))
    monkeypatch.setattr(opentelemetry_adapter, "_SAME_S", 3600.0)
    exported = InMemoryMetricReader()
    provider = MeterProvider([exported])
    metrics.observe(provider.get_meter("test"))
    exported.get_metrics_data()
    provider.shutdown()
    assert len(looks) == 1


@pytest.mark.parametrize(
    ("modules", "call", "extra"),
    [
        (["prometheus_client"], metrics.collect, "prometheus"),
        (
            ["opentelemetry.metrics"],
            lambda: metrics.observe(None),  # type: ignore[arg-type]
            "opentelemetry",
        ),
    ],
)
def test_a_missing_library_is_named_with_its_extra(
    monkeypatch: pytest.MonkeyPatch, modules: list[str], call: Any, extra: str
) -> None:
    """Nothing else of the product needs it."""
    for module in modules:
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(CapabilityError, match=rf"pip install 'group-coordinator\[{extra}\]'"):
        call()


def test_a_forked_child_begins_again(name: str, group: GroupStatus, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its parent exports what it has counted itself."""
    own = MetricsReader(read_own)
    assert any(key.group == name for key in own.read().counts)
    group.leave()
    monkeypatch.setattr(own, "_search", lambda: Search((), (), {}))
    assert any(key.group == name for key in own.read().counts)
    monkeypatch.setattr(reader, "fork_count", lambda: own._forks + 1)
    assert own.read().counts == {}


def test_calls_without_sense_hide_no_other_page(
    name: str, group: GroupStatus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The counters of a page make sense and its calls do not: its errors count as failures, and all else as ever."""

    def decode(copy: bytes, records: bool = True) -> Any:
        if records:
            raise DecodeError("outcome 9")
        return decode_page(copy, records)

    monkeypatch.setattr(reader, "decode_page", decode)
    counts = [of for key, of in MetricsReader(read_own).read().counts.items() if key.group == name]
    assert [(of.disagreed, of.failed) for of in counts] == [(0, 2)]


def test_only_the_page_of_an_error_is_decoded_with_its_calls(
    name: str, group: GroupStatus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank may hold the pages of all others, and the calls of one page take longer than all the rest."""
    whole: list[int] = []

    def decode(copy: bytes, records: bool = True) -> Any:
        page = decode_page(copy, records)
        if records:
            whole.append(page.pid)
        return page

    monkeypatch.setattr(reader, "decode_page", decode)
    own = MetricsReader(read_own)
    other = Segment.create(PAGE_BYTES, name=NAME)
    try:
        _core.status_format(other.memory, 1, 1, 1, 1, b"", b"")
        for _ in range(2):
            assert [of.disagreed for key, of in own.read().counts.items() if key.group == name] == [1]
    finally:
        other.close()
    assert whole == [os.getpid()]
