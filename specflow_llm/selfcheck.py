"""Proof, at load time, that this model decodes exactly through this library's state.

A model class may read positions or masks in a way nobody foresaw. Rather than trusting a list of names, the target is
run on two short ragged rows, through chunked prefill, a block with rejected tokens and another block after the
rollback, and its logits are compared with plain forwards of the same model without any cache. A model that disagrees
is refused before any work starts. Where drafts may branch, the same is done with a block that branches; a model
that disagrees there runs chains only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from .architecture import Architecture, StateKind
from .errors import UnsupportedModelError
from .recurrent import RecurrentTarget
from .target import DEFAULT_PREFILL_CHUNK, SlotTarget, Target, TreeTarget

# Largest logit difference allowed, in standard deviations of the logits. A wrong mask or position moves logits by
# about one; 16-bit rounding by a few hundredths, float32 rounding by millionths.
_TOLERANCE = {torch.float32: 3e-4, torch.float64: 1e-6}
_TOLERANCE_16_BIT = 0.25
_FLAT = 1e-6  # logits that spread less than this are constant; differences are then measured against it
_CONTINUED = 4  # tokens the rows are continued by after their prompts


def build_target(
    model: PreTrainedModel,
    architecture: Architecture,
    *,
    feature_layers: Sequence[int] = (),
    tap_final: bool = False,
    check: bool = True,
    prefill_chunk: int = DEFAULT_PREFILL_CHUNK,
    trees: bool = False,
    notify: Callable[[str], None] = lambda _message: None,
) -> Target:
    """The fitting target for a model, checked.

    Args:
        model: the model.
        architecture: of it.
        feature_layers: decoder layers whose outputs are returned with the logits.
        tap_final: return the hidden states after the final norm behind them.
        check: compare it with itself.
        prefill_chunk: prompt tokens per forward.
        trees: drafts may branch. A model that turns out to run only chains exactly gets only chains.
        notify: told so.

    Raises:
        UnsupportedModelError: its logits through this library's state differ from its plain logits.
    """

    def slots(chunk: int, **taps: Any) -> Target:
        return SlotTarget(model, architecture, prefill_chunk=chunk, runs_trees=branching, **taps)

    def recurrent(chunk: int, **taps: Any) -> Target:
        return RecurrentTarget(model, architecture, prefill_chunk=chunk, **taps)

    def one_by_one(chunk: int, **taps: Any) -> Target:
        return RecurrentTarget(model, architecture, prefill_chunk=chunk, one_by_one=True, **taps)

    taps = {"feature_layers": feature_layers, "tap_final": tap_final}

    tolerance = _TOLERANCE.get(model.dtype, _TOLERANCE_16_BIT)
    branching = trees and _may_branch(model, architecture, tolerance if check else math.inf, notify)
    candidates = [slots] if architecture.state_kind is StateKind.SLOTS else [recurrent, one_by_one]
    if not check:
        return candidates[0](prefill_chunk, **taps)
    reason = ""
    cause: Exception | None = None
    for candidate in candidates:
        try:
            worst = largest_difference(model, architecture, lambda chunk, make=candidate: make(chunk))  # type: ignore[misc]
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # noqa: BLE001 - a model may fail in any way on a cache that is not its own
            reason, cause = f"it cannot run on this library's cache ({type(error).__name__}: {error})", error
            continue
        if worst <= tolerance:
            return candidate(prefill_chunk, **taps)
        reason = (
            f"its logits through a cache with rollback differ from its plain logits by {worst:.3g} standard deviations"
        )
    raise UnsupportedModelError(
        architecture.name, reason, "report the model type; pass check_model=False only to investigate"
    ) from cause


def largest_difference(
    model: PreTrainedModel, architecture: Architecture, make_target: Callable[[int], Target]
) -> float:
    """Largest difference between cached, rolled-back logits and plain ones, in the latter's standard deviations.

    Infinite where one of them is not a number.
    """
    vocab = architecture.vocab_size
    context = architecture.context_length
    long, short = (8, 5) if context is None or context >= 8 + _CONTINUED else (3, 2)
    generator = torch.Generator().manual_seed(0)
    rows = [
        torch.randint(vocab, (long + _CONTINUED,), generator=generator).tolist(),
        torch.randint(vocab, (short + _CONTINUED,), generator=generator).tolist(),
    ]
    wrong = [(token + 1) % vocab for token in rows[0]]
    sizes = [long, short]
    target = make_target(3)
    target.open([rows[0][: sizes[0]], rows[1][: sizes[1]]])
    plain = [_plain_logits(model, row) for row in rows]
    worst = 0.0
    # Round 1: row 0 runs three tokens of which the last two are rejected; row 1 runs two and keeps both. Rounds 2 and
    # 3: the true continuation, first with the longer row narrower, then with it wider.
    rounds = [([[rows[0][sizes[0] - 1], wrong[1], wrong[2]], rows[1][sizes[1] - 1 : sizes[1] + 1]], (1, 2))]
    rounds.append(([rows[0][sizes[0] : sizes[0] + 1], rows[1][sizes[1] + 1 : sizes[1] + 3]], (1, 2)))
    rounds.append(([rows[0][sizes[0] + 1 : sizes[0] + 4], rows[1][sizes[1] + 3 : sizes[1] + 4]], (3, 1)))
    starts = [size - 1 for size in sizes]
    for blocks, kept in rounds:
        logits = target.forward(blocks).logits
        for row, count in enumerate(kept):
            expected = plain[row][starts[row] : starts[row] + count]
            worst = max(worst, _difference(logits[row, :count].float(), expected))
            starts[row] += count
            target.keep(row, count)
    return worst


def _may_branch(
    model: PreTrainedModel, architecture: Architecture, tolerance: float, notify: Callable[[str], None]
) -> bool:
    """Whether blocks may branch; an infinite tolerance takes it on trust."""
    if architecture.state_kind is not StateKind.SLOTS or tolerance == math.inf:
        return architecture.state_kind is StateKind.SLOTS
    try:
        worst = tree_difference(model, architecture, SlotTarget(model, architecture))
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # noqa: BLE001 - a model may fail in any way on a cache that is not its own
        problem = f"it cannot run a block that branches ({type(error).__name__}: {error})"
    else:
        if worst <= tolerance:
            return True
        problem = f"its logits over a block that branches are {worst:.3g} standard deviations away from its plain ones"
    notify(f"drafts for {architecture.name} will not branch: {problem}")
    return False


def tree_difference(model: PreTrainedModel, architecture: Architecture, target: TreeTarget) -> float:
    """Largest difference between the logits of a block that branches and plain ones, in standard deviations.

    Infinite where one of them is not a number.
    """
    generator = torch.Generator().manual_seed(1)
    vocab = architecture.vocab_size
    prompt = torch.randint(vocab, (3,), generator=generator).tolist()
    left, right, after = (torch.randint(vocab, (2,), generator=generator).tolist() for _ in range(3))
    right[0] = (left[0] + 1) % vocab
    target.open([prompt])
    # Two branches of two tokens; the second is kept, so that what it wrote has to move.
    block = [prompt[-1], left[0], right[0], left[1], right[1]]
    found = target.forward_trees([block], [[-1, -1, 0, 1]]).logits[0].float()
    target.arrange(0, [0, 2, 4])
    target.keep(0, 3)
    then = target.forward([after]).logits[0].float()
    first, second = _plain_logits(model, [*prompt, *left]), _plain_logits(model, [*prompt, *right, *after])
    pairs = [(found[[0, 1, 3]], first[2:5]), (found[[0, 2, 4]], second[2:5]), (then, second[5:7])]
    return max(_difference(ours, plain) for ours, plain in pairs)


def _difference(ours: torch.Tensor, plain: torch.Tensor) -> float:
    """Largest difference in standard deviations of the plain logits; infinite where one of them is not a number."""
    difference = float((ours - plain).abs().max() / plain.std().clamp(min=_FLAT))
    return math.inf if math.isnan(difference) else difference


@torch.inference_mode()
def _plain_logits(model: PreTrainedModel, row: Sequence[int]) -> torch.Tensor:
    ids = torch.tensor([list(row)], device=model.device)
    logits: torch.Tensor = model(input_ids=ids, use_cache=False).logits[0].float()
    return logits
