"""Beta, binomial and hypergeometric probabilities against known values and exact sums."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from specflow.policies.odds import beta_cdf, beta_quantile, binomial_tail, hypergeometric_tail

shapes = st.floats(0.05, 500.0)
probabilities = st.floats(0.0, 1.0)


@pytest.mark.parametrize(
    ("x", "alpha", "beta", "expected"),
    [
        (0.3, 1.0, 1.0, 0.3),  # uniform
        (0.3, 2.0, 1.0, 0.09),  # x ** 2
        (0.3, 1.0, 3.0, 1.0 - 0.7**3),
        (0.3, 2.0, 2.0, 3 * 0.3**2 - 2 * 0.3**3),
        (0.25, 0.5, 0.5, 2.0 / math.pi * math.asin(0.5)),  # arcsine law
        (0.9, 0.5, 0.5, 2.0 / math.pi * math.asin(math.sqrt(0.9))),
        (0.5, 300.0, 300.0, 0.5),
        (0.0, 3.0, 4.0, 0.0),
        (1.0, 3.0, 4.0, 1.0),
    ],
)
def test_the_incomplete_beta_function_has_its_known_values(
    x: float, alpha: float, beta: float, expected: float
) -> None:
    """Closed forms are met to 12 digits."""
    assert beta_cdf(x, alpha, beta) == pytest.approx(expected, rel=1e-12, abs=1e-15)


@given(st.integers(1, 40), st.integers(1, 40), st.integers(0, 64))
def test_whole_shapes_are_binomial_sums(alpha: int, beta: int, numerator: int) -> None:
    """I_x(a, b) is the probability of at least a successes in a + b - 1 trials, summed exactly."""
    rate = Fraction(numerator, 64)
    trials = alpha + beta - 1
    exact = sum(
        math.comb(trials, count) * rate**count * (1 - rate) ** (trials - count) for count in range(alpha, trials + 1)
    )
    assert beta_cdf(float(rate), alpha, beta) == pytest.approx(float(exact), rel=1e-11, abs=1e-14)


@given(probabilities, shapes, shapes)
def test_the_mirror_image_adds_up_to_one(x: float, alpha: float, beta: float) -> None:
    """I_x(a, b) + I_(1 - x)(b, a) = 1, on both sides of the mean."""
    # 1 - x is rounded, and near 0 or 1 a steep density turns that into a larger difference.
    if 1e-6 < x < 1.0 - 1e-6:
        assert beta_cdf(x, alpha, beta) + beta_cdf(1.0 - x, beta, alpha) == pytest.approx(1.0, abs=1e-9)


def test_large_shapes_converge() -> None:
    """With a million observations the distribution is normal around its mean to three digits."""
    alpha = beta = 5e5
    deviation = math.sqrt(0.25 / (alpha + beta + 1))
    assert beta_cdf(0.5 + deviation, alpha, beta) == pytest.approx(0.8413, abs=1e-3)


@pytest.mark.parametrize(("alpha", "beta"), [(1e-3, 50.0), (50.0, 1e-3), (0.002, 0.002), (1e5, 3e5), (0.5, 0.5)])
@pytest.mark.parametrize("probability", [0.0, 1e-9, 0.2, 0.5, 0.999, 1.0])
def test_the_quantile_is_bracketed_for_any_shape(probability: float, alpha: float, beta: float) -> None:
    """Extreme shapes too: just below the quantile the distribution has less than the probability, just above more."""
    quantile = beta_quantile(probability, alpha, beta)
    assert beta_cdf(quantile - 1e-9, alpha, beta) <= probability + 1e-12
    assert beta_cdf(quantile + 1e-9, alpha, beta) >= probability - 1e-12


@given(st.floats(0.01, 0.99), st.floats(0.5, 200.0), st.floats(0.5, 200.0))
def test_the_quantile_inverts_the_distribution(probability: float, alpha: float, beta: float) -> None:
    """The probability of staying below a quantile is the one it was asked for."""
    assert beta_cdf(beta_quantile(probability, alpha, beta), alpha, beta) == pytest.approx(probability, abs=1e-8)


@example(1.2378974571788997e-23, 3.6960331553044077e-270, 168.0, 2.0)
@given(probabilities, probabilities, shapes, shapes)
def test_the_quantile_is_monotone(one: float, other: float, alpha: float, beta: float) -> None:
    """A larger probability never has a smaller quantile, up to the last digits."""
    low, high = sorted((one, other))
    assert 0.0 <= beta_quantile(low, alpha, beta) <= beta_quantile(high, alpha, beta) + 1e-12 <= 1.0 + 1e-12


@given(st.floats(0.01, 0.99), st.floats(0.5, 100.0), st.floats(0.5, 100.0))
def test_the_quantile_rises_with_hits_and_falls_with_misses(probability: float, alpha: float, beta: float) -> None:
    """One more hit raises every quantile, one more miss lowers it, up to the last digits."""
    middle = beta_quantile(probability, alpha, beta)
    assert beta_quantile(probability, alpha + 1.0, beta) >= middle - 1e-9
    assert beta_quantile(probability, alpha, beta + 1.0) <= middle + 1e-9


@pytest.mark.parametrize("probability", [0.05, 0.2, 0.5])
def test_the_uniform_law_is_its_own_quantile(probability: float) -> None:
    """Beta(1, 1) has quantile q at probability q."""
    assert beta_quantile(probability, 1.0, 1.0) == pytest.approx(probability, abs=1e-14)


@given(st.integers(1, 60), st.integers(0, 64), st.data())
def test_the_binomial_tail_is_the_exact_sum(trials: int, numerator: int, data: st.DataObject) -> None:
    """At most k successes, against rational arithmetic."""
    hits = data.draw(st.integers(0, trials))
    rate = Fraction(numerator, 64)
    exact = sum(math.comb(trials, count) * rate**count * (1 - rate) ** (trials - count) for count in range(hits + 1))
    assert binomial_tail(hits, trials, float(rate)) == pytest.approx(float(exact), rel=1e-11, abs=1e-14)


def test_the_hypergeometric_tail_has_its_known_value() -> None:
    """Fisher's tea: with four of eight cups milk first, naming all four by luck has probability 1 / 70."""
    assert hypergeometric_tail(0, 4, 4, 8) == pytest.approx(1 / 70)
    assert hypergeometric_tail(1, 4, 4, 8) == pytest.approx(17 / 70)
    assert hypergeometric_tail(4, 4, 4, 8) == 1.0


def test_impossible_counts_have_no_weight() -> None:
    """Where more is drawn than there are failures some successes are certain."""
    assert hypergeometric_tail(1, 5, 6, 8) == 0.0  # two failures: at least three successes
    assert hypergeometric_tail(3, 5, 6, 8) == pytest.approx(math.comb(6, 3) / math.comb(8, 5))


def test_large_populations_do_not_overflow() -> None:
    """Binomial coefficients beyond the range of floats still give a probability."""
    assert 0.0 < hypergeometric_tail(200, 500, 5000, 10_000) < 1e-4
