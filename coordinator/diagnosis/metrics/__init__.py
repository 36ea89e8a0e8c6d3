"""Metrics of what the ranks do, for Prometheus and OpenTelemetry, made of their status pages.

`python -m coordinator metrics` exports those of a whole host from a process of its own. An application that exports
its own metrics adds those of its process with `REGISTRY.register(collector())` of prometheus_client, or with
`observe(meter)` of opentelemetry-api. Both libraries are optional: `pip install 'group-coordinator[prometheus]'` or
`'group-coordinator[opentelemetry]'` installs them.
"""

from coordinator.diagnosis.metrics.in_process import collect, collector, observe

__all__ = ["collect", "collector", "observe"]
