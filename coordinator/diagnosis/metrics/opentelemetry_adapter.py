"""Hand the metrics of this process to OpenTelemetry."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Final

from coordinator.diagnosis.metrics.families import PREFIX, Family
from coordinator.diagnosis.metrics.in_process import missing, own_families

if TYPE_CHECKING:
    from opentelemetry.metrics import CallbackOptions, Meter, Observation

__all__ = ["observe"]

# OpenTelemetry asks for each instrument on its own. One look serves all that ask within this time.
_SAME_S: Final = 1.0
# In OpenTelemetry the unit is not a part of the name. Exporters to Prometheus add it, and come to our names again.
_UNITS: Final = {
    "bytes": ("bytes", "By"),
    "wait_seconds": ("wait", "s"),
    "late_seconds": ("late", "s"),
    "inflight_seconds": ("inflight", "s"),
}


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
        raise missing("opentelemetry-api", "opentelemetry") from error
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
            self._families = {family.name: family for family in own_families()}
            self._until = time.monotonic() + _SAME_S
        return self._families.values()

    def family(self, name: str) -> Family:
        self.families()
        return self._families[name]
