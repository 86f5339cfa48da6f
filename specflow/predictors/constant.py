"""The two simplest predictors: always the same, and the same as last time."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, Final

from ..errors import InvalidSettingError
from ..speculation import Call, Prediction
from .memory import STEPS, Bounded, HitRates, Kept, at_least, copy_of, key_of

_STREAK: Final = 3


class Constant:
    """Always the same guess.

    Args:
        value: the guess.
        confidence: claimed probability that it is right. Nothing is learned: it is your word.

    Raises:
        InvalidSettingError: ``confidence`` is not a probability.
        UnsupportedValueError: the value cannot be encoded, so that no step can return it.
    """

    def __init__(self, value: Any, confidence: float = 1.0) -> None:
        if not 0.0 <= confidence <= 1.0:
            raise InvalidSettingError("confidence", confidence, "a probability in [0, 1]")
        self._value = Kept(value)
        self._confidence = confidence

    def predict(self, call: Call) -> Sequence[Prediction]:
        """The constant."""
        del call
        return (Prediction(self._value.copy(), self._confidence),)


class LastValue:
    """The result this step had last: the newest that the call shows, or else the newest committed one.

    The value predictor of Lipasti, Wilkerson and Shen 1996 ("Value Locality and Load Value Prediction"). The confidence
    is how often the guess was right lately after as many equal results in a row: 0 (the call shows none), 1, 2, or 3
    and more. Memory: one result and four rates for each of the last 1024 steps.

    Args:
        memory: guesses after which one has faded to 1/e in the confidence.

    Raises:
        InvalidSettingError: ``memory`` is below 1.
    """

    def __init__(self, *, memory: float = 50.0) -> None:
        self._memory: float = at_least("memory", memory, 1.0)
        self._last: Bounded[str, Kept] = Bounded(STEPS)
        self._rates: Bounded[str, HitRates] = Bounded(STEPS)
        self._lock = threading.Lock()

    def predict(self, call: Call) -> Sequence[Prediction]:
        """The last result; none before the step's first."""
        last = self._last.get(call.step)
        if call.recent:
            value = copy_of(call.recent[-1])
        elif last is not None:
            value = last.copy()
        else:
            return ()
        rates = self._rates.get(call.step)
        return (Prediction(value, rates.rate(_streak(call.recent)) if rates else 0.5),)

    def observe(self, call: Call, value: Any) -> None:
        """Keep a result, and score the guess that was due."""
        kept = Kept(value)
        with self._lock:
            last = self._last.get(call.step)
            guess = key_of(call.recent[-1]) if call.recent else last.key if last is not None else None
            if guess is not None:
                rates = self._rates.touch(call.step, lambda: HitRates(self._memory))
                rates.record(_streak(call.recent), hit=guess == kept.key)
            self._last.put(call.step, kept)


def _streak(recent: Sequence[Any]) -> int:
    """How many of the newest results are equal, counted up to three."""
    if not recent:
        return 0
    newest, length = key_of(recent[-1]), 1
    while length < min(_STREAK, len(recent)) and key_of(recent[-1 - length]) == newest:
        length += 1
    return length
