"""Greedy decoding equals ``transformers`` ``generate``, token for token, in float32.

Whatever drafts, however long the drafts, in ragged batches whose requests end at different times. References are
checked for diversity, drafters for the acceptance they are meant to have: an equality of constants, or of runs in which
nothing was ever rejected, would prove little.
"""

from __future__ import annotations

import copy
import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache

from specflow.policies import Adaptive, Fixed
from specflow.protocols import Policy
from specflow_llm import ContextLengthError, Drafter, SamplingParams
from specflow_llm.architecture import inspect_model
from specflow_llm.drafters import ModelDrafter, NGramDrafter
from specflow_llm.selfcheck import build_target
from specflow_llm.target import SlotTarget
from tests.specflow_llm.decoding import decode, make_engine
from tests.specflow_llm.drafters import AdversaryDrafter, NearDrafter, OracleDrafter, RandomDrafter, ScriptedDrafter
from tests.specflow_llm.models import (
    CONFIGS,
    MORE_CONFIGS,
    RECURRENT_CONFIGS,
    VOCAB,
    generate,
    near_copy,
    tiny_model,
)

ARCHITECTURES = (*CONFIGS, *RECURRENT_CONFIGS)
DRAFTERS = ("perfect", "near", "random", "wrong", "ngram")
DRAFT_LENGTHS = range(1, 17)
SAMPLE = ("llama", "mistral-sliding", "gemma3-alternating", "gpt2", *RECURRENT_CONFIGS)
"""Full, sliding and alternating attention, absolute positions, and both recurrent kinds."""


def random_prompts(lengths: Sequence[int], seed: int) -> list[list[int]]:
    """Random token ids."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(VOCAB, (length,), generator=generator).tolist() for length in lengths]


@dataclass(frozen=True)
class Batch:
    """Prompts, and what ``generate`` makes of each of them alone."""

    prompts: list[list[int]]
    budgets: list[int]
    outputs: list[list[int]]

    @property
    def truths(self) -> list[list[int]]:
        """Prompt and output of every request."""
        return [prompt + output for prompt, output in zip(self.prompts, self.outputs, strict=True)]


def make_batch(model: PreTrainedModel, prompts: list[list[int]], budgets: Sequence[int]) -> Batch:
    """Ask ``generate`` for the truth."""
    outputs = [generate(model, prompt, budget) for prompt, budget in zip(prompts, budgets, strict=True)]
    return Batch(prompts, list(budgets), outputs)


@functools.cache
def random_batch(name: str, lengths: tuple[int, ...], budgets: tuple[int, ...], seed: int) -> Batch:
    """Random prompts of an architecture's tiny model."""
    return make_batch(tiny_model(name), random_prompts(lengths, seed), budgets)


def ragged_batch(name: str) -> Batch:
    """Prompts of 1, 3, 9 and 30 tokens with budgets that end at different rounds.

    Windows of 12 tokens are crossed in the middle of blocks by the first three; the last one starts beyond.
    """
    budgets = (16, 9, 14, 11) if name in RECURRENT_CONFIGS else (33, 17, 28, 22)
    return random_batch(name, (1, 3, 9, 30), budgets, seed=2)


def short_batch(name: str) -> Batch:
    """The same prompts with fewer tokens to generate."""
    return random_batch(name, (1, 3, 9, 30), (16, 9, 14, 11), seed=2)


def draft_length(name: str, drafter: str) -> int:
    """The draft length this combination runs with."""
    return DRAFT_LENGTHS[(ARCHITECTURES.index(name) + 3 * DRAFTERS.index(drafter)) % len(DRAFT_LENGTHS)]


def make_drafter(name: str, kind: str) -> Drafter:
    """A drafter of some quality for an architecture's ragged batch."""
    model, truths = tiny_model(name), ragged_batch(name).truths
    if kind == "perfect":
        itself = name in CONFIGS and ARCHITECTURES.index(name) % 2
        return ModelDrafter(model, target_vocab_size=VOCAB) if itself else OracleDrafter(truths)
    if kind == "near":
        if name in RECURRENT_CONFIGS:
            return NearDrafter(truths, VOCAB, hit_rate=0.7)
        return ModelDrafter(near_copy(model, noise=0.03), target_vocab_size=VOCAB)
    if kind == "random":
        return RandomDrafter(VOCAB, stray=True)
    return AdversaryDrafter(truths, VOCAB) if kind == "wrong" else NGramDrafter()


