"""Constant and last value."""

from __future__ import annotations

import threading

import pytest

from specflow.errors import InvalidSettingError, UnsupportedValueError
from specflow.predictors import Constant, LastValue
from specflow.speculation import Prediction
from tests.specflow.predictors.support import Run, ask, best, hit_rate, play


def test_a_constant_is_guessed_always() -> None:
    """The value and the confidence are the user's word, and every guess is a copy of its own."""
    predictor = Constant(["x"], confidence=0.25)
    first, second = (ask(predictor, Run().call(step))[0] for step in "ab")
    assert first == second == Prediction(["x"], 0.25)
    first.value.append("changed")
    assert second.value == best(predictor, Run().call("c")) == ["x"]


def test_a_constant_that_no_step_can_return_is_refused() -> None:
    """A value that cannot be encoded, or a confidence that is no probability, is an error where it is declared."""
    with pytest.raises(UnsupportedValueError):
        Constant(threading.Lock())
    with pytest.raises(InvalidSettingError, match="confidence"):
        Constant(1, confidence=1.5)


def test_the_last_result_is_guessed() -> None:
    """Each result is the guess for the next, and the first call of all is passed."""
    assert play(LastValue(), [1, 2, 2, 3]) == [None, 1, 2, 2]


def test_a_new_run_starts_from_the_last_result_of_any_run() -> None:
    """Before a run's first result of the step, the newest committed one is guessed, then the run's own."""
    predictor = LastValue()
    play(predictor, ["old"])
    assert play(predictor, ["new", "new"]) == ["old", "new"]


def test_in_a_speculative_world_the_guess_counts_as_the_last_result() -> None:
    """What a world assumes is what came last in it, and nothing is learned from that."""
    predictor, run = LastValue(), Run()
    run.commit(predictor, run.call("step"), 1)
    assert best(predictor, run.call("step", ahead=[("step", 7)])) == 7
    assert best(predictor, run.call("step")) == 1


def test_confidence_tells_steady_results_from_fresh_ones() -> None:
    """After a change the next result is unsure, after three equal ones it is as good as known."""
    predictor, run = LastValue(), Run()
    results = [value for number in range(60) for value in [number] * (5 if number % 2 else 1)]
    play(predictor, results, run=run)
    steady = ask(predictor, Run().call("step", ahead=[("step", 1)] * 3))[0].confidence
    fresh = ask(predictor, Run().call("step", ahead=[("step", 0), ("step", 1)]))[0].confidence
    assert steady > fresh + 0.1


def test_equal_means_equal_in_canonical_form() -> None:
    """Nan follows nan as a hit, while True and 1 are different results."""
    assert hit_rate(LastValue(), [True, 1] * 4, skip=1) == 1.0  # by Python's ==, which the next lines do not use
    for results, lowest, highest in (([float("nan")] * 40, 0.9, 1.0), ([True, 1] * 20, 0.0, 0.1)):
        predictor, run = LastValue(), Run()
        play(predictor, results, run=run)
        assert lowest <= ask(predictor, run.call("step"))[0].confidence <= highest


def test_a_memory_of_less_than_one_guess_is_refused() -> None:
    """A rate that forgets everything at once would say nothing."""
    with pytest.raises(InvalidSettingError, match="memory"):
        LastValue(memory=0.5)
