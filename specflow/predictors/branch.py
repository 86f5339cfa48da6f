"""Branch predictors: tables of two-bit counters, as processors have them.

A history of outcomes is an int, newest outcome in the lowest bit. It is an argument, not state: a caller that runs
ahead extends it with predicted outcomes and has nothing to undo when they turn out wrong. Tables learn from retired
branches only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from ..errors import InvalidSettingError

_STRONGLY_TAKEN = 3
_WEAKLY_NOT_TAKEN = 1
_MAX_TABLE_BITS = 24


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

    Args:
        table_bits: the table has ``2 ** table_bits`` counters; addresses that agree in their low bits share one.

    Raises:
        InvalidSettingError: ``table_bits`` is out of range.
    """

    def __init__(self, table_bits: int = 12) -> None:
        self._counters = _Counters(table_bits)

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

    Raises:
        InvalidSettingError: a setting is out of range.
    """

    def __init__(self, table_bits: int = 12, history_bits: int = 8) -> None:
        self._counters = _Counters(table_bits)
        if not 0 <= history_bits <= table_bits:
            raise InvalidSettingError("history_bits", history_bits, f"an integer in [0, table_bits={table_bits}]")
        self._history_mask = (1 << history_bits) - 1

    def predict(self, address: int, history: int) -> BranchPrediction:
        """The direction taken the last few times this branch was reached in the same way."""
        return self._counters.predict(address ^ (history & self._history_mask))

    def observe(self, address: int, history: int, *, taken: bool) -> None:
        """Move the counter of this branch and history."""
        self._counters.observe(address ^ (history & self._history_mask), taken=taken)


class _Counters:
    """A table of two-bit counters, and how often each of their four states has been right."""

    __slots__ = ("_mask", "_right", "_seen", "_states")

    def __init__(self, table_bits: int) -> None:
        if not 1 <= table_bits <= _MAX_TABLE_BITS:
            raise InvalidSettingError("table_bits", table_bits, f"an integer in [1, {_MAX_TABLE_BITS}]")
        self._mask = (1 << table_bits) - 1
        self._states = bytearray([_WEAKLY_NOT_TAKEN]) * (1 << table_bits)
        # Confidence by counter state (Smith 1981 again): a saturated counter is right more often than one in between.
        # One right and one wrong result each keep it away from 0 and 1 before anything was seen.
        self._right = [1] * 4
        self._seen = [2] * 4

    def predict(self, index: int) -> BranchPrediction:
        state = self._states[index & self._mask]
        return BranchPrediction(state > _WEAKLY_NOT_TAKEN, self._right[state] / self._seen[state])

    def observe(self, index: int, *, taken: bool) -> None:
        index &= self._mask
        state = self._states[index]
        self._seen[state] += 1
        self._right[state] += taken == (state > _WEAKLY_NOT_TAKEN)
        if taken and state < _STRONGLY_TAKEN:
            self._states[index] = state + 1
        elif not taken and state > 0:
            self._states[index] = state - 1
