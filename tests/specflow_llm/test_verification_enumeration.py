"""The exact law of what a round emits, summed over every draft and every outcome of the tests: no sampling noise.

The vocabulary and the drafts are tiny, the laws are random and depend on the context, and the sums are in fp64. A round
is enumerated by running the module's own decisions at one point inside every cell of the uniforms (a test passes below
its level and fails above it). What a round leaves short is continued by the target's law. The result must equal the
target's law of the same length to 1e-12 in total variation. The same enumeration must find each of the known mistakes.
"""

from __future__ import annotations

import itertools
import math
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import pytest
import torch

from specflow_llm import verification
from specflow_llm.sampling import truncate
from specflow_llm.verification import (
    block_acceptance,
    one_hot_acceptance,
    residual,
    token_acceptance,
    verify_sequential,
)

Tokens = tuple[int, ...]
Law = dict[Tokens, float]
Decision = tuple[int, torch.Tensor]
"""Number accepted and the [V] law of the next token."""

EXACT = 1e-12
STOP = 1


@dataclass
class Model:
    """Random context-dependent law over ``vocab_size`` tokens, truncated like a request's."""

    seed: int
    vocab_size: int
    top_k: int = 0
    top_p: float = 1.0
    _rows: dict[Tokens, torch.Tensor] = field(default_factory=dict)

    def __call__(self, context: Tokens) -> torch.Tensor:
        """[V] fp64 probabilities after ``context``."""
        if context not in self._rows:
            generator = torch.Generator().manual_seed(zlib.crc32(repr((self.seed, context)).encode()))
            logits = 1.5 * torch.randn(self.vocab_size, generator=generator, dtype=torch.float64)
            self._rows[context] = truncate(logits[None], self.top_k, self.top_p)[0].softmax(-1)
        return self._rows[context]


@dataclass(frozen=True)
class Rule:
    """One acceptance rule as the enumeration needs it."""

    levels: Callable[[torch.Tensor, torch.Tensor, Tokens], torch.Tensor]
    decide: Callable[[torch.Tensor, torch.Tensor, Tokens, Sequence[float]], Decision]


def one_hot_levels(target: torch.Tensor, draft: torch.Tensor, ids: Tokens) -> torch.Tensor:
    """One-hot acceptance in the signature of the ratio rules."""
    del draft
    return one_hot_acceptance(target, ids)


def one_hot_decide(target: torch.Tensor, draft: torch.Tensor, ids: Tokens, uniforms: Sequence[float]) -> Decision:
    """One-hot decision in the signature of the ratio rules."""
    del draft
    return verification._decide_one_hot(target, ids, uniforms)


def block_levels(target: torch.Tensor, draft: torch.Tensor, ids: Tokens) -> torch.Tensor:
    """The levels of the block rule without the survival."""
    return block_acceptance(target, draft, ids)[0]


TOKEN = Rule(token_acceptance, verification._decide_token)
BLOCK = Rule(block_levels, verification._decide_block)
ONE_HOT = Rule(one_hot_levels, one_hot_decide)
RULES = {"token": TOKEN, "block": BLOCK, "one_hot": ONE_HOT}

Lengths = Callable[[Tokens, Model], int]
"""How many tokens of a draft are sent to verification."""


def whole(ids: Tokens, draft: Model) -> int:
    """Verify the whole draft."""
    del draft
    return len(ids)


def confident(ids: Tokens, draft: Model) -> int:
    """Stop before the first token whose law, known before it is drawn, has no clear favourite."""
    for index in range(len(ids)):
        if float(draft(ids[:index]).max()) < 0.55:
            return index
    return len(ids)


def looks_ahead(ids: Tokens, draft: Model) -> int:
    """Stop before the first token that is itself improbable: the mistake of scheduling by the drawn token."""
    for index, token in enumerate(ids):
        if float(draft(ids[:index])[token]) < 0.4:
            return index
    return len(ids)


def drafts(draft: Model, length: int, *, sampled: bool) -> Iterator[tuple[Tokens, float]]:
    """Every draft with its probability; the most probable one alone if not sampled."""
    if not sampled:
        ids: Tokens = ()
        for _ in range(length):
            ids = (*ids, int(draft(ids).argmax()))
        yield ids, 1.0
        return
    for ids in itertools.product(range(draft.vocab_size), repeat=length):
        probability = math.prod(float(draft(ids[:index])[token]) for index, token in enumerate(ids))
        if probability > 0.0:
            yield ids, probability