def make_policy(name: str, drafter: str) -> Policy:
    """Alternately fixed and adaptive; always fixed where exact counts are expected."""
    length = draft_length(name, drafter)
    fixed = drafter in {"perfect", "wrong"} or (ARCHITECTURES.index(name) + DRAFTERS.index(drafter)) % 2
    return Fixed(length) if fixed else Adaptive(length, padded=True)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_references_are_diverse(name: str) -> None:
    """Every reference has at least 10 distinct tokens, so that an equality with it means something."""
    assert len({token for output in ragged_batch(name).outputs for token in output}) >= 10


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_the_matrix_covers_every_draft_length(drafter: str) -> None:
    """Each drafter runs with every draft length from 1 to 16, and with both policies where counts are not exact."""
    assert {draft_length(name, drafter) for name in ARCHITECTURES} == set(DRAFT_LENGTHS)
    policies = {type(make_policy(name, drafter)) for name in ARCHITECTURES}
    assert policies == ({Fixed} if drafter in {"perfect", "wrong"} else {Fixed, Adaptive})


@pytest.mark.parametrize("kind", DRAFTERS)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_greedy_output_equals_generate(name: str, kind: str) -> None:
    """A ragged batch decodes to the tokens of ``generate``, and its drafter is accepted as often as its kind says."""
    batch, length = ragged_batch(name), draft_length(name, kind)
    run = decode(
        tiny_model(name),
        batch.prompts,
        batch.budgets,
        drafter=make_drafter(name, kind),
        policy=make_policy(name, kind),
        prefill_chunk=7,
    )
    assert run.outputs == batch.outputs
    if kind == "perfect":
        rounds = [math.ceil(budget / (length + 1)) for budget in batch.budgets]
        figures = [completion.metrics for completion in run.completions]
        assert [figure.rounds for figure in figures] == rounds
        assert [figure.accepted for figure in figures] == [
            budget - count for budget, count in zip(batch.budgets, rounds, strict=True)
        ]
        assert [figure.mean_accepted_length for figure in figures] == [
            budget / count for budget, count in zip(batch.budgets, rounds, strict=True)
        ]
    elif kind == "near":
        assert 0 < run.accepted < run.admitted
    elif kind == "wrong":
        assert run.accepted == 0 < run.admitted
        assert [completion.metrics.rounds for completion in run.completions] == batch.budgets


@pytest.mark.parametrize("name", MORE_CONFIGS)
def test_families_with_a_turn_of_their_own(name: str) -> None:
    """Chunked, latent, shared or partly rotary attention and four more recurrent kinds pass check and parity."""
    model = tiny_model(name)
    batch = random_batch(name, (1, 4, 11), (14, 9, 17), seed=3)
    assert len({token for output in batch.outputs for token in output}) >= 10
    drafter = NearDrafter(batch.truths, VOCAB, hit_rate=0.8)
    target = build_target(model, inspect_model(model), prefill_chunk=5)
    run = decode(model, batch.prompts, batch.budgets, drafter=drafter, policy=Fixed(5), target=target)
    assert run.outputs == batch.outputs
    assert 0 < run.accepted < run.admitted


class ShortMemoryTarget(SlotTarget):
    """Known-wrong: the last kept position of a block of several is forgotten."""

    def keep(self, slot: int, count: int) -> None:
        """Commit one too few."""
        super().keep(slot, max(1, count - 1))


class StickyTarget(SlotTarget):
    """Known-wrong: rejected positions stay in the cache."""

    def keep(self, slot: int, count: int) -> None:
        """Commit the whole block."""
        super().keep(slot, max(count, self.cache.plan.widths[slot]))


class LeftBehindTarget(SlotTarget):
    """Known-wrong: closing a slot does not move the last one into its place."""

    def close(self, slot: int) -> None:
        """Forget to move."""
        self._num_slots -= 1
        self._cache.truncate(self._num_slots, 0)


@pytest.mark.parametrize("wrong", [ShortMemoryTarget, StickyTarget, LeftBehindTarget])
def test_a_wrong_target_breaks_parity(wrong: type[SlotTarget]) -> None:
    """The comparison with ``generate`` notices a state that rolls back wrongly."""
    model, batch = tiny_model("llama"), ragged_batch("llama")
    drafter = NearDrafter(batch.truths, VOCAB, hit_rate=0.7)
    settings = {"drafter": drafter, "policy": Fixed(4)}
    right = decode(model, batch.prompts, batch.budgets, target=SlotTarget(model, inspect_model(model)), **settings)
    assert right.outputs == batch.outputs
    run = decode(model, batch.prompts, batch.budgets, target=wrong(model, inspect_model(model)), **settings)
    assert run.outputs != batch.outputs


