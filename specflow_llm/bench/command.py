"""The ``bench`` command: options in, tables, a JSON file and a picture out."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from ..hub import DEMO_MODEL
from .plot import save_plot
from .report import tables
from .run import BenchReport, run_bench
from .settings import BASELINES, BenchSettings

_WIDTH = 180
"""Columns of the tables where the output is not a terminal."""


def bench_command(  # noqa: PLR0913 - one argument per option
    *,
    model: Annotated[
        str, typer.Option("--model", "-m", help="Built-in name, folder, .gguf file or hub id.")
    ] = DEMO_MODEL,
    data: Annotated[
        Path | None,
        typer.Option(
            envvar="SPECFLOW_BENCH_DATA",
            help="Prompts: a JSONL file like Spec-Bench's (question_id, category, turns). Default: a built-in set.",
        ),
    ] = None,
    per_category: Annotated[int, typer.Option(help="Prompts of each category.")] = 4,
    max_tokens: Annotated[int, typer.Option(help="New tokens per prompt.")] = 128,
    repeats: Annotated[int, typer.Option(help="Timed runs of each candidate on each prompt; the median counts.")] = 1,
    drafter: Annotated[str, typer.Option(help="Drafters of ours, separated by commas: names, paths or ids.")] = "ngram",
    draft_tokens: Annotated[int, typer.Option(help="Most tokens drafted per round.")] = BenchSettings().draft_tokens,
    tree: Annotated[str, typer.Option(help="Whether drafts may branch: on, off or both.")] = "on",
    policy: Annotated[str, typer.Option(help="adaptive, fixed, cost_scheduled or pid.")] = "adaptive",
    baselines: Annotated[
        str, typer.Option(help=f"What to compare with, separated by commas: {', '.join(BASELINES)}.")
    ] = "generate,prompt-lookup",
    ablations: Annotated[bool, typer.Option(help="Also run the rows that separate packing from speculation.")] = True,
    assistant: Annotated[str | None, typer.Option(help="Smaller model for transformers' assisted generation.")] = None,
    lookup_tokens: Annotated[
        str, typer.Option(help="Settings of transformers' prompt lookup, separated by commas.")
    ] = "3,5,10",
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    threads: Annotated[int | None, typer.Option(help="CPU threads; torch's own choice by default.")] = None,
    seed: Annotated[int, typer.Option(help="Chooses the prompts within each category.")] = 0,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write everything measured, with provenance, to this file.")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Draw speedups and phases into this file, for example bench.png.")
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="A look in a minute or two: too little to conclude from.")
    ] = False,
) -> None:
    """Measure decoding speed against transformers, in one run, on the same prompts, model, dtype and threads."""
    names = _words(baselines)
    if assistant is not None and "assisted" not in names:
        names = (*names, "assisted")
    settings = BenchSettings(
        model=model,
        data=data,
        per_category=per_category,
        max_tokens=max_tokens,
        repeats=repeats,
        drafters=_words(drafter),
        draft_tokens=draft_tokens,
        tree=tree,
        policy=policy,
        baselines=names,
        lookup_tokens=_numbers(lookup_tokens),
        ablations=ablations,
        assistant=assistant,
        dtype=dtype,
        device=device,
        threads=threads,
        seed=seed,
    )
    report = run_with_progress(settings.quick() if quick else settings)
    console = Console()
    if not console.is_terminal:
        console = Console(width=_WIDTH)
    for table in tables(report):
        console.print(table)
    if json_file is not None:
        write_json(report, json_file)
        console.print(f"wrote {json_file}")
    if plot is not None:
        save_plot(report, plot)
        console.print(f"wrote {plot}")


def run_with_progress(settings: BenchSettings) -> BenchReport:
    """Run with a bar and the time remaining on standard error, so that standard output holds results only."""
    console = Console(stderr=True)
    if not console.is_terminal:
        return run_bench(settings, notify=console.print, progress=_Lines(console))
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left:"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as bar:
        task = bar.add_task("starting", total=None)

        def show(done: int, total: int, label: str) -> None:
            bar.update(task, completed=done, total=total, description=label)

        return run_bench(settings, notify=lambda message: bar.update(task, description=message), progress=show)


class _Lines:
    """Progress for logs: a line for every twentieth of the work, with the time remaining."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._started = 0.0
        self._next = 0

    def __call__(self, done: int, total: int, label: str) -> None:
        """See :class:`specflow_llm.bench.measure.Progress`."""
        now = time.monotonic()
        if done == 0:
            self._started, self._next = now, 0
        if done < self._next:
            return
        self._next = done + max(1, total // 20)
        left = f"{(now - self._started) / done * (total - done) / 60:.1f} minutes left" if done else "starting"
        self._console.print(f"{done}/{total}, {left}, next: {label}")


def write_json(report: BenchReport, path: Path) -> None:
    """Write the report as one JSON object."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report.as_dict(), indent=1, allow_nan=False) + "\n", encoding="utf-8")


def _words(text: str) -> tuple[str, ...]:
    return tuple(word.strip() for word in text.split(",") if word.strip())


def _numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(word) for word in _words(text))
    except ValueError:
        raise typer.BadParameter(
            f"{text!r} is not a list of whole numbers separated by commas", param_hint="--lookup-tokens"
        ) from None
