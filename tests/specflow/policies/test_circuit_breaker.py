"""The circuit breaker stops following a source that drifted, and seldom one that did not."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specflow.errors import InvalidSettingError
from specflow.policies import CircuitBreaker, CircuitState, CircuitStatus, ExpectedValue, Fixed, Threshold
from specflow.policies.odds import binomial_tail, hypergeometric_tail
from specflow.speculation import Opportunity, Resolution
from tests.specflow.policies.opportunities import follow, guess, opportunity, outcomes, teach


def circuit(policy: CircuitBreaker) -> CircuitStatus:
    """The status of the only circuit."""
    (status,) = policy.status()
    return status


def resolutions_until_open(policy: CircuitBreaker, hits: list[bool]) -> int | None:
    """How many outcomes are seen when the circuit opens; None when it stays closed."""
    for seen, hit in enumerate(hits, start=1):
        policy.learn(Resolution(guess(), hit))
        if circuit(policy).state is CircuitState.OPEN:
            return seen
    return None


# ------------------------------------------------------------------------------------------------------------ opening


@pytest.mark.parametrize("max_misses", [1, 7, 30])
def test_fruitless_guesses_in_a_row_are_capped(max_misses: int) -> None:
    """A source that was never right is followed exactly ``max_misses`` times."""
    answers = follow(CircuitBreaker(Fixed(1), max_misses=max_misses), [False] * 60)
    assert answers[:max_misses] == [True] * max_misses
    assert not any(answers[max_misses : max_misses + 50])


@pytest.mark.parametrize(("rate", "most"), [(1.0, 6), (0.9, 12), (0.7, 16), (0.5, 20), (0.3, 30)])
def test_a_source_that_stops_being_right_is_left_within_a_stated_number_of_misses(rate: float, most: int) -> None:
    """After 200 guesses of a steady source ``most`` misses in a row are enough: fewer, the better it was.

    The hits are spread evenly, so nothing here is random.
    """
    steady = [int((n + 1) * rate) > int(n * rate) for n in range(200)]
    policy = CircuitBreaker(Fixed(1))
    assert resolutions_until_open(policy, steady) is None
    misses = resolutions_until_open(policy, [False] * 60)
    assert misses is not None
    assert misses <= most


def test_a_drop_that_leaves_some_hits_is_noticed() -> None:
    """From nine right of ten to three of ten: open within 40 guesses, though no long row of misses occurs."""
    policy = CircuitBreaker(Fixed(1))
    assert resolutions_until_open(policy, [n % 10 != 9 for n in range(200)]) is None
    seen = resolutions_until_open(policy, [n % 10 in (2, 5, 8) for n in range(200)])
    assert seen is not None
    assert seen <= 40
    assert "after" in circuit(policy).reason


def test_drift_is_judged_by_fishers_exact_test() -> None:
    """It opens with the first miss that makes the window as unlikely as half of ``false_alarm`` (recomputed)."""
    hits = [n % 10 not in (4, 9) for n in range(120)] + [n % 4 == 0 for n in range(60)]
    policy = CircuitBreaker(Fixed(1), window=16, memory=80, false_alarm=1e-3)
    opened = resolutions_until_open(policy, hits)
    expected = None
    for seen in range(17, len(hits) + 1):
        past = hits[max(0, seen - 96) : seen]
        if not past[-1] and hypergeometric_tail(sum(past[-16:]), 16, sum(past), len(past)) <= 5e-4:
            expected = seen
            break
    assert opened == expected is not None


def test_a_source_below_the_floor_is_left() -> None:
    """One hit in twenty-five, too regular for the other two rules, is below a floor of 0.2 with certainty enough."""
    hits = [n % 25 == 24 for n in range(400)]
    policy = CircuitBreaker(Fixed(1), floor=0.2)
    opened = resolutions_until_open(policy, hits)
    assert opened is not None
    assert "below the floor" in circuit(policy).reason
    assert binomial_tail(sum(hits[:opened]), opened, 0.2) <= 5e-6
    assert binomial_tail(sum(hits[: opened - 1]), opened - 1, 0.2) > 5e-6
    assert resolutions_until_open(CircuitBreaker(Fixed(1), floor=0.0), hits) is None


@pytest.mark.parametrize("rate", [0.3, 0.5, 0.8])
def test_a_steady_source_is_seldom_left(rate: float) -> None:
    """Of 200 steady sources with 400 guesses each at most 28 are opened at ``false_alarm`` = 2e-4.

    The union bound gives a source odds of 400 * 2e-4 = 0.08 at most, plus 400 * 0.7 ** 60 < 3e-7 for the row of misses.
    More than 28 of 200 then has probability below 2e-3. The exact test is far more careful than its bound (windows
    overlap, counts are whole): 0, 1 and 4 were opened when this was written.
    """
    opened = sum(
        resolutions_until_open(
            CircuitBreaker(Fixed(1), false_alarm=2e-4, max_misses=60), outcomes(rate, 400, seed=1000 * seed + 7)
        )
        is not None
        for seed in range(200)
    )
    assert opened <= 28


def test_the_false_alarm_count_can_fail() -> None:
    """A breaker that compares the window with the long-run rate by a fixed margin opens nearly all steady sources."""
    opened = 0
    for seed in range(200):
        hits = outcomes(0.5, 400, seed=1000 * seed + 7)
        opened += any(
            sum(hits[end - 20 : end]) / 20 <= 0.5 * sum(hits[: end - 20]) / (end - 20) for end in range(40, 400)
        )
    assert opened > 100


# ------------------------------------------------------------------------------------------- resting and probation


def test_an_open_circuit_rests_then_is_put_on_probation() -> None:
    """Nothing starts for ``rest`` resolutions, then ``probes`` guesses are followed, then it rests twice as long."""
    policy = CircuitBreaker(Fixed(1), max_misses=4, rest=10, max_rest=40, probes=3)
    answers = follow(policy, [False] * 200)
    runs = [4, 10, 3, 20, 3, 40, 3, 40, 3, 40, 3]
    expected = [followed for n, length in enumerate(runs) for followed in [n % 2 == 0] * length]
    assert answers[: len(expected)] == expected


def test_a_hit_on_probation_closes_the_circuit() -> None:
    """One right guess among the probes is enough, and a wrong one before it does no harm."""
    policy = CircuitBreaker(Fixed(1), max_misses=4, rest=10, probes=3)
    teach(policy, [False] * 14)
    assert circuit(policy).state is CircuitState.HALF_OPEN
    assert policy.allows(opportunity())
    teach(policy, [False, True])
    assert circuit(policy).state is CircuitState.CLOSED
    assert circuit(policy).opened == 1
    assert follow(policy, [False] * 5) == [True] * 4 + [False]


def test_hits_while_it_rests_do_not_cut_the_rest_short() -> None:
    """The rest is counted in resolutions, whatever they are."""
    policy = CircuitBreaker(Fixed(1), max_misses=4, rest=10)
    teach(policy, [False] * 4)
    assert follow(policy, [True] * 11) == [False] * 10 + [True]


def test_a_closed_circuit_learns_its_rate_anew() -> None:
    """A source that fell from always right to one half is left once, and then accepted as it is."""
    policy = CircuitBreaker(Fixed(1))
    teach(policy, [True] * 200 + [n % 2 == 0 for n in range(600)])
    assert circuit(policy).opened == 1
    assert circuit(policy).state is CircuitState.CLOSED
    assert circuit(policy).earlier_rate == pytest.approx(0.5, abs=0.01)


def test_openings_in_quick_succession_rest_longer_and_longer() -> None:
    """A source that is right on probation and wrong after it rests 10, 20, 40 ...; a long good time forgives it."""
    policy = CircuitBreaker(Fixed(1), max_misses=4, memory=50, rest=10, max_rest=80)
    rests = []
    for _ in range(5):
        teach(policy, [False] * 4)
        rests.append(circuit(policy).resolutions_left)
        teach(policy, [False] * rests[-1] + [True])
        assert circuit(policy).state is CircuitState.CLOSED
    assert rests == [10, 20, 40, 80, 80]
    teach(policy, [True] * 50 + [False] * 4)
    assert circuit(policy).opened == 6
    assert circuit(policy).resolutions_left == 10


def test_waste_on_a_source_that_is_always_wrong_is_bounded() -> None:
    """Of 10,000 wrong guesses at most 30 + 5 * (4 + 1 + 10,000 / 800) are followed with the default settings."""
    assert sum(follow(CircuitBreaker(Fixed(1)), [False] * 10_000)) <= 30 + 5 * (4 + 1 + 12.5)


# --------------------------------------------------------------------------------------------------------- neighbours


def test_circuits_are_apart_by_step_and_source() -> None:
    """An open circuit stops work that rests on its guesses, alone or among others, and nothing else."""
    policy = CircuitBreaker(Fixed(4), max_misses=3)
    teach(policy, [False] * 3)
    assert not policy.allows(opportunity(guess()))
    assert not policy.allows(opportunity(guess(source="other"), guess(rank=2)))
    assert policy.allows(opportunity(guess(source="other")))
    assert policy.allows(opportunity(guess(step="other")))


def test_authoritative_work_is_never_refused() -> None:
    """With every circuit open, what rests on no guess is still left to the policy inside, and reach is unchanged."""
    policy = CircuitBreaker(Fixed(4, width=2), max_misses=1)
    teach(policy, [False])
    question = dataclasses.replace(opportunity(), assumptions=())
    assert policy.allows(question)
    assert (policy.depth, policy.width) == (4, 2)


def test_the_policy_inside_decides_and_learns() -> None:
    """A closed circuit adds nothing; resolutions reach the policy inside in every state."""
    assert not CircuitBreaker(Threshold(1, 0.9)).allows(opportunity(guess(confidence=0.5)))
    inside = ExpectedValue()
    policy = CircuitBreaker(inside, max_misses=3, rest=100)
    teach(policy, [False] * 60)
    alone = ExpectedValue()
    teach(alone, [False] * 60)
    assert inside.explain(opportunity()) == alone.explain(opportunity())


@given(st.lists(st.booleans(), max_size=150), st.integers(0, 149))
def test_a_decision_depends_on_earlier_resolutions_only(hits: list[bool], cut: int) -> None:
    """An answer is the same whatever is resolved from there on, and asking changes nothing."""
    settings = {"window": 4, "memory": 12, "false_alarm": 0.1, "max_misses": 6, "rest": 5, "max_rest": 20, "probes": 2}
    question: Opportunity = opportunity()
    whole = follow(CircuitBreaker(Fixed(1), **settings), hits, question)  # type: ignore[arg-type]
    flipped = [*hits[:cut], *[not hit for hit in hits[cut:]]]
    altered = follow(CircuitBreaker(Fixed(1), **settings), flipped, question)  # type: ignore[arg-type]
    assert whole[: cut + 1] == altered[: cut + 1]
    silent = CircuitBreaker(Fixed(1), **settings)  # type: ignore[arg-type]
    teach(silent, hits)
    asked = CircuitBreaker(Fixed(1), **settings)  # type: ignore[arg-type]
    follow(asked, hits, question)
    assert silent.status() == asked.status()


# ----------------------------------------------------------------------------------------------------------- settings


def test_a_status_is_for_reading() -> None:
    """It names step, source, state, reason and rates."""
    policy = CircuitBreaker(Fixed(1), window=2)
    teach(policy, [True, False, True, True])
    assert circuit(policy) == CircuitStatus(
        step="plan",
        source="markov",
        state=CircuitState.CLOSED,
        reason="nothing speaks against it",
        recent_rate=1.0,
        earlier_rate=0.5,
        resolutions_left=0,
        opened=0,
    )


@pytest.mark.parametrize(
    "settings",
    [
        {"window": 0},
        {"memory": 0},
        {"false_alarm": 0.0},
        {"false_alarm": 1.0},
        {"floor": 1.0},
        {"floor": -0.1},
        {"max_misses": 0},
        {"rest": 0},
        {"max_rest": 49},
        {"probes": 0},
    ],
)
def test_settings_out_of_range_are_refused(settings: Mapping[str, float]) -> None:
    """The mistake is reported when the policy is built, with the name of the setting."""
    with pytest.raises(InvalidSettingError, match=next(iter(settings))):
        CircuitBreaker(Fixed(1), **settings)  # type: ignore[arg-type]
