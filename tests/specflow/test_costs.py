"""The cost table: medians, never falling with the width, optimistic about what it has not seen."""

from __future__ import annotations

import json
import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specflow.errors import InvalidSettingError
from specflow.policies import CostTable

seconds = st.floats(1e-4, 10.0)
observations = st.lists(st.tuples(st.integers(1, 12), seconds), max_size=80)


def table(points: dict[int, float], repeats: int = 3) -> CostTable:
    """A table with ``repeats`` equal observations at each width."""
    costs = CostTable()
    for _ in range(repeats):
        for width, value in points.items():
            costs.observe(width, value)
    return costs


def monotone_reference(values: list[float], weights: list[int]) -> list[float]:
    """Isotonic regression by its minimax formula (Barlow et al. 1972): slow, and nothing like the pooling in use."""

    def mean(start: int, stop: int) -> float:
        mass = sum(weights[start:stop])
        return sum(v * w for v, w in zip(values[start:stop], weights[start:stop], strict=True)) / mass

    size = len(values)
    return [
        max(min(mean(start, stop) for stop in range(index + 1, size + 1)) for start in range(index + 1))
        for index in range(size)
    ]


def test_nothing_known_costs_nothing() -> None:
    """An empty table answers 0 for every width and knows that it knows nothing."""
    costs = CostTable()
    assert costs.seconds(3) == 0.0
    assert costs.points() == ()
    assert not costs.is_grounded(10)


@given(observations)
def test_the_curve_never_falls_with_the_width(measured: list[tuple[int, float]]) -> None:
    """Whatever was measured, a wider execution is never estimated to cost less."""
    costs = CostTable()
    for width, value in measured:
        costs.observe(width, value)
    curve = list(costs.curve(40))[:41]
    assert all(left <= right + 1e-12 for left, right in pairwise(curve))
    assert all(math.isfinite(value) and value >= 0.0 for value in curve)


@given(st.lists(st.tuples(st.floats(0.1, 10.0), st.integers(2, 9)), min_size=1, max_size=8))
def test_medians_are_made_monotone_in_the_least_squares_sense(points: list[tuple[float, int]]) -> None:
    """At the measured widths the table equals isotonic regression of the medians, weighted by their observations."""
    costs = CostTable()
    for width, (value, count) in enumerate(points, start=1):
        for _ in range(count):
            costs.observe(width, value)
    expected = monotone_reference([value for value, _ in points], [count for _, count in points])
    assert [costs.seconds(width) for width in range(1, len(points) + 1)] == pytest.approx(expected, rel=1e-9)


def test_between_measured_widths_costs_are_interpolated() -> None:
    """Between two measured widths the estimate lies on the line through them."""
    assert table({1: 1.0, 5: 3.0}).seconds(2) == pytest.approx(1.5)


def test_above_the_widest_the_last_slope_goes_on() -> None:
    """Unmeasured widths above the measured ones continue the last known slope."""
    assert table({1: 1.0, 5: 3.0, 9: 4.0}).seconds(17) == pytest.approx(6.0)


def test_with_one_known_width_all_widths_cost_the_same() -> None:
    """A single measurement has slope 0, so that wider executions look free and get tried."""
    costs = table({4: 2.0})
    assert (costs.seconds(1), costs.seconds(4), costs.seconds(100)) == (2.0, 2.0, 2.0)


def test_below_the_narrowest_the_first_slope_goes_on_to_half() -> None:
    """Unmeasured widths below the measured ones continue the first slope, but not below half the smallest cost."""
    costs = table({8: 4.0, 12: 5.0})
    assert costs.seconds(6) == pytest.approx(3.5)
    assert costs.seconds(0) == pytest.approx(2.0)


@given(st.permutations([1.0] * 5 + [1000.0] * 4))
def test_outliers_below_half_of_the_window_do_not_count(values: list[float]) -> None:
    """Four stalls among nine measurements leave the estimate where it was, in whatever order they come."""
    costs = CostTable(window=9)
    for value in values:
        costs.observe(3, value)
    assert costs.seconds(3) == 1.0


def test_a_mean_would_not_survive_one_outlier() -> None:
    """The robustness above is a property of the median: the mean of the same window is off by two orders."""
    assert sum([1.0] * 5 + [1000.0] * 4) / 9 > 100.0


