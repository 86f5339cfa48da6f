"""Sampled decoding end to end: the same tokens from the same seed, or the same law, whatever is drafted."""

from __future__ import annotations

import functools
import itertools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from specflow.admission import Frontier
from specflow.protocols import Policy
from specflow.types import ChainView, Mode, RoundReport
from specflow_llm import Completion, Drafter, DrafterBase, DraftRequest, EngineConfig, Proposal, SamplingParams
from specflow_llm.config import Verification
from specflow_llm.drafters import ModelDrafter, NGramDrafter
from tests.specflow_llm.drafters import AdversaryDrafter, OracleDrafter, RandomDrafter
from tests.specflow_llm.harness import LawTarget, Request, decode, drive, make_engine, scripted
from tests.specflow_llm.models import VOCAB, near_copy, tiny_model

PROMPTS = ((1, 2, 3), (7, 7, 7, 7, 7, 7), (50, 4, 9, 4, 9, 4), (33,))
SAMPLED = {"temperature": 0.9, "max_tokens": 16}


@functools.cache
def near_model() -> PreTrainedModel:
    """A model that often agrees with the target; not to be changed."""
    return near_copy(tiny_model())


def drafters() -> dict[str, Callable[[], Drafter | None]]:
    """Every kind of drafter, built anew for each use because they keep state."""
    model = tiny_model()
    return {
        "none": lambda: None,
        "ngram": NGramDrafter,
        "same model": lambda: ModelDrafter(model, target_vocab_size=VOCAB),
        "near model": lambda: ModelDrafter(near_model(), target_vocab_size=VOCAB),
        "random tokens": lambda: RandomDrafter(VOCAB, stray=True),
    }


def sample(
    drafter: Drafter | None, requests: Sequence[tuple[Sequence[int], SamplingParams]], **settings: Any
) -> list[Completion]:
    """Decode requests in one batch over the tiny model."""
    num_draft = settings.pop("num_draft", 5)
    engine = make_engine(tiny_model(), drafter, num_draft=num_draft, config=EngineConfig(**settings))
    return [run.completion for run in drive(engine, requests)]


# --- Seeds ------------------------------------------------------------------------------------------------------------


SEEDED: dict[str, dict[str, Any]] = {
    "plain": {},
    "top_k": {"top_k": 5},
    "nucleus": {"top_p": 0.8, "min_p": 0.02},
    "penalties": {"temperature": 1.6, "frequency_penalty": 0.7, "presence_penalty": 0.3, "repetition_penalty": 1.2},
    "bias": {"logit_bias": {5: -100.0, 6: 3.0}, "bad_words": [[9], [4, 9]]},
}


def seeded_requests(case: str) -> list[Request]:
    """One request for each prompt."""
    return [(prompt, SamplingParams(**{**SAMPLED, **SEEDED[case], "seed": 11})) for prompt in PROMPTS]


@functools.cache
def plain_tokens(case: str) -> list[tuple[int, ...]]:
    """What they give without speculation; not to be changed."""
    return [done.token_ids for done in sample(None, seeded_requests(case))]


@pytest.mark.parametrize("case", SEEDED)
@pytest.mark.parametrize("name", drafters())
def test_a_seed_gives_the_same_tokens_with_or_without_speculation(name: str, case: str) -> None:
    """Tokens of a seeded request do not depend on the drafter, on the draft length, or on drafting at all."""
    for num_draft in (1, 5) if case == "plain" else (5,):
        drafted = sample(drafters()[name](), seeded_requests(case), num_draft=num_draft)
        assert [done.token_ids for done in drafted] == plain_tokens(case)
        assert {done.mode for done in drafted} == {Mode.EXACT}
    if name == "same model":
        # The draft follows the target's own noise, so that nearly all of it is accepted.
        assert sum(done.metrics.accepted for done in drafted) > 0.95 * sum(done.metrics.admitted for done in drafted)


