"""What is left when something around the decoder fails: no token is lost, and no request pays for another."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from transformers import Phi3Config

from specflow.errors import InvalidSettingError
from specflow.types import RoundReport
from specflow_llm import LLM, SamplingParams, Speculation, UnsupportedModelError
from specflow_llm.architecture import inspect_model
from specflow_llm.engine import Update
from specflow_llm.target import SlotTarget
from tests.specflow_llm.models import generate, tiny_model

PROMPTS = [[1, 2, 3], [10, 11, 12, 13, 10, 11]]


class FailingObserver:
    """Raises in chosen rounds, after they were committed."""

    def __init__(self, *rounds: int) -> None:
        self._rounds = rounds

    def on_round(self, report: RoundReport) -> None:
        """See :class:`specflow.protocols.Observer`."""
        if report.index in self._rounds:
            raise RuntimeError(f"observer in round {report.index}")


class Counting:
    """A logits processor that keeps state."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Count and change nothing."""
        self.calls += 1
        return scores


DRAFTING = Speculation(policy="fixed", max_draft_tokens=3)


def open_llm(speculation: Speculation | None = DRAFTING, **settings: Any) -> LLM:
    """A tiny model, with an n-gram drafter unless told otherwise."""
    return LLM(tiny_model(), tokenizer=None, speculation=speculation, **settings)


@pytest.mark.parametrize("rounds", [(0,), (3, 4), (11,)], ids=["first", "middle", "last"])
def test_an_error_after_commit_loses_no_token_and_no_stop(rounds: tuple[int, ...]) -> None:
    """Updates of a round whose observer raised arrive with the next step, stops included."""
    llm = open_llm(None, observers=[FailingObserver(*rounds)])  # plain, so that there are exactly 12 rounds
    params = [SamplingParams(max_tokens=12), SamplingParams(max_tokens=5)]
    ids = [llm.engine.submit(prompt, setting) for prompt, setting in zip(PROMPTS, params, strict=True)]
    updates: list[Update] = []
    errors = 0
    while llm.engine.num_unfinished:
        try:
            updates += llm.engine.step()
        except RuntimeError:
            errors += 1
    assert errors == len(rounds)
    for request, prompt, setting in zip(ids, PROMPTS, params, strict=True):
        expected = generate(tiny_model(), prompt, setting.max_tokens)
        told = [token for update in updates if update.request_id == request for token in update.token_ids]
        done = [update.completion for update in updates if update.request_id == request and update.completion]
        assert told == expected
        assert [list(completion.token_ids) for completion in done] == [expected]


def test_a_prompt_that_cannot_be_run_does_not_block_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prefill that raises ends its own request with that error; the request behind it is decoded."""
    llm = open_llm()
    target = llm.engine.backend.target
    assert isinstance(target, SlotTarget)
    real = target.open
    monkeypatch.setattr(target, "open", lambda prompts: fail() if prompts[0] == PROMPTS[0] else real(prompts))
    with pytest.raises(MemoryError, match="no room"):
        llm.generate(PROMPTS[0], SamplingParams(max_tokens=4))
    first = llm.engine.submit(PROMPTS[0], SamplingParams(max_tokens=4))
    second = llm.engine.submit(PROMPTS[1], SamplingParams(max_tokens=4))
    updates: list[Update] = []
    while llm.engine.num_unfinished:
        updates += llm.engine.step()
    assert [type(update.error) for update in updates if update.request_id == first] == [MemoryError]
    tokens = [token for update in updates if update.request_id == second for token in update.token_ids]
    assert tokens == generate(tiny_model(), PROMPTS[1], 4)


def fail() -> list[torch.Tensor | None]:
    """Stand for a device without room."""
    raise MemoryError("no room")


def test_a_stateful_processor_serves_one_request_at_a_time() -> None:
    """Sharing an object that may keep state is refused before work starts; functions and later requests are welcome."""
    llm = open_llm()
    shared = SamplingParams(max_tokens=4, logits_processors=[Counting()])
    with pytest.raises(InvalidSettingError, match="object of its own"):
        llm.generate(PROMPTS, shared)
    assert llm.engine.num_unfinished == 0
    llm.generate(PROMPTS[0], shared)
    llm.generate(PROMPTS[0], shared)
    llm.generate(PROMPTS, SamplingParams(max_tokens=4, logits_processors=[lambda _ids, scores: scores]))


def test_what_an_overflowed_request_left_behind_reaches_no_other() -> None:
    """A reused row is cleared: keys that are not finite would turn into NaN behind any mask."""
    llm = open_llm()
    plain = [list(out.token_ids) for out in llm.generate([PROMPTS[1], [*PROMPTS[0] * 9]], SamplingParams(max_tokens=6))]
    target = llm.engine.backend.target
    assert isinstance(target, SlotTarget)
    for layer in target.cache.layers:
        layer.keys.fill_(float("inf"))
        layer.values.fill_(float("nan"))
    again = llm.generate([PROMPTS[1], [*PROMPTS[0] * 9]], SamplingParams(max_tokens=6))
    assert [list(out.token_ids) for out in again] == plain


def test_longrope_models_stay_within_their_original_context() -> None:
    """Beyond it a row's rotary angles would depend on its neighbours, so the context ends there."""
    factors = [1.0] * 4
    config = Phi3Config(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4, pad_token_id=0,
        max_position_embeddings=128, original_max_position_embeddings=32,
        rope_parameters={
            "rope_type": "longrope", "rope_theta": 10000.0, "short_factor": factors, "long_factor": factors,
            "original_max_position_embeddings": 32,
        },
    )  # fmt: skip
    model = tiny_model("phi3").__class__(config).eval()
    assert inspect_model(model).context_length == 32


def test_replays_of_recurrent_models_count_as_forwards() -> None:
    """A target forward is a model call, also where one round takes several."""
    llm = LLM(tiny_model("mamba2"), tokenizer=None, speculation=None)
    done = llm.generate([1, 2, 3], SamplingParams(max_tokens=5))[0]
    assert done.metrics.rounds == 5
    assert done.metrics.target_forwards == llm.engine.backend.target.num_forwards


def test_models_that_align_their_own_mask_to_the_batch_are_refused() -> None:
    """GPT-Neo slices a causal mask of its own by the batch's longest row, so it is refused by name."""
    config = transformers.GPTNeoConfig(
        vocab_size=64, hidden_size=32, num_layers=2, num_heads=4, attention_types=[[["global"], 2]], window_size=16,
        max_position_embeddings=64, initializer_range=0.3, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with pytest.raises(UnsupportedModelError, match="GPTNeo"):
        LLM(model, tokenizer=None)
