"""The fixed and the threshold policy, and the settings that all run-ahead policies share."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specflow.effects import RUN_AHEAD, Effect
from specflow.errors import InvalidSettingError
from specflow.policies import CircuitBreaker, ExpectedValue, Fixed, Shadow, Threshold
from specflow.protocols import RunAheadPolicy
from specflow.speculation import Budget, Spent
from tests.specflow.policies.opportunities import guess, opportunity, teach

Make = Callable[..., RunAheadPolicy]


def fixed(**settings: object) -> RunAheadPolicy:
    """A fixed policy of depth 2."""
    return Fixed(2, **settings)  # type: ignore[arg-type]


def threshold(**settings: object) -> RunAheadPolicy:
    """A threshold policy of depth 2."""
    return Threshold(2, 0.5, **settings)  # type: ignore[arg-type]


def expected_value(**settings: object) -> RunAheadPolicy:
    """An expected-value policy of depth 2."""
    return ExpectedValue(depth=2, **settings)  # type: ignore[arg-type]


MAKERS = pytest.mark.parametrize("make", [fixed, threshold, expected_value])
confidences = st.lists(st.floats(0.0, 1.0), min_size=1, max_size=5)


@MAKERS
def test_settings_are_kept(make: Make) -> None:
    """What the scheduler enforces is what the policy was given."""
    budget = Budget(money=1.5, slots=3)
    effects = {Effect.PURE, Effect.COMPENSABLE}
    policy = make(width=3, effects=effects, budget=budget)
    assert (policy.depth, policy.width, policy.effects, policy.budget) == (2, 3, frozenset(effects), budget)


@pytest.mark.parametrize("policy", [Fixed(2), Threshold(2, 0.5), ExpectedValue()])
def test_by_default_only_what_is_safe_runs_ahead_and_nothing_is_limited(policy: RunAheadPolicy) -> None:
    """Effects default to those that need no listing, the budget to no limit."""
    assert policy.effects == RUN_AHEAD
    assert policy.budget == Budget()


@MAKERS
@pytest.mark.parametrize("effects", [{Effect.IRREVERSIBLE}, RUN_AHEAD | {Effect.IRREVERSIBLE}, {"pure"}])
def test_irreversible_effects_cannot_be_listed(make: Make, effects: set[Effect]) -> None:
    """What cannot be undone, and what is no effect at all, is refused when the policy is built."""
    with pytest.raises(InvalidSettingError, match="effects"):
        make(effects=effects)


@MAKERS
@pytest.mark.parametrize("width", [0, -1, float("nan")])
def test_a_width_below_one_is_refused(make: Make, width: int) -> None:
    """A policy that follows no guess is written as depth 0."""
    with pytest.raises(InvalidSettingError, match="width"):
        make(width=width)


def test_a_negative_depth_is_refused() -> None:
    """Each policy names its own setting."""
    with pytest.raises(InvalidSettingError, match="num_draft=-1"):
        Fixed(-1, width=2)
    with pytest.raises(InvalidSettingError, match="num_draft=-1"):
        Threshold(-1, 0.5, width=2)
    with pytest.raises(InvalidSettingError, match="depth=-1"):
        ExpectedValue(depth=-1)


@MAKERS
def test_budgets_are_left_to_the_scheduler(make: Make) -> None:
    """A policy's answer is the same whether its budget is used up or has no limit: enforcing it is not its job."""
    question = opportunity(guess(), spent=Spent(attempts=10**6, seconds=1e9, money=1e9, tokens=1e9), running=100)
    exhausted = make(budget=Budget(money=0.0, tokens=0.0, seconds=0.0, slots=0))
    assert exhausted.budget == Budget(money=0.0, tokens=0.0, seconds=0.0, slots=0)
    assert exhausted.allows(question)
    assert make().allows(question)


@pytest.mark.parametrize("wrap", [Shadow, CircuitBreaker])
def test_a_wrapper_has_the_settings_of_the_policy_inside(wrap: Callable[[RunAheadPolicy], RunAheadPolicy]) -> None:
    """Wrapping changes neither depth, width, effects nor budget."""
    inside = Fixed(3, width=2, effects={Effect.PURE}, budget=Budget(tokens=7))
    policy = wrap(inside)
    assert (policy.depth, policy.width) == (3, 2)
    assert (policy.effects, policy.budget) == (frozenset({Effect.PURE}), Budget(tokens=7))


@given(confidences)
def test_fixed_allows_everything(claims: list[float]) -> None:
    """Whatever the guesses claim, and however they turned out before."""
    policy = Fixed(1)
    teach(policy, [False] * 20)
    assert policy.allows(opportunity(*[guess(confidence=claim) for claim in claims]))


@given(confidences, st.floats(0.0, 1.0))
def test_threshold_allows_while_the_product_of_claims_reaches_it(claims: list[float], least: float) -> None:
    """The raw confidences are multiplied; outcomes change nothing."""
    policy = Threshold(8, least)
    question = opportunity(*[guess(confidence=claim) for claim in claims])
    assert policy.allows(question) is (math.prod(claims) >= least)
    teach(policy, [False] * 20)
    assert policy.allows(question) is (math.prod(claims) >= least)


def test_threshold_is_met_exactly() -> None:
    """A product equal to the threshold is enough."""
    question = opportunity(guess(confidence=0.5), guess(confidence=0.5))
    assert Threshold(2, 0.25).allows(question)
    assert not Threshold(2, math.nextafter(0.25, 1.0)).allows(question)