# --- Batches ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("name", SAMPLE)
def test_a_request_does_not_notice_its_batch(name: str, temperature: float) -> None:
    """Tokens and figures of every request equal those of its solo run, greedy and with a seed."""
    model, batch = tiny_model(name), short_batch(name)
    params = {"temperature": temperature, "seed": 11}
    plain = decode(model, batch.prompts, batch.budgets, params)
    truths = [prompt + output for prompt, output in zip(batch.prompts, plain.outputs, strict=True)]
    settings = {"drafter": NearDrafter(truths, VOCAB, hit_rate=0.7), "policy": Fixed(4)}
    together = decode(model, batch.prompts, batch.budgets, params, **settings)
    assert together.outputs == plain.outputs
    assert 0 < together.accepted < together.admitted
    for prompt, budget, completion in zip(batch.prompts, batch.budgets, together.completions, strict=True):
        alone = decode(model, [prompt], [budget], params, **settings).completions[0]
        assert completion.token_ids == alone.token_ids
        assert completion.metrics.rounds == alone.metrics.rounds
        assert completion.metrics.drafted == alone.metrics.drafted
        assert completion.metrics.accepted == alone.metrics.accepted


@pytest.mark.parametrize("name", ["llama", "gemma3-alternating", "mamba2"])
def test_requests_join_and_leave_between_rounds(name: str) -> None:
    """With room for two, waiting requests take the places of finished ones, and nothing changes but the order."""
    batch = ragged_batch(name)
    run = decode(
        tiny_model(name),
        batch.prompts,
        batch.budgets,
        drafter=NearDrafter(batch.truths, VOCAB, hit_rate=0.7),
        policy=Fixed(3),
        max_batch_size=2,
    )
    assert run.outputs == batch.outputs
    assert max(len(report.chain_ids) for report in run.reports) == 2


@pytest.mark.parametrize("name", ["llama", "mistral-sliding"])
def test_an_engine_forgets_finished_requests(name: str) -> None:
    """The same batch again, on used slots of target and drafter, gives the same tokens at full acceptance."""
    model, batch = tiny_model(name), ragged_batch(name)
    drafter = ModelDrafter(model, target_vocab_size=VOCAB)
    settings = {"drafter": drafter, "policy": Fixed(4), "target": SlotTarget(model, inspect_model(model))}
    cold = decode(model, batch.prompts, batch.budgets, **settings)
    warm = decode(model, batch.prompts[::-1], batch.budgets[::-1], **settings)
    assert cold.outputs == batch.outputs
    assert warm.outputs == batch.outputs[::-1]
    assert cold.accepted == cold.admitted == warm.accepted == warm.admitted


# --- Scripted acceptances ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SAMPLE)
def test_every_row_accepts_its_own_number_of_tokens(name: str) -> None:
    """Rows accept 0, 4, 1 and 3 tokens of 4 in one round and 4, 0, 0 and 2 in the next; one of them ends early."""
    model = tiny_model(name)
    batch = random_batch(name, (3, 9, 5, 7), (24, 20, 9, 22), seed=4)
    script = [[(4, 0), (4, 4), (4, 1), (4, 3)], [(4, 4), (4, 0), (4, 0), (4, 2)]]
    drafter = ScriptedDrafter(batch.truths, VOCAB, script * 2)
    run = decode(model, batch.prompts, batch.budgets, drafter=drafter, policy=Fixed(4))
    assert [report.accepted for report in run.reports[:3]] == [(0, 4, 1, 3), (4, 0, 0, 2), (0, 4, 1, 3)]
    assert [report.emitted for report in run.reports[:2]] == [(1, 5, 2, 4), (5, 1, 1, 3)]
    assert run.outputs == batch.outputs


PAUSES = [(4, 2), (0, 0), (3, 0), (0, 0), (0, 0), (5, 5)]
"""Drafts of 4, 0, 3, 0, 0 and 5 tokens, of which 2, none, 0, none, none and 5 are accepted."""


