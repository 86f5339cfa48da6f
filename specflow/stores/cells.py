"""What writes make of a value. Pure, and the same for every store and for the program's own view of its state.

Values stay encoded wherever possible: putting and deleting never look inside, and a chain of operations is decoded
and encoded once, however long it is.
"""

from __future__ import annotations

from collections.abc import Iterable
from decimal import Context, Decimal
from numbers import Number
from typing import Any

from ..codec import decode, encode
from ..errors import UnsupportedValueError
from ..history import Operation, Write

_ARITHMETIC = Context(prec=100, traps=[])
"""Decimal numbers are added in one context, whatever the calling thread has set: a replay gives the same digits."""

_UNREAD = object()
"""Stands for a value that nobody needed to decode so far."""


def apply(previous: bytes | None, write: Write) -> bytes | None:
    """Encoded value of a key after one write.

    Use :func:`fold` for several writes: a list that grows by ``n`` items is then encoded once instead of ``n`` times.

    Args:
        previous: encoded value before; None for a missing key.
        write: what happens to it.

    Returns:
        Encoded value, or None when the key is missing afterwards.

    Raises:
        UnsupportedValueError: the operation does not fit the value (appending to a str); names the key.
        DecodingError: the stored bytes do not give a value.
    """
    return fold(write.key, previous, ((write.operation, write.data),))


def fold(key: str, previous: bytes | None, operations: Iterable[tuple[Operation, bytes]]) -> bytes | None:
    """Encoded value of a key after operations on it, in order.

    ``ADD`` starts from 0, ``APPEND`` from an empty list and ``UNION`` from an empty set where the key is missing.

    Args:
        key: named in errors.
        previous: encoded value before; None for a missing key.
        operations: each with its encoded operand.

    Returns:
        Encoded value, or None when the key is missing afterwards.

    Raises:
        UnsupportedValueError: an operation does not fit the value (appending to a str); names the key.
        DecodingError: the stored bytes do not give a value.
    """
    where = f"state {key!r}"
    encoded, value = previous, _UNREAD
    for operation, data in operations:
        if operation is Operation.PUT:
            encoded, value = data, _UNREAD
        elif operation is Operation.DELETE:
            encoded, value = None, _UNREAD
        else:
            if value is _UNREAD:
                value = _start(operation) if encoded is None else decode(encoded, where)
            value = _combine(where, operation, value, decode(data, where))
    return encoded if value is _UNREAD else encode(value, where)


def _start(operation: Operation) -> Any:
    if operation is Operation.ADD:
        return 0
    return [] if operation is Operation.APPEND else set()


def _combine(where: str, operation: Operation, value: Any, operand: Any) -> Any:
    """The value with the operand worked in. ``value`` was decoded here, so it may be changed in place."""
    if operation is Operation.APPEND and isinstance(value, list):
        value.append(operand)
        return value
    if operation is Operation.UNION and isinstance(value, set | frozenset) and isinstance(operand, set | frozenset):
        value |= operand
        return value
    if operation is Operation.ADD and _is_number(value) and _is_number(operand):
        try:
            if isinstance(value, Decimal) or isinstance(operand, Decimal):
                return _ARITHMETIC.add(value, operand)
            return value + operand
        except (TypeError, OverflowError):
            pass  # float and Decimal do not mix, nor a float and an int beyond its range
    needed = {Operation.ADD: "numbers of one kind", Operation.APPEND: "a list", Operation.UNION: "a set of items"}
    raise UnsupportedValueError(
        where,
        f"{type(value).__name__}, and {operation.value} was asked with {type(operand).__name__}",
        f"{operation.value} needs {needed[operation]} there",
    )


def _is_number(value: object) -> bool:
    return isinstance(value, Number) and not isinstance(value, bool)


__all__ = ["apply", "fold"]
