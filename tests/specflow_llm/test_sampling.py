"""The processed law of a request, its keyed randomness, its drafted tokens and its reported log-probabilities.

Statistical tests use fixed seeds and state the odds that a correct program would have failed for the seeds chosen.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from specflow.errors import BackendContractError, InvalidSettingError
from specflow_llm.config import SamplingParams
from specflow_llm.sampling import (
    ACCEPT,
    DRAFT,
    RESIDUAL,
    TARGET,
    RowSampler,
    Rule,
    gumbel_noise,
    gumbel_rows,
    key64,
    lane,
    race,
    top_logprobs,
    truncate,
    uniform,
)

VOCAB = 50
PROMPT = [7, 3, 7, 9]
Processor = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def make_sampler(
    *,
    rule: Rule = "coupled",
    vocab_size: int = VOCAB,
    eos_token_ids: Sequence[int] = (),
    bad_word_ids: Sequence[Sequence[int]] = (),
    num_prompt_tokens: int = len(PROMPT),
    seed: int = 1,
    **params: Any,
) -> RowSampler:
    """A sampler at temperature 1 unless said otherwise."""
    return RowSampler(
        SamplingParams(**{"temperature": 1.0, **params}),
        vocab_size=vocab_size,
        eos_token_ids=eos_token_ids,
        bad_word_ids=bad_word_ids,
        num_prompt_tokens=num_prompt_tokens,
        seed=seed,
        rule=rule,
    )


def random_logits(rows: int, vocab_size: int = VOCAB, seed: int = 0) -> torch.Tensor:
    """[rows, V] fp32 logits as spread as a language model's."""
    return 3.0 * torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(seed))


def support(log_probs: torch.Tensor) -> list[int]:
    """The possible tokens of one law."""
    ids: list[int] = (log_probs > -math.inf).nonzero().flatten().tolist()
    return ids


# --- Keyed randomness -------------------------------------------------------------------------------------------------


def test_uniform_is_pinned() -> None:
    """The numbers behind a seed never change: a stored seed gives the same tokens with the next version."""
    assert uniform(0, 0, ACCEPT) == 0.5274855367669213
    assert uniform(7, 123, ACCEPT) == 0.2712544191302566
    assert uniform(2**63 - 1, 10**6, lane(DRAFT, 5)) == 0.3026821151200375


def test_gumbel_noise_is_pinned() -> None:
    """The noise behind a seed never changes, up to the rounding of the logarithms."""
    expected = [0.7126270532608032, 0.10188303142786026, 2.8109142780303955, 0.6863508224487305]
    assert gumbel_noise(7, 123, 4, "cpu").tolist() == pytest.approx(expected, abs=1e-5)


@given(st.integers(0, 2**63 - 1), st.integers(0, 2**40), st.integers(0, 2**16))
def test_uniform_lies_in_the_unit_interval(seed: int, position: int, stream: int) -> None:
    """Every number is at least 0, below 1 and a function of its arguments."""
    value = uniform(seed, position, stream)
    assert 0.0 <= value < 1.0
    assert value == uniform(seed, position, stream)


def correlation(left: torch.Tensor, right: torch.Tensor) -> float:
    """Pearson correlation times the square root of the length: standard normal for independent samples."""
    left, right = left.double() - left.double().mean(), right.double() - right.double().mean()
    return float((left * right).mean() / (left.std() * right.std())) * math.sqrt(len(left))


def spread(values: torch.Tensor, bins: int = 64) -> float:
    """Standardised chi-square of values in [0, 1) against the uniform law: about standard normal."""
    counts = torch.histc(values.double(), bins, 0.0, 1.0)
    expected = len(values) / bins
    statistic = float(((counts - expected) ** 2 / expected).sum())
    return (statistic - (bins - 1)) / math.sqrt(2 * (bins - 1))


FAR = 7.0
"""A standard normal lies beyond with odds of 3e-12, a standardised chi-square of 63 degrees with odds of 6e-8."""

NEIGHBOURS: dict[str, Callable[[int], tuple[int, int, int]]] = {
    "positions": lambda index: (5, index, ACCEPT),
    "seeds": lambda index: (index, 5, ACCEPT),
    "streams": lambda index: (5, 5, index),
    "diagonal": lambda index: (index, index, ACCEPT),
    "lanes": lambda index: (5, index, lane(DRAFT, index % 8)),
}


