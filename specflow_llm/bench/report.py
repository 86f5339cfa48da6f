"""A benchmark's tables, for people."""

from __future__ import annotations

import math
from collections.abc import Iterator

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from .run import CATEGORY_GOAL, BenchReport
from .summary import PHASES, Summary

_MAX_POSITIONS = 8


def tables(report: BenchReport) -> Iterator[RenderableType]:
    """Everything, in order: what ran, speeds, categories, speculation, phases, costs, limits, differences, goals."""
    yield heading(report)
    yield speeds(report)
    yield categories(report)
    yield speculation(report)
    yield phases(report)
    yield forward_cost_table(report)
    yield predictions(report)
    yield limits(report)
    if report.differences:
        yield differences(report)
    yield conclusions(report)
    for warning in report.warnings:
        yield Text(f"warning: {warning}", style="bold red")
    for note in report.notes:
        yield Text(f"note: {note}")


def heading(report: BenchReport) -> Text:
    """One line each on model, machine and prompts."""
    origin, settings = report.provenance, report.settings
    lines = [
        f"{origin['model']}, {origin['dtype']}, {origin['threads']} thread(s), {origin['device']['name']}",
        f"{len(report.prompts)} prompts from {report.source}",
        f"{settings.max_tokens} new tokens, {settings.repeats} timed run(s) of each candidate on each prompt",
    ]
    if report.skipped:
        lines.append(f"{len(report.skipped)} prompts do not fit the model's context and were not considered")
    return Text("\n".join(lines))


def speeds(report: BenchReport) -> Table:
    """One row per candidate."""
    table = Table(title="Speed (whole call, prefill included)")
    table.add_column("candidate")
    for name in (
        "tokens/s",
        "vs generate",
        "95% interval",
        "worst prompt",
        "best prompt",
        "spread",
        "tokens/forward",
        "same output",
    ):
        table.add_column(name, justify="right")
    for row in report.summaries:
        table.add_row(
            row.info.name,
            f"{row.tokens_per_second:.2f}",
            _ratio(row.speedup),
            # One prompt per category leaves nothing to resample.
            f"{row.interval[0]:.2f}-{row.interval[1]:.2f}" if row.prompts > len(row.by_category) else "",
            _ratio(row.worst_prompt),
            _ratio(row.best_prompt),
            "" if row.spread is None else f"{row.spread:.1%}",
            f"{row.tokens_per_forward:.2f}",
            Text(f"{row.identical}/{row.prompts}", style="" if row.identical == row.prompts else "bold yellow"),
        )
    return table


def categories(report: BenchReport) -> Table:
    """Speedup over generate by category, losing rows and all."""
    table = Table(title=f"Speedup over generate by category (red: below {CATEGORY_GOAL})")
    rows = list(report.summaries[1:])
    table.add_column("category")
    for row in rows:
        table.add_column(row.info.name, justify="right")
    for category in report.summaries[0].by_category:
        table.add_row(category, *[_ratio(row.by_category[category]) for row in rows])
    table.add_section()
    table.add_row("geometric mean", *[_ratio(row.speedup) for row in rows])
    return table


def speculation(report: BenchReport) -> Table:
    """Counts of this library's rows: they do not depend on the machine."""
    table = Table(title="Speculation in counts")
    table.add_column("candidate")
    for name in ("forwards", "rounds", "accepted length", "VPR", "DU"):
        table.add_column(name, justify="right")
    table.add_column(f"acceptance at position 1..{_MAX_POSITIONS}")
    for row in report.summaries:
        if row.counts is not None:
            counts = row.counts
            table.add_row(
                row.info.name,
                str(row.target_forwards),
                str(counts.rounds),
                f"{counts.mean_accepted_length:.3f}",
                f"{counts.verification_pass_rate:.3f}" if counts.admitted else "-",
                f"{counts.draft_utilisation:.3f}" if counts.drafted else "-",
                " ".join(f"{rate:.2f}" for rate in counts.acceptance_by_position[:_MAX_POSITIONS]),
            )
    return table


def phases(report: BenchReport) -> Table:
    """Milliseconds per round of each phase, prefill per prompt, and what is spent outside target forwards."""
    table = Table(title="Milliseconds per round by phase (prefill: per prompt)")
    table.add_column("candidate")
    for name in (*PHASES, "outside forwards"):
        table.add_column(name, justify="right")
    for row in report.summaries:
        if row.counts is not None and row.phase_seconds is not None and row.outside_forward is not None:
            cells = [
                f"{1e3 * seconds / (row.prompts if name == 'prefill' else row.counts.rounds):.3f}"
                for name, seconds in row.phase_seconds.items()
            ]
            table.add_row(row.info.name, *cells, f"{row.outside_forward:.2%}")
    return table


