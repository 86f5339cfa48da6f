"""Exact laws: every rule, drafter, truncation, stop and policy preserves the target; every known mistake does not."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from specflow.admission import Frontier
from specflow.errors import BackendContractError
from specflow.policies import Adaptive, CostTable, Fixed, Threshold
from specflow.protocols import Policy
from specflow.testing import EnumeratedLaw, SpeculativeProcess, enumerate_law
from specflow.types import ChainId, ChainView, PhaseSeconds, RoundReport
from specflow.verifiers import (
    Law,
    PrefixOutcome,
    PrefixRule,
    block_rule,
    one_hot_rule,
    residual,
    token_rule,
)

EXACT = 1e-12
LawFunction = Callable[[tuple[int, ...]], Law]
RULES: dict[str, PrefixRule] = {"token": token_rule, "block": block_rule, "one_hot": one_hot_rule}


# ------------------------------------------------------------------------------------------------- targets and drafters


def random_law(seed: int, vocabulary: int = 3) -> LawFunction:
    """A law over a small vocabulary that depends on the whole prefix."""

    def law(prefix: tuple[int, ...]) -> Law:
        rng = random.Random(f"{seed} {prefix}")
        return normalised([rng.random() ** 2 + 0.02 for _ in range(vocabulary)])

    return law


def normalised(weights: Sequence[float]) -> list[float]:
    """Weights as a law."""
    total = sum(weights)
    return [weight / total for weight in weights]


def argmax(law: LawFunction) -> LawFunction:
    """Always the most probable item."""

    def chosen(prefix: tuple[int, ...]) -> Law:
        probabilities = law(prefix)
        best = max(range(len(probabilities)), key=probabilities.__getitem__)
        return [1.0 if item == best else 0.0 for item in range(len(probabilities))]

    return chosen


def top_k(law: LawFunction, count: int = 2) -> LawFunction:
    """Only the most probable items."""

    def cut(prefix: tuple[int, ...]) -> Law:
        probabilities = law(prefix)
        least = sorted(probabilities, reverse=True)[count - 1]
        return normalised([chance if chance >= least else 0.0 for chance in probabilities])

    return cut


def top_p(law: LawFunction, mass: float = 0.7) -> LawFunction:
    """Only the most probable items that make up the mass."""

    def cut(prefix: tuple[int, ...]) -> Law:
        probabilities = law(prefix)
        kept: list[int] = []
        for item in sorted(range(len(probabilities)), key=probabilities.__getitem__, reverse=True):
            if sum(probabilities[other] for other in kept) < mass:
                kept.append(item)
        return normalised([chance if item in kept else 0.0 for item, chance in enumerate(probabilities)])

    return cut


TARGET, DRAFT = random_law(1), random_law(2)
PAIRS: dict[str, tuple[LawFunction, LawFunction]] = {
    "soft": (TARGET, DRAFT),
    "argmax": (TARGET, argmax(DRAFT)),
    "top-k": (top_k(TARGET), top_k(DRAFT)),
    "top-k of the target only": (top_k(TARGET), DRAFT),
    "top-p": (top_p(TARGET), top_p(DRAFT)),
    "top-p and argmax": (top_p(TARGET), argmax(top_p(DRAFT))),
}


def confidence(prefix: tuple[int, ...]) -> float:
    """How sure the drafter is of its next item, before drawing it."""
    return max(DRAFT(prefix))


# ------------------------------------------------------------------------------------------------------------- policies


def seconds(width: int) -> float:
    """Executions get dearer quickly enough for lengths to matter."""
    return 1.0 + 0.3 * width


def experienced(*, padded: bool = False) -> Policy:
    """An adaptive policy with known costs and a good past, so that it drafts and schedules from the first round on."""
    costs = CostTable()
    for width in range(1, 12):
        costs.observe(width, seconds(width))
        costs.observe(width, seconds(width))
    policy = Adaptive(3, costs=costs, padded=padded)
    view = ChainView(ChainId(99), 0, 3)
    for accepted in (3, 1, 3, 2, 3, 0, 3):
        policy.limits([view])
        policy.observe(
            RoundReport(
                index=0,
                chain_ids=(view.chain_id,),
                limits=(3,),
                drafted=(3,),
                admitted=(3,),
                accepted=(accepted,),
                emitted=(accepted + 1,),
                survival=((0.8, 0.6, 0.5),),
                seconds=PhaseSeconds(execute=seconds(4)),
            )
        )
    return policy


POLICIES: dict[str, Callable[[], Policy]] = {
    "fixed": lambda: Fixed(3),
    "threshold": lambda: Threshold(3, 0.4),
    "adaptive": experienced,
    "adaptive, padded": lambda: experienced(padded=True),
}


def stops(prefix: tuple[int, ...]) -> bool:
    """Item 1 ends a sequence."""
    return prefix[-1] == 1


def process(pair: str, rule: PrefixRule) -> SpeculativeProcess:
    """A target and drafter under a rule."""
    target, draft = PAIRS[pair]
    return SpeculativeProcess(target=target, draft=draft, rule=rule, survival=confidence, seconds=seconds)


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_every_rule_preserves_the_target_under_every_policy(
    rule: PrefixRule, pair: str, policy: Callable[[], Policy]
) -> None:
    """The law of three items equals plain sampling to 1e-12, and drafts do save rounds."""
    result = enumerate_law(process(pair, rule), policy, num_items=3)
    assert sum(result.law.values()) == pytest.approx(1.0, abs=EXACT)
    assert result.total_variation < EXACT
    assert result.items_per_round > 1.0


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_stopping_inside_a_block_preserves_the_target(rule: PrefixRule, policy: Callable[[], Policy]) -> None:
    """Sequences cut at their first stop item, wherever it falls in a block, keep the law of plain sampling."""
    result = enumerate_law(replace(process("soft", rule), stop=stops), policy, num_items=3)
    assert any(len(chain) < 3 for (chain,) in result.law)
    assert result.total_variation < EXACT


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_rounds_that_learn_from_each_other_preserve_the_target(rule: PrefixRule) -> None:
    """Over four items of a binary vocabulary the adaptive policy's memory of earlier rounds leaves no trace."""
    binary = SpeculativeProcess(
        target=random_law(3, 2), draft=random_law(4, 2), rule=rule, survival=confidence, seconds=seconds
    )
    result = enumerate_law(binary, experienced, num_items=4)
    assert result.total_variation < EXACT
    assert result.items_per_round > 1.3


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_chains_that_share_a_round_stay_independent(policy: Callable[[], Policy]) -> None:
    """Items admitted over two chains at once, best first, leave the joint law the product of both."""
    binary = SpeculativeProcess(
        target=random_law(3, 2), draft=random_law(4, 2), rule=block_rule, survival=confidence, seconds=seconds
    )
    result = enumerate_law(binary, policy, num_items=2, num_chains=2)
    assert len(result.law) == 16
    assert result.total_variation < EXACT


