"""What the target thinks of the training text: features for the drafter, hidden states for the teacher.

On the fly they cost one target forward per batch and epoch. :mod:`.feature_cache` keeps them on disk instead; for
several epochs on one small machine that saves most of the time.

Letters in shapes: B sequences, S positions, D hidden size, F features, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from ..dspark.adapter import TargetAdapter
from ..features import FeatureTaps
from .samples import Sample


@dataclass(frozen=True, slots=True)
class Features:
    """One sequence as the target sees it."""

    features: torch.Tensor
    """[S, F] outputs of the tapped layers, side by side; F is 0 where none are tapped."""
    hidden: torch.Tensor
    """[S, D] after the final norm."""
    log_total: torch.Tensor
    """[S] fp32 logsumexp of the logits over the whole vocabulary."""


class FeatureSource(Protocol):
    """**Protocol:** gives the features of samples by number."""

    def of(self, numbers: Sequence[int]) -> list[Features]:
        """Features of these samples, in order."""
        ...


class LiveFeatures:
    """Runs the target.

    Args:
        adapter: the target.
        layers: tapped decoder layers; none for drafters that need the teacher only.
        samples: the data set.
        dtype: what hidden states are rounded to *before* their logits are summed up: that of the cache that keeps them
            (:data:`.feature_cache.CACHE_DTYPE`), or the teacher's probabilities do not add up to one. None rounds
            nothing.
    """

    def __init__(
        self,
        adapter: TargetAdapter,
        layers: Sequence[int],
        samples: Sequence[Sample],
        *,
        dtype: torch.dtype | None = None,
    ) -> None:
        self._adapter = adapter
        self._taps = FeatureTaps(adapter.model, layers)
        self._samples = samples
        self._dtype = dtype

    @torch.inference_mode()
    def of(self, numbers: Sequence[int]) -> list[Features]:
        """See :class:`FeatureSource`. One padded forward; causal attention keeps the padding out of sight."""
        chosen = [self._samples[number].token_ids for number in numbers]
        ids = torch.zeros(len(chosen), max(map(len, chosen)), dtype=torch.int64)
        for row, tokens in enumerate(chosen):
            ids[row, : len(tokens)] = torch.tensor(tokens)
        ids = ids.to(self._adapter.device)
        with self._taps.recording() as tapped:
            hidden = self._adapter.last_hidden(ids)
        features = tapped.features()
        if features is None:
            features = hidden.new_empty(*hidden.shape[:2], 0)
        found = []
        for row, tokens in enumerate(chosen):
            kept = hidden[row, : len(tokens)].to(self._dtype or hidden.dtype)
            found.append(Features(features[row, : len(tokens)].clone(), kept.clone(), log_totals(self._adapter, kept)))
        return found


def log_totals(adapter: TargetAdapter, hidden: torch.Tensor, chunk: int = 256) -> torch.Tensor:
    """[S, D] hidden states after the final norm -> [S] fp32 logsumexp of their logits."""
    return torch.cat([adapter.logits(part).logsumexp(-1) for part in hidden.split(chunk)])
