from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specflow.errors import InvalidSettingError
from specflow_llm.calibration import (
    CalibrationEntry,
    CalibrationTable,
    Method,
    Observations,
    Regime,
    Scale,
    Scaling,
    area_under_curve,
    brier_score,
    calibrated,
    calibration_noise,
    conditional_logits,
    expected_calibration_error,
    fingerprint,
    fit_scales,
    observe,
    outcomes,
    reliability,
)
from specflow_llm.calibration.fitting import LARGEST_SHIFT
from specflow_llm.calibration.observations import EPSILON
from specflow_llm.errors import CheckpointError
from specflow_llm.records import RoundRecord

TEMPERATURES = (1.5, 0.7, 2.0, 1.0, 0.5, 1.3)
SHIFTS = (-1.0, 0.5, -0.5, 0.0, 0.8, -0.3)


def sigmoid(value: float) -> float:
    """1 / (1 + exp(-value)), by the book."""
    return 1.0 / (1.0 + math.exp(-value))


def scales_of(temperatures: Sequence[float], shifts: Sequence[float] | None = None) -> tuple[Scale, ...]:
    """One scale per temperature; without ``shifts`` they are 0."""
    return tuple(map(Scale, temperatures, shifts or [0.0] * len(temperatures)))


def temperatures_of(found: Scaling) -> tuple[float, ...]:
    """Per position."""
    return tuple(scale.temperature for scale in found.scales)


def shifts_of(found: Scaling) -> tuple[float, ...]:
    """Per position."""
    return tuple(scale.shift for scale in found.scales)


def synthetic(
    count: int, temperatures: Sequence[float], *, seed: int, mean: float = 1.5, shifts: Sequence[float] | float = 0.0
) -> Observations:
    """Rounds whose logits, divided by ``temperatures`` and with ``shifts`` added, are the true ones."""
    rng = np.random.default_rng(seed)
    true = rng.normal(mean, 1.5, (count, len(temperatures)))
    hits = rng.random(true.shape) < 1.0 / (1.0 + np.exp(-true))
    accepted = np.cumprod(hits, axis=1).astype(bool)
    return Observations(
        (true - np.array(shifts)) * np.array(temperatures), accepted, np.ones_like(accepted), tuple(range(count))
    )


def record(
    survival: Sequence[float], accepted: int, emitted: int | None = None, *, request: int = 0, category: str = ""
) -> RoundRecord:
    """A round; without ``emitted`` the request did not end inside it."""
    return RoundRecord(
        request=request,
        category=category,
        position=3,
        survival=tuple(survival),
        accepted=accepted,
        emitted=accepted + 1 if emitted is None else emitted,
    )


# ------------------------------------------------------------------------------------------------------------ metrics


def plain_ece(predicted: Sequence[float], labels: Sequence[bool], bins: int) -> float:
    """The calibration error written out, bin by bin."""
    total = 0.0
    for number in range(bins):
        low, high = number / bins, (number + 1) / bins
        inside = [
            (value, label)
            for value, label in zip(predicted, labels, strict=True)
            if low <= value < high or (number == bins - 1 and value == 1.0)
        ]
        if inside:
            claimed = sum(value for value, _ in inside) / len(inside)
            observed = sum(label for _, label in inside) / len(inside)
            total += len(inside) / len(predicted) * abs(claimed - observed)
    return total


def plain_auc(scores: Sequence[float], labels: Sequence[bool]) -> float:
    """Every pair of a true and a false one, compared."""
    wins = [
        1.0 if high > low else 0.5 if high == low else 0.0
        for high, is_true in zip(scores, labels, strict=True)
        if is_true
        for low, also_true in zip(scores, labels, strict=True)
        if not also_true
    ]
    return sum(wins) / len(wins)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("digits", [1, 16])
def test_figures_equal_a_straightforward_computation(seed: int, digits: int) -> None:
    """ECE, Brier score and AUC equal loops over all bins, observations and pairs; one digit makes many ties."""
    rng = np.random.default_rng(seed)
    predicted = np.round(rng.random(150), digits)
    labels = rng.random(150) < predicted**2
    # 32 equal parts have exact edges in binary; 20 do not, so ties at an edge could fall either way by rounding.
    bins = 32 if digits == 1 else 20
    values, truths = predicted.tolist(), labels.tolist()
    assert expected_calibration_error(values, truths, bins=bins) == pytest.approx(plain_ece(values, truths, bins))
    expected = sum((value - truth) ** 2 for value, truth in zip(values, truths, strict=True)) / len(values)
    assert brier_score(values, truths) == pytest.approx(expected)
    assert area_under_curve(values, truths) == pytest.approx(plain_auc(values, truths))