def test_the_block_rule_needs_fewer_rounds() -> None:
    """The same drafts give more items per round under the block rule than under the token rule."""
    by_token = enumerate_law(process("soft", token_rule), POLICIES["fixed"], 3).items_per_round
    assert enumerate_law(process("soft", block_rule), POLICIES["fixed"], 3).items_per_round > by_token


def uncertain(prefix: tuple[int, ...]) -> bool:
    """Where the drafter was surprised by its own last item it ends the draft."""
    return DRAFT(prefix[:-1])[prefix[-1]] < 0.3


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_drafts_that_end_by_their_values_preserve_the_target(rule: PrefixRule, policy: Callable[[], Policy]) -> None:
    """A drafter may end a draft after an item because of that item, as long as the item is kept."""
    result = enumerate_law(replace(process("soft", rule), draft_ends=uncertain), policy, num_items=3)
    assert result.total_variation < EXACT


# ------------------------------------------------------------------------------------------------------ known mistakes


def block_with_token_residual(
    target_probs: Sequence[Law], draft_probs: Sequence[Law], values: Sequence[int]
) -> Sequence[PrefixOutcome]:
    """Block acceptance, but the correction is drawn as the token rule would."""
    return [
        replace(
            outcome,
            replacement=residual(target_probs[outcome.num_accepted], draft_probs[outcome.num_accepted], 1.0)
            if outcome.num_accepted < len(values)
            else outcome.replacement,
        )
        for outcome in block_rule(target_probs, draft_probs, values)
    ]