@pytest.mark.parametrize("name", SAMPLE)
def test_rounds_without_drafts_between_rounds_with(name: str) -> None:
    """Accepted drafts followed by no drafts, rejected drafts by none, and back: no round reads a stale state."""
    model = tiny_model(name)
    batch = random_batch(name, (5, 2, 12), (24, 24, 24), seed=5)
    script = [list(entry) for entry in zip(PAUSES, PAUSES[1:] + PAUSES[:1], PAUSES[3:] + PAUSES[:3], strict=True)]
    drafter = ScriptedDrafter(batch.truths, VOCAB, script)
    run = decode(model, batch.prompts, batch.budgets, drafter=drafter, policy=Fixed(5))
    accepted = [tuple(entry[1] for entry in entries) for entries in script]
    assert [report.accepted for report in run.reports[: len(script)]] == accepted
    assert run.outputs == batch.outputs


@pytest.mark.parametrize("prefill_chunk", [1, 4, 8])
@pytest.mark.parametrize("name", SAMPLE)
def test_commits_on_block_boundaries(name: str, prefill_chunk: int) -> None:
    """States end exactly on, one before and one after multiples of 4 and 8, also at the end of a prefill chunk."""
    model = tiny_model(name)
    batch = random_batch(name, (4, 5, 8, 9), (21, 21, 21, 21), seed=6)
    turns = [(4, 4), (4, 3), (3, 3), (5, 3), (3, 3)]  # 5, 4, 4, 4 and 4 tokens
    drafter = ScriptedDrafter(batch.truths, VOCAB, [[turn] * 4 for turn in turns])
    run = decode(model, batch.prompts, batch.budgets, drafter=drafter, policy=Fixed(5), prefill_chunk=prefill_chunk)
    held = [[len(prompt) - 1 for prompt in batch.prompts]]
    for report in run.reports[: len(turns)]:
        held.append([length + emitted for length, emitted in zip(held[-1], report.emitted, strict=True)])
    assert {length % 8 for lengths in held for length in lengths} >= {0, 1, 3, 4, 5, 7}
    assert run.outputs == batch.outputs


def test_many_partly_kept_blocks_in_a_row() -> None:
    """A recurrent row whose blocks are never kept in full carries more tokens than a replay is put off for."""
    for name in RECURRENT_CONFIGS:
        model = tiny_model(name)
        batch = random_batch(name, (5, 2), (24, 19), seed=7)
        drafter = ScriptedDrafter(batch.truths, VOCAB, [[(4, 2), (3, 0)]] * 8)
        run = decode(model, batch.prompts, batch.budgets, drafter=drafter, policy=Fixed(4))
        assert [report.accepted for report in run.reports[:5]] == [(2, 0)] * 5
        assert run.outputs == batch.outputs


# --- Prompts and limits -----------------------------------------------------------------------------------------------


@functools.cache
def peculiar_batch(name: str) -> Batch:
    """A prompt of a single token, and one word 48 times."""
    return make_batch(tiny_model(name), [[10], [7] * 48], (12, 12) if name in RECURRENT_CONFIGS else (40, 16))


@pytest.mark.parametrize("twin", ["same", "near", "other"])
@pytest.mark.parametrize("name", ["llama", "mistral-sliding", "gemma3-alternating", "gpt2"])
def test_peculiar_prompts(name: str, twin: str) -> None:
    """A prompt of one token and one that repeats a word decode as with ``generate``, with any draft model."""
    model, batch = tiny_model(name), peculiar_batch(name)
    twins = {"same": model, "near": near_copy(model, noise=0.05), "other": tiny_model("llama", seed=77)}
    drafter = ModelDrafter(twins[twin], target_vocab_size=VOCAB)
    run = decode(model, batch.prompts, batch.budgets, drafter=drafter, policy=Fixed(5))
    assert run.outputs == batch.outputs


@pytest.mark.parametrize("name", RECURRENT_CONFIGS)
def test_peculiar_prompts_of_recurrent_models(name: str) -> None:
    """The same for recurrent models, with prompt lookup."""
    model, batch = tiny_model(name), peculiar_batch(name)
    run = decode(model, batch.prompts, batch.budgets, drafter=NGramDrafter(), policy=Fixed(5))
    assert run.outputs == batch.outputs


