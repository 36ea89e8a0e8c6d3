"""Hand the metrics of this process to the library that its application exports with."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, Final

from coordinator.diagnosis.metrics.families import PREFIX, Family, Sample, families_of
from coordinator.diagnosis.metrics.reader import MetricsReader, read_own
from shm_broadcast.errors import CapabilityError

if TYPE_CHECKING:
    from opentelemetry.metrics import CallbackOptions, Meter, Observation
    from prometheus_client import Metric

__all__ = ["collect", "observe"]

_READER: Final = MetricsReader(read_own)
# OpenTelemetry asks for each instrument on its own. One look serves all that ask within this time.
_SAME_S: Final = 1.0
# In OpenTelemetry the unit is not a part of the name. Exporters to Prometheus add it, and come to our names again.
_UNITS: Final = {
    "bytes": ("bytes", "By"),
    "wait_seconds": ("wait", "s"),
    "late_seconds": ("late", "s"),
    "inflight_seconds": ("inflight", "s"),
}
# A host's exporter tells these. Of itself a process only knows that it lives.
_OF_HOST: Final = (f"{PREFIX}processes", f"{PREFIX}undecodable_pages")


def collect() -> list[Metric]:
    """Return what this process's ranks did, as metric families of prometheus_client.

    `REGISTRY.register(coordinator.diagnosis.metrics)` makes a registry call it: that takes whatever has a `collect`.
    Any thread may call it, and no other rank takes part: it reads the process's status page, and waits for no call that
    goes on. Names, labels and values are those of `python -m coordinator metrics`, with two differences:
    `group_coordinator_wait_seconds_total` is of unknown type, because in OpenMetrics a counter of that name and the
    histogram `group_coordinator_wait_seconds` would be one family. And of a queue only this process's end is known: the
    other's rank is its place, such as "#0", or empty for the writer.

    Returns:
        The families. Counters never fall in one process; a forked child begins at 0.

    Raises:
        CapabilityError: prometheus_client is not installed.
    """
    try:
        from prometheus_client import core
    except ImportError as error:
        raise _missing("prometheus_client", "prometheus") from error
    return [_metric(core, family) for family in _own_families()]


def observe(meter: Meter) -> None:
    """Make observable instruments of opentelemetry-api that show what this process's ranks did.

    Call it once for each meter. The names are those of `collect` with the unit apart, such as `group_coordinator.wait`
    in s, so that they come out the same in Prometheus. The histogram is missing: OpenTelemetry has no observable one.
    Values are at most a second old.

    Args:
        meter: Such as `opentelemetry.metrics.get_meter("group_coordinator")`.

    Raises:
        CapabilityError: opentelemetry-api is not installed.
    """
    try:
        from opentelemetry.metrics import Observation
    except ImportError as error:
        raise _missing("opentelemetry-api", "opentelemetry") from error
    look = _Look()

    def callback(name: str) -> Callable[[CallbackOptions], Iterator[Observation]]:
        def observations(_: CallbackOptions) -> Iterator[Observation]:
            family = look.family(name)
            for sample in family.samples:
                yield Observation(sample.value, dict(zip(family.labels, sample.labels, strict=True)))

        return observations

    for family in look.families():
        plain = family.name.removeprefix(PREFIX).removesuffix("_total")
        name, unit = _UNITS.get(plain, (plain, ""))
        if family.kind == "counter":
            meter.create_observable_counter(
                f"group_coordinator.{name}", [callback(family.name)], unit, family.help
            )
        elif family.kind == "gauge":
            meter.create_observable_gauge(
                f"group_coordinator.{name}", [callback(family.name)], unit, family.help
            )


class _Look:
    """The families of this process, as they were at most a second ago."""

    def __init__(self) -> None:
        self._families: dict[str, Family] = {}
        self._until = 0.0

    def families(self) -> Iterable[Family]:
        if time.monotonic() >= self._until:
            self._families = {family.name: family for family in _own_families()}
            self._until = time.monotonic() + _SAME_S
        return self._families.values()

    def family(self, name: str) -> Family:
        self.families()
        return self._families[name]


def _own_families() -> list[Family]:
    return [family for family in families_of(_READER.read()) if family.name not in _OF_HOST]


def _missing(library: str, extra: str) -> CapabilityError:
    return CapabilityError(
        f"{library} is not installed: pip install 'group-coordinator[{extra}]'", requirement=library
    )


def _metric(core: Any, family: Family) -> Metric:
    """Return a family in the form of prometheus_client."""
    if family.name == f"{PREFIX}wait_seconds_total":
        kind = core.UnknownMetricFamily
    else:
        kind = {
            "counter": core.CounterMetricFamily,
            "gauge": core.GaugeMetricFamily,
            "histogram": core.HistogramMetricFamily,
        }[family.kind]
    metric = kind(family.name, family.help, labels=family.labels)
    for sample in family.samples:
        if family.kind == "histogram":
            metric.add_metric(sample.labels, _buckets(sample), sum_value=sample.value)
        else:
            metric.add_metric(sample.labels, sample.value)
    found: Metric = metric
    return found


def _buckets(sample: Sample) -> list[tuple[str, float]]:
    return [
        ("+Inf" if limit == float("inf") else repr(limit), float(number)) for limit, number in sample.buckets
    ]