@pytest.mark.parametrize("along", NEIGHBOURS)
def test_uniforms_are_spread_and_uncorrelated(along: str) -> None:
    """Along each argument: evenly spread, and no correlation at lags 1, 2 and 8 (false alarm below 1e-7)."""
    values = torch.tensor([uniform(*NEIGHBOURS[along](index)) for index in range(20_000)], dtype=torch.float64)
    assert abs(spread(values)) < FAR
    for lag in (1, 2, 8):
        assert abs(correlation(values[:-lag], values[lag:])) < FAR


def test_streams_of_one_position_are_uncorrelated() -> None:
    """Numbers of different streams at the same positions are unrelated (false alarm below 1e-9)."""
    streams = [TARGET, DRAFT, ACCEPT, RESIDUAL, lane(DRAFT, 0), lane(ACCEPT, 0), lane(ACCEPT, 1)]
    columns = [torch.tensor([uniform(3, n, stream) for n in range(4000)], dtype=torch.float64) for stream in streams]
    for index, left in enumerate(columns):
        for right in columns[:index]:
            assert abs(correlation(left, right)) < FAR


def reference_gumbel(seed: int, position: int, index: int, stream: int) -> float:
    """One entry of the noise in Python integers and fp64."""

    def mix(word: int) -> int:
        word = (word ^ (word >> 16)) * 0x7FEB352D % 2**32
        word = (word ^ (word >> 15)) * 0x846CA68B % 2**32
        return word ^ (word >> 16)

    key = key64(seed, position, stream)
    word = mix((mix(index) ^ key % 2**32) * (key >> 32 | 1) % 2**32) % 2**31
    return -math.log(-math.log1p(-(word + 0.5) * 2.0**-31))


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 2**63 - 1), st.integers(0, 2**31), st.sampled_from([TARGET, RESIDUAL, lane(DRAFT, 3)]))
def test_gumbel_noise_equals_the_plain_reference(seed: int, position: int, stream: int) -> None:
    """The vectorised noise equals the one in Python integers, to the precision of fp32."""
    noise = gumbel_noise(seed, position, 300, "cpu", stream)
    expected = [reference_gumbel(seed, position, index, stream) for index in range(300)]
    # The smallest values, which never win a race that matters, are steep in u, and fp32 resolves u to 6e-8 near 1.
    assert noise.tolist() == pytest.approx(expected, abs=0.1)
    common = [index for index, value in enumerate(expected) if value > -1.0]
    assert [noise[index].item() for index in common] == pytest.approx([expected[index] for index in common], abs=1e-5)


def test_gumbel_noise_is_finite_and_gumbel() -> None:
    """Finite, and exp(-exp(-noise)) is uniform within rows and along positions (false alarm below 1e-6)."""
    noise = gumbel_rows(11, range(64), 49_152, torch.device("cpu"))
    assert noise.isfinite().all()
    assert float(noise.min()) > -3.0
    assert float(noise.max()) < 22.0
    levels = (-(-noise.double()).exp()).exp().clamp(max=1 - 1e-12)
    assert abs(spread(levels[0])) < FAR
    assert abs(spread(levels.flatten())) < FAR
    assert abs(spread(levels[:, :1000].reshape(-1))) < FAR


def test_gumbel_noise_at_the_ends_of_its_words_is_finite() -> None:
    """The smallest and largest 31-bit words give finite noise in fp32."""
    words = torch.tensor([0, 1, 2**31 - 2, 2**31 - 1], dtype=torch.int32)
    values = torch.add(words, 0.5).mul_(-(2.0**-31) * (1.0 - 2.0**-24)).log1p_().neg_().log_().neg_()
    assert values.isfinite().all()


def test_gumbel_rows_are_uncorrelated() -> None:
    """Rows of neighbouring keys, and shifts of one row, are unrelated (false alarm below 1e-9)."""
    base = gumbel_noise(5, 100, 20_000, "cpu")
    others = [gumbel_noise(5, 101, 20_000, "cpu"), gumbel_noise(6, 100, 20_000, "cpu")]
    others += [gumbel_noise(5, 100, 20_000, "cpu", stream) for stream in (RESIDUAL, lane(DRAFT, 0), lane(DRAFT, 1))]
    for other in others:
        assert abs(correlation(base, other)) < FAR
        assert abs(correlation(base[1:], other[:-1])) < FAR
    for lag in (1, 2, 16, 256):
        assert abs(correlation(base[:-lag], base[lag:])) < FAR


