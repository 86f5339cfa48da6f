"""``specflow-llm train``: a drafter for one's own model, from nothing but the model."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from ..display import console
from . import options

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from ..training.run import Trained
    from ..training.text import TrainingText, Written
    from ..training.trainer import Report

_DATA = "Training text"
_DRAFTER = "Drafter"
_TRAINING = "Training"
_EVERY = 50  # conversations between two lines of progress


def train(  # noqa: PLR0913 - one argument per option
    *,
    target: Annotated[
        str | None,
        typer.Option(
            "--target", "-t", show_default="the demo model", help="Built-in name, folder, .gguf file or hub id."
        ),
    ] = None,
    out: Annotated[
        Path, typer.Option(file_okay=False, help="Folder for text, checkpoints and the drafter. Rerun to go on.")
    ],
    kind: Annotated[
        str,
        typer.Option(help="dspark, or conv: a tiny convolutional drafter for the smallest machines."),
    ] = "dspark",
    config: Annotated[
        Path | None,
        typer.Option(
            dir_okay=False,
            help="JSON with the sections data, drafter and training; options given here come first.",
        ),
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(
            dir_okay=False,
            rich_help_panel=_DATA,
            show_default="the target asks itself",
            help='JSON lines with "prompt" or "turns"; the target answers them.',
        ),
    ] = None,
    samples: Annotated[
        int | None, typer.Option(min=1, rich_help_panel=_DATA, help="Conversations to make.", show_default="4000")
    ] = None,
    text: Annotated[
        list[Path] | None,
        typer.Option(
            rich_help_panel=_DATA,
            help="Conversations made before, a file or an --out folder; may be given again. Nothing is made.",
        ),
    ] = None,
    text_only: Annotated[
        bool,
        typer.Option("--text-only", rich_help_panel=_DATA, help="Make the text (with --cache its features) and stop."),
    ] = False,
    cache: Annotated[
        Path | None,
        typer.Option(
            file_okay=False,
            rich_help_panel=_TRAINING,
            help="Keep features in this folder, as text is written, instead of running the target in every epoch; its "
            "size is told first.",
        ),
    ] = None,
    layers: Annotated[
        int | None, typer.Option(min=1, rich_help_panel=_DRAFTER, help="Layers.", show_default="3, or 5; conv: 4")
    ] = None,
    block_size: Annotated[
        int | None, typer.Option(min=1, rich_help_panel=_DRAFTER, help="Tokens per round.", show_default="7")
    ] = None,
    markov: Annotated[
        str | None,
        typer.Option(rich_help_panel=_DRAFTER, help="dspark: vanilla, gated, rnn or none.", show_default="vanilla"),
    ] = None,
    start_from: Annotated[
        Path | None,
        typer.Option(
            file_okay=False,
            rich_help_panel=_TRAINING,
            help="Go on from a trained drafter; dspark: --layers and --block-size may differ from its own.",
        ),
    ] = None,
    fresh: Annotated[
        bool,
        typer.Option(
            "--fresh", rich_help_panel=_TRAINING, help="dspark: random weights instead of copied target layers."
        ),
    ] = False,
    epochs: Annotated[
        float | None, typer.Option(rich_help_panel=_TRAINING, help="Passes over the text.", show_default="4")
    ] = None,
    learning_rate: Annotated[
        float | None, typer.Option(rich_help_panel=_TRAINING, help="Peak rate.", show_default="0.0006")
    ] = None,
    seed: Annotated[int | None, typer.Option(rich_help_panel=_TRAINING, help="Of everything.")] = None,
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
    threads: options.Threads = None,
    as_json: options.AsJson = False,
) -> None:
    """Train a drafter for a model: it writes the text, sees what the model sees, and learns to be accepted.

    Everything goes to --out. The same command goes on where it was stopped, exactly. Several GPUs:
    ``torchrun --nproc-per-node 4 -m specflow_llm.cli train ...``.
    """
    from ..training.plan import TrainingPlan, plan_from_file  # noqa: PLC0415 - with the rest
    from ..training.run import TrainingRun  # noqa: PLC0415 - loads torch
    from ..training.settings import read_settings  # noqa: PLC0415 - loads torch
    from ..training.world import local_device  # noqa: PLC0415 - loads torch
    from .options import ModelChoice  # noqa: PLC0415
    from .session import open_llm  # noqa: PLC0415 - loads torch

    given: dict[str, dict[str, Any]] = {"data": {}, "drafter": {}, "training": {}}
    for section, values in (read_settings(config) if config is not None else {}).items():
        given[section].update(values)
    for section, name, value in (
        ("data", "num_samples", samples),
        ("data", "seed", seed),
        ("drafter", "num_layers", layers),
        ("drafter", "block_size", block_size),
        ("drafter", "markov", markov),
        ("training", "epochs", epochs),
        ("training", "learning_rate", learning_rate),
        ("training", "seed", seed),
    ):
        if value is not None:
            given[section][name] = value
    plan = plan_from_file(
        given,
        TrainingPlan(
            out=out,
            kind=kind,
            prompts=prompts,
            samples=tuple(text or ()),
            start_from=start_from,
            fresh=fresh,
            cache=cache,
        ),
    )
    if text:
        _check_given_text({"--prompts": prompts, "--samples": samples}, needs_cache=text_only and cache is None)
    err = console(stderr=True)
    choice = ModelChoice(model=target, dtype=dtype, device=local_device(device), threads=threads, max_batch_size=64)
    llm = open_llm(choice, err)

    def tell(message: str) -> None:
        if run.is_first:  # of several processes one talks
            err.print(message, soft_wrap=True)

    run = TrainingRun(
        llm,
        plan,
        notify=tell,
        on_written=lambda written: _tell_text(tell, written),
        on_featured=lambda done, wanted: tell(f"features: {done} of {wanted} texts"),
        on_report=lambda report: tell(report_line(report)),
    )
    if text_only:
        made = run.prepare()
        if run.is_first:
            _show_text(console(), text or [out], made, as_json=as_json)
        return
    result = run.run()
    if run.is_first:
        _show(console(), result, as_json=as_json)


def _check_given_text(making: Mapping[str, object], *, needs_cache: bool) -> None:
    """With text that is there, nothing else can be said about making some."""
    for name, value in making.items():
        if value is not None:
            raise typer.BadParameter("with --text no text is made, so it says nothing", param_hint=name)
    if needs_cache:
        raise typer.BadParameter(
            "with --text nothing is left to make but features: say where they go with --cache", param_hint="--text-only"
        )


def _tell_text(tell: Callable[[str], None], written: Written) -> None:
    if written.tried % _EVERY == 0 or written.tried == written.wanted:
        tell(
            f"conversations: {written.made} made, {written.tried} of {written.wanted} tried | "
            f"{written.tokens_per_second:.0f} tokens/s | {_clock(written.seconds_left)} left"
        )


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}"


def report_line(report: Report) -> str:
    """One line of progress: loss, acceptance by slot, estimated accepted length, speed and time left."""
    now = report.recent
    rates = " ".join(f"{rate:.2f}" for rate in now.accept)
    return (
        f"step {report.step}/{report.num_steps} | loss {now.loss:.3f} | accepted {rates} | tokens per round "
        f"{now.sampled_length:.2f} sampled, {now.greedy_length:.2f} greedy | {report.tokens_per_second:.0f} tokens/s | "
        f"{_clock(report.seconds_left)} left"
    )


def _show_text(out: Console, places: Sequence[Path], text: TrainingText, *, as_json: bool) -> None:
    if as_json:
        described = {
            "text": list(map(str, places)),
            "num_samples": len(text.samples),
            "num_tokens": text.num_tokens,
        }
        out.print(json.dumps(described), soft_wrap=True)
        return
    names = ", ".join(map(str, places))
    out.print(
        f"text in {names}: {len(text.samples)} conversations to learn from, {text.num_tokens} tokens", soft_wrap=True
    )


def _show(out: Console, result: Trained, *, as_json: bool) -> None:
    held = result.held_out
    if as_json:
        described = {
            "folder": str(result.folder),
            "num_samples": result.num_samples,
            "num_tokens": result.num_tokens,
            "num_held_out": result.num_held,
            "seconds": result.seconds,
            "held_out": None if held is None else asdict(held),
        }
        out.print(json.dumps(described), soft_wrap=True)
        return
    out.print(
        f"drafter in {result.folder}: {result.num_samples} conversations of {result.num_tokens} tokens, "
        f"{result.num_held} of them held out"
    )
    if held is not None:
        out.print(
            f"held-out text: estimated tokens per round {held.sampled_length:.2f} at temperature 1, "
            f"{held.greedy_length:.2f} at temperature 0"
        )
    out.print(f"use it: Speculation(drafter={str(result.folder)!r}); measure it: specflow-llm evaluate")
