"""``specflow-llm simulate``: what would each policy have achieved at each load?"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from ..display import console
from . import options
from .places import file_for


def simulate(
    *,
    record: Annotated[Path, typer.Option(help="Recorded rounds, as written by specflow-llm evaluate.")],
    costs: Annotated[Path, typer.Option(help="Measured costs, as written by specflow-llm profile.")],
    policy: Annotated[
        str | None,
        typer.Option(
            show_default="all but threshold",
            help="Policies, separated by commas; fixed is every fixed length, fixed-3 one of them.",
        ),
    ] = None,
    concurrency: Annotated[str, typer.Option(help="Requests decoded together, separated by commas.")] = "1,2,4,8,16",
    as_json: options.AsJson = False,
    plot: Annotated[
        Path | None, typer.Option(help="Draw throughput over concurrency into this file, for example load.png.")
    ] = None,
) -> None:
    """Replay recorded rounds under measured costs: throughput of each policy at each load. No model is run."""
    from ..pictures import new_figure  # noqa: PLC0415 - with the rest
    from ..profile import load_profile  # noqa: PLC0415 - loads torch
    from ..records import read_rounds  # noqa: PLC0415 - with it
    from ..simulate import DEFAULT_POLICIES, save_plot, tables  # noqa: PLC0415 - loads torch
    from ..simulate import simulate as run  # noqa: PLC0415 - loads torch

    if plot is not None:
        new_figure(file_for(plot), (1, 1))  # refuses what could not be drawn in the end
    names = DEFAULT_POLICIES if policy is None else tuple(word.strip() for word in policy.split(",") if word.strip())
    found = run(read_rounds(record), load_profile(costs), policies=names, concurrency=numbers(concurrency))
    if as_json:
        typer.echo(json.dumps(found.as_dict(), allow_nan=False))
    else:
        out = console()
        for title, table in tables(found):
            out.print(title)
            out.print(table)
        out.print("* the best fixed length at that load, found by trying all")
    notes = console(stderr=True)
    for warning in found.warnings:
        notes.print(f"note: {warning}", soft_wrap=True)
    if plot is not None:
        save_plot(found, plot)
        notes.print(f"wrote {plot}", soft_wrap=True)


def numbers(text: str, option: str = "--concurrency") -> tuple[int, ...]:
    """Whole numbers >= 1 separated by commas.

    Raises:
        typer.BadParameter: it is something else.
    """
    words = [word.strip() for word in text.split(",") if word.strip()]
    if not words or not all(word.isdigit() and int(word) >= 1 for word in words):
        raise typer.BadParameter(f"{text!r} is not a list of whole numbers >= 1 separated by commas", param_hint=option)
    return tuple(int(word) for word in words)
