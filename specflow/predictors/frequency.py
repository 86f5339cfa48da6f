"""Predictors that count: which results followed the same circumstances, and how often."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from ..speculation import Call, Prediction
from .memory import STEPS, Bounded, HitRates, Kept, Key, arguments_key, at_least, key_of, ranked, whole

_MOST_VALUES: Final = 16
"""Different results counted in one context. Where there are more, the rarest are not worth a guess."""
_NEGLIGIBLE: Final = 0.01
"""A count that has faded to this is dropped."""
_SHARES: Final = 8
"""Shares are told apart to 1/8 when hit rates are looked up."""

_SHOWN: Final = 64
"""Results that a call shows."""
_START: Final = object()
"""Stands in a context for the results before the first that a call shows."""


@dataclass(frozen=True, slots=True)
class _Candidate:
    """A result that may come again."""

    value: Kept
    share: float
    """Its part of what was seen in the context, by Laplace's rule with one more result for all unseen ones."""


class _Counts:
    """Faded counts of the results seen in one context."""

    __slots__ = ("_values", "_weights", "candidates")

    def __init__(self) -> None:
        self._weights: dict[Key, float] = {}
        self._values: dict[Key, Kept] = {}
        self.candidates: tuple[_Candidate, ...] = ()
        """Likeliest first. Replaced as a whole, never changed."""

    def add(self, value: Kept, keep: float, guesses: int) -> None:
        """Count a result after all others have faded by ``keep``."""
        weights = {key: faded for key, weight in self._weights.items() if (faded := weight * keep) > _NEGLIGIBLE}
        # Taken out and put back at the end, so that the newest of equally frequent results is found first below.
        weights[value.key] = weights.pop(value.key, 0.0) + 1.0
        if len(weights) > _MOST_VALUES:
            # The newest result stays, or a new one could never grow.
            del weights[min((key for key in weights if key != value.key), key=lambda key: weights[key])]
        self._weights = weights
        self._values = {key: value if key == value.key else self._values[key] for key in weights}
        whole = sum(weights.values()) + len(weights) + 1.0
        likeliest = sorted(weights, key=weights.__getitem__)[::-1][:guesses]
        self.candidates = tuple(_Candidate(self._values[key], (weights[key] + 1.0) / whole) for key in likeliest)


class _Table:
    """What is known of one step."""

    __slots__ = ("contexts", "rates")

    def __init__(self, memory: float, limit: int) -> None:
        self.contexts: Bounded[Hashable, _Counts] = Bounded(limit)
        self.rates = HitRates(memory)

    def candidates(self, contexts: Sequence[tuple[int, Hashable]]) -> tuple[int, tuple[_Candidate, ...]]:
        """Those of the first context that was seen before, and its level."""
        for level, context in contexts:
            counts = self.contexts.get(context)
            if counts is not None:
                return level, counts.candidates
        return 0, ()


class _Frequencies:
    """Counts of results by context, per step, and how often guesses drawn from them were right.

    Args:
        contexts: the contexts of a call as (level, context), most telling first. Guesses come from the first one that
            was seen before; all of them learn.
        memory: results after which one has faded to 1/e, in its context; the same for hit rates.
        guesses: most guesses to offer.
        limit: most contexts kept per step.

    Raises:
        InvalidSettingError: a setting is below 1.
    """

    def __init__(
        self,
        contexts: Callable[[Call], Sequence[tuple[int, Hashable]]],
        *,
        memory: float,
        guesses: int,
        limit: int,
    ) -> None:
        self._contexts = contexts
        self._memory: float = at_least("memory", memory, 1.0)
        self._keep = 1.0 - 1.0 / memory
        self._guesses = whole("guesses", guesses, 1)
        self._limit = whole("limit", limit, 1)
        self._tables: Bounded[str, _Table] = Bounded(STEPS)
        self._lock = threading.Lock()

    def predict(self, call: Call) -> Sequence[Prediction]:
        table = self._tables.get(call.step)
        if table is None:
            return ()
        level, candidates = table.candidates(self._contexts(call))
        claims = [
            table.rates.rate((level, rank, int(candidate.share * _SHARES)), candidate.share)
            for rank, candidate in enumerate(candidates)
        ]
        return ranked([candidate.value for candidate in candidates], claims)

    def observe(self, call: Call, value: Any) -> None:
        kept, contexts = Kept(value), self._contexts(call)
        with self._lock:
            table = self._tables.touch(call.step, lambda: _Table(self._memory, self._limit))
            level, candidates = table.candidates(contexts)
            for rank, candidate in enumerate(candidates):
                state = (level, rank, int(candidate.share * _SHARES))
                table.rates.record(state, hit=candidate.value.key == kept.key)
            for _, context in contexts:
                table.contexts.touch(context, _Counts).add(kept, self._keep, self._guesses)