@pytest.mark.parametrize("name", ["none", "ngram", "near model"])
def test_one_seed_in_any_company(name: str) -> None:
    """Seeds 1, none, 1 and 2 in one batch, permuted, and alone: seed 1 gives the same tokens (vLLM#6038, #13196)."""

    def params(seed: int | None) -> SamplingParams:
        return SamplingParams(**{**SAMPLED, "seed": seed})

    prompt = PROMPTS[0]
    (alone,) = sample(drafters()[name](), [(prompt, params(1))])
    for seeds in ((1, None, 1, 2), (2, 1, None, 1), (None, 2, 1, 1)):
        batch = sample(drafters()[name](), [(prompt, params(seed)) for seed in seeds])
        for seed, done in zip(seeds, batch, strict=True):
            assert (done.token_ids == alone.token_ids) == (seed == 1), seeds
        assert all(0 <= token < VOCAB for done in batch for token in done.token_ids)
        assert len(set(batch[seeds.index(None)].token_ids)) > 1  # a missing seed is not a broken one


def test_a_request_does_not_feel_its_neighbours() -> None:
    """A seeded request gives the same tokens alone, in a full batch, waiting for a place, and joining late."""
    params = [SamplingParams(**{**SAMPLED, "seed": 40 + index}) for index in range(6)]
    prompts = [PROMPTS[index % 4] for index in range(6)]
    alone = [sample(NGramDrafter(), [request])[0].token_ids for request in zip(prompts, params, strict=True)]
    for size in (1, 2, 6):
        batch = sample(NGramDrafter(), list(zip(prompts, params, strict=True)), max_batch_size=size)
        assert [done.token_ids for done in batch] == alone
    engine = make_engine(tiny_model(), NGramDrafter(), num_draft=5)
    first = engine.submit(prompts[0], params[0])
    late: dict[int, tuple[int, ...]] = {}
    second = -1
    for turn in itertools.count():
        if turn == 3:
            second = engine.submit(prompts[1], params[1])
        for update in engine.step():
            if update.completion is not None:
                late[update.request_id] = update.completion.token_ids
        if turn > 3 and not engine.num_unfinished:
            break
    assert [late[first], late[second]] == alone[:2]


@pytest.mark.parametrize("name", ["none", "ngram", "near model"])
def test_the_reported_seed_repeats_an_unseeded_request(name: str) -> None:
    """In an exact mode the completion's seed, given back, repeats the tokens; without it they differ."""
    done = sample(drafters()[name](), [(PROMPTS[0], SamplingParams(**SAMPLED))] * 2, verification="coupled")
    assert done[0].seed != done[1].seed
    assert done[0].token_ids != done[1].token_ids
    for one in done:
        assert one.mode is Mode.EXACT
        (again,) = sample(None, [(PROMPTS[0], SamplingParams(**{**SAMPLED, "seed": one.seed}))])
        assert again.token_ids == one.token_ids
        assert again.seed == one.seed


@pytest.mark.parametrize("rule", ["token", "block", "one_hot"])
def test_a_ratio_rule_repeats_itself_with_the_same_setup(rule: Verification) -> None:
    """With the same seed and drafter a ratio rule repeats its tokens too, but claims no more than an equal law."""
    request = (PROMPTS[0], SamplingParams(**{**SAMPLED, "seed": 5}))
    first, second = (sample(drafters()["near model"](), [request], verification=rule)[0] for _ in range(2))
    assert first.token_ids == second.token_ids
    assert first.mode is Mode.DISTRIBUTION


def test_the_mode_says_what_is_equal() -> None:
    """Greedy, coupled and undrafted requests are exact, ratio rules keep the law; ``auto`` sees drafter and seed."""

    def mode(name: str, rule: Verification = "auto", **settings: Any) -> Mode:
        (done,) = sample(
            drafters()[name](), [(PROMPTS[0], SamplingParams(max_tokens=2, **settings))], verification=rule
        )
        return done.mode

    sampled = {"temperature": 1.0}
    assert mode("near model") is Mode.EXACT
    assert mode("near model", "block") is Mode.EXACT  # greedy
    assert mode("near model", **sampled) is Mode.DISTRIBUTION
    assert mode("near model", **sampled, seed=3) is Mode.EXACT
    assert mode("near model", **sampled, speculate=False) is Mode.EXACT
    assert mode("near model", "coupled", **sampled) is Mode.EXACT
    assert mode("near model", "block", **sampled, seed=3) is Mode.DISTRIBUTION
    assert mode("near model", **sampled, logits_processors=[lambda _ids, scores: scores]) is Mode.EXACT
    assert mode("ngram", **sampled) is Mode.EXACT
    assert mode("ngram", "one_hot", **sampled) is Mode.DISTRIBUTION
    assert mode("none", "block", **sampled) is Mode.EXACT


