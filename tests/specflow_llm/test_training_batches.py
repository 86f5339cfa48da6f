"""Which anchors are drawn and which slots are supervised."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

from specflow_llm.training.batches import build_batch, choose_anchors, epoch_order, loss_mask, supervised
from tests.specflow_llm.block_drafters import sample


def generator(seed: int = 0) -> torch.Generator:
    """Chance for one call."""
    return torch.Generator().manual_seed(seed)


MASK = torch.tensor([0, 0, 1, 1, 0, 1, 1, 1, 1, 0, 1], dtype=torch.bool)


def test_only_the_targets_own_tokens_are_supervised() -> None:
    """What stands before ``first_own`` is nobody's to learn."""
    assert loss_mask(sample([1, 2, 3, 4], first_own=2)).tolist() == [False, False, True, True]
    assert not bool(loss_mask(sample([1, 2], first_own=5)).any())


def test_anchors_are_own_tokens_that_another_one_follows() -> None:
    """All such positions where there is room for all; sorted; none twice."""
    assert choose_anchors(MASK, 100, generator()).tolist() == [2, 5, 6, 7]
    assert choose_anchors(MASK, 4, generator()).tolist() == [2, 5, 6, 7]
    for seed in range(20):
        chosen = choose_anchors(MASK, 3, generator(seed)).tolist()
        assert len(chosen) == 3
        assert chosen == sorted(set(chosen))
        assert set(chosen) <= {2, 5, 6, 7}


def test_no_anchor_without_a_feature_before_it() -> None:
    """The first token has no context to draft from."""
    everything = torch.ones(4, dtype=torch.bool)
    assert choose_anchors(everything, 9, generator()).tolist() == [1, 2]
    assert choose_anchors(everything, 9, generator(), first=2).tolist() == [2]
    for length in (0, 1):
        assert choose_anchors(torch.ones(length, dtype=torch.bool), 9, generator()).tolist() == []


def test_anchors_are_uniform() -> None:
    """Every position is as likely as any other, and so is every pair; chi-square beyond these has odds below 1e-9."""
    everything = torch.ones(8, dtype=torch.bool)  # 6 positions, 15 pairs
    draws = 6000
    chance = generator(1)
    pairs = Counter(tuple(choose_anchors(everything, 2, chance).tolist()) for _ in range(draws))
    assert len(pairs) == 15
    expected = draws / 15
    assert sum((count - expected) ** 2 / expected for count in pairs.values()) < 75.0  # 14 degrees of freedom


def test_supervision_ends_at_the_first_token_that_is_not_enabled() -> None:
    """Slot k counts iff token a + k + 1 is in the text and enabled, and all before it are: a cumulative product."""
    found = supervised(torch.tensor([2, 5, 7, 9, -1]), MASK, 4)
    assert found.int().tolist() == [
        [1, 0, 0, 0],  # 3 is enabled, 4 is not, 5 and 6 are but come too late
        [1, 1, 1, 0],  # 6, 7, 8, not 9
        [1, 0, 0, 0],
        [1, 0, 0, 0],  # 10 is the last token
        [0, 0, 0, 0],  # padding
    ]


def test_supervision_equals_its_definition() -> None:
    """Compared with loops over random masks."""
    for seed in range(30):
        mask = torch.rand(12, generator=generator(seed)) < 0.8
        anchors = choose_anchors(mask, 5, generator(seed))
        found = supervised(anchors, mask, 4)
        for row, anchor in enumerate(anchors.tolist()):
            for slot in range(4):
                needed = range(anchor + 1, anchor + slot + 2)
                assert bool(found[row, slot]) == all(place < 12 and bool(mask[place]) for place in needed)
            assert bool(found[row, 0])  # an anchor always has something to predict


def batch_of(numbers: list[int], **settings: Any) -> Any:
    """A batch of texts that are told apart by number."""
    texts = [(number, sample([(number + place) % 50 for place in range(10 + 3 * number)])) for number in numbers]
    return build_batch(texts, **{"num_anchors": 4, "block": 3, "seed": 11, **settings})


def test_a_batch_is_padded_at_the_end() -> None:
    """Ids, anchors and supervision of short texts are filled up with what means nothing."""
    batch = build_batch(
        [(7, sample([5, 6, 7, 8, 9])), (3, sample([1, 2])), (1, sample([4, 5, 6]))], num_anchors=8, block=2, seed=0
    )
    assert batch.indices == (7, 3, 1)
    assert batch.lengths.tolist() == [5, 2, 3]
    assert batch.token_ids.tolist() == [[5, 6, 7, 8, 9], [1, 2, 0, 0, 0], [4, 5, 6, 0, 0]]
    assert batch.anchors.tolist() == [[1, 2, 3], [-1, -1, -1], [1, -1, -1]]
    assert batch.supervised.int().tolist() == [[[1, 1], [1, 1], [1, 0]], [[0, 0]] * 3, [[1, 0], [0, 0], [0, 0]]]


def test_a_batch_without_any_anchor_has_one_block_of_padding() -> None:
    """So that shapes stay whole."""
    batch = build_batch([(0, sample([1, 2]))], num_anchors=4, block=3, seed=0)
    assert batch.anchors.tolist() == [[-1]]
    assert not bool(batch.supervised.any())


def test_a_texts_anchors_do_not_depend_on_its_batch() -> None:
    """They follow from the seed and the text's number; another seed draws others."""
    together = batch_of([4, 9, 6])
    for row, number in enumerate((4, 9, 6)):
        assert batch_of([number]).anchors[0].tolist() == together.anchors[row].tolist()
    assert batch_of([9], seed=12).anchors.tolist() != batch_of([9]).anchors.tolist()
    for seed in (-5, 0, 2**62, 2**80):
        assert batch_of([9], seed=seed).anchors.tolist() == batch_of([9], seed=seed).anchors.tolist()


def test_an_epoch_has_every_text_once() -> None:
    """Shuffled by its seed, texts of similar length together."""
    lengths = torch.randint(10, 500, (103,), generator=generator(3)).tolist()
    batches = list(epoch_order(103, 8, lengths, 5))
    assert sorted(number for batch in batches for number in batch) == list(range(103))
    assert all(1 <= len(batch) <= 8 for batch in batches)
    assert len(batches) == 13
    assert batches == list(epoch_order(103, 8, lengths, 5))
    assert batches != list(epoch_order(103, 8, lengths, 6))
    padded = sum(len(batch) * max(lengths[number] for number in batch) for batch in batches)
    assert padded < 1.3 * sum(lengths)


@pytest.mark.parametrize(("count", "size"), [(1, 1), (1, 4), (4, 4), (5, 4), (64, 4), (65, 4)])
def test_an_epoch_of_any_size_is_whole(count: int, size: int) -> None:
    """Also where the last batch or the last group is short."""
    batches = list(epoch_order(count, size, [1] * count, 0))
    assert sorted(number for batch in batches for number in batch) == list(range(count))
    assert len(batches) == -(-count // size)
