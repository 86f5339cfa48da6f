"""When two values are equal: when their encodings are, or differ only in what the caller does not care about."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from types import NoneType
from typing import Any

from .reading import revive, tree_of
from .writing import dump, encode

Couples = list[tuple[Any, Any]]
"""Pairs of trees that have to be alike."""

_COMPARED_DIRECTLY = frozenset({NoneType, bool, int, str, bytes})
"""Equal encodings mean equal values, and the other way round."""
_NUMBER_TAGS = frozenset({"$int", "$Decimal", "$Fraction", "$complex"})


def digest(value: Any) -> str:
    """Fingerprint of a value: 32 hexadecimal digits (BLAKE2b, RFC 7693), the same in every process.

    Raises:
        UnsupportedValueError: as :func:`specflow.codec.encode`.
    """
    return hashlib.blake2b(encode(value), digest_size=16).hexdigest()


def equal(
    left: Any,
    right: Any,
    *,
    ignore_order: bool = False,
    fields_only: bool = False,
    close: Callable[[Any, Any], bool] | None = None,
) -> bool:
    """Whether two values have the same encoding: the same types and content all the way down.

    NaN equals NaN; 1, 1.0 and True differ, and so do 0.0 and -0.0; sets are equal by content. The order of a dictionary
    counts, because a program can see it.

    Args:
        left: one value.
        right: the other.
        ignore_order: let the order of dictionaries, Counters and defaultdicts differ.
        fields_only: of pydantic models compare fields and extra fields, not which of them were set explicitly, nor
            private attributes.
        close: numbers of one type are also equal when this says so, wherever they stand except in sets and as keys.

    Raises:
        UnsupportedValueError: as :func:`specflow.codec.encode`; not where the types differ already.
    """
    kind = type(left)
    if kind is not type(right):
        return False
    if kind in _COMPARED_DIRECTLY:
        same: bool = left == right
        if same or close is None or kind is not int:
            return same
    one, other = encode(left), encode(right)
    if one == other:
        return True
    if not ignore_order and not fields_only and close is None:
        return False
    return _Comparison(ignore_order, fields_only, close).alike(tree_of(one), tree_of(other))


@dataclass(frozen=True, slots=True)
class _Comparison:
    """Compares the JSON of two encodings."""

    ignore_order: bool
    fields_only: bool
    close: Callable[[Any, Any], bool] | None

    def alike(self, left: Any, right: Any) -> bool:
        """Whether nothing differs but what may."""
        pending: Couples = [(left, right)]
        while pending:
            one, other = pending.pop()
            couples = self._inside(one, other) if type(one) is type(other) else None
            if couples is None:
                return False
            pending.extend(couples)
        return True

    def _inside(self, one: Any, other: Any) -> Couples | None:
        """What has to be alike inside two trees of one type for them to be alike; None when they differ already."""
        if type(one) is list:
            return list(zip(one, other, strict=True)) if len(one) == len(other) else None
        if type(one) is not dict:
            same = dump(one) == dump(other) or (type(one) in (int, float) and self._is_close(one, other))
            return [] if same else None
        tag = _tag(one)
        if tag != _tag(other):
            return None
        if tag is None:
            return self._in_objects(one, other)
        if tag in _NUMBER_TAGS:
            same = dump(one) == dump(other) or self._is_close(one, other)
            return [] if same else None
        return self._in_bodies(tag, one[tag], other[tag])

    def _is_close(self, one: Any, other: Any) -> bool:
        return self.close is not None and self.close(revive(dump(one)), revive(dump(other)))

    def _in_objects(self, one: dict[str, Any], other: dict[str, Any]) -> Couples | None:
        if one.keys() != other.keys() or (not self.ignore_order and list(one) != list(other)):
            return None
        return [(item, other[name]) for name, item in one.items()]

    def _in_bodies(self, tag: str, one: Any, other: Any) -> Couples | None:
        couples: Couples | None
        match tag:
            case "$tuple":
                couples = [(one, other)]
            case "$dict" | "$Counter":
                couples = _in_pairs(one, other, ignore_order=self.ignore_order)
            case "$OrderedDict":
                couples = _in_pairs(one, other, ignore_order=False)
            case "$defaultdict" if one[0] == other[0]:
                couples = _in_pairs(one[1], other[1], ignore_order=self.ignore_order)
            case "$deque" if one[1] == other[1]:
                couples = [(one[0], other[0])]
            case "$model" if one[0] == other[0] and self.fields_only:
                extras = [body[3].get("extra") if len(body) > 3 else None for body in (one, other)]
                couples = [(one[1], other[1]), (extras[0], extras[1])]
            case "$model" | "$dataclass" | "$namedtuple" if one[0] == other[0]:
                couples = [(one[1:], other[1:])]
            case _:
                couples = [] if dump(one) == dump(other) else None
        return couples


def _tag(tree: dict[str, Any]) -> str | None:
    if len(tree) != 1:
        return None
    (name,) = tree
    return name if name.startswith("$") else None


def _in_pairs(one: list[Any], other: list[Any], *, ignore_order: bool) -> Couples | None:
    left = [(dump(key), item) for key, item in one]
    right = [(dump(key), item) for key, item in other]
    if ignore_order:
        left.sort(key=lambda pair: pair[0])
        right.sort(key=lambda pair: pair[0])
    if [key for key, _ in left] != [key for key, _ in right]:
        return None
    return [(item, twin) for (_, item), (_, twin) in zip(left, right, strict=True)]