@pytest.mark.parametrize("rule", ["auto", "coupled", "token", "block", "one_hot"])
def test_one_request_can_switch_speculation_off(rule: Verification) -> None:
    """``speculate=False`` drafts nothing for that request, while its neighbour in the batch is drafted for."""
    params = SamplingParams(**{**SAMPLED, "seed": 2})
    off = SamplingParams(**{**SAMPLED, "seed": 2, "speculate": False})
    plain, drafted = sample(drafters()["near model"](), [(PROMPTS[0], off), (PROMPTS[0], params)], verification=rule)
    assert (plain.metrics.drafted, plain.mode) == (0, Mode.EXACT)
    assert drafted.metrics.drafted > 0
    assert plain.token_ids == sample(None, [(PROMPTS[0], params)])[0].token_ids


# --- Temperature ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", drafters())
def test_temperature_nearly_zero_is_zero(name: str) -> None:
    """Temperature 0, 1e-6 and top_k=1 agree for every drafter (sglang#39253, llama.cpp#5657)."""
    settings: list[dict[str, Any]] = [{"temperature": 0.0}, {"temperature": 1e-6}, {"temperature": 1.3, "top_k": 1}]
    outputs = []
    for setting in settings:
        params = SamplingParams(max_tokens=24, seed=1, **setting)
        outputs.append([done.token_ids for done in sample(drafters()[name](), [(p, params) for p in PROMPTS])])
    assert outputs[0] == outputs[1] == outputs[2]


@pytest.mark.parametrize(
    "rule", ["coupled", "block", *(pytest.param(rule, marks=pytest.mark.slow) for rule in ("token", "one_hot"))]
)
def test_entropy_rises_with_temperature(rule: Verification) -> None:
    """Output entropy at temperatures 0.1, 0.5, 1 and 2 rises and matches the law's: no path ignores temperature."""
    logits = torch.tensor([2.0, 1.0, 0.5, 0.0, -1.0, -2.0])
    measured, expected = [], []
    for temperature in (0.1, 0.5, 1.0, 2.0):
        engine = make_engine(
            LawTarget(lambda _ids: logits, 6),
            LawDrafter(lambda _ids: torch.zeros(6)),
            num_draft=2,
            config=EngineConfig(max_batch_size=128, verification=rule),
        )
        requests = [((0,), SamplingParams(max_tokens=12, temperature=temperature, seed=seed)) for seed in range(32)]
        counts = Counter(token for run in drive(engine, requests) for token in run.completion.token_ids)
        shares = torch.tensor([counts[token] / counts.total() for token in range(6)], dtype=torch.float64)
        measured.append(float(torch.special.entr(shares).sum()))
        expected.append(float(torch.special.entr((logits.double() / temperature).softmax(-1)).sum()))
    assert measured == sorted(measured)
    assert measured[0] < 0.05
    assert measured[3] > 1.5
    # 384 draws estimate an entropy of at most 1.8 to about 0.04; five times that is not seen by chance.
    assert all(abs(ours - true) < 0.2 for ours, true in zip(measured, expected, strict=True))


# --- The law ----------------------------------------------------------------------------------------------------------
#
# Chi-square tests over outputs of three tokens from a vocabulary of six (216 cells, those with an expectation below 5
# pooled), and over the marginal law of each place. The target forgets everything every three tokens, so that one
# request yields many independent samples and blocks reach across several. Seeds are fixed, so a passing test always
# passes; were they drawn anew, a correct program would fail one of the four tests of a case with odds below 4e-4.

