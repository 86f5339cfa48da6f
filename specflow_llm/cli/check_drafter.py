"""``specflow-llm check-drafter``: is a drafter of one's own exact, and what does it gain?"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from ..display import console, format_percent, loading, plain_table
from . import options
from .options import ModelChoice

if TYPE_CHECKING:
    from ..checker import DrafterReport, Gain

_STYLES = {"ok": "green", "failed": "bold red", "skipped": "dim"}


def check_drafter(  # noqa: PLR0913 - one argument per option
    drafter: Annotated[
        str,
        typer.Argument(
            metavar="MODULE:FACTORY",
            help="A class or function that makes a new drafter: my_package.my_module:Mine or path/to/file.py:Mine.",
        ),
    ],
    *,
    model: Annotated[
        str | None,
        typer.Option("--model", "-m", show_default="a tiny random model", help="Measure the gain on this model."),
    ] = None,
    prompt: Annotated[
        list[str] | None,
        typer.Option(help="Measure the gain on this text; may be given several times. Needs --model."),
    ] = None,
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
    threads: options.Threads = None,
    draft_tokens: Annotated[int, typer.Option(min=1, help="Tokens drafted per round.")] = 5,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens of the longest completion.")] = 64,
    samples: Annotated[
        int, typer.Option(min=1, help="Sampled completions per law, where the drafter gives probabilities.")
    ] = 2000,
    learns: Annotated[
        bool,
        typer.Option(
            "--learns", help="Its guesses depend on other requests on purpose: do not compare with a fresh one."
        ),
    ] = False,
    on_model: Annotated[
        bool,
        typer.Option(
            "--on-model", help="Run the checks on --model too: for a drafter that serves one vocabulary only."
        ),
    ] = False,
    as_json: options.AsJson = False,
) -> None:
    """Check a drafter: does it keep the contract, is the output exact, is its state in order, what does it gain?

    Leaves with 0 if every check passed, 1 if one failed.
    """
    if model is None and (prompt or on_model):
        raise typer.BadParameter("--prompt and --on-model need --model")
    factory = find_factory(drafter)
    from ..checker import check_drafter as check  # noqa: PLC0415 - loads torch
    from .session import as_prompts, open_llm, quiet_transformers  # noqa: PLC0415 - loads torch

    err = console(stderr=True)
    quiet_transformers()
    llm = None
    if model is not None:
        llm = open_llm(ModelChoice(model=model, dtype=dtype, device=device, threads=threads), err)
    with loading(err, "checking") as notify:
        report = check(
            factory,
            model=None if llm is None else llm.model,
            tokenizer=None if llm is None else llm.tokenizer,
            prompts=as_prompts(llm, prompt, raw=False, system=None) if llm is not None and prompt else None,
            check_model=llm.model if llm is not None and on_model else None,
            max_draft_tokens=draft_tokens,
            max_tokens=max_tokens,
            samples=samples,
            learns=learns,
            notify=notify if err.is_terminal else _ignore,
        )
    if report.gain is not None and model is not None:  # the loaded model knows its folder; the person knows its name
        report = dataclasses.replace(report, gain=dataclasses.replace(report.gain, model=model))
    if as_json:
        typer.echo(json.dumps(report.as_dict()))
    else:
        show_report(report, console())
    if not report.ok:
        raise typer.Exit(1)


def _ignore(_message: str) -> None:
    """The names of the checks are in the table; a log need not hold them twice."""


def find_factory(name: str) -> Callable[[], Any]:
    """The class or function that ``MODULE:FACTORY`` names.

    Args:
        name: a module or the path of a file, a colon, and a name in it (dots reach into classes).

    Raises:
        typer.BadParameter: there is no such thing, or it cannot be called.
    """
    place, colon, path = name.rpartition(":")
    if not colon or not place or not path:
        raise typer.BadParameter(f"{name!r} is not MODULE:FACTORY, for example my_module:MyDrafter")
    found: Any = _load(place)
    for part in path.split("."):
        found = getattr(found, part, None)
        if found is None:
            raise typer.BadParameter(f"{place} has no {path}")
    if not callable(found):
        raise typer.BadParameter(f"{name} is a {type(found).__name__}; give a class or function that makes a drafter")
    factory: Callable[[], Any] = found
    return factory


def _load(place: str) -> ModuleType:
    if place.endswith(".py"):
        file = Path(place)
        if not file.is_file():
            raise typer.BadParameter(f"there is no file {place}")
        spec = importlib.util.spec_from_file_location(file.stem, file)
        if spec is None or spec.loader is None:
            raise typer.BadParameter(f"{place} is not a Python file")
        module = importlib.util.module_from_spec(spec)
        sys.modules[file.stem] = module  # classes of the file look their module up by name
        spec.loader.exec_module(module)
        return module
    sys.path.insert(0, "")  # the folder the person is in, as for `python -m`
    try:
        return importlib.import_module(place)
    except ModuleNotFoundError as error:
        # Only the module asked for: one that it imports in vain is a fault of its own and keeps its message.
        if error.name is None or not (place == error.name or place.startswith(f"{error.name}.")):
            raise
        raise typer.BadParameter(f"there is no module {place}") from None
    finally:
        sys.path.remove("")


def show_report(report: DrafterReport, out: Console) -> None:
    """Print the verdict, the checks and the gain."""
    style = _STYLES["ok" if report.ok else "failed"]
    out.print(Text(report.verdict, style=style), soft_wrap=True)
    out.print()
    table = plain_table("check", "outcome", "what was found")
    for check in report.checks:
        outcome = check.outcome.value
        table.add_row(check.name, Text(outcome, style=_STYLES[outcome]), Text(check.reason))
    out.print(table)
    if report.gain is not None:
        out.print()
        shape = " in a tree" if report.gain.trees else ""
        out.print(f"With {report.gain.draft_tokens} tokens a round{shape} on {report.gain.model}:", soft_wrap=True)
        out.print(gain_table(report.gain))


def gain_table(gain: Gain) -> Any:
    """Figures of a gain."""
    table = plain_table("gain", "", right=("",))
    positions = "  ".join(format_percent(share) for share in gain.acceptance_by_position) or "nothing was verified"
    rows = [
        ("mean accepted length (tokens per round)", f"{gain.mean_accepted_length:.2f}"),
        ("acceptance by position", positions),
        ("accepted / verified (VPR)", format_percent(gain.verification_pass_rate)),
        ("accepted / drafted (DU)", format_percent(gain.draft_utilisation)),
        (
            "accepted / promised by its estimates",
            f"{gain.accepted / gain.claimed:.2f}" if gain.claimed else "no drafts",
        ),
        ("drafting, per drafted token", f"{gain.draft_seconds_per_token * 1e6:.0f} us"),
        ("drafting, in plain rounds", f"{gain.draft_overhead:.3f}"),
        ("verifying a block, in extra plain rounds", f"{gain.verify_overhead:.3f}"),
        ("estimated speedup", f"{gain.estimated_speedup:.2f}"),
    ]
    for label, value in rows:
        table.add_row(label, value)
    if not gain.is_real_model:
        table.caption = "The tiny model is random and takes microseconds: only the counts mean something. See --model."
        table.caption_justify = "left"
    return table
