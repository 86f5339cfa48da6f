"""A value that many may read and nobody can change."""

from __future__ import annotations

import reprlib
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from enum import Enum
from fractions import Fraction
from types import NoneType
from typing import Any
from uuid import UUID
from zoneinfo import ZoneInfo

from .reading import decode
from .refusals import ABSENT
from .writing import PATHS, encode

_ALWAYS_ENCODABLE = frozenset({NoneType, bool, int, float, complex, str, bytes})
"""Immutable, and encoding them cannot fail."""
_IMMUTABLE = _ALWAYS_ENCODABLE | {
    range, datetime, date, time, timedelta, timezone, ZoneInfo, Decimal, Fraction, UUID, *PATHS,
}  # fmt: skip


def _is_immutable(value: Any) -> bool:
    """Whether an encodable value can be shared because nobody can change it."""
    kind = type(value)
    if kind in _IMMUTABLE:
        return True
    if kind is tuple or kind is frozenset:
        return all(map(_is_immutable, value))
    return isinstance(value, Enum)


class Box:
    """A value that nobody can change: its bytes, and a copy for everybody who asks.

    Args:
        value: what to keep. It is encoded at once, unless it can neither change nor be refused.
        where: what the value is, for messages.

    Raises:
        UnsupportedValueError: as :func:`specflow.codec.encode`.
    """

    __slots__ = ("_data", "_value", "_where")

    _data: bytes | None
    _value: Any

    def __init__(self, value: Any, where: str = "value") -> None:
        self._where = where
        if type(value) in _ALWAYS_ENCODABLE:
            self._value = value
            self._data = None
        else:
            self._data = encode(value, where)
            self._value = value if _is_immutable(value) else ABSENT

    @classmethod
    def from_bytes(cls, data: bytes, where: str = "value") -> Box:
        """A box of a value that is encoded already; it is decoded when it is asked for."""
        box = cls(None, where)
        box._data = data
        box._value = ABSENT
        return box

    @property
    def data(self) -> bytes:
        """The encoded value."""
        if self._data is None:
            self._data = encode(self._value, self._where)
        return self._data

    def fresh(self) -> Any:
        """The value, as a copy that shares nothing with any other; values that cannot change are not copied.

        Raises:
            DecodingError: as :func:`specflow.codec.decode`.
        """
        if self._value is not ABSENT:
            return self._value
        value = decode(self.data, self._where)
        if _is_immutable(value):
            self._value = value
        return value

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Box):
            return NotImplemented
        return self.data == other.data

    def __hash__(self) -> int:
        return hash(self.data)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as bytes."""
        return Box.from_bytes, (self.data, self._where)

    def __repr__(self) -> str:
        return f"Box.from_bytes({reprlib.repr(self.data)})"
