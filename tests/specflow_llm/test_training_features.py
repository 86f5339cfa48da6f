"""What the target thinks of a text."""

from __future__ import annotations

import functools

import torch

from specflow_llm.dspark import TargetAdapter
from specflow_llm.training.features import LiveFeatures
from tests.specflow_llm.block_drafters import random_ids, sample, target

SAMPLES = [sample(random_ids(5 + 4 * number, number), index=number) for number in range(11)]


@functools.cache
def adapter() -> TargetAdapter:
    """The tiny target."""
    return TargetAdapter(target())


def live() -> LiveFeatures:
    """Features of layers 0 and 2, computed when asked for."""
    return LiveFeatures(adapter(), (0, 2), SAMPLES)


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
