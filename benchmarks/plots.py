"""Plots of a run, as PNG and SVG: latency by size, its distribution, processor time by rate, latency by ranks.

The colours are those of Okabe and Ito, which people with any colour vision can distinguish; lines also differ in their
markers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Final

from benchmarks.results import LEVELS, Measurement, Region, Results
from benchmarks.tables import bytes_text

__all__ = ["STYLE", "draw_all", "edges_of"]

_COLOURS: Final = {
    "ours": "#0072B2",
    "ours, spin": "#009E73",
    "ours, park": "#56B4E9",
    "torch gloo": "#D55E00",
    "torch nccl": "#D55E00",
    "vllm": "#CC79A7",
}
_MARKERS: Final = {
    "ours": "o",
    "ours, spin": "^",
    "ours, park": "v",
    "torch gloo": "s",
    "torch nccl": "s",
    "vllm": "D",
}
_SHADES: Final = ("#EAF2F8", "#FBF3E2", "#EAF6EF", "#F6EAF2")
_LABELS: Final = {
    "ours": "group-coordinator",
    "vllm": "vLLM",
    "torch gloo": "torch Gloo",
    "torch nccl": "torch NCCL",
}
STYLE: Final[Any] = {
    "font.size": 10,
    "font.family": "DejaVu Sans",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 11,
    "axes.titlelocation": "left",
    "axes.axisbelow": True,
    "grid.color": "#D0D0D0",
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "figure.dpi": 110,
    "savefig.dpi": 160,
    "svg.hashsalt": "group-coordinator",  # equal figures give equal files
}
# Inches per panel: enough for every label.
_PANEL: Final = (5.4, 4.1)


def draw_all(results: Results, folder: Path) -> list[Path]:
    """Draw every plot for which a run has figures; return the written files."""
    import matplotlib as mpl

    mpl.use("Agg")
    folder.mkdir(parents=True, exist_ok=True)
    drawn: list[Path] = []
    with mpl.rc_context(STYLE):
        for name, draw in _PICTURES.items():
            figure = draw(results)
            if figure is not None:
                drawn += _save(figure, folder / name, results)
    return drawn


def _save(figure: Any, path: Path, results: Results) -> list[Path]:
    import matplotlib.pyplot as plt

    machine = results.machine
    devices = ", ".join(dict.fromkeys(machine.gpus)) or f"{machine.cpu}, {machine.cores} cores"
    text = f"{devices}, {machine.kernel}, torch {machine.packages.get('torch', '?')}, {results.date[:10]}"
    if results.is_quick:
        text += "\nA QUICK RUN: THESE FIGURES MEAN NOTHING"
    figure.text(0.01, 0.008, text, fontsize=7.5, color="#606060", ha="left", va="bottom")
    files = [path.with_suffix(".png"), path.with_suffix(".svg")]
    for file in files:
        # Without a date, an unchanged plot is an unchanged file.
        figure.savefig(file, metadata={"Date": None} if file.suffix == ".svg" else None)
    plt.close(figure)
    return files


def _panels(count: int) -> tuple[Any, list[Any]]:
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(
        1, count, figsize=(_PANEL[0] * count, _PANEL[1]), layout="constrained", squeeze=False
    )
    # Leave room at the bottom for the description of the machine.
    layout: Any = figure.get_layout_engine()
    layout.set(rect=(0, 0.08, 1, 0.92))
    return figure, list(axes[0])


def _line(axes: Any, name: str, xs: Iterable[float], ys: Iterable[float], **options: Any) -> None:
    options = {"marker": _MARKERS.get(name, "x"), "markersize": 4.5, "linewidth": 1.6} | options
    axes.plot(list(xs), list(ys), color=_COLOURS.get(name, "#000000"), label=_label(name), **options)


def _label(name: str) -> str:
    head, comma, rest = name.partition(",")
    return _LABELS.get(head, head) + comma + rest


def _of(results: Results, case: str, keep: Callable[[Measurement], bool]) -> dict[str, list[Measurement]]:
    """Return a case's measurements by implementation."""
    found: dict[str, list[Measurement]] = {}
    for each in results.measurements:
        if each.case == case and keep(each):
            found.setdefault(each.implementation, []).append(each)
    return found


