"""Scheduling is exact: laws by enumeration, with the mutants that look ahead caught by the same means."""

from __future__ import annotations

from collections.abc import Callable, Hashable

import pytest

from specflow.policies import (
    PID,
    Adaptive,
    Boundary,
    CostScheduled,
    CostTable,
    Estimated,
    RoundCosts,
    StaleBudget,
    Threshold,
)
from specflow.protocols import Policy
from specflow.testing import SpeculativeProcess, enumerate_law
from specflow.types import ChainView
from specflow.verifiers import PrefixRule, block_rule, token_rule
from tests.specflow.policies.scheduling import BlockMean, OneRound, Retrospective, Rounds, random_process, random_table

EXACT = 1e-12
RULES: dict[str, PrefixRule] = {"token": token_rule, "block": block_rule}
SEEDS = (5, 6, 8, 15)
"""Instances on which looking ahead shows: on many random ones it happens to do no harm."""


def since(view: ChainView) -> int | None:
    """Every second committed item is a boundary."""
    return view.position % 2


def parity(view: ChainView) -> Hashable:
    """A context made of committed items."""
    return view.position % 2


def experienced(policy: Policy, num_chains: int = 2) -> Policy:
    """The policy after some rounds of so many chains, so that its memory is not empty."""
    rounds = Rounds(policy, num_chains)
    for survival, accepted in (((0.9, 0.4), 2), ((0.7, 0.6), 0), ((0.8, 0.1), 1), ((0.9, 0.8), 2)):
        rounds.admit(*[survival] * num_chains)
        rounds.observe(*[accepted] * num_chains)
    return policy


POLICIES: dict[str, Callable[[CostTable], Policy]] = {
    "cost-scheduled": lambda costs: CostScheduled(2, costs),
    "cost-scheduled, padded": lambda costs: CostScheduled(2, RoundCosts({1: costs}, padded=True)),
    "stale budget": lambda costs: StaleBudget(2, costs, lag=1),
    "stale budget, padded": lambda costs: StaleBudget(2, RoundCosts({1: costs}, padded=True)),
    "pid": lambda _costs: PID(3, aggressiveness=1.5, threshold=0.7, update_every=3),
    "boundary": lambda costs: Boundary(CostScheduled(2, costs), since, short=1),
    "estimated": lambda costs: Estimated(CostScheduled(2, costs), 2, context=parity),
    "adaptive": lambda costs: Adaptive(2, costs=CostTable.from_dict(costs.to_dict())),
    "adaptive, padded": lambda costs: Adaptive(2, costs=CostTable.from_dict(costs.to_dict()), padded=True),
}


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
@pytest.mark.parametrize("make", POLICIES.values(), ids=POLICIES)
def test_scheduled_rounds_preserve_the_joint_law(make: Callable[[CostTable], Policy], rule: PrefixRule) -> None:
    """Over 2 requests x 2 positions x 3 items, random laws, confidences and costs: emitted items follow the target.

    Of these instances, drafts must save rounds in some, or nothing would have been tested.
    """
    gains = []
    for seed in SEEDS:
        policy = experienced(make(random_table(seed)))
        result = enumerate_law(random_process(seed, rule), lambda policy=policy: OneRound(policy), 3, 2)  # type: ignore[misc]
        assert sum(result.law.values()) == pytest.approx(1.0, abs=EXACT)
        assert result.total_variation < EXACT
        gains.append(result.items_per_round)
    assert max(gains) > 1.0


@pytest.mark.parametrize("make", POLICIES.values(), ids=POLICIES)
def test_what_is_learned_from_round_to_round_leaves_no_trace(make: Callable[[CostTable], Policy]) -> None:
    """Over four items of a binary vocabulary, round after round under one policy, the law is the target's."""
    policy = experienced(make(random_table(3)), num_chains=1)
    result = enumerate_law(random_process(3, token_rule, vocabulary=2), lambda: policy, 4)
    assert result.total_variation < EXACT
    assert result.items_per_round > 1.0


def worst(make: Callable[[CostTable], Policy]) -> float:
    """The largest total variation over the instances."""
    return max(
        enumerate_law(
            random_process(seed, token_rule),
            lambda seed=seed: OneRound(make(random_table(seed))),  # type: ignore[misc]
            3,
            2,
        ).total_variation
        for seed in SEEDS
    )


def test_the_retrospective_argmax_is_caught() -> None:
    """Choosing lengths in hindsight by current confidences moves the law by more than a tenth on these instances."""
    assert worst(lambda costs: Retrospective(2, costs)) > 0.1


def test_the_block_mean_threshold_is_caught() -> None:
    """Judging a block by the mean of its confidences moves the law by more than a fifth on these instances."""
    assert worst(lambda _costs: BlockMean(2)) > 0.2


def telltale(prefix: tuple[int, ...]) -> float:
    """Confidence 0.8 in the first item; certain after item 0, hopeless after item 1."""
    return 0.8 if not prefix else float(prefix[-1] == 0)


def example() -> tuple[SpeculativeProcess, CostTable]:
    """DSpark, appendix A: target (0.7, 0.3), draft (0.5, 0.5), and 1, 0.5, 0.45 executions per second."""
    costs = CostTable()
    for width, seconds in ((1, 1.0), (2, 2.0), (3, 1.0 / 0.45), (4, 1.0 / 0.4)):
        costs.observe(width, seconds)
        costs.observe(width, seconds)
    process = SpeculativeProcess(
        target=lambda prefix: (0.7, 0.3),
        draft=lambda prefix: (0.5, 0.5),
        rule=token_rule,
        anticipated_rule=token_rule,
        survival=telltale,
    )
    return process, costs


def first_item(policy: Policy) -> float:
    """Probability that the first item is 0."""
    process, _ = example()
    law = enumerate_law(process, lambda: policy, 3).law
    return sum(weight for (chain,), weight in law.items() if chain[0] == 0)


def test_the_example_of_appendix_a() -> None:
    """The retrospective choice turns (0.7, 0.3) into (0.85, 0.15); both schedulers and the threshold leave it alone."""
    _, costs = example()
    assert first_item(Retrospective(2, costs)) == pytest.approx(0.85, abs=EXACT)
    for policy in (CostScheduled(2, costs), StaleBudget(2, costs), Threshold(2, 0.5)):
        assert first_item(policy) == pytest.approx(0.7, abs=EXACT)
