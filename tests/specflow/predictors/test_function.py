"""A function as a predictor."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import pytest
from anyio.lowlevel import checkpoint

from specflow.errors import InvalidSettingError
from specflow.predictors import Fn
from specflow.speculation import Prediction, let_go
from tests.specflow.predictors.support import Run, ask, best


async def awaited(predictor: Fn, *arguments: Any) -> list[Prediction]:
    """The guesses of a predictor that waits."""
    answer: Any = predictor.predict(Run().call("step", *arguments))
    return list(await answer)


def test_the_function_gets_the_steps_arguments() -> None:
    """Positional and keyword arguments arrive as they are, and what is returned is the guess."""
    predictor = Fn(lambda first, *, second: [first, second])
    assert best(predictor, Run().call("step", 1, second=2)) == [1, 2]


async def cheap(text: str) -> str:
    """A model that takes its time."""
    await checkpoint()
    return text.upper()


class Model:
    """A callable object that takes its time."""

    async def __call__(self, text: str) -> str:
        """As the function above."""
        return await cheap(text)


@pytest.mark.anyio
@pytest.mark.parametrize("function", [cheap, functools.partial(cheap), Model()], ids=["function", "partial", "object"])
async def test_an_async_function_is_awaited(function: Callable[..., Any]) -> None:
    """The answer of a coroutine function, partial or callable object is waited for, and that is known before."""
    predictor = Fn(function)
    assert inspect.iscoroutinefunction(predictor.predict)
    (guess,) = await awaited(predictor, "x")
    assert (guess.value, guess.confidence) == ("X", 0.5)


def test_a_plain_function_answers_at_once() -> None:
    """Nothing has to be awaited for it."""
    assert not inspect.iscoroutinefunction(Fn(len).predict)
    assert best(Fn(len), Run().call("step", "four")) == 4


@pytest.mark.anyio
async def test_a_function_that_returns_something_to_await_is_awaited() -> None:
    """A plain function over an async model needs no ``async def``; its guesses are scored like any other's."""

    def call_up(text: str) -> Any:
        return cheap(text)

    predictor = Fn(call_up)
    call = Run().call("step", "x")
    before = (await awaited(predictor, "x"))[0].confidence
    for _ in range(3):
        (guess,) = await predictor.predict(call)  # type: ignore[misc]  # a plain method that returns an awaitable
        assert guess.value == "X"
        predictor.observe(call, "X")
    assert (await awaited(predictor, "x"))[0].confidence > before


def test_what_nobody_awaits_is_closed() -> None:
    """A coroutine that was made for a guess that is not wanted any more is not reported as never awaited."""
    made = []

    def hidden(text: str) -> Any:
        made.append(cheap(text))
        return made[-1]

    let_go(Fn(hidden).predict(Run().call("step", "x")))
    assert inspect.getcoroutinestate(made[0]) == inspect.CORO_CLOSED


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (None, []),
        (Prediction(None, 0.3), [Prediction(None, 0.3)]),
        ([Prediction(1, 0.6), Prediction(2, 0.1)], [Prediction(1, 0.6), Prediction(2, 0.1)]),
        ([], [Prediction([], 0.5)]),
        ([1, 2], [Prediction([1, 2], 0.5)]),
    ],
)
def test_it_may_return_a_value_or_predictions_or_pass(answer: Any, expected: list[Prediction]) -> None:
    """None passes; predictions are handed on; anything else is one guess, lists of other things included."""
    assert ask(Fn(lambda: answer), Run().call("step")) == expected


def test_confidence_is_measured_unless_given() -> None:
    """A function that is right three times in four says so after a while; a given confidence stays."""
    measured, stated, run = Fn(lambda number: number), Fn(lambda number: number, confidence=0.9), Run()
    for turn in range(200):
        for predictor in (measured, stated):
            call = run.call("step", turn)
            predictor.predict(call)
            predictor.observe(call, turn if turn % 4 else "something else")
        run.trail.append(("step", turn))
    assert ask(measured, run.call("step", 0))[0].confidence == pytest.approx(0.75, abs=0.05)
    assert ask(stated, run.call("step", 0))[0].confidence == 0.9


def test_only_guesses_about_committed_calls_are_scored() -> None:
    """Guesses made in squashed worlds, and results that nobody guessed, do not count."""
    predictor, run = Fn(lambda number: number), Run()
    for turn in range(50):
        predictor.predict(run.call("step", -1, ahead=[("step", turn)]))
        predictor.observe(run.call("step", turn), "never guessed")
    assert ask(predictor, run.call("step", 0))[0].confidence == 0.5


def test_money_is_charged_once_per_call() -> None:
    """The first guess carries what the call of the function cost, unless the function says itself."""
    several = Fn(lambda: [Prediction(1, 0.5), Prediction(2, 0.2)], money=0.01)
    assert [guess.money for guess in ask(several, Run().call("step"))] == [0.01, 0.0]
    own = Fn(lambda: Prediction(1, 0.5, money=0.2), money=0.01)
    assert [guess.money for guess in ask(own, Run().call("step"))] == [0.2]


def test_the_guess_is_not_shared_with_the_function() -> None:
    """A function that returns the same list every time does not see it changed."""
    kept = ["a"]
    predictor = Fn(lambda: kept)
    best(predictor, Run().call("step")).append("changed")
    assert best(predictor, Run().call("step")) == ["a"]


def test_settings_out_of_range_are_refused() -> None:
    """Confidence is a probability and money is not negative."""
    with pytest.raises(InvalidSettingError, match="confidence"):
        Fn(len, confidence=2.0)
    with pytest.raises(InvalidSettingError, match="money"):
        Fn(len, money=-1.0)
