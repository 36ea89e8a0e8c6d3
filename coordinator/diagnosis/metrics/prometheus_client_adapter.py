"""Hand the metrics of this process to prometheus_client."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from coordinator.diagnosis.metrics.families import PREFIX, Family, Sample
from coordinator.diagnosis.metrics.in_process import missing, own_families

if TYPE_CHECKING:
    from prometheus_client import Metric

__all__ = ["collect"]


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
        raise missing("prometheus_client", "prometheus") from error
    return [_metric(core, family) for family in own_families()]


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
