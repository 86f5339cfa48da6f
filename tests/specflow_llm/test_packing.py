"""Packed linear layers: the same function, other storage."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from specflow_llm import LLM, SamplingParams, Speculation
from specflow_llm.packing import PackedLinear, can_pack, pack_linears, supports_bfloat16, weight_bytes
from tests.specflow_llm.models import generate, tiny_model

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this PyTorch has no oneDNN")

needs_bfloat16 = pytest.mark.skipif(
    not supports_bfloat16(torch.device("cpu")), reason="this CPU has no bfloat16 instructions"
)

WIDE: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 160}
"""Wide enough for layers that are worth packing."""


def packable(name: str, **fields: Any) -> Any:
    """A model of one's own to pack."""
    return copy.deepcopy(tiny_model(name, **{**WIDE, **fields}))


@torch.inference_mode()
def relative_error(linear: nn.Linear, inputs: torch.Tensor) -> float:
    """Largest difference of a packed layer from the plain one, in units of the largest output."""
    expected = F.linear(inputs, linear.weight, linear.bias)
    found = PackedLinear(linear)(inputs)
    assert found.shape == expected.shape
    assert found.dtype == expected.dtype
    return float((found - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(), (1,), (2,), (8,), (40,), (2, 3), (1, 1, 5)], ids=str)
def test_packed_layers_compute_the_same_function(shape: tuple[int, ...], bias: bool) -> None:  # noqa: FBT001
    """For any number of rows and leading dimensions outputs equal those of ``F.linear`` to 1e-4."""
    generator = torch.Generator().manual_seed(len(shape))
    linear = nn.Linear(96, 72, bias=bias)
    with torch.no_grad():
        for parameter in linear.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    assert relative_error(linear, torch.randn(*shape, 96, generator=generator)) < 1e-4


def test_packed_layers_take_views() -> None:
    """Transposed, strided and expanded inputs are read as they are meant."""
    generator = torch.Generator().manual_seed(0)
    linear = nn.Linear(64, 80)
    for inputs in (
        torch.randn(64, 5, generator=generator).t(),
        torch.randn(5, 128, generator=generator)[:, ::2],
        torch.randn(1, 64, generator=generator).expand(6, 64),
    ):
        assert not inputs.is_contiguous()
        assert relative_error(linear, inputs) < 1e-4


def test_no_rows_give_no_rows() -> None:
    """An empty batch is a batch."""
    assert PackedLinear(nn.Linear(64, 80))(torch.empty(2, 0, 64)).shape == (2, 0, 80)


def test_a_wrong_weight_would_be_noticed() -> None:
    """The tolerance tells a weight from one that differs in a single entry."""
    linear, other = nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False)
    with torch.no_grad():
        other.weight.copy_(linear.weight)
        other.weight[3, 5] += 0.01
    inputs = torch.ones(4, 64)
    with torch.inference_mode():
        expected = linear(inputs)
        assert float((PackedLinear(other)(inputs) - expected).abs().max() / expected.abs().max()) > 1e-4


@pytest.mark.parametrize("name", ["llama", "mixtral-moe", "phi", "cohere", "mamba2"])
def test_packed_models_give_the_same_logits(name: str) -> None:
    """Every layer that is worth it is replaced, and logits stay what they were up to rounding."""
    model = packable(name, **({"num_heads": 32} if name == "mamba2" else {}))
    plain = copy.deepcopy(model)
    count = pack_linears(model)
    assert count == sum(isinstance(module, PackedLinear) for module in model.modules()) > 0
    assert not any(type(module) is nn.Linear and module.weight.numel() >= 4096 for module in model.modules())
    ids = torch.tensor([[1, 2, 3, 4, 5, 6, 7, 8, 9]])
    with torch.inference_mode():
        expected = plain(input_ids=ids, use_cache=False).logits
        assert (model(input_ids=ids, use_cache=False).logits - expected).abs().max() < 1e-4 * expected.abs().max()


@pytest.mark.parametrize("name", ["llama", "gemma3-alternating", "mamba2"])
def test_packed_models_decode_the_same_tokens(name: str) -> None:
    """A packed model decodes, with speculation, to what ``generate`` makes of the plain one."""
    model = packable(name, **({"num_heads": 32} if name == "mamba2" else {}))
    prompts = [[1, 2, 3, 1, 2, 3, 1], [9]]
    expected = [generate(model, prompt, 14) for prompt in prompts]
    speculation = Speculation(drafter="ngram", policy="fixed", max_draft_tokens=4)
    llm = LLM(model, tokenizer=None, pack=True, speculation=speculation)
    assert llm.packed_layers > 0
    outputs = llm.generate(prompts, SamplingParams(max_tokens=14))
    assert [list(output.token_ids) for output in outputs] == expected