Interval = tuple[float, float]
"""Where a uniform is known to lie."""


def cells(
    rule: Rule, target: torch.Tensor, draft: torch.Tensor, ids: Tokens, known: Sequence[Interval]
) -> Iterator[tuple[Decision, float, tuple[Interval, ...]]]:
    """Every decision on one draft with its probability and cell, for uniforms in the ``known`` intervals."""
    levels = rule.levels(target, draft, ids).tolist()
    sides = [
        ((low, min(level, high)), (max(level, low), high)) for level, (low, high) in zip(levels, known, strict=True)
    ]
    for cell in itertools.product(*sides):
        weight = math.prod(
            max(0.0, high - low) / (known_high - known_low)
            for (low, high), (known_low, known_high) in zip(cell, known, strict=True)
        )
        if weight > 0.0:
            yield rule.decide(target, draft, ids, [(low + high) / 2 for low, high in cell]), weight, cell


def outcomes(rule: Rule, target: torch.Tensor, draft: torch.Tensor, ids: Tokens) -> Iterator[tuple[Decision, float]]:
    """Every decision on one draft with its probability, for fresh uniforms."""
    for decision, weight, _ in cells(rule, target, draft, ids, [(0.0, 1.0)] * len(ids)):
        yield decision, weight


def rows(model: Model, ids: Tokens, count: int) -> torch.Tensor:
    """[count, V]: the law after 0, 1, ... tokens of ``ids``."""
    return torch.stack([model(ids[:index]) for index in range(count)])


def emitted_law(
    rule: Rule, target: Model, draft: Model, length: int, *, sampled: bool = True, lengths: Lengths = whole
) -> tuple[Law, float]:
    """The law of the tokens one round emits, and the mean number of accepted ones."""
    law: Law = defaultdict(float)
    mean = 0.0
    for ids, probability in drafts(draft, length, sampled=sampled):
        kept = ids[: lengths(ids, draft)]
        target_probs, draft_probs = rows(target, kept, len(kept) + 1), rows(draft, kept, len(kept) + 1)[:-1]
        for (accepted, last), weight in outcomes(rule, target_probs, draft_probs, kept):
            mean += probability * weight * accepted
            for token, chance in enumerate(last.tolist()):
                law[*kept[:accepted], token] += probability * weight * chance
    return law, mean


def cut(tokens: Tokens, *, stops: bool) -> Tokens:
    """The tokens up to and including the first stop token."""
    return tokens[: tokens.index(STOP) + 1] if stops and STOP in tokens else tokens


def continued(law: Law, target: Model, length: int, *, stops: bool) -> Law:
    """Cut every block at its first stop token and continue the others to ``length`` tokens by the target's law."""
    result: Law = defaultdict(float)
    pending = [(cut(tokens, stops=stops), probability) for tokens, probability in law.items() if probability > 0.0]
    while pending:
        tokens, probability = pending.pop()
        if len(tokens) >= length or (stops and tokens and tokens[-1] == STOP):
            result[tokens] += probability
        else:
            pending += [
                ((*tokens, token), probability * chance)
                for token, chance in enumerate(target(tokens).tolist())
                if chance > 0.0
            ]
    return result


def distance(law: Law, target: Model, length: int, *, stops: bool = False) -> float:
    """Total variation between what a round leads to and the target's own law."""
    ours = continued(law, target, length + 1, stops=stops)
    plain = continued({(): 1.0}, target, length + 1, stops=stops)
    return 0.5 * sum(abs(ours.get(tokens, 0.0) - plain.get(tokens, 0.0)) for tokens in ours.keys() | plain.keys())


SIZES = [(2, 4), (3, 3), (4, 2)]
Truncation = tuple[int, float]
"""top-k (0 is off) and top-p."""
TRUNCATIONS: dict[str, tuple[Truncation, Truncation]] = {
    "full": ((0, 1.0), (0, 1.0)),
    "top-k": ((2, 1.0), (2, 1.0)),
    "top-p": ((0, 0.7), (0, 0.7)),
    "both": ((3, 0.8), (3, 0.8)),
    "target only": ((2, 1.0), (0, 1.0)),
    "draft only": ((0, 1.0), (0, 0.6)),
}


def pair(seed: int, vocab_size: int, truncation: str = "full") -> tuple[Model, Model]:
    """A target and an unrelated draft model."""
    for_target, for_draft = TRUNCATIONS[truncation]
    return Model(2 * seed, vocab_size, *for_target), Model(2 * seed + 1, vocab_size, *for_draft)


