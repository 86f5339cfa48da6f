"""The self-check: models that are wrong in ways no list of names foresees are refused before any work."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM, PreTrainedModel

from specflow_llm import LLM, SamplingParams, Speculation, UnsupportedModelError
from specflow_llm.architecture import inspect_model
from specflow_llm.selfcheck import build_target, largest_difference
from specflow_llm.target import SlotTarget
from tests.specflow_llm.models import CONFIGS, RECURRENT_CONFIGS, tiny_config, tiny_model

CACHE = inspect_model(tiny_model("llama")).cache_argument
"""What the installed transformers calls it."""

Mask = torch.Tensor
"""[B, 1, T, L], True where a query may look."""


class IgnoresPositions(LlamaForCausalLM):  # type: ignore[misc]
    """Takes positions and works out its own."""

    def forward(self, input_ids: Any, position_ids: Any = None, cache: Any = None, **kwargs: Any) -> Any:
        """Drop the positions."""
        return super().forward(input_ids=input_ids, position_ids=None, **{CACHE: cache}, **kwargs)


class OffByOne(LlamaForCausalLM):  # type: ignore[misc]
    """Shifts the positions of every block but the first token's."""

    def forward(self, input_ids: Any, position_ids: Any = None, cache: Any = None, **kwargs: Any) -> Any:
        """Every query of a block stands one further than it should, except the first."""
        if position_ids is not None:
            position_ids = position_ids + (torch.arange(position_ids.shape[1]) > 0)
        return super().forward(input_ids=input_ids, position_ids=position_ids, **{CACHE: cache}, **kwargs)


class EditsMask(LlamaForCausalLM):  # type: ignore[misc]
    """Changes the mask of a block on its way to attention."""

    edit: Callable[[Mask], Mask]

    def forward(
        self,
        input_ids: Any,
        attention_mask: Any = None,
        position_ids: Any = None,
        cache: Any = None,
        **kwargs: Any,
    ) -> Any:
        """Pass on another mask."""
        if isinstance(attention_mask, torch.Tensor) and attention_mask.dim() == 4:
            attention_mask = type(self).edit(attention_mask)
        return super().forward(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            **{CACHE: cache},
            **kwargs,
        )


def sees_everything(mask: Mask) -> Mask:
    """Rejected tokens and other requests' leftovers become visible."""
    return torch.ones_like(mask)


def first_row_for_all(mask: Mask) -> Mask:
    """Every request is masked like the first one."""
    return mask[:1].expand_as(mask)


def one_ahead(mask: Mask) -> Mask:
    """Every query sees one position after its own."""
    return mask | torch.nn.functional.pad(mask, (1, 0))[..., :-1]


def forgets_the_oldest(mask: Mask) -> Mask:
    """Position 0 is never seen, except by itself."""
    edited = mask.clone()
    edited[..., 0] &= ~mask[..., 1] if mask.shape[-1] > 1 else True
    return edited


def last_query_for_all(mask: Mask) -> Mask:
    """All queries of a block see what its last one sees."""
    return mask[:, :, -1:].expand_as(mask)


class NotANumber(LlamaForCausalLM):  # type: ignore[misc]
    """Correct without a cache, and without numbers with one."""

    def forward(self, input_ids: Any, position_ids: Any = None, cache: Any = None, **kwargs: Any) -> Any:
        """Spoil one logit."""
        output = super().forward(input_ids=input_ids, position_ids=position_ids, **{CACHE: cache}, **kwargs)
        if cache is not None:
            output.logits[..., 3] = torch.nan
        return output


class OwnCache(LlamaForCausalLM):  # type: ignore[misc]
    """Works with a cache of its own only."""

    def forward(self, input_ids: Any, position_ids: Any = None, cache: Any = None, **kwargs: Any) -> Any:
        """Refuse any other."""
        if cache is not None:
            raise ValueError("OwnCache wants a cache of its own")
        return super().forward(input_ids=input_ids, position_ids=position_ids, **kwargs)


def llama_weights(kind: type[LlamaForCausalLM], dtype: torch.dtype = torch.float32) -> LlamaForCausalLM:
    """The tiny Llama's weights in a class of another behaviour."""
    model = kind(tiny_config("llama"))
    model.load_state_dict(tiny_model("llama").state_dict())
    return model.to(dtype).eval()


