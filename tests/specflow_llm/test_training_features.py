"""What the target thinks of a text: computed on the fly, or kept on disk."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from specflow_llm.dspark import TargetAdapter
from specflow_llm.errors import TrainingError
from specflow_llm.training.features import CACHE_DTYPE, FeatureCache, Features, LiveFeatures, cache_bytes
from tests.specflow_llm.block_drafters import random_ids, sample, target

SAMPLES = [sample(random_ids(5 + 4 * number, number), index=number) for number in range(11)]


@functools.cache
def adapter() -> TargetAdapter:
    """The tiny target."""
    return TargetAdapter(target())


def live() -> LiveFeatures:
    """Features of layers 0 and 2, computed when asked for."""
    return LiveFeatures(adapter(), (0, 2), SAMPLES)


class Counting:
    """Notes what is computed."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    def of(self, numbers: Sequence[int]) -> list[Features]:
        """The features, as a cache needs them."""
        self.asked += numbers
        return LiveFeatures(adapter(), (0, 2), SAMPLES, dtype=CACHE_DTYPE).of(numbers)


def test_features_are_the_layers_outputs_and_the_normed_last_state() -> None:
    """Layer i's output is transformers' ``hidden_states[i + 1]``; the teacher's state comes after the final norm."""
    for number, found in enumerate(live().of(range(11))):
        ids = torch.tensor([SAMPLES[number].token_ids])
        with torch.inference_mode():
            output = adapter().model(input_ids=ids, output_hidden_states=True, use_cache=False)
        states = output.hidden_states
        expected = torch.cat([states[1], states[3]], dim=-1)[0]
        torch.testing.assert_close(found.features, expected, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(found.hidden, states[-1][0], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(found.log_total, output.logits[0].logsumexp(-1), rtol=1e-5, atol=1e-4)


def test_padding_beside_longer_texts_changes_nothing() -> None:
    """A text's features are the same alone and in any batch."""
    together = live().of([10, 0, 4])
    for number, found in zip((10, 0, 4), together, strict=True):
        alone = live().of([number])[0]
        assert found.features.shape == (len(SAMPLES[number].token_ids), 64)
        torch.testing.assert_close(found.features, alone.features, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(found.hidden, alone.hidden, rtol=1e-4, atol=1e-4)


def cache(folder: Path, source: Counting | None = None, **identity: object) -> FeatureCache:
    """A cache in shards of four."""
    return FeatureCache(folder, source or Counting(), {"target": "tiny", **identity}, len(SAMPLES), shard_size=4)


def test_a_cache_gives_what_was_computed(tmp_path: Path) -> None:
    """In bfloat16, in any order; every text is computed once, shard by shard, also by a later process."""
    source = Counting()
    kept = cache(tmp_path, source)
    steps: list[tuple[int, int]] = []
    kept.build(lambda done, wanted: steps.append((done, wanted)))
    assert source.asked == list(range(11))
    assert steps == [(1, 3), (2, 3), (3, 3)]
    later = Counting()
    for number, found in zip((9, 0, 10, 3), cache(tmp_path, later).of([9, 0, 10, 3]), strict=True):
        expected = live().of([number])[0]
        torch.testing.assert_close(found.features.float(), expected.features, rtol=1e-2, atol=1e-2)
        torch.testing.assert_close(found.hidden.float(), expected.hidden, rtol=1e-2, atol=1e-2)
    assert later.asked == []


def test_the_teacher_of_a_cache_is_a_law(tmp_path: Path) -> None:
    """Probabilities computed from rounded hidden states add up to one: the total belongs to what is stored."""
    for found in cache(tmp_path).of(range(11)):
        with torch.inference_mode():
            laws = adapter().logits(found.hidden.float()) - found.log_total.unsqueeze(-1)
        torch.testing.assert_close(laws.exp().sum(-1), torch.ones(len(laws)), rtol=0.0, atol=1e-4)


def test_a_cache_that_was_killed_loses_one_shard(tmp_path: Path) -> None:
    """Shards that are there are kept, one that was being written is made again, and leftovers are not read."""
    cache(tmp_path).build()
    (tmp_path / "000001.safetensors").unlink()
    (tmp_path / "000001.999.tmp").write_bytes(b"half")
    source = Counting()
    kept = cache(tmp_path, source)
    assert len(kept.of([0, 5])) == 2
    assert source.asked == [4, 5, 6, 7]
    kept.build()
    assert source.asked == [4, 5, 6, 7]


def test_a_cache_of_something_else_is_refused(tmp_path: Path) -> None:
    """The error names what differs."""
    cache(tmp_path, layers=[0, 2])
    with pytest.raises(TrainingError, match="other layers"):
        cache(tmp_path, layers=[1, 2])


def test_the_size_of_a_cache_is_known_before(tmp_path: Path) -> None:
    """The estimate is what the tensors take, to the byte; files add a header."""
    kept = cache(tmp_path)
    kept.build()
    tensors = kept.of(range(11))
    held = sum(
        tensor.numel() * tensor.element_size()
        for found in tensors
        for tensor in (found.features, found.hidden, found.log_total)
    )
    assert cache_bytes(SAMPLES, 2, 32) == held
    assert sum(path.stat().st_size for path in tmp_path.glob("*.safetensors")) < held + 3 * 4096