def test_gumbel_noise_does_not_depend_on_its_company() -> None:
    """The same entry for any vocabulary size, in any batch of positions and inside inference mode."""
    base = gumbel_noise(5, 100, 1000, "cpu")
    assert torch.equal(gumbel_noise(5, 100, 77, "cpu"), base[:77])
    assert torch.equal(gumbel_rows(5, [3, 100, 4], 1000, torch.device("cpu"))[1], base)
    with torch.inference_mode():
        assert torch.equal(gumbel_noise(5, 100, 1001, "cpu")[:1000], base)
    assert torch.equal(gumbel_noise(5, 100, 1001, torch.device("cpu"))[:1000], base)


@pytest.mark.gpu
def test_gumbel_noise_on_a_gpu_equals_the_cpu() -> None:
    """The integer part is the same on every device, so only the rounding of the logarithms may differ."""
    there = gumbel_rows(5, range(20), 5000, torch.device("cuda")).cpu()
    torch.testing.assert_close(there, gumbel_rows(5, range(20), 5000, torch.device("cpu")), atol=1e-5, rtol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("top_p", [1.0, 0.9])
def test_truncation_on_a_gpu_equals_the_cpu(top_p: float) -> None:
    """The path without read-backs keeps the tokens that the path for CPUs keeps, ties included."""
    scores = (2.0 * torch.randn(9, 3000, generator=torch.Generator().manual_seed(0))).mul(4).round() / 4
    here = truncate(scores, 700, top_p, 0.001)
    assert torch.equal(truncate(scores.cuda(), 700, top_p, 0.001).cpu(), here)
    assert torch.equal(truncate(scores.cuda(), 0, top_p).cpu(), truncate(scores, 0, top_p))


def test_race_never_draws_the_impossible() -> None:
    """A token of probability 0 never wins, even against the rarest other and with the largest noise."""
    probs = torch.tensor([0.0, 1e-30, 0.0])
    assert race(probs, torch.tensor([22.0, -3.0, 22.0])) == 1


# --- Truncation -------------------------------------------------------------------------------------------------------


def reference_truncate(scores: Sequence[float], top_k: int, top_p: float, min_p: float) -> list[int]:
    """The ids kept: by falling score and rising id, one by one."""
    order = sorted(range(len(scores)), key=lambda index: (-scores[index], index))
    if top_k:
        order = order[:top_k]
    weights = [math.exp(scores[index] - scores[order[0]]) for index in order]
    total, mass, kept = math.fsum(weights), 0.0, 0
    while kept < len(order) and mass < top_p:
        mass += weights[kept] / total
        kept += 1
    order = order[:kept] if top_p < 1.0 else order
    return sorted(index for index in order if scores[index] >= scores[order[0]] + math.log(min_p or 1e-300))


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.integers(-6, 6), min_size=1, max_size=40),
    st.integers(0, 12),
    st.sampled_from([1.0, 0.97, 0.713, 0.31, 0.05]),
    st.sampled_from([0.0, 0.011, 0.13, 0.9]),
)
def test_truncation_equals_the_plain_reference(levels: list[int], top_k: int, top_p: float, min_p: float) -> None:
    """Top-k, top-p and min-p keep the tokens of the plain reference, also where scores tie."""
    scores = [0.7 * level for level in levels]
    kept = truncate(torch.tensor([scores], dtype=torch.float64), top_k, top_p, min_p)
    assert support(kept[0]) == reference_truncate(scores, top_k, top_p, min_p)


@pytest.mark.parametrize("top_p", [0.2, 0.9, 0.999])
def test_wide_nuclei_equal_the_plain_reference(top_p: float) -> None:
    """Rows that need few and rows that need thousands of candidates are cut right, together in one call."""
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(4, 3000, generator=generator, dtype=torch.float64) * torch.tensor([[0.0], [0.1], [1.0], [8.0]])
    kept = truncate(scores, 0, top_p)
    sizes = []
    for row, original in zip(kept, scores.tolist(), strict=True):
        assert support(row) == reference_truncate(original, 0, top_p, 0.0)
        sizes.append(len(support(row)))
    assert max(sizes) > 512 or top_p < 0.5
    assert min(sizes) < 64


