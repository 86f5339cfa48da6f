"""Tiny block drafters with weights that matter: every part of them moves the tokens they draft.

A fresh :class:`DSparkModel` has zeros where training starts (Markov output, confidence) and small weights elsewhere; an
equality of two such models' outputs would mean little.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from specflow_llm.config import SamplingParams
from specflow_llm.drafters.base import DraftRequest, RowId
from specflow_llm.drafters.dspark import DSparkDrafter
from specflow_llm.dspark import DSparkConfig, DSparkModel, TargetAdapter
from specflow_llm.sampling import RowSampler, Rule
from specflow_llm.training.samples import Sample
from tests.specflow_llm.models import VOCAB, tiny_model

MASK = VOCAB - 1
DRAFT_IDS = torch.arange(0, VOCAB, 2)
"""A draft vocabulary whose columns are not its ids."""


def target(name: str = "llama", **overrides: Any) -> PreTrainedModel:
    """A tiny target with four layers, of which three can be read."""
    return tiny_model(name, **{"num_hidden_layers": 4, **overrides})


def config(**changes: Any) -> DSparkConfig:
    """A small drafter for :func:`target`."""
    values: dict[str, Any] = {
        "target": "tiny",
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "num_target_layers": 4,
        "target_layer_ids": (0, 2),
        "mask_token_id": MASK,
        "block_size": 4,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 8,
        "intermediate_size": 48,
        "max_positions": 256,
        "markov_rank": 8,
    }
    return DSparkConfig(**{**values, **changes})


def drafter_model(seed: int = 0, **changes: Any) -> DSparkModel:
    """A drafter whose weights are all far from zero, in evaluation mode."""
    made = config(**changes)
    ids = None if made.draft_vocab_size is None else DRAFT_IDS[: made.draft_vocab_size]
    model = DSparkModel(made, ids)
    spread(model, seed)
    return model.eval()


def spread(model: torch.nn.Module, seed: int = 0) -> None:
    """Replace all weights by random ones that are wide apart."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            centre = 1.0 if parameter.dim() == 1 and len(parameter) > 1 else 0.0
            parameter.copy_(centre + 0.3 * torch.randn(parameter.shape, generator=generator))


def make_drafter(
    adapter: TargetAdapter, seed: int = 0, *, calibration: Any = None, pack: bool = True, **changes: Any
) -> DSparkDrafter:
    """A drafter at work, with random weights."""
    return DSparkDrafter(drafter_model(seed, **changes), adapter, calibration=calibration, pack=pack)


def random_ids(length: int, seed: int = 0, *, vocab: int = MASK) -> list[int]:
    """Random token ids, without the mask."""
    generator = torch.Generator().manual_seed(seed)
    found: list[int] = torch.randint(vocab, (length,), generator=generator).tolist()
    return found


def request(
    row: int,
    token_ids: Sequence[int],
    limit: int,
    features: torch.Tensor,
    params: SamplingParams | None = None,
    *,
    rule: Rule = "greedy",
    vocab: int = VOCAB,
) -> DraftRequest:
    """A request as the engine would make it; ``features`` may be those of more tokens."""
    sampler = RowSampler(params or SamplingParams(), vocab_size=vocab, num_prompt_tokens=1, seed=row, rule=rule)
    return DraftRequest(RowId(row), list(token_ids), limit, sampler, features[: len(token_ids) - 1])


def sample(token_ids: Sequence[int], *, first_own: int = 1, index: int = 0) -> Sample:
    """A conversation whose tokens from ``first_own`` on are the target's own."""
    return Sample(index, tuple(token_ids), first_own, first_own, 0.0)
