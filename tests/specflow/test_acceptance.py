"""Calibration: what is accepted against what was claimed."""

from __future__ import annotations

import random

import pytest

from specflow.policies.acceptance import Calibration, Profile


def taught(claim: float | None, pattern: list[int], rounds: int = 60, size: int = 4) -> tuple[Calibration, Profile]:
    """A calibration after rounds in which the pattern's numbers of items were accepted, in turn."""
    calibration, profile = Calibration(size), Profile(size)
    survival = None if claim is None else [claim ** (position + 1) for position in range(size)]
    for turn in range(rounds):
        calibration.record(profile, survival, size, pattern[turn % len(pattern)])
    return calibration, profile


def test_before_anything_was_seen_the_prior_speaks() -> None:
    """Every position starts from the same assumption, below certainty and above even odds."""
    calibration, profile = Calibration(3), Profile(3)
    ratios = [calibration.ratio(profile, position) for position in range(3)]
    assert ratios == [ratios[0]] * 3
    assert 0.5 < ratios[0] < 1.0


@pytest.mark.parametrize(("claim", "expected"), [(None, 0.5), (1.0, 0.5), (0.5, 1.0), (0.25, 2.0)])
def test_the_ratio_is_acceptances_per_claim(claim: float | None, expected: float) -> None:
    """With every second draft right, claims of 1, 1/2 and 1/4 are corrected by 1/2, 1 and 2."""
    calibration, profile = taught(claim, [0, 4])
    assert calibration.ratio(profile, 0) == pytest.approx(expected, rel=0.15)
    assert calibration.rate(profile, 0) == pytest.approx(0.5, rel=0.15)


def test_a_drafter_without_estimates_has_its_acceptance_profile_as_ratio() -> None:
    """Claiming nothing equals claiming certainty, so ratio and rate agree at every position."""
    calibration, profile = taught(None, [1, 3, 0, 4])
    for position in range(4):
        assert calibration.ratio(profile, position) == pytest.approx(calibration.rate(profile, position))


def test_positions_are_told_apart() -> None:
    """Acceptance at a position counts only drafts whose earlier items were accepted."""
    calibration, profile = taught(None, [2])
    rates = [calibration.rate(profile, position) for position in range(4)]
    assert rates[0] > 0.9
    assert rates[1] > 0.9
    assert rates[2] < 0.1
    # Position 3 was never reached: it is assumed to be like the others on average.
    assert rates[2] < rates[3] < rates[0]


def test_the_estimate_follows_a_change_within_its_memory() -> None:
    """Forty failures after a long good time bring the ratio below 1/4, forty successes above 3/4."""
    calibration, profile = taught(1.0, [4], rounds=200)
    for accepted, bound in ((0, 0.25), (4, 0.75)):
        for _ in range(40):
            calibration.record(profile, [1.0] * 4, 4, accepted)
        assert (calibration.ratio(profile, 0) < bound) == (accepted == 0)


def test_new_chains_start_from_what_others_taught_and_then_speak_for_themselves() -> None:
    """A fresh chain inherits the pool's ratio; with its own results it departs from it."""
    calibration, _ = taught(1.0, [0], rounds=60)
    fresh = Profile(4)
    inherited = calibration.ratio(fresh, 0)
    assert inherited < 0.4
    for _ in range(10):
        calibration.record(fresh, [1.0] * 4, 4, 4)
    assert calibration.ratio(fresh, 0) > 0.6


def test_a_chain_alone_is_not_counted_twice() -> None:
    """With one chain the pool adds only what the chain itself has begun to forget.

    Three failures are then three failures, against a prior of 0.8 whose weight has fallen from 2 to 8 / (4 + 3).
    """
    calibration, profile = taught(1.0, [0], rounds=3, size=1)
    prior = 8.0 / (4.0 + 3.0)
    assert calibration.ratio(profile, 0) == pytest.approx(0.8 * prior / (3.0 + prior), rel=0.05)


def test_forgiving_forgets_failures_but_not_successes() -> None:
    """After a successful probe a bad record is wiped out; a good one stays."""
    bad, profile = taught(1.0, [0])
    before = bad.ratio(profile, 0)
    bad.forgive(profile)
    assert bad.ratio(profile, 0) > 3 * before
    good, profile = taught(1.0, [4])
    before = good.ratio(profile, 0)
    good.forgive(profile)
    assert good.ratio(profile, 0) == before


def test_estimates_that_rise_or_vanish_are_taken_sensibly() -> None:
    """A survival estimate that rises counts as certainty for its item, one of zero as no claim."""
    calibration, profile = Calibration(3), Profile(3)
    calibration.record(profile, [0.5, 0.9, 0.0], 3, 3)
    assert profile.claims == pytest.approx([0.5, 1.0, 0.0])
    assert profile.trials == pytest.approx([1.0, 1.0, 1.0])


def test_random_claims_and_results_are_calibrated() -> None:
    """For a drafter whose conditional claims of 0.2 to 0.9 are true, the ratio stays within 0.3 of 1.

    The memory is 16 claims, so the ratio has a standard deviation of at most about 0.2; averaged over the last 200 of
    400 rounds it is below 0.06, and a false alarm needs five of those.
    """
    rng = random.Random(5)
    calibration, profile = Calibration(2), Profile(2)
    ratios: list[float] = []
    for turn in range(400):
        claim = rng.uniform(0.2, 0.9)
        first, second = rng.random() < claim, rng.random() < claim
        calibration.record(profile, [claim, claim * claim], 2, 2 if first and second else 1 if first else 0)
        if turn >= 200:
            ratios.append(calibration.ratio(profile, 0))
    assert sum(ratios) / len(ratios) == pytest.approx(1.0, abs=0.3)
