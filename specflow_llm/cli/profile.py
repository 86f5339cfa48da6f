"""``specflow-llm profile``: measure what rounds cost here, and keep it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..display import console, loading, plain_table
from . import options
from .places import file_for
from .simulate import numbers


def profile(  # noqa: PLR0913 - one argument per option
    out: Annotated[Path, typer.Argument(help="File to write, for example costs.json.")],
    *,
    model: options.Model = None,
    drafter: options.Drafter = "ngram",
    draft_tokens: options.DraftTokens = 8,
    tree: options.Tree = True,
    batch: Annotated[str, typer.Option(help="Requests decoded together, separated by commas.")] = "1,2,4,8,16",
    context: Annotated[int, typer.Option(min=1, help="Tokens of each prompt while measuring.")] = 128,
    temperature: options.Temperature = 0.0,
    repeats: Annotated[int, typer.Option(min=2, help="Timed rounds of each shape; the median counts.")] = 5,
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
    threads: options.Threads = None,
) -> None:
    """Time rounds of every batch size and draft length, for scheduling by cost and for simulate."""
    from ..config import Speculation  # noqa: PLC0415 - with the rest
    from ..profile import profile_costs, save_profile  # noqa: PLC0415 - loads torch
    from .session import open_llm  # noqa: PLC0415 - loads torch

    batches = numbers(batch, "--batch")
    file_for(out)
    notes = console(stderr=True)
    setting = (
        None
        if drafter == "none"
        else Speculation(drafter=drafter, policy="fixed", max_draft_tokens=draft_tokens, tree=tree)
    )
    llm = open_llm(
        options.ModelChoice(model=model, dtype=dtype, device=device, threads=threads, speculation=setting), notes
    )
    with loading(notes, "timing rounds") as notify:
        found = profile_costs(
            llm.engine.backend.target,
            llm.engine.backend.drafter,
            draft_tokens,
            model=llm.name,
            dtype=llm.model.dtype,
            device=llm.model.device,
            batches=batches,
            context=context,
            temperature=temperature,
            repeats=repeats,
            notify=notify,
        )
    save_profile(found, out)
    costs = found.costs()
    table = plain_table("drafted", *[f"{number} at once" for number in sorted(set(batches))])
    for length in dict.fromkeys(shape.draft for shape in found.execute):
        row = []
        for number in sorted(set(batches)):
            executing, drafting = costs.round([length] * number, 0), costs.drafting(number, length)
            row.append(f"{1e3 * executing:.1f} + {1e3 * drafting:.1f}")
        table.add_row(str(length), *row)
    screen = console()
    screen.print("milliseconds of a round: executing + drafting, by tokens drafted per request")
    screen.print(table)
    notes.print(f"wrote {out}", soft_wrap=True)
