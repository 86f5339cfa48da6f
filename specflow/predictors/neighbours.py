"""Prediction by similarity: what arguments like these gave before."""

from __future__ import annotations

import heapq
import math
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ..speculation import Call, Prediction
from .memory import STEPS, Bounded, HitRates, Kept, Key, at_least, ranked, whole


@dataclass(frozen=True, slots=True)
class _Point:
    """A call that returned."""

    features: tuple[float, ...]
    value: Kept


@dataclass(frozen=True, slots=True)
class _Votes:
    """A result that neighbours had."""

    value: Kept
    count: int
    share: float
    """By Laplace's rule with one more result for all unseen ones."""


class _Table:
    """What is known of one step."""

    __slots__ = ("points", "rates")

    def __init__(self, memory: float, limit: int) -> None:
        self.points: deque[_Point] = deque(maxlen=limit)
        self.rates = HitRates(memory)


class NearestNeighbour:
    """The result that the most similar calls had, by majority (Cover and Hart 1967, "Nearest Neighbor Classification").

    Similarity is Euclidean distance between features, so scale them as they matter. The confidence is how often guesses
    of the same rank and number of votes were right lately. Memory: ``limit`` calls for each of the last 1024 steps; a
    guess looks at all calls kept of its step, about 0.3 microseconds each.

    Args:
        features: called with the step's arguments; returns numbers, always as many, and may not change anything. A call
            with a feature that is not finite is passed.
        k: how many neighbours vote.
        memory: guesses after which one has faded to 1/e in the confidence.
        guesses: most guesses to offer, by votes.
        limit: newest calls kept per step.

    Raises:
        InvalidSettingError: a setting is below 1.
    """

    def __init__(
        self,
        features: Callable[..., Sequence[float]],
        k: int = 5,
        *,
        memory: float = 50.0,
        guesses: int = 3,
        limit: int = 256,
    ) -> None:
        self._features = features
        self._k = whole("k", k, 1)
        self._memory: float = at_least("memory", memory, 1.0)
        self._guesses = whole("guesses", guesses, 1)
        self._limit = whole("limit", limit, 1)
        self._tables: Bounded[str, _Table] = Bounded(STEPS)
        self._lock = threading.Lock()

    def predict(self, call: Call) -> Sequence[Prediction]:
        """The neighbours' results; nothing before the step's first."""
        table = self._tables.get(call.step)
        if table is None:
            return ()
        votes = self._votes(table, self._place(call))
        claims = [table.rates.rate((rank, vote.count), vote.share) for rank, vote in enumerate(votes)]
        return ranked([vote.value for vote in votes], claims)

    def observe(self, call: Call, value: Any) -> None:
        """Keep a call and its result, and score the guesses that were due."""
        place = self._place(call)
        if not place:
            return
        kept = Kept(value)
        with self._lock:
            table = self._tables.touch(call.step, lambda: _Table(self._memory, self._limit))
            for rank, vote in enumerate(self._votes(table, place)):
                table.rates.record((rank, vote.count), hit=vote.value.key == kept.key)
            table.points.append(_Point(place, kept))

    def _place(self, call: Call) -> tuple[float, ...]:
        """The call's features; empty if they are of no use."""
        place = tuple(map(float, self._features(*call.arguments, **call.keywords)))
        return place if all(map(math.isfinite, place)) else ()

    def _votes(self, table: _Table, place: tuple[float, ...]) -> list[_Votes]:
        if not place:
            return []
        points = list(table.points)  # a copy: another run may add to them meanwhile
        points.reverse()  # the newest of equally near calls is found first
        near = heapq.nsmallest(
            self._k,
            (point for point in points if len(point.features) == len(place)),
            key=lambda point: math.dist(point.features, place),
        )
        counts: dict[Key, int] = {}
        values: dict[Key, Kept] = {}
        for point in near:
            counts[point.value.key] = counts.get(point.value.key, 0) + 1
            values.setdefault(point.value.key, point.value)
        whole = len(near) + len(counts) + 1
        # Sorting is stable: among equally many votes the nearest call counts.
        winners = sorted(counts, key=lambda key: -counts[key])[: self._guesses]
        return [_Votes(values[key], counts[key], (counts[key] + 1) / whole) for key in winners]
