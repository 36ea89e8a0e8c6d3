"""Read the metrics of this process, for the library that its application exports with."""

from __future__ import annotations

from typing import Final

from coordinator.diagnosis.metrics.families import PREFIX, Family, families_of
from coordinator.diagnosis.metrics.reader import MetricsReader, read_own
from shm_broadcast.errors import CapabilityError

__all__ = ["missing", "own_families"]

_READER: Final = MetricsReader(read_own)
# A host's exporter tells these. Of itself a process only knows that it lives.
_OF_HOST: Final = (f"{PREFIX}processes", f"{PREFIX}undecodable_pages")


def own_families() -> list[Family]:
    """Return what this process did."""
    return [family for family in families_of(_READER.read()) if family.name not in _OF_HOST]


def missing(library: str, extra: str) -> CapabilityError:
    """Return the error for a library that is not installed, with the extra that has it."""
    return CapabilityError(
        f"{library} is not installed: pip install 'group-coordinator[{extra}]'", requirement=library
    )