def block_to_first_failure(
    target_probs: Sequence[Law], draft_probs: Sequence[Law], values: Sequence[int]
) -> Sequence[PrefixOutcome]:
    """The block rule's tests, but accepting stops at the first that fails instead of at the largest that passes."""
    right = block_rule(target_probs, draft_probs, values)
    passing: dict[int, float] = {}
    undecided = 1.0
    for outcome in right:  # from the longest prefix to the empty one: undo "largest index" to get the single tests
        passing[outcome.num_accepted] = outcome.probability / undecided if undecided > 0.0 else 1.0
        undecided -= outcome.probability
    replacements = {outcome.num_accepted: outcome.replacement for outcome in right}
    outcomes: list[PrefixOutcome] = []
    reached = 1.0
    for length in range(1, len(values) + 1):
        outcomes.append(PrefixOutcome(length - 1, reached * (1.0 - passing[length]), replacements[length - 1]))
        reached *= passing[length]
    outcomes.append(PrefixOutcome(len(values), reached, replacements[len(values)]))
    return outcomes


class Hindsight(Fixed):
    """Reveals all estimates and executes the length with the most expected items per second, looking back."""

    WIDTHS = (1.0, 2.0, 1.0 / 0.45, 1.0 / 0.4)
    """Seconds of executing 1, 2, 3 and 4 items."""

    def admit(self, frontier: Frontier) -> None:
        """Judge each length by the estimates of its own items."""
        estimates = frontier.reveal(0) or ()
        rates = [(1.0 + sum(estimates[:length])) / self.WIDTHS[length] for length in range(len(estimates) + 1)]
        frontier.admit(0, rates.index(max(rates)))


def telltale(prefix: tuple[int, ...]) -> float:
    """High at first, then certain after item 0 and hopeless after any other."""
    return 0.8 if not prefix else float(prefix[-1] == 0)


class JudgesByLength(Fixed):
    """Executes only drafts that were not ended early."""

    def admit(self, frontier: Frontier) -> None:
        """Take the number of items as a sign of quality."""
        if frontier.available(0) > 1:
            frontier.admit_all()


def biased(result: EnumeratedLaw, at_least: float = 1e-3) -> bool:
    """True when the law is a law, and clearly not the target's."""
    assert sum(result.law.values()) == pytest.approx(1.0, abs=EXACT)
    return result.total_variation > at_least


def test_the_token_residual_in_the_block_rule_is_caught() -> None:
    """Drawing the correction from target - draft after a block decision changes the law."""
    assert biased(enumerate_law(process("soft", block_with_token_residual), POLICIES["fixed"], 3))


def test_stopping_at_the_first_failed_test_is_caught() -> None:
    """Treating the block rule's independent tests like the token rule's changes the law."""
    assert biased(enumerate_law(process("soft", block_to_first_failure), POLICIES["fixed"], 3))


@pytest.mark.parametrize("rule", [token_rule, block_rule], ids=["token", "block"])
def test_soft_draft_laws_for_argmax_drafts_are_caught(rule: PrefixRule) -> None:
    """Declaring the law that the argmax was taken from, instead of the one-hot law, changes the law."""
    wrong = replace(process("argmax", rule), declared_draft=DRAFT)
    assert biased(enumerate_law(wrong, POLICIES["fixed"], 3))


