"""Several predictors as one."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import threading
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, Final

from ..errors import InvalidSettingError
from ..protocols import Predictor
from ..speculation import Call
from .memory import Ask, Bounded, HitRates, Key, check_predictor, key_of, place_key, whole
from .waiting import Guesses, Later

Heard = Callable[[int, Guesses], None]

_UNRESOLVED: Final = 4096
"""Most guesses kept until the real result is known. Those of squashed worlds never are."""


_PASSED: Final = object()
"""What an async predictor that had no guess is taken to have guessed: nothing equals it."""


class FirstOf:
    """The first predictor that has a guess, in the order given.

    For example ``FirstOf(ByArguments(), LastValue())``. All of them learn. Where one is async the whole is.

    Args:
        predictors: at least one.

    Raises:
        InvalidSettingError: no predictor is given.
    """

    def __init__(self, *predictors: Predictor) -> None:
        self._panel = _Panel(predictors)

    @property
    def predict(self) -> Ask:
        """Asks for the guesses of the first predictor that has any; nothing if all pass."""
        return self._wait if self._panel.slow else self._answer

    def observe(self, call: Call, value: Any) -> None:
        """Let every predictor that learns learn."""
        self._panel.observe(call, value)

    def _answer(self, call: Call) -> Guesses | Later:
        return self._panel.answer(range(self._panel.size), call, _ignore)

    async def _wait(self, call: Call) -> Guesses:
        return await self._panel.wait(range(self._panel.size), call, _ignore)


class Tournament:
    """The predictor that was right most often lately for this step.

    After McFarling 1993, "Combining Branch Predictors", with hit rates instead of two-bit choosers and for any number
    of predictors. The one with the highest rate for the step is asked, and the next one if it passes. First guesses
    count, and count as right when they equal the result in canonical form. All predictors that learn do, chosen or not.
    Confidences are the chosen predictor's own, and its name is the guess's source.

    Plain predictors are scored on every committed call, by asking them again just before they learn from it. An async
    predictor is scored when it was asked, and is preferred until that has happened ``trials`` times; to pass counts
    against it, since the others had to wait for that. Where one predictor is async the whole is.

    Memory: a rate for each predictor and step, 4096 in all, and the guesses of async predictors for at most 4096 calls.

    Args:
        predictors: at least one; the first wins a tie.
        memory: guesses after which one has faded to 1/e in the hit rates.
        trials: how often to prefer an async predictor in order to know it.

    Raises:
        InvalidSettingError: no predictor is given, or a setting is out of range.
    """

    def __init__(self, *predictors: Predictor, memory: float = 32.0, trials: int = 4) -> None:
        self._panel = _Panel(predictors)
        self._rates = HitRates(memory)
        self._trials = whole("trials", trials, 0)
        self._unresolved: Bounded[tuple[int, Key], Key] = Bounded(_UNRESOLVED)
        self._lock = threading.Lock()

    @property
    def predict(self) -> Ask:
        """Asks for the guesses of the best predictor that has any; nothing if all pass."""
        return self._wait if self._panel.slow else self._answer

    def observe(self, call: Call, value: Any) -> None:
        """Score every predictor's first guess, then let those that learn learn."""
        key = key_of(value)
        for index in range(self._panel.size):
            guess = self._first_guess(call, index)
            if guess is not None:
                with self._lock:
                    self._rates.record((call.step, index), hit=guess == key)
        self._panel.observe(call, value)

    def _answer(self, call: Call) -> Guesses | Later:
        return self._panel.answer(self._order(call.step), call, self._hear(call))

    async def _wait(self, call: Call) -> Guesses:
        return await self._panel.wait(self._order(call.step), call, self._hear(call))

    def _hear(self, call: Call) -> Heard:
        """Notes what those say that have to be awaited: they cannot be asked again when the result is known."""

        def heard(index: int, guesses: Guesses) -> None:
            if index in self._panel.slow:
                with self._lock:
                    self._unresolved.put((index, place_key(call)), key_of(guesses[0].value) if guesses else _PASSED)

        return heard

    def _order(self, step: str) -> list[int]:
        """The best first."""
        return sorted(range(self._panel.size), key=lambda index: -self._worth(step, index))

    def _worth(self, step: str, index: int) -> float:
        state = (step, index)
        if index in self._panel.slow and self._rates.resolved(state) < self._trials:
            return 1.0
        return self._rates.rate(state)

    def _first_guess(self, call: Call, index: int) -> Key | None:
        if index in self._panel.slow:
            with self._lock:
                return self._unresolved.pop((index, place_key(call)))
        guesses = self._panel.ask(index, call)
        if isinstance(guesses, Later):
            guesses.close()  # it turns out now that it has to be awaited
            return None
        return key_of(guesses[0].value) if guesses else None


class _Panel:
    """Several predictors.

    Raises:
        InvalidSettingError: there is none.
    """

    def __init__(self, predictors: tuple[Predictor, ...]) -> None:
        if not predictors:
            raise InvalidSettingError("predictors", predictors, "at least one")
        for predictor in predictors:
            check_predictor("predictors", predictor)
        self._predictors = predictors
        self.size = len(predictors)
        self.slow = {
            index for index, predictor in enumerate(predictors) if inspect.iscoroutinefunction(predictor.predict)
        }
        """Those that have to be awaited: known beforehand, or seen when they were asked."""
        observers = (getattr(predictor, "observe", None) for predictor in predictors)
        self._observers = [observe for observe in observers if observe is not None]

    def observe(self, call: Call, value: Any) -> None:
        """Tell a result to those that learn."""
        for observe in self._observers:
            observe(call, value)

    def ask(self, index: int, call: Call) -> Guesses | Later:
        """The guesses of one of which it is not known that it has to be awaited."""
        guesses = self._predictors[index].predict(call)
        if inspect.isawaitable(guesses):
            self.slow.add(index)
            return Later(guesses, lambda made: made)
        return guesses

    def answer(self, order: Iterable[int], call: Call, heard: Heard) -> Guesses | Later:
        """The first guesses, to be awaited if need be. ``heard`` is told what each one that was asked said."""
        left = iter(order)
        for index in left:
            guesses = self.ask(index, call)
            if isinstance(guesses, Later):
                return Later(guesses, functools.partial(self._go_on, index, left, call, heard))
            heard(index, guesses)
            if guesses:
                return self._signed(index, guesses)
        return ()

    def _go_on(
        self, index: int, left: Iterable[int], call: Call, heard: Heard, guesses: Guesses
    ) -> Guesses | Awaitable[Guesses]:
        """One that had to be awaited has answered."""
        heard(index, guesses)
        return self._signed(index, guesses) if guesses else self.wait(left, call, heard)

    async def wait(self, order: Iterable[int], call: Call, heard: Heard) -> Guesses:
        """The first guesses, awaited where they have to be."""
        for index in order:
            answer = self._predictors[index].predict(call)
            guesses = await answer if inspect.isawaitable(answer) else answer
            heard(index, guesses)
            if guesses:
                return self._signed(index, guesses)
        return ()

    def _signed(self, index: int, guesses: Guesses) -> Guesses:
        """The guesses with the name of who made them, where they have none."""
        name = type(self._predictors[index]).__name__
        return [guess if guess.source else dataclasses.replace(guess, source=name) for guess in guesses]


def _ignore(index: int, guesses: Guesses) -> None:
    """Nobody needs to know who said what."""
