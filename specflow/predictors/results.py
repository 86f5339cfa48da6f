"""Branch predictors for steps: a result that is one of a few values is a branch of the program."""

from __future__ import annotations

import threading
import zlib
from collections.abc import Sequence
from typing import Any, Final, Literal

from ..errors import InvalidSettingError
from ..speculation import Call, Prediction
from .branch import BranchPrediction, BranchPredictor
from .memory import STEPS, Bounded, Kept, Key, check_predictor, key_of, ranked, whole

_SPREAD: Final = 0x9E3779B1
"""Between the addresses of two values of one step: odd, and without pattern in its low bits."""


class _Values:
    """The values a step may return, numbered in the order they were first seen. Replaced, never changed."""

    __slots__ = ("_oldest", "kept", "numbers", "width")

    def __init__(self, kept: tuple[Kept, ...], oldest: int = 0) -> None:
        self.kept = kept
        self._oldest = oldest
        self.numbers: dict[Key, int] = {value.key: number for number, value in enumerate(kept)}
        self.width = max(1, (len(kept) - 1).bit_length())
        """Bits of one outcome in a history."""

    def code(self, key: Key) -> int:
        """A value as an outcome. The first one is all ones, so that of two values one is taken, the other not."""
        number = self.numbers.get(key)
        return 0 if number is None else (1 << self.width) - 1 - number

    def plus(self, new: Kept, limit: int) -> _Values:
        """With one more value, in the place of the one seen first if there are ``limit`` already."""
        if len(self.kept) < limit:
            return _Values((*self.kept, new))
        place = self._oldest
        return _Values((*self.kept[:place], new, *self.kept[place + 1 :]), (place + 1) % limit)


class Branch:
    """Predicts steps with yes/no or few-valued results by a branch predictor, as in ``Branch(GShare())``.

    Each value is a branch "is it this one?" (one against the rest), with an address of its own, and the value whose
    branch is likeliest to be taken is guessed first. Two values are the two directions of a single branch. The history
    is made of the results before: one bit each for up to two values, two for up to four, and so on. The confidence is
    the branch predictor's, which is measured; those of several values are scaled to at most 1 together.

    With ``history="step"`` a result depends on earlier results of the same step, as local history does in a processor
    (Yeh and Patt 1991, "Two-Level Adaptive Training Branch Prediction"). With ``history="run"`` it depends on results
    of all steps that use this object, so that one decision can tell the next.

    Memory: the branch predictor's tables, and ``limit`` values for each of the last 1024 steps.

    Args:
        predictor: a :class:`~specflow.predictors.TwoBit`, :class:`~specflow.predictors.GShare`,
            :class:`~specflow.predictors.Perceptron`, :class:`~specflow.predictors.TAGE`, or your own.
        history: whose results come before.
        outcomes: how many of them count; at most 64, which is all that a call shows. Each costs a look-up, and a digest
            (some 5 microseconds) if it is neither a plain value nor a member of an enum.
        guesses: most guesses to offer.
        limit: most different values per step. Where there are more, the one seen first makes room, and its branch
            has to be learned anew.

    Raises:
        InvalidSettingError: a setting is out of range.
    """

    def __init__(
        self,
        predictor: BranchPredictor,
        *,
        history: Literal["step", "run"] = "step",
        outcomes: int = 32,
        guesses: int = 2,
        limit: int = 16,
    ) -> None:
        if history not in ("step", "run"):
            raise InvalidSettingError("history", history, "'step' or 'run'")
        check_predictor("predictor", predictor)
        self._predictor = predictor
        self._whole_run = history == "run"
        self._outcomes = whole("outcomes", outcomes, 0)
        self._guesses = whole("guesses", guesses, 1)
        self._limit = whole("limit", limit, 2)
        self._values: Bounded[str, _Values] = Bounded(STEPS)
        self._lock = threading.Lock()

    def predict(self, call: Call) -> Sequence[Prediction]:
        """The likeliest values; none before the step's first result."""
        values = self._values.get(call.step)
        if values is None:
            return ()
        history = self._history(call)
        address = _address(call.step)
        if len(values.kept) <= 2:
            first = self._predictor.predict(address, history)
            second = BranchPrediction(not first.taken, first.confidence)
            guesses = [first, second][: len(values.kept)]
        else:
            guesses = [
                self._predictor.predict(address + number * _SPREAD, history) for number in range(len(values.kept))
            ]
        # Values whose branch is guessed taken come first, as the branch predictor has it, however unsure it is.
        claims = [guess.confidence if guess.taken else 1.0 - guess.confidence for guess in guesses]
        order = sorted(range(len(guesses)), key=lambda number: (not guesses[number].taken, -claims[number]))
        order = order[: self._guesses]
        return ranked([values.kept[number] for number in order], [claims[number] for number in order])

    def observe(self, call: Call, value: Any) -> None:
        """Let the branch of every value learn."""
        kept = Kept(value)
        with self._lock:
            values = self._values.touch(call.step, lambda: _Values((kept,)))
            if kept.key not in values.numbers:
                values = values.plus(kept, self._limit)
                self._values.put(call.step, values)
            history = self._history(call)
            address = _address(call.step)
            actual = values.numbers[kept.key]
            for number in range(len(values.kept)):
                self._predictor.observe(address + number * _SPREAD, history, taken=number == actual)

    def _history(self, call: Call) -> int:
        """Earlier outcomes as bits, the newest lowest. Results of steps that are not predicted here say nothing."""
        if self._whole_run:
            results = call.trail[-self._outcomes :] if self._outcomes else ()
        else:
            results = [(call.step, value) for value in call.recent[-self._outcomes :]] if self._outcomes else ()
        history = 0
        for step, value in results:
            values = self._values.get(step)
            if values is not None:
                history = history << values.width | values.code(key_of(value))
        return history


def _address(step: str) -> int:
    """The address of a step's first branch: the same in every process, unlike ``hash``."""
    return zlib.crc32(step.encode())