SMALL = 6
THRESHOLD = 1e-4
NUM_REQUESTS = 64
SMALL_PROMPT = (1, 4, 3, 5, 0, 1, 4)

Context = tuple[int, ...]


class LawDrafter(DrafterBase):
    """Draws its tokens from a law of its own, and says so."""

    gives_probs = True

    def __init__(self, law: Callable[[Context], torch.Tensor], *, lies: bool = False) -> None:
        self._law = law
        self._lies = lies

    def propose(self, requests: Sequence[DraftRequest]) -> Sequence[Proposal]:
        """Sampled chains with their probabilities. A liar takes the most probable token instead."""
        return [self._propose(request) for request in requests]

    def _propose(self, request: DraftRequest) -> Proposal:
        history = tuple(request.token_ids)
        tokens: list[int] = []
        rows: list[torch.Tensor] = []
        for _ in range(request.limit):
            logits = self._law((*history, *tokens))
            token, probs, _ = request.sampler.draft(logits, history, tokens, len(history) + len(tokens))
            tokens.append(int(logits.argmax()) if self._lies else token)
            if probs is not None:
                rows.append(probs)
        return Proposal(tokens, torch.stack(rows) if rows else None)


def forgetful_law(seed: int) -> Callable[[Context], torch.Tensor]:
    """Logits that depend on the place within three output tokens, and on the last two ids within these three."""
    table = torch.randn(3, SMALL + 1, SMALL + 1, SMALL, generator=torch.Generator().manual_seed(seed))
    nothing = SMALL

    def law(ids: Context) -> torch.Tensor:
        place = (len(ids) - len(SMALL_PROMPT)) % 3
        last = ids[-1] if place > 0 else nothing
        return table[place, ids[-2] if place > 1 else nothing, last]

    return law


def reference_probs(logits: torch.Tensor, params: SamplingParams) -> list[float]:
    """[V] the law, from the definitions: temperature, then top-k, then top-p."""
    probs = (logits.double() / params.temperature).softmax(-1).tolist()
    order = sorted(range(len(probs)), key=lambda token: -probs[token])
    kept = order[: params.top_k or None]
    total, mass, nucleus = sum(probs[token] for token in kept), 0.0, []
    for token in kept:
        nucleus.append(token)
        mass += probs[token] / total
        if mass >= params.top_p:
            break
    total = sum(probs[token] for token in nucleus)
    return [probs[token] / total if token in nucleus else 0.0 for token in range(len(probs))]


def joint_law(law: Callable[[Context], torch.Tensor], **settings: Any) -> torch.Tensor:
    """[V, V, V] probability of three tokens."""
    params = SamplingParams(**settings)
    joint = torch.zeros((SMALL,) * 3, dtype=torch.float64)
    for first, first_prob in enumerate(reference_probs(law(SMALL_PROMPT), params)):
        for second, second_prob in enumerate(reference_probs(law((*SMALL_PROMPT, first)), params)):
            third = reference_probs(law((*SMALL_PROMPT, first, second)), params)
            joint[first, second] = first_prob * second_prob * torch.tensor(third, dtype=torch.float64)
    return joint


def chi_square_p(counts: torch.Tensor, probs: torch.Tensor) -> float:
    """Probability of a deviation as large as this by chance; 0 if something impossible was counted."""
    counts, expected = counts.flatten().double(), probs.flatten() * float(counts.sum())
    if bool((counts[expected == 0] > 0).any()):
        return 0.0
    rare = (expected < 5) & (expected > 0)
    common = expected >= 5
    observed, predicted = counts[common], expected[common]
    if bool(rare.any()):
        observed = torch.cat([observed, counts[rare].sum()[None]])
        predicted = torch.cat([predicted, expected[rare].sum()[None]])
    statistic = ((observed - predicted) ** 2 / predicted).sum()
    freedom = torch.tensor((len(predicted) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom, statistic / 2))