def test_figures_of_known_cases() -> None:
    """Certain and right is perfect, certain and wrong the worst; a constant tells nothing apart; ties count half."""
    assert expected_calibration_error([1.0, 0.0], [True, False]) == 0.0
    assert expected_calibration_error([1.0, 0.0], [False, True]) == 1.0
    assert expected_calibration_error([0.7, 0.7], [True, False]) == pytest.approx(0.2)
    assert brier_score([1.0, 0.0], [False, True]) == 1.0
    assert area_under_curve([0.1, 0.9], [False, True]) == 1.0
    assert area_under_curve([0.9, 0.1], [False, True]) == 0.0
    assert area_under_curve([0.5, 0.5, 0.5], [False, True, True]) == 0.5
    assert expected_calibration_error([], []) == brier_score([], []) == calibration_noise([]) == 0.0


@pytest.mark.parametrize("labels", [[True] * 3, [False] * 3, []])
def test_one_class_has_no_area_under_the_curve(labels: list[bool]) -> None:
    """With nothing to tell apart the AUC is unknown, not 0 or 1."""
    assert area_under_curve([0.2] * len(labels), labels) is None


def test_reliability_bins_hold_everything_and_give_the_calibration_error() -> None:
    """Counts add up, edges are where they should be, 1.0 is in the last bin, and the bins' gaps make the ECE."""
    rng = np.random.default_rng(3)
    predicted = np.append(rng.random(500), [0.0, 1.0])
    labels = rng.random(502) < predicted
    bins = reliability(predicted, labels)
    assert len(bins) == 20
    assert sum(item.count for item in bins) == 502
    assert bins[-1].high == 1.0
    assert all(item.low <= item.mean_predicted <= item.high for item in bins)
    gaps = sum(item.count / 502 * abs(item.mean_predicted - item.fraction_true) for item in bins)
    assert gaps == pytest.approx(expected_calibration_error(predicted, labels))
    assert reliability([0.5], [True])[10].count == 1  # an edge belongs to the bin that it begins


def test_noise_is_the_error_of_perfect_estimates() -> None:
    """Over 200 draws from the claimed probabilities the mean ECE is the predicted noise.

    One draw's ECE varies by about a sixth of its mean here, so the mean of 200 by 1.2 %; 6 % is five of those: fewer
    than one false alarm in a million.
    """
    rng = np.random.default_rng(1)
    predicted = rng.beta(2.0, 1.0, 1000)
    draws = [expected_calibration_error(predicted, rng.random(1000) < predicted) for _ in range(200)]
    assert np.mean(draws) == pytest.approx(calibration_noise(predicted), rel=0.06)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: expected_calibration_error([0.5], [True, False]), "one per probability"),
        (lambda: expected_calibration_error([1.5], [True]), "numbers in"),
        (lambda: brier_score([math.nan], [True]), "numbers in"),
        (lambda: reliability([0.5], [True], bins=0), "bins"),
        (lambda: area_under_curve([0.5], [True, False]), "one per score"),
    ],
    ids=["lengths", "above 1", "nan", "no bins", "lengths of scores"],
)
def test_figures_refuse_what_they_cannot_judge(call: Any, message: str) -> None:
    """Lengths that differ, numbers that are no probabilities and no bins at all are errors that say so."""
    with pytest.raises(InvalidSettingError, match=message):
        call()


# ------------------------------------------------------------------------------------------------------- observations


def test_logits_are_of_the_conditional_probabilities() -> None:
    """A product of conditional probabilities gives their logits back, whatever its length."""
    conditionals = [0.9, 0.2, 0.55, 0.999]
    logits = conditional_logits(np.cumprod(conditionals).tolist())
    assert [sigmoid(logit) for logit in logits] == pytest.approx(conditionals)