def test_truncation_leaves_its_argument_alone() -> None:
    """The scores given are not written to, and are returned as they are when nothing is to be cut."""
    scores = random_logits(3)
    copy = scores.clone()
    truncate(scores, 5, 0.5, 0.1)
    assert torch.equal(scores, copy)
    assert truncate(scores) is scores


def test_top_p_keeps_the_token_that_crosses() -> None:
    """The smallest set whose mass reaches top_p includes the token that crosses it, and none after it."""
    assert support(truncate(torch.zeros((1, 2), dtype=torch.float64), 0, 0.5)[0]) == [0]
    scores = torch.tensor([[0.5, 0.3, 0.2]]).log()
    assert support(truncate(scores, 0, 0.49)[0]) == [0]
    assert support(truncate(scores, 0, 0.51)[0]) == [0, 1]
    assert support(truncate(scores, 0, 0.81)[0]) == [0, 1, 2]


@pytest.mark.parametrize("rule", ["token", "block", "one_hot", "coupled"])
def test_draft_and_target_have_the_same_support(rule: Rule) -> None:
    """Top-k before top-p on the renormalised law, for plain, verified and drafted tokens alike (vLLM issue 10198)."""
    logits = torch.tensor([[0.35, 0.25, 0.20, 0.05, 0.03, 0.03, 0.03, 0.03, 0.03]]).log()
    for seed in range(30):
        sampler = make_sampler(rule=rule, vocab_size=9, seed=seed, top_k=4, top_p=0.82)
        law = sampler.log_probs(logits, PROMPT)[0]
        # .35 + .25 of the .85 that top-k leaves is .706; the third token crosses .82. Top-p alone would keep four.
        assert support(law) == [0, 1, 2]
        token, probs, _ = sampler.draft(logits[0], PROMPT, [], len(PROMPT))
        assert token in {0, 1, 2}
        assert sampler.choose(law, len(PROMPT)) in {0, 1, 2}
        if probs is not None:
            assert support(probs.log()) == [0, 1, 2]


# --- The processed law ------------------------------------------------------------------------------------------------


