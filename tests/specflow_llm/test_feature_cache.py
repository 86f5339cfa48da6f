"""Features on disk: filed by text, written whole or not at all, for any selection of texts."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from specflow_llm.dspark import TargetAdapter
from specflow_llm.errors import TrainingError
from specflow_llm.training.feature_cache import CACHE_DTYPE, CachedFeatures, FeatureCache, cache_bytes, cached_layers
from specflow_llm.training.features import Features, LiveFeatures
from specflow_llm.training.samples import Sample
from tests.specflow_llm.block_drafters import random_ids, sample, target

SAMPLES = [sample(random_ids(5 + 4 * number, number), index=number) for number in range(11)]


@functools.cache
def adapter() -> TargetAdapter:
    """The tiny target."""
    return TargetAdapter(target())


class Counting:
    """Computes features, and notes of what."""

    def __init__(self, samples: Sequence[Sample] = SAMPLES) -> None:
        self.asked: list[int] = []
        self._samples = samples

    def of(self, numbers: Sequence[int]) -> list[Features]:
        """The features, as a cache needs them."""
        self.asked += [self._samples[number].index for number in numbers]
        return LiveFeatures(adapter(), (0, 2), self._samples, dtype=CACHE_DTYPE).of(numbers)


def cache(folder: Path, **identity: Any) -> FeatureCache:
    """A cache in shards of four."""
    return FeatureCache(folder, {"target": "tiny", "layers": [0, 2], **identity}, shard_size=4)


def cached(
    folder: Path, live: Counting | None = None, samples: Sequence[Sample] = SAMPLES
) -> tuple[CachedFeatures, Counting]:
    """Samples' features from a folder, and what computes those that are absent."""
    live = live or Counting(samples)
    return CachedFeatures(cache(folder), live, samples), live


def shards(folder: Path) -> list[Path]:
    """The shards of a cache."""
    return sorted(folder.glob("*.safetensors"))


def test_a_cache_gives_what_was_computed(tmp_path: Path) -> None:
    """In bfloat16, in any order; every text is computed once, also by a later process."""
    source, live = cached(tmp_path)
    told: list[tuple[int, int]] = []
    source.build(lambda done, wanted: told.append((done, wanted)))
    assert live.asked == list(range(11))
    assert told == [(11, 11)]
    assert len(shards(tmp_path)) == 3
    source, live = cached(tmp_path)
    exact = LiveFeatures(adapter(), (0, 2), SAMPLES)
    for number, found in zip((9, 0, 10, 3), source.of([9, 0, 10, 3]), strict=True):
        expected = exact.of([number])[0]
        torch.testing.assert_close(found.features.float(), expected.features, rtol=1e-2, atol=1e-2)
        torch.testing.assert_close(found.hidden.float(), expected.hidden, rtol=1e-2, atol=1e-2)
        torch.testing.assert_close(found.log_total, expected.log_total, rtol=1e-2, atol=1e-2)
    assert live.asked == []


def test_what_is_absent_is_computed_when_asked_for_and_kept(tmp_path: Path) -> None:
    """Without building first; what waits for its shard can be had before it is written."""
    source, live = cached(tmp_path)
    first = source.of([3, 5])
    assert live.asked == [3, 5]
    assert shards(tmp_path) == []
    again = source.of([5, 3, 7])
    assert live.asked == [3, 5, 7]
    assert torch.equal(again[0].features, first[1].features)
    assert torch.equal(again[1].hidden, first[0].hidden)
    source.build()
    assert sorted(live.asked) == list(range(11))


def test_a_cache_serves_other_selections_of_text(tmp_path: Path) -> None:
    """Features belong to texts, not to places in a data set: another order, fewer texts, more texts."""
    cached(tmp_path)[0].build()
    other = [SAMPLES[7], sample(random_ids(9, 77), index=77), SAMPLES[2]]
    source, live = cached(tmp_path, samples=other)
    found = source.of([0, 1, 2])
    assert live.asked == [77]
    for entry, have in zip(other, found, strict=True):
        expected = LiveFeatures(adapter(), (0, 2), [entry]).of([0])[0]
        torch.testing.assert_close(have.features.float(), expected.features, rtol=1e-2, atol=1e-2)


def test_several_processes_fill_one_cache(tmp_path: Path) -> None:
    """Each sees what the others wrote once it looks again; neither overwrites the other's shards."""
    mine, others = cache(tmp_path), cache(tmp_path)
    everything = Counting().of(range(11))
    for number in range(4):
        mine.put(SAMPLES[number].token_ids, everything[number])
    for number in range(4, 8):
        others.put(SAMPLES[number].token_ids, everything[number])
    assert len(shards(tmp_path)) == 2
    assert SAMPLES[5].token_ids not in mine
    with pytest.raises(KeyError):
        mine.get(SAMPLES[5].token_ids)
    mine.refresh()
    assert torch.equal(mine.get(SAMPLES[5].token_ids).hidden, everything[5].hidden)
    assert all(entry.token_ids in mine for entry in SAMPLES[:8])
    assert SAMPLES[8].token_ids not in mine


def test_the_teacher_of_a_cache_is_a_law(tmp_path: Path) -> None:
    """Probabilities computed from rounded hidden states add up to one: the total belongs to what is stored."""
    for found in cached(tmp_path)[0].of(range(11)):
        with torch.inference_mode():
            laws = adapter().logits(found.hidden.float()) - found.log_total.unsqueeze(-1)
        torch.testing.assert_close(laws.exp().sum(-1), torch.ones(len(laws)), rtol=0.0, atol=1e-4)


def test_a_cache_that_was_killed_loses_one_shard(tmp_path: Path) -> None:
    """Shards that are there are kept, what was being written is made again, and leftovers are not read."""
    cached(tmp_path)[0].build()
    lost = shards(tmp_path)[1]
    lost.unlink()
    lost.with_suffix(".999.tmp").write_bytes(b"half")
    source, live = cached(tmp_path)
    source.build()
    assert len(live.asked) in {3, 4}
    source, later = cached(tmp_path)
    source.of(range(11))
    assert later.asked == []


@pytest.mark.parametrize("changed", [{"layers": [1, 2]}, {"dtype": "torch.bfloat16"}])
def test_a_cache_of_something_else_is_refused(tmp_path: Path, changed: dict[str, Any]) -> None:
    """The error names what differs."""
    cache(tmp_path)
    with pytest.raises(TrainingError, match=f"other {next(iter(changed))}"):
        cache(tmp_path, **changed)
    assert cached_layers(tmp_path) == (0, 2)
    assert cached_layers(tmp_path / "nowhere") == ()


def test_the_size_of_a_cache_is_known_before(tmp_path: Path) -> None:
    """The estimate is what the tensors take, to the byte; files add a header."""
    source, _ = cached(tmp_path)
    source.build()
    tensors = source.of(range(11))
    held = sum(
        tensor.numel() * tensor.element_size()
        for found in tensors
        for tensor in (found.features, found.hidden, found.log_total)
    )
    assert cache_bytes(sum(len(entry.token_ids) for entry in SAMPLES), 2, 32) == held
    assert sum(path.stat().st_size for path in shards(tmp_path)) < held + 3 * 4096