def forward_cost_table(report: BenchReport) -> Table:
    """T(n) and v(n) = T(n) / T(1) of each model object."""
    table = Table(title=f"Target forward over n tokens, {report.cost_context} tokens in the cache")
    table.add_column("n", justify="right")
    for name in report.costs:
        table.add_column(f"{name}, ms", justify="right")
        table.add_column("v(n)", justify="right")
    for width in next(iter(report.costs.values())):
        cells = []
        for costs in report.costs.values():
            cells += [f"{1e3 * costs[width]:.2f}", f"{costs[width] / costs[1]:.2f}"]
        table.add_row(str(width), *cells)
    return table


def predictions(report: BenchReport) -> Table:
    """Speedup by the measured costs against the measured one, prefill left out of both."""
    table = Table(
        title="Speedup of speculation over plain decoding of the same model: predicted tau / (v + draft), and measured"
    )
    table.add_column("candidate")
    for name in ("mean width", "v", "draft", "predicted", "measured", "measured / predicted"):
        table.add_column(name, justify="right")
    for item in report.predictions:
        table.add_row(
            item.candidate,
            f"{item.mean_width:.2f}",
            f"{item.cost_ratio:.3f}",
            f"{item.draft_ratio:.3f}",
            f"{item.predicted:.3f}",
            f"{item.measured:.3f}",
            f"{item.measured / item.predicted:.3f}",
        )
    return table


def limits(report: BenchReport) -> Table:
    """What reading the weights once per forward would allow."""
    read = report.read_seconds
    table = Table(
        title=f"Limit: {report.weight_bytes / 1e6:.0f} MB of weights at {report.bandwidth.best / 1e9:.1f} GB/s "
        f"= {1e3 * read:.1f} ms per forward"
    )
    table.add_column("candidate")
    for name in ("accepted length", "tokens/s at the limit", "tokens/s without prefill", "of the limit"):
        table.add_column(name, justify="right")
    for row in report.summaries:
        if row.counts is not None and row.decode_seconds is not None:
            limit = row.counts.mean_accepted_length / read
            speed = row.tokens / row.decode_seconds
            table.add_row(
                row.info.name,
                f"{row.counts.mean_accepted_length:.3f}",
                f"{limit:.1f}",
                f"{speed:.1f}",
                f"{speed / limit:.1%}",
            )
    return table


def differences(report: BenchReport) -> Table:
    """Outputs that are not generate's, and whether rounding explains it."""
    table = Table(title="Outputs that part from generate's")
    for name in ("candidate", "prompt", "at token", "gap of top two logits", "contested gap", "logit std", "verdict"):
        table.add_column(name)
    for item in report.differences:
        tie = item["explained_by_rounding"]
        table.add_row(
            item["candidate"],
            f"{item['category']} {item['question_id']}",
            str(item["position"]),
            _number(item["top_gap"]),
            _number(item["contested_gap"]),
            _number(item["logit_std"]),
            Text("rounding" if tie else "NOT ROUNDING: A BUG", style="" if tie else "bold red"),
        )
    return table


def conclusions(report: BenchReport) -> Table:
    """Goals met and missed, and by how much; not to be believed where there are warnings."""
    table = Table(title="Goals" + (" (the times are in doubt, see the warnings)" if report.warnings else ""))
    for name in ("candidate", "goal", "measured", "wanted", ""):
        table.add_column(name)
    for item in report.conclusions:
        verdict = (
            Text("met", style="green")
            if item.is_met
            else Text(f"missed by {item.wanted - item.measured:.2f}", style="bold red")
        )
        table.add_row(item.candidate, item.goal, f"{item.measured:.2f}", f"{item.wanted:.2f}", verdict)
    return table


def best_lookup(report: BenchReport) -> Summary | None:
    """The fastest prompt lookup or assisted row of transformers."""
    rows = [row for row in report.summaries if not row.info.is_ours and row.info.speculates]
    return max(rows, key=lambda row: row.speedup, default=None)


def _ratio(value: float) -> Text:
    return Text(f"{value:.2f}", style="red" if value < CATEGORY_GOAL else "")


def _number(value: float | None) -> str:
    return "-" if value is None or math.isnan(value) else f"{value:.2e}"