def marginal(joint: torch.Tensor, place: int) -> torch.Tensor:
    """[V] sums over the other two places."""
    return joint.sum([axis for axis in range(3) if axis != place])


def worst_p(counts: torch.Tensor, joint: torch.Tensor) -> float:
    """The smallest p-value of the joint law and of the three marginal laws."""
    marginals = [chi_square_p(marginal(counts, place), marginal(joint, place)) for place in range(3)]
    return min(chi_square_p(counts, joint), *marginals)


def sampled_counts(
    drafter: Drafter | None, rule: Verification, *, num_samples: int, policy: Policy | None = None, **settings: Any
) -> tuple[torch.Tensor, float]:
    """[V, V, V] how often each output of three tokens was generated, and the share of drafted tokens accepted."""
    engine = make_engine(
        LawTarget(forgetful_law(0), SMALL),
        drafter,
        num_draft=3,
        policy=policy,
        config=EngineConfig(max_batch_size=NUM_REQUESTS, verification=rule),
    )
    size = 3 * num_samples // NUM_REQUESTS
    requests = [(SMALL_PROMPT, SamplingParams(max_tokens=size, seed=seed, **settings)) for seed in range(NUM_REQUESTS)]
    done = [run.completion for run in drive(engine, requests)]
    tokens = torch.tensor([one.token_ids for one in done]).view(-1, 3)
    cells = tokens[:, 0] * SMALL * SMALL + tokens[:, 1] * SMALL + tokens[:, 2]
    counts = torch.bincount(cells, minlength=SMALL**3).view(SMALL, SMALL, SMALL)
    assert int(counts.sum()) == num_samples
    accepted = sum(one.metrics.accepted for one in done)
    return counts, accepted / max(1, sum(one.metrics.admitted for one in done))


def model_drafter() -> Drafter:
    """A tiny model over the small vocabulary, which knows nothing of the target's law."""
    model = tiny_model(seed=4, vocab_size=SMALL, hidden_size=16, num_hidden_layers=1, num_key_value_heads=4)
    return ModelDrafter(model, target_vocab_size=SMALL)


CASES: dict[str, tuple[Callable[[], Drafter], Verification, dict[str, Any]]] = {
    "model, token": (model_drafter, "token", {"temperature": 1.4}),
    "model, block": (model_drafter, "block", {"temperature": 1.4}),
    "model, one-hot": (model_drafter, "one_hot", {"temperature": 1.4}),
    "model, coupled": (model_drafter, "coupled", {"temperature": 1.4}),
    "lookup, one-hot": (NGramDrafter, "one_hot", {"temperature": 0.6}),
    "lookup, coupled": (NGramDrafter, "coupled", {"temperature": 0.6}),
    "lookup, block gives way": (NGramDrafter, "block", {"temperature": 0.6}),
    "top-k, token": (lambda: LawDrafter(forgetful_law(1)), "token", {"temperature": 0.9, "top_k": 4}),
    "top-k, block": (lambda: LawDrafter(forgetful_law(1)), "block", {"temperature": 0.9, "top_k": 4}),
    "top-k and top-p, token": (lambda: LawDrafter(forgetful_law(1)), "token", {"top_k": 5, "top_p": 0.82}),
    "top-k and top-p, block": (lambda: LawDrafter(forgetful_law(1)), "block", {"top_k": 5, "top_p": 0.82}),
}


def assert_law_holds(case: str, num_samples: int) -> None:
    """Sample a case and test it."""
    make_drafter, rule, settings = CASES[case]
    settings = {"temperature": 1.0, **settings}
    counts, accepted = sampled_counts(make_drafter(), rule, num_samples=num_samples, **settings)
    assert 0.05 < accepted < 0.9
    assert worst_p(counts, joint_law(forgetful_law(0), **settings)) > THRESHOLD


