"""Branch predictors: tables of small counters and weights, as processors have them.

A history of outcomes is an int, newest outcome in the lowest bit. It is an argument, not state: a caller that runs
ahead extends it with predicted outcomes and has nothing to undo when they turn out wrong. Tables learn from retired
branches only. :class:`~specflow.predictors.Branch` makes any of them a predictor of step results.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Protocol

from ..errors import InvalidSettingError
from .memory import HitRates

_STRONGLY_TAKEN = 3
_WEAKLY_TAKEN = 2
_WEAKLY_NOT_TAKEN = 1
_MAX_TABLE_BITS = 24
_MAX_HISTORY_BITS = 1024
_MAX_WEIGHT_BITS = 32

RATE_MEMORY: Final = 1024.0
"""Branches after which one has faded to 1/e in the confidence. Many branches share a rate, so it is long."""


@dataclass(frozen=True, slots=True)
class BranchPrediction:
    """A guessed direction."""

    taken: bool
    confidence: float
    """Estimated probability that the direction is right, in (0, 1)."""


class BranchPredictor(Protocol):
    """**Protocol:** guesses the direction of conditional branches."""

    def predict(self, address: int, history: int) -> BranchPrediction:
        """Guess the branch at ``address`` after the outcomes in ``history``."""
        ...

    def observe(self, address: int, history: int, *, taken: bool) -> None:
        """Learn the real direction of a retired branch and the history it was reached with."""
        ...


class TwoBit:
    """One saturating two-bit counter per branch address (Smith 1981, "A Study of Branch Prediction Strategies").

    Also known as the bimodal predictor.

    Args:
        table_bits: the table has ``2 ** table_bits`` counters; addresses that agree in their low bits share one.
        initially_taken: what to guess of a branch that was never seen, weakly.

    Raises:
        InvalidSettingError: ``table_bits`` is out of range.
    """

    def __init__(self, table_bits: int = 12, *, initially_taken: bool = False) -> None:
        self._counters = Counters(table_bits, initially_taken=initially_taken)

    def predict(self, address: int, history: int) -> BranchPrediction:
        """The direction this branch took most of the last few times."""
        del history
        return self._counters.predict(address)

    def observe(self, address: int, history: int, *, taken: bool) -> None:
        """Move the branch's counter."""
        del history
        self._counters.observe(address, taken=taken)


class GShare:
    """Counters indexed by address xor recent outcomes (McFarling 1993, "Combining Branch Predictors").

    Args:
        table_bits: the table has ``2 ** table_bits`` counters.
        history_bits: how many of the newest outcomes count; at most ``table_bits``.
        initially_taken: what to guess where nothing was seen, weakly.

    Raises:
        InvalidSettingError: a setting is out of range.
    """

    def __init__(self, table_bits: int = 12, history_bits: int = 8, *, initially_taken: bool = False) -> None:
        self._counters = Counters(table_bits, initially_taken=initially_taken)
        if not 0 <= history_bits <= table_bits:
            raise InvalidSettingError("history_bits", history_bits, f"an integer in [0, table_bits={table_bits}]")
        self._history_mask = (1 << history_bits) - 1

    def predict(self, address: int, history: int) -> BranchPrediction:
        """The direction taken the last few times this branch was reached in the same way."""
        return self._counters.predict(address ^ (history & self._history_mask))

    def observe(self, address: int, history: int, *, taken: bool) -> None:
        """Move the counter of this branch and history."""
        self._counters.observe(address ^ (history & self._history_mask), taken=taken)