@pytest.mark.parametrize("name", ["llama", "mistral-sliding", "gpt2"])
def test_the_cache_grows_in_the_middle_of_a_ragged_block(name: str) -> None:
    """Rows outgrow the cache's first 256 positions one after the other, in the middle of blocks."""
    limit = {"n_positions": 512} if name == "gpt2" else {"max_position_embeddings": 512}
    model = tiny_model(name, **limit)
    batch = make_batch(model, random_prompts((239, 250, 3, 246), seed=8), (40, 24, 12, 33))
    drafter = NearDrafter(batch.truths, VOCAB, hit_rate=0.8)
    target = SlotTarget(model, inspect_model(model), prefill_chunk=64)
    assert target.cache.capacity == 256
    run = decode(model, batch.prompts, batch.budgets, drafter=drafter, policy=Fixed(6), target=target)
    assert target.cache.capacity > 256
    assert run.outputs == batch.outputs


@pytest.mark.parametrize("name", ["llama", "gpt2"])
@pytest.mark.parametrize("length", [1, 5, 16])
def test_drafts_stop_at_the_end_of_the_context(name: str, length: int) -> None:
    """A request fills the model's context to the last position and no further, whatever is drafted."""
    limit = {"n_positions": 40} if name == "gpt2" else {"max_position_embeddings": 40}
    model = tiny_model(name, **limit)
    batch = make_batch(model, random_prompts((25, 38, 39), seed=9), (15, 2, 1))
    drafter = OracleDrafter([truth + [0] * 20 for truth in batch.truths])
    run = decode(model, batch.prompts, [99, 99, 99], drafter=drafter, policy=Fixed(length))
    assert run.outputs == batch.outputs
    assert [completion.finish_reason for completion in run.completions] == ["length"] * 3


def test_output_beyond_the_context_is_refused() -> None:
    """A prompt that leaves no room for a token is refused before any work."""
    engine = make_engine(tiny_model("llama", max_position_embeddings=40))
    with pytest.raises(ContextLengthError, match="shorten the prompt"):
        engine.submit([1] * 40, SamplingParams())


# --- 16-bit weights ---------------------------------------------------------------------------------------------------


def single_token_logits(model: PreTrainedModel, tokens: Sequence[int]) -> torch.Tensor:
    """[n, V] logits of n forwards of one token each, as ``generate`` computes them."""
    return block_logits(model, tokens, 1)


@torch.inference_mode()
def block_logits(model: PreTrainedModel, tokens: Sequence[int], width: int) -> torch.Tensor:
    """[n, V] logits of forwards of ``width`` tokens each over a growing cache of transformers' own."""
    argument = inspect_model(model).cache_argument
    cache, rows = DynamicCache(config=model.config), []
    for begin in range(0, len(tokens), width):
        ids = torch.tensor([list(tokens[begin : begin + width])])
        rows.append(model(**{"input_ids": ids, argument: cache, "use_cache": True}).logits[0].float())
    return torch.cat(rows)


def shortfall(model: PreTrainedModel, prompt: list[int], ours: list[int], theirs: list[int]) -> float:
    """By how much our first differing token's logit falls short of the best one; 0 where the outputs are equal."""
    differing = [place for place, pair in enumerate(zip(ours, theirs, strict=True)) if pair[0] != pair[1]]
    if not differing:
        return 0.0
    place = differing[0]
    logits = single_token_logits(model, prompt + theirs[:place])[-1]
    return float(logits.max() - logits[ours[place]])


@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt2"])
def test_bfloat16_differs_from_generate_by_rounding_only(name: str) -> None:
    """Where the output first differs, our token is short of the best one by less than block width alone moves logits.

    Forwards over n tokens and over one add in different orders: both logits of a pair move by up to the noise.
    """
    model = copy.deepcopy(tiny_model(name)).to(torch.bfloat16)
    batch = make_batch(model, random_prompts((6, 9, 7), seed=10), (24,) * 3)
    drafter = NearDrafter(batch.truths, VOCAB, hit_rate=0.8)
    run = decode(model, batch.prompts, batch.budgets, drafter=drafter, policy=Fixed(5))
    noise = max(
        float((block_logits(model, truth, width) - single_token_logits(model, truth)).abs().max())
        for truth, width in itertools.product(batch.truths, (3, 6))
    )
    assert noise > 0
    for prompt, ours, theirs in zip(batch.prompts, run.outputs, batch.outputs, strict=True):
        assert shortfall(model, prompt, ours, theirs) <= 2 * noise
        worst = [*theirs[:20], int(single_token_logits(model, prompt + theirs[:20])[-1].argmin()), *theirs[21:]]
        assert shortfall(model, prompt, worst, theirs) > 2 * noise  # a wrong token is told from a rounded one