class Majority:
    """The result that came most often lately.

    The confidence is how often guesses of the same rank and share of the counts were right lately. Memory: at most 16
    results and their counts for each of the last 1024 steps.

    Args:
        memory: results after which one has faded to 1/e.
        guesses: most guesses to offer, by frequency.

    Raises:
        InvalidSettingError: a setting is below 1.
    """

    def __init__(self, *, memory: float = 50.0, guesses: int = 3) -> None:
        self._frequencies = _Frequencies(lambda _: ((0, ()),), memory=memory, guesses=guesses, limit=1)

    def predict(self, call: Call) -> Sequence[Prediction]:
        """The most frequent results; none before the step's first."""
        return self._frequencies.predict(call)

    def observe(self, call: Call, value: Any) -> None:
        """Count a result."""
        self._frequencies.observe(call, value)


class Markov:
    """What followed the last results of this step, most frequent first.

    The context is the step's last ``order`` results; that there were not as many yet is a context too. Where it was
    never seen, shorter contexts are tried, down to none at all, as in prediction by partial matching (Cleary and Witten
    1984, "Data Compression Using Adaptive Coding and Partial String Matching"). The confidence is how often guesses
    from a context of the same length, of the same rank and share of the counts were right lately. Memory: at most
    ``limit`` contexts of at most 16 results for each of the last 1024 steps.

    Args:
        order: how many results make the longest context; at most 64, which is all that a call shows.
        memory: results after which one has faded to 1/e, in its context.
        guesses: most guesses to offer.
        limit: most contexts kept per step; the one learned least recently is forgotten.

    Raises:
        InvalidSettingError: a setting is out of range.
    """

    def __init__(self, order: int = 2, *, memory: float = 50.0, guesses: int = 3, limit: int = 4096) -> None:
        self._order = whole("order", order, 0, _SHOWN)
        self._frequencies = _Frequencies(self._contexts, memory=memory, guesses=guesses, limit=limit)

    def predict(self, call: Call) -> Sequence[Prediction]:
        """What followed the longest context seen before; nothing before the step's first result."""
        return self._frequencies.predict(call)

    def observe(self, call: Call, value: Any) -> None:
        """Count a result after each of its contexts."""
        self._frequencies.observe(call, value)

    def _contexts(self, call: Call) -> Sequence[tuple[int, Hashable]]:
        order = self._order
        keys: list[Hashable] = [key_of(value) for value in call.recent[-order:]] if order else []
        if len(keys) < order:
            keys.insert(0, _START)
        return [(len(keys) - start, tuple(keys[start:])) for start in range(len(keys) + 1)]


class ByArguments:
    """The results that equal arguments gave before, most frequent first.

    The confidence is how often guesses of the same rank and share of the counts were right lately. Memory: at most
    ``limit`` sets of arguments with at most 16 results each, for each of the last 1024 steps.

    Args:
        key: what has to be equal, given the call; None is all of its arguments. For example
            ``lambda call: call.arguments[0].customer``.
        memory: results after which one has faded to 1/e, for the same arguments; 1 is the last result only.
        guesses: most guesses to offer.
        limit: most sets of arguments kept per step; the one learned least recently is forgotten.

    Raises:
        InvalidSettingError: a setting is below 1.
    """

    def __init__(
        self,
        key: Callable[[Call], Any] | None = None,
        *,
        memory: float = 10.0,
        guesses: int = 3,
        limit: int = 4096,
    ) -> None:
        self._key = key
        self._frequencies = _Frequencies(self._contexts, memory=memory, guesses=guesses, limit=limit)

    def predict(self, call: Call) -> Sequence[Prediction]:
        """The results of equal calls; nothing for arguments never seen.

        Raises:
            UnsupportedValueError: an argument, or what ``key`` returned, cannot be encoded.
        """
        return self._frequencies.predict(call)

    def observe(self, call: Call, value: Any) -> None:
        """Count a result for its arguments."""
        self._frequencies.observe(call, value)

    def _contexts(self, call: Call) -> Sequence[tuple[int, Hashable]]:
        return ((0, arguments_key(call) if self._key is None else key_of(self._key(call))),)
