"""Where two outputs part, and whether rounding alone explains it.

Greedy outputs of one model may part where its two best logits are as close as the rounding of the arithmetic: a forward
over several tokens adds up in another order than one over a single token. A teacher-forced forward over the common
prefix shows how close they were.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from ..architecture import inspect_model

_TIE = {torch.float64: 1e-6, torch.float32: 1e-3}
_TIE_16_BIT = 0.25
"""Largest gap, in standard deviations of the logits, that rounding explains; as in the check of models at load time."""


@dataclass(frozen=True, slots=True)
class Difference:
    """The first place where an output parts from the reference."""

    position: int
    """Index into the generated tokens."""
    reference_token: int | None
    """None: the reference had ended there."""
    other_token: int | None
    """None: the other output had ended there."""
    top_tokens: tuple[int, int] | None
    """The two most probable tokens of a teacher-forced forward over prompt and common prefix."""
    top_gap: float | None
    """The difference of their logits."""
    contested_gap: float | None
    """How far the less probable one of the two emitted tokens lies below the best logit."""
    logit_std: float | None
    explained_by_rounding: bool
    """True when both emitted tokens are within rounding of the best logit. False is a bug somewhere."""


def first_difference(reference: Sequence[int], other: Sequence[int]) -> int | None:
    """Index of the first token that differs, or at which one of the two ends; None for equal sequences."""
    for index, (left, right) in enumerate(zip(reference, other, strict=False)):
        if left != right:
            return index
    return None if len(reference) == len(other) else min(len(reference), len(other))


def diagnose(
    model: PreTrainedModel, prompt: Sequence[int], reference: Sequence[int], other: Sequence[int]
) -> Difference | None:
    """The first difference between two outputs with the logits there; None for equal outputs.

    Args:
        model: the model both outputs claim to be of.
        prompt: prompt ids.
        reference: output ids of the reference.
        other: output ids of the candidate.
    """
    position = first_difference(reference, other)
    if position is None:
        return None
    left = reference[position] if position < len(reference) else None
    right = other[position] if position < len(other) else None
    if left is None or right is None:
        # Same tokens, but one went on where the other stopped: no logit explains that.
        return Difference(position, left, right, None, None, None, None, explained_by_rounding=False)
    ids = torch.tensor([[*prompt, *reference[:position]]], device=model.device)
    limit = {"logits_to_keep": 1} if inspect_model(model).can_limit_logits else {}
    with torch.inference_mode():
        logits = model(input_ids=ids, **limit).logits[0, -1].float()
    top = logits.topk(2)
    deviation = float(logits.std())
    contested = float(top.values[0] - torch.minimum(logits[left], logits[right]))
    return Difference(
        position=position,
        reference_token=left,
        other_token=right,
        top_tokens=(int(top.indices[0]), int(top.indices[1])),
        top_gap=float(top.values[0] - top.values[1]),
        contested_gap=contested,
        logit_std=deviation,
        explained_by_rounding=contested <= _TIE.get(model.dtype, _TIE_16_BIT) * deviation,
    )