def _time_axis(axis: Any) -> None:
    """Write times as 10 µs or 1 ms instead of powers of ten."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    low, high = axis.get_view_interval()
    # Up to two decades need ticks between the powers of ten.
    subs = (1.0,) if high / low > 100 else (1.0, 2.0, 5.0)
    axis.set_major_locator(LogLocator(subs=subs, numticks=12))
    axis.set_major_formatter(FuncFormatter(lambda value, _: _ten(value)))
    axis.set_minor_formatter(NullFormatter())


def _ten(value_us: float) -> str:
    for unit, size in (("s", 1e6), ("ms", 1e3)):
        if value_us >= size * 0.999:
            return f"{value_us / size:g} {unit}"
    return f"{value_us:g} µs"


def _legend(figure: Any, axes: Any) -> None:
    """Put the legend above the panels, where it covers no line."""
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(
        handles, labels, loc="outside upper left", ncols=min(len(labels), 2 if len(figure.axes) == 1 else 6)
    )


# --- latency by size ----------------------------------------------------------------------------------------


def edges_of(regions: Iterable[Region], first: float, last: float) -> list[tuple[float, float, str]]:
    """Return start, end and name of each algorithm's band on an axis from `first` to `last`, without gaps."""
    ordered = sorted(regions, key=lambda each: each.first_bytes)
    bands = []
    for index, each in enumerate(ordered):
        start = first if index == 0 else math.sqrt(ordered[index - 1].last_bytes * each.first_bytes)
        is_last = index + 1 == len(ordered)
        end = last if is_last else math.sqrt(each.last_bytes * ordered[index + 1].first_bytes)
        bands.append((start, end, each.algorithm))
    return bands


def _latency_by_size(results: Results) -> Any:
    worlds = {}
    for world_size in dict.fromkeys(each.world_size for each in results.measurements):
        found = _of(
            results,
            "all_reduce",
            lambda each, world_size=world_size: (  # type: ignore[misc]
                each.variant == "float32" and each.world_size == world_size
            ),
        )
        if len(found.get("ours", [])) >= 3:
            worlds[world_size] = found
    if not worlds:
        return None
    figure, panels = _panels(len(worlds))
    for axes, (world_size, found) in zip(panels, worlds.items(), strict=True):
        _one_size_panel(axes, results, world_size, found)
    low = min(axes.get_ylim()[0] for axes in panels)
    high = max(axes.get_ylim()[1] for axes in panels)
    for axes in panels:
        axes.set_ylim(low, high * 2)
        _time_axis(axes.yaxis)
    panels[0].set_ylabel("time of one all-reduce, with its\n10th to 90th percentile")
    _legend(figure, panels[0])
    return figure


def _one_size_panel(
    axes: Any, results: Results, world_size: int, found: dict[str, list[Measurement]]
) -> None:
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    sizes = sorted({each.nbytes or 1 for values in found.values() for each in values})
    first, last = sizes[0] / 1.6, sizes[-1] * 1.6
    regions = [
        each for each in results.regions if each.operation == "all_reduce" and each.world_size == world_size
    ]
    shades: dict[str, str] = {}
    for start, end, algorithm in edges_of(regions, first, last):
        shade = shades.setdefault(algorithm, _SHADES[len(shades) % len(_SHADES)])
        axes.axvspan(start, end, color=shade, linewidth=0, zorder=0)
        middle = math.sqrt(start * end)
        axes.text(
            middle, 0.97, algorithm, transform=axes.get_xaxis_transform(),
            ha="center", va="top", fontsize=8.5, color="#404040",
        )  # fmt: skip
    for name, values in found.items():
        ordered = sorted(values, key=lambda each: each.nbytes or 0)
        xs = [each.nbytes or 1 for each in ordered]
        _line(axes, name, xs, [each.at(50) for each in ordered])
        axes.fill_between(
            xs, [each.at(10) for each in ordered], [each.at(90) for each in ordered],
            color=_COLOURS.get(name, "#000000"), alpha=0.15, linewidth=0,
        )  # fmt: skip
    axes.set_xlim(first, last)
    axes.set_xticks(sizes[::2], [bytes_text(size) for size in sizes[::2]])
    axes.minorticks_off()
    axes.grid(axis="y")
    axes.set_xlabel("bytes of each rank's tensor (float32)")
    axes.set_title(f"All-reduce between {world_size} ranks")


# --- distributions ------------------------------------------------------------------------------------------

