"""Acceptance rules as laws: they sum to one, preserve the target, and agree with the numbers in the literature."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from itertools import product

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from specflow.errors import BackendContractError
from specflow.verifiers import PrefixRule, block_rule, one_hot_rule, residual, token_rule

RULES: dict[str, PrefixRule] = {"token": token_rule, "block": block_rule, "one_hot": one_hot_rule}


def normalised(weights: Sequence[float]) -> list[float]:
    """Weights as a law."""
    total = math.fsum(weights)
    return [weight / total for weight in weights]


laws = st.lists(st.one_of(st.just(0.0), st.floats(0.01, 1.0)), min_size=3, max_size=3).filter(any).map(normalised)


@st.composite
def blocks(draw: st.DrawFn) -> tuple[list[list[float]], list[list[float]], list[int]]:
    """Target laws, draft laws, and values that the draft laws allow."""
    size = draw(st.integers(0, 3))
    target = [draw(laws) for _ in range(size + 1)]
    draft = [draw(laws) for _ in range(size)]
    values = [draw(st.sampled_from([item for item in range(3) if law[item] > 0.0])) for law in draft]
    return target, draft, values


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
@example(
    block=(
        [[1.0, 0.0, 0.0], [1.0, 0.0, 0.0], [1.0, 0.0, 0.0], [0.0, 0.0, 1.0]],
        [[1.0, 0.0, 0.0], [1.0, 0.0, 0.0], [0.625 / 0.6875, 0.0, 0.0625 / 0.6875]],
        [0, 0, 2],
    )
)
@given(block=blocks())
def test_verdicts_are_a_law(rule: PrefixRule, block: tuple[list[list[float]], list[list[float]], list[int]]) -> None:
    """Probabilities of all verdicts sum to one, and every replacement that can occur is a law itself."""
    outcomes = rule(*block)
    assert math.fsum(outcome.probability for outcome in outcomes) == pytest.approx(1.0, abs=1e-12)
    for outcome in outcomes:
        assert 0 <= outcome.num_accepted <= len(block[2])
        assert outcome.probability >= -1e-15
        assert math.fsum(outcome.replacement) == pytest.approx(1.0, abs=1e-12)


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
@given(target=laws, draft=laws)
def test_one_item_is_emitted_with_the_target_law(rule: PrefixRule, target: list[float], draft: list[float]) -> None:
    """Averaged over the drafted item, the first emitted item has the target's law."""
    emitted = [0.0] * 3
    for value, chance in enumerate(draft):
        if chance > 0.0:
            for outcome in rule([target, target], [draft], [value]):
                if outcome.num_accepted:
                    emitted[value] += chance * outcome.probability
                else:
                    for item, weight in enumerate(outcome.replacement):
                        emitted[item] += chance * outcome.probability * weight
    assert emitted == pytest.approx(target, abs=1e-12)


def mean_accepted(rule: PrefixRule, target: Sequence[float], draft: Sequence[float], size: int) -> float:
    """Expected number of accepted items of a block drawn from context-free laws."""
    return math.fsum(
        math.prod(draft[value] for value in values) * outcome.probability * outcome.num_accepted
        for values in product(range(len(draft)), repeat=size)
        if all(draft[value] > 0.0 for value in values)
        for outcome in rule([target] * (size + 1), [draft] * size, values)
    )


def test_the_binary_example_of_the_block_paper() -> None:
    """With target (1/3, 2/3), draft (2/3, 1/3) and two drafted items, 10/9 and 11/9 are accepted (Sun et al. 2024)."""
    target, draft = (1 / 3, 2 / 3), (2 / 3, 1 / 3)
    assert mean_accepted(token_rule, target, draft, 2) == pytest.approx(float(Fraction(10, 9)), abs=1e-12)
    assert mean_accepted(block_rule, target, draft, 2) == pytest.approx(float(Fraction(11, 9)), abs=1e-12)


@given(laws, laws, st.integers(1, 3))
def test_the_block_rule_accepts_at_least_as_much(target: list[float], draft: list[float], size: int) -> None:
    """Block verification never accepts fewer items on average than the token rule (Sun et al. 2024, Theorem 2)."""
    assert mean_accepted(block_rule, target, draft, size) >= mean_accepted(token_rule, target, draft, size) - 1e-12


@given(laws, laws)
def test_one_item_is_accepted_as_often_as_any_rule_can(target: list[float], draft: list[float]) -> None:
    """For single items token and block rule both reach the overlap of the laws, the optimum of any coupling."""
    overlap = math.fsum(min(wanted, drawn) for wanted, drawn in zip(target, draft, strict=True))
    assert mean_accepted(token_rule, target, draft, 1) == pytest.approx(overlap, abs=1e-12)
    assert mean_accepted(block_rule, target, draft, 1) == pytest.approx(overlap, abs=1e-12)


@given(laws, st.integers(0, 2))
def test_a_deterministic_draft_makes_all_rules_the_one_hot_rule(target: list[float], value: int) -> None:
    """With a one-hot draft law, token and block rule accept with the target's probability, as the one-hot rule does."""
    assume(target[value] > 0.0)
    one_hot = [1.0 if item == value else 0.0 for item in range(3)]
    for rule in (token_rule, block_rule, one_hot_rule):
        accepted = math.fsum(
            outcome.probability for outcome in rule([target, target], [one_hot], [value]) if outcome.num_accepted
        )
        assert accepted == pytest.approx(target[value], abs=1e-12)


def test_equal_laws_accept_everything() -> None:
    """A drafter that draws from the target's own law is never rejected by token and block rule."""
    law = [0.2, 0.5, 0.3]
    for rule in (token_rule, block_rule):
        (full,) = [outcome for outcome in rule([law] * 3, [law] * 2, [1, 0]) if outcome.probability > 0.0]
        assert (full.num_accepted, full.probability, full.replacement) == (2, 1.0, tuple(law))


def test_an_empty_block_draws_from_the_target() -> None:
    """Without drafts the only verdict is the target's own law."""
    for rule in RULES.values():
        (only,) = rule([[0.25, 0.75]], [], [])
        assert (only.num_accepted, only.probability, only.replacement) == (0, 1.0, (0.25, 0.75))


@pytest.mark.parametrize("rule", [token_rule, block_rule])
def test_an_impossible_draft_is_a_broken_contract(rule: PrefixRule) -> None:
    """A value that its declared law excludes shows that the law is not the one drawn from."""
    with pytest.raises(BackendContractError, match="gives probability 0"):
        rule([[0.5, 0.5]] * 2, [[1.0, 0.0]], [1])


def test_where_nothing_is_left_over_the_target_stands_in() -> None:
    """A residual of zero mass falls back to the target."""
    assert residual([0.5, 0.5], [0.5, 0.5], 1.0) == (0.5, 0.5)
    assert residual([0.5, 0.5], [1.0, 0.0], 1.0) == (0.0, 1.0)