def test_certain_estimates_have_finite_logits() -> None:
    """Claims of 0 and 1 are kept a millionth away from it; what follows an impossible token is impossible too."""
    found = [sigmoid(logit) for logit in conditional_logits([1.0, 0.0, 0.0])]
    assert found == pytest.approx([1 - EPSILON, EPSILON, EPSILON])


@pytest.mark.parametrize(
    ("drafted", "accepted", "emitted", "expected"),
    [
        (4, 0, 1, (0, 4)),  # rejected at once: every prefix is known to be rejected
        (4, 2, 3, (2, 4)),
        (4, 4, 5, (4, 4)),  # all accepted, and a bonus
        (4, 4, 2, (2, 2)),  # ended at the second token: what was verified behind it is nobody's text
        (4, 2, 2, (2, 2)),  # ended at the last accepted token
        (4, 4, 4, (4, 4)),
        (0, 0, 1, (0, 0)),
    ],
)
def test_what_lies_behind_an_end_is_unknown(
    drafted: int, accepted: int, emitted: int, expected: tuple[int, int]
) -> None:
    """Tokens accepted behind an end of sequence are not counted, as vllm#56101 counted them, nor as rejected ones."""
    assert outcomes(record([0.5**n for n in range(1, drafted + 1)], accepted, emitted)) == expected


def test_observations_are_what_was_drafted_and_known() -> None:
    """Short drafts leave positions empty, ended rounds leave them unknown, rounds without a draft are left out."""
    found = observe(
        [
            record([0.9, 0.45], 1, request=4),
            record([0.5, 0.25, 0.2], 3, 1, request=5),
            record([], 0, request=5),
        ],
        num_positions=4,
    )
    assert found.requests == (4, 5)
    assert found.num_positions == 4
    assert found.observed.tolist() == [[True, True, False, False], [True, False, False, False]]
    assert found.accepted[0, :2].tolist() == [True, False]
    assert found.counts == (2, 1, 0, 0)
    assert np.isnan(found.logits[0, 2])
    claimed, accepted = found.at(0)
    assert claimed == pytest.approx([0.9, 0.5])
    assert accepted.tolist() == [True, True]
    assert found.at(1)[0] == pytest.approx([0.45])


def test_observations_need_drafts_that_fit() -> None:
    """Nothing drafted, or more than there are positions for, is an error."""
    with pytest.raises(InvalidSettingError, match="rounds"):
        observe([record([], 0)])
    with pytest.raises(InvalidSettingError, match="drafts of 1 to 1"):
        observe([record([0.5, 0.2], 0)], num_positions=1)


def test_a_split_keeps_requests_whole() -> None:
    """Every round is on one side, with all others of its request; the seed decides; both sides get something."""
    rounds = [record([0.5], index % 2, request=index % 10) for index in range(100)]
    first, second = observe(rounds).split(0.3, seed=1)
    assert len(set(first.requests)) == 3
    assert not set(first.requests) & set(second.requests)
    assert len(first.requests) + len(second.requests) == 100
    assert first.logits.shape[0] == len(first.requests)
    assert {frozenset(observe(rounds).split(0.3, seed=seed)[0].requests) for seed in range(5)} != {
        frozenset(first.requests)
    }
    small, rest = observe(rounds[:2]).split(0.99, seed=0)
    assert len(small.requests) == len(rest.requests) == 1
    for fraction, some in ((0.0, rounds), (1.0, rounds), (0.5, rounds[:1])):
        with pytest.raises(InvalidSettingError):
            observe(some).split(fraction, seed=0)


# ------------------------------------------------------------------------------------------------------------- fitting


@pytest.mark.parametrize("seed", range(3))
def test_known_temperatures_are_recovered(seed: int) -> None:
    """Logits scaled by known temperatures give them back: 20,000 rounds, within 12 % at the first three positions.

    Fewer rounds reach later ones, so they may be off by 20 %. The seeds are fixed, so there are no false alarms; over
    40 others the largest errors were 7.5 % and 12.6 %.
    """
    found = fit_scales(synthetic(20_000, TEMPERATURES, seed=seed), method="temperature")
    assert all(found.fitted)
    assert shifts_of(found) == (0.0,) * 6
    assert all(len(f"{value:.10g}") <= 6 for value in temperatures_of(found))  # four digits, no false precision
    ratios = np.log(np.array(temperatures_of(found)) / np.array(TEMPERATURES))
    assert np.abs(ratios[:3]).max() < math.log(1.12)
    assert np.abs(ratios).max() < math.log(1.2)


