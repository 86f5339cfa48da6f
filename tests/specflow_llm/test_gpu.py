"""Decoding on a CUDA device: the same proofs as on a CPU, on a few architectures. Run with ``pytest -m gpu``."""

from __future__ import annotations

import copy

import pytest

from specflow_llm import LLM, SamplingParams, Speculation
from tests.specflow_llm.models import generate, near_copy, tiny_model

PROMPTS = [[1, 2, 3], [10], [5, 6, 7, 8, 9, 10, 11, 5, 6, 7]]

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("drafter", ["ngram", "model"])
@pytest.mark.parametrize("name", ["llama", "mistral-sliding", "gemma3-alternating", "gpt2", "mixtral-moe", "mamba2"])
def test_greedy_tokens_on_a_gpu_are_those_of_generate(name: str, drafter: str) -> None:
    """A ragged batch in float32 gives the tokens that ``generate`` gives on the same device."""
    model = copy.deepcopy(tiny_model(name)).to("cuda")
    drafts = near_copy(tiny_model("llama"), noise=0.05).to("cuda") if drafter == "model" else drafter
    llm = LLM(model, tokenizer=None, speculation=Speculation(drafter=drafts, policy="fixed", max_draft_tokens=4))
    outs = llm.generate(PROMPTS, SamplingParams(max_tokens=24))
    expected = [generate(model, prompt, 24) for prompt in PROMPTS]
    assert [list(out.token_ids) for out in outs] == expected


def test_a_seed_gives_the_same_tokens_on_a_gpu_with_or_without_speculation() -> None:
    """Keyed noise is computed where the logits are, and does not depend on the drafts."""
    model = copy.deepcopy(tiny_model()).to("cuda")
    params = SamplingParams(max_tokens=24, temperature=1.0, seed=5)
    drafted = LLM(model, tokenizer=None, speculation=Speculation(policy="fixed", max_draft_tokens=4))
    plain = LLM(model, tokenizer=None, speculation=None)
    told = [out.token_ids for out in drafted.generate(PROMPTS, params)]
    assert told == [out.token_ids for out in plain.generate(PROMPTS, params)]
