"""Predictors of every kind: right, wrong, sometimes right, late, misleading, failing."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from specflow.codec import encode
from specflow.history import Position
from specflow.protocols import Predictor
from specflow.speculation import Call, Prediction
from specflow.testing import Adversary, Flaky, Oracle, different_from


class Raising:
    """A predictor that fails."""

    def predict(self, call: Call) -> Sequence[Prediction]:
        """Raise."""
        raise LookupError(call.step)


class Unencodable:
    """A predictor whose guess cannot be stored."""

    def __init__(self, answers: Mapping[Position, Any]) -> None:
        self._answers = answers

    def predict(self, call: Call) -> Sequence[Prediction]:
        """An object of no known type, then what the table says."""
        guesses = [Prediction(object(), 1.0)]
        if call.position in self._answers:
            guesses.append(Prediction(self._answers[call.position], 0.5))
        return guesses


class Lookalike:
    """Guesses that are equal for Python and different for the codec: True for 1, 1.0 for True."""

    def __init__(self, answers: Mapping[Position, Any]) -> None:
        self._answers = answers

    def predict(self, call: Call) -> Sequence[Prediction]:
        """Something that looks right."""
        value = self._answers.get(call.position)
        if type(value) is bool:
            return [Prediction(float(value), 1.0)]
        if type(value) is int:
            return [Prediction(value == 1 if value in (0, 1) else float(value), 1.0)]
        if type(value) is float:
            return [Prediction(int(value), 1.0)]
        return [Prediction(value, 1.0)]


class Scripted:
    """Guesses what this call and all that follow return: right up to some place."""

    def __init__(self, answers: Mapping[Position, Any], right: int) -> None:
        self._answers = answers
        self._right = right

    def predict(self, call: Call) -> Sequence[Prediction]:
        """A guess with its continuation."""
        following = [value for position, value in sorted(self._answers.items()) if position >= call.position]
        if not following:
            return []
        guesses = [
            value if number < self._right else different_from(value) for number, value in enumerate(following[:6])
        ]
        return [Prediction(guesses[0], 0.9, tuple(guesses[1:]))]


class Both:
    """A wrong guess first, then the right one, then another wrong one: the width decides."""

    def __init__(self, answers: Mapping[Position, Any]) -> None:
        self._answers = answers

    def predict(self, call: Call) -> Sequence[Prediction]:
        """Three guesses."""
        if call.position not in self._answers:
            return [Prediction(0, 0.4), Prediction(1, 0.3), Prediction(2, 0.3)]
        right = self._answers[call.position]
        return [Prediction(different_from(right), 0.5), Prediction(right, 0.4), Prediction([right], 0.1)]


class Vandal:
    """Guesses right, and tries to change whatever it is shown."""

    def __init__(self, answers: Mapping[Position, Any]) -> None:
        self._answers = answers

    def predict(self, call: Call) -> Sequence[Prediction]:
        """Spoil the arguments and results it sees."""
        for value in (*call.arguments, *call.recent, *(result for _step, result in call.trail)):
            if isinstance(value, list):
                value.append(3)
        if call.position not in self._answers:
            return []
        return [Prediction(self._answers[call.position], 0.9)]


class Late:
    """Guesses right or wrong, after some time of its own."""

    def __init__(self, inner: Predictor) -> None:
        self._inner = inner

    async def predict(self, call: Call) -> Sequence[Prediction]:
        """What the inner one guesses."""
        return self._inner.predict(call)  # type: ignore[return-value]


class Student:
    """A predictor that also learns, and keeps what it was told."""

    def __init__(self, step: str, inner: Predictor, lessons: list[Lesson]) -> None:
        self._step = step
        self._lessons = lessons
        self.predict = inner.predict

    def observe(self, call: Call, value: Any) -> None:
        """Keep it."""
        self._lessons.append((call.position, self._step, encode(value)))


Lesson = tuple[Position, str, bytes]
"""Place, step and encoded result of a call that a predictor was told about."""

PREDICTORS: dict[str, Callable[[Mapping[Position, Any], int], Predictor]] = {
    "oracle": lambda answers, seed: Oracle(answers),
    "adversary": lambda answers, seed: Adversary(answers, guesses=1 + seed % 3),
    "flaky": lambda answers, seed: Flaky(0.6, answers, seed, confidence=0.6),
    "scripted": lambda answers, seed: Scripted(answers, seed % 5),
    "both": lambda answers, seed: Both(answers),
    "lookalike": lambda answers, seed: Lookalike(answers),
    "unencodable": lambda answers, seed: Unencodable(answers),
    "raising": lambda answers, seed: Raising(),
    "vandal": lambda answers, seed: Vandal(answers),
    "late": lambda answers, seed: Late(Flaky(0.7, answers, seed)),
    "chance": lambda answers, seed: Oracle(lambda call: seed % 4, confidence=0.3),
}
"""Kinds of predictors: made from the right results by position, and a seed."""

CLEAN = frozenset({"oracle", "adversary", "flaky", "scripted", "both", "lookalike", "vandal", "late", "chance"})
"""Those that never fail: the engine may not count a failure of theirs."""

LIKELY = ("oracle", "oracle", "flaky", "flaky", "scripted", "both", "chance", "late", *sorted(PREDICTORS))
"""All kinds, the more interesting ones more often."""