@pytest.mark.parametrize("seed", range(3))
def test_known_temperatures_and_shifts_are_recovered(seed: int) -> None:
    """Both come back from 20,000 rounds: temperatures within 12 % and shifts within 0.2 at the first three positions.

    Fewer rounds reach later ones: within 22 % and 0.3 there. The seeds are fixed, so there are no false alarms; over
    200 others the largest errors were 9.3 % and 0.11, and 18.4 % and 0.21 (standard deviations at most 3 % and 0.042,
    and 6.3 % and 0.067).
    """
    found = fit_scales(synthetic(20_000, TEMPERATURES, seed=seed, shifts=SHIFTS))
    assert all(found.fitted)
    ratios = np.log(np.array(temperatures_of(found)) / np.array(TEMPERATURES))
    errors = np.array(shifts_of(found)) - np.array(SHIFTS)
    assert np.abs(ratios[:3]).max() < math.log(1.12)
    assert np.abs(ratios).max() < math.log(1.22)
    assert np.abs(errors[:3]).max() < 0.2
    assert np.abs(errors).max() < 0.3
    assert all(value == round(value, 4) for value in shifts_of(found))


@pytest.mark.parametrize("seed", [102, 112])
def test_a_flat_forecast_does_not_win_by_chance(seed: int) -> None:
    """With shifts a claim pressed into the base rate is honest too; here chance gives it the smallest error.

    These two seeds of 40 are the ones where half the noise as slack, which is enough without shifts, made the fifth
    temperature 0.63 and 2.8 instead of 0.5.
    """
    found = fit_scales(synthetic(20_000, TEMPERATURES, seed=seed, shifts=SHIFTS))
    assert found.scales[4].temperature == pytest.approx(0.5, rel=0.05)


def test_honest_confidences_are_left_alone() -> None:
    """Perfectly calibrated data give temperatures near 1 and shifts near 0, and an error that is no more than chance.

    Over 200 other seeds the largest ln T was 0.17 and the largest shift 0.14; this seed is fixed.
    """
    data = synthetic(20_000, (1.0,) * 5, seed=7)
    found = fit_scales(data)
    assert np.abs(np.log(temperatures_of(found))).max() < math.log(1.2)
    assert np.abs(shifts_of(found)).max() < 0.15
    claimed, accepted = data.at(4, found.scales)
    assert expected_calibration_error(claimed, accepted) < 2.0 * calibration_noise(claimed)


@pytest.mark.parametrize("method", ["platt", "temperature"])
def test_overconfidence_is_cured_on_other_data(method: Method) -> None:
    """Scales fitted to one half bring the error of the other from far above 2 % to below it, everywhere."""
    train, test = synthetic(20_000, (2.5,) * 7, seed=1), synthetic(20_000, (2.5,) * 7, seed=2)
    found = fit_scales(train, method=method)
    before = [expected_calibration_error(*test.at(position)) for position in range(7)]
    after = [expected_calibration_error(*test.at(position, found.scales)) for position in range(7)]
    assert min(before) > 0.05
    assert max(after) < 0.02


@pytest.mark.parametrize("mean", [0.0, 1.5])
def test_a_bias_needs_a_shift(mean: float) -> None:
    """Claims that are too high everywhere are cured by a shift on other data, and not by temperatures.

    With shifts the error is below 2 % and within twice what chance alone gives; with temperatures alone it stays above
    5 % at every position, however they are chosen.
    """
    train = synthetic(20_000, (1.0,) * 3, seed=1, mean=mean, shifts=-1.5)
    test = synthetic(20_000, (1.0,) * 3, seed=2, mean=mean, shifts=-1.5)
    found, stretched = fit_scales(train), fit_scales(train, method="temperature")
    assert shifts_of(found) == pytest.approx((-1.5,) * 3, abs=0.3)
    for position in range(3):
        claimed, accepted = test.at(position, found.scales)
        assert expected_calibration_error(claimed, accepted) < min(0.02, 2.0 * calibration_noise(claimed))
        assert expected_calibration_error(*test.at(position, stretched.scales)) > 0.05
        assert expected_calibration_error(*test.at(position)) > 0.15