@pytest.mark.parametrize("case", ["model, token", "model, block", "lookup, one-hot"])
def test_a_drafter_leaves_the_law_alone(case: str) -> None:
    """Drafted tokens follow the target's joint law (a quick look, 768 samples)."""
    assert_law_holds(case, 768)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_every_drafter_and_rule_leaves_the_law_alone(case: str) -> None:
    """The same for all rules and drafters and 6144 samples; truncation is on both sides (vLLM#10198, sglang#36173)."""
    assert_law_holds(case, 6144)


def test_a_drafter_that_lies_about_its_law_is_caught() -> None:
    """Most probable tokens verified with the probabilities of sampled ones bend the law, and the test sees it.

    This is the fault of transformers#32867 and jaymody/speculative-sampling#3. Without the false probabilities the same
    tokens are harmless.
    """
    joint = joint_law(forgetful_law(0), temperature=0.9)
    liar = LawDrafter(forgetful_law(1), lies=True)
    counts, _ = sampled_counts(liar, "token", num_samples=384, temperature=0.9)
    assert worst_p(counts, joint) < 1e-12
    counts, _ = sampled_counts(liar, "one_hot", num_samples=384, temperature=0.9)
    assert worst_p(counts, joint) > THRESHOLD


class Peeking(LawDrafter):
    """Its survival estimates give away the tokens: certain for small ids, hopeless for large ones."""

    def propose(self, requests: Sequence[DraftRequest]) -> Sequence[Proposal]:
        """Sampled chains with treacherous estimates."""
        proposals = []
        for proposal in super().propose(requests):
            good = [float(token < SMALL // 2) for token in proposal.token_ids]
            survival = list(itertools.accumulate(good, min))
            proposals.append(Proposal(proposal.token_ids, proposal.probs, survival))
        return proposals


class CutsBeforeDoubt:
    """Executes a draft up to its first doubtful token; ``reveals`` says openly that it looks before it decides."""

    def __init__(self, *, reveals: bool) -> None:
        self._reveals = reveals

    def limits(self, chains: Sequence[ChainView]) -> Sequence[int]:
        """Three tokens each."""
        return [3] * len(chains)

    def admit(self, frontier: Frontier) -> None:
        """Admit while the next estimate is good."""
        for index in range(len(frontier)):
            if self._reveals:
                frontier.reveal(index)
            while (frontier.survival(index) or 0.0) > 0.5:
                frontier.admit(index)

    def observe(self, report: RoundReport) -> None:
        """Learn nothing."""


@pytest.mark.parametrize("rule", ["token", pytest.param("block", marks=pytest.mark.slow)])
def test_looking_ahead_costs_acceptance_not_exactness(rule: Verification) -> None:
    """A policy that looks at what it decides about, and says so, is verified by the one-hot rule and bends nothing.

    One that hides it (through estimates that depend on the token) bends the law, and the test sees it: this is the
    counter-example of DSpark, appendix A.
    """
    joint = joint_law(forgetful_law(0), temperature=0.9)

    def counts(*, reveals: bool) -> torch.Tensor:
        drafter, policy = Peeking(forgetful_law(1)), CutsBeforeDoubt(reveals=reveals)
        return sampled_counts(drafter, rule, num_samples=768, policy=policy, temperature=0.9)[0]

    assert worst_p(counts(reveals=True), joint) > THRESHOLD
    assert worst_p(counts(reveals=False), joint) < 1e-6


@pytest.mark.parametrize(("num_samples", "bias"), [(768, 0.1), pytest.param(6144, 0.03, marks=pytest.mark.slow)])
def test_a_small_bias_is_caught(num_samples: int, bias: float) -> None:
    """The tests have power: samples of the law with some mass moved from each most probable token are rejected."""
    counts, _ = sampled_counts(NGramDrafter(), "one_hot", num_samples=num_samples, temperature=1.0)
    law = forgetful_law(0)

    def biased(ids: Context) -> torch.Tensor:
        probs = law(ids).double().softmax(-1)
        moved = torch.zeros_like(probs)
        moved[probs.argmax()], moved[probs.argmin()] = -bias, bias
        return (probs + moved).log()

    joint, other = joint_law(law, temperature=1.0), joint_law(biased, temperature=1.0)
    assert (
        max(0.5 * float((marginal(joint, place) - marginal(other, place)).abs().sum()) for place in range(3))
        < 1.2 * bias
    )
    assert worst_p(counts, joint) > THRESHOLD
    assert worst_p(counts, other) < THRESHOLD


# --- Log-probabilities ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["none", "near model", "ngram", "random tokens"])
@pytest.mark.parametrize("settings", [{}, {"temperature": 0.8, "seed": 4, "top_k": 9, "frequency_penalty": 0.5}])
def test_logprobs_are_those_of_a_teacher_forced_forward(name: str, settings: dict[str, Any]) -> None:
    """Accepted, corrected and bonus tokens carry the raw model's log-probability (vLLM#17876, llama.cpp#27972)."""
    params = SamplingParams(max_tokens=24, logprobs=5, **settings)
    done = sample(drafters()[name](), [(prompt, params) for prompt in PROMPTS])
    if name == "near model":
        kinds = Counter(one.metrics.accepted > 0 for one in done)
        assert kinds[True] == len(done)
    for one in done:
        assert one.logprobs is not None
        assert len(one.logprobs) == len(one.token_ids)
        ids = torch.tensor([[*one.prompt_token_ids, *one.token_ids]])
        with torch.inference_mode():
            logits = tiny_model()(ids).logits[0, len(one.prompt_token_ids) - 1 : -1]
        expected = logits.double().log_softmax(-1)
        for place, (token, entry) in enumerate(zip(one.token_ids, one.logprobs, strict=True)):
            assert entry.token_id == token
            assert entry.logprob == pytest.approx(float(expected[place, token]), abs=1e-5)
            top = expected[place].topk(5)
            assert [token for token, _ in entry.top] == top.indices.tolist()
            assert [value for _, value in entry.top] == pytest.approx(top.values.tolist(), abs=1e-5)
        assert min(entry.logprob for entry in one.logprobs) < -1e-3


@pytest.mark.parametrize("count", [None, 0, 3, 100])
def test_as_many_logprobs_as_asked_for(count: int | None) -> None:
    """None gives none, 0 the emitted tokens only, and more than the vocabulary the whole vocabulary."""
    (done,) = sample(drafters()["near model"](), [(PROMPTS[0], SamplingParams(max_tokens=6, logprobs=count))])
    if count is None:
        assert done.logprobs is None
        return
    assert done.logprobs is not None
    assert {len(entry.top) for entry in done.logprobs} == {min(count, VOCAB)}
    for entry in done.logprobs:
        assert count == 0 or entry.top[0] == (entry.token_id, entry.logprob)
        assert math.fsum(math.exp(value) for _, value in entry.top) < 1 + 1e-5


def test_sampling_follows_the_seed_not_the_draft_text() -> None:
    """An oracle and an always-wrong drafter, told the greedy text, leave a sampled request's tokens alone."""
    truth = [1, 2, 3, *decode(make_engine(tiny_model()), (1, 2, 3), SamplingParams(max_tokens=30)).token_ids]
    params = SamplingParams(temperature=1.0, seed=9, max_tokens=24)
    outputs = {
        sample(drafter, [((1, 2, 3), params)])[0].token_ids
        for drafter in (None, OracleDrafter([truth]), AdversaryDrafter([truth], VOCAB))
    }
    assert len(outputs) == 1
    assert list(outputs.pop()) != truth[3:27]


def test_a_sure_law_is_followed_at_any_temperature() -> None:
    """Where one token has nearly all the mass, sampling gives it under every rule, drafted rightly, wrongly or not."""
    truth = [1, *range(10, 40)]
    for rule in ("coupled", "token", "block", "one_hot"):
        for drafter in (None, OracleDrafter([truth]), AdversaryDrafter([truth], VOCAB)):
            engine = make_engine(scripted(truth, VOCAB), drafter, num_draft=4, config=EngineConfig(verification=rule))
            done = decode(engine, (1,), SamplingParams(max_tokens=20, temperature=1.0, seed=0))
            assert list(done.token_ids) == truth[1:21]
