"""``specflow-llm evaluate``: how good is a drafter, in counts, in calibration, and in time."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer
from rich.console import Console

from ..config import Verification
from ..display import console, counting
from . import options
from .places import folder_for

if TYPE_CHECKING:
    from ..bench.measure import Progress
    from ..evaluation import EvaluationReport, EvaluationSettings

_WIDTH = 160
_DEFAULT_TEMPERATURES = "0,1"

Target = Annotated[
    str | None,
    typer.Option(
        "--target", "-m", show_default="the demo model", help="Target: built-in name, folder, .gguf file or hub id."
    ),
]
Prompts = Annotated[
    str | None,
    typer.Option(
        show_default="the package's own",
        help="JSONL file (question_id, category, turns or token_ids), or spec-bench for the file that "
        "SPECFLOW_BENCH_DATA names.",
    ),
]
Limit = Annotated[
    int | None, typer.Option(min=1, show_default="all", help="At most so many prompts, from the categories in turns.")
]
PerCategory = Annotated[int | None, typer.Option(min=1, show_default="all", help="Prompts of each category.")]
BatchSize = Annotated[int, typer.Option(min=1, help="Requests decoded together while counting.")]


def evaluate(  # noqa: PLR0913 - one argument per option
    *,
    target: Target = None,
    drafter: Annotated[
        list[str] | None,
        typer.Option(show_default="ngram", help="Drafter: a name, path or id; may be given several times."),
    ] = None,
    temperature: Annotated[
        str, typer.Option(help="Sampling temperatures, separated by commas; 0 is greedy.")
    ] = _DEFAULT_TEMPERATURES,
    prompts: Prompts = None,
    per_category: PerCategory = None,
    limit: Limit = None,
    max_tokens: options.MaxTokens = 128,
    draft_tokens: Annotated[int, typer.Option(min=1, help="Tokens drafted per round; all are verified.")] = 8,
    tree_tokens: Annotated[
        int, typer.Option(min=0, help="Also count rounds whose drafts may branch, with so many tokens; 0: do not.")
    ] = 15,
    top_k: options.TopK = 0,
    top_p: options.TopP = 1.0,
    min_p: options.MinP = 0.0,
    verification: options.VerificationRule = "auto",
    speed: Annotated[bool, typer.Option(help="Also time the drafters against plain decoding.")] = True,
    speed_per_category: Annotated[int, typer.Option(min=1, help="Timed prompts of each category.")] = 1,
    repeats: Annotated[int, typer.Option(min=1, help="Timed runs on each prompt; the median counts.")] = 3,
    policy: Annotated[str, typer.Option(help="Draft lengths of the timed runs: adaptive or fixed.")] = "adaptive",
    batch_size: BatchSize = 4,
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
    threads: options.Threads = None,
    seed: Annotated[int, typer.Option(help="Chooses prompts and seeds requests.")] = 0,
    out: Annotated[
        Path | None,
        typer.Option(file_okay=False, help="Folder for evaluation.json, pictures, and the rounds of every drafter."),
    ] = None,
    as_json: options.AsJson = False,
) -> None:
    """Measure drafters: accepted length, acceptance by position, calibration, and speed against plain decoding."""
    from ..evaluation import EvaluationSettings  # noqa: PLC0415 - loads torch
    from ..evaluation.report import tables  # noqa: PLC0415 - loads torch
    from ..evaluation.settings import find_prompts  # noqa: PLC0415 - loads torch
    from ..hub import DEMO_MODEL  # noqa: PLC0415 - loads torch

    if out is not None:
        folder_for(out)
    report = run_shown(
        EvaluationSettings(
            target=target or DEMO_MODEL,
            drafters=tuple(drafter or ("ngram",)),
            temperatures=numbers(temperature),
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            verification=cast("Verification", verification),
            prompts=find_prompts(prompts),
            per_category=per_category,
            limit=limit,
            max_tokens=max_tokens,
            draft_tokens=draft_tokens,
            tree_tokens=tree_tokens,
            batch_size=batch_size,
            speed=speed,
            speed_per_category=speed_per_category,
            repeats=repeats,
            policy=policy,
            dtype=dtype,
            device=device,
            threads=threads,
            seed=seed,
        )
    )
    written = [] if out is None else write(report, out)
    if as_json:
        typer.echo(json.dumps(report.as_dict(), allow_nan=False))
        return
    shown = console()
    if not shown.is_terminal:
        shown = Console(highlight=False, markup=False, width=_WIDTH)
    for table in tables(report):
        shown.print(table)
    for path in written:
        shown.print(f"wrote {path}", soft_wrap=True)


def write(report: EvaluationReport, folder: Path) -> list[Path]:
    """Write everything an evaluation found into a folder; returns the files."""
    from ..evaluation.plot import save_plot, save_reliability  # noqa: PLC0415 - loads torch

    folder.mkdir(parents=True, exist_ok=True)
    data, picture, curves = folder / "evaluation.json", folder / "evaluation.png", folder / "reliability.png"
    data.write_text(json.dumps(report.as_dict(), indent=1, allow_nan=False) + "\n", encoding="utf-8")
    written = [data, *report.write_rounds(folder / "rounds")]
    save_plot(report, picture)
    written.append(picture)
    if save_reliability(report.results, curves):
        written.append(curves)
    return written


def run_shown(settings: EvaluationSettings) -> EvaluationReport:
    """Run an evaluation with its progress on standard error."""
    from ..evaluation import run_evaluation  # noqa: PLC0415 - loads torch
    from .session import quiet_transformers  # noqa: PLC0415 - loads torch

    quiet_transformers()
    err = console(stderr=True)
    with _progress(err) as progress:
        return run_evaluation(settings, notify=lambda text: err.print(text, soft_wrap=True), progress=progress)


@contextmanager
def _progress(err: Console) -> Iterator[Progress]:
    """A bar whose length follows the step in hand: tokens while counting, runs while timing."""
    with counting(err, "starting", 1) as tell:

        def progress(done: int, total: int, label: str) -> None:
            tell(done, f"{label} of {total}")

        yield progress


def numbers(text: str) -> tuple[float, ...]:
    """Numbers separated by commas.

    Raises:
        typer.BadParameter: a word is no number.
    """
    words: Sequence[str] = [word.strip() for word in text.split(",") if word.strip()]
    try:
        return tuple(float(word) for word in words)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not a list of numbers separated by commas") from None