def test_a_tied_head_leaves_the_embedding_usable() -> None:
    """Packing a head that shares its weight with the embedding leaves the embedding and the logits as they were."""
    model = packable("llama", tie_word_embeddings=True)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    ids = torch.tensor([[1, 2, 3]])
    with torch.inference_mode():
        rows, logits = model.model.embed_tokens(ids), model(input_ids=ids, use_cache=False).logits
        pack_linears(model)
        assert isinstance(model.lm_head, PackedLinear)
        assert torch.equal(model.model.embed_tokens(ids), rows)
        assert torch.allclose(model(input_ids=ids, use_cache=False).logits, logits, rtol=1e-4, atol=1e-4)


def test_what_cannot_be_packed() -> None:
    """Not float64, nor bfloat16 where it is emulated, not a model without weights, not one on another device."""
    model = packable("llama")
    assert can_pack(model)
    assert not can_pack(copy.deepcopy(model).to(torch.float64))
    assert not can_pack(copy.deepcopy(model).to("meta"))
    assert not can_pack(nn.Identity())


@pytest.mark.parametrize(
    "is_supported",
    [
        False,
        pytest.param(True, marks=needs_bfloat16),
    ],
)
def test_bfloat16_is_packed_where_the_cpu_multiplies_it(monkeypatch: pytest.MonkeyPatch, is_supported: bool) -> None:  # noqa: FBT001
    """Elsewhere products of bfloat16 matrices are emulated, and a layout does not help."""
    monkeypatch.setattr("specflow_llm.packing.supports_bfloat16", lambda _device: is_supported)
    model = packable("llama").to(torch.bfloat16)
    assert can_pack(model) == is_supported
    assert (pack_linears(model) > 0) == is_supported
    mixed = nn.Sequential(nn.Linear(128, 128), nn.Linear(128, 128, dtype=torch.bfloat16))
    assert pack_linears(mixed) == 1 + is_supported


@needs_bfloat16
def test_bfloat16_layers_compute_the_same_function() -> None:
    """Outputs equal those of ``F.linear`` up to a rounding of the result, weights come back whole, two bytes each."""
    generator = torch.Generator().manual_seed(0)
    linear = nn.Linear(96, 72, dtype=torch.bfloat16)
    with torch.no_grad():
        linear.weight.copy_(torch.randn(linear.weight.shape, generator=generator))
    for rows in (1, 8, 40):
        assert relative_error(linear, torch.randn(rows, 96, generator=generator).bfloat16()) < 2**-7
    packed = PackedLinear(linear)
    assert torch.equal(packed.weight.to_dense(), linear.weight)
    model = packable("llama").to(torch.bfloat16)
    before = weight_bytes(model)
    pack_linears(model)
    assert weight_bytes(model) == before == 2 * sum(parameter.numel() for parameter in packable("llama").parameters())


class Quantised(nn.Linear):
    """Computes something of its own from the weight."""


def test_subclasses_and_small_layers_are_left_alone() -> None:
    """A subclass may mean its weight differently, and a small layer gains nothing."""
    model = nn.Sequential(Quantised(128, 128), nn.Linear(8, 8), nn.Linear(128, 128))
    assert pack_linears(model) == 1
    assert [type(module) for module in model] == [Quantised, nn.Linear, PackedLinear]


def test_a_model_that_is_handed_in_is_not_changed() -> None:
    """By default neither a target nor a draft model that the caller built is packed; asked for, it is."""
    model, draft = packable("llama"), packable("llama", seed=9)
    before = [type(module) for module in (*model.modules(), *draft.modules())]
    llm = LLM(model, tokenizer=None, speculation=Speculation(drafter=draft, max_draft_tokens=2))
    llm.generate([[1, 2, 3]], SamplingParams(max_tokens=4))
    assert llm.packed_layers == 0
    assert [type(module) for module in (*model.modules(), *draft.modules())] == before
    assert LLM(model, tokenizer=None, pack=True).packed_layers > 0
    assert any(isinstance(module, PackedLinear) for module in model.modules())


@pytest.mark.parametrize("tied", [False, True])
def test_packing_is_counted(tied: bool) -> None:  # noqa: FBT001
    """A packed weight takes as many bytes as the plain one; a tied head counts twice, because it then exists twice."""
    model = packable("llama", tie_word_embeddings=tied)
    before = weight_bytes(model)
    assert before == sum(parameter.numel() * 4 for parameter in model.parameters())
    pack_linears(model)
    assert weight_bytes(model) == before + (64 * 128 * 4 if tied else 0)


def test_a_packed_layer_says_what_it_is() -> None:
    """Models that ask a layer's weight for its dtype or device get an answer, and printing shows sizes."""
    packed = PackedLinear(nn.Linear(64, 80))
    assert packed.weight.dtype == torch.float32
    assert packed.weight.device.type == "cpu"
    assert repr(packed) == "PackedLinear(in_features=64, out_features=80, bias=True)"