@pytest.mark.parametrize("temperature", [1.0, 3.0])
def test_mean_claims_equal_observed_rates(temperature: float) -> None:
    """On the fitted rounds claimed and observed acceptances are equally many at every position, but for the prior.

    The prior pulls by half an observation times the shift, and rounding the shift moves less than a thousandth.
    """
    data = synthetic(3000, (temperature,) * 3, seed=4, shifts=(-2.0, 1.0, -0.5))
    found = fit_scales(data)
    for position, scale in enumerate(found.scales):
        claimed, accepted = data.at(position, found.scales)
        assert claimed.sum() == pytest.approx(accepted.sum() - 0.5 * scale.shift, abs=0.3)
        assert abs(data.at(position)[0].sum() - accepted.sum()) > 30.0


@pytest.mark.parametrize("is_accepted", [True, False])
def test_shifts_are_bounded(is_accepted: bool) -> None:  # noqa: FBT001 - a case
    """Where no shift is enough the bound is taken: nothing at the second position makes up for 0.3 at the first.

    The first is always accepted, so it is not fitted. Where the second is rarely accepted there is a root.
    """
    logits = np.tile([math.log(0.3 / 0.7), 0.0], (4000, 1))
    rare = np.arange(4000) < 30
    accepted = np.stack([np.ones(4000, dtype=bool), ~rare if is_accepted else rare], axis=1)
    data = Observations(logits, accepted, np.ones_like(accepted), tuple(range(4000)))
    found = fit_scales(data)
    assert found.fitted == (False, True)
    assert (found.scales[1].shift == LARGEST_SHIFT) == is_accepted
    if not is_accepted:
        assert data.at(1, found.scales)[0].sum() == pytest.approx(30 - 0.5 * found.scales[1].shift, abs=0.1)


def test_an_early_error_is_not_passed_on() -> None:
    """Where only the first position is off, fitting in order leaves the later ones near 1 and 0.

    Without the first scale in the product the second one has to make up for it: the mutant is caught.
    """
    data = synthetic(20_000, (3.0, 1.0, 1.0), seed=5, shifts=(-1.0, 0.0, 0.0))
    found = fit_scales(data)
    assert found.scales[0].temperature == pytest.approx(3.0, rel=0.12)
    assert found.scales[0].shift == pytest.approx(-1.0, abs=0.2)
    assert np.abs(np.log(temperatures_of(found)[1:])).max() < math.log(1.25)
    assert np.abs(shifts_of(found)[1:]).max() < 0.2
    wrong = (Scale(), *found.scales[1:])
    assert expected_calibration_error(*data.at(2, wrong)) > 3 * expected_calibration_error(*data.at(2, found.scales))


def least_error_temperatures(data: Observations) -> list[float]:
    """The variant that follows the calibration error alone: in order, the grid's temperature with the smallest one."""
    grid = np.geomspace(0.1, 10.0, 161)
    found: list[float] = []
    for position in range(data.num_positions):
        rest = [1.0] * (data.num_positions - position - 1)
        errors = [expected_calibration_error(*data.at(position, scales_of([*found, value, *rest]))) for value in grid]
        found.append(float(grid[int(np.argmin(errors))]))
    return found


def test_ties_in_the_calibration_error_are_broken_by_sharpness() -> None:
    """Following the calibration error alone is 1.5 times as far off or more: it jumps, and ignores sharpness."""
    true = np.log(TEMPERATURES)
    ours, theirs = [], []
    for seed in range(4):
        data = synthetic(2000, TEMPERATURES, seed=seed, mean=1.0)
        ours.append(np.abs(np.log(temperatures_of(fit_scales(data, method="temperature"))) - true).mean())
        theirs.append(np.abs(np.log(least_error_temperatures(data)) - true).mean())
    assert np.mean(theirs) > 1.5 * np.mean(ours)


