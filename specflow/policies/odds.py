"""Probabilities that policies reason with: Beta, binomial and hypergeometric. Pure functions of numbers."""

from __future__ import annotations

import math
from functools import lru_cache

_MAX_STEPS = 60
"""Most steps to a quantile: enough to find it by bisection alone."""
_CLOSE = 1e-14
"""A step as short as this ends the search."""
_LEAST = 1e-12
"""The distribution function is not known to a smaller probability than this."""
_MAX_TERMS = 10_000
"""Most terms of the continued fraction. It takes about the square root of the larger parameter."""
_PRECISION = 1e-16
_TINY = 1e-300
"""Stands for a denominator of zero (Lentz's method)."""


def beta_cdf(x: float, alpha: float, beta: float) -> float:
    """Probability that a Beta(``alpha``, ``beta``) variable is at most ``x``: the regularised incomplete beta function.

    Computed by its continued fraction with Lentz's method (Press et al., "Numerical Recipes", section 6.4).

    Args:
        x: the bound.
        alpha: first shape parameter, > 0.
        beta: second shape parameter, > 0.
    """
    if x <= 0.0:
        return 0.0
    if x >= 1.0:
        return 1.0
    log_scale = math.lgamma(alpha + beta) - math.lgamma(alpha) - math.lgamma(beta)
    scale = math.exp(log_scale + alpha * math.log(x) + beta * math.log1p(-x))
    # The fraction converges fast below the mean. Above it the mirror image is used.
    if x < (alpha + 1.0) / (alpha + beta + 2.0):
        return scale * _continued_fraction(x, alpha, beta) / alpha
    return 1.0 - scale * _continued_fraction(1.0 - x, beta, alpha) / beta


def _continued_fraction(x: float, alpha: float, beta: float) -> float:
    total = alpha + beta
    ratio = 1.0
    inverse = 1.0 / _safe(1.0 - total * x / (alpha + 1.0))
    value = inverse
    for term in range(1, _MAX_TERMS):
        double = alpha + 2 * term
        even = term * (beta - term) * x / ((double - 1.0) * double)
        inverse = 1.0 / _safe(1.0 + even * inverse)
        ratio = _safe(1.0 + even / ratio)
        value *= inverse * ratio
        odd = -(alpha + term) * (total + term) * x / (double * (double + 1.0))
        inverse = 1.0 / _safe(1.0 + odd * inverse)
        ratio = _safe(1.0 + odd / ratio)
        step = inverse * ratio
        value *= step
        if abs(step - 1.0) < _PRECISION:
            break
    return value


def _safe(denominator: float) -> float:
    return denominator if abs(denominator) > _TINY else _TINY


@lru_cache(maxsize=4096)
def beta_quantile(probability: float, alpha: float, beta: float) -> float:
    """The value that a Beta(``alpha``, ``beta``) variable stays at or below with the given probability.

    Found by bisection, shortened by Newton's steps wherever they stay inside the bracket. Results are remembered: a
    policy asks for the same one until it learns something.

    Args:
        probability: in [0, 1]; between 0 and 1e-12 it counts as 1e-12, since the distribution is not known better.
        alpha: first shape parameter, > 0.
        beta: second shape parameter, > 0.
    """
    if probability <= 0.0:
        return 0.0
    probability = max(probability, _LEAST)
    if probability >= 1.0:
        return 1.0
    log_scale = math.lgamma(alpha + beta) - math.lgamma(alpha) - math.lgamma(beta)
    low, high = 0.0, 1.0
    guess = alpha / (alpha + beta)
    for _ in range(_MAX_STEPS):
        excess = beta_cdf(guess, alpha, beta) - probability
        if excess < 0.0:
            low = guess
        else:
            high = guess
        density = math.exp(log_scale + (alpha - 1.0) * math.log(guess) + (beta - 1.0) * math.log1p(-guess))
        before, guess = guess, guess - excess / density if density > _TINY else low
        if not low < guess < high:
            guess = 0.5 * (low + high)
        if abs(guess - before) <= _CLOSE:
            break
    return guess


def binomial_tail(hits: int, trials: int, rate: float) -> float:
    """Probability of at most ``hits`` successes in ``trials`` independent trials that succeed at ``rate``."""
    if hits >= trials:
        return 1.0
    return beta_cdf(1.0 - rate, trials - hits, hits + 1)


def hypergeometric_tail(hits: int, draws: int, successes: int, population: int) -> float:
    """Probability of at most ``hits`` successes among ``draws`` of a population, drawn without putting back.

    This is Fisher's exact test, one-sided: under equal rates, how seldom the drawn part would do as badly as it did,
    whatever that rate is (Fisher 1922, "On the interpretation of chi-squared from contingency tables").

    Args:
        hits: successes among the drawn.
        draws: how many are drawn.
        successes: successes in the whole population.
        population: size of the whole population.
    """
    failures = population - successes
    least = max(0, draws - failures)
    ways = sum(math.comb(successes, count) * math.comb(failures, draws - count) for count in range(least, hits + 1))
    return ways / math.comb(population, draws)
