"""Predictors for tests: always right, always wrong, and right as often as told.

They claim what suits the test and learn nothing, so that a run depends on them in a known way.
"""

from __future__ import annotations

import enum
import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from ..codec import Box
from ..errors import InvalidSettingError
from ..history import format_position
from ..speculation import Call, Prediction

Answers = Callable[[Call], Any] | Mapping[Any, Any]
"""The right result of a call: a function of it, or a table by position or by step name. Calls that a table does not
list are passed; the position is looked up first."""

NEVER_RETURNED: Final = "specflow.testing: no step returns this"
"""A guess that is wrong whatever the step returns."""


class Oracle:
    """Always right, if its answers are.

    Args:
        answers: the right results. A :class:`~specflow.speculation.Prediction` is handed on as it is, for example one
            with ``then``.
        confidence: claimed probability.

    Raises:
        InvalidSettingError: ``confidence`` is not a probability.
    """

    def __init__(self, answers: Answers, *, confidence: float = 1.0) -> None:
        self._answers = answers
        self._confidence = _probability("confidence", confidence)

    def predict(self, call: Call) -> Sequence[Prediction]:
        """The right result."""
        found, answer = _answer(self._answers, call)
        if not found:
            return ()
        if isinstance(answer, Prediction):
            return (answer,)
        return (Prediction(Box(answer).fresh(), self._confidence),)


class Adversary:
    """Always wrong, and always sure unless told otherwise.

    Args:
        answers: the right results, where known. Guesses then are wrong values of the right type, so that a program goes
            further on them before it fails. None: every guess is :data:`NEVER_RETURNED`, or starts with it.
        confidence: claimed probability of the first guess; further ones claim half of the one before.
        guesses: how many different wrong results to guess.

    Raises:
        InvalidSettingError: ``confidence`` is not a probability, or ``guesses`` is below 1.
    """

    def __init__(self, answers: Answers | None = None, *, confidence: float = 1.0, guesses: int = 1) -> None:
        self._answers: Answers = {} if answers is None else answers
        self._confidence = _probability("confidence", confidence)
        if not guesses >= 1:
            raise InvalidSettingError("guesses", guesses, "an integer >= 1")
        self._guesses = guesses

    def predict(self, call: Call) -> Sequence[Prediction]:
        """Wrong results."""
        found, answer = _answer(self._answers, call)
        right = answer.value if isinstance(answer, Prediction) else answer
        wrong: list[Any] = [different_from(right)] if found else [NEVER_RETURNED]
        wrong += [f"{NEVER_RETURNED} ({number})" for number in range(2, self._guesses + 1)]
        return [Prediction(value, self._confidence / 2**rank) for rank, value in enumerate(wrong)]


class Flaky:
    """Right with a given probability, decided by seed, step and position: the same in every run and every world.

    Args:
        probability: how often it is right.
        answers: the right results.
        seed: another seed is right elsewhere.
        confidence: claimed probability; None claims ``probability``.

    Raises:
        InvalidSettingError: ``probability`` or ``confidence`` is not a probability.
    """

    def __init__(self, probability: float, answers: Answers, seed: int = 0, *, confidence: float | None = None) -> None:
        self._probability = _probability("probability", probability)
        self._answers = answers
        self._seed = seed
        self._confidence = probability if confidence is None else _probability("confidence", confidence)

    def predict(self, call: Call) -> Sequence[Prediction]:
        """The right result, or a wrong one of the same type where possible."""
        found, answer = _answer(self._answers, call)
        if not found:
            return ()
        right = answer.value if isinstance(answer, Prediction) else answer
        value = Box(right).fresh() if self.is_right(call) else different_from(right)
        return (Prediction(value, self._confidence),)

    def is_right(self, call: Call) -> bool:
        """Whether the guess for this call is a right one."""
        place = f"{self._seed}\x00{call.step}\x00{format_position(call.position)}"
        draw = int.from_bytes(hashlib.blake2b(place.encode(), digest_size=8).digest(), "big") / 2**64
        return draw < self._probability


def different_from(value: Any) -> Any:
    """A value with another canonical form, of the same type where there is an obvious one.

    Raises:
        UnsupportedValueError: the value cannot be encoded.
    """
    return Box(_variation(value)).fresh()  # shares no part of the value


def _variation(value: Any) -> Any:  # noqa: PLR0911 -- one answer per type
    match value:
        case bool():
            return not value
        case enum.Enum():
            return next((member for member in type(value) if member is not value), NEVER_RETURNED)
    if type(value) is int:
        return value + 1
    if type(value) is float:
        return math.nextafter(value, math.inf) if math.isfinite(value) else 0.0
    if type(value) is str:
        return f"{value}?"
    if type(value) is bytes:
        return value + b"?"
    if type(value) in (list, tuple):
        return type(value)([*value, *value[-1:]]) if value else type(value)([NEVER_RETURNED])
    if type(value) is dict:
        return {**value, NEVER_RETURNED: None} if not value else dict(list(value.items())[:-1])
    return NEVER_RETURNED


def _answer(answers: Answers, call: Call) -> tuple[bool, Any]:
    """Whether there is an answer, and the answer."""
    if not isinstance(answers, Mapping):
        return True, answers(call)
    for key in (call.position, call.step):
        if key in answers:
            return True, answers[key]
    return False, None


def _probability(setting: str, value: float) -> float:
    if not 0.0 <= value <= 1.0:
        raise InvalidSettingError(setting, value, "a probability in [0, 1]")
    return value