@pytest.mark.parametrize("rule", [token_rule, block_rule], ids=["token", "block"])
def test_choosing_lengths_by_looking_ahead_is_caught(rule: PrefixRule) -> None:
    """A policy that looks at later estimates before admitting an item changes the law under a ratio rule."""
    wrong = replace(process("soft", rule), survival=telltale, anticipated_rule=rule)
    assert biased(enumerate_law(wrong, lambda: Hindsight(2), 3), at_least=0.01)


@pytest.mark.parametrize("rule", [token_rule, block_rule], ids=["token", "block"])
def test_looking_ahead_is_exact_with_the_one_hot_rule(rule: PrefixRule) -> None:
    """The same policy preserves the law when revealed drafts are verified by the one-hot rule."""
    right = replace(process("soft", rule), survival=telltale)
    assert enumerate_law(right, lambda: Hindsight(2), 3).total_variation < EXACT


def test_the_example_of_the_dspark_paper() -> None:
    """Choosing the length in hindsight turns the law (0.70, 0.30) into (0.85, 0.15), as worked out in its appendix A.

    Draft law (1/2, 1/2), first estimate 0.8. At 1, 0.5 and 0.45 executions per second for 1, 2 and 3 items, two items
    are worth executing after item 0 and none after item 1.
    """
    example = SpeculativeProcess(
        target=lambda prefix: (0.7, 0.3),
        draft=lambda prefix: (0.5, 0.5),
        rule=token_rule,
        anticipated_rule=token_rule,
        survival=telltale,
    )
    law = enumerate_law(example, lambda: Hindsight(2), 3).law
    first = sum(weight for (chain,), weight in law.items() if chain[0] == 0)
    assert first == pytest.approx(0.85, abs=EXACT)
    exact = enumerate_law(replace(example, anticipated_rule=one_hot_rule), lambda: Hindsight(2), 3)
    assert exact.total_variation < EXACT


@pytest.mark.parametrize("policy", [POLICIES["threshold"], POLICIES["adaptive"]], ids=["threshold", "adaptive"])
def test_estimates_made_after_their_item_are_caught(policy: Callable[[], Policy]) -> None:
    """A drafter whose estimate for an item is computed from that item changes the law, whatever the policy."""

    def hindsight(prefix: tuple[int, ...]) -> float:
        return DRAFT(prefix[:-1])[prefix[-1]]

    wrong = replace(process("soft", token_rule), survival=hindsight, survival_looks_ahead=True)
    assert biased(enumerate_law(wrong, policy, 3))


def test_judging_a_draft_by_its_length_is_caught() -> None:
    """Where a draft ends may depend on its values, so executing only long drafts changes the law."""
    wrong = replace(process("soft", token_rule), draft_ends=uncertain)
    assert biased(enumerate_law(wrong, lambda: JudgesByLength(3), 3))


# ------------------------------------------------------------------------------------------------------------- the tool


def test_plain_laws_are_products_of_conditionals() -> None:
    """Without drafts the law is the target's, round by round, one item each."""
    result = enumerate_law(process("soft", token_rule), lambda: Fixed(0), 2)
    assert result.items_per_round == pytest.approx(1.0)
    assert result.law[(0, 1),] == pytest.approx(TARGET(())[0] * TARGET((0,))[1])
    assert result.plain_law == pytest.approx(result.law)


def test_a_rule_that_is_no_law_is_refused() -> None:
    """Verdicts whose probabilities do not sum to one are a broken contract, not a finding about the law."""

    def leaky(
        target_probs: Sequence[Law], draft_probs: Sequence[Law], values: Sequence[int]
    ) -> Sequence[PrefixOutcome]:
        return token_rule(target_probs, draft_probs, values)[:-1]

    with pytest.raises(BackendContractError, match="total probability"):
        enumerate_law(process("soft", leaky), POLICIES["fixed"], 2)


def test_the_distance_is_that_of_events() -> None:
    """Total variation is half the summed difference, outcomes missing on one side included."""
    law = EnumeratedLaw({((0,),): 0.75, ((1,),): 0.25}, {((0,),): 0.5, ((2,),): 0.5}, 1.0)
    assert law.total_variation == pytest.approx(0.5)
