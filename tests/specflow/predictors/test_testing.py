"""Predictors for users' tests: always right, always wrong, right as often as told."""

from __future__ import annotations

import enum
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specflow.codec import digest
from specflow.errors import InvalidSettingError
from specflow.speculation import Call, Prediction
from specflow.testing import NEVER_RETURNED, Adversary, Flaky, Oracle, different_from
from tests.specflow.predictors.support import Run, ask, best

TABLE: dict[Any, Any] = {"step": ["right"], (0,): "first"}


class Colour(enum.Enum):
    """Two members and no more."""

    RED = 1
    BLUE = 2


plain = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary()
values = st.recursive(
    plain, lambda inner: st.lists(inner) | st.tuples(inner) | st.dictionaries(st.text(), inner), max_leaves=6
)


def at(position: int, step: str = "step") -> Call:
    """A call that stands somewhere."""
    return Call(step, (), position=(position,))


def test_an_oracle_answers_by_function_or_table() -> None:
    """A function answers every call; a table by position first, then by step, and what it does not list is passed."""
    assert best(Oracle(lambda call: call.arguments[0] + 1), Run().call("step", 4)) == 5
    oracle = Oracle(TABLE)
    assert best(oracle, at(0)) == "first"
    assert best(oracle, at(1)) == ["right"]
    assert ask(oracle, at(1, "another")) == []


def test_an_oracle_may_look_ahead() -> None:
    """An answer that is a prediction is handed on with all it says."""
    ahead = Prediction(1, 0.5, then=(2, 3))
    assert ask(Oracle(lambda _: ahead), at(0)) == [ahead]


def test_answers_are_copied() -> None:
    """A program that changes a guess does not change the answers."""
    oracle = Oracle(TABLE)
    best(oracle, at(1)).append("changed")
    assert best(oracle, at(1)) == ["right"]


@given(values)
def test_different_values_differ(value: Any) -> None:
    """The wrong value has another canonical form, and the same type for plain ones."""
    other = different_from(value)
    assert digest(other) != digest(value)
    if isinstance(value, list | tuple) and value and isinstance(value[0], list):
        assert other[0] is not value[0]
    if value is not None:
        assert type(other) is type(value)


@pytest.mark.parametrize("value", [math.nan, math.inf, -0.0, 1e308, Colour.RED, (), [], {}, frozenset({1})])
def test_odd_values_differ_too(value: Any) -> None:
    """There is a wrong value for anything, from nan to enums."""
    assert digest(different_from(value)) != digest(value)


@given(values)
def test_an_adversary_is_always_wrong_and_always_sure(value: Any) -> None:
    """With or without the answers, no guess has the result's canonical form, and the first claims certainty."""
    for adversary in (Adversary(), Adversary(lambda _: value), Adversary(lambda _: value, guesses=3)):
        guesses = ask(adversary, at(0))
        assert guesses[0].confidence == 1.0
        forms = {digest(guess.value) for guess in guesses}
        assert digest(value) not in forms
        assert len(forms) == len(guesses)


def test_an_adversary_guesses_where_its_answers_do_not_reach() -> None:
    """A call that a table does not list is guessed wrong all the same."""
    assert best(Adversary(TABLE), at(5, "another")) == NEVER_RETURNED


def test_a_flaky_predictor_is_right_as_often_as_told() -> None:
    """Over 4000 places the rate is within 0.05 of the probability: six standard errors, false alarm below 1e-8."""
    for probability in (0.0, 0.3, 1.0):
        flaky = Flaky(probability, lambda _: 1, seed=9)
        rate = sum(best(flaky, at(number)) == 1 for number in range(4000)) / 4000
        assert rate == pytest.approx(probability, abs=0.05)
        assert ask(flaky, at(0))[0].confidence == probability


def test_a_flaky_predictor_decides_by_place_and_seed() -> None:
    """The same place is decided the same every time; another seed decides otherwise somewhere."""
    first, again, other = (Flaky(0.5, lambda _: "x", seed=seed) for seed in (1, 1, 2))
    places = [at(number, step) for number in range(50) for step in "ab"]
    said = [first.is_right(place) for place in places]
    assert [again.is_right(place) for place in reversed(places)] == said[::-1]
    assert [other.is_right(place) for place in places] != said
    assert said[::2] != said[1::2]


def test_settings_out_of_range_are_refused() -> None:
    """Probabilities are probabilities, and an adversary says something."""
    for make in (
        lambda: Oracle(TABLE, confidence=2.0),
        lambda: Adversary(confidence=-1.0),
        lambda: Adversary(guesses=0),
        lambda: Flaky(1.5, TABLE),
        lambda: Flaky(0.5, TABLE, confidence=2.0),
    ):
        with pytest.raises(InvalidSettingError):
            make()
