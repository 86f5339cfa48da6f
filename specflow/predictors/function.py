"""A function, such as a call of a cheap model, as a predictor."""

from __future__ import annotations

import dataclasses
import inspect
import threading
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final

from ..errors import InvalidSettingError
from ..speculation import Call, Prediction
from .memory import Ask, Bounded, HitRates, Key, at_least, copy_of, key_of, place_key
from .waiting import Later

_UNRESOLVED: Final = 4096
"""Most guesses kept until the real result is known. Those of squashed worlds never are."""


class Fn:
    """Guesses with a function, sync or async, that is called with the step's arguments.

    It may return a value; a :class:`~specflow.speculation.Prediction`; a list of predictions, likeliest first; or None
    to pass (to guess None, return ``Prediction(None)``). A coroutine function, or one that returns something to await,
    runs beside the step, as speculative work. Any other function must be quick and must not block. None of them may
    change its arguments.

    The confidence of plain values is how often they were right lately, per step, unless you give one. Predictions that
    the function makes itself keep theirs. Memory: at most 4096 guesses whose step has not returned yet, as keys, and a
    rate for each of at most 4096 steps.

    Args:
        function: what to call.
        confidence: claimed probability that a plain value is right; None measures it.
        money: what one call of the function costs. It is charged to the first guess of the call; a call that passes
            has no guess to charge.
        memory: guesses after which one has faded to 1/e in the measured confidence.

    Raises:
        InvalidSettingError: a setting is out of range.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        confidence: float | None = None,
        money: float = 0.0,
        memory: float = 50.0,
    ) -> None:
        if confidence is not None and not 0.0 <= confidence <= 1.0:
            raise InvalidSettingError("confidence", confidence, "a probability in [0, 1], or None")
        if not callable(function):
            raise InvalidSettingError("function", function, "a function of the call")
        self._function = function
        self._confidence = confidence
        self._money: float = at_least("money", money, 0.0)
        self._rates = HitRates(memory)
        self._unresolved: Bounded[Key, Key] = Bounded(_UNRESOLVED)
        self._lock = threading.Lock()
        self._is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)

    @property
    def predict(self) -> Ask:
        """Asks the function what a call will return; has to be awaited if the function has to.

        Raises:
            UnsupportedValueError: it returned a value that cannot be encoded, so that no step can return it.
        """
        return self._wait if self._is_async else self._answer

    def observe(self, call: Call, value: Any) -> None:
        """Score the plain value that was guessed for this call, if one was."""
        if self._confidence is not None:
            return
        with self._lock:
            guess = self._unresolved.pop(place_key(call))
            if guess is not None:
                self._rates.record(call.step, hit=guess == key_of(value))

    async def _wait(self, call: Call) -> Sequence[Prediction]:
        return self._guesses(call, await self._function(*call.arguments, **call.keywords))

    def _answer(self, call: Call) -> Sequence[Prediction] | Awaitable[Sequence[Prediction]]:
        answer = self._function(*call.arguments, **call.keywords)
        if inspect.isawaitable(answer):
            return Later(answer, lambda value: self._guesses(call, value))
        return self._guesses(call, answer)

    def _guesses(self, call: Call, answer: Any) -> Sequence[Prediction]:
        match answer:
            case None:
                return ()
            case Prediction():
                predictions = [answer]
            case list() | tuple() if answer and all(isinstance(guess, Prediction) for guess in answer):
                predictions = list(answer)
            case _:
                predictions = [self._plain(call, answer)]
        if self._money and not any(prediction.money for prediction in predictions):
            predictions[0] = dataclasses.replace(predictions[0], money=self._money)
        return predictions

    def _plain(self, call: Call, value: Any) -> Prediction:
        confidence = self._confidence
        if confidence is None:
            confidence = self._rates.rate(call.step)
            with self._lock:
                self._unresolved.put(place_key(call), key_of(value))
        return Prediction(copy_of(value), confidence)