@pytest.mark.parametrize("method", ["platt", "temperature"])
@pytest.mark.parametrize(
    ("count", "accepted"),
    [(10, None), (500, True), (500, False)],
    ids=["few", "all accepted", "none accepted"],
)
def test_too_little_data_changes_nothing(count: int, accepted: bool | None, method: Method) -> None:  # noqa: FBT001
    """Few rounds, or outcomes of one kind, leave temperature 1 and shift 0, and say that nothing was fitted."""
    data = synthetic(count, (2.0, 2.0), seed=1, shifts=-1.0)
    if accepted is not None:
        data = Observations(data.logits, np.full_like(data.accepted, accepted), data.observed, data.requests)
    found = fit_scales(data, method=method)
    assert found.scales == (Scale(), Scale())
    assert found.fitted == (False, False)


def test_a_position_that_few_rounds_reach_does_not_spoil_the_others() -> None:
    """Positions are fitted where there is enough, and left alone where there is not."""
    data = synthetic(2000, (2.0, 2.0), seed=1, shifts=-0.5)
    data.observed[40:, 1] = False
    found = fit_scales(data)
    assert found.fitted == (True, False)
    assert found.scales[0].temperature == pytest.approx(2.0, rel=0.2)
    assert found.scales[0].shift == pytest.approx(-0.5, abs=0.3)
    assert found.scales[1].is_identity


@pytest.mark.parametrize("method", ["platt", "temperature"])
def test_unknown_outcomes_have_no_say(method: Method) -> None:
    """Logits and labels of positions that were not drafted or not known can be anything."""
    clean = synthetic(3000, (2.0, 1.5), seed=8, shifts=(-0.5, 0.5))
    hidden = np.random.default_rng(0).random(clean.observed.shape) < 0.2
    hidden[:, 0] = False
    observed = clean.observed & ~hidden
    logits = np.where(hidden, np.nan, clean.logits)
    expected = fit_scales(Observations(clean.logits, clean.accepted, observed, clean.requests), method=method)
    noisy = Observations(logits, clean.accepted ^ hidden, observed, clean.requests)
    assert fit_scales(noisy, method=method) == expected


def test_temperatures_against_a_bias_never_make_it_worse() -> None:
    """Temperatures stretch, they do not shift: with biased logits they help where they can and keep within bounds."""
    data = synthetic(5000, (1.0,) * 3, seed=2, shifts=-1.0)
    found = fit_scales(data, method="temperature")
    assert all(0.1 <= temperature <= 10.0 for temperature in temperatures_of(found))
    for position in range(3):
        raw, fitted = data.at(position), data.at(position, found.scales)
        assert expected_calibration_error(*fitted) <= expected_calibration_error(*raw)


def test_an_unknown_method_is_refused() -> None:
    """The message names the methods there are."""
    method: Any = "isotonic"
    with pytest.raises(InvalidSettingError, match=r"method='isotonic'.*platt, temperature"):
        fit_scales(synthetic(100, (1.0,), seed=1), method=method)


def test_calibrated_survival_is_the_product_of_scaled_confidences() -> None:
    """Logits are scaled position by position, and survival never rises; shorter drafts use the first scales."""
    logits = [1.0, -0.5, 3.0]
    scales = scales_of((2.0, 0.5, 1.0, 9.0), (0.25, 1.0, -2.0, 5.0))
    expected = np.cumprod([sigmoid(0.75), sigmoid(0.0), sigmoid(1.0)])
    assert calibrated(logits, scales) == pytest.approx(expected)
    assert calibrated([logits, logits], scales[:3]) == pytest.approx(np.array([expected, expected]))
    assert [scale.apply(logit) for scale, logit in zip(scales, logits, strict=False)] == [0.75, 0.0, 1.0]
    assert calibrated(logits, None) == pytest.approx(np.cumprod([sigmoid(logit) for logit in logits]))
    assert calibrated(logits, (Scale(),) * 3) == pytest.approx(calibrated(logits, None))
    assert calibrated([900.0, -900.0], None) == pytest.approx([1.0, 0.0])


def test_calibration_needs_a_scale_for_every_position() -> None:
    """Too few scales are refused."""
    with pytest.raises(InvalidSettingError, match="scales"):
        calibrated([0.1, 0.2], (Scale(),))


@pytest.mark.parametrize("temperature", [0.0, -1.0, math.nan, math.inf, "1", True])
@pytest.mark.parametrize("shift", [math.nan, -math.inf, "0", None])
def test_a_scale_is_made_of_numbers(temperature: Any, shift: Any) -> None:
    """Temperatures are finite and above 0, shifts finite."""
    with pytest.raises(InvalidSettingError, match="temperature"):
        Scale(temperature, 1.0)
    with pytest.raises(InvalidSettingError, match="shift"):
        Scale(1.0, shift)