def refused(model: PreTrainedModel) -> UnsupportedModelError:
    """The error that building an LLM raises."""
    with pytest.raises(UnsupportedModelError) as caught:
        LLM(model, tokenizer=None)
    return caught.value


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", [IgnoresPositions, OffByOne, NotANumber])
def test_models_that_misread_positions_or_lose_numbers_are_refused(
    kind: type[LlamaForCausalLM], dtype: torch.dtype
) -> None:
    """The refusal says by how much the logits differ and what to do, in float32 and in bfloat16."""
    error = refused(llama_weights(kind, dtype))
    assert error.model == kind.__name__
    assert "differ from its plain logits" in error.reason
    assert "standard deviations" in error.reason
    assert "report the model type" in error.remedy


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "edit", [sees_everything, first_row_for_all, one_ahead, forgets_the_oldest, last_query_for_all]
)
def test_models_that_misread_masks_are_refused(edit: Callable[[Mask], Mask], dtype: torch.dtype) -> None:
    """Each of five ways to get a mask subtly wrong is noticed, in float32 and in bfloat16."""
    kind = type("Edited", (EditsMask,), {"edit": staticmethod(edit)})
    assert "differ from its plain logits" in refused(llama_weights(kind, dtype)).reason


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", [*CONFIGS, *RECURRENT_CONFIGS])
def test_right_models_pass(name: str, dtype: torch.dtype) -> None:
    """Every supported architecture passes, in float32 with a margin of ten."""
    model = tiny_model(name) if dtype is torch.float32 else copy.deepcopy(tiny_model(name)).to(dtype)
    architecture = inspect_model(model)
    target = build_target(model, architecture, prefill_chunk=4)
    assert target.num_forwards == 0  # the check ran on a target of its own
    if dtype is torch.float32 and name in CONFIGS:
        worst = largest_difference(
            model, architecture, lambda chunk: SlotTarget(model, architecture, prefill_chunk=chunk)
        )
        assert worst < 1e-4


def test_models_that_fail_on_a_foreign_cache_are_refused() -> None:
    """An exception inside the model becomes a refusal that quotes it."""
    error = refused(llama_weights(OwnCache))
    assert "ValueError: OwnCache wants a cache of its own" in error.reason
    assert isinstance(error.__cause__, ValueError)


def test_an_edit_that_changes_nothing_passes() -> None:
    """The wrapper used above is not itself what is refused."""
    kind = type("Unedited", (EditsMask,), {"edit": staticmethod(lambda mask: mask)})
    LLM(llama_weights(kind), tokenizer=None)


def test_the_check_can_be_skipped_to_investigate() -> None:
    """``check_model=False`` loads a model that would be refused, and its output is as wrong as the check says."""
    model = llama_weights(IgnoresPositions)
    speculation = Speculation(drafter="ngram", policy="fixed", max_draft_tokens=3)
    llm = LLM(model, tokenizer=None, speculation=speculation, check_model=False)
    prompts = [[1, 2, 3], [4, 5, 6, 7, 8, 9, 10]]
    wrong = llm.generate(prompts, SamplingParams(max_tokens=20))
    right = LLM(tiny_model("llama"), tokenizer=None).generate(prompts, SamplingParams(max_tokens=20))
    assert [output.token_ids for output in wrong] != [output.token_ids for output in right]


@pytest.mark.parametrize("context", [7, 8, 10, 11, 12, 16])
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_short_contexts_can_be_checked(name: str, context: int) -> None:
    """The check fits into a context of 7 tokens, whatever the family calls it."""
    model = tiny_model(name, **{"n_positions" if name == "gpt2" else "max_position_embeddings": context})
    build_target(model, inspect_model(model), prefill_chunk=4)


def test_constant_logits_are_equal_logits() -> None:
    """A model that has learnt nothing yet is no reason to refuse it."""
    model = copy.deepcopy(tiny_model("llama"))
    with torch.no_grad():
        model.lm_head.weight.zero_()
    build_target(model, inspect_model(model), prefill_chunk=4)