def test_a_width_seen_once_cannot_raise_the_curve() -> None:
    """A slow first execution at a new width does not put that width off; the second measurement decides."""
    costs = table({1: 1.0, 3: 1.2})
    costs.observe(9, 50.0)
    assert costs.seconds(9) == pytest.approx(1.8)
    costs.observe(9, 2.0)
    assert costs.seconds(9) == pytest.approx(2.0)


def test_a_width_seen_once_may_lower_the_curve() -> None:
    """A first measurement below the extrapolation is believed at once."""
    costs = table({1: 1.0, 3: 2.0})
    costs.observe(9, 2.5)
    assert costs.seconds(9) == pytest.approx(2.5)


def test_the_window_forgets() -> None:
    """After a window of new measurements nothing of the old level is left."""
    costs = CostTable(window=5)
    for value in [10.0] * 5 + [1.0] * 5:
        costs.observe(2, value)
    assert costs.seconds(2) == 1.0
    assert costs.samples(2) == 5


def test_old_measurements_are_dropped_when_a_width_comes_back() -> None:
    """Measurements older than max_age observations do not outvote a fresh one."""
    costs = CostTable(max_age=10)
    for _ in range(5):
        costs.observe(2, 10.0)
    for _ in range(20):
        costs.observe(1, 1.0)
    costs.observe(2, 2.0)
    assert costs.samples(2) == 1
    assert costs.seconds(2) == 1.0, "a fresh single measurement is provisional"
    costs.observe(2, 2.0)
    assert costs.seconds(2) == 2.0


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0])
def test_impossible_measurements_are_ignored(value: float) -> None:
    """A clock that jumped leaves no trace."""
    costs = table({2: 1.0})
    costs.observe(2, value)
    costs.observe(5, value)
    assert (costs.seconds(2), costs.samples(2), costs.samples(5)) == (1.0, 3, 0)


def test_grounded_means_founded_from_below_or_on_a_slope() -> None:
    """An estimate counts as grounded with a confirmed width at or below it, or with two confirmed widths."""
    costs = CostTable()
    costs.observe(4, 1.0)
    assert not costs.is_grounded(4)
    costs.observe(4, 1.0)
    assert costs.is_grounded(4)
    assert costs.is_grounded(9)
    assert not costs.is_grounded(3)
    costs.observe(8, 2.0)
    costs.observe(8, 2.0)
    assert costs.is_grounded(1)


@given(observations)
def test_a_table_survives_a_trip_through_json(measured: list[tuple[int, float]]) -> None:
    """A table rebuilt from its saved form holds the same observations and estimates within the rebuild tolerance."""
    costs = CostTable()
    for width, value in measured:
        costs.observe(width, value)
    twin = CostTable.from_dict(json.loads(json.dumps(costs.to_dict())))
    assert twin.to_dict() == costs.to_dict()
    for width in range(1, 13):
        assert twin.samples(width) == costs.samples(width)
        assert twin.seconds(width) == pytest.approx(costs.seconds(width), rel=0.05)


@pytest.mark.parametrize("data", [{}, {"window": 9, "max_age": 3, "samples": [1]}, {"window": "x"}, None])
def test_foreign_data_is_refused(data: object) -> None:
    """What to_dict() did not write is a clear error."""
    with pytest.raises(InvalidSettingError, match="CostTable"):
        CostTable.from_dict(data)  # type: ignore[arg-type]


@pytest.mark.parametrize("settings", [{"window": 0}, {"max_age": 0}])
def test_settings_out_of_range_are_refused(settings: dict[str, int]) -> None:
    """Window and age must be at least 1."""
    with pytest.raises(InvalidSettingError):
        CostTable(**settings)


def test_the_reach_doubles_what_was_confirmed() -> None:
    """One observation does not confirm; 32 is always allowed; what was confirmed once stays so, also when stored."""
    costs = CostTable(max_age=4)
    assert costs.reach == 32
    costs.observe(40, 1.0)
    assert costs.reach == 32
    costs.observe(40, 1.0)
    assert costs.reach == 80
    for _ in range(20):
        costs.observe(3, 0.1)
    costs.observe(40, 1.0)
    assert costs.reach == 80
    assert CostTable.from_dict(costs.to_dict()).reach == 80
    stored = table({4: 1.0, 50: 2.0}).to_dict()
    del stored["confirmed"]  # as it was written before
    assert CostTable.from_dict(stored).reach == 100


def test_multiples_are_read_off_the_same_curve() -> None:
    """Without working out what lies between."""
    costs = table({4: 1.0, 8: 1.5, 32: 9.0})
    assert costs.multiples(4, 12) == [costs.seconds(4 * factor) for factor in range(13)]
