"""What predictors remember: keys and copies of any value, tables that stay small, hit rates that fade.

Reading never changes anything here, so that a prediction made in a world that is squashed leaves no trace. Writers
replace whole entries and never change one in place: a predictor that guards its writing by a lock can be read from
any thread without one.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Awaitable, Callable, Hashable, Sequence
from enum import Enum
from itertools import accumulate
from typing import Any, Final, Generic, TypeVar

from ..codec import Box, digest
from ..errors import InvalidSettingError
from ..speculation import Call, Prediction

KeyT = TypeVar("KeyT", bound=Hashable)
ItemT = TypeVar("ItemT")

Ask = Callable[[Call], Sequence[Prediction] | Awaitable[Sequence[Prediction]]]
"""The ``predict`` of a predictor. Where it is known beforehand that it has to be awaited it is a coroutine function."""

Key = Hashable
"""Stands for a value of any type: keys are equal exactly when the values' canonical forms are."""

_PLAIN: Final = frozenset({str, int, bool, bytes, type(None)})
"""Types whose values are their own key and their own copy. Floats are not: 0.0 == -0.0, and nan != nan."""


def key_of(value: Any) -> Key:
    """The key of a value.

    Raises:
        UnsupportedValueError: the value cannot be encoded.
    """
    kind = type(value)
    if kind in _PLAIN:
        return (kind, value)  # the type keeps True and 1 apart
    if isinstance(value, Enum) and type(value._value_) in _PLAIN:
        return (kind, value._value_)  # a decision is often an enum, and a digest takes ten times as long
    return digest(value)


def arguments_key(call: Call) -> Key:
    """The key of a call's arguments. Keywords may come in any order; ``f(1)`` and ``f(a=1)`` are told apart.

    Raises:
        UnsupportedValueError: an argument cannot be encoded.
    """
    keywords = call.keywords
    return (
        tuple(map(key_of, call.arguments)),
        tuple((name, key_of(keywords[name])) for name in sorted(keywords)),
    )


def place_key(call: Call) -> Key:
    """The key of one call of one program: step, position and arguments.

    Raises:
        UnsupportedValueError: an argument cannot be encoded.
    """
    return (call.step, call.position, arguments_key(call))


class Kept:
    """A value that nobody else can change, and its key.

    Raises:
        UnsupportedValueError: the value cannot be encoded.
    """

    __slots__ = ("_held", "_is_plain", "key")

    def __init__(self, value: Any) -> None:
        self.key = key_of(value)
        self._is_plain = type(value) in _PLAIN
        self._held: Any = value if self._is_plain else Box(value)

    def copy(self) -> Any:
        """The value, shared with nobody."""
        return self._held if self._is_plain else self._held.fresh()


def copy_of(value: Any) -> Any:
    """A value equal to ``value`` in canonical form, shared with nobody.

    Raises:
        UnsupportedValueError: the value cannot be encoded.
    """
    return value if type(value) in _PLAIN else Box(value).fresh()


def at_least(setting: str, value: Any, least: float) -> Any:
    """Check a setting.

    Raises:
        InvalidSettingError: ``value`` is not a number that is ``least`` or more.
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not value >= least:
        raise InvalidSettingError(setting, value, f"a number >= {least}")
    return value


def whole(setting: str, value: Any, least: int, most: int | None = None) -> int:
    """Check a setting that counts something.

    Raises:
        InvalidSettingError: ``value`` is not an integer from ``least`` to ``most``.
    """
    if type(value) is not int or value < least or (most is not None and value > most):
        wanted = f"an integer >= {least}" if most is None else f"an integer in [{least}, {most}]"
        raise InvalidSettingError(setting, value, wanted)
    return value


def check_predictor(setting: str, value: Any) -> None:
    """See that something is a predictor, not a class of them, say.

    Raises:
        InvalidSettingError: it is not.
    """
    if isinstance(value, type) or not callable(getattr(value, "predict", None)):
        raise InvalidSettingError(setting, value, "an object with predict(), for example LastValue()")


class Bounded(Generic[KeyT, ItemT]):
    """A table of at most ``limit`` items. The item written least recently has to go; reading is not writing.

    Raises:
        InvalidSettingError: ``limit`` is below 1.
    """

    __slots__ = ("_items", "_limit")

    def __init__(self, limit: int) -> None:
        self._limit = whole("limit", limit, 1)
        self._items: OrderedDict[KeyT, ItemT] = OrderedDict()

    def __len__(self) -> int:
        return len(self._items)

    def get(self, key: KeyT) -> ItemT | None:
        """The item, if there is one."""
        return self._items.get(key)

    def put(self, key: KeyT, item: ItemT) -> None:
        """Write an item."""
        self._items[key] = item
        self._items.move_to_end(key)
        if len(self._items) > self._limit:
            self._items.popitem(last=False)

    def pop(self, key: KeyT) -> ItemT | None:
        """Take an item out, if there is one."""
        return self._items.pop(key, None)

    def touch(self, key: KeyT, make: Callable[[], ItemT]) -> ItemT:
        """The item to write to, made anew if it is missing."""
        item = self._items.get(key)
        if item is None:
            item = make()
        self.put(key, item)
        return item


_UNSEEN: Final = (0.0, 0.0, 0)

STEPS: Final = 1024
"""Most steps that one predictor keeps a table for."""


class HitRates:
    """How often guesses made in one state were right lately.

    The estimate is that of a Beta distribution: ``(hits + 2 * prior) / (guesses + 2)``, with counts that fade as new
    guesses are resolved. A prior of 1/2 is Laplace's rule of succession. The result lies strictly between 0 and 1 when
    the prior does.

    Args:
        memory: guesses after which one has faded to 1/e.
        limit: most states told apart; the one seen first is forgotten.

    Raises:
        InvalidSettingError: ``memory`` or ``limit`` is below 1.
    """

    __slots__ = ("_counts", "_keep", "_limit")

    def __init__(self, memory: float, limit: int = 4096) -> None:
        self._keep = 1.0 - 1.0 / at_least("memory", memory, 1.0)
        self._limit = whole("limit", limit, 1)
        self._counts: dict[Hashable, tuple[float, float, int]] = {}

    def rate(self, state: Hashable, prior: float = 0.5) -> float:
        """Estimated probability that a guess made in ``state`` is right; ``prior`` before any was."""
        hits, guesses, _ = self._counts.get(state, _UNSEEN)
        return (hits + 2.0 * prior) / (guesses + 2.0)

    def resolved(self, state: Hashable) -> int:
        """How many guesses made in ``state`` were resolved, faded ones included."""
        return self._counts.get(state, _UNSEEN)[2]

    def record(self, state: Hashable, *, hit: bool) -> None:
        """A guess made in ``state`` was resolved."""
        hits, guesses, resolved = self._counts.get(state, _UNSEEN)
        self._counts[state] = (hits * self._keep + hit, guesses * self._keep + 1.0, resolved + 1)
        if len(self._counts) > self._limit:
            del self._counts[next(iter(self._counts))]


def ranked(values: Sequence[Kept], claims: Sequence[float]) -> list[Prediction]:
    """Predictions of one result.

    Args:
        values: different values, likeliest first.
        claims: how likely each is, by itself. The order of the values stands: where a later one claims more, it gets no
            more than the one before. At most one value can be right, so claims that add up to more than 1 are scaled
            down together.
    """
    confidences = list(accumulate(claims, min))
    total = sum(confidences)
    scale = 1.0 / total if total > 1.0 else 1.0
    return [Prediction(value.copy(), confidence * scale) for value, confidence in zip(values, confidences, strict=True)]
