"""An evaluation as two pictures: acceptance and speed, and reliability of the confidences."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..pictures import new_figure
from .confidence import PositionCalibration
from .lineup import PLAIN
from .run import DrafterResult, EvaluationReport

_COLOURS = ("#2f5d8a", "#3f9150", "#b58a1f", "#b0607a", "#5c6670", "#7fa8cc", "#9fd3a4", "#e3c86b")
_RAW, _CORRECTED = "#b0607a", "#2f5d8a"
_MOST_PANELS = 8
_FEW = 10
"""Bins with fewer rounds are left out of the curves: their frequencies are noise."""


def save_plot(report: EvaluationReport, path: Path) -> None:
    """Draw accepted lengths, acceptance by position, and speed where it was measured.

    Args:
        report: what to draw.
        path: the file; its suffix chooses the format.

    Raises:
        InvalidSettingError: matplotlib is not installed, or cannot write this format.
    """
    figure = _figure(path, (13, 11 if report.speeds else 8))
    rows = figure.subplot_mosaic(
        [["lengths", "lengths"], ["conditional", "survival"], *([["speed", "speed"]] if report.speeds else [])]
    )
    _draw_lengths(rows["lengths"], report.results)
    _draw_positions(rows["conditional"], rows["survival"], report.results)
    if report.speeds:
        _draw_speed(rows["speed"], report)
    origin = report.provenance
    title = (
        f"{origin['model']}, {origin['dtype']}, {origin['threads']} thread(s), {origin['device']['name']}\n"
        f"{len(report.prompts.prompts)} prompts from {report.prompts.source}, {report.settings.max_tokens} new tokens, "
        f"{origin['date'][:10]}"
    )
    if report.warnings:
        title += f"\ntimes in doubt: {report.warnings[0]}"
    figure.suptitle(title, fontsize=10, color="darkred" if report.warnings else "black")
    figure.savefig(path, dpi=140)


def save_reliability(results: Sequence[DrafterResult], path: Path) -> bool:
    """Draw reliability: one row per drafter and temperature, one panel per position; bars say how many rounds.

    Args:
        results: those without confidences are left out.
        path: the file; its suffix chooses the format.

    Returns:
        False where no drafter makes estimates: nothing was drawn.

    Raises:
        InvalidSettingError: matplotlib is not installed, or cannot write this format.
    """
    found = [(result, result.confidence) for result in results if result.confidence is not None]
    if not found:
        return False
    width = min(_MOST_PANELS, max(len(confidence.raw) for _, confidence in found))
    figure = _figure(path, (2.2 * width + 1, 2.6 * len(found) + 0.6))
    panels = figure.subplots(len(found), width, squeeze=False, sharex=True, sharey=True)
    for row, (result, confidence) in enumerate(found):
        panels[row][0].set_ylabel(f"{result.drafter}\nT={result.temperature:g}\naccepted", fontsize=8)
        for column in range(width):
            axes = panels[row][column]
            if column >= len(confidence.raw):
                axes.set_visible(False)
                continue
            _draw_reliability(axes, confidence.raw[column], _RAW, "raw")
            title = f"position {column + 1}: ECE {confidence.raw[column].ece:.1%}"
            if confidence.corrected is not None:
                _draw_reliability(axes, confidence.corrected[column], _CORRECTED, "calibrated")
                title += f" -> {confidence.corrected[column].ece:.1%}"
            axes.set_title(f"{title}\n(noise {confidence.raw[column].ece_noise:.1%})", fontsize=7)
    panels[0][0].legend(fontsize=7, frameon=False)
    figure.supxlabel(f"claimed survival (bins of {_FEW} rounds or more; bars: rounds)", fontsize=9)
    figure.savefig(path, dpi=140)
    return True


def _figure(path: Path, size: tuple[float, float]) -> Any:
    return new_figure(path, size, setting="out", what="matplotlib for its pictures")


def _label(result: DrafterResult) -> str:
    return f"{result.drafter} T={result.temperature:g}"


def _draw_lengths(axes: Any, results: Sequence[DrafterResult]) -> None:
    names = [*dict.fromkeys(name for result in results for name in result.categories), "mean"]
    width = 0.84 / len(results)
    for number, result in enumerate(results):
        heights = [*(result.categories[name].mean_accepted_length for name in names[:-1]), result.macro_accepted_length]
        places = [place - 0.42 + (number + 0.5) * width for place in range(len(names))]
        axes.bar(places, heights, width * 0.94, label=_label(result), color=_COLOURS[number % len(_COLOURS)])
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.set_xticks(range(len(names)), names, rotation=25, ha="right")
    axes.set_ylabel("tokens emitted per round")
    _finish(axes)


def _draw_positions(conditional: Any, survival: Any, results: Sequence[DrafterResult]) -> None:
    for number, result in enumerate(results):
        for axes, rates in (
            (conditional, result.acceptance.conditional_acceptance),
            (survival, result.acceptance.survival),
        ):
            known = [(place, rate) for place, rate in enumerate(rates, start=1) if rate is not None]
            axes.plot(
                [place for place, _ in known],
                [rate for _, rate in known],
                marker="o",
                markersize=3,
                linestyle="-" if result.rule == "greedy" else "--",
                color=_COLOURS[number % len(_COLOURS)],
                label=_label(result),
            )
    for axes, name in ((conditional, "P(accepted | all earlier ones accepted)"), (survival, "P(all accepted so far)")):
        axes.set_ylim(0.0, 1.0)
        longest = max(len(result.acceptance.at_risk_by_position) for result in results)
        axes.set_xticks(range(1, longest + 1))
        axes.set_xlabel("position in the draft")
        axes.set_ylabel(name)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.3, linewidth=0.5)


def _draw_speed(axes: Any, report: EvaluationReport) -> None:
    rows = [row for row in report.speeds if row.name != PLAIN]
    names = [*rows[0].by_category, "geometric mean"]
    width = 0.84 / len(rows)
    for number, row in enumerate(rows):
        places = [place - 0.42 + (number + 0.5) * width for place in range(len(names))]
        axes.bar(
            places,
            [*row.by_category.values(), row.speedup],
            width * 0.94,
            label=f"{row.name} T={row.temperature:g}",
            color=_COLOURS[number % len(_COLOURS)],
        )
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.set_xticks(range(len(names)), names, rotation=25, ha="right")
    axes.set_ylabel("speedup over plain decoding")
    _finish(axes)


def _finish(axes: Any) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(ncols=4, fontsize=8, frameon=False, loc="lower left", bbox_to_anchor=(0.0, 1.0))


def _draw_reliability(axes: Any, position: PositionCalibration, colour: str, label: str) -> None:
    most = max((item.count for item in position.bins), default=0) or 1
    for item in position.bins:
        axes.bar(
            item.low,
            0.25 * item.count / most,
            item.high - item.low,
            align="edge",
            color=colour,
            alpha=0.25,
            linewidth=0,
        )
    filled = [item for item in position.bins if item.count >= _FEW]
    axes.plot([0, 1], [0, 1], color="grey", linewidth=0.6)
    axes.plot(
        [item.mean_predicted for item in filled],
        [item.fraction_true for item in filled],
        marker="o",
        markersize=2.5,
        linewidth=1.0,
        color=colour,
        label=label,
    )
    axes.set_xlim(0.0, 1.0)
    axes.set_ylim(0.0, 1.0)
    axes.tick_params(labelsize=7)
