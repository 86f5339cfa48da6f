"""Nearest neighbours over numeric features of the arguments."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specflow.errors import InvalidSettingError
from specflow.predictors import NearestNeighbour
from tests.specflow.predictors.support import Run, ask, best

points = st.lists(st.tuples(st.integers(-5, 5), st.integers(-5, 5), st.integers(0, 2)), min_size=1, max_size=30)


def plane() -> NearestNeighbour:
    """Calls with two numbers, compared as they are."""
    return NearestNeighbour(lambda x, y: (x, y), k=3)


def test_similar_calls_give_the_guess() -> None:
    """A boundary in the plane is learned from examples: 95 of 100 new points fall on the right side."""
    rng, predictor, run = random.Random(3), plane(), Run()
    right = 0
    for turn in range(300):
        x, y = rng.random(), rng.random()
        call = run.call("side", x, y)
        guess = best(predictor, call)
        right += turn >= 200 and guess == ("above" if y > x else "below")
        run.commit(predictor, call, "above" if y > x else "below")
    assert right >= 90


@given(points, st.tuples(st.integers(-5, 5), st.integers(-5, 5)))
def test_the_guess_is_the_vote_of_the_nearest(known: list[tuple[int, int, int]], place: tuple[int, int]) -> None:
    """Votes are those of the k nearest calls by Euclidean distance, the newest of equally near ones first."""
    predictor, run = plane(), Run()
    for x, y, value in known:
        run.commit(predictor, run.call("step", x, y), value)
    newest_first = known[::-1]
    nearest = sorted(newest_first, key=lambda point: math.dist(point[:2], place))[:3]
    votes = [value for _, _, value in nearest]
    guess = next(guess.value for guess in ask(predictor, run.call("step", *place)))
    assert votes.count(guess) >= 1
    assert {guess.value for guess in ask(predictor, run.call("step", *place))} == set(votes)


def test_only_the_newest_calls_are_kept() -> None:
    """A call beyond the limit is forgotten."""
    predictor, run = NearestNeighbour(lambda x: (x,), k=1, limit=2), Run()
    for place in (0, 10, 20):
        run.commit(predictor, run.call("step", place), place)
    assert best(predictor, run.call("step", 0)) == 10


@pytest.mark.parametrize("feature", [math.nan, math.inf])
def test_features_that_are_not_finite_are_passed(feature: float) -> None:
    """Nothing is near to nowhere: such a call is neither guessed nor learned."""
    predictor, run = NearestNeighbour(lambda x: (x,)), Run()
    run.commit(predictor, run.call("step", feature), "lost")
    assert ask(predictor, run.call("step", 1.0)) == []
    run.commit(predictor, run.call("step", 1.0), "found")
    assert ask(predictor, run.call("step", feature)) == []
    assert [guess.value for guess in ask(predictor, run.call("step", 1.0))] == ["found"]


def test_calls_with_another_number_of_features_are_not_compared() -> None:
    """After the features changed, old calls do not answer for new ones."""
    predictor, run = NearestNeighbour(lambda *numbers: numbers), Run()
    run.commit(predictor, run.call("step", 1.0), "line")
    assert ask(predictor, run.call("step", 1.0, 2.0)) == []


def test_settings_out_of_range_are_refused() -> None:
    """At least one neighbour votes."""
    with pytest.raises(InvalidSettingError, match="k="):
        NearestNeighbour(lambda x: (x,), k=0)
