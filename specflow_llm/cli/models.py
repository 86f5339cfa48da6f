"""``specflow-llm models``: the built-in models and where they stand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from ..display import console, loading, plain_table
from . import options


def models(
    *,
    fetch: Annotated[
        str | None, typer.Option(metavar="NAME", help="Download and convert this model, so that it is ready offline.")
    ] = None,
    as_json: options.AsJson = False,
) -> None:
    """List the built-in models and whether they are ready. Any Hugging Face model or folder can be used besides."""
    from ..hub import BUILTIN_MODELS  # noqa: PLC0415 - loads torch

    if fetch is not None:
        _fetch(fetch)
    found = [status(builtin) for builtin in BUILTIN_MODELS.values()]
    if as_json:
        typer.echo(json.dumps({"models": found}))
        return
    table = plain_table("name", "state", "license", "what it is")
    for entry in found:
        table.add_row(entry["name"], entry["state"], entry["license"], entry["title"])
    out = console()
    out.print(table)
    for entry in found:
        out.print(f"{entry['name']}: {entry['next_step']}", soft_wrap=True)


def status(builtin: Any) -> dict[str, str | None]:
    """Where a built-in model stands, and what to do next, as plain data.

    Args:
        builtin: a :class:`~specflow_llm.hub.BuiltinModel`.
    """
    from ..hub import cache_folder, converted_folder, find_gguf, is_converted  # noqa: PLC0415 - loads torch

    cache = cache_folder()
    weights = find_gguf(builtin, cache)
    path: Path | None = None
    if is_converted(builtin, cache):
        path = converted_folder(builtin, cache)
        state, next_step = "ready", f"converted, in {path}"
    elif weights is not None:
        path = weights.parent
        state, next_step = "downloaded", f"converted on first use, from {path}"
    else:
        state, next_step = "not downloaded", f"run `specflow-llm models --fetch {builtin.name}`"
    return {
        "name": builtin.name,
        "title": builtin.title,
        "license": builtin.license,
        "package": builtin.requirement,
        "state": state,
        "path": None if path is None else str(path),
        "next_step": next_step,
    }


def _fetch(name: str) -> None:
    from ..errors import ModelNotFoundError  # noqa: PLC0415 - with the rest
    from ..hub import BUILTIN_MODELS  # noqa: PLC0415 - loads torch
    from .session import make_ready, quiet_transformers  # noqa: PLC0415 - loads torch

    if name not in BUILTIN_MODELS:
        known = ", ".join(sorted(BUILTIN_MODELS))
        raise ModelNotFoundError(name, "it is not built in", f"choose {known}; others load by path or id")
    quiet_transformers()
    with loading(console(stderr=True), f"fetching {name}") as notify:
        make_ready(BUILTIN_MODELS[name], notify)