_DISTRIBUTIONS: Final = (
    ("queue", "tiny, 2 ms apart", None, "Broadcast of a tiny object, one way"),
    ("all_reduce", "float32", 16 << 10, "All-reduce of 16 KB"),
)


def _distribution(results: Results) -> Any:
    world_size = min((each.world_size for each in results.measurements), default=0)
    chosen = []
    for case, variant, nbytes, title in _DISTRIBUTIONS:
        found = _of(
            results,
            case,
            lambda each, key=(variant, nbytes): (  # type: ignore[misc]
                (each.variant, each.nbytes) == key and each.world_size == world_size
            ),
        )
        if found:
            chosen.append((title, found))
    if not chosen:
        return None
    figure, panels = _panels(len(chosen))
    for axes, (title, found) in zip(panels, chosen, strict=True):
        axes.set_xscale("log")
        for name, (each, *_) in found.items():
            _line(axes, name, each.percentiles_us, LEVELS, marker="", linewidth=2.0)
            axes.plot([each.at(50)], [50], color=_COLOURS.get(name), marker=_MARKERS.get(name), markersize=6)
        axes.set_ylim(0, 101)
        axes.set_yticks([0, 25, 50, 75, 90, 99], ["0 %", "25 %", "50 %", "75 %", "90 %", "99 %"])
        _time_axis(axes.xaxis)
        axes.grid(axis="both")
        axes.set_xlabel("time")
        axes.set_title(f"{title}, {world_size} ranks")
    panels[0].set_ylabel("share of calls within this time")
    widest = max(panels, key=lambda axes: len(axes.get_legend_handles_labels()[1]))
    _legend(figure, widest)
    return figure


# --- processor time by rate ---------------------------------------------------------------------------------


def _waiting(results: Results) -> Any:
    found = _of(results, "waiting", lambda each: each.calls > 0)
    if not found:
        return None
    figure, (axes, latency) = _panels(2)
    for name, values in found.items():
        ordered = sorted(values, key=lambda each: each.rate_per_s)
        rates = [each.rate_per_s for each in ordered]
        _line(axes, name, rates, [each.cpu_percent for each in ordered])
        _line(latency, name, rates, [each.at(50) for each in ordered])
    for each in (axes, latency):
        each.set_xscale("log")
        each.set_xlabel("messages per second")
        each.xaxis.set_major_formatter("{x:g}")
        each.grid(axis="both")
    axes.set_ylim(0, max(105, axes.get_ylim()[1]))
    axes.set_ylabel("processor time, % of a core")
    axes.set_title("Processor time of a waiting reader")
    latency.set_yscale("log")
    _time_axis(latency.yaxis)
    latency.set_ylabel("median time of a message, one way")
    latency.set_title("Latency of a message")
    _legend(figure, axes)
    return figure


# --- latency by ranks ---------------------------------------------------------------------------------------


def _by_ranks(results: Results) -> Any:
    kinds = (
        ("barrier", None, "Barrier"),
        ("all_reduce", 8 << 10, "All-reduce of 8 KB"),
        ("all_reduce", 1 << 20, "All-reduce of 1 MB"),
    )
    chosen = []
    for variant, nbytes, title in kinds:
        found = _of(
            results,
            "scaling",
            lambda each, key=(variant, nbytes): (each.variant, each.nbytes) == key,  # type: ignore[misc]
        )
        if any(len({each.world_size for each in values}) > 1 for values in found.values()):
            chosen.append((title, found))
    if not chosen:
        return None
    figure, panels = _panels(len(chosen))
    for axes, (title, found) in zip(panels, chosen, strict=True):
        axes.set_yscale("log")
        for name, values in found.items():
            ordered = sorted(values, key=lambda each: each.world_size)
            counts = [each.world_size for each in ordered]
            _line(axes, name, counts, [each.at(50) for each in ordered])
            axes.set_xticks(counts)
        _time_axis(axes.yaxis)
        axes.grid(axis="y")
        cores = results.machine.cores
        axes.set_xlabel(f"ranks, on {cores} cores")
        axes.set_title(title)
    panels[0].set_ylabel("median time of a call")
    _legend(figure, panels[0])
    return figure


_PICTURES: Final[dict[str, Callable[[Results], Any]]] = {
    "latency_by_size": _latency_by_size,
    "latency_distribution": _distribution,
    "cpu_by_rate": _waiting,
    "latency_by_ranks": _by_ranks,
}
