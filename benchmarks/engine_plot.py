"""A picture of an engine's steps, and of what an engine with little to do costs, stock and ours."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any, Final

from benchmarks.plots import STYLE
from benchmarks.results import describe_machine, now

__all__ = ["draw_engines"]

SIDES: Final = {
    "stock": ("vLLM", "#CC79A7"),
    "ours": ("vLLM on group-coordinator", "#0072B2"),
}
PANELS: Final = {
    "step_ms": ("Step of 4 requests, TP 2 (dotted: without collectives)", "ms"),
    "short_p50_ms": ("Short request every 0.1 s, median", "ms"),
    "short_cores": ("Processor time of all processes meanwhile", "cores"),
}


def draw_engines(found: dict[str, Any], path: Path) -> None:
    """Draw each round as a dot, and medians as bars; a dotted line is a step without collectives. Write PNG and SVG."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    with mpl.rc_context(STYLE):
        figure, axes = plt.subplots(1, len(PANELS), figsize=(4.2 * len(PANELS), 3.6), layout="constrained")
        layout: Any = figure.get_layout_engine()
        layout.set(rect=(0, 0.08, 1, 0.92))
        for panel, (name, (title, unit)) in zip(axes, PANELS.items(), strict=True):
            for place, (side, (_, colour)) in enumerate(SIDES.items()):
                values = found["rounds"][side][name]
                middle = statistics.median(values)
                panel.bar(place, middle, 0.6, color=colour, alpha=0.35)
                # Dots of one bar stand beside each other in the order of the rounds.
                across = [place - 0.22 + 0.44 * at / max(1, len(values) - 1) for at in range(len(values))]
                panel.plot(across, values, "o", markersize=3, color=colour)
                panel.text(place, 0, f"{middle:.3g}", ha="center", va="bottom", fontsize=9)
                if name == "step_ms":
                    silent = statistics.median(found["rounds"][side]["silent_ms"])
                    panel.hlines(silent, place - 0.3, place + 0.3, color="#404040", linestyles="dotted")
            panel.set_xticks(
                range(len(SIDES)), [label.replace(" on ", "\non ") for label, _ in SIDES.values()], fontsize=8
            )
            panel.set_title(f"{title} ({unit})", fontsize=10)
            panel.set_ylim(bottom=0)
            panel.grid(axis="y")
        machine = describe_machine()
        versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
        beside = f", {found['busy']} busy loop beside" if found["busy"] else ""
        text = f"{machine.cpu}, {machine.cores} cores{beside}, {versions}, {now()[:10]}"
        figure.text(0.01, 0.008, text, fontsize=7.5, color="#606060", ha="left", va="bottom")
        for file in (path.with_suffix(".png"), path.with_suffix(".svg")):
            figure.savefig(file, metadata={"Date": None} if file.suffix == ".svg" else None)
        plt.close(figure)
