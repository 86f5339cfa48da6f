"""Drafters: an explicit table of the built-in ones, and how a setting becomes a drafter.

A new drafter is one module here and one row in the table.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedModel

from ..errors import DrafterError, ModelNotFoundError
from ..hub import load_model
from .base import Drafter, DrafterBase, DraftRequest, Proposal, RowId
from .model import ModelDrafter
from .ngram import NGramDrafter

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


def build_drafter(setting: Any, target: TargetFacts) -> Drafter | None:
    """The drafter a :class:`~specflow_llm.config.Speculation` asks for.

    Args:
        setting: None, a built-in name, the path or id of a smaller model, a loaded model, or a drafter.
        target: the target it will serve.

    Raises:
        DrafterError: the setting is none of these, or the model cannot draft for this target.
        ModelNotFoundError: no model of that name.
    """
    if setting is None:
        return None
    if isinstance(setting, (str, os.PathLike)):
        name = os.fspath(setting)
        if name in BUILTIN_DRAFTERS:
            return BUILTIN_DRAFTERS[name]()
        try:
            loaded = load_model(name, dtype=target.dtype, device=target.device)
        except ModelNotFoundError as error:
            known = " or ".join(map(repr, sorted(BUILTIN_DRAFTERS)))
            raise ModelNotFoundError(
                name, error.reason, f"for a drafter, give {known}, or a model: {error.remedy}"
            ) from error
        _check_tokenizers(name, loaded.tokenizer, target.tokenizer)
        return ModelDrafter(loaded.model, target_vocab_size=target.vocab_size, name=name)
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
    "DraftRequest",
    "Drafter",
    "DrafterBase",
    "ModelDrafter",
    "NGramDrafter",
    "Proposal",
    "RowId",
    "TargetFacts",
    "build_drafter",
]
