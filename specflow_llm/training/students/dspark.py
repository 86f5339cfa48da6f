"""A block drafter while it is trained: random anchors, all slots of their blocks at once."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...dspark.adapter import DraftHead, TargetAdapter
from ...dspark.model import DSparkModel
from ..batches import Batch, build_batch
from ..features import Features
from ..objective import Slots, Teacher
from ..samples import Sample
from ..settings import TrainSettings
from .base import Selection, draft_columns, padded, target_laws


class DSparkStudent:
    """See :class:`.base.Student`.

    Args:
        adapter: the target.
        model: the drafter, on the target's device, in float32.
        settings: how it is trained.
    """

    def __init__(self, adapter: TargetAdapter, model: DSparkModel, settings: TrainSettings) -> None:
        self._adapter, self._model, self._settings = adapter, model, settings
        self.head: DraftHead = adapter.head(model.draft_ids)
        self._columns = draft_columns(model.draft_ids, adapter)
        self._mask_id = torch.tensor(model.config.mask_token_id, device=adapter.device)

    @property
    def num_slots(self) -> int:
        """See :class:`.base.Student`."""
        return self._model.config.block_size

    def batch(self, samples: Sequence[tuple[int, Sample]], seed: int, block: int | None = None) -> Batch:
        """See :class:`.base.Student`."""
        size = self.num_slots if block is None else min(block, self.num_slots)
        return build_batch(samples, num_anchors=self._settings.num_anchors, block=size, seed=seed)

    def forward(self, batch: Batch, found: Sequence[Features]) -> tuple[Slots, Teacher]:
        """Backbone and serial heads over a batch, and the teacher of its supervised slots."""
        model, config, device = self._model, self._model.config, self._adapter.device
        size, block = batch.token_ids.shape[1], batch.supervised.shape[-1]
        chosen = Selection.of(batch, device)
        anchors, kept = chosen.anchors, chosen.kept
        features = torch.stack([padded(entry.features.float(), size) for entry in found]).to(device)
        inputs = self._mask_id.expand(*anchors.shape, block + config.first_slot).clone()
        inputs[..., 0] = chosen.ids.gather(1, anchors.clamp(min=0))
        with torch.no_grad():
            embedded = self._adapter.embed(inputs)
        states = model(features, anchors, embedded, batch.lengths.to(device))[:, :, config.first_slot :]
        before = model.previous(chosen.before)
        markov = output = confidence = None
        if model.markov_head is not None and before is not None:
            markov = model.markov_head(before, states)[kept]
            output = model.markov_head.output.weight
        if model.confidence_head is not None:
            confidence = model.confidence_head(states, before)[kept]
        offsets = torch.arange(block, device=device)
        slots = Slots(
            states[kept], markov, output, confidence,
            chosen.targets if self._columns is None else self._columns[chosen.targets],
            self._settings.loss.of_slots(offsets).expand(kept.shape)[kept],
        )  # fmt: skip
        return slots, target_laws(self.head, found, size, chosen.where)