@pytest.mark.parametrize("stops", [False, True], ids=["no stop", "stop token"])
@pytest.mark.parametrize("truncation", TRUNCATIONS)
@pytest.mark.parametrize("rule", RULES)
def test_sampled_drafts_leave_the_law_unchanged(rule: str, truncation: str, stops: bool) -> None:  # noqa: FBT001
    """Each rule emits the target's law for sampled drafts, truncated or not, also when blocks end at a stop token."""
    for seed, (vocab_size, length) in enumerate(SIZES):
        target, draft = pair(seed, vocab_size, truncation)
        law, _ = emitted_law(RULES[rule], target, draft, length)
        assert distance(law, target, length, stops=stops) < EXACT


@pytest.mark.parametrize("rule", RULES)
def test_four_tokens_of_four(rule: str) -> None:
    """The largest case: four drafted tokens over a vocabulary of four, with a stop token."""
    target, draft = pair(11, 4, "both")
    law, _ = emitted_law(RULES[rule], target, draft, 4)
    assert distance(law, target, 4, stops=True) < EXACT


@pytest.mark.parametrize("truncation", TRUNCATIONS)
def test_most_probable_drafts_leave_the_law_unchanged(truncation: str) -> None:
    """The one-hot rule is exact for drafts that are not sampled at all."""
    for seed, (vocab_size, length) in enumerate(SIZES):
        target, draft = pair(seed, vocab_size, truncation)
        law, _ = emitted_law(ONE_HOT, target, draft, length, sampled=False)
        assert distance(law, target, length, stops=True) < EXACT


@pytest.mark.parametrize("sampled", [True, False], ids=["sampled", "most probable"])
@pytest.mark.parametrize("truncation", TRUNCATIONS)
def test_sample_and_match_leaves_the_law_unchanged(truncation: str, sampled: bool) -> None:  # noqa: FBT001
    """Matching the target's own draws is exact for any draft, and accepts as often as the one-hot rule."""
    for seed, (vocab_size, length) in enumerate(SIZES):
        target, draft = pair(seed, vocab_size, truncation)
        law: Law = defaultdict(float)
        mean = 0.0
        for ids, probability in drafts(draft, length, sampled=sampled):
            target_rows = rows(target, ids, length + 1).tolist()
            for choices in itertools.product(range(vocab_size), repeat=length + 1):
                weight = probability * math.prod(row[token] for row, token in zip(target_rows, choices, strict=True))
                if weight > 0.0:
                    verdict = verify_sequential(choices.__getitem__, ids)
                    assert verdict.replacement is not None
                    law[*ids[: verdict.num_accepted], verdict.replacement] += weight
                    mean += weight * verdict.num_accepted
        assert distance(law, target, length, stops=True) < EXACT
        assert mean == pytest.approx(emitted_law(ONE_HOT, target, draft, length, sampled=sampled)[1], abs=EXACT)


@pytest.mark.parametrize("rule", RULES)
def test_lengths_chosen_before_the_token_leave_the_law_unchanged(rule: str) -> None:
    """Ending a draft by what is known before its next token is drawn keeps every rule exact."""
    ended_early = 0.0
    for seed, (vocab_size, length) in enumerate(SIZES):
        target, draft = pair(seed, vocab_size)
        law, _ = emitted_law(RULES[rule], target, draft, length, lengths=confident)
        ended_early += sum(p for ids, p in drafts(draft, length, sampled=True) if confident(ids, draft) < length)
        assert distance(law, target, length, stops=True) < EXACT
    assert ended_early > 0.5


def test_one_hot_is_immune_to_looking_ahead() -> None:
    """Where lengths are chosen by the drawn tokens, the one-hot rule stays exact."""
    for seed, (vocab_size, length) in enumerate(SIZES):
        target, draft = pair(seed, vocab_size)
        law, _ = emitted_law(ONE_HOT, target, draft, length, lengths=looks_ahead)
        assert distance(law, target, length) < EXACT


