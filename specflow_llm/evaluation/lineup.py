"""The drafters of an evaluation, with the names they have in its tables and files."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..architecture import inspect_model
from ..calibration import fingerprint
from ..drafters import BUILTIN_DRAFTERS, Drafter, TargetFacts, build_drafter, shipped_drafter
from ..errors import CheckpointError, DrafterError
from ..hub import LoadedModel

PLAIN = "plain"
"""The row of plain decoding."""


@dataclass(frozen=True, slots=True)
class Entrant:
    """One drafter."""

    name: str
    drafter: Drafter
    fingerprint: str | None
    """Of its checkpoint; None where it does not lie in a folder."""


def line_up(
    settings: Sequence[Any], loaded: LoadedModel, notify: Callable[[str], None] = lambda _message: None
) -> list[Entrant]:
    """Build drafters for a target.

    Args:
        settings: as :class:`~specflow_llm.config.Speculation` takes them.
        loaded: the target.
        notify: told about steps that take long.

    Raises:
        DrafterError: one cannot serve the target, is none at all, or two have the same name.
        ModelNotFoundError: no model of that name.
    """
    facts = TargetFacts(
        inspect_model(loaded.model).vocab_size,
        loaded.tokenizer,
        loaded.model.dtype,
        loaded.model.device,
        model=loaded.model,
        name=loaded.name,
    )
    found: list[Entrant] = []
    for setting in settings:
        is_path = isinstance(setting, (str, os.PathLike)) and os.fspath(setting) not in BUILTIN_DRAFTERS
        if is_path:
            notify(f"loading drafter {os.fspath(setting)}")
        drafter = None if setting == "none" else build_drafter(setting, facts)
        if drafter is None:
            raise DrafterError("none", "nothing would be drafted", "leave it out: plain decoding is compared anyway")
        is_mix = is_path and "+" in os.fspath(setting) and not Path(setting).exists()
        name = short_name(os.fspath(setting) if is_path and not is_mix else drafter.name)
        if name in {PLAIN, *(entrant.name for entrant in found)}:
            raise DrafterError(name, "another row has this name", "rename its folder, or evaluate it apart")
        place = shipped_drafter(loaded.name) if setting == "dspark" else setting
        found.append(Entrant(name, drafter, _fingerprint(place) if is_path else None))
    return found


def short_name(name: str) -> str:
    """The last part of a path that exists; other names as they are."""
    return Path(name).resolve().name if Path(name).exists() else name


def _fingerprint(setting: Any) -> str | None:
    if not Path(setting).exists():
        return None
    try:
        return fingerprint(setting)
    except CheckpointError:
        return None  # it was loaded, so it is a drafter in a layout of its own; nothing can be stored beside it