def frequency_and_presence(frequency: float, presence: float) -> Processor:
    """OpenAI's two penalties over the output, token by token."""

    def process(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        output = ids[0, len(PROMPT) :].tolist()
        scores = scores.clone()
        for token in set(output):
            scores[0, token] -= frequency * output.count(token) + presence
        return scores

    return process


FEATURES: dict[str, tuple[dict[str, Any], list[Processor]]] = {
    "nothing": ({}, []),
    "temperature": ({"temperature": 0.6}, [TemperatureLogitsWarper(0.6)]),
    "top-k": ({"top_k": 9}, [TopKLogitsWarper(9)]),
    "top-p": ({"top_p": 0.8}, [TopPLogitsWarper(0.8)]),
    "min-p": ({"min_p": 0.07}, [MinPLogitsWarper(0.07)]),
    "logit bias": (
        {"logit_bias": {4: 3.5, 9: -100.0}},
        [SequenceBiasLogitsProcessor({(4,): 3.5, (9,): -100.0})],
    ),
    "bad words": (
        {"bad_word_ids": [[5], [3, 7], [7, 9, 11], [9, 9]]},
        [NoBadWordsLogitsProcessor([[5], [3, 7], [7, 9, 11], [9, 9]])],
    ),
    "min tokens": (
        {"min_tokens": 3, "eos_token_ids": (2, 6)},
        [MinNewTokensLengthLogitsProcessor(len(PROMPT), 3, [2, 6])],
    ),
    "repetition": ({"repetition_penalty": 1.7}, [RepetitionPenaltyLogitsProcessor(1.7)]),
    "repetition below 1": ({"repetition_penalty": 0.6}, [RepetitionPenaltyLogitsProcessor(0.6)]),
    "frequency": ({"frequency_penalty": 0.9}, [frequency_and_presence(0.9, 0.0)]),
    "presence": ({"presence_penalty": -0.9}, [frequency_and_presence(0.0, -0.9)]),
    "no repeated pairs": (
        {"logits_processors": (NoRepeatNGramLogitsProcessor(2),)},
        [NoRepeatNGramLogitsProcessor(2)],
    ),
}  # fmt: skip
# The order of one feature after another is the documented one.
EVERYTHING = [
    "logit bias", "bad words", "min tokens", "repetition", "frequency", "no repeated pairs", "temperature", "top-k",
    "top-p", "min-p",
]  # fmt: skip
FEATURES["everything"] = (
    {key: value for name in EVERYTHING for key, value in FEATURES[name][0].items()},
    [processor for name in EVERYTHING for processor in FEATURES[name][1]],
)
BLOCK = [7, 9, 9, 4, 9, 3]


@pytest.mark.parametrize("feature", FEATURES)
def test_features_equal_transformers(feature: str) -> None:
    """Each setting, and all together, gives the law of transformers' processors on the same prefix, at every row."""
    params, processors = FEATURES[feature]
    sampler = make_sampler(**params)
    logits = random_logits(len(BLOCK) + 1)
    log_probs = sampler.log_probs(logits, PROMPT, BLOCK)
    changed = False
    for row in range(len(BLOCK) + 1):
        prefix = torch.tensor([[*PROMPT, *BLOCK[:row]]])
        expected = LogitsProcessorList(processors)(prefix, logits[row : row + 1].clone()).log_softmax(-1)[0]
        assert support(log_probs[row]) == support(expected)
        torch.testing.assert_close(log_probs[row], expected, atol=2e-6, rtol=2e-6)
        changed |= not torch.allclose(log_probs[row], logits[row].log_softmax(-1))
    assert changed or feature == "nothing"


@pytest.mark.parametrize("feature", FEATURES)
def test_rows_of_a_block_equal_rows_alone(feature: str) -> None:
    """Row t of a block has exactly the law that the same prefix has as a history: rows see what came before them."""
    params, _ = FEATURES[feature]
    sampler, fresh = make_sampler(**params), make_sampler(**params)
    logits = random_logits(len(BLOCK) + 1, seed=3)
    together = sampler.log_probs(logits, PROMPT, BLOCK)
    assert torch.equal(together[2:5], sampler.log_probs(logits[2:5], PROMPT, BLOCK, 2))
    for row in range(len(BLOCK) + 1):
        alone = fresh.log_probs(logits[row : row + 1], [*PROMPT, *BLOCK[:row]])[0]
        assert torch.equal(together[row], alone)


def test_bad_words_reach_across_the_border_of_a_block() -> None:
    """A bad phrase begun in the history is not completed by a draft, nor one begun in the block."""
    sampler = make_sampler(rule="greedy", temperature=0.0, bad_word_ids=[[9, 4, 5]])
    scores = sampler.scores(random_logits(3), [*PROMPT, 9], [4, 5])
    assert [float(row[5]) == -math.inf for row in scores] == [False, True, False]
    scores = sampler.scores(random_logits(4), PROMPT[:-1], [9, 4, 5])
    assert [float(row[5]) == -math.inf for row in scores] == [False, False, True, False]


def test_stop_ids_count_as_ends_for_min_tokens() -> None:
    """Stop ids are forbidden before min_tokens like end-of-sequence ids; with ignore_eos only they are."""
    ends: dict[str, Any] = {"eos_token_ids": (2, 10**6), "stop_token_ids": (6,), "min_tokens": 2}
    forbidden = (make_sampler(**ends).scores(random_logits(3), PROMPT, [1, 1]) == -math.inf).nonzero().tolist()
    assert forbidden == [[0, 2], [0, 6], [1, 2], [1, 6]]
    ignoring = make_sampler(**ends, ignore_eos=True).scores(random_logits(3), PROMPT, [1, 1])
    assert (ignoring == -math.inf).nonzero().tolist() == [[0, 6], [1, 6]]


def test_forbidding_everything_forbids_nothing() -> None:
    """Where the constraints leave no token, they are ignored at that position, so that the law stays a law."""
    sampler = make_sampler(vocab_size=3, bad_word_ids=[[0], [1]], eos_token_ids=(2,), min_tokens=1)
    logits = random_logits(2, 3)
    log_probs = sampler.log_probs(logits, PROMPT, [2])
    assert torch.equal(log_probs[0], logits[0].log_softmax(-1))
    assert support(log_probs[1]) == [2]


def test_logits_are_left_alone() -> None:
    """Processing never writes to the logits it is given, whatever their dtype."""
    for dtype in (torch.float32, torch.bfloat16):
        logits = random_logits(7).to(dtype)
        copy = logits.clone()
        for params, _ in FEATURES.values():
            make_sampler(**params).log_probs(logits, PROMPT, BLOCK)
        assert torch.equal(logits, copy)


def test_a_sampler_forgets_other_histories() -> None:
    """Asked about unrelated histories in any order, a sampler answers as a fresh one would."""
    params: dict[str, Any] = {"repetition_penalty": 1.3, "frequency_penalty": 0.4}
    histories = [PROMPT, [*PROMPT, 1, 1, 2], [*PROMPT, 1], [8, 8, 8, 8, 8, 8, 8], PROMPT[:2], [*PROMPT, 1, 1, 2, 5]]
    sampler, logits = make_sampler(**params), random_logits(3)
    for history in histories:
        assert torch.equal(
            sampler.scores(logits, history, [4, 4]), make_sampler(**params).scores(logits, history, [4, 4])
        )


def test_entropy_rises_with_temperature() -> None:
    """Temperature is obeyed: the law at 0.1 is sharper than at 1, and that than at 2 (sglang issue 39253)."""
    laws = [make_sampler(temperature=t).log_probs(random_logits(1), PROMPT)[0] for t in (0.1, 1.0, 2.0)]
    entropies = [-float((law.exp() * law).nansum()) for law in laws]
    assert entropies[0] + 0.1 < entropies[1]
    assert entropies[1] + 0.1 < entropies[2]


def test_greedy_in_three_spellings() -> None:
    """Temperature 0, 1e-6 and top_k=1 choose the same token, also where two logits are equal (llama.cpp issue 5657)."""
    for seed in range(50):
        logits = random_logits(1, seed=seed).to(torch.bfloat16)
        logits[0, 11] = logits[0, 30] = logits.max()
        samplers = [
            make_sampler(rule="greedy", temperature=0.0, seed=seed),
            make_sampler(rule="greedy", temperature=1e-6, seed=seed),
            make_sampler(top_k=1, seed=seed),
        ]
        chosen = {sampler.choose(sampler.log_probs(logits, PROMPT)[0], len(PROMPT)) for sampler in samplers}
        assert chosen == {int(logits[0].argmax())}


def test_greedy_scores_keep_near_ties_apart() -> None:
    """Two logits one rounding apart stay apart in the scores, while a normalisation merges them (seen here)."""
    logits = torch.zeros((1, 4096))
    logits[0, 5], logits[0, 9] = 1.0, 1.0 + 2.0**-23
    sampler = make_sampler(rule="greedy", temperature=0.0, vocab_size=4096)
    assert int(sampler.scores(logits, PROMPT)[0].argmax()) == 9
    assert int(sampler.log_probs(logits, PROMPT)[0].argmax()) == 5


@pytest.mark.parametrize(
    ("params", "pointwise", "sequential", "trivial"),
    [
        ({"rule": "greedy", "temperature": 0.0}, True, False, True),
        ({"rule": "greedy", "temperature": 0.0, "top_k": 3, "top_p": 0.5}, True, False, True),
        ({"rule": "greedy", "temperature": 0.0, "logit_bias": {1: 2.0}}, True, False, False),
        ({"rule": "greedy", "temperature": 0.0, "bad_word_ids": [[1]]}, True, False, False),
        ({"rule": "greedy", "temperature": 0.0, "bad_word_ids": [[1, 2]]}, False, False, False),
        ({"rule": "greedy", "temperature": 0.0, "frequency_penalty": 0.1}, False, False, False),
        ({"temperature": 0.7, "top_k": 3, "top_p": 0.5, "min_p": 0.1, "logit_bias": {1: 2.0}}, True, False, False),
        ({"repetition_penalty": 1.1}, False, False, False),
        ({"presence_penalty": 1.1}, False, False, False),
        ({"min_tokens": 3, "eos_token_ids": (1,)}, False, False, False),
        ({"min_tokens": 3}, True, False, False),
        ({"logits_processors": (NoRepeatNGramLogitsProcessor(2),)}, False, True, False),
    ],
)
def test_kinds_of_processing(params: dict[str, Any], pointwise: bool, sequential: bool, trivial: bool) -> None:  # noqa: FBT001
    """A sampler says whether its law needs a history, must be asked in order, or is the raw argmax."""
    sampler = make_sampler(**params)
    assert (sampler.is_pointwise, sampler.is_sequential, sampler.is_trivial) == (pointwise, sequential, trivial)


def test_trivial_requests_need_no_copy() -> None:
    """For a trivial request the scores are the fp32 logits themselves."""
    logits = random_logits(2)
    assert make_sampler(rule="greedy", temperature=0.0).scores(logits, PROMPT) is logits


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        ({"rule": "greedy"}, "rule"),
        ({"rule": "best"}, "rule"),
        ({"rule": "block", "logits_processors": (NoRepeatNGramLogitsProcessor(2),)}, "coupled"),
        ({"rule": "token", "logits_processors": (NoRepeatNGramLogitsProcessor(2),)}, "coupled"),
        ({"rule": "one_hot", "logits_processors": (NoRepeatNGramLogitsProcessor(2),)}, "coupled"),
        ({"logit_bias": {VOCAB: 1.0}}, "logit_bias"),
        ({"bad_word_ids": [[VOCAB]]}, "bad_words"),
        ({"bad_word_ids": [[-1]]}, "bad_words"),
        ({"bad_word_ids": [[]]}, "bad_words"),
    ],
)
def test_impossible_requests_are_refused(arguments: dict[str, Any], names: str) -> None:
    """A request that cannot be served raises when it is built, and the message names the setting or the way out."""
    with pytest.raises(InvalidSettingError, match=names):
        make_sampler(**arguments)


