"""The expected-value policy starts what pays, and gives up what does not."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specflow.effects import RUN_AHEAD, Effect
from specflow.errors import InvalidSettingError
from specflow.policies import ExpectedValue, Finding, Prior
from specflow.speculation import Opportunity, Resolution, Spent
from tests.specflow.policies.opportunities import follow, guess, opportunity, outcomes, teach

# --------------------------------------------------------------------------------------------------------- break-even


def test_the_numbers_are_those_of_the_formula() -> None:
    """Gain, waste, interference and value, worked out by hand for a free quantile of a uniform posterior."""
    policy = ExpectedValue(value_of_second=0.5, quantile=0.25, interference=0.125, price_per_token=0.01)
    appraisal = policy.explain(opportunity(money=0.2, tokens=10.0, running=1))
    # Beta(1, 1) has the lower quartile 1/4. Saved: min(8, 10) seconds. Cost of a miss: 0.2 + 10 * 0.01 = 0.3.
    assert appraisal.probability == pytest.approx(0.25)
    assert appraisal.saved_seconds == 8.0
    assert appraisal.gain == pytest.approx(0.25 * 8.0 * 0.5)
    assert appraisal.waste == pytest.approx(0.75 * 0.3)
    assert appraisal.interference == pytest.approx(0.125 * 2 * 0.5)
    assert appraisal.value == pytest.approx(1.0 - 0.225 - 0.125)
    assert appraisal.allowed


@pytest.mark.parametrize(("running", "allowed"), [(2, True), (3, False), (4, False)])
def test_interference_breaks_even_exactly(running: int, allowed: bool) -> None:  # noqa: FBT001 -- a parameter of the case
    """P = 1/2 on 8 seconds is worth 4 seconds: with one second lost per attempt under way, the fourth is one too many.

    All numbers are powers of two, so the value at break-even is exactly 0, which is not a gain.
    """
    appraisal = ExpectedValue(value_of_second=0.5, interference=1.0).explain(opportunity(running=running))
    assert appraisal.value == (3 - running) * 0.5
    assert appraisal.allowed is allowed


@pytest.mark.parametrize(("money", "allowed"), [(4.0 / 3.0 - 1e-9, True), (4.0 / 3.0 + 1e-9, False)])
def test_money_breaks_even_at_the_quantile(money: float, allowed: bool) -> None:  # noqa: FBT001 -- a parameter of the case
    """0.25 * 8 s * 0.5 = 0.75 * money at money = 4/3. With the mean, 1/2, it would break even at 4 instead."""
    assert ExpectedValue(value_of_second=0.5, quantile=0.25).allows(opportunity(money=money)) is allowed


def test_tokens_cost_what_they_are_priced_at() -> None:
    """Tokens are free unless priced, and then break even like money."""
    assert ExpectedValue(value_of_second=0.5).allows(opportunity(tokens=1e9))
    policy = ExpectedValue(value_of_second=0.5, quantile=0.25, price_per_token=2.0)
    assert policy.allows(opportunity(tokens=0.66))
    assert not policy.allows(opportunity(tokens=0.67))


def test_learned_outcomes_move_the_break_even_point() -> None:
    """Three hits and one miss give Beta(4, 2), mean 2/3: a free start is worth 2/3 * 8 seconds."""
    policy = ExpectedValue(value_of_second=3.0, forgetting=1.0)
    teach(policy, [True, True, False, True])
    assert policy.explain(opportunity()).value == pytest.approx(16.0)


def test_every_guess_that_a_world_rests_on_counts() -> None:
    """Two independent guesses of one half and one third hold together with one sixth."""
    appraisal = ExpectedValue().explain(opportunity(guess(), guess(source="other", confidence=2 / 3)))
    assert appraisal.probabilities == pytest.approx((1 / 2, 1 / 3))
    assert appraisal.probability == pytest.approx(1 / 6)


@pytest.mark.parametrize("effect", [Effect.IDEMPOTENT, Effect.COMPENSABLE])
def test_what_has_to_be_undone_is_judged_by_the_lower_quantile(effect: Effect) -> None:
    """A costly effect is judged like one that costs money; those that run ahead unlisted by the mean."""
    policy = ExpectedValue(quantile=0.25, effects=RUN_AHEAD | {effect})
    assert policy.explain(opportunity(effect=effect)).probability == pytest.approx(0.25)
    assert policy.explain(opportunity(effect=effect)).is_pessimistic
    for cheap in RUN_AHEAD:
        assert policy.explain(opportunity(effect=cheap)).probability == 0.5


def test_a_lower_quantile_never_allows_more() -> None:
    """Over random pasts and prices, what is allowed at quantile 0.1 is allowed at 0.4."""
    rng = random.Random(0)
    differ = 0
    for _ in range(200):
        hits = outcomes(rng.random(), rng.randrange(1, 40), rng.randrange(10**6))
        question = opportunity(money=rng.uniform(0.0, 0.1))
        careful, bold = ExpectedValue(quantile=0.1), ExpectedValue(quantile=0.4)
        teach(careful, hits)
        teach(bold, hits)
        assert careful.allows(question) <= bold.allows(question)
        differ += careful.allows(question) != bold.allows(question)
    assert differ > 10


# --------------------------------------------------------------------------------------------------------------- times


def test_only_the_shorter_time_can_be_saved() -> None:
    """The wait and the length of the step both bound what is saved."""
    policy = ExpectedValue()
    assert policy.explain(opportunity(wait_seconds=3.0, step_seconds=9.0)).saved_seconds == 3.0
    assert policy.explain(opportunity(wait_seconds=9.0, step_seconds=2.0)).saved_seconds == 2.0


def test_nothing_to_wait_for_is_nothing_to_save() -> None:
    """A guess that is about to resolve is not worth following, however sure."""
    for wait in (0.0, -1.0):
        appraisal = ExpectedValue().explain(opportunity(wait_seconds=wait))
        assert appraisal.finding is Finding.NOTHING_TO_SAVE
        assert appraisal.saved_seconds == 0.0


@pytest.mark.parametrize("times", [(None, 10.0), (8.0, None), (None, None)])
def test_without_known_times_a_bounded_number_is_tried(times: tuple[float | None, float | None]) -> None:
    """An unknown time counts as one second, until the run has made as many speculative attempts as allowed."""
    policy = ExpectedValue(explorations=2)
    wait, length = times
    answers = [
        policy.explain(opportunity(wait_seconds=wait, step_seconds=length, spent=Spent(attempts=attempts)))
        for attempts in range(4)
    ]
    assert [answer.allowed for answer in answers] == [True, True, False, False]
    assert answers[0].saved_seconds == 1.0
    assert answers[3].finding is Finding.UNTIMED
    assert policy.allows(opportunity(spent=Spent(attempts=10**6)))  # known times are not explored


# ------------------------------------------------------------------------------------------------- sources gone wrong


@pytest.mark.parametrize("confidence", [1.0, 0.5])
@pytest.mark.parametrize("rank", [0, 1, 2])
def test_an_adversary_is_given_up(confidence: float, rank: int) -> None:
    """Of 10,000 wrong guesses at most 23 are followed even where following costs nothing, and all of them at first."""
    question = opportunity(guess(confidence=confidence, rank=rank))
    answers = follow(ExpectedValue(), [False] * 10_000, question)
    assert 0 < sum(answers) <= 23
    assert answers == sorted(answers, reverse=True)


def test_an_adversary_that_costs_money_is_given_up_sooner() -> None:
    """Where the first guess just pays, the second does not."""
    assert sum(follow(ExpectedValue(quantile=0.25), [False] * 1000, opportunity(money=0.02))) == 1


def test_an_adversary_cannot_hide_behind_ranks_and_confidences() -> None:
    """Wrong guesses over all ranks and buckets of one step together have no more than 30 starts in 30,000."""
    policy = ExpectedValue()
    rng = random.Random(1)
    started = 0
    for _ in range(10_000):
        for rank in range(3):
            assumption = guess(rank=rank, confidence=rng.random())
            started += policy.allows(opportunity(assumption))
            policy.learn(Resolution(assumption, hit=False))
    assert started <= 30


def test_without_the_floor_an_adversary_that_costs_nothing_goes_on() -> None:
    """The bound above comes from min_probability: without it every wrong guess is followed."""
    assert all(follow(ExpectedValue(min_probability=0.0), [False] * 500))


def test_a_source_that_becomes_good_again_is_followed_again() -> None:
    """Guesses are scored though nothing starts on them: after 1,000 misses two hits are enough."""
    policy = ExpectedValue()
    assert not follow(policy, [False] * 1000)[-1]
    assert follow(policy, [True] * 10)[2:] == [True] * 8


def test_a_source_that_turns_bad_is_left_within_its_memory() -> None:
    """After 1,000 hits at most 175 misses are followed; a policy that never forgets would follow them all."""
    policy = ExpectedValue()
    teach(policy, [True] * 1000)
    assert sum(follow(policy, [False] * 1000)) <= 175
    stubborn = ExpectedValue(forgetting=1.0)
    teach(stubborn, [True] * 1000)
    assert all(follow(stubborn, [False] * 1000))


def test_one_bad_source_does_not_discredit_another() -> None:
    """Sources are judged apart."""
    policy = ExpectedValue()
    teach(policy, [False] * 100)
    assert not policy.allows(opportunity())
    assert policy.allows(opportunity(guess(source="other")))


# ----------------------------------------------------------------------------------------------------- never peeking

questions = st.builds(
    lambda claims, wait, length, money, running: opportunity(
        *[guess(step=str(step), rank=rank, confidence=claim) for step, rank, claim in claims],
        wait_seconds=wait,
        step_seconds=length,
        money=money,
        running=running,
    ),
    st.lists(st.tuples(st.integers(0, 1), st.integers(0, 2), st.floats(0.0, 1.0)), min_size=1, max_size=3),
    st.none() | st.floats(0.0, 100.0),
    st.none() | st.floats(0.0, 100.0),
    st.floats(0.0, 0.1),
    st.integers(0, 5),
)
histories = st.lists(st.tuples(st.integers(0, 1), st.integers(0, 2), st.floats(0.0, 1.0), st.booleans()), max_size=25)


def after(history: list[tuple[int, int, float, bool]]) -> ExpectedValue:
    """A policy with a past."""
    policy = ExpectedValue(interference=0.01)
    for step, rank, claim, hit in history:
        policy.learn(Resolution(guess(step=str(step), rank=rank, confidence=claim), hit))
    return policy


@given(histories, questions, st.lists(questions, max_size=5))
def test_a_decision_depends_on_the_opportunity_and_on_what_was_learned(
    history: list[tuple[int, int, float, bool]], question: Opportunity, others: list[Opportunity]
) -> None:
    """Two policies with the same past agree, however often and about whatever one of them was asked in between."""
    asked = after(history)
    for other in (*others, question, question):
        asked.allows(other)
        asked.explain(other)
    assert asked.explain(question) == after(history).explain(question)
    assert asked.allows(question) is asked.explain(question).allowed


@given(histories, questions, st.booleans())
def test_an_outcome_does_not_decide_about_itself(
    history: list[tuple[int, int, float, bool]],
    question: Opportunity,
    hit: bool,  # noqa: FBT001 -- drawn
) -> None:
    """The answer is given before the guess is resolved: whatever it turns out to be changes later answers only."""
    one, other = after(history), after(history)
    before = one.explain(question)
    one.learn(Resolution(question.assumptions[0], hit))
    assert other.explain(question) == before
    other.learn(Resolution(question.assumptions[0], hit))
    assert other.explain(question) == one.explain(question)


@given(histories, questions)
def test_a_hit_never_makes_a_guess_less_likely_than_a_miss(
    history: list[tuple[int, int, float, bool]], question: Opportunity
) -> None:
    """Of two policies that differ in the last outcome, the one that saw the hit believes at least as much."""
    lucky, unlucky = after(history), after(history)
    lucky.learn(Resolution(question.assumptions[0], hit=True))
    unlucky.learn(Resolution(question.assumptions[0], hit=False))
    assert lucky.explain(question).probability >= unlucky.explain(question).probability - 1e-9


# ------------------------------------------------------------------------------------------------------------ reports


def test_an_explanation_says_why_in_words_and_as_data() -> None:
    """The sentence names the step, the finding and the numbers; the data is JSON."""
    policy = ExpectedValue()
    good = policy.explain(opportunity())
    assert good.reason.startswith("search may start on 1 guess(es): it is expected to pay (50.0% to save 8 s;")
    teach(policy, [False] * 60)
    bad = policy.explain(opportunity())
    assert "may not start" in bad.reason
    assert Finding.UNLIKELY.value in bad.reason
    data = json.loads(json.dumps(bad.as_dict()))
    assert data["allowed"] is False
    assert data["finding"] == Finding.UNLIKELY.value
    assert data["probabilities"] == pytest.approx([bad.probability])


def test_each_finding_is_reached() -> None:
    """Every reason for a refusal is told from the others."""
    policy = ExpectedValue()
    assert policy.explain(opportunity()).finding is Finding.WORTH_IT
    assert policy.explain(opportunity(guess(confidence=0.01))).finding is Finding.UNLIKELY
    assert policy.explain(opportunity(wait_seconds=0.0)).finding is Finding.NOTHING_TO_SAVE
    assert policy.explain(opportunity(money=1.0)).finding is Finding.LOSS
    untimed = opportunity(step_seconds=None, spent=Spent(attempts=4))
    assert policy.explain(untimed).finding is Finding.UNTIMED


# ----------------------------------------------------------------------------------------------------------- settings


@pytest.mark.parametrize(
    "settings",
    [
        {"value_of_second": -0.1},
        {"value_of_second": float("inf")},
        {"quantile": 0.0},
        {"quantile": 0.6},
        {"interference": -1.0},
        {"price_per_token": float("nan")},
        {"min_probability": 1.0},
        {"min_probability": -0.1},
        {"assumed_seconds": -1.0},
        {"explorations": -1},
        {"forgetting": 0.0},
        {"forgetting": 1.5},
        {"depth": -1},
        {"width": 0},
    ],
)
def test_settings_out_of_range_are_refused(settings: Mapping[str, float]) -> None:
    """The mistake is reported when the policy is built, with the name of the setting."""
    with pytest.raises(InvalidSettingError, match=next(iter(settings))):
        ExpectedValue(**settings)  # type: ignore[arg-type]


def test_a_memory_too_short_to_give_up_an_adversary_is_refused() -> None:
    """With ten outcomes remembered an always wrong source would still be believed at 1/6."""
    with pytest.raises(InvalidSettingError, match="forgetting"):
        ExpectedValue(forgetting=0.9)
    ExpectedValue(forgetting=0.9, prior=Prior(weight=0.5))
    ExpectedValue(forgetting=0.9, min_probability=0.2)
    ExpectedValue(forgetting=0.9, min_probability=0.0)
