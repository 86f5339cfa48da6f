"""Drafters: an explicit table of the built-in ones, and how a setting becomes a drafter.

A new drafter is one module here and one row in the table.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from ..dspark import TargetAdapter
from ..dspark.checkpoint import is_drafter
from ..dspark.layouts import file_layout
from ..errors import DrafterError, ModelNotFoundError
from ..hub import load_model
from .base import BranchingDrafter, Drafter, DrafterBase, DraftRequest, Proposal, RowId
from .combined import CombinedDrafter
from .conv import ConvConfig, ConvDrafter, ConvModel
from .conv_checkpoint import is_conv as _is_conv
from .dspark import DSparkDrafter
from .model import ModelDrafter
from .ngram import NGramDrafter
from .salvage import SalvageDrafter

BUILTIN_DRAFTERS: dict[str, Callable[[], Drafter]] = {
    "ngram": NGramDrafter,
}
"""Drafters that need no weights, by name."""


@dataclass(frozen=True, slots=True)
class TargetFacts:
    """What building a drafter needs to know of its target."""

    vocab_size: int
    tokenizer: Any
    dtype: Any
    device: Any
    model: PreTrainedModel | None = None
    """The target itself, for drafters that share its embedding and head."""
    name: str = ""
    """What the target was loaded as."""


def build_drafter(setting: Any, target: TargetFacts) -> Drafter | None:
    """The drafter a :class:`~specflow_llm.config.Speculation` asks for.

    Args:
        setting: None, a built-in name, the folder of a trained drafter, the path or id of a smaller model, several of
            these joined by ``+`` (the cheapest first), a loaded model, or a drafter.
        target: the target it will serve.

    Raises:
        DrafterError: the setting is none of these, or the model cannot draft for this target.
        ModelNotFoundError: no model of that name.
    """
    if setting is None:
        return None
    if isinstance(setting, (str, os.PathLike)):
        return _named(os.fspath(setting), target)
    if isinstance(setting, PreTrainedModel):
        return ModelDrafter(setting.eval(), target_vocab_size=target.vocab_size)
    if isinstance(setting, type):
        raise DrafterError(
            setting.__name__, "it is a class, not a drafter", f"give an instance: {setting.__name__}(...)"
        )
    if isinstance(setting, Drafter):
        return setting
    raise DrafterError(
        type(setting).__name__,
        "it is neither a name, a model nor an object with the Drafter methods",
        f"use one of {sorted(BUILTIN_DRAFTERS)}, a model, or subclass specflow_llm.DrafterBase",
    )


def _named(name: str, target: TargetFacts) -> Drafter:
    """A drafter from a built-in name, a trained drafter's folder, or a smaller model's path or id."""
    if name in BUILTIN_DRAFTERS:
        return BUILTIN_DRAFTERS[name]()
    if name == "dspark":
        return DSparkDrafter.load(shipped_drafter(target.name), _adapter(name, target), name=name)
    if _is_conv(Path(name)):
        return ConvDrafter.load(name, _adapter(name, target))
    if file_layout(Path(name)) is not None:
        return DSparkDrafter.load(name, _adapter(name, target), tokenizer=target.tokenizer)
    if name == "none":
        raise DrafterError(
            name, "there is no such drafter", "write drafter=None, or speculation=None, to decode plainly"
        )
    if "+" in name and not Path(name).exists():
        parts = name.split("+")
        drafters = [_named(part, target) for part in parts]
        costs = [0.0 if part in BUILTIN_DRAFTERS else _cost(mate) for part, mate in zip(parts, drafters, strict=True)]
        return CombinedDrafter(*drafters, costs=costs)
    _check_name(name)
    try:
        loaded = load_model(name, dtype=target.dtype, device=target.device)
    except ModelNotFoundError as error:
        known = " or ".join(map(repr, sorted(BUILTIN_DRAFTERS)))
        raise ModelNotFoundError(
            name, error.reason, f"for a drafter, give {known}, or a model: {error.remedy}"
        ) from error
    _check_tokenizers(name, loaded.tokenizer, target.tokenizer)
    return ModelDrafter(loaded.model, target_vocab_size=target.vocab_size, name=name)


def _check_name(name: str) -> None:
    """Refuse what can only be a slip, before a hub is asked for it over and over."""
    known = (*sorted(BUILTIN_DRAFTERS), "dspark")
    meant = [] if Path(name).exists() else difflib.get_close_matches(name.lower(), known, n=1)
    if not name or meant:
        raise ModelNotFoundError(
            name,
            "there is no drafter of that name",
            f"for a drafter, give {' or '.join(map(repr, meant or known))}, or the path or id of a model",
        )


def _cost(drafter: Drafter) -> float:
    """Roughly what asking a drafter takes, as a share of a target forward; the adaptive policy measures it anyway."""
    return 0.12 if isinstance(drafter, DSparkDrafter) else 0.25


SHIPPED = Path(__file__).parent.parent / "data" / "drafters"
"""Trained drafters that come with this package, one folder per target."""


def shipped_drafter(target: str) -> Path:
    """The folder of the trained drafter that comes with this package for a target.

    Raises:
        ModelNotFoundError: there is none.
    """
    folder = SHIPPED / target
    if not target or not is_drafter(folder):
        known = sorted(path.name for path in SHIPPED.glob("*") if is_drafter(path)) if SHIPPED.is_dir() else []
        raise ModelNotFoundError(
            "dspark",
            f"no trained drafter comes with this package for {target or 'a model handed in by the caller'}",
            f"train one (specflow-llm train --target ... --out DIR) and give its folder; there is one for: "
            f"{', '.join(known) or 'no target'}",
        )
    return folder


def _adapter(name: str, target: TargetFacts) -> TargetAdapter:
    if target.model is None:
        raise DrafterError(name, "it needs the target model itself", "build it through LLM")
    return TargetAdapter(target.model)


def _check_tokenizers(name: str, draft_tokenizer: Any, target_tokenizer: Any) -> None:
    """Token ids must mean the same on both sides; heads may be padded differently."""
    if draft_tokenizer is None or target_tokenizer is None:
        return
    ours, theirs = target_tokenizer.get_vocab(), draft_tokenizer.get_vocab()
    differing = [token for token, number in theirs.items() if ours.get(token, number) != number]
    if differing:
        raise DrafterError(
            name,
            f"its tokenizer gives {len(differing)} tokens other ids than the target's (for example {differing[0]!r})",
            "use a draft model of the same family",
        )


__all__ = [
    "BUILTIN_DRAFTERS",
    "BranchingDrafter",
    "CombinedDrafter",
    "ConvConfig",
    "ConvDrafter",
    "ConvModel",
    "DSparkDrafter",
    "DraftRequest",
    "Drafter",
    "DrafterBase",
    "ModelDrafter",
    "NGramDrafter",
    "Proposal",
    "RowId",
    "SalvageDrafter",
    "TargetFacts",
    "build_drafter",
    "shipped_drafter",
]
