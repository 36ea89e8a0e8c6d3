"""Metrics of what the ranks do, for Prometheus and OpenTelemetry, made of their status pages.

`python -m coordinator metrics` exports those of a whole host from a process of its own. An application that exports
its own metrics adds those of its process: with `REGISTRY.register(coordinator.diagnosis.metrics)` of prometheus_client,
or with `observe(meter)` of opentelemetry-api. Both libraries are optional and have extras: `pip install
'group-coordinator[prometheus]'` or `'group-coordinator[opentelemetry]'`.
"""

from coordinator.diagnosis.metrics.opentelemetry_adapter import observe
from coordinator.diagnosis.metrics.prometheus_client_adapter import collect

__all__ = ["collect", "observe"]
