"""Write metrics in the text format of Prometheus, version 0.0.4, which node_exporter reads from files too."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

from coordinator.diagnosis.metrics.families import Family, Sample

__all__ = ["CONTENT_TYPE", "exposition"]

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"


def exposition(families: Iterable[Family]) -> str:
    """Return the text. A family without series is left out."""
    return "".join(line + "\n" for family in families if family.samples for line in _lines(family))


def _lines(family: Family) -> Iterator[str]:
    yield f"# HELP {family.name} {_escaped(family.help)}"
    yield f"# TYPE {family.name} {family.kind}"
    for sample in family.samples:
        labels = list(zip(family.labels, sample.labels, strict=True))
        if family.kind == "histogram":
            yield from _histogram(family.name, labels, sample)
        else:
            yield f"{family.name}{_braced(labels)} {_number(sample.value)}"


def _histogram(name: str, labels: list[tuple[str, str]], sample: Sample) -> Iterator[str]:
    for limit, number in sample.buckets:
        yield f"{name}_bucket{_braced([*labels, ('le', _number(limit))])} {number}"
    yield f"{name}_sum{_braced(labels)} {_number(sample.value)}"
    yield f"{name}_count{_braced(labels)} {sample.buckets[-1][1]}"


def _braced(labels: list[tuple[str, str]]) -> str:
    inside = ",".join(f'{name}="{_quoted(value)}"' for name, value in labels)
    return f"{{{inside}}}" if inside else ""


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace("\n", r"\n")


def _quoted(text: str) -> str:
    return _escaped(text).replace('"', r"\"")


def _number(value: float) -> str:
    if value == float("inf"):
        return "+Inf"
    return repr(value)
