"""How well probabilities keep their word: calibration error, Brier score, area under the curve, reliability bins.

Letters in shapes: N observations. ``probabilities`` are in [0, 1], ``labels`` are true or false.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from specflow.errors import InvalidSettingError

NUM_BINS = 20
"""Bins of the calibration error: as many, and as wide, as the field's reports have (DeepSpec's evaluator)."""

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class ReliabilityBin:
    """One bar of a reliability plot: predictions between ``low`` and ``high`` (the last bin includes 1)."""

    low: float
    high: float
    count: int
    mean_predicted: float
    """Mean of the predictions in the bin; its middle where there are none."""
    fraction_true: float
    """How many of them came true; 0 where there are none."""


def expected_calibration_error(probabilities: npt.ArrayLike, labels: npt.ArrayLike, *, bins: int = NUM_BINS) -> float:
    """ECE (Naeini et al. 2015): mean distance between prediction and frequency over equal-width bins, by their counts.

    It cannot tell a sharp forecast from one that always says the base rate, and it is never 0 in a sample: see
    :func:`calibration_noise`.

    Args:
        probabilities: [N].
        labels: [N].
        bins: how many equal parts [0, 1] is cut into.

    Returns:
        In [0, 1]; 0.0 for no observations.

    Raises:
        InvalidSettingError: the lengths differ, a probability is outside [0, 1], or ``bins`` is below 1.
    """
    predicted, came_true = checked(probabilities, labels, bins)
    return _ece(predicted, came_true, bins)


def _ece(predicted: Floats, came_true: Bools, bins: int) -> float:
    if not predicted.size:
        return 0.0
    surplus = np.bincount(_bin_of(predicted, bins), weights=predicted - came_true, minlength=bins)
    return float(np.abs(surplus).sum() / predicted.size)


def calibration_noise(probabilities: npt.ArrayLike, *, bins: int = NUM_BINS) -> float:
    """The ECE that predictions as good as possible would show, from chance alone.

    In a bin of n independent outcomes with the predicted probabilities, the distance between mean prediction and
    frequency has the standard deviation sqrt(sum p (1 - p)) / n, and a normal variable's mean distance is
    sqrt(2 / pi) of it. An ECE near this value says nothing but that there are too few observations to say more.
    Outcomes of one request are not independent, so the truth is somewhat higher.

    Args:
        probabilities: [N].
        bins: as for the ECE.

    Returns:
        In [0, 1]; 0.0 for no observations.

    Raises:
        InvalidSettingError: a probability is outside [0, 1], or ``bins`` is below 1.
    """
    predicted, _ = checked(probabilities, np.zeros(np.shape(probabilities), dtype=np.bool_), bins)
    if not predicted.size:
        return 0.0
    variance = np.bincount(_bin_of(predicted, bins), weights=predicted * (1.0 - predicted), minlength=bins)
    return float(math.sqrt(2.0 / math.pi) * np.sqrt(variance).sum() / predicted.size)


def brier_score(probabilities: npt.ArrayLike, labels: npt.ArrayLike) -> float:
    """Mean squared distance between prediction and outcome (Brier 1950): a proper score, so honesty minimises it.

    Returns:
        In [0, 1]; 0.0 for no observations.

    Raises:
        InvalidSettingError: the lengths differ, or a probability is outside [0, 1].
    """
    predicted, came_true = checked(probabilities, labels, 1)
    return float(np.mean((predicted - came_true) ** 2)) if predicted.size else 0.0


def area_under_curve(scores: npt.ArrayLike, labels: npt.ArrayLike) -> float | None:
    """AUC: the probability that a true one scores above a false one, ties counting half.

    Exact, by mean ranks (Mann and Whitney 1947), not from a histogram.

    Args:
        scores: [N] any finite numbers.
        labels: [N].

    Returns:
        In [0, 1]; None where all labels are equal: there is no pair to compare.

    Raises:
        InvalidSettingError: the lengths differ.
    """
    values, came_true = np.asarray(scores, dtype=np.float64), np.asarray(labels, dtype=np.bool_)
    if values.shape != came_true.shape or values.ndim != 1:
        raise InvalidSettingError("labels", came_true.shape, f"one per score, {values.shape}")
    num_true = int(came_true.sum())
    num_false = came_true.size - num_true
    if not num_true or not num_false:
        return None
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    last_rank = np.cumsum(counts)
    mean_rank = last_rank - (counts - 1) / 2.0
    rank_sum = float(mean_rank[inverse][came_true].sum())
    return (rank_sum - num_true * (num_true + 1) / 2.0) / (num_true * num_false)


def reliability(
    probabilities: npt.ArrayLike, labels: npt.ArrayLike, *, bins: int = NUM_BINS
) -> tuple[ReliabilityBin, ...]:
    """The bins that the ECE is made of, empty ones included.

    Raises:
        InvalidSettingError: as :func:`expected_calibration_error`.
    """
    predicted, came_true = checked(probabilities, labels, bins)
    index = _bin_of(predicted, bins)
    counts = np.bincount(index, minlength=bins)
    sums = np.bincount(index, weights=predicted, minlength=bins)
    hits = np.bincount(index, weights=came_true, minlength=bins)
    return tuple(
        ReliabilityBin(
            low=number / bins,
            high=(number + 1) / bins,
            count=int(count),
            mean_predicted=float(sums[number] / count) if count else (number + 0.5) / bins,
            fraction_true=float(hits[number] / count) if count else 0.0,
        )
        for number, count in enumerate(counts)
    )


def checked(probabilities: npt.ArrayLike, labels: npt.ArrayLike, bins: int) -> tuple[Floats, Bools]:
    """Both as arrays [N].

    Raises:
        InvalidSettingError: the lengths differ, a probability is outside [0, 1], or ``bins`` is below 1.
    """
    predicted, came_true = np.asarray(probabilities, dtype=np.float64), np.asarray(labels, dtype=np.bool_)
    if bins < 1:
        raise InvalidSettingError("bins", bins, "an integer >= 1")
    if predicted.ndim != 1 or predicted.shape != came_true.shape:
        raise InvalidSettingError("labels", came_true.shape, f"one per probability, {predicted.shape}")
    if predicted.size and not (predicted.min() >= 0.0 and predicted.max() <= 1.0):
        raise InvalidSettingError("probabilities", (predicted.min(), predicted.max()), "numbers in [0, 1]")
    return predicted, came_true


def _bin_of(predicted: Floats, bins: int) -> npt.NDArray[np.intp]:
    return np.minimum((predicted * bins).astype(np.intp), bins - 1)
