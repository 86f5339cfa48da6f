"""Throughput over concurrency as a picture, one line per policy."""

from __future__ import annotations

from pathlib import Path

from ..pictures import new_figure
from .candidates import is_fixed
from .report import Simulation

_COLOURS = ("#2f5d8a", "#b0607a", "#3f9150", "#c9a227", "#6b4f9a", "#4fa3a5", "#d07a3a")
_FIXED_COLOUR = "#c4cad0"


def save_plot(simulation: Simulation, path: Path) -> None:
    """Draw throughput over concurrency into an image file.

    Fixed lengths are drawn in grey, the best of them at each load as a dashed line.

    Args:
        simulation: what to draw.
        path: the file; its suffix chooses the format.

    Raises:
        InvalidSettingError: matplotlib is not installed, or cannot write this format.
    """
    figure = new_figure(path, (9, 6))
    axes = figure.subplots()
    loads = list(simulation.loads)
    colours = iter(_COLOURS * len(simulation.policies))
    for policy in simulation.policies:
        heights = [simulation.at(policy, load).throughput for load in loads]
        if is_fixed(policy) and policy != "plain":
            axes.plot(loads, heights, color=_FIXED_COLOUR, linewidth=1.0, zorder=1)
            axes.annotate(policy.removeprefix("fixed-"), (loads[-1], heights[-1]), fontsize=7, color="grey")
        else:
            axes.plot(loads, heights, marker="o", markersize=4, color=next(colours), label=policy, zorder=2)
    best = [simulation.best_fixed(load) for load in loads]
    if all(best):
        heights = [0.0 if outcome is None else outcome.throughput for outcome in best]
        axes.plot(loads, heights, color="black", linewidth=1.0, linestyle="--", label="best fixed length", zorder=3)
    axes.set_xscale("log", base=2)
    axes.set_xticks(loads, [str(load) for load in loads])
    axes.set_xlabel("requests decoded together")
    axes.set_ylabel("tokens per second, all requests")
    axes.set_ylim(bottom=0.0)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=8, frameon=False)
    header = simulation.recording.header
    title = f"{header.drafter}, temperature {header.temperature:g}, {len(simulation.recording.rounds)} recorded rounds"
    axes.set_title("\n".join([title, *simulation.warnings]), fontsize=9)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=140)
