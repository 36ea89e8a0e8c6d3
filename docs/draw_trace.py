"""Draw a part of a trace as `docs/images/trace.svg`: `python docs/draw_trace.py TRACE.json OUT.svg FROM_MS TO_MS`."""

import json
import sys
from pathlib import Path

import matplotlib as mpl
from matplotlib import pyplot as plt

mpl.use("svg")
mpl.rcParams["svg.hashsalt"] = "trace"
COLORS = {"all_reduce": "#3f8f8f", "all_gather": "#c08a3e", "barrier": "#7a6fb0"}
WAIT = "#d9d9d9"


def draw(trace: Path, out: Path, start_ms: float, end_ms: float) -> None:
    """Draw the slices and arrows between two times in milliseconds, a row for each track."""
    events = json.loads(trace.read_text())["traceEvents"]
    processes = {each["pid"]: each["args"]["name"] for each in events if each["name"] == "process_name"}
    shown = [
        each
        for each in events
        if each["ph"] == "X" and each["ts"] < end_ms * 1e3 and each["ts"] + each["dur"] > start_ms * 1e3
    ]
    used = {(each["pid"], each["tid"]) for each in shown}
    titles = {
        (each["pid"], each["tid"]): f"{processes[each['pid']].split(' · ')[0]}\n{each['args']['name']}"
        for each in events
        if each["name"] == "thread_name" and (each["pid"], each["tid"]) in used
    }
    rows = {track: place for place, track in enumerate(sorted(titles))}
    figure, axes = plt.subplots(figsize=(9, 0.5 + 0.62 * len(rows)))
    for each in shown:
        # A wait is drawn over the lower half of its call.
        row, wait = rows[each["pid"], each["tid"]], each["name"].startswith("wait")
        top, height = (row, 0.35) if wait else (row - 0.35, 0.7)
        color = WAIT if wait else COLORS.get(each["args"]["Collective name"], "#888888")
        axes.broken_barh(
            [(each["ts"] / 1e3 - start_ms, each["dur"] / 1e3)],
            (top, height),
            color=color,
            edgecolor="black",
            linewidth=0.4,
        )
        at = (each["ts"] + each["dur"] / 2) / 1e3 - start_ms
        if each["dur"] > (end_ms - start_ms) * 100 and 0 < at < end_ms - start_ms:
            middle = row + (0.17 if wait else -0.18)
            axes.text(at, middle, each["name"], ha="center", va="center", fontsize=6.5)
    ends = {each["id"]: each for each in events if each["ph"] == "f"}
    for each in events:
        if each["ph"] == "s" and start_ms * 1e3 < each["ts"] < end_ms * 1e3:
            at, other = each["ts"] / 1e3 - start_ms, ends[each["id"]]
            arrow = {
                "arrowstyle": "->,head_width=0.15,head_length=0.25",
                "color": "#b03030",
                "linewidth": 0.8,
                "shrinkA": 0,
                "shrinkB": 0,
            }
            to = (other["ts"] / 1e3 - start_ms, rows[other["pid"], other["tid"]])
            axes.annotate("", to, (at, rows[each["pid"], each["tid"]]), arrowprops=arrow)
    axes.set_yticks(range(len(rows)), [titles[track] for track in sorted(titles)], fontsize=7)
    axes.set_xlim(0, end_ms - start_ms)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_xlabel("ms", fontsize=7)
    axes.tick_params(labelsize=7)
    figure.tight_layout()
    figure.savefig(out, metadata={"Date": None})


if __name__ == "__main__":
    draw(Path(sys.argv[1]), Path(sys.argv[2]), float(sys.argv[3]), float(sys.argv[4]))
