"""A benchmark as one picture: speedup by category, and where the time of a token goes."""

from __future__ import annotations

import itertools
import textwrap
from pathlib import Path
from typing import Any

from ..pictures import new_figure
from .run import BenchReport
from .summary import PHASES, Summary

_THEIRS = ("#c4cad0", "#a3abb4", "#7f8994", "#5c6670", "#3d454d")
_OURS = ("#9cc3e0", "#4f86b5", "#9fd3a4", "#3f9150", "#e6b3c0", "#b0607a", "#e3c86b", "#b58a1f")
_TITLE_COLUMNS = 140
_PHASE_COLOURS = {
    "weights": "#2f5d8a",
    "prefill": "#9aa3ad",
    "predict": "#c9a227",
    "admit": "#e3c86b",
    "execute": "#7fa8cc",
    "verify": "#6fae75",
    "commit": "#b0607a",
    "other": "#d9d9d9",
}


def save_plot(report: BenchReport, path: Path) -> None:
    """Draw the report into an image file.

    Args:
        report: what to draw.
        path: the file; its suffix chooses the format.

    Raises:
        InvalidSettingError: matplotlib is not installed, or cannot write this format.
    """
    figure = new_figure(path, (13, 9))
    upper, lower = figure.subplots(2, 1, height_ratios=(3, 2))
    _draw_categories(upper, report)
    _draw_phases(lower, report)
    origin = report.provenance
    title = [
        f"{origin['model']}, {origin['dtype']}, {origin['threads']} thread(s), {origin['device']['name']}",
        f"{len(report.prompts)} prompts, {report.settings.max_tokens} new tokens, greedy, {origin['date'][:10]}",
    ]
    if report.warnings:
        title += textwrap.wrap("times in doubt: " + "; ".join(report.warnings), _TITLE_COLUMNS)
    figure.suptitle("\n".join(title), fontsize=10, color="darkred" if report.warnings else "black")
    figure.savefig(path, dpi=140)


def _draw_categories(axes: Any, report: BenchReport) -> None:
    """Grouped bars: one group per category, one bar per row that speculates or decodes plainly here."""
    rows = [row for row in report.summaries[1:] if row.info.is_ours or row.info.speculates]
    categories = [*report.summaries[0].by_category, "geometric mean"]
    width = 0.84 / len(rows)
    colours = {True: itertools.cycle(_OURS), False: itertools.cycle(_THEIRS)}
    for number, row in enumerate(rows):
        heights = [*row.by_category.values(), row.speedup]
        places = [place - 0.42 + (number + 0.5) * width for place in range(len(categories))]
        axes.bar(places, heights, width * 0.94, label=row.info.name, color=next(colours[row.info.is_ours]))
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.set_xticks(range(len(categories)), categories, rotation=25, ha="right")
    axes.set_ylabel("speedup over generate")
    axes.spines[["top", "right"]].set_visible(False)
    axes.axvline(len(categories) - 1.5, color="grey", linewidth=0.6, linestyle=":")
    axes.legend(ncols=4, fontsize=8, frameon=False, loc="lower left", bbox_to_anchor=(0.0, 1.0))


def _draw_phases(axes: Any, report: BenchReport) -> None:
    """Stacked bars of milliseconds per token; the part of the forwards that reading the weights takes is set apart."""
    rows = list(report.summaries)
    for place, row in enumerate(rows):
        left = 0.0
        for name, seconds in _parts(row, report.read_seconds).items():
            length = 1e3 * seconds / row.tokens
            axes.barh(
                place, length, left=left, color=_PHASE_COLOURS[name], label=name if place == len(rows) - 1 else None
            )
            left += length
    axes.set_yticks(range(len(rows)), [row.info.name for row in rows])
    axes.invert_yaxis()
    axes.set_xlabel(
        "milliseconds per token (weights: reading them at the measured bandwidth; transformers' rows are not divided)"
    )
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(ncols=len(_PHASE_COLOURS), fontsize=8, frameon=False, loc="lower left", bbox_to_anchor=(0.0, 1.0))


def _parts(row: Summary, read_seconds: float) -> dict[str, float]:
    if row.phase_seconds is None or row.counts is None:
        return {"other": row.seconds}
    reading = min(row.phase_seconds["execute"], read_seconds * row.counts.rounds)
    parts = {"weights": reading}
    for name in PHASES:
        parts[name] = row.phase_seconds[name] - (reading if name == "execute" else 0.0)
    return parts