@pytest.mark.parametrize("rule", RULES)
def test_placeholder_ids_end_the_draft(rule: str) -> None:
    """A draft padded with ids that no law can produce is verified as the shorter draft (vLLM issue 46533)."""
    for placeholder in (-1, 3, 10**6):
        target, draft = pair(5, 3)
        law: Law = defaultdict(float)
        for ids, probability in drafts(draft, 2, sampled=True):
            target_probs = torch.cat((rows(target, ids, 3), torch.full((2, 3), 1 / 3, dtype=torch.float64)))
            draft_probs = torch.cat((rows(draft, ids, 2), torch.tensor([[0.9, 0.1, 0.0]] * 2, dtype=torch.float64)))
            padded = (*ids, placeholder, placeholder)
            for (accepted, last), weight in outcomes(RULES[rule], target_probs, draft_probs, padded):
                assert accepted <= 2
                for token, chance in enumerate(last.tolist()):
                    law[*ids[:accepted], token] += probability * weight * chance
        assert distance(law, target, 2) < EXACT


def test_block_rule_accepts_more_than_token_rule() -> None:
    """The block rule accepts at least as much as the token rule, and more on average (Sun et al. 2024, Theorem 2)."""
    gains = []
    for seed in range(8):
        target, draft = pair(seed, 3)
        token, block = (emitted_law(rule, target, draft, 3)[1] for rule in (TOKEN, BLOCK))
        assert block >= token - EXACT
        gains.append(block - token)
    assert sum(gains) / len(gains) > 0.02


def test_block_rule_matches_the_papers_example() -> None:
    """Target (1/3, 2/3), draft (2/3, 1/3), two tokens: 10/9 accepted by the token rule, 11/9 by the block rule."""
    target, draft = Model(0, 2), Model(1, 2)
    for length in range(3):
        for context in itertools.product(range(2), repeat=length):
            target._rows[context] = torch.tensor([1 / 3, 2 / 3], dtype=torch.float64)
            draft._rows[context] = torch.tensor([2 / 3, 1 / 3], dtype=torch.float64)
    assert emitted_law(TOKEN, target, draft, 2)[1] == pytest.approx(10 / 9, abs=EXACT)
    assert emitted_law(BLOCK, target, draft, 2)[1] == pytest.approx(11 / 9, abs=EXACT)


def test_equal_laws_accept_everything() -> None:
    """A draft model equal to the target is never rejected by the ratio rules, where 0/0 occurs at every position."""
    for seed, (vocab_size, length) in enumerate(SIZES):
        target, _ = pair(seed, vocab_size, "top-p")
        for rule in (TOKEN, BLOCK):
            law, mean = emitted_law(rule, target, target, length)
            assert mean == pytest.approx(length, abs=EXACT)
            assert distance(law, target, length) < EXACT


def two_rounds_law(rule: Rule, target: Model, draft: Model, length: int, *, reuse: bool) -> Law:
    """The law of what two rounds emit; the second may use again the uniforms that its positions had in the first."""
    law: Law = defaultdict(float)
    for first, probability in drafts(draft, length, sampled=True):
        fresh = [(0.0, 1.0)] * length
        first_rows = rows(target, first, length + 1), rows(draft, first, length)
        for (accepted, last), weight, cell in cells(rule, *first_rows, first, fresh):
            for token, chance in enumerate(last.tolist()):
                if chance > 0.0:
                    done = (*first[:accepted], token)
                    known = [*(cell[len(done) :] if reuse else ()), *fresh][:length]
                    for tokens, more in second_round(rule, target, draft, done, known):
                        law[tokens] += probability * weight * chance * more
    return law


def second_round(
    rule: Rule, target: Model, draft: Model, done: Tokens, known: Sequence[Interval]
) -> Iterator[tuple[Tokens, float]]:
    """What is there after one more round, with its probability."""
    for ids in itertools.product(range(draft.vocab_size), repeat=len(known)):
        contexts = [(*done, *ids[:index]) for index in range(len(ids) + 1)]
        target_probs = torch.stack([target(context) for context in contexts])
        draft_probs = torch.stack([draft(context) for context in contexts[:-1]])
        probability = math.prod(float(row[token]) for row, token in zip(draft_probs, ids, strict=True))
        for (accepted, last), weight, _ in cells(rule, target_probs, draft_probs, ids, known):
            for token, chance in enumerate(last.tolist()):
                yield (*contexts[accepted], token), probability * weight * chance


@pytest.mark.parametrize("rule", ["token", "block"])
def test_two_rounds_with_fresh_uniforms_leave_the_law_unchanged(rule: str) -> None:
    """Rounds compose: two in a row follow the target's law when the second draws its own uniforms."""
    target, draft = pair(0, 3)
    assert distance(two_rounds_law(RULES[rule], target, draft, 2, reuse=False), target, 5) < EXACT