def test_greedy_requests_always_use_the_greedy_rule() -> None:
    """A greedy request ignores the rule it is given, so it may have processors under any."""
    sampler = make_sampler(rule="block", temperature=0.0, logits_processors=(NoRepeatNGramLogitsProcessor(2),))
    assert sampler.rule == "greedy"
    assert sampler.is_greedy


@pytest.mark.parametrize(
    ("processor", "message"),
    [
        (lambda _, scores: scores[:, :-1], "shape"),
        (lambda _, __: None, "NoneType"),
        (lambda _, scores: scores - math.inf, "no token possible at position 4"),
        (lambda _, scores: scores * math.nan, "NaN"),
    ],
)
def test_broken_processors_are_named(processor: Processor, message: str) -> None:
    """A processor that returns something other than a law is reported with what it returned."""
    with pytest.raises(BackendContractError, match=message):
        make_sampler(logits_processors=(processor,)).log_probs(random_logits(1), PROMPT)


def test_processors_may_write_in_place() -> None:
    """A processor that changes the scores it is given changes nothing else."""

    def forbid_first(_: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores[:, 0] = -math.inf
        return scores

    logits = random_logits(2)
    copy = logits.clone()
    log_probs = make_sampler(logits_processors=(forbid_first,)).log_probs(logits, PROMPT, [1])
    assert torch.equal(logits, copy)
    assert log_probs[:, 0].tolist() == [-math.inf] * 2


# --- Drafted tokens ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", ["token", "block"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_drafts_come_with_the_law_they_were_drawn_from(rule: Rule, dtype: torch.dtype) -> None:
    """The probabilities returned are fp32 and reproduce the draw, also for low-precision logits (DeepSpec issue 31)."""
    for seed in range(20):
        sampler = make_sampler(rule=rule, seed=seed, top_k=20)
        logits = random_logits(1, seed=seed)[0].to(dtype)
        token, probs, confidence = sampler.draft(logits, PROMPT, [3, 4], 6)
        assert probs is not None
        assert probs.dtype == torch.float32
        assert float(probs.sum()) == pytest.approx(1.0, abs=1e-6)
        assert token == race(probs, gumbel_noise(seed, 6, VOCAB, "cpu", lane(DRAFT, 2)))
        assert confidence == float(probs.max())


def test_drafts_of_the_matching_rules_have_no_law() -> None:
    """Greedy and one-hot drafts are the most probable token, coupled drafts the one the target's noise selects."""
    for seed in range(20):
        logits = random_logits(1, seed=seed)
        coupled = make_sampler(rule="coupled", seed=seed)
        expected = [
            (make_sampler(rule="greedy", temperature=0.0, seed=seed), int(logits.argmax())),
            (make_sampler(rule="one_hot", seed=seed), int(logits.argmax())),
            (coupled, coupled.choose(coupled.log_probs(logits, PROMPT)[0], 4)),
        ]
        for sampler, chosen in expected:
            token, probs, confidence = sampler.draft(logits[0], PROMPT, [], 4)
            assert token == chosen
            assert probs is None
            assert confidence == pytest.approx(float(logits.softmax(-1).max()), rel=1e-5)


@pytest.mark.parametrize("feature", FEATURES)
def test_drafts_are_processed_like_the_target(feature: str) -> None:
    """A draft model equal to the target drafts the target's tokens, but for the user's processors."""
    params, _ = FEATURES[feature]
    params = {key: value for key, value in params.items() if key != "logits_processors"}
    sampler = make_sampler(**params)
    logits = random_logits(len(BLOCK) + 1, seed=5)
    log_probs = sampler.log_probs(logits, PROMPT, BLOCK)
    for index in range(len(BLOCK) + 1):
        position = len(PROMPT) + index
        token, _, confidence = sampler.draft(logits[index], PROMPT, BLOCK[:index], position)
        assert token == sampler.choose(log_probs[index], position)
        assert confidence == pytest.approx(float(log_probs[index].exp().max()), rel=1e-5)


def test_drafting_does_not_run_the_users_processors() -> None:
    """Processors see emitted tokens only, so drafting never calls them."""

    def fail(_: torch.Tensor, __: torch.Tensor) -> torch.Tensor:
        raise AssertionError

    sampler = make_sampler(logits_processors=(fail,))
    token, _, _ = sampler.draft(random_logits(1)[0], PROMPT, [], len(PROMPT))
    assert 0 <= token < VOCAB


def test_rounds_draw_their_own_drafts() -> None:
    """The same position drafted in two rounds is drawn twice: agreement is as likely as for two independent draws."""
    logits = torch.zeros(VOCAB)
    agreements = 0
    for seed in range(400):
        sampler = make_sampler(rule="block", seed=seed)
        first, _, _ = sampler.draft(logits, PROMPT, [1, 2], 6)
        second, _, _ = sampler.draft(logits, [*PROMPT, 1], [2], 6)
        third, _, _ = sampler.draft(logits, [*PROMPT, 1, 2], [], 6)
        agreements += (first == second) + (second == third) + (first == third)
    # Poisson with mean 24: beyond 60 with odds below 1e-9.
    assert agreements < 60


def test_drafted_positions_must_follow_the_history() -> None:
    """A drafter that counts positions otherwise is told so."""
    with pytest.raises(BackendContractError, match="position 5 after 4 committed and 0 drafted"):
        make_sampler().draft(random_logits(1)[0], PROMPT, [], 5)


# --- Reported log-probabilities ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logprobs_equal_a_log_softmax(dtype: torch.dtype) -> None:
    """Each token's log-probability, and the top ones in order, equal an fp64 log-softmax of the raw logits to 1e-5."""
    logits = random_logits(9, 5000).to(dtype)
    ids = [17 * index for index in range(9)]
    exact = logits.double().log_softmax(-1)
    entries = top_logprobs(logits, ids, 4)
    assert [entry.token_id for entry in entries] == ids
    for row, entry in zip(exact, entries, strict=True):
        assert entry.logprob == pytest.approx(float(row[entry.token_id]), abs=1e-5)
        values = [value for _, value in entry.top]
        assert values == pytest.approx(row.topk(4).values.tolist(), abs=1e-5)
        assert values == pytest.approx([float(row[token]) for token, _ in entry.top], abs=1e-5)
        assert values == sorted(values, reverse=True)


def test_logprobs_at_the_edges() -> None:
    """No tokens, no alternatives, more alternatives than tokens, and more rows than tokens are all served."""
    logits = random_logits(3, 5)
    assert top_logprobs(logits, [], 4) == []
    assert [entry.top for entry in top_logprobs(logits, [1, 2, 3], 0)] == [(), (), ()]
    assert [len(entry.top) for entry in top_logprobs(logits, [1, 2, 3], 9)] == [5, 5, 5]
    assert top_logprobs(logits, [4], 2) == top_logprobs(logits[:1], [4], 2)


def test_logprobs_show_no_certainty_that_is_not_there() -> None:
    """Accepted tokens do not report log-probability 0 (llama.cpp issue 27972)."""
    assert all(entry.logprob < -0.1 for entry in top_logprobs(torch.zeros(4, 8), [0, 1, 2, 3], 1))