class Perceptron:
    """One perceptron per branch address (Jimenez and Lin 2001, "Dynamic Branch Prediction with Perceptrons").

    The guess is the sign of a bias plus a weight for each recent outcome, +1 taken and -1 not. Weights move by one when
    the guess was wrong or the sum is no larger than the paper's threshold, ``floor(1.93 * history_bits + 14)``. Learns
    much longer histories than a table of counters, but only what is linearly separable: not an exclusive or. The
    confidence is how often sums of that size were right.

    Args:
        table_bits: there are ``2 ** table_bits`` perceptrons, made when first needed; addresses that agree in their low
            bits share one.
        history_bits: how many of the newest outcomes count.
        weight_bits: weights saturate as signed integers of this many bits.

    Raises:
        InvalidSettingError: a setting is out of range.
    """

    _RATED_SUMS = 8

    def __init__(self, table_bits: int = 10, history_bits: int = 24, *, weight_bits: int = 8) -> None:
        check_between("table_bits", table_bits, 1, _MAX_TABLE_BITS)
        check_between("history_bits", history_bits, 1, _MAX_HISTORY_BITS)
        check_between("weight_bits", weight_bits, 2, _MAX_WEIGHT_BITS)
        self._mask = (1 << table_bits) - 1
        self._history_bits = history_bits
        self._threshold = int(1.93 * history_bits + 14)
        self._most = (1 << (weight_bits - 1)) - 1
        self._least = -self._most - 1
        self._rows: dict[int, list[int]] = {}
        self._rates = HitRates(RATE_MEMORY)

    def predict(self, address: int, history: int) -> BranchPrediction:
        """The sign of the weighted outcomes; taken where nothing was learned."""
        total = self._sum(self._rows.get(address & self._mask), history)
        return BranchPrediction(total >= 0, self._rates.rate(self._size(total)))

    def observe(self, address: int, history: int, *, taken: bool) -> None:
        """Move the branch's weights if the sum was wrong or small."""
        row = self._rows.get(address & self._mask)
        if row is None:
            row = self._rows[address & self._mask] = [0] * (self._history_bits + 1)
        total = self._sum(row, history)
        self._rates.record(self._size(total), hit=(total >= 0) == taken)
        if (total >= 0) == taken and abs(total) > self._threshold:
            return
        row[0] = self._moved(row[0], up=taken)
        for index in range(1, len(row)):
            row[index] = self._moved(row[index], up=taken == bool(history & 1))
            history >>= 1

    def _sum(self, row: list[int] | None, history: int) -> int:
        if row is None:
            return 0
        total = 2 * row[0]
        # sum(+w where taken, -w where not) is twice the sum of the taken ones, less all of them.
        for weight in row[1:]:
            if history & 1:
                total += 2 * weight
            history >>= 1
        return total - sum(row)

    def _moved(self, weight: int, *, up: bool) -> int:
        return min(weight + 1, self._most) if up else max(weight - 1, self._least)

    def _size(self, total: int) -> int:
        """Sums up to the threshold in four classes, larger ones in five more."""
        return min(4 * abs(total) // self._threshold, self._RATED_SUMS)


def check_between(setting: str, value: int, least: int, most: int) -> None:
    """Check a setting.

    Raises:
        InvalidSettingError: the value is out of range.
    """
    if not least <= value <= most:
        raise InvalidSettingError(setting, value, f"an integer in [{least}, {most}]")


class Counters:
    """A table of two-bit counters, and how often each of their four states has been right lately.

    Args:
        table_bits: there are ``2 ** table_bits`` counters.
        initially_taken: the direction that all of them start with, weakly.

    Raises:
        InvalidSettingError: ``table_bits`` is out of range.
    """

    __slots__ = ("_mask", "_rates", "_states")

    def __init__(self, table_bits: int, *, initially_taken: bool = False) -> None:
        check_between("table_bits", table_bits, 1, _MAX_TABLE_BITS)
        self._mask = (1 << table_bits) - 1
        self._states = bytearray([_WEAKLY_TAKEN if initially_taken else _WEAKLY_NOT_TAKEN]) * (1 << table_bits)
        # Confidence by counter state (Smith 1981 again): a saturated counter is right more often than one in between.
        self._rates = HitRates(RATE_MEMORY)

    def predict(self, index: int) -> BranchPrediction:
        """The direction a counter stands for. Any index will do; its low bits count."""
        state = self._states[index & self._mask]
        return BranchPrediction(state > _WEAKLY_NOT_TAKEN, self._rates.rate(state))

    def observe(self, index: int, *, taken: bool) -> None:
        """Move a counter."""
        index &= self._mask
        state = self._states[index]
        self._rates.record(state, hit=taken == (state > _WEAKLY_NOT_TAKEN))
        if taken and state < _STRONGLY_TAKEN:
            self._states[index] = state + 1
        elif not taken and state > 0:
            self._states[index] = state - 1
