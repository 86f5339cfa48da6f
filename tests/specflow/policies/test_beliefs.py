"""What guesses are worth is learned from how they turn out."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specflow.errors import InvalidSettingError
from specflow.policies import Belief, Beliefs, Prior
from specflow.policies.beliefs import claim
from tests.specflow.policies.opportunities import guess, outcomes


def learned(beliefs: Beliefs, hits: list[bool], **fields: object) -> Beliefs:
    """The same beliefs after some outcomes of one kind of guess."""
    for hit in hits:
        beliefs.learn(guess(**fields), hit=hit)  # type: ignore[arg-type]
    return beliefs


# --------------------------------------------------------------------------------------------------------- arithmetic


def test_nothing_is_known_at_first() -> None:
    """A claim of certainty starts at the prior's trust, with the prior's weight: Beta(1, 1)."""
    assert Beliefs().about(guess()) == Belief(1.0, 1.0)
    assert Beliefs(prior=Prior(trust=0.25, weight=8.0)).about(guess()) == Belief(2.0, 6.0)


def test_hits_and_misses_are_counted() -> None:
    """Without forgetting and without relatives the posterior is the conjugate one: prior plus counts."""
    beliefs = learned(Beliefs(forgetting=1.0), [True, True, False, True])
    assert beliefs.about(guess()) == Belief(1.0 + 3.0, 1.0 + 1.0)


def test_older_outcomes_weigh_less() -> None:
    """Each outcome halves the weight of those before it where forgetting is 0.5."""
    beliefs = learned(Beliefs(forgetting=0.5), [True, True, False])
    assert beliefs.about(guess()) == Belief(1.0 + 0.25 + 0.5, 1.0 + 1.0)


def test_raw_confidence_counts_before_anything_was_seen() -> None:
    """A guess of half the confidence starts at half the probability."""
    assert Beliefs().about(guess(confidence=0.4)).mean == pytest.approx(0.2)


def test_a_claim_is_bounded_by_the_rank() -> None:
    """The second likeliest of exclusive guesses holds with one half at most, the third with one third."""
    assert [claim(guess(rank=rank)) for rank in range(3)] == [1.0, 0.5, pytest.approx(1 / 3)]
    assert claim(guess(rank=2, confidence=0.1)) == 0.1


def test_other_cells_of_the_step_are_asked() -> None:
    """A new bucket starts from what its claim was worth elsewhere at this step: hand-computed."""
    beliefs = learned(Beliefs(forgetting=1.0), [True, False, False, False], confidence=0.8)
    # 1 hit on 3.2 claims there, joined to the prior's 0.5 with weight 2: (1 + 1) / (2 + 3.2).
    ratio = 2.0 / 5.2
    assert beliefs.about(guess(confidence=0.5)).mean == pytest.approx(0.5 * ratio)


def test_other_steps_of_the_source_are_asked_last() -> None:
    """A new step starts from what the source was worth at other steps; a new source from the prior."""
    beliefs = learned(Beliefs(forgetting=1.0), [False] * 8, step="other")
    assert beliefs.about(guess()).mean == pytest.approx(1.0 / 10.0)
    assert beliefs.about(guess(source="stranger")).mean == 0.5


def test_no_observation_counts_twice() -> None:
    """What a cell saw itself is not counted again as what its relatives saw."""
    beliefs = learned(Beliefs(), [False] * 10)
    seen = sum(0.98**age for age in range(10))
    assert beliefs.about(guess()).mean == pytest.approx(1.0 / (2.0 + seen))


def test_an_underconfident_source_is_believed_beyond_its_claims() -> None:
    """Guesses claimed at 0.2 that always hold make a new bucket of that source better than it claims."""
    beliefs = learned(Beliefs(), [True] * 40, confidence=0.2)
    assert beliefs.about(guess(confidence=0.2)).mean > 0.9
    assert beliefs.about(guess(confidence=0.35)).mean > 0.9


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2), st.floats(0.0, 1.0), st.booleans()), max_size=60))
def test_beliefs_stay_proper_distributions(history: list[tuple[int, int, float, bool]]) -> None:
    """After any history every belief has positive parameters, and its quantiles lie in order inside [0, 1]."""
    beliefs = Beliefs(forgetting=0.9)
    for step, rank, confidence, hit in history:
        beliefs.learn(guess(step=str(step), rank=rank, confidence=confidence), hit=hit)
    for confidence in (0.0, 0.05, 0.5, 1.0):
        belief = beliefs.about(guess(step="0", rank=1, confidence=confidence))
        assert belief.alpha > 0.0
        assert belief.beta > 0.0
        quantiles = [belief.quantile(probability) for probability in (0.1, 0.2, 0.5)]
        assert 0.0 <= min(quantiles) <= max(quantiles) <= 1.0
        assert quantiles == pytest.approx(sorted(quantiles), abs=1e-12)


@given(st.lists(st.booleans(), max_size=30), st.lists(st.booleans(), max_size=30))
def test_the_order_between_sources_does_not_matter(one: list[bool], other: list[bool]) -> None:
    """What is believed of a source depends on its own outcomes only."""
    alone = learned(Beliefs(), one)
    both = learned(learned(Beliefs(), other, source="other"), one)
    assert alone.about(guess()) == both.about(guess())


# -------------------------------------------------------------------------------------------------------- convergence


@pytest.mark.parametrize(
    ("rate", "confidence", "rank"), [(0.3, 1.0, 0), (0.9, 0.2, 0), (0.5, 0.5, 1), (0.02, 0.99, 2), (1.0, 0.5, 0)]
)
def test_calibration_converges_whatever_is_claimed(rate: float, confidence: float, rank: int) -> None:
    """After 20,000 outcomes without forgetting the belief is within 0.02 of the rate.

    By Hoeffding's bound a right implementation fails this with probability 2 exp(-2 * 20000 * 0.0199 ** 2) < 3e-7 per
    case; the prior moves the mean by 1e-4 at most. An uncorrected claim is off by 0.3 at least in all cases but one.
    """
    beliefs = Beliefs(forgetting=1.0)
    for hit in outcomes(rate, 20_000, seed=rank):
        beliefs.learn(guess(confidence=confidence, rank=rank), hit=hit)
    assert beliefs.about(guess(confidence=confidence, rank=rank)).mean == pytest.approx(rate, abs=0.02)


def test_ranks_and_buckets_are_told_apart() -> None:
    """Four kinds of guesses of one source, learned side by side, each end at their own rate (odds as above)."""
    rates = {(0, 0.9): 0.8, (0, 0.3): 0.1, (1, 0.9): 0.15, (1, 0.3): 0.05}
    beliefs = Beliefs(forgetting=1.0)
    for (rank, confidence), rate in rates.items():
        for hit in outcomes(rate, 20_000, seed=int(100 * rate)):
            beliefs.learn(guess(confidence=confidence, rank=rank), hit=hit)
    for (rank, confidence), rate in rates.items():
        assert beliefs.about(guess(confidence=confidence, rank=rank)).mean == pytest.approx(rate, abs=0.02)


def test_lower_quantiles_are_exceeded_as_often_as_they_say() -> None:
    """The true rate lies below the 0.2 quantile of its posterior in a fifth of 1,000 sources, or less.

    Each source has a rate drawn uniformly, which is what the prior Beta(1, 1) assumes, so the share is 0.2. A
    count outside (140, 260) has probability below 1e-5. A mean instead of a quantile would give about 500.
    """
    below = 0
    for seed in range(1000):
        rate = (seed + 0.5) / 1000.0
        beliefs = Beliefs(forgetting=1.0)
        for hit in outcomes(rate, 12, seed):
            beliefs.learn(guess(), hit=hit)
        below += rate < beliefs.about(guess()).quantile(0.2)
    assert 140 < below < 260


def test_forgetting_tracks_drift() -> None:
    """After 200 hits, 150 misses bring the belief below 7 %; without forgetting it would still be above one half."""
    history = [True] * 200 + [False] * 150
    assert learned(Beliefs(forgetting=0.98), history).about(guess()).mean < 0.07
    assert learned(Beliefs(forgetting=1.0), history).about(guess()).mean > 0.5


# ------------------------------------------------------------------------------------------------------------ settings


@pytest.mark.parametrize("settings", [{"trust": 0.0}, {"trust": 1.1}, {"weight": 0.0}, {"weight": float("nan")}])
def test_priors_out_of_range_are_refused(settings: dict[str, float]) -> None:
    """The mistake is reported when the prior is built."""
    with pytest.raises(InvalidSettingError):
        Prior(**settings)


@pytest.mark.parametrize("forgetting", [0.0, 1.1, -1.0, float("nan")])
def test_forgetting_out_of_range_is_refused(forgetting: float) -> None:
    """The mistake is reported when the beliefs are built."""
    with pytest.raises(InvalidSettingError, match="forgetting"):
        Beliefs(forgetting=forgetting)


def test_beliefs_are_values() -> None:
    """A belief that was handed out does not change with what is learned later."""
    beliefs = Beliefs()
    before = beliefs.about(guess())
    beliefs.learn(guess(), hit=True)
    assert before == Belief(1.0, 1.0)
    with pytest.raises(dataclasses.FrozenInstanceError):
        before.alpha = 2.0  # type: ignore[misc]
