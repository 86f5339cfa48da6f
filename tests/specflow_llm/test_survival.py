from __future__ import annotations

import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from specflow.errors import InvalidSettingError
from specflow_llm.drafters.survival import HitTable

UNTIMED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
"""A busy machine is no failure."""

OUTCOMES = st.lists(st.booleans(), max_size=40)
RATES = st.floats(0.0, 1.0)


def quarter_prior(bucket: int) -> float:
    """Expect a quarter of the predictions of every kind to come true."""
    del bucket
    return 0.25


def reference_rate(outcomes: list[bool], mean: float, strength: float, decay: float) -> float:
    """The posterior mean with each record's weight written out."""
    weights = [decay ** (len(outcomes) - 1 - index) for index in range(len(outcomes))]
    hits = sum(weight for weight, hit in zip(weights, outcomes, strict=True) if hit)
    return (strength * mean + hits) / (strength + sum(weights))


@UNTIMED
@given(OUTCOMES, RATES, st.floats(0.1, 50.0), st.floats(0.01, 1.0))
def test_a_rate_is_the_posterior_mean_of_weighted_records(
    outcomes: list[bool], mean: float, strength: float, decay: float
) -> None:
    """After any records the rate and weight equal the sums over all of them."""
    table = HitTable(lambda _: mean, strength=strength, decay=decay)
    for hit in outcomes:
        table.record(3, hit)
    assert table.rate(3) == pytest.approx(reference_rate(outcomes, mean, strength, decay))
    assert table.weight(3) == pytest.approx(sum(decay**age for age in range(len(outcomes))))


@UNTIMED
@given(OUTCOMES)
def test_rates_never_reach_certainty(outcomes: list[bool]) -> None:
    """With a prior inside (0, 1) no run of hits or misses makes a rate 0 or 1."""
    table = HitTable()
    for hit in outcomes:
        table.record(0, hit)
    assert 0.0 < table.rate(0) < 1.0


def test_an_unseen_bucket_has_its_prior_rate() -> None:
    """Before anything is recorded a bucket's rate is what the prior says of it, and half without one."""
    table = HitTable(lambda bucket: bucket / 10)
    assert [table.rate(bucket) for bucket in (0, 3, 10)] == [0.0, 0.3, 1.0]
    assert HitTable().rate(-7) == 0.5
    assert table.weight(3) == 0.0


def test_buckets_are_separate() -> None:
    """Recording in one bucket changes no other."""
    table = HitTable(quarter_prior)
    table.record(1, hit=True)
    assert (table.rate(0), table.rate(2)) == (0.25, 0.25)
    assert table.rate(1) == pytest.approx((4 * 0.25 + 1) / 5)


def test_old_records_fade() -> None:
    """After a change of habit the rate follows the recent records, where a table without forgetting lags behind."""
    forgetting, remembering = HitTable(decay=0.98), HitTable(decay=1.0)
    for table in (forgetting, remembering):
        for hit in [True] * 1000 + [False] * 200:
            table.record(0, hit)
    assert forgetting.rate(0) < 0.06
    assert remembering.rate(0) > 0.8


def test_the_rate_converges_to_the_true_one() -> None:
    """4000 records of a coin with rate 0.3 give a rate within 0.04 of it (5.5 deviations: odds of 1 in 25 million)."""
    rng = random.Random(11)
    table = HitTable(decay=1.0)
    for _ in range(4000):
        table.record(5, rng.random() < 0.3)
    assert table.rate(5) == pytest.approx(0.3, abs=0.04)


@UNTIMED
@given(st.lists(st.tuples(st.integers(0, 3), st.booleans()), max_size=30), st.lists(st.integers(0, 3), max_size=16))
def test_survival_is_the_running_product_of_rates(records: list[tuple[int, bool]], buckets: list[int]) -> None:
    """``survival[k]`` multiplies the rates of predictions 0..k, so it never rises."""
    table = HitTable()
    for bucket, hit in records:
        table.record(bucket, hit)
    survival = table.survival(buckets)
    product = 1.0
    for value, bucket in zip(survival, buckets, strict=True):
        product *= table.rate(bucket)
        assert value == pytest.approx(product)
    assert survival == sorted(survival, reverse=True)


def test_bytes_grow_with_the_buckets() -> None:
    """A table reports more bytes once it holds more buckets."""
    table = HitTable()
    empty = table.num_bytes
    for bucket in range(100):
        table.record(bucket, hit=False)
    assert table.num_bytes >= empty + 100 * 3 * 24


@pytest.mark.parametrize("strength", [0.0, -1.0, float("nan")])
def test_a_prior_without_weight_is_refused(strength: float) -> None:
    """A strength that is not positive is named in the error."""
    with pytest.raises(InvalidSettingError, match="strength"):
        HitTable(strength=strength)


@pytest.mark.parametrize("decay", [0.0, 1.5, -0.1, float("nan")])
def test_an_impossible_decay_is_refused(decay: float) -> None:
    """A decay outside (0, 1] is named in the error."""
    with pytest.raises(InvalidSettingError, match="decay"):
        HitTable(decay=decay)


@pytest.mark.parametrize("mean", [-0.1, 1.1, float("nan")])
def test_a_prior_outside_the_unit_interval_is_refused(mean: float) -> None:
    """A prior that is no probability is refused when its bucket is first used."""
    table = HitTable(lambda _: mean)
    with pytest.raises(InvalidSettingError, match="prior"):
        table.rate(0)
    with pytest.raises(InvalidSettingError, match="prior"):
        table.record(0, hit=True)
