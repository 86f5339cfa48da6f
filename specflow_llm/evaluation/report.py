"""An evaluation's tables, for people."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from ..display import format_percent
from .calibrate import CalibrationResult
from .confidence import Confidence
from .run import DrafterResult, EvaluationReport
from .speed import SpeedRow


def tables(report: EvaluationReport) -> Iterator[RenderableType]:
    """Everything, in order: what ran, accepted lengths, categories, positions, calibration, speed, remarks."""
    yield heading(report)
    yield lengths(report.results)
    yield categories(report.results)
    yield positions(report.results)
    for result in report.results:
        if result.confidence is not None:
            yield confidence_table(result, result.confidence)
    if report.speeds:
        yield speeds(report.speeds)
    for warning in report.warnings:
        yield Text(f"warning, about the times: {warning}", style="bold red")
    for note in report.notes:
        yield Text(f"note: {note}")


def heading(report: EvaluationReport) -> Text:
    """What was measured, on what."""
    origin, settings = report.provenance, report.settings
    return Text(
        f"{origin['model']}, {origin['dtype']}, {origin['threads']} thread(s), {origin['device']['name']}\n"
        f"{len(report.prompts.prompts)} prompts from {report.prompts.source}, at most {settings.max_tokens} new "
        f"tokens, up to {settings.draft_tokens} drafted per round and all of them verified"
    )


def lengths(results: Sequence[DrafterResult]) -> Table:
    """One row per drafter and temperature."""
    table = _table(
        "Accepted length (tokens emitted per round, correction or bonus token included)", "drafter", "T", "rule"
    )
    names = ["mean of categories", "95% interval", "all rounds", "whole rounds", "rounds", "cut", "DU"]
    trees = [result.tree for result in results if result.tree is not None]
    if trees:
        names += [f"trees of {trees[0].tokens}", "95% interval"]
    for name in names:
        table.add_column(name, justify="right")
    for result in results:
        counts = result.acceptance
        table.add_row(
            *_who(result),
            result.rule,
            f"{result.macro_accepted_length:.3f}",
            _interval(result, result.macro_interval),
            f"{counts.mean_accepted_length:.3f}",
            f"{counts.mean_accepted_length_whole:.3f}" if counts.whole_rounds else "-",
            str(counts.rounds),
            str(counts.cut_rounds),
            format_percent(counts.accepted / counts.drafted) if counts.drafted else "-",
            *_of_tree(result, shown=bool(trees)),
        )
    return table


def _interval(result: DrafterResult, interval: tuple[float, float]) -> str:
    # One request per category leaves nothing to draw anew.
    if result.acceptance.requests <= len(result.categories):
        return ""
    return f"{interval[0]:.2f}-{interval[1]:.2f}"


def _of_tree(result: DrafterResult, *, shown: bool) -> tuple[str, ...]:
    if not shown:
        return ()
    if result.tree is None:
        return "", ""
    return f"{result.tree.macro_accepted_length:.3f}", _interval(result, result.tree.macro_interval)


def categories(results: Sequence[DrafterResult]) -> Table:
    """Mean accepted length by category."""
    table = _table("Accepted length by category", "category")
    for result in results:
        table.add_column(f"{result.drafter} T={result.temperature:g}", justify="right")
        if result.tree is not None:
            table.add_column(f"trees T={result.temperature:g}", justify="right")
    for category in dict.fromkeys(name for result in results for name in result.categories):
        cells: list[str] = []
        for result in results:
            cells.append(f"{result.categories[category].mean_accepted_length:.2f}")
            if result.tree is not None:
                cells.append(f"{result.tree.categories[category]:.2f}")
        table.add_row(category, *cells)
    return table


def positions(results: Sequence[DrafterResult]) -> Table:
    """Conditional acceptance, and survival below it."""
    width = max(len(result.acceptance.at_risk_by_position) for result in results)
    table = _table(
        "By position (conditional: given that all earlier tokens were accepted; survival: all of them accepted)",
        "drafter",
        "T",
        "",
    )
    for position in range(1, width + 1):
        table.add_column(str(position), justify="right")
    for result in results:
        counts = result.acceptance
        table.add_row(*_who(result), "conditional", *map(_rate, counts.conditional_acceptance))
        table.add_row("", "", "survival", *map(_rate, counts.survival))
        table.add_row("", "", "at risk", *map(str, counts.at_risk_by_position), style="dim")
    return table


def confidence_table(result: DrafterResult, confidence: Confidence) -> Table:
    """Calibration of one drafter at one temperature."""
    table = _table(
        f"Confidence of {result.drafter} at T={result.temperature:g}: claimed survival against accepted prefixes",
        "position",
    )
    names = ["rounds", "claimed", "accepted", "ECE", "noise", "Brier", "AUC"]
    if confidence.corrected is not None:
        names += ["T_k", "b_k", "claimed'", "ECE'", "Brier'", "AUC'"]
    names.append("ECE live")
    for name in names:
        table.add_column(name, justify="right")
    for index, raw in enumerate(confidence.raw):
        cells = [
            str(raw.count),
            f"{raw.mean_claimed:.3f}",
            f"{raw.mean_accepted:.3f}",
            f"{raw.ece:.1%}",
            f"{raw.ece_noise:.1%}",
            f"{raw.brier:.3f}",
            _rate(raw.auc),
        ]
        if confidence.corrected is not None and confidence.scales is not None:
            better, scale = confidence.corrected[index], confidence.scales[index]
            cells += [
                f"{scale.temperature:.2f}",
                f"{scale.shift:+.2f}",
                f"{better.mean_claimed:.3f}",
                f"{better.ece:.1%}",
                f"{better.brier:.3f}",
                _rate(better.auc),
            ]
        cells.append(f"{confidence.live[index].ece:.1%}")
        table.add_row(str(raw.position), *cells)
    return table


def speeds(rows: Sequence[SpeedRow]) -> Table:
    """Speed against plain decoding."""
    table = _table("Speed against plain decoding (whole calls, prefill included; drafts as long as they pay)", "", "T")
    names = ("tokens/s", "vs plain", "slowest category", "slowest prompt", "spread", "accepted length", "verified")
    for name in (*names, "same output"):
        table.add_column(name, justify="right")
    for row in rows:
        category = min(row.by_category, key=lambda name: row.by_category[name])
        same = "" if row.identical is None else f"{row.identical}/{row.prompts}"
        if row.unexplained:
            same += f", {row.unexplained} NOT BY ROUNDING: A BUG"
        table.add_row(
            row.name,
            f"{row.temperature:g}",
            f"{row.tokens_per_second:.1f}",
            f"{row.speedup:.2f}",
            f"{row.by_category[category]:.2f} {category}",
            f"{row.worst_prompt:.2f}",
            "" if row.spread is None else format_percent(row.spread),
            f"{row.mean_accepted_length:.2f}",
            f"{row.mean_admitted:.2f}",
            Text(same, style="bold red" if row.unexplained else ""),
        )
    return table


def calibration_table(found: CalibrationResult, *, goal: float) -> Table:
    """What a calibration changes on requests they were not fitted on."""
    table = _table(f"Held-out requests, before and after calibration ({found.entry.method})", "position")
    for name in (
        "fitted on",
        "T_k",
        "b_k",
        "tested on",
        "accepted",
        "claimed",
        "claimed'",
        "ECE",
        "ECE'",
        "noise",
        "Brier",
        "Brier'",
    ):
        table.add_column(name, justify="right")
    rows = zip(found.before, found.after, found.entry.scales, found.entry.fitted, found.fit_counts, strict=True)
    for before, after, scale, fitted, fit_count in rows:
        table.add_row(
            str(after.position),
            str(fit_count),
            f"{scale.temperature:.2f}" if fitted else "1 (too few)",
            f"{scale.shift:+.2f}" if fitted else "0",
            str(after.count),
            f"{after.mean_accepted:.3f}",
            f"{before.mean_claimed:.3f}",
            f"{after.mean_claimed:.3f}",
            f"{before.ece:.1%}",
            Text(f"{after.ece:.1%}", style="red" if after.ece >= goal else "green"),
            f"{after.ece_noise:.1%}",
            f"{before.brier:.3f}",
            f"{after.brier:.3f}",
        )
    return table


def _table(title: str, *left: str) -> Table:
    table = Table(title=title, title_justify="left")
    for name in left:
        table.add_column(name)
    return table


def _who(result: DrafterResult) -> tuple[str, str]:
    return result.drafter, f"{result.temperature:g}"


def _rate(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
