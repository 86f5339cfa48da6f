"""What the training loop needs of a drafter, and what all drafters that share the target's head have in common.

Letters in shapes: B sequences, S positions, A blocks, G predicting slots of a block, N supervised slots, D hidden size,
V target vocabulary, Vd draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from ...dspark.adapter import DraftHead, TargetAdapter
from ..batches import Batch
from ..features import Features
from ..objective import Slots, Teacher
from ..samples import Sample


class Student(Protocol):
    """**Protocol:** a drafter while it is trained."""

    @property
    def head(self) -> DraftHead:
        """The target's output head, restricted to what can be drafted."""
        ...

    @property
    def num_slots(self) -> int:
        """G: slots per block for which acceptance is measured."""
        ...

    def batch(self, samples: Sequence[tuple[int, Sample]], seed: int, block: int | None = None) -> Batch:
        """Put (number, sample) pairs together, in blocks of at most ``block`` slots where shorter ones cost less.

        What is drawn for a sample depends on the seed and its number only, not on what it is batched with.
        """
        ...

    def forward(self, batch: Batch, found: Sequence[Features]) -> tuple[Slots, Teacher]:
        """The supervised slots of a batch, in the order of ``batch.supervised``, and the teacher of each.

        Args:
            batch: from :meth:`batch`.
            found: what the target thinks of its sequences, in order.
        """
        ...


@dataclass(frozen=True, slots=True)
class Selection:
    """Where a batch's slots are, on the target's device."""

    ids: torch.Tensor
    """[B, S]."""
    anchors: torch.Tensor
    """[B, A]."""
    kept: torch.Tensor
    """[B, A, G] bool: supervised slots."""
    before: torch.Tensor
    """[B, A, G] the token before each slot's."""
    where: torch.Tensor
    """[N] flat position (B * S) of the token before each supervised slot's."""
    targets: torch.Tensor
    """[N] the token of each supervised slot."""

    @classmethod
    def of(cls, batch: Batch, device: torch.device) -> Selection:
        """Read it off a batch."""
        ids, anchors, kept = batch.token_ids.to(device), batch.anchors.to(device), batch.supervised.to(device)
        size = ids.shape[1]
        rows = torch.arange(len(ids), device=device)[:, None, None]
        places = anchors.clamp(min=0).unsqueeze(-1) + torch.arange(kept.shape[-1], device=device)
        places = places.clamp(max=size - 1)
        targets = ids[rows, (places + 1).clamp(max=size - 1)][kept]
        return cls(ids, anchors, kept, ids[rows, places], (rows * size + places)[kept], targets)


def draft_columns(ids: torch.Tensor | None, adapter: TargetAdapter) -> torch.Tensor | None:
    """[V] column of each target id in the draft vocabulary, -1 where it has none; None for the whole vocabulary."""
    if ids is None:
        return None
    columns = torch.full((adapter.vocab_size,), -1, dtype=torch.int64, device=adapter.device)
    columns[ids.to(adapter.device)] = torch.arange(len(ids), device=adapter.device)
    return columns


def target_laws(head: DraftHead, found: Sequence[Features], size: int, where: torch.Tensor) -> Teacher:
    """The teacher of slots.

    Args:
        head: the head restricted to the draft vocabulary.
        found: the batch's sequences.
        size: S.
        where: [N] flat position (B * S) of the token before each slot's.
    """
    device = where.device
    hidden = torch.cat([padded(entry.hidden.float(), size) for entry in found]).to(device)
    log_total = torch.cat([padded(entry.log_total.unsqueeze(-1), size) for entry in found]).to(device)

    def teacher(rows: torch.Tensor) -> torch.Tensor:
        places, back = where[rows].unique(return_inverse=True)  # neighbouring blocks share most of their teachers
        with torch.no_grad():
            return (head(hidden[places]) - log_total[places])[back]

    return teacher


def padded(rows: torch.Tensor, size: int) -> torch.Tensor:
    """[n, X] -> [size, X], zeros at the end, cut where longer."""
    if rows.shape[0] >= size:
        return rows[:size]
    return torch.cat([rows, rows.new_zeros(size - rows.shape[0], rows.shape[1])])
