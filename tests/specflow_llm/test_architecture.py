"""What is read from a model, and what is refused by name before any work."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers
from transformers import LlamaForCausalLM, PreTrainedModel

from specflow_llm import LLM, UnsupportedModelError
from specflow_llm.architecture import StateKind, inspect_model
from tests.specflow_llm.models import CONFIGS, RECURRENT_CONFIGS, VOCAB, tiny_config, tiny_model

SMALL: dict[str, Any] = {"vocab_size": VOCAB, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None}


def built(class_name: str, **fields: Any) -> PreTrainedModel:
    """A tiny model of a class that is not among the supported ones."""
    config = getattr(transformers, f"{class_name}Config")(**{**SMALL, **fields})
    kind = transformers.AutoModelForSeq2SeqLM if config.is_encoder_decoder else transformers.AutoModelForCausalLM
    model: PreTrainedModel = kind.from_config(config).eval()
    return model


def bloom() -> PreTrainedModel:
    """ALiBi from a mask, always."""
    return built("Bloom", hidden_size=32, n_layer=2, n_head=4)


def mpt() -> PreTrainedModel:
    """ALiBi, always."""
    return built("Mpt", d_model=32, n_layers=2, n_heads=4)


def falcon_alibi() -> PreTrainedModel:
    """ALiBi by a flag; the same class without it is supported."""
    return built("Falcon", hidden_size=32, num_hidden_layers=2, num_attention_heads=4, alibi=True)


def t5() -> PreTrainedModel:
    """Encoder and decoder."""
    return built("T5", d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, decoder_start_token_id=0)


def with_config(**fields: Any) -> PreTrainedModel:
    """A Llama whose configuration says something else."""
    model = copy.deepcopy(tiny_model("llama"))
    for name, value in fields.items():
        setattr(model.config, name, value)
    return model


def flash_attention() -> PreTrainedModel:
    """The implementation's name alone decides; the kernel need not be there."""
    return with_config(_attn_implementation_internal="flash_attention_2")


def flex_attention() -> PreTrainedModel:
    """Its masks are no tensors."""
    return with_config(_attn_implementation_internal="flex_attention")


def unknown_layers() -> PreTrainedModel:
    """A layer type from the future, beside a known one."""
    model = with_config()
    model.config.__dict__["layer_types"] = ["full_attention", "time_travel_attention"]
    return model


class WithoutCache(LlamaForCausalLM):  # type: ignore[misc]
    """Its forward takes no cache."""

    def forward(self, input_ids: torch.Tensor, attention_mask: Any = None, position_ids: Any = None) -> Any:
        """Logits."""
        return super().forward(input_ids=input_ids, attention_mask=attention_mask, position_ids=position_ids)


class WithoutPositions(LlamaForCausalLM):  # type: ignore[misc]
    """Its forward takes no positions."""

    def forward(self, input_ids: torch.Tensor, attention_mask: Any = None, past_key_values: Any = None) -> Any:
        """Logits."""
        return super().forward(input_ids=input_ids, attention_mask=attention_mask, past_key_values=past_key_values)


class WithoutIds(LlamaForCausalLM):  # type: ignore[misc]
    """Its forward takes embeddings only."""

    def forward(self, inputs_embeds: torch.Tensor, past_key_values: Any = None) -> Any:
        """Logits."""
        return super().forward(inputs_embeds=inputs_embeds, past_key_values=past_key_values)


def without_cache() -> PreTrainedModel:
    """See :class:`WithoutCache`."""
    return WithoutCache(tiny_config("llama"))


def without_positions() -> PreTrainedModel:
    """See :class:`WithoutPositions`."""
    return WithoutPositions(tiny_config("llama"))


def without_ids() -> PreTrainedModel:
    """See :class:`WithoutIds`."""
    return WithoutIds(tiny_config("llama"))


