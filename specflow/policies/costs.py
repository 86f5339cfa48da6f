"""What a round costs, learned from the rounds themselves."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..errors import InvalidSettingError

_MOVED = 0.02
"""A median that moved by less than this fraction does not rebuild the curve: timing noise is larger than that."""
_CONFIRMED = 2
"""Observations from which on a width may raise the curve."""
_HARMLESS = 32
"""Widths up to this may be tried whatever is known."""


class CostTable:
    """Seconds of a phase as a function of its width, measured online.

    Each width keeps a small window of recent observations and is represented by their lower median, so that a stall
    in one round does not count. The medians are made non-decreasing in the width (pool adjacent violators, weighted
    by the number of observations) and joined by straight lines:

    * between two measured widths, interpolated;
    * above the largest one, continued with the last slope (slope 0 where only one width is known). That is optimistic
      on purpose: an unknown width must look affordable once, or it would never be measured;
    * below the smallest one, continued with the first slope, but never below half of the smallest measured cost.

    A width seen once is provisional: it may lower the curve but not raise it above what the confirmed widths say. First
    executions at a new shape are often slow (compilation, allocation) and must not put that width off for good.

    Args:
        window: observations kept per width.
        max_age: observations of a width older than this many observations of the whole table are dropped as soon as the
            width is seen again.

    Raises:
        InvalidSettingError: ``window`` or ``max_age`` is below 1.
    """

    __slots__ = ("_confirmed", "_curve", "_dense", "_max_age", "_medians", "_samples", "_stale", "_ticks", "_window")

    def __init__(self, window: int = 9, max_age: int = 512) -> None:
        for name, value in (("window", window), ("max_age", max_age)):
            if value < 1:
                raise InvalidSettingError(name, value, "an integer >= 1")
        self._window = window
        self._max_age = max_age
        self._ticks = 0
        self._samples: dict[int, deque[tuple[int, float]]] = {}
        self._medians: dict[int, float] = {}
        self._curve = _Curve([])
        self._dense: list[float] = []
        self._stale = False
        self._confirmed = 0

    def observe(self, width: int, seconds: float) -> None:
        """Take in one measurement. O(window log window); the curve is rebuilt only when it is next read.

        A measurement that is negative or not finite (a clock that jumped) is ignored.
        """
        if not 0.0 <= seconds < math.inf:
            return
        self._ticks = tick = self._ticks + 1
        samples = self._samples.get(width)
        if samples is None:
            samples = self._samples[width] = deque(maxlen=self._window)
        while samples and tick - samples[0][0] > self._max_age:
            samples.popleft()
        samples.append((tick, seconds))
        count = len(samples)
        if count >= _CONFIRMED and width > self._confirmed:
            self._confirmed = width
        median = sorted([value for _, value in samples])[(count - 1) // 2]
        before = self._medians.get(width)
        if before is None or count <= _CONFIRMED or abs(median - before) > _MOVED * before:
            self._medians[width] = median
            self._stale = True

    def seconds(self, width: int) -> float:
        """Estimated seconds at ``width``; 0.0 while nothing has been measured."""
        return self.curve(width)[width]

    def curve(self, upto: int) -> Sequence[float]:
        """Estimated seconds of every width from 0 to at least ``upto``, indexed by width. Read-only."""
        if self._stale:
            self._rebuild()
        dense = self._dense
        if len(dense) <= upto:
            dense.extend([self._curve.at(width) for width in range(len(dense), upto + 1)])
        return dense

    @property
    def reach(self) -> int:
        """The largest width that is worth trying: twice the largest confirmed one, and 32 at least.

        Beyond the measured widths the curve is optimistic. What that may cost in one round is bounded so.
        """
        return max(2 * self._confirmed, _HARMLESS)

    def multiples(self, width: int, count: int) -> list[float]:
        """Estimated seconds at 0, 1, 2, ... and ``count`` times a width."""
        if self._stale:
            self._rebuild()
        return [self._curve.at(width * factor) for factor in range(count + 1)]

    def samples(self, width: int) -> int:
        """How many observations represent ``width``."""
        samples = self._samples.get(width)
        return 0 if samples is None else len(samples)

    def is_grounded(self, width: int) -> bool:
        """True when the estimate at ``width`` does not rest on widths above it alone.

        That is: a width up to it has been confirmed, or two confirmed widths give the slope below the smallest one.
        """
        confirmed = 0
        for known, samples in self._samples.items():
            if len(samples) >= _CONFIRMED:
                confirmed += 1
                if known <= width or confirmed > 1:
                    return True
        return False

    def points(self) -> tuple[tuple[int, float], ...]:
        """The measured widths with their estimated seconds, in order of width."""
        return tuple((width, self.seconds(width)) for width in sorted(self._samples))

    def to_dict(self) -> dict[str, Any]:
        """Plain data (JSON-safe) from which :meth:`from_dict` rebuilds an equal table."""
        return {
            "window": self._window,
            "max_age": self._max_age,
            "confirmed": self._confirmed,
            "samples": {
                str(width): [value for _, value in samples] for width, samples in sorted(self._samples.items())
            },
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> CostTable:
        """Rebuild a table from :meth:`to_dict`.

        Raises:
            InvalidSettingError: the data is not what :meth:`to_dict` writes.
        """
        try:
            table = cls(window=int(data["window"]), max_age=int(data["max_age"]))
            observations = [
                (int(width), [float(value) for value in values]) for width, values in data["samples"].items()
            ]
            confirmed = int(data.get("confirmed", 0))
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise InvalidSettingError("data", data, "a mapping written by CostTable.to_dict()") from error
        for width, values in observations:
            for value in values:
                table.observe(width, value)
        table._confirmed = max(table._confirmed, confirmed)
        return table

    def _rebuild(self) -> None:
        counts = {width: len(samples) for width, samples in self._samples.items()}
        confirmed = _Curve(
            (width, self._medians[width], count) for width, count in counts.items() if count >= _CONFIRMED
        )
        points = []
        for width, count in counts.items():
            median = self._medians[width]
            if count < _CONFIRMED and confirmed.widths:
                median = min(median, confirmed.at(width))
            points.append((width, median, count))
        self._curve = _Curve(points)
        self._dense = []
        self._stale = False


class _Curve:
    """A non-decreasing, piecewise linear function through (width, seconds, weight) points."""

    __slots__ = ("values", "widths")

    def __init__(self, points: Iterable[tuple[int, float, int]]) -> None:
        ordered = sorted(points)
        self.widths = [width for width, _, _ in ordered]
        self.values = _isotonic([(value, weight) for _, value, weight in ordered])

    def at(self, width: int) -> float:
        widths, values = self.widths, self.values
        if not widths:
            return 0.0
        if len(widths) == 1:
            return values[0]
        index = bisect_left(widths, width)
        if index < len(widths) and widths[index] == width:
            return values[index]
        if index == 0:
            slope = (values[1] - values[0]) / (widths[1] - widths[0])
            return max(values[0] - slope * (widths[0] - width), 0.5 * values[0])
        left = min(index, len(widths) - 1) - 1
        slope = (values[left + 1] - values[left]) / (widths[left + 1] - widths[left])
        return values[left] + slope * (width - widths[left])


def _isotonic(points: Sequence[tuple[float, int]]) -> list[float]:
    """Non-decreasing values closest to (value, weight) points in weighted least squares: pool adjacent violators."""
    blocks: list[tuple[float, int, int]] = []
    for value, weight in points:
        block = (value, weight, 1)
        while blocks and blocks[-1][0] > block[0]:
            left_value, left_weight, left_size = blocks.pop()
            pooled = left_weight + block[1]
            block = ((left_value * left_weight + block[0] * block[1]) / pooled, pooled, left_size + block[2])
        blocks.append(block)
    return [value for value, _, size in blocks for _ in range(size)]
