"""``specflow-llm calibrate``: make a drafter's confidences keep their word."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from ..display import console
from . import options
from .evaluate import BatchSize, Limit, PerCategory, Prompts, Target, run_shown

if TYPE_CHECKING:
    from ..records import Recording

_WIDTH = 140


def calibrate(  # noqa: PLR0913 - one argument per option
    *,
    drafter: Annotated[Path, typer.Option(help="Folder of the trained drafter; the calibration is stored in it.")],
    target: Target = None,
    record: Annotated[
        Path | None,
        typer.Option(help="Rounds that `evaluate --out` wrote, instead of decoding now."),
    ] = None,
    prompts: Prompts = None,
    per_category: PerCategory = None,
    limit: Limit = None,
    temperature: options.Temperature = 0.0,
    max_tokens: options.MaxTokens = 256,
    draft_tokens: Annotated[
        int, typer.Option(min=1, help="Most tokens drafted per round: at least as many as the drafter can.")
    ] = 16,
    top_k: options.TopK = 0,
    top_p: options.TopP = 1.0,
    min_p: options.MinP = 0.0,
    verification: options.VerificationRule = "auto",
    batch_size: BatchSize = 8,
    method: Annotated[
        str, typer.Option(help="platt (a temperature and a shift per position) or temperature (the paper's).")
    ] = "platt",
    fraction: Annotated[
        float, typer.Option(min=0.05, max=0.95, help="Of the requests, to fit on; the others test.")
    ] = 0.5,
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
    threads: options.Threads = None,
    seed: Annotated[int, typer.Option(help="Chooses prompts, seeds requests, and splits them.")] = 0,
    store: Annotated[
        bool, typer.Option("--store/--dry-run", help="Store the calibration beside the checkpoint, or only show them.")
    ] = True,
    as_json: options.AsJson = False,
) -> None:
    """Fit a temperature and a shift per draft position, test them on other requests, and store them in the folder."""
    from ..calibration import CalibrationTable, check_method  # noqa: PLC0415 - loads numpy
    from ..errors import CheckpointError  # noqa: PLC0415 - with the rest
    from ..evaluation import calibrate as calibration  # noqa: PLC0415 - loads torch
    from ..evaluation.report import calibration_table  # noqa: PLC0415 - loads torch
    from ..records import read_rounds  # noqa: PLC0415 - with the rest

    if not drafter.is_dir():
        raise CheckpointError(drafter, "there is no such folder", "give the folder of a trained drafter")
    fitting = check_method(method)  # before anything is decoded
    num_positions = None
    stale = CalibrationTable.clear_stale(drafter) if store else None
    if stale is not None:
        console(stderr=True).print(f"the calibration here is not this checkpoint's; moved to {stale}", soft_wrap=True)
    if record is not None:
        recording = read_rounds(record)
        calibration.check_recording(recording, drafter)
    else:
        recording, num_positions = _record(
            target=target,
            drafters=(drafter,),
            temperatures=(temperature,),
            prompts=prompts,
            per_category=per_category,
            limit=limit,
            max_tokens=max_tokens,
            draft_tokens=draft_tokens,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            verification=verification,
            batch_size=batch_size,
            dtype=dtype,
            device=device,
            threads=threads,
            seed=seed,
            speed=False,
        )
    found = calibration.fit_and_test(recording, method=fitting, fraction=fraction, seed=seed)
    path = calibration.store(found.entry, drafter, num_positions=num_positions) if store else None
    if as_json:
        regime = found.entry.regime
        data = {
            **found.as_dict(),
            "target": regime.target,
            "temperature": regime.temperature,
            "requests": regime.requests,
            "rounds": regime.rounds,
            "file": None if path is None else str(path),
        }
        typer.echo(json.dumps(data, allow_nan=False))
        return
    shown = console()
    if not shown.is_terminal:
        shown = Console(highlight=False, markup=False, width=_WIDTH)
    shown.print(calibration_table(found, goal=calibration.GOAL))
    verdict = "met" if found.is_met else "missed"
    shown.print(f"goal: calibration error below {calibration.GOAL:.0%} at every position, {verdict}", soft_wrap=True)
    shown.print("nothing stored (--dry-run)" if path is None else f"wrote {path}", soft_wrap=True)


def _record(*, prompts: str | None, target: str | None, **settings: Any) -> tuple[Recording, int | None]:
    """Decode now; returns the rounds, and how many positions the drafter has where it says so."""
    from ..evaluation import EvaluationSettings  # noqa: PLC0415 - loads torch
    from ..evaluation.settings import find_prompts  # noqa: PLC0415 - loads torch
    from ..hub import DEMO_MODEL  # noqa: PLC0415 - loads torch
    from ..records import Recording  # noqa: PLC0415 - with the rest

    report = run_shown(EvaluationSettings(target=target or DEMO_MODEL, prompts=find_prompts(prompts), **settings))
    result = report.results[0]
    return Recording(result.header, result.rounds), result.num_positions
