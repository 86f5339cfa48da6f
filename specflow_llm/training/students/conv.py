"""A convolutional drafter while it is trained: every token that the target wrote, each from the true ones before it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...drafters.conv_model import ConvModel
from ...dspark.adapter import DraftHead, TargetAdapter
from ..batches import Batch, build_chain_batch
from ..features import Features
from ..objective import Slots, Teacher
from ..samples import Sample
from .base import Selection, draft_columns, target_laws


class ConvStudent:
    """See :class:`.base.Student`. Positions weigh the same wherever they are in a block: all are predicted alike.

    Args:
        adapter: the target.
        model: the drafter, sharing the target's tables, on the target's device, in float32.
    """

    def __init__(self, adapter: TargetAdapter, model: ConvModel) -> None:
        self._adapter, self._model = adapter, model
        self.head: DraftHead = adapter.head(model.draft_ids)
        self._columns = draft_columns(model.draft_ids, adapter)

    @property
    def num_slots(self) -> int:
        """See :class:`.base.Student`."""
        return self._model.config.block_size

    def batch(self, samples: Sequence[tuple[int, Sample]], seed: int, block: int | None = None) -> Batch:
        """See :class:`.base.Student`; nothing is drawn, and shorter blocks would cost the same."""
        del seed, block
        return build_chain_batch(samples, block=self.num_slots)

    def forward(self, batch: Batch, found: Sequence[Features]) -> tuple[Slots, Teacher]:
        """One pass over whole sequences, and the teacher of the supervised positions."""
        model = self._model
        chosen = Selection.of(batch, self._adapter.device)
        hidden, _ = model.extend(model.empty_state(len(chosen.ids)), chosen.ids)
        outputs = model.outputs(hidden.flatten(0, 1)[chosen.where])
        labels = chosen.targets if self._columns is None else self._columns[chosen.targets]
        weights = torch.ones(len(labels), device=labels.device)
        slots = Slots(outputs, None, None, None, labels, weights)
        return slots, target_laws(self.head, found, chosen.ids.shape[1], chosen.where)
