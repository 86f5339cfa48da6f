"""A run as the runtime shows it to a predictor: calls in program order, each with what came before."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence
from typing import Any

from specflow.speculation import Call, Prediction

SHOWN = 64
"""How many results a call shows."""


class Run:
    """What one run has committed so far."""

    def __init__(self) -> None:
        self.trail: list[tuple[str, Any]] = []

    def call(self, step: str, *arguments: Any, ahead: Sequence[tuple[str, Any]] = (), **keywords: Any) -> Call:
        """The next call, or a later one in a world that rests on the guesses ``ahead``."""
        trail = [*self.trail, *ahead]
        recent = [value for name, value in trail if name == step]
        return Call(step, arguments, keywords, (len(trail),), tuple(recent[-SHOWN:]), tuple(trail[-SHOWN:]))

    def commit(self, predictor: Any, call: Call, value: Any) -> None:
        """The call returned."""
        predictor.observe(call, value)
        self.trail.append((call.step, value))


def ask(predictor: Any, call: Call) -> Sequence[Prediction]:
    """The guesses of a predictor that does not wait."""
    guesses = predictor.predict(call)
    assert not inspect.isawaitable(guesses)
    return list(guesses)


def best(predictor: Any, call: Call) -> Any:
    """The likeliest value; None if the predictor passes."""
    guesses = ask(predictor, call)
    return guesses[0].value if guesses else None


def play(predictor: Any, results: Iterable[Any], step: str = "step", run: Run | None = None) -> list[Any]:
    """The likeliest guess before each result of one step without arguments."""
    run = run or Run()
    guesses = []
    for value in results:
        call = run.call(step)
        guesses.append(best(predictor, call))
        run.commit(predictor, call, value)
    return guesses


def hit_rate(predictor: Any, results: Sequence[Any], skip: int = 0) -> float:
    """Fraction of results guessed right after the first ``skip``."""
    guesses = play(predictor, results)
    hits = [guess == value for guess, value in zip(guesses, results, strict=True)]
    return sum(hits[skip:]) / len(hits[skip:])
