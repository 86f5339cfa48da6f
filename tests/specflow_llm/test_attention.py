"""Grouped attention with an explicit mask, and how it is switched on and off."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch
from torch import nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from specflow_llm.architecture import inspect_model
from specflow_llm.attention import block_attention, grouped_sdpa
from specflow_llm.target import SlotTarget
from tests.specflow_llm.models import tiny_model

BATCH, QUERIES, KEYS, HEADS, SIZE = 3, 5, 17, 4, 8


class Layer(nn.Module):
    """What transformers' attention function reads from a layer."""

    is_causal = True

    def __init__(self, groups: int) -> None:
        super().__init__()
        self.num_key_value_groups = groups


def random_block(kv_heads: int, value_size: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Queries, keys, values and a ragged causal mask."""
    generator = torch.Generator().manual_seed(kv_heads)
    query = torch.randn(BATCH, HEADS, QUERIES, SIZE, generator=generator).to(dtype)
    key = torch.randn(BATCH, kv_heads, KEYS, SIZE, generator=generator).to(dtype)
    value = torch.randn(BATCH, kv_heads, KEYS, value_size, generator=generator).to(dtype)
    starts = torch.tensor([0, 7, 12])
    positions = starts[:, None] + torch.arange(QUERIES)
    mask = (torch.arange(KEYS) <= positions[:, :, None])[:, None]
    return query, key, value, mask


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("value_size", [SIZE, 12])
@pytest.mark.parametrize("scaling", [None, 0.7])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_grouped_attention_equals_that_of_transformers(
    kv_heads: int, scaling: float | None, value_size: int, dtype: torch.dtype
) -> None:
    """For one, some or all heads sharing keys, any scaling and value size, outputs equal those with repeated keys."""
    query, key, value, mask = random_block(kv_heads, value_size, dtype)
    layer = Layer(HEADS // kv_heads)
    expected = sdpa_attention_forward(layer, query, key, value, mask, scaling=scaling)[0]
    found = grouped_sdpa(layer, query, key, value, mask, scaling=scaling)[0]
    assert found.shape == expected.shape == (BATCH, QUERIES, HEADS, value_size)
    assert torch.allclose(found, expected, atol=1e-6 if dtype is torch.float32 else 2e-2)


def test_the_mask_matters() -> None:
    """The comparison above notices a mask that is shifted by one position."""
    query, key, value, mask = random_block(2, SIZE, torch.float32)
    expected = grouped_sdpa(Layer(2), query, key, value, mask)[0]
    shifted = mask | nn.functional.pad(mask, (1, 0))[..., :-1]
    assert not torch.allclose(grouped_sdpa(Layer(2), query, key, value, shifted)[0], expected, atol=1e-3)


def test_without_a_mask_transformers_decides() -> None:
    """No mask means plain causal attention, as in transformers."""
    query, key, value, _ = random_block(2, SIZE, torch.float32)
    own, last = key[:, :, :QUERIES], value[:, :, :QUERIES]
    expected = sdpa_attention_forward(Layer(2), query, own, last, None)[0]
    assert torch.equal(grouped_sdpa(Layer(2), query, own, last, None)[0], expected)


@pytest.mark.parametrize("name", ["llama", "mistral-sliding", "qwen3", "gemma3-alternating", "mixtral-moe"])
def test_switching_changes_no_logits(name: str) -> None:
    """A target gives the same logits with and without grouped attention, over ragged blocks."""
    model = tiny_model(name)
    architecture = inspect_model(model)
    assert architecture.switches_attention
    outputs = []
    for switched in (True, False):
        target = SlotTarget(model, dataclasses.replace(architecture, switches_attention=switched))
        target.open([[1, 2, 3], list(range(20))])
        outputs.append(target.forward([[3, 4, 5, 6], [19, 21]]).logits)
    assert torch.allclose(outputs[0][0], outputs[1][0], atol=1e-4)
    assert torch.allclose(outputs[0][1, :2], outputs[1][1, :2], atol=1e-4)


def test_grouped_attention_is_switched_on_for_the_block_only() -> None:
    """Inside the block the model's configuration names this library's attention, after it what was there before."""
    model = tiny_model("llama")
    with block_attention(model, inspect_model(model)):
        assert model.config._attn_implementation == "specflow_sdpa"
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2"])
def test_the_configuration_is_left_as_found(name: str) -> None:
    """After prefill and blocks the model's configuration is what it was, attention implementation included."""
    model = copy.deepcopy(tiny_model(name))
    before = copy.deepcopy(model.config)
    target = SlotTarget(model, inspect_model(model))
    target.open([[1, 2, 3]])
    target.forward([[3, 4]])
    assert model.config._attn_implementation == before._attn_implementation
    assert vars(model.config).keys() == vars(before).keys()
    assert model.config.to_dict() == before.to_dict()


@pytest.mark.parametrize("failing_layer", [0, 1])
def test_the_configuration_is_left_as_found_when_a_forward_raises(failing_layer: int) -> None:
    """An error inside the model does not leave this library's attention behind, and the next block is right."""
    model = copy.deepcopy(tiny_model("llama"))
    target = SlotTarget(model, inspect_model(model))
    target.open([[1, 2, 3]])
    expected = SlotTarget(tiny_model("llama"), inspect_model(model))
    expected.open([[1, 2, 3]])

    def fail(*_: object) -> None:
        raise InterruptedError

    handle = model.model.layers[failing_layer].register_forward_hook(fail)
    with pytest.raises(InterruptedError):
        target.forward([[3, 4, 5]])
    handle.remove()
    assert model.config._attn_implementation == "sdpa"
    assert torch.equal(target.forward([[3, 6, 7]]).logits, expected.forward([[3, 6, 7]]).logits)


def test_nested_blocks_restore_in_order() -> None:
    """A draft model that is the target itself may run inside the target's block."""
    model = tiny_model("llama")
    architecture = inspect_model(model)
    names = []
    with block_attention(model, architecture):
        with block_attention(model, architecture):
            names.append(model.config._attn_implementation)
        names.append(model.config._attn_implementation)
    names.append(model.config._attn_implementation)
    assert names == ["specflow_sdpa", "specflow_sdpa", "sdpa"]