# --------------------------------------------------------------------------------------------------------------- table


def entry(
    temperature: float = 0.0, temperatures: Sequence[float] = (1.5, 0.8), shifts: Sequence[float] = (-0.5, 0.25)
) -> CalibrationEntry:
    """A calibration of two positions."""
    size = len(temperatures)
    return CalibrationEntry(
        method="platt",
        scales=scales_of(temperatures, shifts),
        fitted=(True,) * size,
        regime=Regime(target="tiny", temperature=temperature, data="some prompts", requests=10, rounds=100),
        counts=(50,) * size,
        ece_before=(0.1,) * size,
        ece_after=(0.01,) * size,
        ece_noise=(0.01,) * size,
    )


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A folder with what looks like a drafter."""
    folder = tmp_path / "drafter"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"weights")
    return folder


def test_a_table_comes_back_as_it_was_stored(checkpoint: Path) -> None:
    """Both regimes survive the file exactly, and nothing else is left in the folder."""
    fresh = CalibrationTable(drafter=fingerprint(checkpoint))
    stretched = replace(entry(), scales=scales_of((2.0, 3.0)), method="temperature")
    table = fresh.with_entry(entry(1.0, (0.1 + 0.2, 3.0), (-0.1 / 3, 0.0))).with_entry(stretched)
    path = table.save(checkpoint)
    assert CalibrationTable.load(checkpoint, num_positions=2) == table
    assert path.name == "calibration.json"
    assert {file.name for file in checkpoint.iterdir()} == {"config.json", "model.safetensors", "calibration.json"}


def test_a_table_serves_the_matching_kind_of_request_only() -> None:
    """Scales fitted to greedy requests are not used for sampled ones, nor the other way round."""
    table = CalibrationTable(drafter="x").with_entry(entry(0.0))
    assert table.scales_for(is_greedy=True) == (Scale(1.5, -0.5), Scale(0.8, 0.25))
    assert table.scales_for(is_greedy=False) is None
    both = table.with_entry(entry(1.0, (2.0, 2.0)))
    assert both.scales_for(is_greedy=True) == (Scale(1.5, -0.5), Scale(0.8, 0.25))
    assert both.scales_for(is_greedy=False) == (Scale(2.0, -0.5), Scale(2.0, 0.25))


def test_a_new_calibration_replaces_the_one_of_its_kind() -> None:
    """There is at most one for greedy and one for sampled requests; T = 0.7 takes the place of T = 1."""
    table = (
        CalibrationTable(drafter="x").with_entry(entry(1.0)).with_entry(entry(0.0)).with_entry(entry(0.7, (3.0, 3.0)))
    )
    assert [item.regime.temperature for item in table.entries] == [0.0, 0.7]
    assert table.scales_for(is_greedy=False) == (Scale(3.0, -0.5), Scale(3.0, 0.25))


def test_a_checkpoint_without_a_table_stays_raw(checkpoint: Path) -> None:
    """No file is no error."""
    assert CalibrationTable.load(checkpoint, num_positions=7) is None
    assert CalibrationTable.clear_stale(checkpoint) is None


def test_a_table_of_other_weights_is_refused(checkpoint: Path) -> None:
    """Retrained weights make the table invalid, and the message says what to do; it can be moved out of the way."""
    CalibrationTable(drafter=fingerprint(checkpoint)).with_entry(entry()).save(checkpoint)
    assert CalibrationTable.clear_stale(checkpoint) is None
    (checkpoint / "model.safetensors").write_bytes(b"weightz")
    with pytest.raises(CheckpointError, match=r"other weights.*specflow-llm calibrate.*delete the file"):
        CalibrationTable.load(checkpoint)
    moved = CalibrationTable.clear_stale(checkpoint)
    assert moved is not None
    assert moved.is_file()
    assert CalibrationTable.load(checkpoint) is None


def test_a_table_of_another_length_is_refused(checkpoint: Path) -> None:
    """Scales for two positions of a drafter of seven would calibrate something else."""
    CalibrationTable(drafter=fingerprint(checkpoint)).with_entry(entry()).save(checkpoint)
    with pytest.raises(CheckpointError, match="scales for 2 positions, the drafter has 7"):
        CalibrationTable.load(checkpoint, num_positions=7)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "other"}, "not of format"),
        ({"version": 4}, "version 4, this program reads 3"),
        ({"version": 2}, "version 2, this program reads 3"),
        ({"entries": [{"temperatures": [1.0]}]}, "KeyError"),
        ({"entries": 3}, "TypeError"),
        (None, "cannot be read"),
    ],
)
def test_a_damaged_table_is_refused(checkpoint: Path, change: dict[str, Any] | None, message: str) -> None:
    """A file that is not what it should be is never taken for a calibration."""
    path = CalibrationTable(drafter=fingerprint(checkpoint)).with_entry(entry()).save(checkpoint)
    text = path.read_text()
    path.write_text(text[: len(text) // 2] if change is None else json.dumps({**json.loads(text), **change}))
    with pytest.raises(CheckpointError, match=message):
        CalibrationTable.load(checkpoint)


@pytest.mark.parametrize(
    ("key", "value"),
    [("temperature", 0.0), ("temperature", "1"), ("shift", "0"), ("shift", None)],
)
def test_a_table_with_impossible_scales_is_refused(checkpoint: Path, key: str, value: object) -> None:
    """A temperature or shift that no fit gives is named, and the file is not used."""
    path = CalibrationTable(drafter=fingerprint(checkpoint)).with_entry(entry()).save(checkpoint)
    data = json.loads(path.read_text())
    data["entries"][0]["scales"][1][key] = value
    path.write_text(json.dumps(data))
    with pytest.raises(CheckpointError, match=f"cannot be read.*{key}"):
        CalibrationTable.load(checkpoint)


def test_an_entry_has_one_value_for_every_position() -> None:
    """No positions, lists of other lengths, unknown methods, and shifts that its method does not fit are refused."""
    with pytest.raises(InvalidSettingError, match="scales"):
        entry(0.0, (), ())
    wrong: list[tuple[str, Any, str]] = [
        ("fitted", (True,), "fitted"),
        ("counts", (1, 2, 3), "counts"),
        ("method", "isotonic", "method"),
        ("method", "temperature", "no shifts"),
    ]
    for name, value, message in wrong:
        with pytest.raises(InvalidSettingError, match=message):
            replace(entry(), **{name: value})


def test_the_identity_is_known_as_such() -> None:
    """Temperatures of 1 with shifts of 0 change nothing, and so does a table without entries."""
    table = CalibrationTable(drafter="x")
    assert table.is_identity
    assert table.with_entry(entry(0.0, (1.0, 1.0), (0.0, 0.0))).is_identity
    assert not table.with_entry(entry(0.0, (1.0, 1.1), (0.0, 0.0))).is_identity
    assert not table.with_entry(entry(0.0, (1.0, 1.0), (0.0, 0.1))).is_identity


def test_a_fingerprint_follows_weights_and_configuration_alone(checkpoint: Path) -> None:
    """Other weights, configuration or names change it; a calibration or a model card beside them does not."""
    before = fingerprint(checkpoint)
    (checkpoint / "README.md").write_text("a card")
    (checkpoint / "calibration.json").write_text("{}")
    assert fingerprint(checkpoint) == before
    (checkpoint / "config.json").write_text('{"block_size": 7}')
    changed = fingerprint(checkpoint)
    assert changed != before
    (checkpoint / "model.safetensors").rename(checkpoint / "other.safetensors")
    assert fingerprint(checkpoint) not in {before, changed}


def test_large_files_are_told_apart_by_pieces(checkpoint: Path) -> None:
    """Of a file above 256 MiB size, beginning and end count; nothing needs to be read whole."""
    weights = checkpoint / "model.safetensors"
    found = set()
    for size, place in ((300 * 2**20, 0), (300 * 2**20, 300 * 2**20 - 1), (301 * 2**20, 0)):
        with weights.open("wb") as file:
            file.truncate(size)
            file.seek(place)
            file.write(b"x")
        found.add(fingerprint(checkpoint))
    assert len(found) == 3


def test_a_folder_without_weights_has_no_fingerprint(tmp_path: Path) -> None:
    """A configuration alone is no drafter."""
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="no weights"):
        fingerprint(tmp_path)