def test_token_rule_may_reuse_the_uniforms_of_a_position() -> None:
    """Under the token rule nothing after the first rejection matters, so its uniforms are as good as new."""
    target, draft = pair(0, 3)
    assert distance(two_rounds_law(TOKEN, target, draft, 2, reuse=True), target, 5) < EXACT


# --- Known mistakes: the enumeration must see each of them ------------------------------------------------------------


def decide_block_with_token_residual(
    target: torch.Tensor, draft: torch.Tensor, ids: Tokens, uniforms: Sequence[float]
) -> Decision:
    """The block rule's prefix with the token rule's residual (vllm-ascend issue 7807)."""
    accepted, law = verification._decide_block(target, draft, ids, uniforms)
    return accepted, law if accepted == len(ids) else residual(target[accepted], draft[accepted])


def decide_block_until_first_failure(
    target: torch.Tensor, draft: torch.Tensor, ids: Tokens, uniforms: Sequence[float]
) -> Decision:
    """The block rule's levels, but ending at the first failed test instead of the last passed one."""
    levels, survival = block_acceptance(target, draft, ids)
    accepted = verification._first_failure(levels.tolist(), uniforms)
    if accepted == len(ids):
        return accepted, target[accepted]
    return accepted, residual(target[accepted], draft[accepted], float(survival[accepted]))


def decide_token_with_target_residual(
    target: torch.Tensor, draft: torch.Tensor, ids: Tokens, uniforms: Sequence[float]
) -> Decision:
    """The token rule, but a rejected token is replaced from the target's law itself."""
    accepted, _ = verification._decide_token(target, draft, ids, uniforms)
    return accepted, target[accepted]


def worst(rule: Rule, *, sampled: bool = True, lengths: Lengths = whole) -> float:
    """The largest distance from the target's law over a few random pairs."""
    distances = []
    for seed in range(4):
        target, draft = pair(seed, 3)
        law, _ = emitted_law(rule, target, draft, 3, sampled=sampled, lengths=lengths)
        distances.append(distance(law, target, 3))
    return max(distances)


def test_catches_token_residual_in_the_block_rule() -> None:
    """The block rule with the token rule's residual is off by more than 1e-3: small enough for loose tests to miss."""
    error = worst(Rule(block_levels, decide_block_with_token_residual))
    assert 1e-3 < error < 0.1


def test_catches_first_failure_in_the_block_rule() -> None:
    """The block rule that ends at the first failed test is off by more than 0.1."""
    assert worst(Rule(block_levels, decide_block_until_first_failure)) > 0.1


def test_catches_target_law_as_residual() -> None:
    """The token rule that replaces from the target's own law is off by more than 0.05."""
    assert worst(Rule(token_acceptance, decide_token_with_target_residual)) > 0.05


@pytest.mark.parametrize("rule", ["token", "block"])
def test_catches_soft_law_for_most_probable_drafts(rule: str) -> None:
    """A ratio rule that is told the softmax of a draft that was not sampled is off by more than 0.1."""
    assert worst(RULES[rule], sampled=False) > 0.1


@pytest.mark.parametrize("rule", ["token", "block"])
def test_catches_lengths_that_look_ahead(rule: str) -> None:
    """A ratio rule whose draft ends by the token that would be next is off by more than 0.05."""
    assert worst(RULES[rule], lengths=looks_ahead) > 0.05


def test_catches_uniforms_keyed_by_position_alone_in_the_block_rule() -> None:
    """Under the block rule, using the uniforms of a position again is off by more than 0.1: they are known to fail.

    This is why :func:`specflow_llm.sampling.lane` keys them by the round as well.
    """
    target, draft = pair(0, 3)
    assert distance(two_rounds_law(BLOCK, target, draft, 2, reuse=True), target, 3) > 0.1


def test_catches_truncation_of_one_side_only_after_drafting() -> None:
    """Recording another law than the one drafted from (here before truncation) is off by more than 1e-2."""
    distances = []
    for seed in range(4):
        target, draft = pair(seed, 3, "draft only")
        untruncated = Model(draft.seed, 3)
        law: Law = defaultdict(float)
        for ids, probability in drafts(draft, 3, sampled=True):
            for (accepted, last), weight in outcomes(TOKEN, rows(target, ids, 4), rows(untruncated, ids, 3), ids):
                for token, chance in enumerate(last.tolist()):
                    law[*ids[:accepted], token] += probability * weight * chance
        distances.append(distance(law, target, 3))
    assert max(distances) > 1e-2
