"""From conversations to supervised slots: which anchors, which slots, which teachers.

Letters in shapes: B sequences, S positions, A blocks, G predicting slots of a block (gamma).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from .samples import Sample


def loss_mask(sample: Sample) -> torch.Tensor:
    """[S] bool: tokens that the target wrote itself, and that a drafter is therefore meant to foresee."""
    mask = torch.zeros(len(sample.token_ids), dtype=torch.bool)
    mask[sample.first_own :] = True
    return mask


def choose_anchors(mask: torch.Tensor, count: int, generator: torch.Generator, *, first: int = 1) -> torch.Tensor:
    """Positions of at most ``count`` anchors, sorted, uniformly without replacement.

    An anchor must be a token the target wrote, followed by another one (DSpark, section 3.4).

    Args:
        mask: [S] bool from :func:`loss_mask`.
        count: most anchors.
        generator: where chance comes from.
        first: no anchor before this position; at least one context feature must be there.
    """
    can = mask[:-1] & mask[1:]
    can[:first] = False
    places = can.nonzero().flatten()
    if len(places) > count:
        places = places[torch.randperm(len(places), generator=generator)[:count]]
    return places.sort().values


def supervised(anchors: torch.Tensor, mask: torch.Tensor, block: int) -> torch.Tensor:
    """[A, G] bool: slot k of a block is supervised iff token a + k + 1 is in the text and enabled, and all before too.

    Args:
        anchors: [A] positions, -1 for padding blocks.
        mask: [S] bool.
        block: G.
    """
    targets = anchors.unsqueeze(-1) + 1 + torch.arange(block, device=anchors.device)
    inside = targets < len(mask)
    enabled = mask[targets.clamp(max=len(mask) - 1)] & inside & (anchors >= 0).unsqueeze(-1)
    return enabled.cumprod(-1).bool()


@dataclass(frozen=True, slots=True)
class Batch:
    """Sequences padded at the end, with anchors."""

    token_ids: torch.Tensor
    """[B, S] int64, 0 where padded."""
    lengths: torch.Tensor
    """[B] int64."""
    anchors: torch.Tensor
    """[B, A] int64 positions, -1 for padding blocks."""
    supervised: torch.Tensor
    """[B, A, G] bool."""
    indices: tuple[int, ...]
    """Numbers of the sequences in the data set."""


def build_batch(samples: Sequence[tuple[int, Sample]], *, num_anchors: int, block: int, seed: int) -> Batch:
    """Put (number, sample) pairs together and draw their anchors.

    A sample's anchors depend on the seed and its number only, not on what it is batched with: several processes that
    share a batch draw what one would.
    """
    chosen = [
        choose_anchors(loss_mask(sample), num_anchors, torch.Generator().manual_seed(_mixed(seed, number)))
        for number, sample in samples
    ]
    return _put_together(samples, chosen, block)


def build_chain_batch(samples: Sequence[tuple[int, Sample]], *, block: int) -> Batch:
    """Put (number, sample) pairs together, cut into blocks that supervise every token the target wrote exactly once.

    For drafters that predict one token at a time. The blocks are the rounds of a drafter that is always right: the
    first begins with the first token of the target's own, each ends where the next begins, the last may be cut short.
    """
    chosen = [
        torch.arange(max(sample.first_own, 1) - 1, max(len(sample.token_ids) - 1, 0), block) for _, sample in samples
    ]
    return _put_together(samples, chosen, block)


def _put_together(samples: Sequence[tuple[int, Sample]], chosen: Sequence[torch.Tensor], block: int) -> Batch:
    """A batch with these anchors for each sample."""
    longest = max(len(sample.token_ids) for _, sample in samples)
    ids = torch.zeros(len(samples), longest, dtype=torch.int64)
    most = max(1, *(len(anchors) for anchors in chosen))
    anchors = torch.full((len(samples), most), -1, dtype=torch.int64)
    enabled = torch.zeros(len(samples), most, block, dtype=torch.bool)
    for row, ((_, sample), places) in enumerate(zip(samples, chosen, strict=True)):
        ids[row, : len(sample.token_ids)] = torch.tensor(sample.token_ids)
        anchors[row, : len(places)] = places
        enabled[row, : len(places)] = supervised(places, loss_mask(sample), block)
    return Batch(
        ids,
        torch.tensor([len(sample.token_ids) for _, sample in samples]),
        anchors,
        enabled,
        tuple(number for number, _ in samples),
    )


def _mixed(seed: int, number: int) -> int:
    """A generator's seed, for any pair of integers."""
    return (seed * 1_000_003 + number) % (1 << 63)


def epoch_order(count: int, batch_size: int, lengths: Sequence[int], seed: int) -> Iterator[list[int]]:
    """Batches of sample numbers for one epoch: shuffled, similar lengths together, every sample once.

    Sorting by length inside groups of 16 batches wastes little on padding and keeps the order random enough.

    Args:
        count: samples.
        batch_size: samples per batch; the last batch may be smaller.
        lengths: tokens per sample.
        seed: of this epoch; the order depends on nothing else.
    """
    generator = torch.Generator().manual_seed(_mixed(seed, 0))
    order = torch.randperm(count, generator=generator).tolist()
    group = 16 * batch_size
    batches: list[list[int]] = []
    for begin in range(0, count, group):
        near = sorted(order[begin : begin + group], key=lambda number: lengths[number])
        batches += [near[start : start + batch_size] for start in range(0, len(near), batch_size)]
    for place in torch.randperm(len(batches), generator=generator).tolist():
        yield batches[place]