@pytest.mark.parametrize(
    ("make", "reason", "remedy"),
    [
        (bloom, "ALiBi", "rotary, learned or no position encoding"),
        (mpt, "ALiBi", "rotary, learned or no position encoding"),
        (falcon_alibi, "ALiBi", "rotary, learned or no position encoding"),
        (t5, "encoder-decoder", "decoder-only"),
        (flash_attention, "'flash_attention_2'", "attn_implementation='sdpa' or 'eager'"),
        (flex_attention, "'flex_attention'", "attn_implementation='sdpa' or 'eager'"),
        (unknown_layers, "time_travel_attention", "use another model"),
        (without_cache, "takes no cache", "key-value cache"),
        (without_positions, "takes no position_ids", "use another model"),
        (without_ids, "takes no input_ids", "causal language model"),
    ],
)
def test_models_that_cannot_be_decoded_exactly_are_refused_before_work(make: Any, reason: str, remedy: str) -> None:
    """The refusal names the model, says why and what to do, and the model has not been run."""
    model = make()
    calls: list[int] = []
    model.register_forward_pre_hook(lambda *_: calls.append(0))
    with pytest.raises(UnsupportedModelError) as caught:
        LLM(model, tokenizer=None)
    assert caught.value.model == type(model).__name__
    assert str(caught.value).startswith(f"{type(model).__name__} is not supported: ")
    assert reason in caught.value.reason
    assert remedy in caught.value.remedy
    assert calls == []


def test_a_known_layer_is_not_blamed_for_an_unknown_one() -> None:
    """The message lists the layer types that are in the way, and no others."""
    with pytest.raises(UnsupportedModelError) as caught:
        inspect_model(unknown_layers())
    assert "full_attention" not in str(caught.value)


@pytest.mark.parametrize("name", CONFIGS)
def test_attention_only_models_keep_slots(name: str) -> None:
    """Every attention-only family rolls back by length, over as many layers as it has."""
    found = inspect_model(tiny_model(name))
    assert found.state_kind is StateKind.SLOTS
    assert found.vocab_size == VOCAB
    assert found.context_length == 256
    assert len(found.layer_types) == tiny_model(name).config.num_hidden_layers
    assert found.can_limit_logits


@pytest.mark.parametrize("name", RECURRENT_CONFIGS)
def test_models_with_a_folded_past_are_recurrent(name: str) -> None:
    """One recurrent layer is enough to need snapshots."""
    assert inspect_model(tiny_model(name)).state_kind is StateKind.RECURRENT


@pytest.mark.parametrize(
    ("name", "layer_types", "window", "by_type"),
    [
        ("llama", ("full_attention",) * 2, None, False),
        ("mistral-sliding", ("sliding_attention",) * 2, 12, False),
        ("gemma3-alternating", ("sliding_attention", "full_attention", "sliding_attention"), 12, True),
        ("gpt2", ("full_attention",) * 2, None, False),
    ],
)
def test_layers_and_windows_are_read(
    name: str,
    layer_types: tuple[str, ...],
    window: int | None,
    by_type: bool,  # noqa: FBT001 -- a fact of the case
) -> None:
    """Layer types, window and the form of masks are those the model's own code uses."""
    found = inspect_model(tiny_model(name))
    assert found.layer_types == layer_types
    assert found.sliding_window == window
    assert found.masks_by_type is by_type


@pytest.mark.parametrize(
    ("name", "additive", "switches"),
    [
        ("llama", False, True),  # grouped queries
        ("gpt2", False, False),  # one key-value head per query head: nothing is repeated
        ("gemma2", True, False),  # eager, for its softcap
        ("falcon-rotary", False, False),  # compares the implementation's name itself
    ],
)
def test_attention_is_switched_where_it_pays(name: str, additive: bool, switches: bool) -> None:  # noqa: FBT001
    """Masks are added in eager attention only; SDPA is replaced for grouped queries of families that allow it."""
    found = inspect_model(tiny_model(name))
    assert found.additive_masks is additive
    assert found.switches_attention is switches
